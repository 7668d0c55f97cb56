// A table of any content is parsed, and each of its lines reads back.
#include <fuzzer/FuzzedDataProvider.h>

#include "analysis/csv.h"
#include "survival.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvreplay;
  FuzzedDataProvider bytes(data, size);
  const std::string text = bytes.ConsumeRemainingBytesAsString();
  survives([&] {
    for (const std::vector<std::string>& line : parse_csv("text", text)) {
      const std::vector<std::vector<std::string>> same = {line};
      require(parse_csv("line", csv_line(line)) == same, "a line that does not read back");
    }
  });
  return 0;
}
