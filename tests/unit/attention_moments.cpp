#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <tuple>
#include <vector>

#include "attention_reference.h"
#include "float_types.h"

namespace kvreplay::testing {
namespace {

/// Each for all queries.
std::vector<KeptSets> each(const std::vector<KeptSet>& sets) {
  std::vector<KeptSets> all;
  for (const KeptSet& set : sets) all.push_back({&set, 1});
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

class KeptMomentsOf : public ::testing::TestWithParam<EvalCase> {
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
  const KeptMoments found = tested_backend(2)->kept_moments(layer.tensors(), queries, boundary, each(all_sets));
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
  const KeptMoments found = tested_backend(2)->kept_moments(layer.tensors(), queries, boundary, each(all_sets));
  for (std::size_t set = 0; set < all_sets.size(); ++set) {
    for (std::size_t cell = 0; cell < found.full.size(); ++cell) {
      const Moments& kept = found.kept[set * found.full.size() + cell];
      EXPECT_EQ(kept.mass, shape.sink_logits ? found.full[cell].mass : 1.0);
      EXPECT_EQ(kept.error_square, 0.0);
      EXPECT_EQ(members(kept), members(found.full[cell])) << "set " << set << ", cell " << cell;
    }
  }
}

TEST_P(KeptMomentsOf, HaveTheSameBitsForAnyNumberOfThreadsAndAnyCompany) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  const std::vector<KeptSet> all_sets = sets();
  const KeptMoments one = tested_backend(1)->kept_moments(layer.tensors(), queries, boundary, each(all_sets));
  for (const int threads : {2, 3}) {
    const KeptMoments more = tested_backend(threads)->kept_moments(layer.tensors(), queries, boundary, each(all_sets));
    for (std::size_t cell = 0; cell < one.kept.size(); ++cell)
      EXPECT_EQ(members(more.kept[cell]), members(one.kept[cell]));
  }
  // One query alone, one set alone.
  const std::vector<std::int32_t> last{queries.back()};
  const std::vector<KeptSets> second{{&all_sets[1], 1}};
  const KeptMoments alone = tested_backend(1)->kept_moments(layer.tensors(), last, boundary, second);
  for (int head = 0; head < shape.query_heads; ++head) {
    const std::size_t cell = static_cast<std::size_t>(head + 1) * queries.size() - 1;
    EXPECT_EQ(members(alone.kept[static_cast<std::size_t>(head)]), members(one.kept[one.full.size() + cell]));
  }
}

TEST_P(KeptMomentsOf, AgreeWithTheGeneralComparison) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  const std::vector<KeptSet> all_sets = sets();
  const auto backend = tested_backend(2);
  const LayerTensors tensors = layer.tensors();
  const KeptMoments moments = backend->kept_moments(tensors, queries, boundary, each(all_sets));
  for (std::size_t set = 0; set < all_sets.size(); ++set) {
    const std::vector<Comparison> compared =
        backend->compare_attention(tensors, tensors, Positions::original, queries, boundary, {&all_sets[set], 1});
    ASSERT_EQ(compared.size(), moments.full.size());
    for (std::size_t cell = 0; cell < compared.size(); ++cell) {
      const Moments& full = moments.full[cell];
      const Moments& kept = moments.kept[set * moments.full.size() + cell];
      const Comparison& general = compared[cell];
      EXPECT_NEAR(general.mass, kept.mass, 4e-6);
      const double sink = 1.0 - full.mass, evicted = full.mass - kept.mass;
      EXPECT_NEAR(general.full_mass, full.mass, 4e-6);
      EXPECT_NEAR(general.l1, evicted * (2.0 * kept.mass + sink) / (kept.mass + sink), 8e-6);
      EXPECT_NEAR(general.all.dot / std::sqrt(general.all.full_square * general.all.stored_square),
                  std::sqrt(kept.square / full.square), 4e-6);
      EXPECT_NEAR(general.all.full_square, full.square, 4e-6);
      EXPECT_NEAR(general.prompt.full_square, full.prompt_square, 4e-6);
      EXPECT_NEAR(general.nosink.full_square, full.nosink_square, 4e-6);
      EXPECT_NEAR(general.logits.dot, kept.logit_square, 4e-6 * (1.0 + kept.logit_square));
      EXPECT_NEAR(general.logits.full_square, full.logit_square, 4e-6 * (1.0 + full.logit_square));
      const double size = 1.0 + kept.output_square;
      EXPECT_NEAR(general.output_full_square, full.output_square, 4e-6 * size);
      EXPECT_NEAR(general.output_square, kept.output_square, 4e-6 * size);
      EXPECT_NEAR(general.output_dot, kept.output_dot, 4e-6 * size);
      EXPECT_NEAR(general.error_square, kept.error_square, 4e-6 * size);
    }
  }
}

TEST_P(KeptMomentsOf, OutputsAsVectorsHaveTheirMoments) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  std::vector<KeptSet> all_sets = sets();
  const auto backend = tested_backend(2);
  const LayerTensors tensors = layer.tensors();
  const auto dim = static_cast<std::size_t>(tensors.v.dim);
  constexpr MomentParts parts{.outputs = true, .vectors = true};
  const KeptMoments moments = backend->kept_moments(tensors, queries, boundary, each(all_sets), parts);
  ASSERT_EQ(moments.outputs.full.size(), moments.full.size() * dim);
  ASSERT_EQ(moments.outputs.errors.size(), moments.kept.size() * dim);
  const auto vector = [&](const std::vector<float>& of, std::size_t cell) {
    return std::span(of).subspan(cell * dim, dim);
  };
  for (std::size_t set = 0; set < all_sets.size(); ++set) {
    OutputVectors compared;
    backend->compare_attention(tensors, tensors, Positions::original, queries, boundary, {&all_sets[set], 1},
                               &compared);
    ASSERT_EQ(compared.full.size(), moments.outputs.full.size());
    ASSERT_EQ(compared.errors.size(), moments.outputs.full.size());
    for (std::size_t cell = 0; cell < moments.full.size(); ++cell) {
      const std::size_t of_set = set * moments.full.size() + cell;
      const std::span<const float> full = vector(moments.outputs.full, cell);
      const std::span<const float> error = vector(moments.outputs.errors, of_set);
      double output_square = 0, error_square = 0, dot = 0;
      for (std::size_t c = 0; c < dim; ++c) {
        const double o = static_cast<double>(full[c]), difference = static_cast<double>(error[c]);
        output_square += o * o;
        error_square += difference * difference;
        dot += o * (o + difference);
        const double size = std::sqrt(1.0 + moments.kept[of_set].output_square);
        EXPECT_NEAR(static_cast<double>(vector(compared.full, cell)[c]), o, 4e-6 * size);
        EXPECT_NEAR(static_cast<double>(vector(compared.errors, cell)[c]), difference, 4e-6 * size);
      }
      EXPECT_NEAR(output_square, moments.full[cell].output_square, 1e-6 * (1.0 + output_square));
      EXPECT_NEAR(error_square, moments.kept[of_set].error_square, 1e-6 * (1.0 + error_square));
      EXPECT_NEAR(dot, moments.kept[of_set].output_dot, 1e-6 * (1.0 + output_square));
    }
  }
  KeptSet everything(Heads::layer, 1, boundary);
  for (int j = 0; j < boundary; ++j) everything.keep(0, j);
  const KeptMoments whole =
      backend->kept_moments(tensors, queries, boundary, std::vector<KeptSets>{{&everything, 1}}, parts);
  EXPECT_TRUE(std::ranges::all_of(whole.outputs.errors, [](float error) { return error == 0; }));
}

