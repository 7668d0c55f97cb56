// Synthetic traces: the fixture bit for bit, and that each kind is what its summary says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <vector>

#include "error.h"
#include "float_types.h"
#include "random.h"
#include "trace/compare.h"
#include "trace/synth.h"
#include "trace/validate.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

class Synth : public TraceFiles {
 protected:
  Trace make(const SynthOptions& options, const std::string& name = "trace.h5") {
    synthesise(options, file(name));
    return Trace::open(file(name));
  }
};

double component(const TensorView& view, int head, int token, int c) {
  return load(view.row(head, token), view.dtype, static_cast<std::size_t>(c));
}

double dot(const TensorView& a, int head_a, int token_a, const TensorView& b, int head_b, int token_b) {
  double sum = 0;
  for (int c = 0; c < a.dim; ++c) sum += component(a, head_a, token_a, c) * component(b, head_b, token_b, c);
  return sum;
}

/// Softmax over visible keys, summed over `keys`.
double attention(const LayerTensors& layer, int head, int query, int begin, int end) {
  double all = 0, wanted = 0;
  for (int j = 0; j <= query; ++j) {
    const double weight = std::exp(layer.softmax_scale * dot(layer.q, head, query, layer.k, head / layer.group(), j));
    all += weight;
    if (begin <= j && j < end) wanted += weight;
  }
  return wanted / all;
}

TEST_F(Synth, FixtureHasItsPublishedValues) {
  for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32}) {
    SynthOptions options = synth_defaults("fixture");
    options.dtype = dtype;
    options.existing = Existing::replace;
    const Trace trace = make(options);
    const TraceHeader& header = trace.header();
    EXPECT_EQ(std::vector({header.layers, header.query_heads, header.kv_heads, header.head_dim, header.prefill,
                           header.continuation()}),
              std::vector({4, 4, 2, 4, 12, 4}));
    EXPECT_EQ(header.softmax_scale, 0.5);
    EXPECT_EQ(header.inv_freq, std::vector<double>({1, 0.1, 1, 0.1, 1, 0.1, 1, 0.1}));
    EXPECT_EQ(header.attention_scaling, std::vector<double>(4, 1.0));
    EXPECT_FALSE(header.rope_interleaved);
    EXPECT_TRUE(header.synthetic);

    const double q[] = {-1.625, 1.625, -2, -0.875}, k[] = {-1.5, 0.875, 0.375, 0.5},
                 v[] = {-1.625, -0.125, -1.875, 0.5};
    for (int c = 0; c < 4; ++c) {
      EXPECT_EQ(component(trace.layer(0).q, 0, 0, c), q[c]);
      EXPECT_EQ(component(trace.layer(0).k, 0, 0, c), k[c]);
      EXPECT_EQ(component(trace.layer(0).v, 0, 0, c), v[c]);
    }
    for (int l = 0; l < 4; ++l) {
      const LayerTensors layer = trace.layer(l);
      int tag = 0;
      for (const TensorView& view : {layer.q, layer.k, layer.v}) {
        ++tag;
        for (int h = 0; h < view.heads; ++h)
          for (int t = 0; t < 16; ++t)
            for (int c = 0; c < 4; ++c)
              ASSERT_EQ(component(view, h, t, c),
                        (static_cast<double>(chain(static_cast<std::uint64_t>(tag), l, h, t, c) % 33) - 16) / 8);
      }
    }
  }
}

TEST_F(Synth, TheSameOptionsGiveTheSameBitsAndAnotherSeedOthers) {
  for (const SynthKind& kind : synth_kinds()) {
    SynthOptions options = kind.defaults;
    options.layers = 2;
    const Trace first = make(options, kind.name + "1.h5"), second = make(options, kind.name + "2.h5");
    EXPECT_EQ(first.hash(), second.hash()) << kind.name;
    EXPECT_TRUE(compare(first, second).empty());
    if (kind.name == "fixture") continue;
    options.seed = 1;
    EXPECT_NE(make(options, kind.name + "3.h5").hash(), first.hash()) << kind.name;
  }
}

