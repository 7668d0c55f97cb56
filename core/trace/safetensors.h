// Files in the safetensors format: the length of a header, the header in JSON, the elements of all tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "hdf5/mapping.h"
#include "open_file.h"

namespace kvreplay {

struct SafeTensor {
  std::string name;
  std::string dtype;  // as the file names it: F16, BF16, F32, I64 ...
  std::vector<std::uint64_t> shape;
  std::uint64_t offset = 0;  // of its first byte in the file
  std::uint64_t bytes = 0;
};

/// The header of a file, checked as the format's reference implementation does (huggingface/safetensors, README.md,
/// "Format"): tensors lie one behind the other from the end of the header to the end of the file.
class SafetensorsFile {
 public:
  /// Throws Error{input} that names the file and the tensor.
  explicit SafetensorsFile(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  /// In the order of their bytes.
  const std::vector<SafeTensor>& tensors() const { return tensors_; }
  /// Texts that the writer added under `__metadata__`.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  /// The file's bytes. Throws Error{input} if it is not the one whose header was read.
  Mapping map() const;

 private:
  std::filesystem::path path_;
  FileIdentity identity_;
  std::vector<SafeTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace kvreplay