TEST_P(KeptMomentsOf, PartsThatAreAskedForAloneAreThoseOfAllParts) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  const std::vector<KeptSet> all_sets = sets();
  const auto backend = tested_backend(2);
  const LayerTensors tensors = layer.tensors();
  const KeptMoments all = backend->kept_moments(tensors, queries, boundary, each(all_sets));
  EXPECT_TRUE(all.parts.cover(all_moments));
  for (const MomentParts parts :
       {MomentParts{}, MomentParts{.outputs = true}, MomentParts{.logits = true}, MomentParts{.unaligned = true}}) {
    const KeptMoments some = backend->kept_moments(tensors, queries, boundary, each(all_sets), parts);
    EXPECT_TRUE(some.parts.cover(parts));
    EXPECT_FALSE(some.parts.cover(all_moments));
    const auto expect_part = [&](const Moments& found, Moments expected) {
      if (!parts.outputs) expected.output_square = expected.output_dot = expected.error_square = 0.0;
      if (!parts.logits) expected.logit_square = 0.0;
      if (!parts.unaligned) expected.unaligned_dot = 0.0;
      EXPECT_EQ(members(found), members(expected));
    };
    for (std::size_t cell = 0; cell < all.full.size(); ++cell) expect_part(some.full[cell], all.full[cell]);
    for (std::size_t cell = 0; cell < all.kept.size(); ++cell) expect_part(some.kept[cell], all.kept[cell]);
  }
}

