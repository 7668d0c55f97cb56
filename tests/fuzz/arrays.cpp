// Tables that policies read from .npy files.
#include <cstdint>
#include <fstream>

#include "policies/parts/array_file.h"
#include "survival.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvreplay;
  static const OwnFolder folder;
  const std::filesystem::path path = folder / "table.npy";
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  survives([&] { read_array(path.string()); });
  return 0;
}
