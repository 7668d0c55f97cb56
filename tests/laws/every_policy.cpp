// Laws that hold for every registered policy: a new file in core/policies/papers joins by itself.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "recorded_run.h"

namespace kvreplay {
namespace {

struct TraceCase {
  std::string name;
  SynthOptions options;
};

SynthOptions shape(const std::string& kind, int layers, int query_heads, int kv_heads, int head_dim, int prompt,
                   int continuation) {
  SynthOptions options = synth_defaults(kind);
  options.layers = layers;
  options.query_heads = query_heads;
  options.kv_heads = kv_heads;
  options.head_dim = head_dim;
  options.prefill = prompt;
  options.continuation = continuation;
  return options;
}

std::vector<TraceCase> cases() {
  std::vector<TraceCase> all{
      {"grouped", shape("gaussian", 3, 6, 2, 32, 97, 9)},
      {"multi_query", shape("sinks", 2, 4, 1, 24, 64, 5)},
      {"one_layer", shape("integer", 1, 2, 2, 8, 50, 3)},
      {"shorter_than_window", shape("gaussian", 2, 4, 2, 16, 5, 2)},
      {"repeated_tokens", shape("repeat", 2, 4, 2, 16, 80, 4)},
      {"one_token", shape("gaussian", 2, 2, 1, 8, 1, 1)},
      {"sliding", shape("gaussian", 4, 4, 2, 16, 60, 6)},
  };
  all.back().options.sliding_window = {7, 0};
  all[0].options.logit_softcap = 5.0;
  return all;
}

const std::vector<TraceCase>& traces() {
  static const std::vector<TraceCase> all = cases();
  return all;
}

bool has_budget(const std::string& policy) {
  return !std::holds_alternative<Everything>(ConfiguredPolicy::parse(policy).plan().allocate);
}

class EveryPolicy : public testing::TestWithParam<std::string> {
 protected:
  /// Calls `check(trace, budget)` for all traces and some budgets.
  template <class Check>
  static void on_all(Check check) {
    for (const TraceCase& one : traces()) {
      SCOPED_TRACE(one.name);
      const TemporaryTrace file(one.options);
      const Trace trace = file.open();
      for (const int budget : {1, 3, 12, 40, 1000}) {
        SCOPED_TRACE("budget " + std::to_string(budget));
        check(trace, budget);
      }
    }
  }
};

TEST_P(EveryPolicy, StaysWithinItsBudgetSortedAndUnique) {
  on_all([](const Trace& trace, int budget) {
    const RecordedRun run = record(trace, {GetParam()}, budget);
    const Conditions conditions = default_conditions(trace);
    long slots = 0, allowed = 0;
    for (int l = 0; l < static_cast<int>(conditions.layers.size()); ++l) {
      const LayerSelection& selection = run.selections.at({0, l});
      for (int row = 0; row < selection.set.rows(); ++row) {
        const std::vector<std::int32_t> kept = selection.set.positions(row);
        EXPECT_TRUE(std::ranges::adjacent_find(kept, std::greater_equal{}) == kept.end());
        EXPECT_TRUE(kept.empty() || (kept.front() >= 0 && kept.back() < conditions.boundary));
        EXPECT_LE(static_cast<int>(kept.size()), selection.granted[static_cast<std::size_t>(row)]);
        slots += static_cast<long>(kept.size());
        allowed += std::min(budget, conditions.boundary);
      }
    }
    if (has_budget(GetParam())) {
      EXPECT_LE(slots, allowed);
    }
    if (budget >= conditions.boundary) {
      EXPECT_EQ(slots, allowed) << "a budget of P or more keeps everything";
    }
  });
}

TEST_P(EveryPolicy, GivesTheSameBitsForAnyNumberOfThreads) {
  on_all([](const Trace& trace, int budget) {
    const RecordedRun one = record(trace, {GetParam()}, budget, 1);
    for (const int threads : {2, 3}) {
      const RecordedRun more = record(trace, {GetParam()}, budget, threads);
      for (const auto& [key, selection] : one.selections) {
        EXPECT_EQ(selection.set, more.selections.at(key).set);
        const std::vector<Moments>& a = one.moments.at(key);
        const std::vector<Moments>& b = more.moments.at(key);
        ASSERT_EQ(a.size(), b.size());
        EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(Moments)), 0) << threads << " threads";
      }
    }
  });
}