const std::vector<EvalCase> cases{
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
    {{.tokens = 90, .dim = 24, .dtype = DType::bfloat16, .value_components = 17}, 60, range(50, 90, 3)},
    {{.tokens = 400, .dim = 8, .chunk = 90}, 350, range(300, 400, 9)},
    {{.query_heads = 6, .kv_heads = 2, .tokens = 130, .dim = 16, .sink_logits = true}, 110, range(90, 130, 6)},
};

INSTANTIATE_TEST_SUITE_P(Cases, KeptMomentsOf, ::testing::ValuesIn(cases));

/// Thirteen sets at each of five shares, among them everything, equal sets, a recent window and sets for each query.
struct ManySets {
  std::vector<std::vector<KeptSet>> sets;

  ManySets(const LayerShape& shape, int boundary, std::size_t queries) {
    for (const double share : {0.05, 0.1, 0.2, 0.3, 0.5}) {
      for (std::uint64_t seed = 0; seed < 11; ++seed) {
        const Heads heads = seed % 3 == 0 ? Heads::kv : seed % 3 == 1 ? Heads::query : Heads::layer;
        sets.push_back({random_set(heads, shape, boundary, seed == 10 ? 2.0 : share, chain(seed / 2, share * 100))});
      }
      KeptSet recent(Heads::layer, 1, boundary);
      for (int key = boundary - static_cast<int>(share * boundary); key < boundary; ++key) recent.keep(0, key);
      sets.push_back({recent});
      std::vector<KeptSet>& by_query = sets.emplace_back();
      for (std::size_t query = 0; query < queries; ++query)
        by_query.push_back(
            random_set(Heads::kv, shape, boundary + static_cast<int>(query % 3), share, chain(7, query)));
    }
  }

  std::vector<KeptSets> spans() const { return {sets.begin(), sets.end()}; }
};

TEST(KeptMomentsWith, ManySetsAtOnceHaveTheBitsOfEachAloneAndOfAnyNumberOfThreads) {
  const LayerShape shape{.query_heads = 9, .kv_heads = 3, .tokens = 1100, .dim = 12, .dtype = DType::bfloat16};
  const RandomLayer layer(shape);
  const int boundary = 1060;
  const auto queries = range(1064, 1100);
  const ManySets many(shape, boundary, queries.size());
  const LayerTensors tensors = layer.tensors();
  const auto backend = tested_backend(1);
  const KeptMoments found = backend->kept_moments(tensors, queries, boundary, many.spans());
  for (const int threads : {2, 3}) {
    const KeptMoments more = tested_backend(threads)->kept_moments(tensors, queries, boundary, many.spans());
    for (std::size_t i = 0; i < found.kept.size(); ++i) EXPECT_EQ(members(more.kept[i]), members(found.kept[i]));
  }
  for (std::size_t set = 0; set < many.sets.size(); ++set) {
    SCOPED_TRACE(::testing::Message() << "set " << set);
    const KeptMoments alone = backend->kept_moments(tensors, queries, boundary, std::vector<KeptSets>{many.sets[set]});
    for (std::size_t cell = 0; cell < found.full.size(); ++cell) {
      const Moments& kept = found.kept[set * found.full.size() + cell];
      EXPECT_EQ(members(kept), members(alone.kept[cell]));
      if (cell % 17 != 0) continue;
      const std::size_t query = cell % queries.size();
      const KeptSet& own = many.sets[set][many.sets[set].size() == 1 ? 0 : query];
      const int head = static_cast<int>(cell / queries.size());
      expect_near(kept, reference_moments(layer, head, queries[query], boundary, &own), 4e-6);
    }
  }
}

/// With large logits, rows of some sets lose sums to float32: their company must not know.
TEST(KeptMomentsWith, OneSetAmongManyHasTheBitsItHasAloneWhateverTheLogits) {
  for (const double spread : {1.0, 5.0, 17.0, 55.0}) {  // logits up to 3, 80, 900, 9,000
    SCOPED_TRACE(::testing::Message() << "spread " << spread);
    const LayerShape shape{.query_heads = 4, .kv_heads = 2, .tokens = 190, .dim = 12, .spread = spread};
    const RandomLayer layer(shape);
    const auto queries = range(160, 190, 3);
    const ManySets many(shape, 160, queries.size());
    const auto backend = tested_backend(2);
    const KeptMoments found = backend->kept_moments(layer.tensors(), queries, 160, many.spans());
    for (std::size_t set = 0; set < many.sets.size(); ++set) {
      SCOPED_TRACE(::testing::Message() << "set " << set);
      const KeptMoments alone =
          backend->kept_moments(layer.tensors(), queries, 160, std::vector<KeptSets>{many.sets[set]});
      for (std::size_t cell = 0; cell < found.full.size(); ++cell) {
        EXPECT_EQ(members(found.full[cell]), members(alone.full[cell]));
        EXPECT_EQ(members(found.kept[set * found.full.size() + cell]), members(alone.kept[cell]));
      }
    }
  }
}

