// Effect of eviction on the attention of an eval query: recall, cosine similarity and L1 distance.
//
// With ã the softmax over the visible kept keys K', m the mass of the full attention a on them and σ the share of the
// sink logit (0 where the model has none), ã = a/(m+σ) on K', so all three follow from sums of a and a² over K'. The
// general comparison builds ã instead.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "analysis/metrics/metric.h"
#include "analysis/metrics/quotients.h"

namespace kvreplay {
namespace {

double recall(const Moments& kept, const Moments& full) { return quotient(kept.mass, full.mass, 1.0); }
double recall(const Comparison& compared) { return quotient(compared.mass, compared.full_mass, 1.0); }
template <Alignment Comparison::* keys>
double aligned_cosine(const Comparison& compared) {
  const Alignment& of = compared.*keys;
  return cosine(of.dot, of.full_square, of.stored_square, 0.0);
}
double prompt_recall(const Moments& kept, const Moments& full) {
  return quotient(kept.prompt_mass, full.prompt_mass, 1.0);
}
double nosink_recall(const Moments& kept, const Moments& full) {
  return quotient(kept.nosink_mass, full.nosink_mass, 1.0);
}

double least(std::span<double> values) { return percentile(values, 0.05); }

/// A quotient of sums over the eval queries. A mean of quotients would give full weight to queries whose attention is
/// almost entirely on protected tokens.
std::vector<double> unprotected_recall(const LayerFacts& facts) {
  const LayerView& view = facts.view;
  std::vector<double> heads(static_cast<std::size_t>(view.query_heads()), std::numeric_limits<double>::quiet_NaN());
  if (facts.selection.differs_by_query()) return heads;
  const Matrix& sums = view.eval_attention();
  const KeptSet& set = facts.selection.set;
  for (int head = 0; head < view.query_heads(); ++head) {
    const int row = set.row_of(head, view.group());
    const auto r = static_cast<std::size_t>(row);
    double kept = 0, evicted = 0;
    for (int j = facts.selection.sinks[r]; j < set.tokens() - facts.selection.recent[r]; ++j)
      (set.keeps(row, j) ? kept : evicted) += sums(head, j);
    heads[static_cast<std::size_t>(head)] = quotient(kept, kept + evicted, 1.0);
  }
  return heads;
}

/// Clamped to 0, because the two sums may differ by rounding.
double sink_mass(const Moments& kept, const Moments&) { return std::max(0.0, kept.prompt_mass - kept.nosink_mass); }

double sink_logit_mass(const Moments&, const Moments& full) { return std::max(0.0, 1.0 - full.mass); }

double attention_cosine(const Moments& kept, const Moments& full) {
  return std::sqrt(quotient(kept.square, full.square, 0.0));
}
double prompt_cosine(const Moments& kept, const Moments& full) {
  return std::sqrt(quotient(kept.prompt_square, full.prompt_square, 0.0));
}
double nosink_cosine(const Moments& kept, const Moments& full) {
  return std::sqrt(quotient(kept.nosink_square, full.nosink_square, 0.0));
}
double logit_cosine(const Moments& kept, const Moments& full) {
  return std::sqrt(quotient(kept.logit_square, full.logit_square, 0.0));
}
double unaligned_cosine(const Moments& kept, const Moments& full) {
  return cosine(kept.unaligned_dot, kept.prompt_square, full.prompt_square, 0.0);
}

double l1(const Moments& kept, const Moments& full) {
  const double sink = std::max(0.0, 1.0 - full.mass);
  return (full.mass - kept.mass) * (2.0 - quotient(sink, kept.mass + sink, 0.0));
}
double l1(const Comparison& compared) { return compared.l1; }

const RegisteredMetric attention_recall_metric{{
    .name = "attention_recall",
    .summary = "share of the full attention that the kept keys receive",
    .unit = "share",
    .better = Better::higher,
    .formula = "sum over K' of a(t,j) / sum over all j of a(t,j), which is 1 without sink logits; K' = visible kept "
               "keys before the boundary, all visible keys from the boundary on, and t itself",
    .source = "kvreplay; mean over eval queries and query heads, then over layers",
    .edges =
        "exactly 1 when every token is kept; 0/0 -> 1 in :prompt, :nosink and :unprotected; :oracle and "
        ":unprotected are undefined for dynamic sets and for sparse reads, even where every query reads every token; "
        ":worst of a single query is the value of that query",
    .variants = {{"", "over all visible keys", OfMoments{{recall, recall}}, true},
                 {"oracle",
                  "attention recall of the best static set with the same token counts: an upper bound for static sets",
                  OfBestSet{}, true},
                 {"prompt", "over the keys before the boundary: kept attention mass / total mass",
                  OfMoments{{prompt_recall}}},
                 {"nosink", "as :prompt, without the first 4 tokens", OfMoments{{nosink_recall}}},
                 {"unprotected",
                  "over the unprotected keys before the boundary: kept attention mass / total mass, both summed over "
                  "the eval queries other than the key's own",
                  OfEvalAttention{unprotected_recall}},
                 {"worst", "5th percentile over eval queries instead of their mean",
                  OfMoments{{recall, recall, {}, least}}}},
}};

const RegisteredMetric sink_mass_metric{{
    .name = "sink_mass",
    .summary = "share of the full attention that kept attention sinks (the first 4 tokens) receive",
    .unit = "share",
    .better = Better::higher,
    .formula = "sum of a(t,j) over the j in K' with j < 4 and j before the boundary",
    .source = "kvreplay; attention sinks after StreamingLLM, arXiv:2309.17453",
    .edges = "0 when no sink is kept or visible; 1 when the boundary is 1 to 4 and no other token is visible",
    .variants = {{"", "per query head", OfMoments{{sink_mass}}},
                 {"logit", "share that the sink logit of the query head receives, σ = 1 - sum over all j of a(t,j)",
                  OfMoments{{sink_logit_mass}}}},
}};

const RegisteredMetric attention_cosine_metric{{
    .name = "attention_cosine",
    .summary = "cosine similarity of the full attention and the attention over kept keys",
    .unit = "cosine",
    .better = Better::higher,
    .formula = "<a,ã> / (|a| |ã|) = sqrt(sum over K' of a² / sum of a²) when kept keys are unchanged",
    .source = "ChunkKV, Table 8 and Fig. 7; the identity is kvreplay's",
    .edges = "exactly 1 when every token is kept; 0 when a norm is zero",
    .variants = {{"", "over all visible keys", OfMoments{{attention_cosine, aligned_cosine<&Comparison::all>}}, true},
                 {"prompt", "both vectors restricted to the keys before the boundary",
                  OfMoments{{prompt_cosine, aligned_cosine<&Comparison::prompt>}}},
                 {"nosink", "as :prompt, without the first 4 tokens",
                  OfMoments{{nosink_cosine, aligned_cosine<&Comparison::nosink>}}},
                 {"logits", "on the logits of the keys before the boundary, 0 for evicted keys",
                  OfMoments{{logit_cosine, aligned_cosine<&Comparison::logits>, {.logits = true}}}},
                 {"unaligned",
                  "the entries of a before the boundary, compared with its kept entries packed from index 0 on",
                  OfMoments{{unaligned_cosine, nullptr, {.unaligned = true}}}},
                 {"rows", "with every token of the trace as eval query; needs a separate pass",
                  OfAllQueries{{attention_cosine, aligned_cosine<&Comparison::all>}}}},
}};

const RegisteredMetric attention_l1_metric{{
    .name = "attention_l1",
    .summary = "L1 distance between the full attention and the attention over kept keys (0 to 2)",
    .unit = "L1 norm",
    .better = Better::lower,
    .formula = "|a - ã|_1 = e (2m + σ) / (m + σ) when kept keys are unchanged, m and e the attention of kept and of "
               "evicted keys, σ that of the sink logit; 2 (1 - m) without sink logits",
    .source = "ChunkKV, Table 8; the identity is kvreplay's",
    .edges = "exactly 0 when every token is kept",
    .variants = {{"", "over all visible keys", OfMoments{{l1, l1}}, true}},
}};

}  // namespace
}  // namespace kvreplay
