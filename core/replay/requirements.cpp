#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "nearest.h"
#include "positions.h"
#include "replay/replay.h"
#include "replay/trace_inputs.h"

namespace kvreplay {
namespace {

const Span& find_span(const Trace& trace, std::string_view name) {
  if (const Span* found = find_span(trace.header().spans, name)) return *found;
  std::vector<std::string> known;
  for (const Span& span : trace.header().spans) known.push_back(span.name);
  if (known.empty())
    throw Error{Refusal::input, trace.path().string(), "trace without spans", "a span " + std::string(name)};
  throw Error{Refusal::input, trace.path().string(), "unknown span", nearest(name, known), std::string(name)};
}

/// The number behind "KEY:", at least 1.
int number_of(std::string_view text, std::string_view key) {
  const std::string where = "eval " + std::string(text);
  const int n = parse_int(where, text.substr(key.size()));
  if (n < 1) throw Error{Refusal::usage, where, "out of range", "1 or more", std::to_string(n)};
  return n;
}

void require_queries(const Trace& trace, std::span<const int> layers, std::span<const std::int32_t> wanted,
                     const std::string& who) {
  for (const int l : layers) {
    const std::span<const std::int32_t> stored = trace.query_positions(l);
    std::vector<std::int32_t> missing;
    if (!stored.empty()) std::ranges::set_difference(wanted, stored, std::back_inserter(missing));
    if (missing.empty()) continue;
    throw Error{Refusal::input, fmt::format("{}:/layers/{:03}/q_positions", trace.path().string(), l),
                "missing stored queries for " + who, fmt::format("queries {}..{}", wanted.front(), wanted.back()),
                fmt::format("no query {}", missing.front())};
  }
}

}  // namespace

void check_eval(std::string_view text) {
  if (text == "continuation" || text == "all" || text.starts_with("span:")) return;
  for (const std::string_view key : {"last:", "stride:"})
    if (text.starts_with(key)) return static_cast<void>(number_of(text, key));
  const std::vector<std::string> known{"continuation", "last:N", "span:NAME", "all", "stride:K"};
  throw Error{Refusal::usage, "eval", "unknown value", nearest(text, known), std::string(text)};
}

std::vector<std::int32_t> eval_queries(const Trace& trace, std::string_view text) {
  check_eval(text);
  const TraceHeader& header = trace.header();
  std::vector<std::int32_t> queries;
  if (text == "continuation") {
    queries = position_range(header.prefill, header.tokens());
    if (queries.empty())
      throw Error{Refusal::input, trace.path().string(), "no continuation, so no evaluation queries",
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
  } else {
    const Span& span = find_span(trace, text.substr(std::string_view("span:").size()));
    queries = position_range(span.begin, span.end);
  }
  std::vector<int> all_layers(static_cast<std::size_t>(header.layers));
  std::iota(all_layers.begin(), all_layers.end(), 0);
  require_queries(trace, all_layers, queries, "--eval " + std::string(text));
  return queries;
}

void check_boundary(std::string_view text) {
  if (text == "prompt" || text.starts_with("span:")) return;
  const std::string where = "boundary " + std::string(text);
  if (const int tokens = parse_int(where, text); tokens < 1)
    throw Error{Refusal::usage, where, "outside the prompt", "1 or more", std::to_string(tokens)};
}

int boundary(const Trace& trace, std::string_view text) {
  check_boundary(text);
  const int prefill = trace.header().prefill;
  if (text == "prompt") return prefill;
  if (text.starts_with("span:")) {
    const Span& span = find_span(trace, text.substr(5));
    if (span.end > prefill)
      throw Error{Refusal::input, trace.path().string(), "span " + span.name + " ends after the prompt",
                  fmt::format("an end at {} or earlier", prefill), std::to_string(span.end)};
    return span.end;
  }
  const std::string where = "boundary " + std::string(text);
  const int tokens = parse_int(where, text);
  if (tokens > prefill)
    throw Error{Refusal::usage, where, "outside the prompt", fmt::format("1..{}", prefill), std::to_string(tokens)};
  return tokens;
}

std::vector<int> treated_layers(const Trace& trace, bool treat_sliding) {
  const TraceHeader& header = trace.header();
  std::vector<int> treated;
  for (int l = 0; l < header.layers; ++l)
    if (header.has_keys(l) && (treat_sliding || header.sees_all_tokens(l))) treated.push_back(l);
  if (treated.empty())
    throw Error{Refusal::input, trace.path().string(), "every layer has a sliding window or chunks",
                "a layer without them, or --sliding treat"};
  return treated;
}

void check_projections(const Trace& trace, std::span<const int> layers, const std::string& who) {
  for (const int layer : layers)
    if (const std::vector<int> readers = trace.header().readers(layer); readers.size() > 1)
      throw Error{Refusal::input, trace.path().string() + ":/model/kv_source",
                  "several output projections for the values of one layer for " + who,
                  "layers with separate keys and values", fmt::format("layers {}", fmt::join(readers, ", "))};
}

void check_reconstruction(const Trace& trace, std::span<const int> layers, int prompt, const std::string& who) {
  const TraceHeader& header = trace.header();
  const std::string file = trace.path().string();
  if (header.reconstruction_ids.empty())
    throw Error{Refusal::input, file + ":/reconstruction", "no pass that repeats the prompt for " + who,
                "a trace captured with --reconstruct", "none"};
  if (header.reconstruction_boundary != prompt)
    throw Error{Refusal::input, file + ":/reconstruction@boundary", "passes for another boundary than that of " + who,
                fmt::format("--boundary {}, or a trace captured with --reconstruct-at", header.reconstruction_boundary),
                fmt::format("{}", prompt)};
  for (const int layer : layers)
    if (const std::vector<int> readers = header.readers(layer); readers.size() > 1)
      throw Error{Refusal::input, file + ":/model/kv_source", "queries of several layers for " + who,
                  "layers with separate keys and values", fmt::format("layers {}", fmt::join(readers, ", "))};
}

namespace {

/// Tokens that may follow the question: a chat template's.
constexpr int most_after_question = 16;

/// The prompt queries that the plan reads, [first, end); P where it reads none.
struct QueryRange {
  int first = 0;
  int end = 0;

  /// Adds the last `count` queries before position `behind`.
  void add(int count, int behind) {
    if (count == 0) return;
    end = first == end ? behind : std::max(end, behind);
    first = std::min(first, std::max(0, behind - count));
  }
};

QueryRange prompt_queries(const Plan& plan, int budget, int prompt, MarkedQuestion question) {
  const Needs needs = needs_of(plan);
  const Scoring how = scoring_of(plan, kept_by_rule(plan, budget, prompt, question), budget, prompt, question);
  const int recent = needs.recent_queries ? std::max(1, how.observing) : 0;
  const int asked = needs.question ? plan.schedule->spared(prompt, question) : 0;
  const bool in_time =
      plan.schedule->decided() == Decision::during_prefill && (needs.last_queries > 0 || needs.recent_queries);
  if (needs.all_queries || in_time) return {0, prompt};
  const int window_end = std::min(how.window_end, prompt);
  QueryRange range{prompt, prompt};
  range.add(plan.score.needs.last_queries, window_end);
  range.add(recent, window_end);
  range.add(plan.store->needs.last_queries, prompt);
  range.add(asked, prompt);
  return range;
}

/// Throws Error{input} with the field in which two layers differ. `what`: why the policy needs equal layers.
[[noreturn]] void refuse_shapes(const Trace& trace, int layer, int other, const std::string& what) {
  const LayerShape one = trace.header().shape(layer), two = trace.header().shape(other);
  const bool dims = one.kv_heads == two.kv_heads && (one.key_dim != two.key_dim || one.value_dim != two.value_dim);
  const auto text = [dims](const LayerShape& shape) {
    return dims ? fmt::format("{} / {} components", shape.key_dim, shape.value_dim)
                : fmt::format("{} query / {} KV heads", shape.query_heads, shape.kv_heads);
  };
  throw Error{Refusal::input, trace.path().string() + (dims ? ":/model/head_dims" : ":/model/heads"), what,
              "layers of one shape, or a policy that treats each layer alone",
              fmt::format("{} in layer {}, {} in layer {}", text(one), layer, text(two), other)};
}

bool allocates_among_layers(const Allocator& allocate) {
  return allocate.from == CountsFrom::all_layers ||
         (allocate.from == CountsFrom::sizes && !allocate.is_uniform && !allocate.keeps_everything);
}

/// Plans that combine layers need layers that are equal in this respect: a token of a row has the same numbers.
void check_shapes(const Trace& trace, std::span<const int> layers, const Plan& plan, const std::string& who) {
  const Needs& needs = plan.score.needs;
  const char* const combines = needs.same_kv_shapes || needs.same_query_heads ? " reads a file for layers of one shape"
                               : allocates_among_layers(*plan.allocate)       ? " allocates tokens among layers"
                               : plan.store->pairs_layers()                   ? " stores layers in pairs"
                                                                              : nullptr;
  const auto rows = [&](const LayerShape& shape) {
    return rows_of(plan.grouping.heads, shape.query_heads, shape.kv_heads);
  };
  const LayerShape first = trace.header().shape(layers.front());
  for (const int layer : layers) {
    const LayerShape shape = trace.header().shape(layer);
    const bool same_rows = rows(shape) == rows(first);
    const bool same_tokens = same_rows && shape.kv_heads == first.kv_heads && shape.key_dim == first.key_dim &&
                             shape.value_dim == first.value_dim;
    const bool same_queries = shape.query_heads == first.query_heads || !needs.same_query_heads;
    if (combines != nullptr && !(same_tokens && same_queries))
      refuse_shapes(trace, layers.front(), layer, who + combines);
    if (plan.share.shares() && !same_rows)
      refuse_shapes(trace, layers.front(), layer, who + " uses the set of one layer in others");
  }
}

void check_on_trace(const Trace& trace, const Conditions& conditions, const LayerPlan& of_range, const std::string& who,
                    Allowance allowed) {
  const int budget = allowed.tokens;
  const Plan& plan = of_range.plan;
  const int prompt = conditions.boundary;
  const MarkedQuestion question = marked_question(trace, prompt);
  const std::span<const int> layers =
      std::span(conditions.layers)
          .subspan(static_cast<std::size_t>(of_range.first), static_cast<std::size_t>(of_range.count));
  for (int l = 0; l < of_range.count; ++l)
    if (const int source = plan.share.source(l, of_range.count); source < 0 || source >= of_range.count)
      throw Error{Refusal::usage, who, "no such layer", fmt::format("-{}..{}", of_range.count, of_range.count - 1),
                  fmt::format("layer {}", source < 0 ? source - of_range.count : source)};
  check_shapes(trace, layers, plan, who);
  plan.schedule->check({who, prompt, question, allowed, !keeps_everything(plan, budget, prompt),
                        conditions.eval_queries.empty() ? -1 : conditions.eval_queries.front()});
  if (!keeps_everything(plan, budget, prompt)) {  // throws what replay would
    plan.allocate->counts(
        division_of(plan, trace.header().shape(layers.front()), of_range.count, prompt, budget, question));
  }
  const bool stores_values = trace.header().stores_values();
  for (const int layer : layers)
    if (const LayerShape shape = trace.header().shape(layer); plan.store->check)
      plan.store->check(who, of_range.count, shape.key_dim, stores_values ? shape.value_dim : 0);
  if (plan.store->changes_tokens() && !plan.store->stores_latents && !stores_values)
    throw Error{Refusal::input, trace.path().string() + ":/model@value_is_key",
                "values are components of the keys, and " + who + " changes keys and values apart",
                "a policy that keeps tokens as they are", "latent vectors"};
  if (plan.store->moves_tokens && !trace.header().has_rope)
    throw Error{Refusal::input, trace.path().string() + ":/model/rope",
                "keys cannot be moved to cache positions for " + who, "the RoPE frequencies of the model", "none"};
  if (needs_of(plan).projection) check_projections(trace, layers, who);
  for (int l = of_range.first; needs_of(plan).projection && l < of_range.end(); ++l)
    if (const int stored = conditions.layers[static_cast<std::size_t>(l)]; !output_projection(trace, stored).data)
      throw Error{Refusal::input, fmt::format("{}:/layers/{:03}/wo", trace.path().string(), stored),
                  "no output projection for " + who, "a trace captured with --with-wo, or wo=none", "none"};
  if (needs_of(plan).reconstruction) check_reconstruction(trace, layers, prompt, who);
  if (plan.score.needs.rope && !trace.header().has_rope)
    throw Error{Refusal::input, trace.path().string() + ":/model/rope",
                "RoPE of keys and queries cannot be undone for " + who, "the RoPE frequencies of the model", "none"};
  const auto [first, end] = prompt_queries(plan, budget, prompt, question);
  const bool goes_on = first < prompt && plan.schedule->goes_on_after_prompt();
  const std::vector<std::int32_t> wanted = position_range(first, goes_on ? trace.header().tokens() : end);
  if (!wanted.empty()) require_queries(trace, layers, wanted, who);
}

}  // namespace

MarkedQuestion marked_question(const Trace& trace, int boundary) {
  const Span* last = nullptr;
  for (const Span& span : trace.header().spans)
    if (span.kind == "question" && span.end <= boundary && (last == nullptr || span.end >= last->end)) last = &span;
  if (last == nullptr || boundary - last->end > most_after_question) return {};
  return {last->begin, last->end};
}

void check_policy(const Trace& trace, const Conditions& conditions, const ConfiguredPolicy& policy, int budget,
                  double of_seen) {
  const auto layers = static_cast<int>(conditions.layers.size());
  policy.check_limits(conditions.boundary, layers);
  for (const LayerPlan& of_range : policy.plans(layers)) {
    if (const auto& other = of_range.plan.allocate->other) check_policy(trace, conditions, *other, budget, of_seen);
    check_on_trace(trace, conditions, of_range, policy.name(), {budget, of_seen});
  }
}

std::vector<std::int32_t> queries_read(const Trace& trace, const Conditions& conditions, const ConfiguredPolicy& policy,
                                       int budget) {
  const int prompt = conditions.boundary;
  const MarkedQuestion question = marked_question(trace, prompt);
  QueryRange read{prompt, prompt};
  for (const LayerPlan& of_range : policy.plans(static_cast<int>(conditions.layers.size()))) {
    if (const auto& other = of_range.plan.allocate->other) {
      const std::vector<std::int32_t> by_other = queries_read(trace, conditions, *other, budget);
      if (!by_other.empty()) read.add(by_other.back() + 1 - by_other.front(), by_other.back() + 1);
    }
    const QueryRange by_plan = prompt_queries(of_range.plan, budget, prompt, question);
    read.add(by_plan.end - by_plan.first, by_plan.end);
    if (by_plan.first < prompt && of_range.plan.schedule->goes_on_after_prompt()) read.end = trace.header().tokens();
  }
  return position_range(read.first, read.end);
}

BytesOfTokens bytes_of_tokens(const Trace& trace, const Conditions& conditions, const ConfiguredPolicy& policy) {
  double of_unchanged = 0;
  std::vector<BytesOfTokens> of_changed;
  for (const LayerPlan& of_range : policy.plans(static_cast<int>(conditions.layers.size()))) {
    const Plan& plan = of_range.plan;
    const StorePtr& store = plan.store;
    const bool changes_size = has_budget(plan) && !store->has_exact_size;
    const auto refuse = [&](const std::string& problem, const char* remedy) {
      throw Error{Refusal::usage, policy.name(), problem, remedy, "a budget in bytes"};
    };
    if (changes_size && !store->bytes)
      refuse("the bytes of " + store->name + " do not follow from the number of tokens", "a budget in tokens");
    if (changes_size && store->exempts_layers && allocates_among_layers(*plan.allocate))
      refuse("allocates tokens among layers, in some of which " + store->name + " is exact",
             "skip_layers=none, or a budget in tokens");
    for (int l = of_range.first; l < of_range.end(); ++l) {
      const LayerTensors layer = trace.layer(conditions.layers[static_cast<std::size_t>(l)]);
      if (changes_size) {
        of_changed.push_back(
            [store, layer, number = l - of_range.first](int tokens) { return store->bytes(layer, number, tokens); });
        continue;
      }
      const int heads = plan.grouping.heads == Heads::query ? layer.q.heads : layer.k.heads;
      of_unchanged += static_cast<double>(heads) * static_cast<double>(layer.token_bytes());
    }
  }
  return [of_unchanged, of_changed = std::move(of_changed)](int tokens) {
    double bytes = of_unchanged * tokens;
    for (const BytesOfTokens& of_layer : of_changed) bytes += of_layer(tokens);
    return bytes;
  };
}

bool protected_tokens_fill_budget(const Trace& trace, const Conditions& conditions, const ConfiguredPolicy& policy,
                                  int budget) {
  const int prompt = conditions.boundary;
  const MarkedQuestion question = marked_question(trace, prompt);
  for (const LayerPlan& of_range : policy.plans(static_cast<int>(conditions.layers.size()))) {
    const Plan& plan = of_range.plan;
    const bool chooses = plan.score || plan.select.one_set;
    if (!chooses || keeps_everything(plan, budget, prompt)) return false;
    const int held = has_budget(plan) ? budget : plan.schedule->held(prompt);
    const auto [sinks, recent] = plan.protect.within(held, prompt, question);
    if (sinks + recent < held) return false;
  }
  return true;
}

std::string without_question(const Trace& trace, const Conditions& conditions, const ConfiguredPolicy& policy) {
  if (marked_question(trace, conditions.boundary).is_marked()) return "";
  const std::vector<LayerPlan> plans = policy.plans(static_cast<int>(conditions.layers.size()));
  const auto asks = [](const LayerPlan& of_range) {
    const Protection& observing = of_range.plan.observing ? *of_range.plan.observing : of_range.plan.protect;
    return of_range.plan.schedule->asks_marked_question() || observing.question.marked;
  };
  if (std::ranges::any_of(plans, asks)) return "uses the last tokens of the prompt instead";
  const bool places = std::ranges::any_of(
      plans, [](const LayerPlan& of_range) { return of_range.plan.window_at == WindowAt::question; });
  return places ? "uses window_at=end" : "";
}

}  // namespace kvreplay