TEST(KeptMomentsWith, ManySetsAgreeAtEverySimdLevel) {
  const LayerShape shape{.query_heads = 6, .kv_heads = 2, .tokens = 600, .dim = 20, .dtype = DType::float16};
  const RandomLayer layer(shape);
  const int boundary = 570;
  const auto queries = range(560, 600, 3);
  const ManySets many(shape, boundary, queries.size());
  at_every_simd_level([&](const char* level) {
    SCOPED_TRACE(level);
    const KeptMoments found = tested_backend(2)->kept_moments(layer.tensors(), queries, boundary, many.spans());
    for (std::size_t i = 0; i < found.kept.size(); ++i) {
      const std::size_t set = i / found.full.size();
      const std::size_t cell = i % found.full.size();
      if (set % 13 == 10) {
        EXPECT_EQ(members(found.kept[i]), members(found.full[cell]));
      }
      if (i % 7 != 0) continue;
      const std::size_t query = cell % queries.size();
      const KeptSet& own = many.sets[set][many.sets[set].size() == 1 ? 0 : query];
      const int head = static_cast<int>(cell / queries.size());
      expect_near(found.kept[i], reference_moments(layer, head, queries[query], boundary, &own), 4e-6);
    }
  });
}

TEST(KeptMomentsWith, LargeLogitsAverageToTheReference) {
  // Logits of about +-50: one query's weights carry the rounding of its logits, averages do not.
  const LayerShape shape{.query_heads = 8, .kv_heads = 2, .tokens = 600, .dim = 64, .spread = 4.0};
  const RandomLayer layer(shape);
  const auto queries = range(540, 600);
  const std::vector<KeptSet> sets{random_set(Heads::kv, shape, 540, 0.3, 1)};
  const KeptMoments found = tested_backend(2)->kept_moments(layer.tensors(), queries, 540, each(sets));
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
  const std::vector<KeptSets> sets{{&set, 1}};
  const auto queries = range(30, 40);
  const KeptMoments found = tested_backend(1)->kept_moments(layer.tensors(), queries, 30, sets);
  for (std::size_t i = 0; i < queries.size(); ++i) {
    const Moments expected = reference_moments(layer, 0, queries[i], 30, &set);
    EXPECT_GT(expected.output_square, 0.1);
    expect_near(found.kept[i], expected, 4e-6);
  }
  const KeptMoments attention = tested_backend(1)->kept_moments(layer.tensors(), queries, 30, sets, {});
  for (std::size_t i = 0; i < queries.size(); ++i) {
    EXPECT_EQ(attention.kept[i].square, found.kept[i].square);
    EXPECT_EQ(attention.kept[i].prompt_square, found.kept[i].prompt_square);
    EXPECT_EQ(attention.kept[i].output_square, 0.0);
  }
}

TEST(KeptMomentsWith, AStrongSinkHidesNothingOfTheRest) {
  // 20, 48 and 68 below its logit: squares of what is left beside the first token lie beyond float32.
  // A float32 logit of 100 has an error of 2^-17, which ratios of moments do not have; the CPU takes such rows again.
  const double tolerance = tested_backend_name() == "cpu" ? 1e-5 : 1e-4;
  const LayerShape shape{.query_heads = 2, .kv_heads = 1, .tokens = 300, .dim = 8};
  for (const float gap : {7.0F, 17.0F, 24.0F}) {
    RandomLayer layer(shape);
    for (int token = 290; token < 300; ++token)
      for (int head = 0; head < 2; ++head) layer.q.set(head, token, 0, 8.0F);
    for (int token = 0; token < 300; ++token) layer.k.set(0, token, 0, token == 0 ? gap : 0.0F);
    const std::vector<KeptSet> some{random_set(Heads::kv, shape, 290, 0.3, 1),
                                    random_set(Heads::kv, shape, 290, 2.0, 2)};
    const auto queries = range(290, 300);
    at_every_simd_level([&](const char* level) {
      const KeptMoments found = tested_backend(1)->kept_moments(layer.tensors(), queries, 290, each(some));
      std::size_t cell = 0;
      for (int head = 0; head < 2; ++head) {
        for (std::size_t i = 0; i < queries.size(); ++i, ++cell) {
          SCOPED_TRACE(::testing::Message() << level << ", gap " << gap << ", head " << head << ", query " << i);
          const Moments full = reference_moments(layer, head, queries[i], 290, nullptr);
          EXPECT_NEAR(found.full[cell].nosink_square / full.nosink_square, 1.0, tolerance);
          EXPECT_NEAR(found.full[cell].nosink_mass / full.nosink_mass, 1.0, tolerance);
          for (std::size_t set = 0; set < some.size(); ++set) {
            const Moments& kept = found.kept[set * found.full.size() + cell];
            const Moments expected = reference_moments(layer, head, queries[i], 290, &some[set]);
            EXPECT_NEAR(kept.nosink_square / expected.nosink_square, 1.0, tolerance);
            EXPECT_NEAR(kept.prompt_square / expected.prompt_square, 1.0, tolerance);
            EXPECT_LE(kept.mass, 1.0);
          }
          EXPECT_EQ(found.kept[found.full.size() + cell].mass, 1.0);
          EXPECT_EQ(found.kept[found.full.size() + cell].nosink_square, found.full[cell].nosink_square);
        }
      }
    });
  }
}

