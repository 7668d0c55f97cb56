// What a selection costs: tokens, bytes, and what an eval query finds in the cache.
#include <algorithm>

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

/// Bytes of one token's key and value in one KV head.
double token_bytes(const LayerFacts& facts) {
  const LayerTensors& tensors = facts.view.tensors();
  return static_cast<double>(tensors.k.row_bytes() + tensors.v.row_bytes());
}

LayerValues kv_bytes(const LayerFacts& facts) {
  const KeptSet& set = facts.selection.set;
  const double heads_a_row = set.heads() == Heads::layer ? facts.view.kv_heads() : 1;
  return {{}, token_bytes(facts) * heads_a_row * sum(counts(set))};
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
  return {{}, token_bytes(facts) * facts.view.query_heads() * mean(counts(facts.selection.set))};
}

/// Mean over eval queries t and rows of |K'|: kept tokens that t sees, the continuation up to t, and t itself.
LayerValues held_tokens(const LayerFacts& facts) {
  const KeptSet& set = facts.selection.set;
  const int prompt = facts.view.prompt();
  const int window = facts.view.tensors().sliding_window;
  double held = 0;
  for (int row = 0; row < set.rows(); ++row) {
    const std::vector<std::int32_t> kept = set.positions(row);
    for (const std::int32_t t : facts.view.eval_queries()) {
      const int first = window > 0 ? std::max(0, t - window + 1) : 0;
      const auto begin = std::lower_bound(kept.begin(), kept.end(), first);
      const auto end = std::upper_bound(begin, kept.end(), t);
      const int after_boundary = std::max(0, t + 1 - std::max(prompt, first));
      const bool alone = t < prompt && !set.keeps(row, t);
      held += static_cast<double>(end - begin) + after_boundary + (alone ? 1 : 0);
    }
  }
  return {{}, held / static_cast<double>(static_cast<std::size_t>(set.rows()) * facts.view.eval_queries().size())};
}

const RegisteredMetric layer_budget_metric{{
    .name = "layer_budget",
    .summary = "kept tokens of each layer and row",
    .unit = "tokens",
    .formula = "number of kept prompt tokens; a layer is the mean over the rows of the policy's granularity",
    .source = "DynamicKV, Fig. 2; PyramidKV",
    .edges = "none",
    .variants = {{"", "sinks and window included", OfLayer{layer_budget}, true},
                 {"unprotected", "without tokens kept by rule", OfLayer{unprotected_budget}}},
}};

const RegisteredMetric kept_tokens_metric{{
    .name = "kept_tokens",
    .summary = "kept prompt tokens, mean over the rows of a layer",
    .unit = "tokens",
    .formula = "mean over rows, then layers, of the number of kept tokens",
    .source = "kvreplay",
    .edges = "none",
    .variants = {{"", "sinks and window included", OfLayer{kept_tokens}, true}},
}};

const RegisteredMetric held_tokens_metric{{
    .name = "held_tokens",
    .summary = "tokens that an eval query finds in the cache, itself included",
    .unit = "tokens",
    .formula =
        "mean over eval queries and rows of |K'|: visible kept tokens, visible tokens from the boundary on, and t",
    .source = "kvreplay",
    .edges = "none",
    .variants = {{"", "mean over rows, then layers", OfLayer{held_tokens}, true}},
}};

const RegisteredMetric kv_bytes_metric{{
    .name = "kv_bytes",
    .summary = "bytes of the kept keys and values at the end of the prompt",
    .unit = "bytes",
    .formula = "2 Hkv d bytes sum over layers of n_l; with a set for each query head its rows count, Hq instead of Hkv",
    .source = "kvreplay; ChunkKV, eq. 1 counts attention heads",
    .edges = "layers that are left as they are do not count",
    .variants = {{"", "as many rows as the policy's granularity needs", OfLayer{kv_bytes, sum}, true},
                 {"union", "a token that several query heads of a group keep counts once", OfLayer{shared_bytes, sum}},
                 {"attention-heads", "Hq instead of Hkv whatever the granularity, as ChunkKV's eq. 1 reads",
                  OfLayer{bytes_of_attention_heads, sum}}},
}};

const RegisteredMetric compression_metric{{
    .name = "compression",
    .summary = "how many times smaller the compressed prompt is",
    .unit = "ratio",
    .formula = "sigma = P / mean kept tokens",
    .source = "FINCH, section 3",
    .edges = "undefined for a layer that keeps nothing",
    .variants = {{"", "over all layers: P / mean over layers", OfLayer{compression, harmonic_mean}, true}},
}};

}  // namespace
}  // namespace kvreplay
