#include <gtest/gtest.h>

#include <tuple>

#include "attention_reference.h"

namespace kvreplay::testing {
namespace {

std::vector<const KeptSet*> pointers(const std::vector<KeptSet>& sets) {
  std::vector<const KeptSet*> all;
  for (const KeptSet& set : sets) all.push_back(&set);
  return all;
}

auto members(const Moments& m) {
  return std::tuple(m.mass, m.square, m.prompt_mass, m.prompt_square, m.nosink_mass, m.nosink_square, m.output_square,
                    m.output_dot, m.error_square, m.logit_square, m.unaligned_dot);
}

void expect_near(const Moments& found, const Moments& expected, double tolerance) {
  EXPECT_NEAR(found.mass, expected.mass, tolerance);
  EXPECT_NEAR(found.square, expected.square, tolerance);
  EXPECT_NEAR(found.prompt_mass, expected.prompt_mass, tolerance);
  EXPECT_NEAR(found.prompt_square, expected.prompt_square, tolerance);
  EXPECT_NEAR(found.nosink_mass, expected.nosink_mass, tolerance);
  EXPECT_NEAR(found.nosink_square, expected.nosink_square, tolerance);
  EXPECT_NEAR(found.output_square, expected.output_square, tolerance * (1.0 + expected.output_square));
  EXPECT_NEAR(found.output_dot, expected.output_dot, tolerance * (1.0 + expected.output_square));
  EXPECT_NEAR(found.error_square, expected.error_square, tolerance * (1.0 + expected.output_square));
  EXPECT_NEAR(found.logit_square, expected.logit_square, tolerance * (1.0 + expected.logit_square));
  EXPECT_NEAR(found.unaligned_dot, expected.unaligned_dot, tolerance);
}

struct MomentsCase {
  LayerShape shape;
  int boundary;
  std::vector<std::int32_t> queries;
};

class KeptMomentsOf : public ::testing::TestWithParam<MomentsCase> {
 protected:
  std::vector<KeptSet> sets() const {
    const auto& [shape, boundary, queries] = GetParam();
    std::vector<KeptSet> some{random_set(Heads::kv, shape, boundary, 0.2, 1),
                              random_set(Heads::query, shape, boundary, 0.3, 2),
                              random_set(Heads::layer, shape, boundary, 0.1, 3),
                              random_set(Heads::kv, shape, boundary, 2.0, 4),  // everything
                              random_set(Heads::query, shape, boundary, 2.0, 5),
                              random_set(Heads::kv, shape, boundary, 0.0, 6)};  // nothing
    some.push_back(some.front());
    return some;
  }
};

TEST_P(KeptMomentsOf, AreThoseOfBruteForce) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  const std::vector<KeptSet> all_sets = sets();
  const KeptMoments found =
      make_backend("cpu", 2)->kept_moments(layer.tensors(), queries, boundary, pointers(all_sets));
  ASSERT_EQ(found.full.size(), static_cast<std::size_t>(shape.query_heads) * queries.size());
  ASSERT_EQ(found.kept.size(), all_sets.size() * found.full.size());
  std::size_t cell = 0;
  for (int head = 0; head < shape.query_heads; ++head) {
    for (std::size_t i = 0; i < queries.size(); ++i, ++cell) {
      SCOPED_TRACE(::testing::Message() << "head " << head << ", query " << queries[i]);
      expect_near(found.full[cell], reference_moments(layer, head, queries[i], boundary, nullptr), 4e-6);
      for (std::size_t set = 0; set < all_sets.size(); ++set) {
        SCOPED_TRACE(::testing::Message() << "set " << set);
        const Moments& kept = found.kept[set * found.full.size() + cell];
        expect_near(kept, reference_moments(layer, head, queries[i], boundary, &all_sets[set]), 4e-6);
      }
    }
  }
}

TEST_P(KeptMomentsOf, KeepingEverythingIsExact) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  // Everything, per KV head and per query head, and everything that some query sees.
  KeptSet visible(Heads::layer, 1, boundary);
  for (const int t : queries)
    for (int key = 0; key < boundary; ++key)
      if (layer.visible(t, key)) visible.keep(0, key);
  const std::vector<KeptSet> all_sets{random_set(Heads::kv, shape, boundary, 2.0, 4),
                                      random_set(Heads::query, shape, boundary, 2.0, 5), visible};
  const KeptMoments found =
      make_backend("cpu", 2)->kept_moments(layer.tensors(), queries, boundary, pointers(all_sets));
  for (std::size_t set = 0; set < all_sets.size(); ++set) {
    for (std::size_t cell = 0; cell < found.full.size(); ++cell) {
      const Moments& kept = found.kept[set * found.full.size() + cell];
      EXPECT_EQ(kept.mass, 1.0);
      EXPECT_EQ(kept.error_square, 0.0);
      EXPECT_EQ(members(kept), members(found.full[cell])) << "set " << set << ", cell " << cell;
    }
  }
}

