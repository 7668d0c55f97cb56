#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "nearest.h"
#include "positions.h"
#include "replay/replay.h"

namespace kvreplay {
namespace {

const Span& find_span(const Trace& trace, std::string_view name) {
  if (const Span* found = find_span(trace.header().spans, name)) return *found;
  std::vector<std::string> known;
  for (const Span& span : trace.header().spans) known.push_back(span.name);
  if (known.empty()) throw Error{Refusal::input, trace.path().string(), "has no spans", "span " + std::string(name)};
  throw Error{Refusal::input, trace.path().string(), "no such span", nearest(name, known), std::string(name)};
}

/// The number behind "KEY:", at least 1.
int number_of(std::string_view text, std::string_view key) {
  const std::string where = "eval " + std::string(text);
  const int n = parse_int(where, text.substr(key.size()));
  if (n < 1) throw Error{Refusal::usage, where, "out of range", "1 or more", std::to_string(n)};
  return n;
}

/// First of `wanted` (ascending) that layer l does not hold a query for, or -1.
int first_missing(const Trace& trace, int l, std::span<const std::int32_t> wanted) {
  const std::span<const std::int32_t> stored = trace.query_positions(l);
  if (stored.empty()) return -1;
  std::vector<std::int32_t> missing;
  std::ranges::set_difference(wanted, stored, std::back_inserter(missing));
  return missing.empty() ? -1 : missing.front();
}

void require_queries(const Trace& trace, std::span<const int> layers, std::span<const std::int32_t> wanted,
                     const std::string& who) {
  for (const int l : layers) {
    const int missing = first_missing(trace, l, wanted);
    if (missing < 0) continue;
    throw Error{Refusal::input, fmt::format("{}:/layers/{:03}/q_positions", trace.path().string(), l),
                "too few stored queries for " + who, fmt::format("queries {}..{}", wanted.front(), wanted.back()),
                fmt::format("no query {}", missing)};
  }
}

}  // namespace

std::vector<std::int32_t> eval_queries(const Trace& trace, std::string_view text) {
  const TraceHeader& header = trace.header();
  std::vector<std::int32_t> queries;
  if (text == "continuation") {
    queries = position_range(header.prefill, header.tokens());
    if (queries.empty())
      throw Error{Refusal::input, trace.path().string(), "no continuation to measure at",
                  "tokens after the prompt, or another --eval such as last:32", "0 tokens"};
  } else if (text == "all") {
    queries = position_range(0, header.tokens());
  } else if (text.starts_with("last:")) {
    const int n = number_of(text, "last:");
    if (n > header.prefill)
      throw Error{Refusal::usage, "eval " + std::string(text), "longer than the prompt",
                  fmt::format("at most {}", header.prefill), std::to_string(n)};
    queries = position_range(header.prefill - n, header.prefill);
  } else if (text.starts_with("stride:")) {
    queries = position_range(0, header.tokens(), number_of(text, "stride:"));
  } else if (text.starts_with("span:")) {
    const Span& span = find_span(trace, text.substr(5));
    queries = position_range(span.begin, span.end);
  } else {
    const std::vector<std::string> known{"continuation", "last:N", "span:NAME", "all", "stride:K"};
    throw Error{Refusal::usage, "eval", "unknown choice of queries", nearest(text, known), std::string(text)};
  }
  std::vector<int> all_layers(static_cast<std::size_t>(header.layers));
  std::iota(all_layers.begin(), all_layers.end(), 0);
  require_queries(trace, all_layers, queries, "--eval " + std::string(text));
  return queries;
}

int boundary(const Trace& trace, std::string_view text) {
  const int prefill = trace.header().prefill;
  if (text == "prompt") return prefill;
  const std::string where = "boundary " + std::string(text);
  const int tokens = text.starts_with("span:") ? find_span(trace, text.substr(5)).end : parse_int(where, text);
  if (tokens < 1 || tokens > prefill)
    throw Error{Refusal::usage, where, "outside the prompt", fmt::format("1..{}", prefill), std::to_string(tokens)};
  return tokens;
}

std::vector<int> treated_layers(const Trace& trace, bool treat_sliding) {
  const TraceHeader& header = trace.header();
  std::vector<int> treated;
  for (int l = 0; l < header.layers; ++l)
    if (treat_sliding || header.sliding_window[static_cast<std::size_t>(l)] == 0) treated.push_back(l);
  if (treated.empty())
    throw Error{Refusal::input, trace.path().string(), "every layer has a sliding window",
                "a layer without one, or --sliding treat"};
  return treated;
}

void check_policy(const Trace& trace, const Conditions& conditions, const ConfiguredPolicy& policy) {
  policy.check_limits(conditions.boundary, static_cast<int>(conditions.layers.size()));
  const Plan plan = policy.plan();
  if (const auto* counts = std::get_if<CountsOf>(&plan.allocate))
    check_policy(trace, conditions, ConfiguredPolicy::parse(counts->policy));
  const Needs needs = plan.needs;
  const int first = needs.all_queries ? 0 : std::max(0, conditions.boundary - needs.last_queries);
  const std::vector<std::int32_t> wanted = position_range(first, conditions.boundary);
  if (!wanted.empty()) require_queries(trace, conditions.layers, wanted, policy.name());
}

}  // namespace kvreplay