/// Blocks of rows and shares of threads leave no mark: each number depends on where it stands alone.
TEST_F(Synth, ALongTraceBeginsAsAShortOne) {
  SynthOptions options = synth_defaults("integer");
  options.layers = 1;
  options.prefill = 100;
  const Trace small = make(options, "small.h5");
  options.prefill = 20000;
  const Trace large = make(options, "large.h5");
  for (int h = 0; h < options.query_heads.of(0); ++h)
    for (int t = 0; t < 132; ++t)
      ASSERT_EQ(std::memcmp(small.layer(0).q.row(h, t), large.layer(0).q.row(h, t), small.layer(0).q.row_bytes()), 0);
}

TEST_F(Synth, LastQueriesAreThoseOfTheWholeTrace) {
  SynthOptions options = synth_defaults("gaussian");
  const Trace whole = make(options, "whole.h5");
  options.last_queries = 10;
  const Trace part = make(options, "part.h5");
  const LayerTensors layer = part.layer(1);
  ASSERT_EQ(layer.q.tokens, 10);
  ASSERT_EQ(layer.query_positions.size(), 10U);
  for (int i = 0; i < 10; ++i) {
    const int position = whole.header().tokens() - 10 + i;
    EXPECT_EQ(layer.query_positions[static_cast<std::size_t>(i)], position);
    for (int h = 0; h < 8; ++h)
      EXPECT_EQ(std::memcmp(layer.q.row(h, i), whole.layer(1).q.row(h, position), layer.q.row_bytes()), 0);
  }
}

TEST_F(Synth, LayersMayDifferInShape) {
  SynthOptions options = synth_defaults("repeat");
  options.layers = 3;
  options.prefill = 70;
  options.query_heads = {4, 6};
  options.kv_heads = {4, 2};
  options.head_dim = {16, 24};
  options.value_dim = {8, 0};
  options.sinks = true;
  const Trace trace = make(options);
  const TraceHeader& header = trace.header();
  EXPECT_EQ(header.heads, (std::vector<std::int32_t>{4, 4, 6, 2, 4, 4}));
  EXPECT_EQ(header.head_dims, (std::vector<std::int32_t>{16, 8, 24, 24, 16, 8}));
  EXPECT_EQ(header.layer_pairs, (std::vector<std::int32_t>{8, 12, 8}));
  EXPECT_EQ(header.largest_shape(std::vector<int>{0, 2}), (LayerShape{4, 4, 16, 8}));
  EXPECT_EQ(header.largest_shape(std::vector<int>{0, 1}), (LayerShape{6, 4, 24, 24}));
  for (int l = 0; l < 3; ++l) {
    const LayerTensors layer = trace.layer(l);
    EXPECT_EQ((LayerShape{layer.q.heads, layer.k.heads, layer.q.dim, layer.v.dim}), options.shape(l));
    EXPECT_EQ(layer.k.dim, layer.q.dim);
    EXPECT_EQ(std::ssize(layer.rope.inv_freq), layer.q.dim / 2);
    EXPECT_EQ(std::ssize(layer.sinks), layer.q.heads);
  }
  EXPECT_TRUE(validate_deep(trace).problems.empty()) << "each layer has its own frequencies";

  options = synth_defaults("gaussian");
  const std::string hash = make(options, "plain.h5").hash();
  options.query_heads = {8, 8};
  const Trace equal = make(options, "equal.h5");
  EXPECT_EQ(equal.hash(), hash);
  EXPECT_TRUE(equal.header().heads.empty());
}

