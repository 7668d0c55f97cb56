// Differences between traces, and what reading every number finds.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "float_types.h"
#include "hdf5/hdf5.h"
#include "trace/compare.h"
#include "trace/synth.h"
#include "trace/validate.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

class TwoTraces : public TraceFiles {
 protected:
  void make(const std::string& name, const SynthOptions& options) { synthesise(options, file(name)); }

  /// One stored element, counted over the tensor, gets another value.
  void set_element(const std::string& name, const std::string& dataset, std::size_t element, float number) {
    const auto offset = hdf5::File::open(file(name)).dataset(dataset).offset();
    std::byte bytes[2];
    store(bytes, DType::float16, 0, number);
    std::fstream changed(file(name), std::ios::binary | std::ios::in | std::ios::out);
    changed.seekp(static_cast<std::streamoff>(*offset + 2 * element));
    changed.write(reinterpret_cast<const char*>(bytes), 2);
  }
};

TEST_F(TwoTraces, DifferencesAreNamedInTheOrderOfTheFormat) {
  SynthOptions options = synth_defaults("fixture");
  make("a.h5", options);
  make("b.h5", options);
  EXPECT_TRUE(compare(Trace::open(file("a.h5")), Trace::open(file("b.h5"))).empty());

  const float was = load(Trace::open(file("b.h5")).layer(2).k.row(1, 5), DType::float16, 3);
  set_element("b.h5", "layers/002/k", (16 + 5) * 4 + 3, was + 0.25F);
  set_element("b.h5", "layers/002/k", (16 + 6) * 4, 100.0F);
  std::vector<TraceDifference> differences = compare(Trace::open(file("a.h5")), Trace::open(file("b.h5")));
  ASSERT_EQ(differences.size(), 1U);
  EXPECT_EQ(differences[0].object, "/layers/002/k");
  EXPECT_EQ(differences[0].where, "head 1, position 5, component 3");
  EXPECT_EQ(std::stof(differences[0].first), was);
  EXPECT_EQ(std::stof(differences[0].second), was + 0.25F);
  EXPECT_GE(differences[0].largest, 98.0);

  differences = compare(Trace::open(file("a.h5")), Trace::open(file("b.h5")), 0.25);
  ASSERT_EQ(differences.size(), 1U);
  EXPECT_EQ(differences[0].where, "head 1, position 6, component 0");
  EXPECT_TRUE(compare(Trace::open(file("a.h5")), Trace::open(file("b.h5")), 200.0).empty());
}

TEST_F(TwoTraces, HeadersShapesAndTypes) {
  SynthOptions options = synth_defaults("fixture");
  make("a.h5", options);
  options.dtype = DType::float32;
  make("b.h5", options);
  std::vector<TraceDifference> differences = compare(Trace::open(file("a.h5")), Trace::open(file("b.h5")));
  ASSERT_EQ(differences.size(), 1U);  // the numbers are equal, whatever they are stored in
  EXPECT_EQ(differences[0].object, "/model@dtype");
  EXPECT_EQ(differences[0].first, "\"float16\"");
  EXPECT_EQ(differences[0].second, "\"float32\"");

  options.last_queries = 3;
  options.layers = 2;
  make("c.h5", options);
  differences = compare(Trace::open(file("b.h5")), Trace::open(file("c.h5")));
  std::vector<std::string> objects;
  for (const TraceDifference& difference : differences) objects.push_back(difference.object);
  EXPECT_EQ(objects, (std::vector<std::string>{"/model@n_layers", "/model/sliding_window", "/model/layer_index",
                                               "/model/rope/inv_freq", "/model/rope/attention_scaling", "/layers/000/q",
                                               "/layers/000/q_positions", "/layers/001/q", "/layers/001/q_positions"}));
}

TEST_F(TwoTraces, APositionIsNamedWhereQueriesArePartial) {
  SynthOptions options = synth_defaults("fixture");
  options.last_queries = 3;
  make("a.h5", options);
  make("b.h5", options);
  set_element("b.h5", "layers/000/q", (2 * 3 + 1) * 4 + 2, 50.0F);
  const std::vector<TraceDifference> differences = compare(Trace::open(file("a.h5")), Trace::open(file("b.h5")));
  ASSERT_EQ(differences.size(), 1U);
  EXPECT_EQ(differences[0].where, "head 2, position 14, component 2");

  const DeepReport report = validate_deep(Trace::open(file("b.h5")));
  ASSERT_EQ(report.problems.size(), 1U);
  EXPECT_EQ(report.problems[0].problem(), "xxh3");
  set_element("b.h5", "layers/000/q", (2 * 3 + 1) * 4 + 2, std::numeric_limits<float>::infinity());
  const DeepReport infinite = validate_deep(Trace::open(file("b.h5")));
  ASSERT_EQ(infinite.problems.size(), 2U);
  EXPECT_EQ(infinite.problems[0].found(), "inf at head 2, position 14, component 2");
  EXPECT_EQ(infinite.hashes, infinite.tensors);
}

