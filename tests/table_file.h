// Arrays as NumPy writes them, in files that go with the test.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace kvreplay {

/// A file of this process, gone with the object.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& bytes)
      : path_(std::filesystem::temp_directory_path() /
              ("kvreplay-table-" + std::to_string(::getpid()) + "-" + std::to_string(next_++) + ".npy")) {
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  static inline int next_ = 0;
  std::filesystem::path path_;
};

template <class T>
std::string numbers(const std::vector<T>& all) {
  return {reinterpret_cast<const char*>(all.data()), all.size() * sizeof(T)};
}

/// As NumPy writes it.
inline std::string npy(const std::string& dictionary, const std::string& data, int version = 1) {
  std::string header = dictionary + std::string(20, ' ') + "\n";
  std::string text = "\x93NUMPY";
  text += static_cast<char>(version);
  text += '\0';
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) text += static_cast<char>(header.size() >> (8 * i) & 0xFF);
  return text + header + data;
}

inline std::string dictionary(const std::string& type, const std::string& shape, const std::string& fortran = "False") {
  return "{'descr': '" + type + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }";
}

}  // namespace kvreplay