TEST_F(Synth, LayersMayReadTheKeysOfEarlierOnes) {
  SynthOptions options = synth_defaults("gaussian");
  options.layers = 4;
  options.prefill = 20;
  options.query_heads = {4, 2, 8, 6};
  options.kv_source = {0, 1, 0, 1};
  options.sinks = true;
  const Trace trace = make(options);
  const TraceHeader& header = trace.header();
  EXPECT_EQ(header.kv_source, options.kv_source);
  EXPECT_EQ(trace.tensors(0).size(), 3U);
  EXPECT_EQ(trace.tensors(2).size(), 1U) << "queries alone";
  EXPECT_EQ(header.readers(1), (std::vector<int>{1, 3}));
  EXPECT_EQ(header.shape(0).query_heads, 12);
  EXPECT_EQ(header.shape(2).query_heads, 8);
  // Each KV head of layer 0 has the heads of layer 0 that read it, then those of layer 2.
  const std::vector<std::pair<int, int>> expected{{0, 0}, {0, 1}, {2, 0}, {2, 1}, {2, 2}, {2, 3},
                                                  {0, 2}, {0, 3}, {2, 4}, {2, 5}, {2, 6}, {2, 7}};
  const TensorView own = trace.tensors(0)[0].view, of_reader = trace.tensors(2)[0].view;
  const LayerTensors layer = trace.layer(0);
  ASSERT_EQ(layer.q.heads, 12);
  EXPECT_EQ(layer.group(), 6);
  for (int h = 0; h < 12; ++h) {
    const auto [from, head] = expected[static_cast<std::size_t>(h)];
    const TensorView& stored = from == 0 ? own : of_reader;
    for (int t = 0; t < header.tokens(); ++t)
      ASSERT_EQ(std::memcmp(layer.q.row(h, t), stored.row(head, t), stored.row_bytes()), 0);
    EXPECT_EQ(layer.sink(h), header.sinks[static_cast<std::size_t>(from * 8 + head)]);
  }
  EXPECT_EQ(trace.layer(2).k.data, layer.k.data);
  EXPECT_EQ(trace.layer(2).q.heads, 8);
  EXPECT_EQ(trace.archived_bytes(0), own.bytes() + of_reader.bytes());
  EXPECT_TRUE(validate_deep(trace).problems.empty());
}

TEST_F(Synth, GaussianHasMeanZeroAndVarianceOne) {
  const Trace trace = make(synth_defaults("gaussian"));
  const TensorView q = trace.layer(3).q;
  double sum = 0, square = 0, fourth = 0;
  const auto count = static_cast<double>(q.bytes() / size_of(q.dtype));
  for (int h = 0; h < q.heads; ++h)
    for (int t = 0; t < q.tokens; ++t)
      for (int c = 0; c < q.dim; ++c) {
        const double x = component(q, h, t, c);
        sum += x;
        square += x * x;
        fourth += x * x * x * x;
      }
  // Five standard errors of 147,456 samples.
  EXPECT_NEAR(sum / count, 0, 5 / std::sqrt(count));
  EXPECT_NEAR(square / count, 1, 5 * std::sqrt(2 / count));
  EXPECT_NEAR(fourth / count, 3, 5 * std::sqrt(96 / count));
}

TEST_F(Synth, SinksAttractMostAttention) {
  const Trace trace = make(synth_defaults("sinks"));
  const Trace plain = make(synth_defaults("gaussian"), "plain.h5");
  for (int h = 0; h < 8; ++h)
    for (const int t : {50, 200, 287}) {
      EXPECT_GT(attention(trace.layer(2), h, t, 0, 4), 0.5);
      EXPECT_LT(attention(plain.layer(2), h, t, 0, 4), 0.3);
    }
}