TEST_P(KeptMomentsOf, HaveTheSameBitsForAnyNumberOfThreadsAndAnyCompany) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  const std::vector<KeptSet> all_sets = sets();
  const KeptMoments one = make_backend("cpu", 1)->kept_moments(layer.tensors(), queries, boundary, pointers(all_sets));
  for (const int threads : {2, 3}) {
    const KeptMoments more =
        make_backend("cpu", threads)->kept_moments(layer.tensors(), queries, boundary, pointers(all_sets));
    for (std::size_t cell = 0; cell < one.kept.size(); ++cell)
      EXPECT_EQ(members(more.kept[cell]), members(one.kept[cell]));
  }
  // One query alone, one set alone.
  const std::vector<std::int32_t> last{queries.back()};
  const std::vector<const KeptSet*> second{&all_sets[1]};
  const KeptMoments alone = make_backend("cpu", 1)->kept_moments(layer.tensors(), last, boundary, second);
  for (int head = 0; head < shape.query_heads; ++head) {
    const std::size_t cell = static_cast<std::size_t>(head + 1) * queries.size() - 1;
    EXPECT_EQ(members(alone.kept[static_cast<std::size_t>(head)]), members(one.kept[one.full.size() + cell]));
  }
}

TEST_P(KeptMomentsOf, AgreeWithTheGeneralComparison) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  const std::vector<KeptSet> all_sets = sets();
  const auto backend = make_backend("cpu", 2);
  const LayerTensors tensors = layer.tensors();
  const KeptMoments moments = backend->kept_moments(tensors, queries, boundary, pointers(all_sets));
  for (std::size_t set = 0; set < all_sets.size(); ++set) {
    const std::vector<Comparison> compared =
        backend->compare_attention(tensors, tensors, Positions::original, queries, boundary, all_sets[set]);
    ASSERT_EQ(compared.size(), moments.full.size());
    for (std::size_t cell = 0; cell < compared.size(); ++cell) {
      const Moments& full = moments.full[cell];
      const Moments& kept = moments.kept[set * moments.full.size() + cell];
      const Comparison& general = compared[cell];
      EXPECT_NEAR(general.mass, kept.mass, 4e-6);
      EXPECT_NEAR(general.l1, 2.0 * (1.0 - kept.mass), 8e-6);
      EXPECT_NEAR(general.dot / std::sqrt(general.full_square * general.stored_square),
                  std::sqrt(kept.square / full.square), 4e-6);
      EXPECT_NEAR(general.full_square, full.square, 4e-6);
      const double size = 1.0 + kept.output_square;
      EXPECT_NEAR(general.output_full_square, full.output_square, 4e-6 * size);
      EXPECT_NEAR(general.output_square, kept.output_square, 4e-6 * size);
      EXPECT_NEAR(general.output_dot, kept.output_dot, 4e-6 * size);
      EXPECT_NEAR(general.error_square, kept.error_square, 4e-6 * size);
    }
  }
}