TEST_P(KeptMomentsOf, ASetForEachQueryAreThoseOfBruteForceAndOfThatSetForAll) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  const auto backend = tested_backend(2);
  const std::vector<std::vector<KeptSet>> all_sets{
      one_a_query(Heads::kv, GetParam(), 0.3, 1), one_a_query(Heads::query, GetParam(), 0.6, 2),
      one_a_query(Heads::layer, GetParam(), 0.1, 3), one_a_query(Heads::kv, GetParam(), 0.0, 4)};
  const std::vector<KeptSets> spans(all_sets.begin(), all_sets.end());
  const KeptMoments found = backend->kept_moments(layer.tensors(), queries, boundary, spans);
  const KeptMoments one_thread = tested_backend(1)->kept_moments(layer.tensors(), queries, boundary, spans);
  for (std::size_t set = 0; set < all_sets.size(); ++set) {
    for (std::size_t i = 0; i < queries.size(); ++i) {
      const KeptSet& own = all_sets[set][i];
      const KeptMoments for_all =
          backend->kept_moments(layer.tensors(), queries, boundary, std::vector<KeptSets>{{&own, 1}});
      for (int head = 0; head < shape.query_heads; ++head) {
        SCOPED_TRACE(::testing::Message() << "set " << set << ", head " << head << ", query " << queries[i]);
        const std::size_t cell = static_cast<std::size_t>(head) * queries.size() + i;
        const Moments& kept = found.kept[set * found.full.size() + cell];
        expect_near(kept, reference_moments(layer, head, queries[i], boundary, &own), 4e-6);
        EXPECT_EQ(members(kept), members(for_all.kept[cell]));
        EXPECT_EQ(members(kept), members(one_thread.kept[set * found.full.size() + cell]));
      }
    }
  }
}

TEST_P(KeptMomentsOf, ASetForEachQueryThatKeepsEverythingIsExact) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  // Everything, by sets that cover more or less; and what each query sees, without its own key.
  const std::vector<KeptSet> all = one_a_query(Heads::query, GetParam(), 2.0, 1);
  std::vector<KeptSet> seen;
  for (const int t : queries) {
    seen.emplace_back(Heads::layer, 1, shape.tokens);
    for (int key = 0; key < t; ++key)
      if (layer.visible(t, key)) seen.back().keep(0, key);
  }
  const KeptMoments found =
      tested_backend(2)->kept_moments(layer.tensors(), queries, boundary, std::vector<KeptSets>{all, seen});
  for (std::size_t i = 0; i < found.kept.size(); ++i) {
    EXPECT_EQ(found.kept[i].mass, shape.sink_logits ? found.full[i % found.full.size()].mass : 1.0);
    EXPECT_EQ(found.kept[i].error_square, 0.0);
    EXPECT_EQ(members(found.kept[i]), members(found.full[i % found.full.size()])) << i;
  }
}

TEST(KeptMomentsWith, ASetForEachQueryAgreesAtEverySimdLevel) {
  const EvalCase some{
      {.query_heads = 6, .kv_heads = 2, .tokens = 400, .dim = 20, .dtype = DType::bfloat16}, 300, range(280, 400, 3)};
  const RandomLayer layer(some.shape);
  const std::vector<KeptSet> sets = one_a_query(Heads::kv, some, 0.3, 1);
  const int levels = at_every_simd_level([&](const char* level) {
    SCOPED_TRACE(level);
    const KeptMoments found =
        tested_backend(2)->kept_moments(layer.tensors(), some.queries, some.boundary, std::vector<KeptSets>{sets});
    for (std::size_t cell = 0; cell < found.kept.size(); ++cell) {
      const std::size_t query = cell % some.queries.size();
      expect_near(found.kept[cell],
                  reference_moments(layer, static_cast<int>(cell / some.queries.size()), some.queries[query],
                                    some.boundary, &sets[query]),
                  4e-6);
    }
  });
  EXPECT_GE(levels, 1);
}