TEST_F(Synth, OnlyLateQueriesAttendToTheNeedle) {
  const Trace trace = make(synth_defaults("needle"));
  const auto& spans = trace.header().spans;
  const auto needle = std::ranges::find(spans, "needle", &Span::name),
             question = std::ranges::find(spans, "question", &Span::name);
  ASSERT_NE(needle, spans.end());
  ASSERT_NE(question, spans.end());
  for (int h = 0; h < 8; ++h) {
    EXPECT_GT(attention(trace.layer(1), h, question->begin, needle->begin, needle->end), 0.7);
    EXPECT_GT(attention(trace.layer(1), h, 287, needle->begin, needle->end), 0.7);
    EXPECT_LT(attention(trace.layer(1), h, question->begin - 1, needle->begin, needle->end), 0.3);
  }
}

TEST_F(Synth, RepeatedValuesAreNearlyEqual) {
  const Trace trace = make(synth_defaults("repeat"));
  const TensorView v = trace.layer(0).v;
  const auto cosine = [&](int a, int b) {
    return dot(v, 0, a, v, 0, b) / std::sqrt(dot(v, 0, a, v, 0, a) * dot(v, 0, b, v, 0, b));
  };
  EXPECT_GT(cosine(3, 3 + 64), 0.95);
  EXPECT_GT(cosine(10, 10 + 128), 0.95);
  EXPECT_LT(std::abs(cosine(3, 4)), 0.6);
}

TEST_F(Synth, WindowsRepeatOverTheLayers) {
  SynthOptions options = synth_defaults("integer");
  options.sliding_window = {16, 0};
  options.layers = 5;
  options.logit_softcap = 30;
  const Trace trace = make(options);
  EXPECT_EQ(trace.header().sliding_window, (std::vector<std::int32_t>{16, 0, 16, 0, 16}));
  EXPECT_EQ(trace.layer(2).sliding_window, 16);
  EXPECT_EQ(trace.layer(2).logit_softcap, 30.0F);
}

TEST_F(Synth, RefusesWhatCannotBeMeant) {
  const auto refusal = [&](auto change) -> std::string {
    SynthOptions options = synth_defaults("gaussian");
    change(options);
    try {
      synthesise(options, file("refused.h5"));
    } catch (const Error& error) {
      EXPECT_EQ(error.refusal(), Refusal::usage);
      return error.what();
    }
    return "accepted";
  };
  // Five characters a token: the offsets of the text are 32 bits wide.
  EXPECT_EQ(refusal([](SynthOptions& o) { o.prefill = 2147483647; }),
            "prefill: value: expected at most 429496697, found 2147483647");
  EXPECT_EQ(refusal([](SynthOptions& o) { o.continuation = 2147483647; }),
            "continuation: value: expected 0 to 429496728, found 2147483647");
  EXPECT_EQ(refusal([](SynthOptions& o) { o.kv_heads = 3; }), "kv_heads: value: expected a divisor of 8, found 3");
  EXPECT_EQ(refusal([](SynthOptions& o) { o.layers = 0; }), "layers: value: expected at least 1, found 0");
  EXPECT_EQ(refusal([](SynthOptions& o) { o.last_queries = 289; }),
            "last_queries: value: expected 0 to 288, found 289");
  EXPECT_EQ(refusal([](SynthOptions& o) { o.kind = "gausian"; }),
            "gausian: unknown kind of synthetic trace: did you mean gaussian?");
  EXPECT_FALSE(std::filesystem::exists(file("refused.h5")));
  EXPECT_FALSE(std::filesystem::exists(file("refused.h5.partial")));
}

TEST_F(Synth, RefusesWhatTheDiskHasNoRoomFor) {
  SynthOptions options = synth_defaults("gaussian");
  options.prefill = 100000000;
  options.layers = 60000;
  try {
    synthesise(options, file("refused.h5"));
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::resources);
    // (8 + 2 * 2) heads x 100000032 tokens x 64 x 2 bytes x 60000 layers / 2^20
    EXPECT_EQ(error.expected(), "at least 8789065312.5 MiB");
  }
  EXPECT_FALSE(std::filesystem::exists(file("refused.h5.partial")));
}

}  // namespace
}  // namespace kvreplay
