// Selections whose contents are hostile are compared with sound ones and with themselves.
#include "analysis/compare_runs.h"
#include "hostile_file.h"
#include "small_run.h"
#include "survival.h"

namespace kvreplay {
namespace {

struct Sound {
  OwnFolder folder;
  RunRequest request = write_small_run(folder / "");
  HostileFile selections{folder / "sound/selections.h5"};
};

}  // namespace
}  // namespace kvreplay

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvreplay;
  static const Sound sound;
  const std::filesystem::path hostile = sound.folder / "hostile.h5", other = sound.folder / "sound/selections.h5";
  FuzzedDataProvider bytes(data, size);
  sound.selections.write(bytes, hostile);
  survives([&] { compare_runs(other, hostile); });
  survives([&] { compare_runs(hostile, other, 0.5); });
  survives([&] { compare_runs(hostile, hostile); });
  return 0;
}