const std::vector<MomentsCase> cases{
    {{.tokens = 64, .dim = 8}, 48, range(48, 64)},
    {{.query_heads = 9, .kv_heads = 3, .tokens = 700, .dim = 33}, 640, range(640, 700, 7)},
    {{.query_heads = 8, .kv_heads = 1, .tokens = 90, .dim = 16, .dtype = DType::float16}, 60, range(60, 90)},
    {{.tokens = 90, .dim = 16, .dtype = DType::bfloat16}, 90, range(80, 90)},
    {{.tokens = 330, .dim = 40}, 300, range(0, 330, 11)},  // queries inside the prompt
    {{.tokens = 400, .dim = 8, .sliding_window = 50}, 350, range(300, 400, 9)},
    {{.tokens = 700, .dim = 8, .sliding_window = 100}, 700, range(600, 700, 9)},
    {{.tokens = 90, .dim = 8, .spread = 2.0, .softcap = 4.0F}, 70, range(70, 90)},
    {{.tokens = 50, .dim = 8}, 3, range(0, 50)},  // a boundary among the sinks
    {{.query_heads = 1, .kv_heads = 1, .tokens = 1, .dim = 1}, 1, {0}},
    {{.query_heads = 2, .kv_heads = 1, .tokens = 80, .dim = 8, .first_stored_query = 65, .stored_query_step = 5},
     70,
     {70, 75}},
};

INSTANTIATE_TEST_SUITE_P(Cases, KeptMomentsOf, ::testing::ValuesIn(cases));

TEST(KeptMomentsWith, LargeLogitsAverageToTheReference) {
  // Logits of about +-50: one query's weights carry the rounding of its logits, averages do not.
  const LayerShape shape{.query_heads = 8, .kv_heads = 2, .tokens = 600, .dim = 64, .spread = 4.0};
  const RandomLayer layer(shape);
  const auto queries = range(540, 600);
  const std::vector<KeptSet> sets{random_set(Heads::kv, shape, 540, 0.3, 1)};
  const KeptMoments found = make_backend("cpu", 2)->kept_moments(layer.tensors(), queries, 540, pointers(sets));
  double mass_error = 0.0, cosine_error = 0.0, output_error = 0.0;
  std::size_t cell = 0;
  for (int head = 0; head < shape.query_heads; ++head) {
    for (const int t : queries) {
      const Moments full = reference_moments(layer, head, t, 540, nullptr);
      const Moments kept = reference_moments(layer, head, t, 540, &sets[0]);
      mass_error += found.kept[cell].mass - kept.mass;
      cosine_error +=
          std::sqrt(found.kept[cell].square / found.full[cell].square) - std::sqrt(kept.square / full.square);
      output_error += std::sqrt(found.kept[cell].error_square / found.full[cell].output_square) -
                      std::sqrt(kept.error_square / full.output_square);
      ++cell;
    }
  }
  EXPECT_NEAR(mass_error / static_cast<double>(cell), 0.0, 1e-6);
  EXPECT_NEAR(cosine_error / static_cast<double>(cell), 0.0, 1e-6);
  EXPECT_NEAR(output_error / static_cast<double>(cell), 0.0, 1e-6);
  RecordProperty("mass_error", std::to_string(mass_error / static_cast<double>(cell)));
}

TEST(KeptMomentsWith, KeptKeysFarBelowTheLargestLogitStillHaveAnOutput) {
  // The kept keys' exponentials vanish beside a logit of 2,000; the softmax over them alone does not.
  const LayerShape shape{.query_heads = 1, .kv_heads = 1, .tokens = 40, .dim = 4};
  RandomLayer layer(shape);
  for (int c = 0; c < shape.dim; ++c) {
    layer.k.set(0, 5, c, 10.0F);
    for (int t = 30; t < 40; ++t) layer.q.set(0, t, c, 100.0F);
    for (int t = 30; t < 40; ++t) layer.k.set(0, t, c, -10.0F);
  }
  KeptSet set(Heads::kv, 1, 30);
  for (const int key : {3, 7, 11}) {
    set.keep(0, key);
    for (int c = 0; c < shape.dim; ++c) layer.k.set(0, key, c, 0.001F * static_cast<float>(key));
  }
  const std::vector<const KeptSet*> sets{&set};
  const auto queries = range(30, 40);
  const KeptMoments found = make_backend("cpu", 1)->kept_moments(layer.tensors(), queries, 30, sets);
  for (std::size_t i = 0; i < queries.size(); ++i) {
    const Moments expected = reference_moments(layer, 0, queries[i], 30, &set);
    EXPECT_GT(expected.output_square, 0.1);
    expect_near(found.kept[i], expected, 4e-6);
  }
}

