// Tables that a user gives a policy as files: NumPy's .npy, the one format of arrays that everybody can write.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "policies/policy.h"

namespace kvreplay {

/// An array as a file has it.
struct Array {
  std::vector<int> shape;
  std::vector<double> numbers;  // in C order; every one is finite
  Source source;                // of the file, with its content hash
};

/// Reads a .npy file (version 1 to 3) of little-endian float32 or float64 in C order. Throws Error{input} that says
/// what was expected and what was found; nothing is believed that the file's length does not bear out.
Array read_array(const std::string& path);

/// A parameter that names such a file, or a word that stands for something else.
class ArrayFile {
 public:
  explicit ArrayFile(std::string word) : text_(std::move(word)), word_(text_) {}

  /// Reads the file where one is named.
  void parameter(Parameters& p, std::string name, std::string help);
  bool is_file() const { return text_ != word_; }
  /// Of the file, whose result it enters by its hash; none: the word.
  std::vector<Source> sources() const;
  /// Throws Error{input} unless a file is named and has this shape; `shape` says it in words, as "[L, Hq]".
  const Array& of_shape(const std::string& who, const std::vector<int>& sizes, std::string_view shape) const;

 private:
  std::string text_, word_;
  std::shared_ptr<const Array> array_ = {};
};

}  // namespace kvreplay
