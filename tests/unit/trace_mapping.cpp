// What of a trace is mapped, and that limits and hints change no byte of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

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

}  // namespace
}  // namespace kvreplay
