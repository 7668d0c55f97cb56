// Size of a selection: kept tokens, bytes, and the tokens in the cache at an eval query.
#include <algorithm>
#include <limits>

#include "analysis/metrics/metric.h"
#include "analysis/metrics/protection.h"

namespace kvreplay {
namespace {

std::vector<double> counts(const KeptSet& set) {
  std::vector<double> kept;
  for (int row = 0; row < set.rows(); ++row) kept.push_back(set.count(row));
  return kept;
}

LayerValues by_row(const KeptSet& set) {
  const std::vector<double> kept = counts(set);
  return {kept, mean(kept)};
}

LayerValues layer_budget(const LayerFacts& facts) { return by_row(facts.selection.set); }
LayerValues unprotected_budget(const LayerFacts& facts) { return by_row(unprotected(facts.selection)); }

LayerValues kept_tokens(const LayerFacts& facts) { return {{}, mean(counts(facts.selection.set))}; }

LayerValues compression(const LayerFacts& facts) {
  return {{}, facts.view.prompt() / mean(counts(facts.selection.set))};
}

/// Without protected tokens.
LayerValues scored_compression(const LayerFacts& facts) {
  double candidates = 0;
  const LayerSelection& selection = facts.selection;
  for (std::size_t row = 0; row < selection.sinks.size(); ++row)
    candidates += facts.view.prompt() - selection.sinks[row] - selection.recent[row];
  return {{}, candidates / sum(counts(unprotected(selection)))};
}

/// Bytes of one token's key and value in one KV head.
double token_bytes(const LayerFacts& facts) {
  const LayerTensors& tensors = facts.view.tensors();
  return static_cast<double>(tensors.token_bytes());
}

/// Bytes of the given number of tokens per row.
double bytes_of(const LayerFacts& facts, std::span<const double> tokens) {
  const double heads_a_row = facts.selection.set.heads() == Heads::layer ? facts.view.kv_heads() : 1;
  return token_bytes(facts) * heads_a_row * sum(tokens) + facts.selection.reads.bytes;
}

LayerValues kv_bytes(const LayerFacts& facts) {
  return {{}, facts.stored != nullptr ? facts.stored->bytes : bytes_of(facts, counts(facts.selection.set))};
}

LayerValues shared_bytes(const LayerFacts& facts) {
  const KeptSet& set = facts.selection.set;
  if (set.heads() != Heads::query) return kv_bytes(facts);
  const int group = facts.view.group();
  double tokens = 0;
  for (int head = 0; head < facts.view.kv_heads(); ++head)
    for (int j = 0; j < set.tokens(); ++j) {
      bool kept = false;
      for (int row = head * group; row < (head + 1) * group; ++row) kept = kept || set.keeps(row, j);
      tokens += kept ? 1 : 0;
    }
  return {{}, token_bytes(facts) * tokens};
}

LayerValues bytes_of_attention_heads(const LayerFacts& facts) {
  if (facts.stored != nullptr) return {{}, facts.stored->bytes * facts.view.group()};
  return {{},
          token_bytes(facts) * facts.view.query_heads() * mean(counts(facts.selection.set)) +
              facts.selection.reads.bytes * facts.view.group()};
}

/// [T], mean over rows: tokens that are resident when query t attends, t included. A one-shot
/// policy holds the whole prompt up to its end.
std::vector<double> residents(const LayerFacts& facts) {
  const LayerSelection& selection = facts.selection;
  const int tokens = facts.view.tensors().k.tokens;
  const int prompt = facts.view.prompt();
  std::vector<double> held(static_cast<std::size_t>(tokens));
  if (!selection.changes_with_time()) {
    const double kept = mean(counts(selection.set));
    for (int t = 0; t < tokens; ++t) held[static_cast<std::size_t>(t)] = t < prompt ? t + 1 : kept + t + 1 - prompt;
    return held;
  }
  // Token j is resident from query j up to the query after which it is evicted.
  std::vector<long> change(static_cast<std::size_t>(tokens) + 1);
  for (std::size_t i = 0; i < selection.evicted_at.size(); ++i) {
    ++change[i % static_cast<std::size_t>(tokens)];
    if (const std::int32_t gone = selection.evicted_at[i]; gone >= 0) --change[static_cast<std::size_t>(gone) + 1];
  }
  long now = 0;
  for (std::size_t t = 0; t < held.size(); ++t) held[t] = static_cast<double>(now += change[t]) / selection.set.rows();
  return held;
}

LayerValues peak_residents(const LayerFacts& facts) { return {{}, std::ranges::max(residents(facts))}; }
LayerValues mean_residents(const LayerFacts& facts) { return {{}, mean(residents(facts))}; }

/// Undefined where a store changes tokens once, at the end of the prompt. Where it changes them at each eviction, they
/// keep their size.
double bytes_over_time(const LayerFacts& facts, const LayerValues& tokens) {
  if (facts.stored != nullptr && !facts.selection.changes_with_time()) return std::numeric_limits<double>::quiet_NaN();
  return bytes_of(facts, std::vector<double>(static_cast<std::size_t>(facts.selection.set.rows()), tokens.layer));
}

LayerValues peak_bytes(const LayerFacts& facts) { return {{}, bytes_over_time(facts, peak_residents(facts))}; }
LayerValues mean_bytes(const LayerFacts& facts) { return {{}, bytes_over_time(facts, mean_residents(facts))}; }

/// Mean over rows of |K'| of eval query t: kept tokens that t sees, the continuation up to t, and t itself.
double held_tokens(const LayerFacts& facts, std::int32_t t) {
  const LayerSelection& selection = facts.selection;
  const KeptSet at_query = selection.differs_by_query() ? selection.seen_by(t) : KeptSet();
  const KeptSet& set = selection.differs_by_query() ? at_query : selection.set;
  double of_rows = 0;
  const int first = facts.view.tensors().first_visible(t);
  const int after = std::max(0, t + 1 - std::max(set.tokens(), first));
  for (int row = 0; row < set.rows(); ++row) {
    const bool alone = t < set.tokens() && !set.keeps(row, t);
    of_rows += set.count_within(row, first, std::min(t + 1, set.tokens())) + after + (alone ? 1 : 0);
  }
  return of_rows / set.rows();
}

const RegisteredMetric layer_budget_metric{{
    .name = "layer_budget",
    .summary = "kept tokens per layer and row",
    .unit = "tokens",
    .formula = "number of kept prompt tokens; for a layer, the mean over the rows of the policy's granularity",
    .source = "DynamicKV, Fig. 2; PyramidKV",
    .edges = "none",
    .variants = {{"", "protected tokens included", OfLayer{layer_budget}, true},
                 {"unprotected", "without protected tokens", OfLayer{unprotected_budget}}},
}};

const RegisteredMetric kept_tokens_metric{{
    .name = "kept_tokens",
    .summary = "kept prompt tokens, mean over the rows of a layer",
    .unit = "tokens",
    .formula = "mean over rows, then layers, of the number of kept tokens",
    .source = "kvreplay",
    .edges = "none",
    .variants = {{"", "protected tokens included", OfLayer{kept_tokens}, true}},
}};

const RegisteredMetric held_tokens_metric{{
    .name = "held_tokens",
    .summary = "tokens in the cache at an eval query, the query's own token included",
    .unit = "tokens",
    .formula = "mean of |K'| over eval queries and rows; K' = visible kept tokens, visible tokens from the boundary "
               "on, and t itself",
    .source = "kvreplay",
    .edges = "none",
    .variants = {{"", "mean over rows, then layers", OfLayerAtQuery{held_tokens}, true}},
}};

const RegisteredMetric kv_bytes_metric{{
    .name = "kv_bytes",
    .summary = "memory of the kept keys and values at the end of the prompt",
    .unit = "bytes",
    .formula = "2 Hkv d (bytes per number) sum over layers of n_l, n_l the mean kept tokens of a row; with a set per "
               "query head, Hq replaces Hkv",
    .source = "kvreplay; ChunkKV, eq. 1 counts attention heads",
    .edges = "untreated layers are not counted; a quantised cache counts its bits, and 16 bits for each number kept in "
             "full precision; there :peak and :mean are undefined",
    .variants = {{"", "with the rows of the policy's granularity", OfLayer{kv_bytes, sum}, true},
                 {"union", "counts a token once if several query heads of a group keep it", OfLayer{shared_bytes, sum}},
                 {"attention-heads", "with Hq instead of Hkv for every granularity, as in ChunkKV's eq. 1",
                  OfLayer{bytes_of_attention_heads, sum}},
                 {"peak", "at the maximum number of resident tokens over all queries", OfLayer{peak_bytes, sum}},
                 {"mean", "at the mean number of resident tokens over all queries", OfLayer{mean_bytes, sum}}},
}};

const RegisteredMetric compression_metric{{
    .name = "compression",
    .summary = "compression ratio of the prompt",
    .unit = "ratio",
    .formula = "sigma = P / mean kept tokens",
    .source = "FINCH, section 3",
    .edges = "undefined for a layer that keeps no token",
    .variants = {{"", "over all layers: P / mean over layers", OfLayer{compression, harmonic_mean}, true},
                 {"context", "without protected tokens; for FINCH this is n / k of the context",
                  OfLayer{scored_compression, harmonic_mean}}},
}};

const RegisteredMetric resident_tokens_metric{{
    .name = "resident_tokens",
    .summary = "resident tokens in the cache while the trace is processed token by token",
    .unit = "tokens",
    .formula = "|R(t)|, t included, over all tokens t of the trace; t + 1 up to the end of the prompt for a one-shot "
               "policy; at most B + 1 for an online policy, which evicts after each query attends",
    .source = "kvreplay; SCA, section 4, up to its threshold",
    .edges = "none",
    .variants = {{"peak", "maximum over t of the mean over rows; then the mean over layers", OfLayer{peak_residents},
                  true},
                 {"mean", "mean over t, rows and layers", OfLayer{mean_residents}, true}},
}};

}  // namespace
}  // namespace kvreplay
