// Tables that policies read from .npy files.
#include "policies/text/array_file.h"
#include "survival.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvreplay;
  static const OwnFolder folder;
  survives([&] { read_array(folder.with("table.npy", {data, size}).string()); });
  return 0;
}
