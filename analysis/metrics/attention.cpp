// What eviction does to the attention of an eval query: recall, cosine and L1.
//
// With ã the softmax over the visible kept keys K' and m the mass of the full attention a on them, ã = a/m on K', so
// all three follow from sums of a and a² over K'. The general comparison builds ã instead.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "analysis/metrics/metric.h"
#include "analysis/metrics/quotients.h"

namespace kvreplay {
namespace {

double recall(const Moments& kept, const Moments&) { return kept.mass; }
double recall(const Comparison& compared) { return compared.mass; }
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

/// The sums of the eval queries' attention: a mean of quotients would weigh queries that see next to nothing but
/// protected tokens as much as others.
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

/// Never negative where the two sums differ by rounding alone.
double sink_mass(const Moments& kept, const Moments&) { return std::max(0.0, kept.prompt_mass - kept.nosink_mass); }

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

double l1(const Moments& kept, const Moments&) { return 2.0 * (1.0 - kept.mass); }
double l1(const Comparison& compared) { return compared.l1; }

const RegisteredMetric attention_recall_metric{{
    .name = "attention_recall",
    .summary = "share of the attention that falls on kept keys",
    .unit = "share",
    .better = Better::higher,
    .formula =
        "m = sum over K' of a(t,j); K' = visible kept keys below the boundary, all visible ones from it on, and t",
    .source = "kvreplay; mean over eval queries and query heads, then over layers",
    .edges = "exactly 1 when everything is kept; 0/0 -> 1 in :prompt, :nosink and :unprotected; undefined for dynamic "
             "sets in "
             ":oracle and :unprotected; :worst of one query is its own",
    .variants =
        {{"", "over all visible keys", OfMoments{{recall, recall}}, true},
         {"oracle", "of the best static set with the same counts: no such set exceeds it", OfBestSet{}, true},
         {"prompt", "over the keys below the boundary: kept mass / all mass", OfMoments{{prompt_recall}}},
         {"nosink", "the same without the first 4 tokens", OfMoments{{nosink_recall}}},
         {"unprotected",
          "over the keys below the boundary that the policy does not protect: kept mass / all mass, each summed "
          "over the eval queries other than the key's own",
          OfEvalAttention{unprotected_recall}},
         {"worst", "5th percentile over eval queries in place of their mean", OfMoments{{recall, recall, {}, least}}}},
}};

const RegisteredMetric sink_mass_metric{{
    .name = "sink_mass",
    .summary = "share of the attention that falls on those of the first 4 tokens that are kept",
    .unit = "share",
    .better = Better::higher,
    .formula = "sum over K', j < 4 and below the boundary, of a(t,j)",
    .source = "kvreplay; attention sinks after StreamingLLM, arXiv:2309.17453",
    .edges = "0 when none of them is kept or visible; 1 where the boundary is 1 to 4 and nothing else is visible",
    .variants = {{"", "per query head", OfMoments{{sink_mass}}}},
}};

const RegisteredMetric attention_cosine_metric{{
    .name = "attention_cosine",
    .summary = "cosine between the full attention and the attention over kept keys",
    .unit = "cosine",
    .better = Better::higher,
    .formula = "<a,ã> / (|a| |ã|) = sqrt(sum over K' of a² / sum of a²) when kept keys stay as they were",
    .source = "ChunkKV, Table 8 and Fig. 7; the identity is kvreplay's",
    .edges = "exactly 1 when everything is kept; a zero norm -> 0",
    .variants = {{"", "over all visible keys", OfMoments{{attention_cosine, aligned_cosine<&Comparison::all>}}, true},
                 {"prompt", "both vectors cut to the keys below the boundary",
                  OfMoments{{prompt_cosine, aligned_cosine<&Comparison::prompt>}}},
                 {"nosink", "the same without the first 4 tokens",
                  OfMoments{{nosink_cosine, aligned_cosine<&Comparison::nosink>}}},
                 {"logits", "logits z below the boundary, 0 where evicted",
                  OfMoments{{logit_cosine, aligned_cosine<&Comparison::logits>, {.logits = true}}}},
                 {"unaligned",
                  "the part of a below the boundary against its kept entries written one after another from index 0",
                  OfMoments{{unaligned_cosine, nullptr, {.unaligned = true}}}},
                 {"rows", "every token of the trace as eval query: a pass of its own",
                  OfAllQueries{{attention_cosine, aligned_cosine<&Comparison::all>}}}},
}};

const RegisteredMetric attention_l1_metric{{
    .name = "attention_l1",
    .summary = "L1 distance between the full attention and the attention over kept keys",
    .unit = "L1 norm",
    .better = Better::lower,
    .formula = "|a - ã|_1 = 2 (1 - m) when kept keys stay as they were, m the attention recall",
    .source = "ChunkKV, Table 8; the identity is kvreplay's",
    .edges = "exactly 0 when everything is kept",
    .variants = {{"", "over all visible keys", OfMoments{{l1, l1}}, true}},
}};

}  // namespace
}  // namespace kvreplay
