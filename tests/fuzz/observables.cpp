// A file of stored observables whose contents are hostile is listed, read, and written anew from what is sound in it.
#include "hostile_file.h"
#include "replay/stored_observables.h"
#include "small_run.h"
#include "survival.h"

namespace kvreplay {
namespace {

struct Sound {
  OwnFolder folder;
  RunRequest request = write_small_run(folder / "");
  HostileFile file{folder / "small.obs.h5"};
  Trace trace = Trace::open(folder / "small.h5");
  StoredEntry entry = list_observables(folder / "small.obs.h5").at(0);
};

}  // namespace
}  // namespace kvreplay

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvreplay;
  static const Sound sound;
  const std::filesystem::path path = sound.folder / "small.obs.h5";
  FuzzedDataProvider bytes(data, size);
  sound.file.write(bytes, path);
  is_observables_file(path);
  survives([&] { list_observables(path); });
  const bool keeps = bytes.ConsumeBool();
  StoredObservables stored(sound.trace, sound.entry.key, keeps);
  for (const auto& [observable, layers] : sound.entry.layers)
    for (const int layer : layers) {
      stored.find(observable, layer, 4, 20);
      stored.keep(observable, layer, Matrix(4, 20));
    }
  stored.finish();
  if (keeps && stored.warnings().empty()) list_observables(path);
  return 0;
}
