#include "analysis/run_sample.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "hash.h"
#include "random.h"

namespace kvreplay {
namespace {

/// Units of a sample.
struct Drawn {
  std::vector<int> units;  // ascending
  std::vector<int> pairs;  // their numbers among these, in pairs
};

/// Samples of different traces, and of different sizes, are independent.
Drawn drawn(const RunRequest& request, const TraceRecord& trace, std::string_view kind, int all, int count) {
  const std::uint64_t of_trace = std::stoull(trace.hash.substr(0, 16), nullptr, 16);
  const std::uint64_t of_kind = std::stoull(hash_of(std::as_bytes(std::span(kind))).substr(0, 16), nullptr, 16);
  const std::vector<int> in_pairs = draw_pairs(all, count, chain(request.seed, of_trace, of_kind, count));
  Drawn found{in_pairs, {}};
  std::ranges::sort(found.units);
  for (const int unit : in_pairs)
    found.pairs.push_back(static_cast<int>(std::ranges::lower_bound(found.units, unit) - found.units.begin()));
  return found;
}

/// Names the sizes of the sample and what else determines it.
void name_sample(const RunRequest& request, TraceWork& work) {
  TraceRecord& facts = work.facts;
  facts.sample.clear();
  facts.looks = request.precision.half_width > 0 ? most_looks : 1;
  if (facts.samples_layers()) facts.sample = fmt::format("layers={},", facts.treated.size());
  if (facts.samples_heads()) facts.sample += fmt::format("heads={},", facts.sampled_heads);
  if (!work.query_pairs.empty()) facts.sample += fmt::format("queries={},", facts.n_queries);
  if (facts.sample.empty()) return;
  facts.sample += fmt::format("seed={}", request.seed);
  if (facts.looks > 1) facts.sample += fmt::format(",looks={}", facts.looks);
}

/// Replaces the treated layers by a sample, where that is fewer.
void draw_layers(const RunRequest& request, TraceWork& work) {
  const std::vector<int>& all = work.conditions.layers;
  const auto layers = static_cast<int>(all.size());
  if (request.sample.layers == 0 || request.sample.layers >= layers) return;
  const Drawn found = drawn(request, work.facts, "layers", layers, request.sample.layers);
  work.conditions.sampled_layers = found.units;
  work.layer_pairs = found.pairs;
  work.facts.all_layers = all;
  work.facts.treated.clear();
  for (const int layer : found.units) work.facts.treated.push_back(all[static_cast<std::size_t>(layer)]);
}

/// Measures a sample of the KV heads of each layer, where that is fewer. Throws Error{usage} where layers differ in
/// heads.
void draw_heads(const RunRequest& request, TraceWork& work) {
  if (request.sample.heads == 0) return;
  if (!work.facts.has_equal_heads())
    throw Error{Refusal::usage, "--sample: heads", "layers of " + work.facts.name + " differ in heads",
                "a sample without heads=", "heads=" + std::to_string(request.sample.heads)};
  if (request.sample.heads >= work.facts.kv_heads) return;
  work.facts.sampled_heads = request.sample.heads;
  work.conditions.sampled_heads.resize(work.conditions.layers.size());
  for (const int layer : work.conditions.replayed_layers()) {
    Drawn found =
        drawn(request, work.facts, fmt::format("heads of layer {}", layer), work.facts.kv_heads, request.sample.heads);
    work.conditions.sampled_heads[static_cast<std::size_t>(layer)] = std::move(found.units);
    work.head_pairs.push_back(std::move(found.pairs));
  }
}

/// Eval queries of the first sample: those of an earlier run where the size follows from its results.
int first_sample(const RunRequest& request, const TraceWork& work) {
  const bool grows = request.precision.half_width > 0;
  const int asked = grows && request.sample.queries == 0 ? pilot_queries : request.sample.queries;
  const std::filesystem::path earlier =
      request.output.empty() ? std::filesystem::path() : work.cells_path(request.output);
  if (!grows || request.force || !std::filesystem::exists(earlier)) return asked;
  return read_cell_ids(earlier).trace.n_queries;
}

/// Throws Error{usage} for a policy whose metrics the sample does not estimate.
void check_sampled_policies(const RunRequest& request, int layers) {
  for (const ConfiguredPolicy& policy : request.policies)
    if (const std::string reason = why_not_estimated(request, policy, layers); !reason.empty())
      throw Error{Refusal::usage, policy.label(), reason, "a replay without --sample"};
}

}  // namespace

std::string why_not_estimated(const RunRequest& request, const MetricName& name) {
  const Measure& measure = find_variant(name)->measure;
  std::string reason = request.samples_queries() ? why_no_sample_of_queries(measure) : "";
  if (reason.empty() && request.sample.heads > 0) reason = why_no_sample_of_heads(measure);
  return reason.empty() && request.sample.layers > 0 ? why_no_sample_of_layers(measure) : reason;
}

std::string why_not_estimated(const RunRequest& request, const ConfiguredPolicy& policy, int layers) {
  std::string reason = request.samples_queries() ? why_no_sample_of_queries(policy, layers) : "";
  return reason.empty() && request.sample.layers > 0 ? why_no_sample_of_layers(policy, layers) : reason;
}

void check_sampled_metrics(const RunRequest& request) {
  const auto reason_of = [&](const MetricName& name) { return why_not_estimated(request, name); };
  if (std::ranges::none_of(request.metrics, [&](const MetricName& name) { return reason_of(name).empty(); }))
    throw Error{Refusal::usage, request.metrics.front().text(), reason_of(request.metrics.front()),
                "a replay without --sample"};
  if (request.precision.half_width > 0 &&
      std::ranges::find(request.metrics, request.precision.metric) == request.metrics.end())
    throw Error{Refusal::usage, "--precision", request.precision.metric.text() + " is not measured",
                "one of --metrics"};
}

void draw_queries(const RunRequest& request, TraceWork& work, int count) {
  const auto all = static_cast<int>(work.eval_queries.size());
  work.conditions.eval_queries = work.eval_queries;
  work.query_pairs.clear();
  work.facts.all_queries = work.facts.n_queries = all;
  if (count > 0 && count < all) {
    const Drawn found = drawn(request, work.facts, "queries", all, count);
    work.query_pairs = found.pairs;
    work.conditions.eval_queries.clear();
    for (const int query : found.units)
      work.conditions.eval_queries.push_back(work.eval_queries[static_cast<std::size_t>(query)]);
    work.facts.n_queries = count;
  }
  name_sample(request, work);
}

void draw_sample(const RunRequest& request, TraceWork& work) {
  check_sampled_policies(request, static_cast<int>(work.conditions.layers.size()));
  work.eval_queries = work.conditions.eval_queries;
  draw_layers(request, work);
  draw_heads(request, work);
  draw_queries(request, work, first_sample(request, work));
}

}  // namespace kvreplay
