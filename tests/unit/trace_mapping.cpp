// What of a trace is mapped, and that limits and hints change no byte of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "error.h"
#include "hash.h"
#include "trace/synth.h"
#include "trace/trace.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

class TraceMapping : public TraceFiles {
 protected:
  TraceMapping() { synthesise(options(), file("a.h5")); }

  static SynthOptions options() {
    SynthOptions made = synth_defaults("gaussian");
    made.prefill = 4000;
    return made;
  }
  static std::vector<std::byte> bytes_of(const TensorView& view) { return {view.data, view.data + view.bytes()}; }
};

TEST_F(TraceMapping, ALayerIsMappedNotCopied) {
  const Trace trace = Trace::open(file("a.h5"));
  // 8 + 2 + 2 heads of 4,032 tokens and 64 float16 numbers.
  EXPECT_EQ(trace.mapped_bytes(1), std::size_t{12} * 4032 * 64 * 2);
  EXPECT_EQ(trace.archived_bytes(1), 0U);
}

TEST_F(TraceMapping, LimitsAndHintsChangeNothing) {
  const Trace plain = Trace::open(file("a.h5"));
  for (const std::size_t limit : {std::size_t{1}, plain.mapped_bytes(0) + 5000, 3 * plain.mapped_bytes(0)}) {
    Trace trace = Trace::open(file("a.h5"));
    trace.limit_mapped(limit);
    for (int l = 0; l < 4; ++l) {
      if (l + 1 < 4) trace.prefetch(l + 1, l % 2 == 0);
      const LayerTensors layer = trace.layer(l), expected = plain.layer(l);
      trace.release(l);
      EXPECT_EQ(bytes_of(layer.q), bytes_of(expected.q));
      EXPECT_EQ(bytes_of(layer.k), bytes_of(expected.k));
      EXPECT_EQ(bytes_of(layer.v), bytes_of(expected.v));
    }
    EXPECT_EQ(trace.hash(), plain.hash());
  }
}

TEST_F(TraceMapping, BytesThatHaveGoneAreZerosAndTheChangeIsToldOf) {
  const Trace trace = Trace::open(file("a.h5"));
  const LayerTensors first = trace.layer(0), last = trace.layer(3);
  const std::vector<std::byte> before = bytes_of(first.k);
  trace.release(3);
  std::filesystem::resize_file(file("a.h5"), std::filesystem::file_size(file("a.h5")) / 2);
  EXPECT_EQ(bytes_of(last.v), std::vector<std::byte>(last.v.bytes(), std::byte{0}));
  EXPECT_EQ(bytes_of(first.k), before);
  for (const auto& ask : std::vector<std::function<void()>>{[&] { trace.require_unchanged(); }, [&] { trace.layer(0); },
                                                            [&] { trace.tensors(0); }}) {
    try {
      ask();
      ADD_FAILURE() << "it passes";
    } catch (const Error& error) {
      EXPECT_EQ(error.refusal(), Refusal::input);
      EXPECT_EQ(error.problem(), "changed while it was read");
    }
  }
}

TEST_F(TraceMapping, AFileThatIsWrittenToIsToldOfAndOneThatTakesItsNameIsNot) {
  const Trace trace = Trace::open(file("a.h5"));
  const std::vector<std::byte> before = bytes_of(trace.layer(2).k);
  std::filesystem::copy_file(file("a.h5"), file("b.h5"));
  std::filesystem::rename(file("b.h5"), file("a.h5"));
  EXPECT_EQ(bytes_of(trace.layer(2).k), before);
  std::filesystem::remove(file("a.h5"));
  EXPECT_EQ(bytes_of(trace.layer(2).k), before);

  synthesise(options(), file("c.h5"));
  const Trace written = Trace::open(file("c.h5"));
  std::fstream(file("c.h5"), std::ios::in | std::ios::out | std::ios::binary).seekp(-1, std::ios::end).put('x');
  EXPECT_THROW(written.layer(0), Error);
}

/// Bytes of files that are mapped and resident, of this process.
std::size_t resident() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (word == "RssFile:") {
      std::size_t kilobytes = 0;
      status >> kilobytes;
      return kilobytes * 1024;
    }
  return 0;
}

class TraceLimit : public TraceFiles {};

TEST_F(TraceLimit, PagesBeyondItAreLetGoWhileTheirLayerIsInUse) {
  constexpr std::size_t layer_bytes = std::size_t{96} << 20, kept = Trace::least_mapped / 2;
  SynthOptions options = synth_defaults("gaussian");
  options.layers = 1;
  options.kv_heads = options.query_heads = 8;
  options.prefill = static_cast<int>(layer_bytes / (std::size_t{3} * 8 * 64 * 2));
  synthesise(options, file("large.h5"));

  const auto read = [](const Trace& trace) {
    Hash hash;
    const LayerTensors layer = trace.layer(0);
    for (const TensorView& tensor : {layer.q, layer.k, layer.v}) hash.update({tensor.data, tensor.bytes()});
    return hash.digits();
  };
  const std::size_t before = resident();
  std::string all;
  {
    const Trace plain = Trace::open(file("large.h5"));
    all = read(plain);
    EXPECT_GE(resident(), before + layer_bytes) << "nothing is let go without a limit";
  }
  Trace limited = Trace::open(file("large.h5"));
  limited.limit_mapped(1);
  EXPECT_EQ(read(limited), all);
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (resident() > before + kept && std::chrono::steady_clock::now() < patience)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_LE(resident(), before + kept);
  EXPECT_EQ(read(limited), all) << "pages come back";
}

}  // namespace
}  // namespace kvreplay
