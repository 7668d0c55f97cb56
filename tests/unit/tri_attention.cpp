// Scores of tri-attention against its definition, with keys un-rotated and one cosine for each offset.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <string>
#include <vector>

#include "attention_reference.h"
#include "fake_backend.h"
#include "policies/text/configured.h"

namespace kvreplay::testing {
namespace {

using Complex = std::complex<double>;

struct Case {
  LayerShape shape;
  double scaling = 1;
};

class TriAttentionOf : public ::testing::TestWithParam<Case> {
 protected:
  static constexpr int prompt = 29;

  TriAttentionOf() { tensors.rope.attention_scaling = GetParam().scaling; }

  double frequency(int pair) const { return tensors.rope.inv_freq[static_cast<std::size_t>(pair)]; }

  /// Pair i of a stored vector before RoPE.
  Complex pair(const std::vector<double>& vector, int position, int i) const {
    const LayerShape& shape = GetParam().shape;
    const std::vector<double> back = layer.rotated(vector, -position);
    const auto first = static_cast<std::size_t>(shape.rope_offset + (shape.interleaved ? 2 * i : i));
    const std::size_t second = first + static_cast<std::size_t>(shape.interleaved ? 1 : shape.rope_pairs);
    return Complex{back[first], back[second]} / GetParam().scaling;
  }

  /// Scores of a head's prompt tokens before they are standardised.
  std::vector<double> scores(int head) const {
    const int pairs = GetParam().shape.rope_pairs;
    const double squared_scaling = GetParam().scaling * GetParam().scaling;
    std::vector<double> all(prompt);
    for (int i = 0; i < pairs; ++i) {
      Complex mean;
      double modulus = 0;
      for (int t = 0; t < prompt; ++t) {
        const Complex query = pair(layer.q.row(head, t), t, i);
        mean += query / double{prompt};
        modulus += std::abs(query) / prompt;
      }
      for (int j = 0; j < prompt; ++j) {
        const Complex key = pair(layer.k.row(head / layer.group(), j), j, i);
        const double angle = std::arg(mean * std::conj(key));
        double cosines = 0;
        for (int delta = 1; delta <= 65536; delta *= 2)
          cosines += std::cos((prompt - j + delta) * frequency(i) + angle) / 17;
        all[static_cast<std::size_t>(j)] +=
            squared_scaling * std::abs(key) * (std::abs(mean) * cosines + modulus - std::abs(mean));
      }
    }
    return all;
  }

  RandomLayer layer{GetParam().shape};
  LayerTensors tensors = layer.tensors();
  FakeBackend backend;
  LayerView view{backend, tensors, {.prompt = prompt}, {}};
};

TEST_P(TriAttentionOf, ScoresAreThoseOfTheDefinition) {
  constexpr int recent = 5;
  const int group = layer.group();
  const Plan plan = ConfiguredPolicy::parse("tri-attention:recent=5").plans(1).front().plan;
  EXPECT_TRUE(plan.score.needs.all_queries && plan.score.needs.rope);
  const Matrix made = plan.score.score(view, {.grouping = plan.grouping, .recent = recent});
  ASSERT_EQ(made.rows(), GetParam().shape.kv_heads);
  for (int kv_head = 0; kv_head < made.rows(); ++kv_head) {
    std::vector<double> expected(prompt - recent, -HUGE_VAL);  // largest of the group's standardised scores
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      std::vector<double> of_head = scores(head);
      of_head.resize(prompt - recent);
      double mean = 0, squares = 0;
      for (const double score : of_head) mean += score / (prompt - recent);
      for (const double score : of_head) squares += (score - mean) * (score - mean) / (prompt - recent);
      for (std::size_t j = 0; j < of_head.size(); ++j)
        expected[j] = std::max(expected[j], (of_head[j] - mean) / std::sqrt(squares));
    }
    for (int j = 0; j < prompt - recent; ++j)
      EXPECT_NEAR(made(kv_head, j), expected[static_cast<std::size_t>(j)], 1e-6) << "KV head " << kv_head << ", " << j;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layers, TriAttentionOf,
    ::testing::Values(Case{{.query_heads = 6, .kv_heads = 2, .dim = 10, .rope_pairs = 5}},
                      Case{{.query_heads = 4, .kv_heads = 4, .dim = 8, .rope_pairs = 2, .interleaved = true}, 1.25},
                      Case{{.query_heads = 2, .kv_heads = 1, .dim = 12, .rope_pairs = 3, .rope_offset = 4}}));

TEST(TriAttention, ProtectsARecentWindowAndTakesTheLargestOfTheGroup) {
  const Plan plan = ConfiguredPolicy::parse("tri-attention").plans(1).front().plan;
  EXPECT_EQ(plan.protect.recent.of(1000), 128);
  EXPECT_EQ(plan.grouping.aggregate, Aggregate::max);
  EXPECT_NO_THROW(ConfiguredPolicy::parse("tri-attention:schedule=threshold(300,200)").plans(1));
}

}  // namespace
}  // namespace kvreplay::testing
