// A file of cells whose contents are hostile is read, its results are assembled and compared, and a run goes on from
// it.
#include "analysis/compare_runs.h"
#include "analysis/trace_cells.h"
#include "hostile_file.h"
#include "small_run.h"
#include "survival.h"

namespace kvreplay {
namespace {

struct Sound {
  OwnFolder folder;
  RunRequest request = write_small_run(folder / "");
  HostileFile cells{folder / "sound/cells/small.h5"};

  Sound() {
    std::filesystem::create_directories(folder / "hostile/cells");
    request.output = folder / "hostile";
  }
};

}  // namespace
}  // namespace kvreplay

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvreplay;
  static const Sound sound;
  const std::filesystem::path path = sound.folder / "hostile/cells/small.h5";
  FuzzedDataProvider bytes(data, size);
  sound.cells.write(bytes, path);
  survives([&] {
    const TraceCells all = read_trace_cells(path);
    for (const CellRecord& cell : all.cells) survives([&] { read_selections(path, cell.id, all.trace); });
  });
  survives([&] { assemble(sound.folder / "hostile", Detail::head); });
  survives([&] { compare_runs(sound.folder / "sound", sound.folder / "hostile", 0.5); });
  survives([&] { compare_runs(path, path); });
  survives([&] { PlannedRun(sound.request).traces(); });
  return 0;
}