TEST_P(EveryPolicy, RecallsNoMoreThanTheOracleWithItsCounts) {
  on_all([](const Trace& trace, int budget) {
    const RecordedRun run = record(trace, {GetParam()}, budget);
    const Conditions conditions = default_conditions(trace);
    for (int l = 0; l < static_cast<int>(conditions.layers.size()); ++l) {
      const LayerSelection& selection = run.selections.at({0, l});
      const Matrix& future = run.eval_attention.at(l);
      const int group = trace.header().group();
      // Attention of all heads that read a row, to each position; the best `count` of them are the bound.
      Matrix read(selection.set.rows(), future.columns());
      for (int h = 0; h < future.rows(); ++h)
        for (int j = 0; j < future.columns(); ++j) read(selection.set.row_of(h, group), j) += future(h, j);
      double best = 0, kept = 0, whole = 0;
      for (int row = 0; row < read.rows(); ++row) {
        const std::span<double> sums = read.row(row);
        for (const std::int32_t j : selection.set.positions(row)) kept += sums[static_cast<std::size_t>(j)];
        whole += std::accumulate(sums.begin(), sums.end(), 0.0);
        std::ranges::sort(sums, std::greater{});
        best += std::accumulate(sums.begin(), sums.begin() + selection.set.count(row), 0.0);
      }
      const double pairs = static_cast<double>(conditions.eval_queries.size()) * trace.header().query_heads;
      const double continuation = 1.0 - whole / pairs;
      EXPECT_LE(run.recall(0, l), best / pairs + continuation + 1e-6);
      EXPECT_NEAR(run.recall(0, l), kept / pairs + continuation, 2e-6) << "recall is the attention that is kept";
    }
  });
}

TEST_P(EveryPolicy, ObeysTheIdentitiesOfEviction) {
  on_all([](const Trace& trace, int budget) {
    const RecordedRun run = record(trace, {GetParam()}, budget);
    for (const auto& [key, comparisons] : run.general) {
      const int layer = key.second, query = run.general_query.at(key);
      const auto queries = static_cast<int>(default_conditions(trace).eval_queries.size());
      for (std::size_t h = 0; h < comparisons.size(); ++h) {
        const Comparison& general = comparisons[h];
        const std::size_t at = h * static_cast<std::size_t>(queries) + static_cast<std::size_t>(query);
        const Moments& kept = run.moments.at(key)[at];
        const Moments& full = run.full.at(layer)[at];
        EXPECT_NEAR(kept.mass, general.mass, 1e-6);
        EXPECT_NEAR(general.l1, 2.0 * (1.0 - general.mass), 1e-6);
        EXPECT_NEAR(general.dot / std::sqrt(general.full_square * general.stored_square),
                    std::sqrt(kept.square / full.square), 1e-6);
        EXPECT_NEAR(std::sqrt(kept.error_square), std::sqrt(general.error_square),
                    1e-5 * std::sqrt(full.output_square) + 1e-9);
      }
    }
    EXPECT_FALSE(run.general.empty());
  });
}

TEST(Full, IsExact) {
  for (const TraceCase& one : traces()) {
    SCOPED_TRACE(one.name);
    const TemporaryTrace file(one.options);
    const Trace trace = file.open();
    const RecordedRun run = record(trace, {"full"}, 1);
    for (const auto& [key, all] : run.moments)
      for (std::size_t i = 0; i < all.size(); ++i) {
        EXPECT_EQ(all[i].mass, 1.0);
        EXPECT_EQ(all[i].square, run.full.at(key.second)[i].square);
        EXPECT_EQ(all[i].error_square, 0.0);
      }
  }
}

TEST(Oracle, GlobalScopeBoundsEveryPolicyOfItsGranularity) {
  for (const TraceCase& one : traces()) {
    SCOPED_TRACE(one.name);
    const TemporaryTrace file(one.options);
    const Trace trace = file.open();
    std::vector<std::string> asked{"oracle:scope=global",
                                   "oracle:scope=layer",
                                   "oracle",
                                   "oracle:counts=(snapkv)",
                                   "snapkv",
                                   "h2o",
                                   "chunkkv",
                                   "random",
                                   "local",
                                   "streaming-llm"};
    const RecordedRun run = record(trace, asked, 12);
    const auto layers = static_cast<int>(default_conditions(trace).layers.size());
    const auto mean = [&](int cell) {
      double sum = 0;
      for (int l = 0; l < layers; ++l) sum += run.recall(cell, l);
      return sum / layers;
    };
    for (int cell = 1; cell < static_cast<int>(asked.size()); ++cell)
      EXPECT_LE(mean(cell), mean(0) + 1e-9) << asked[static_cast<std::size_t>(cell)];
    EXPECT_LE(mean(2), mean(1) + 1e-9) << "a layer's heads may share their slots";
    for (int l = 0; l < layers; ++l)
      EXPECT_EQ(run.selections.at({3, l}).set.count(0), run.selections.at({4, l}).set.count(0));
  }
}

TEST(ChunkKv, ReusesTheSetOfTheFirstOfEveryNLayers) {
  SynthOptions options = shape("gaussian", 5, 4, 2, 16, 90, 4);
  const TemporaryTrace file(options);
  const RecordedRun run = record(file.open(), {"chunkkv:heads=kv,reuse=2", "chunkkv:heads=kv"}, 20);
  for (int l = 0; l < 5; ++l) {
    EXPECT_EQ(run.selections.at({0, l}).set, run.selections.at({1, l / 2 * 2}).set);
    EXPECT_EQ(run.selections.at({0, l}).source, l / 2 * 2);
  }
}

std::string test_name(const testing::TestParamInfo<std::string>& parameter) {
  std::string name = parameter.param;
  std::ranges::replace(name, '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Registry, EveryPolicy, testing::ValuesIn(policies().names()), test_name);

}  // namespace
}  // namespace kvreplay
