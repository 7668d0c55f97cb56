// A part of a run whose contents are hostile is read, its results are assembled and compared, and a run goes on from
// it.
#include "analysis/compare_runs.h"
#include "analysis/part.h"
#include "hostile_file.h"
#include "small_run.h"
#include "survival.h"

namespace kvreplay {
namespace {

struct Sound {
  OwnFolder folder;
  RunRequest request = write_small_run(folder / "");
  HostileFile part{folder / "sound/parts/small.h5"};

  Sound() {
    std::filesystem::create_directories(folder / "hostile/parts");
    request.output = folder / "hostile";
  }
};

}  // namespace
}  // namespace kvreplay

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvreplay;
  static const Sound sound;
  const std::filesystem::path path = sound.folder / "hostile/parts/small.h5";
  FuzzedDataProvider bytes(data, size);
  sound.part.write(bytes, path);
  survives([&] {
    const Part part = read_part(path);
    for (const PartCell& cell : part.cells) survives([&] { read_selections(path, cell.id, part.trace); });
  });
  if (survives([&] { assemble(sound.folder / "hostile", Detail::head); }))
    survives([&] { compare_runs(sound.folder / "sound", sound.folder / "hostile"); });
  survives([&] { plan_run(sound.request); });
  return 0;
}