TEST(KeptMomentsWith, AQueryWhoseKeptKeysLieFarBelowTheOthersStillHasAnOutput) {
  const EvalCase some{{.query_heads = 2, .kv_heads = 1, .tokens = 60, .dim = 4}, 30, range(40, 60)};
  RandomLayer layer(some.shape);
  for (int c = 0; c < some.shape.dim; ++c) {
    layer.k.set(0, 5, c, 10.0F);
    for (int head = 0; head < 2; ++head)
      for (int t = 40; t < 60; ++t) layer.q.set(head, t, c, 100.0F);
    for (int t = 30; t < 60; ++t) layer.k.set(0, t, c, -10.0F);
    for (const int key : {3, 7, 11, 20}) layer.k.set(0, key, c, 0.001F * static_cast<float>(key));
  }
  std::vector<KeptSet> sets;
  for (std::size_t i = 0; i < some.queries.size(); ++i) {
    sets.emplace_back(Heads::kv, 1, 30 + static_cast<int>(i % 3) * 15);
    for (const int key : {3, 7, 11, 20})
      if ((key + static_cast<int>(i)) % 3 != 0) sets.back().keep(0, key);
  }
  const KeptMoments found =
      tested_backend(1)->kept_moments(layer.tensors(), some.queries, some.boundary, std::vector<KeptSets>{sets});
  for (std::size_t cell = 0; cell < found.kept.size(); ++cell) {
    const std::size_t i = cell % some.queries.size();
    const int head = static_cast<int>(cell / some.queries.size());
    const Moments expected = reference_moments(layer, head, some.queries[i], some.boundary, &sets[i]);
    EXPECT_GT(expected.output_square, 1e-3);
    expect_near(found.kept[cell], expected, 4e-6);
  }
}

void expect_near(const Alignment& found, const Alignment& expected, double tolerance) {
  EXPECT_NEAR(found.dot, expected.dot, tolerance * (1.0 + std::abs(expected.dot)));
  EXPECT_NEAR(found.full_square, expected.full_square, tolerance * (1.0 + expected.full_square));
  EXPECT_NEAR(found.stored_square, expected.stored_square, tolerance * (1.0 + expected.stored_square));
}

void expect_near(const Comparison& found, const Comparison& expected, double tolerance) {
  expect_near(found.all, expected.all, tolerance);
  expect_near(found.prompt, expected.prompt, tolerance);
  expect_near(found.nosink, expected.nosink, tolerance);
  expect_near(found.logits, expected.logits, tolerance);
  EXPECT_NEAR(found.l1, expected.l1, tolerance);
  EXPECT_NEAR(found.mass, expected.mass, tolerance);
  EXPECT_NEAR(found.full_mass, expected.full_mass, tolerance);
  EXPECT_NEAR(found.output_full_square, expected.output_full_square, tolerance);
  EXPECT_NEAR(found.output_square, expected.output_square, tolerance);
  EXPECT_NEAR(found.output_dot, expected.output_dot, tolerance);
  EXPECT_NEAR(found.error_square, expected.error_square, tolerance);
}

auto members(const Comparison& c) {
  const auto numbers = [](const Alignment& a) { return std::tuple(a.dot, a.full_square, a.stored_square); };
  return std::tuple(numbers(c.all), numbers(c.prompt), numbers(c.nosink), numbers(c.logits), c.l1, c.mass, c.full_mass,
                    c.output_full_square, c.output_square, c.output_dot, c.error_square);
}

class CompareAttention : public ::testing::TestWithParam<EvalCase> {};

TEST_P(CompareAttention, IsThatOfBruteForceWithMovedKeysOtherStoresAndAnySets) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  LayerShape other = shape;
  other.seed = 9;
  const RandomLayer stored(other);
  std::vector<std::vector<KeptSet>> all_sets;
  for (const Heads heads : {Heads::kv, Heads::query, Heads::layer}) {
    all_sets.push_back({random_set(heads, shape, boundary, 0.3, 7)});
    all_sets.push_back(one_a_query(heads, GetParam(), 0.3, 8));
  }
  all_sets.push_back(one_a_query(Heads::kv, GetParam(), 0.0, 9));
  for (std::size_t set = 0; set < all_sets.size(); ++set) {
    const std::vector<KeptSet>& sets = all_sets[set];
    for (const Positions positions : {Positions::original, Positions::cache}) {
      const auto compare = [&](int threads) {
        return tested_backend(threads)->compare_attention(layer.tensors(), stored.tensors(), positions, queries,
                                                          boundary, sets);
      };
      const std::vector<Comparison> found = compare(1);
      ASSERT_EQ(found.size(), static_cast<std::size_t>(shape.query_heads) * queries.size());
      const std::vector<Comparison> two = compare(2), three = compare(3);
      for (std::size_t cell = 0; cell < found.size(); ++cell) {
        const std::size_t query = cell % queries.size();
        const int head = static_cast<int>(cell / queries.size());
        SCOPED_TRACE(::testing::Message() << "set " << set << ", head " << head << ", query " << queries[query]
                                          << (positions == Positions::cache ? ", moved" : ""));
        expect_near(found[cell],
                    reference_comparison(layer, stored, positions, head, queries[query], boundary,
                                         sets[sets.size() == 1 ? 0 : query]),
                    1e-11);
        EXPECT_EQ(members(two[cell]), members(found[cell]));
        EXPECT_EQ(members(three[cell]), members(found[cell]));
      }
    }
  }
}

