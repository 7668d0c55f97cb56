#include "analysis/precision.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <string>

#include "analysis/sampling_error.h"
#include "parameters.h"

namespace kvreplay {
namespace {

constexpr double missed = missed_by_intervals / most_looks;

/// Throws Error{usage} for a metric without a value at each eval query.
void check_metric(const std::string& where, const MetricName& name) {
  const Measure& measure = find_variant(name)->measure;
  const auto of = [&](const std::string& problem) {
    return Error{Refusal::usage, where, name.text() + " " + problem, "a metric of eval queries, as attention_recall"};
  };
  if (const std::string reason = why_no_sample_of_queries(measure); !reason.empty()) throw of(reason);
  if (!is_mean_over_queries(measure)) throw of("does not depend on the eval queries");
}

}  // namespace

Precision Precision::parse(std::string_view text) {
  const std::string where = "--precision";
  Precision precision;
  const std::size_t colon = std::min(text.find(':'), text.size());
  precision.half_width = parse_real(where, text.substr(0, colon));
  if (!(precision.half_width > 0) || !std::isfinite(precision.half_width))
    throw Error{Refusal::usage, where, "out of range", "a half width above 0, as 0.005", std::string(text)};
  if (colon == text.size()) return precision;
  const std::vector<MetricName> names = parse_replayed_metrics(where, text.substr(colon + 1));
  if (names.size() != 1)
    throw Error{Refusal::usage, where, "not one metric", "P:NAME:VARIANT, as 0.02:output_error:pooled",
                std::string(text)};
  precision.metric = names.front();
  check_metric(where, precision.metric);
  return precision;
}

std::string Precision::text() const { return fmt::format("{}:{}", half_width, metric.text()); }

bool Precision::suffices(std::span<const CellRecord* const> cells, const TraceRecord& trace) const {
  return is_reached(cells, trace) || is_order_settled(cells, trace);
}

bool Precision::is_reached(std::span<const CellRecord* const> cells, const TraceRecord& trace) const {
  return std::ranges::all_of(cells, [&](const CellRecord* cell) {
    return error_of_pairs(cell->by_query.at(metric), trace.all_queries).half_width(missed) <= half_width;
  });
}

bool Precision::is_order_settled(std::span<const CellRecord* const> cells, const TraceRecord& trace) const {
  std::map<std::string, std::vector<std::span<const double>>> budgets;
  for (const CellRecord* cell : cells) budgets[cell->budget].push_back(cell->by_query.at(metric));
  double pairs = 0;
  for (const auto& [budget, policies] : budgets)
    pairs += static_cast<double>(policies.size() * (policies.size() - 1)) / 2;
  for (const auto& [budget, policies] : budgets) {
    if (policies.size() < 2) return false;
    for (std::size_t a = 0; a < policies.size(); ++a)
      for (std::size_t b = 0; b < a; ++b) {
        std::vector<double> differences;
        std::ranges::transform(policies[a], policies[b], std::back_inserter(differences), std::minus<>());
        const double error = error_of_pairs(differences, trace.all_queries).half_width(missed / pairs);
        if (std::abs(mean(differences)) <= error) return false;
      }
  }
  return true;
}

int Precision::queries_needed(std::span<const CellRecord* const> cells, const TraceRecord& trace) const {
  double needed = 2;
  for (const CellRecord* cell : cells) {
    const auto count = static_cast<double>(trace.n_queries), all = static_cast<double>(trace.all_queries);
    const double error = error_of_pairs(cell->by_query.at(metric), trace.all_queries).half_width(missed);
    const double spread = error * error * count / (1 - count / all);  // t² S²
    needed = std::max(needed, spread / (half_width * half_width + spread / all));
  }
  const double margin = 1.1 * needed;
  return std::min(trace.all_queries, 2 * static_cast<int>(std::ceil(margin / 2)));
}

}  // namespace kvreplay
