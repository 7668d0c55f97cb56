// results.csv of any content, beside sound selections, is compared with a sound one.
#include <fuzzer/FuzzedDataProvider.h>

#include <fstream>

#include "analysis/compare_runs.h"
#include "analysis/csv.h"
#include "analysis/results.h"
#include "small_run.h"
#include "survival.h"

namespace kvreplay {
namespace {

struct Sound {
  OwnFolder folder;
  Sound() {
    write_small_run(folder / "");
    std::filesystem::create_directories(folder / "hostile");
    std::filesystem::copy_file(folder / "sound/selections.h5", folder / "hostile/selections.h5");
  }
};

}  // namespace
}  // namespace kvreplay

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvreplay;
  static const Sound sound;
  FuzzedDataProvider bytes(data, size);
  const bool has_header = bytes.ConsumeBool();
  std::string text = bytes.ConsumeRemainingBytesAsString();
  survives([&] {
    for (const std::vector<std::string>& line : parse_csv("text", text)) {
      const std::vector<std::vector<std::string>> same = {line};
      require(parse_csv("line", csv_line(line)) == same, "a line that does not read back");
    }
  });
  if (has_header) text.insert(0, csv_line({result_columns().begin(), result_columns().end()}));
  std::ofstream(sound.folder / "hostile/results.csv", std::ios::binary | std::ios::trunc) << text;
  survives([&] { compare_runs(sound.folder / "sound", sound.folder / "hostile", 0.25); });
  return 0;
}