/// The values of another layer, larger with each query.
class GrowingValues final : public EvolvingValues {
 public:
  explicit GrowingValues(const LayerTensors& layer) : layer_(layer) {}

  std::vector<float> at_query(int kv_head, int query) const {
    std::vector<float> values = widened(layer_.v.heads_from(kv_head));
    for (float& value : values) value *= 1.0F + static_cast<float>(query) / 64.0F;
    return values;
  }
  Reader of_head(int kv_head) const override {
    return [this, kv_head, values = std::vector<float>()](int query) mutable {
      values = at_query(kv_head, query);
      return std::span<const float>(values);
    };
  }

 private:
  const LayerTensors layer_;
};

TEST_P(CompareAttention, SetsTogetherHaveTheBitsOfEachAlone) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  LayerShape other = shape;
  other.seed = 9;
  const RandomLayer stored(other);
  std::vector<LayerTensors> stores(3, layer.tensors());
  stores[1] = stored.tensors();
  stores[2].v = stored.tensors().v;
  const std::vector<KeptSet> one{random_set(Heads::kv, shape, boundary, 0.3, 7)},
      many = one_a_query(Heads::query, GetParam(), 0.3, 8);
  std::vector<ChangedSet> sets;
  for (const LayerTensors& store : stores)
    for (const Positions positions : {Positions::original, Positions::cache})
      for (const KeptSets kept : {KeptSets(one), KeptSets(many)}) sets.push_back({store, positions, kept});
  for (const bool vectors : {false, true}) {
    const std::vector<ComparedSet> together =
        tested_backend(2)->compare_sets(layer.tensors(), sets, queries, boundary, vectors);
    ASSERT_EQ(together.size(), sets.size());
    for (std::size_t i = 0; i < sets.size(); ++i) {
      OutputVectors outputs;
      const std::vector<Comparison> alone =
          tested_backend(1)->compare_attention(layer.tensors(), sets[i].stored, sets[i].positions, queries, boundary,
                                               sets[i].kept, vectors ? &outputs : nullptr);
      for (std::size_t cell = 0; cell < alone.size(); ++cell)
        EXPECT_EQ(members(together[i].comparisons[cell]), members(alone[cell])) << "set " << i << ", cell " << cell;
      EXPECT_EQ(together[i].outputs.full, outputs.full);
      EXPECT_EQ(together[i].outputs.errors, outputs.errors);
    }
  }
}

TEST_P(CompareAttention, EachQueryReadsItsOwnValues) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  const GrowingValues values(layer.tensors());
  const std::vector<KeptSet> one{random_set(Heads::kv, shape, boundary, 0.3, 7)},
      many = one_a_query(Heads::query, GetParam(), 0.3, 8);
  for (const KeptSets kept : {KeptSets(one), KeptSets(many)}) {
    const LayerTensors tensors = layer.tensors();
    const ChangedSet set{tensors, Positions::original, kept, &values};
    const ComparedSet found =
        tested_backend(2)->compare_sets(layer.tensors(), std::span(&set, 1), queries, boundary, true).front();
    for (std::size_t query = 0; query < queries.size(); ++query) {
      std::vector<float> all;
      for (int head = 0; head < shape.kv_heads; ++head)
        std::ranges::copy(values.at_query(head, queries[query]), std::back_inserter(all));
      LayerTensors stored = layer.tensors();
      stored.v = view_of(all, stored.v);
      OutputVectors outputs;
      const std::vector<Comparison> alone = tested_backend(1)->compare_attention(
          layer.tensors(), stored, Positions::original, std::span(queries).subspan(query, 1), boundary,
          kept.subspan(kept.size() == 1 ? 0 : query, 1), &outputs);
      for (std::size_t head = 0; head < alone.size(); ++head) {
        const std::size_t cell = head * queries.size() + query, dim = outputs.errors.size() / alone.size();
        EXPECT_EQ(members(found.comparisons[cell]), members(alone[head])) << "query " << query << ", head " << head;
        EXPECT_TRUE(std::ranges::equal(std::span(found.outputs.errors).subspan(cell * dim, dim),
                                       std::span(outputs.errors).subspan(head * dim, dim)));
      }
    }
  }
}

