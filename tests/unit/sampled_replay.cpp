#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "analysis/metrics/metric.h"
#include "analysis/precision.h"
#include "analysis/sampling_error.h"
#include "random.h"
#include "replay/replay.h"
#include "replay/sample.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

std::string refusal(const std::string& text) {
  try {
    SampleSizes::parse(text);
  } catch (const Error& error) {
    return std::to_string(error.exit_code()) + " " + error.what();
  }
  return "no refusal";
}

double mean_of(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

std::vector<double> drawn(std::span<const double> population, int count, std::uint64_t seed) {
  std::vector<double> values;
  for (const int unit : draw_pairs(static_cast<int>(population.size()), count, seed))
    values.push_back(population[static_cast<std::size_t>(unit)]);
  return values;
}

TEST(SampleSizes, AreReadFromText) {
  EXPECT_EQ(SampleSizes::parse("queries=256").queries, 256);
  EXPECT_EQ(SampleSizes::parse("queries=8,layers=4").layers, 4);
  EXPECT_EQ(SampleSizes::parse("heads=2").heads, 2);
  EXPECT_EQ(refusal("layers=3"), "2 --sample: layers: not in pairs: expected an even number, found 3");
  EXPECT_EQ(refusal("queries=3"), "2 --sample: queries: not in pairs: expected an even number, found 3");
  EXPECT_EQ(refusal("queries=0"), "2 --sample:queries: out of range: expected 2.., found 0");
  EXPECT_EQ(refusal("256"), "2 --sample: not an assignment: expected layers=6,heads=4,queries=256, found 256");
  EXPECT_EQ(refusal("query=2"), "2 --sample: unknown parameter: expected one of layers, heads, queries, found query");
}

TEST(DrawPairs, DrawsTwoUnitsOfEachStratum) {
  for (const int population : {4, 11, 12, 97})
    for (int count = 2; count <= population; count += 2) {
      const std::vector<int> units = draw_pairs(population, count, 5);
      ASSERT_EQ(std::ssize(units), count);
      EXPECT_EQ(std::set<int>(units.begin(), units.end()).size(), units.size());
      EXPECT_EQ(units, draw_pairs(population, count, 5));
      const int widest = (population + count / 2 - 1) / (count / 2);  // a stratum
      for (std::size_t i = 0; i < units.size(); i += 2) {
        EXPECT_TRUE(units[i] >= 0 && units[i] < population && units[i + 1] >= 0 && units[i + 1] < population);
        EXPECT_LT(std::abs(units[i] - units[i + 1]), 2 * widest) << "every other unit";
      }
    }
}

TEST(DrawPairs, DrawsEachUnitWithTheSameProbability) {
  constexpr int population = 11, count = 6, trials = 20'000;  // strata of 3 and 4 units
  std::vector<int> times(population);
  for (int trial = 0; trial < trials; ++trial)
    for (const int unit : draw_pairs(population, count, static_cast<std::uint64_t>(trial)))
      ++times[static_cast<std::size_t>(unit)];
  constexpr double share = static_cast<double>(count) / population;
  for (const int n : times) EXPECT_NEAR(n, trials * share, 5 * std::sqrt(trials * share * (1 - share)));
}

TEST(SamplingError, ByHand) {
  const SamplingError error = error_of_pairs(std::vector{1.0, 3.0, 4.0, 2.0}, 8);
  EXPECT_DOUBLE_EQ(error.variance, 0.5 / 16 * 8);
  EXPECT_DOUBLE_EQ(error.degrees, 2);
  EXPECT_DOUBLE_EQ(error_of_pairs(std::vector{1.0, 3.0, 2.0, 2.0}, 8).degrees, 1) << "of one pair alone";
  // With 2 degrees of freedom the quantile of p is (2p - 1) sqrt(2 / (1 - (2p - 1)^2)).
  EXPECT_NEAR(error.half_width(), 0.95 * std::sqrt(2 / (1 - 0.95 * 0.95)) * std::sqrt(0.25), 1e-12);
  EXPECT_GT(error.half_width(0.01), error.half_width());
  EXPECT_EQ(error_of_pairs(std::vector{1.0, 3.0}, 2).half_width(), 0) << "every unit";
}

TEST(SamplingError, HasDegreesOfFreedomHoweverSmallItIs) {
  const SamplingError sum = SamplingError{1e-200, 3} + SamplingError{1e-200, 3};
  EXPECT_DOUBLE_EQ(sum.degrees, 6);
  EXPECT_GT(sum.half_width(), 0);
}

TEST(SamplingError, IsTheVarianceOfTheEstimate) {
  std::vector<double> population;
  for (std::uint64_t i = 0; i < 24; ++i) population.push_back(0.1 * static_cast<double>(i) + uniform(chain(i)));
  const double exact = mean_of(population);
  constexpr int trials = 20'000;
  double estimated = 0, squares = 0;
  for (std::uint64_t trial = 0; trial < trials; ++trial) {
    const std::vector<double> values = drawn(population, 8, trial);
    estimated += error_of_pairs(values, 24).variance / trials;
    squares += std::pow(mean_of(values) - exact, 2) / trials;
  }
  EXPECT_NEAR(estimated / squares, 1, 0.05);
}

TEST(SamplingError, OfARootOfQuotients) {
  const std::vector<double> parts{1, 2, 5}, wholes{4, 9, 19};
  const std::vector<double> values = linearised_root(parts, wholes);
  EXPECT_NEAR(mean_of(values), 0.5, 1e-15);
  // The derivative of sqrt(P / W) by the weight of one unit, times n.
  for (std::size_t i = 0; i < 3; ++i) {
    constexpr double step = 1e-6;
    const double moved = std::sqrt((8 + step * parts[i]) / (32 + step * wholes[i]));
    EXPECT_NEAR(values[i], 0.5 + 3 * (moved - 0.5) / step, 1e-5);
  }
  EXPECT_EQ(linearised_root(std::vector{0.0, 0.0}, std::vector{1.0, 0.0}), (std::vector{0.0, 0.0}));
}

TEST(SamplingError, OfASum) {
  const SamplingError both = SamplingError{2, 4} + SamplingError{1, 3};
  EXPECT_EQ(both.variance, 3);
  EXPECT_DOUBLE_EQ(both.degrees, 9 / (4.0 / 4 + 1.0 / 3));
  const SamplingError one = SamplingError{} + SamplingError{2, 4};
  EXPECT_EQ(one.variance, 2);
  EXPECT_DOUBLE_EQ(one.degrees, 4);
  EXPECT_EQ((SamplingError{} + SamplingError{}).half_width(), 0);
}

TEST(SamplingError, PseudoValues) {
  const std::vector<double> values{1, 2, 4};
  const std::vector<double> of_mean = pseudo_values(values, mean), of_harmonic = pseudo_values(values, harmonic_mean);
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(of_mean[i], values[i], 1e-15);
  // The harmonic mean of all is 12/7; without a value it is 8/3, 8/5 and 4/3.
  EXPECT_NEAR(of_harmonic[0], 36.0 / 7 - 16.0 / 3, 1e-14);
  EXPECT_NEAR(of_harmonic[1], 36.0 / 7 - 16.0 / 5, 1e-14);
  EXPECT_NEAR(of_harmonic[2], 36.0 / 7 - 8.0 / 3, 1e-14);
}

/// The exact values of one replay at each eval query, mean over layers and heads.
struct AtEveryQuery final : Sink {
  explicit AtEveryQuery(std::size_t queries) : recall(queries), error(queries), output(queries) {}
  void failed(int, const Error& reason) override { throw reason; }
  void measured(const LayerView& view, std::span<const int>, int first, int count,
                const KeptMoments& moments) override {
    for (int head = 0; head < view.query_heads(); ++head)
      for (int query = 0; query < count; ++query) {
        const auto at = static_cast<std::size_t>(head * count + query), q = static_cast<std::size_t>(first + query);
        recall[q] += moments.kept[at].mass / view.query_heads() / view.layers();
        error[q] += moments.kept[at].error_square;
        output[q] += moments.full[at].output_square;
      }
  }
  std::vector<double> recall, error, output;
};

/// Of 1,000 intervals 950 cover the exact value, within three binomial standard deviations of 6.9. More may do so,
/// because the degrees of freedom of values without outliers are underestimated.
void expect_coverage(int covered) {
  EXPECT_GE(covered, 950 - 21);
  EXPECT_LE(covered, 985);
}

class SampledReplay : public TraceFiles {};

TEST_F(SampledReplay, IntervalsCoverTheExactValue) {
  const Trace trace = Trace::open(std::filesystem::path(KVREPLAY_TRACES) / "smollm2-135m-needle.h5");
  const Conditions conditions{256, eval_queries(trace, "last:224"), treated_layers(trace, false)};
  const auto all = static_cast<int>(conditions.eval_queries.size());
  const std::unique_ptr<Backend> backend = make_backend("cpu", 1);
  for (const char* policy : {"snapkv", "streaming-llm", "random"}) {
    SCOPED_TRACE(policy);
    AtEveryQuery exact(conditions.eval_queries.size());
    const Cell cell{ConfiguredPolicy::parse(policy), 32};
    replay(*backend, trace, conditions, std::span(&cell, 1), exact);
    const double recall = mean_of(exact.recall);
    const double error = std::sqrt(mean_of(exact.error) / mean_of(exact.output));
    int recalls = 0, errors = 0;
    for (std::uint64_t trial = 0; trial < 1000; ++trial) {
      const std::vector<double> of_recall = drawn(exact.recall, 64, trial);
      recalls += std::abs(mean_of(of_recall) - recall) <= error_of_pairs(of_recall, all).half_width() ? 1 : 0;
      const std::vector<double> roots = linearised_root(drawn(exact.error, 64, trial), drawn(exact.output, 64, trial));
      errors += std::abs(mean_of(roots) - error) <= error_of_pairs(roots, all).half_width() ? 1 : 0;
    }
    expect_coverage(recalls);
    expect_coverage(errors);
  }
}

/// Cells of policies whose exact values at all queries are `populations`, at a sample of the queries.
struct SampledCells {
  SampledCells(const std::vector<std::vector<double>>& populations, int count, std::uint64_t seed) {
    trace.n_queries = count;
    trace.all_queries = static_cast<int>(populations.front().size());
    for (const std::vector<double>& population : populations) {
      CellRecord& cell = cells.emplace_back();
      cell.budget = "0.1";
      cell.by_query[{"attention_recall", ""}] = drawn(population, count, seed);
    }
    for (const CellRecord& cell : cells) pointers.push_back(&cell);
  }

  TraceRecord trace;
  std::vector<CellRecord> cells;
  std::vector<const CellRecord*> pointers;
};

std::vector<double> noise(double mean, double width, std::uint64_t seed) {
  std::vector<double> values;
  for (std::uint64_t i = 0; i < 2000; ++i) values.push_back(mean + width * (uniform(chain(seed, i)) - 0.5));
  return values;
}

TEST(Precision, IsReadFromText) {
  EXPECT_EQ(Precision::parse("0.005").text(), "0.005:attention_recall");
  EXPECT_EQ(Precision::parse("0.02:output_error:pooled").text(), "0.02:output_error:pooled");
  const auto refused = [](const char* text) {
    try {
      Precision::parse(text);
    } catch (const Error& error) {
      return std::to_string(error.exit_code()) + " " + error.what();
    }
    return std::string("no refusal");
  };
  EXPECT_EQ(refused("0"), "2 --precision: out of range: expected a half width above 0, as 0.005, found 0");
  EXPECT_EQ(refused("0.1:kept_tokens"),
            "2 --precision: kept_tokens does not depend on the eval queries: expected a metric of eval queries, as "
            "attention_recall");
  EXPECT_EQ(refused("0.1:kld:unknown"),
            "2 --precision: kld:unknown is measured in the live model: expected metrics of a replay; run kvreplay live "
            "RUN --model MODEL after it");
  EXPECT_EQ(refused("0.1:attention_recall:worst"),
            "2 --precision: attention_recall:worst is a percentile over all eval queries: expected a metric of eval "
            "queries, as attention_recall");
}

TEST(Precision, IsReachedByEveryPolicy) {
  const SampledCells some({noise(0.5, 0.1, 1), noise(0.5, 0.4, 2)}, 64, 3);
  const auto half_width = [&](std::size_t cell) {
    return error_of_pairs(some.cells[cell].by_query.begin()->second, 2000).half_width(0.05 / 3);
  };
  EXPECT_TRUE(Precision{half_width(1)}.is_reached(some.pointers, some.trace));
  EXPECT_FALSE(Precision{0.99 * half_width(1)}.is_reached(some.pointers, some.trace)) << half_width(0);
}

TEST(Precision, OrderIsSettledWhereAllPairsDiffer) {
  const std::vector<double> one = noise(0.5, 0.4, 1);
  std::vector<double> more = one;  // as noisy, but it differs from the first by the same at each query
  for (std::size_t i = 0; i < more.size(); ++i) more[i] += 0.01 + 0.001 * static_cast<double>(i % 2);
  const Precision precision{1e-9};
  const auto settled = [&](const std::vector<std::vector<double>>& policies) {
    const SampledCells some(policies, 64, 3);
    return precision.is_order_settled(some.pointers, some.trace);
  };
  EXPECT_TRUE(settled({one, more}));
  EXPECT_FALSE(settled({one, more, noise(0.5, 0.4, 2)}));
  EXPECT_FALSE(settled({one})) << "nothing is ordered";
}

TEST(Precision, OrderOfMorePoliciesNeedsWiderIntervals) {
  const std::vector<double> zero(2000, 0.0), noisy = noise(0, 1, 1), sample = drawn(noisy, 64, 3);
  const double distance = 1.1 * error_of_pairs(sample, 2000).half_width(0.05 / 3) - mean_of(sample);
  const auto settled = [&](int policies) {  // those beyond the second are far away, without noise
    std::vector<std::vector<double>> all{zero, noisy};
    for (double& value : all.back()) value += distance;
    for (int i = 2; i < policies; ++i) all.emplace_back(2000, 100.0 * i);
    const SampledCells some(all, 64, 3);
    return Precision{1e-9}.is_order_settled(some.pointers, some.trace);
  };
  EXPECT_TRUE(settled(2));
  EXPECT_FALSE(settled(6)) << "15 pairs";
}

TEST(Precision, GrowingSamplesCoverTheExactValue) {
  const std::vector<std::vector<double>> populations{noise(0.5, 0.2, 1), noise(0.6, 0.3, 2), noise(0.6, 0.3, 3)};
  const Precision precision{0.01};
  int covered = 0, reached = 0, all_queries = 0;
  for (std::uint64_t trial = 0; trial < 1000; ++trial) {
    int count = pilot_queries;
    for (int look = 1;; ++look) {
      const SampledCells some(populations, count, chain(trial, count));
      const int needed = precision.queries_needed(some.pointers, some.trace);
      const bool suffices = precision.suffices(some.pointers, some.trace);
      if (!suffices && look < most_looks) {
        count = std::max(needed, count + 2);
        continue;
      }
      const std::vector<double>& values = some.cells[1].by_query.begin()->second;
      const double half_width = error_of_pairs(values, 2000).half_width(0.05 / most_looks);
      covered += std::abs(mean(values) - mean(populations[1])) <= half_width ? 1 : 0;
      reached += suffices ? 1 : 0;
      all_queries += count;
      break;
    }
  }
  EXPECT_GE(covered, 950 - 21) << "at least 95 %: the intervals are conservative";
  EXPECT_GE(reached, 990);
  EXPECT_LT(all_queries / 1000, 1000) << "of 2,000 queries";
}

TEST_F(SampledReplay, PoliciesOfAllEvalQueriesAreNotSampled) {
  const auto reason = [](const char* policy) { return why_no_sample_of_queries(ConfiguredPolicy::parse(policy), 4); };
  EXPECT_EQ(reason("snapkv"), "");
  EXPECT_EQ(reason("quest"), "");
  EXPECT_EQ(reason("oracle"), "selects by the attention of all eval queries");
  EXPECT_EQ(reason("snapkv:score=eval"), "selects by the attention of all eval queries");
  EXPECT_EQ(reason("oracle:counts=(snapkv)"), "selects by the attention of all eval queries");
}

TEST_F(SampledReplay, PoliciesThatCombineLayersAreNotReplayedInSome) {
  const auto reason = [](const char* policy) { return why_no_sample_of_layers(ConfiguredPolicy::parse(policy), 4); };
  for (const char* policy : {"snapkv", "pyramid-kv", "ada-kv", "oracle", "h2o:schedule=threshold(0.5,0.3)", "kivi",
                             "layers:0=h2o,1-3=snapkv", "random-twin:of=(pyramid-kv)"})
    EXPECT_EQ(reason(policy), "") << policy;
  EXPECT_EQ(reason("dynamickv"), "allocates tokens by the scores of all layers");
  EXPECT_EQ(reason("random-twin:of=(dynamickv)"), "dynamickv allocates tokens by the scores of all layers");
  EXPECT_EQ(reason("pyramid-infer"), "selects within the kept set of the layer before");
  EXPECT_EQ(reason("chunkkv:reuse=2"), "uses the set of one layer in others");
  EXPECT_EQ(reason("minicache"), "stores layers in pairs");
}

}  // namespace
}  // namespace kvreplay