TEST(CompareAttention, MovedKeysAndOtherStoresAreThoseOfBruteForce) {
  const LayerShape shape{.query_heads = 4, .kv_heads = 2, .tokens = 80, .dim = 8, .rope_pairs = 3};
  const RandomLayer layer(shape);
  LayerShape other = shape;
  other.seed = 9;
  const RandomLayer stored(other);
  const int boundary = 60;
  const auto queries = range(50, 80, 3);
  for (const Heads heads : {Heads::kv, Heads::query}) {
    const KeptSet set = random_set(heads, shape, boundary, 0.3, 7);
    for (const Positions positions : {Positions::original, Positions::cache}) {
      const std::vector<Comparison> found = make_backend("cpu", 2)->compare_attention(
          layer.tensors(), stored.tensors(), positions, queries, boundary, set);
      std::size_t cell = 0;
      for (int head = 0; head < shape.query_heads; ++head) {
        for (const int t : queries) {
          const std::vector<double> a = softmax(layer.logits(head, t));
          std::vector<int> resident;
          for (int key = 0; key <= t; ++key)
            if (key >= boundary || key == t || set.keeps(set.row_of(head, layer.group()), key)) resident.push_back(key);
          const bool moves = positions == Positions::cache;
          const std::vector<double> query =
              layer.rotated(layer.query(head, t), moves ? static_cast<int>(resident.size()) - 1 - t : 0);
          std::vector<double> z(static_cast<std::size_t>(shape.tokens), -HUGE_VAL);
          for (std::size_t slot = 0; slot < resident.size(); ++slot) {
            const std::vector<double> key = layer.rotated(stored.k.row(head / 2, resident[slot]),
                                                          moves ? static_cast<int>(slot) - resident[slot] : 0);
            z[static_cast<std::size_t>(resident[slot])] = layer.logit(query, key);
          }
          const std::vector<double> kept = softmax(z);
          Comparison expected;
          for (std::size_t key = 0; key < a.size(); ++key) {
            expected.dot += a[key] * kept[key];
            expected.full_square += a[key] * a[key];
            expected.stored_square += kept[key] * kept[key];
            expected.l1 += std::abs(a[key] - kept[key]);
            if (z[key] > -HUGE_VAL) expected.mass += a[key];
          }
          for (int c = 0; c < shape.dim; ++c) {
            double full_output = 0.0, output = 0.0;
            for (int key = 0; key < shape.tokens; ++key) {
              full_output += a[static_cast<std::size_t>(key)] * layer.v.at(head / 2, key, c);
              output += kept[static_cast<std::size_t>(key)] * stored.v.at(head / 2, key, c);
            }
            expected.output_full_square += full_output * full_output;
            expected.output_square += output * output;
            expected.output_dot += full_output * output;
            expected.error_square += (full_output - output) * (full_output - output);
          }
          const Comparison& general = found[cell++];
          const double tolerance = moves ? 1e-6 : 1e-12;  // moved vectors are rounded to float32 once
          EXPECT_NEAR(general.dot, expected.dot, tolerance);
          EXPECT_NEAR(general.full_square, expected.full_square, tolerance);
          EXPECT_NEAR(general.stored_square, expected.stored_square, tolerance);
          EXPECT_NEAR(general.l1, expected.l1, tolerance);
          EXPECT_NEAR(general.mass, expected.mass, tolerance);
          EXPECT_NEAR(general.output_full_square, expected.output_full_square, tolerance);
          EXPECT_NEAR(general.output_square, expected.output_square, tolerance);
          EXPECT_NEAR(general.output_dot, expected.output_dot, tolerance);
          EXPECT_NEAR(general.error_square, expected.error_square, tolerance);
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvreplay::testing