TEST_P(CompareAttention, TokensHaveWeights) {
  const auto& [shape, boundary, queries] = GetParam();
  const RandomLayer layer(shape);
  const auto weight = [](int head, int query, int key) { return 0.5 + uniform(chain(3, head, query, key)) * 40; };
  const LogWeights log_weights = [&](int head, int query, int first, std::span<double> logits) {
    for (std::size_t i = 0; i < logits.size(); ++i)
      logits[i] += std::log(weight(head, query, first + static_cast<int>(i)));
  };
  const std::vector<KeptSet> one{random_set(Heads::kv, shape, boundary, 0.3, 7)},
      many = one_a_query(Heads::query, GetParam(), 0.3, 8);
  for (const KeptSets kept : {KeptSets(one), KeptSets(many)}) {
    const LayerTensors tensors = layer.tensors();
    const ChangedSet set{tensors, Positions::original, kept, nullptr, &log_weights};
    const ComparedSet found =
        tested_backend(2)->compare_sets(layer.tensors(), std::span(&set, 1), queries, boundary, false).front();
    for (std::size_t cell = 0; cell < found.comparisons.size(); ++cell) {
      const std::size_t query = cell % queries.size();
      const int head = static_cast<int>(cell / queries.size());
      SCOPED_TRACE(::testing::Message() << "head " << head << ", query " << queries[query]);
      std::vector<double> weights;
      for (int key = 0; key < shape.tokens; ++key) weights.push_back(weight(head, queries[query], key));
      expect_near(found.comparisons[cell],
                  reference_comparison(layer, layer, Positions::original, head, queries[query], boundary,
                                       kept[kept.size() == 1 ? 0 : query], weights),
                  1e-11);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CompareAttention,
    ::testing::Values(
        EvalCase{{.query_heads = 4, .kv_heads = 2, .tokens = 80, .dim = 8, .rope_pairs = 3}, 60, range(50, 80, 3)},
        EvalCase{{.query_heads = 9, .kv_heads = 3, .tokens = 333, .dim = 33, .rope_pairs = 16, .interleaved = true},
                 300,
                 range(290, 333, 5)},
        EvalCase{{.query_heads = 5, .kv_heads = 1, .tokens = 101, .dim = 12, .dtype = DType::float16, .rope_pairs = 6},
                 77,
                 range(0, 101, 10)},
        EvalCase{{.tokens = 150, .dim = 16, .dtype = DType::bfloat16, .sliding_window = 40, .rope_pairs = 8},
                 100,
                 range(70, 150, 9)},
        EvalCase{{.tokens = 90, .dim = 8, .spread = 2.0, .softcap = 4.0F, .rope_pairs = 4}, 70, range(60, 90)},
        EvalCase{{.query_heads = 60, .kv_heads = 1, .tokens = 40, .dim = 3, .rope_pairs = 1}, 2, range(0, 40, 13)},
        EvalCase{{.query_heads = 1, .kv_heads = 1, .tokens = 1, .dim = 1}, 1, {0}},
        EvalCase{{.tokens = 90, .dim = 22, .rope_pairs = 3, .rope_offset = 16, .value_components = 16},
                 60,
                 range(50, 90, 3)},
        EvalCase{{.tokens = 90,
                  .dim = 21,
                  .rope_pairs = 3,
                  .interleaved = true,
                  .rope_offset = 9,
                  .chunk = 26,
                  .sink_logits = true},
                 60,
                 range(50, 90, 3)}));

TEST(CompareAttentionWith, EverySimdLevelHasTheSameBits) {
  const EvalCase some{{.tokens = 90, .dim = 20, .rope_pairs = 10}, 60, range(50, 90, 3)};
  const RandomLayer layer(some.shape);
  const std::vector<KeptSet> sets = one_a_query(Heads::kv, some, 0.3, 1);
  std::vector<Comparison> expected;
  at_every_simd_level([&](const char* level) {
    const std::vector<Comparison> found = tested_backend(1)->compare_attention(
        layer.tensors(), layer.tensors(), Positions::cache, some.queries, some.boundary, sets);
    if (expected.empty()) expected = found;
    for (std::size_t cell = 0; cell < found.size(); ++cell)
      EXPECT_EQ(members(found[cell]), members(expected[cell])) << level;
  });
}

}  // namespace
}  // namespace kvreplay::testing
