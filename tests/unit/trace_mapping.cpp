// What of a trace is mapped, and that limits and hints change no byte of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "trace/hash.h"
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