/// Keys with a mean, as models have them: after RoPE they are valid; from before it, or with the other style stated,
/// they are found out.
TEST_F(TwoTraces, KeysFromBeforeRopeAreFound) {
  constexpr int tokens = 256, dim = 16;
  enum class Keys { right, before_rope, other_style };
  for (const bool interleaved : {false, true})
    for (const Keys kind : {Keys::right, Keys::before_rope, Keys::other_style}) {
      TraceHeader header;
      header.layers = header.kv_heads = 1;
      header.query_heads = 1;
      header.head_dim = dim;
      header.sliding_window = {0};
      header.layer_index = {0};
      header.has_rope = true;
      header.rope_interleaved = interleaved != (kind == Keys::other_style);
      header.rope_pairs = dim / 2;
      header.attention_scaling = {1};
      for (int i = 0; i < dim / 2; ++i) header.inv_freq.push_back(std::pow(10000.0, -2.0 * i / dim));
      header.prefill = tokens;
      header.ids.assign(tokens, 1);
      TraceWriter writer(file("keys.h5"), header, Existing::replace);
      writer.begin_layer(DType::float32);
      std::vector<std::byte> keys(tokens * dim * 4);
      for (int t = 0; t < tokens; ++t)
        for (int i = 0; i < dim / 2; ++i) {
          const double angle = kind == Keys::before_rope ? 0.0 : t * header.inv_freq[static_cast<std::size_t>(i)];
          const double x = 1.0 + 0.5 * std::sin(12.9898 * (t * dim + i)),
                       y = -0.7 + 0.5 * std::cos(78.233 * (t * dim + i));
          const int real = interleaved ? 2 * i : i, imaginary = interleaved ? 2 * i + 1 : i + dim / 2;
          store(keys.data(), DType::float32, static_cast<std::size_t>(t * dim + real),
                static_cast<float>(x * std::cos(angle) - y * std::sin(angle)));
          store(keys.data(), DType::float32, static_cast<std::size_t>(t * dim + imaginary),
                static_cast<float>(x * std::sin(angle) + y * std::cos(angle)));
        }
      writer.append_q(keys);
      writer.append_k(keys);
      writer.append_v(keys);
      writer.finish();
      const DeepReport report = validate_deep(Trace::open(file("keys.h5")));
      EXPECT_EQ(report.rope_layers, 1);
      ASSERT_EQ(report.problems.size(), kind == Keys::right ? 0U : 1U);
      if (kind != Keys::right) {
        EXPECT_EQ(report.problems[0].problem(), "RoPE");
      }
    }
}

/// Two layers, the second one stored without RoPE: reported if its keys were turned as those of the first.
TEST_F(TwoTraces, LayersStoredWithoutTheirRopeAreFound) {
  constexpr int tokens = 256, dim = 16;
  for (const bool turned : {false, true}) {
    TraceHeader header;
    header.layers = 2;
    header.kv_heads = header.query_heads = 1;
    header.head_dim = dim;
    header.sliding_window = {0, 0};
    header.layer_index = {3, 7};
    header.has_rope = true;
    header.rope_pairs = dim / 2;
    header.attention_scaling = {1, 1};
    for (int i = 0; i < dim / 2; ++i) header.inv_freq.push_back(std::pow(10000.0, -2.0 * i / dim));
    header.inv_freq.resize(dim, 0.0);
    header.prefill = tokens;
    header.ids.assign(tokens, 1);
    TraceWriter writer(file("keys.h5"), header, Existing::replace);
    for (int l = 0; l < 2; ++l) {
      writer.begin_layer(DType::float32);
      std::vector<std::byte> keys(tokens * dim * 4);
      for (int t = 0; t < tokens; ++t)
        for (int i = 0; i < dim / 2; ++i) {
          const double angle = l == 0 || turned ? t * header.inv_freq[static_cast<std::size_t>(i)] : 0.0;
          const double radius = 1.0 + 0.5 * std::sin(12.9898 * (t * dim + i));
          store(keys.data(), DType::float32, static_cast<std::size_t>(t * dim + i),
                static_cast<float>(radius * std::cos(angle)));
          store(keys.data(), DType::float32, static_cast<std::size_t>(t * dim + i + dim / 2),
                static_cast<float>(radius * std::sin(angle)));
        }
      writer.append_q(keys);
      writer.append_k(keys);
      writer.append_v(keys);
    }
    writer.finish();
    const DeepReport report = validate_deep(Trace::open(file("keys.h5")));
    EXPECT_EQ(report.rope_layers, 2);
    ASSERT_EQ(report.problems.size(), turned ? 1U : 0U);
    if (turned) {
      const std::string message = report.problems[0].what();
      EXPECT_NE(message.find("keys.h5:/layers/001/k: RoPE: "), std::string::npos) << message;
      EXPECT_NE(message.find("undoing RoPE with the frequencies of layer 3"), std::string::npos) << message;
    }
  }
}

}  // namespace
}  // namespace kvreplay
