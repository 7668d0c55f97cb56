#include "analysis/self_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "analysis/metrics/metric.h"
#include "policies/arithmetic/ranking.h"

namespace kvreplay {
namespace {

std::string number(double value) { return fmt::format("{:.17g}", value); }

Violation broken(Law law, std::string what, double expected, double found) {
  return {.law = law, .what = std::move(what), .expected = number(expected), .found = number(found)};
}

/// Products that cancel leave logits of rounding alone, and these have no direction.
constexpr double least_logit_square = 1e-10;
/// Of outputs: float32 components of 2^-120 and less are near the denormal numbers, which have fewer digits.
constexpr double least_output_square = 0x1p-240;

/// A metric that both paths yield, and its value when nothing is evicted.
struct TwoPaths {
  std::string name;
  OfMoments measure;
  double when_all_is_kept;
  bool is_base;  // exact when all is kept; a variant may have nothing to look at
};

const std::vector<TwoPaths>& metrics_of_two_paths() {
  static const std::vector<TwoPaths> found = [] {
    const Moments everything{.mass = 1,
                             .square = 1,
                             .prompt_mass = 1,
                             .prompt_square = 1,
                             .nosink_mass = 1,
                             .nosink_square = 1,
                             .output_square = 1,
                             .output_dot = 1,
                             .error_square = 0,
                             .logit_square = 1,
                             .unaligned_dot = 1};
    std::vector<TwoPaths> list;
    for (const std::string& name : metrics().names())
      for (const MetricVariant& variant : metrics().get(name).variants)
        if (const auto* measure = std::get_if<OfMoments>(&variant.measure);
            measure != nullptr && measure->from_comparison != nullptr && measure->over_queries == nullptr)
          list.push_back({MetricName{name, variant.name}.text(), *measure,
                          measure->from_moments(everything, everything), variant.name.empty()});
    return list;
  }();
  return found;
}

/// NaN agrees with nothing, infinity with itself alone.
bool agree(double expected, double found, double tolerance) {
  if (!std::isfinite(expected)) return expected == found;
  return std::abs(expected - found) <= tolerance * std::max(1.0, std::abs(expected));
}

}  // namespace

double tolerance_at(double tolerance, double largest_logit) {
  return std::max(tolerance, logit_rounding_units * 0x1p-24 * largest_logit);
}

std::string Violation::text() const {
  std::string where;
  if (stored_layer >= 0) where += fmt::format("layer {}", stored_layer);
  if (head >= 0) where += fmt::format(", head {}", head);
  if (!where.empty()) where += ": ";
  return fmt::format("{}{}: expected {}, found {}", where, what, expected, found);
}

bool is_finite(const Moments& moments) {
  for (const double sum : {moments.mass, moments.square, moments.prompt_mass, moments.prompt_square,
                           moments.nosink_mass, moments.nosink_square, moments.output_square, moments.output_dot,
                           moments.error_square, moments.logit_square, moments.unaligned_dot})
    if (!std::isfinite(sum)) return false;
  return true;
}

std::optional<Violation> check_moments(const Moments& kept, const Moments& full, bool keeps_everything) {
  if (keeps_everything) {
    for (const TwoPaths& metric : metrics_of_two_paths())
      if (const double found = metric.measure.from_moments(kept, full);
          metric.is_base && !(found == metric.when_all_is_kept))
        return broken(Law::full, metric.name + " of the full cache", metric.when_all_is_kept, found);
    return std::nullopt;
  }
  const struct {
    const char* what;
    double part, whole;
  } sums[] = {{"mass on kept keys", kept.mass, full.mass},
              {"mass on kept keys below the boundary", kept.prompt_mass, full.prompt_mass},
              {"squares on kept keys", kept.square, full.square},
              {"squares on kept keys below the boundary", kept.prompt_square, full.prompt_square},
              {"mass on kept keys after the sinks", kept.nosink_mass, full.nosink_mass},
              {"squares on kept keys after the sinks", kept.nosink_square, full.nosink_square},
              {"squared logits of kept keys", kept.logit_square, full.logit_square}};
  // The added term is for sums so small that the whole of them was lost to underflow.
  for (const auto& [what, part, whole] : sums)
    if (!(part >= 0 && part <= whole * (1 + oracle_tolerance) + 1e-30))
      return Violation{.law = Law::identity, .what = what, .expected = "0.." + number(whole), .found = number(part)};
  if (!is_finite(kept))
    return Violation{.law = Law::identity,
                     .what = "attention over kept keys and its output",
                     .expected = "finite numbers",
                     .found = "NaN or Inf"};
  return std::nullopt;
}

std::optional<Violation> check_comparison(const Comparison& compared, const Moments& kept, const Moments& full,
                                          MomentParts parts, double largest_logit) {
  const double tolerance = tolerance_at(path_tolerance, largest_logit);
  for (const TwoPaths& metric : metrics_of_two_paths()) {
    if (!parts.cover(metric.measure.reads)) continue;
    if (metric.measure.reads.logits && full.logit_square < least_logit_square) continue;
    if (const double square = std::max(full.output_square, compared.output_full_square);
        metric.measure.reads.outputs && square > 0 && square < least_output_square)
      continue;
    const double expected = metric.measure.from_comparison(compared);
    const double found = metric.measure.from_moments(kept, full);
    if (!agree(expected, found, tolerance))
      return broken(Law::identity, metric.name + " by comparison and by moments", expected, found);
  }
  return std::nullopt;
}

const std::vector<RecallByAttention::Row>& RecallByAttention::rows(const KeptSet& set) {
  std::vector<Row>& rows = rows_[set.heads()];
  if (!rows.empty()) return rows;
  const Matrix& sums = view_.eval_attention();
  const auto prompt = static_cast<std::size_t>(view_.prompt());
  rows.resize(static_cast<std::size_t>(set.rows()));
  for (Row& row : rows) row.column.resize(prompt);
  for (int head = 0; head < view_.query_heads(); ++head) {
    Row& row = rows[static_cast<std::size_t>(set.row_of(head, view_.group()))];
    row.pairs += static_cast<double>(view_.eval_queries().size());
    for (std::size_t j = 0; j < prompt; ++j) row.column[j] += sums(head, static_cast<int>(j));
  }
  for (Row& row : rows) {
    // The rest of the attention is on keys that no policy can evict.
    row.always_kept = row.pairs - sum(row.column);
    row.greatest.reserve(prompt + 1);
    row.greatest.push_back(0.0);
    row.ranked = ranked(row.column);
    for (const std::int32_t j : row.ranked)
      row.greatest.push_back(row.greatest.back() + row.column[static_cast<std::size_t>(j)]);
  }
  return rows;
}

std::vector<ExpectedRecall> RecallByAttention::of(const KeptSet& set) {
  std::vector<ExpectedRecall> expected;
  for (int number = 0; number < set.rows(); ++number) {
    const Row& row = rows(set)[static_cast<std::size_t>(number)];
    double kept = 0;
    for (const std::int32_t j : set.positions(number)) kept += row.column[static_cast<std::size_t>(j)];
    const double best = row.greatest[static_cast<std::size_t>(set.count(number))];
    expected.push_back({(row.always_kept + kept) / row.pairs, (row.always_kept + best) / row.pairs});
  }
  return expected;
}

std::vector<double> RecallByAttention::of_best_set(const KeptSet& set) {
  const Matrix& sums = view_.eval_attention();
  const auto queries = static_cast<double>(view_.eval_queries().size());
  std::vector<double> recalls;
  for (int head = 0; head < view_.query_heads(); ++head) {
    const int number = set.row_of(head, view_.group());
    const int count = set.count(number);
    const auto [best, is_new] = best_.try_emplace({set.heads(), head, count});
    if (is_new) {
      // The attention of evicted tokens is summed: a set that keeps everything has a recall of exactly 1.
      double evicted = 0;
      const Row& row = rows(set)[static_cast<std::size_t>(number)];
      for (const std::int32_t j : std::span(row.ranked).subspan(static_cast<std::size_t>(count)))
        evicted += sums(head, j);
      best->second = 1.0 - evicted / queries;
    }
    recalls.push_back(best->second);
  }
  return recalls;
}

std::optional<Violation> check_recall(const ExpectedRecall& expected, double recall, double largest_logit) {
  if (!agree(expected.of_set, recall, tolerance_at(path_tolerance, largest_logit)))
    return broken(Law::identity, "attention_recall by attention of evaluation queries and by moments", expected.of_set,
                  recall);
  if (!(recall <= expected.of_oracle + tolerance_at(oracle_tolerance, largest_logit)))
    return Violation{.law = Law::oracle,
                     .what = "attention_recall above the oracle bound (same token counts)",
                     .expected = "at most " + number(expected.of_oracle),
                     .found = number(recall)};
  return std::nullopt;
}

std::optional<Violation> check_budget(std::span<const LayerSelection> layers, int budget) {
  long kept = 0, allowed = 0;
  for (const LayerSelection& layer : layers) {
    for (int row = 0; row < layer.set.rows(); ++row) kept += layer.set.count(row);
    allowed += static_cast<long>(layer.set.rows()) * budget;
  }
  if (kept <= allowed) return std::nullopt;
  return Violation{.law = Law::budget,
                   .what = "kept slots",
                   .expected = "at most " + std::to_string(allowed),
                   .found = std::to_string(kept)};
}

}  // namespace kvreplay
