// A trace whose contents are hostile is opened, and what opens is read to its last number.
#include "hostile_file.h"
#include "replay/replay.h"
#include "small_trace.h"
#include "survival.h"
#include "trace/trace.h"
#include "trace/validate.h"

namespace kvreplay {
namespace {

struct Sound {
  OwnFolder folder;
  HostileFile file{made(folder / "sound.h5")};

  static std::filesystem::path made(const std::filesystem::path& path) {
    write_small_trace(path, small_trace_tokens / 2);
    return path;
  }
};

void read_all(const std::filesystem::path& path) {
  const Trace trace = Trace::open(path);
  trace.hash();
  validate_deep(trace);
  for (int l = 0; l < trace.header().layers; ++l) {
    trace.prefetch(l);
    trace.query_positions(l);
    trace.tensors(l);
    trace.release(l);
  }
  for (const char* queries : {"continuation", "last:2", "span:context", "all", "stride:3"})
    survives([&] { eval_queries(trace, queries); });
  for (const char* tokens : {"prompt", "3", "span:question"})
    survives([&] { marked_question(trace, boundary(trace, tokens)); });
  treated_layers(trace, false);
}

}  // namespace
}  // namespace kvreplay

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvreplay;
  static const Sound sound;
  const std::filesystem::path path = sound.folder / "hostile.h5";
  FuzzedDataProvider bytes(data, size);
  sound.file.write(bytes, path);
  survives([&] { read_all(path); });
  return 0;
}
