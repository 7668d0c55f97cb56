// What eviction does to the attention of an eval query: recall, cosine and L1.
//
// With ã the softmax over the visible kept keys K' and m the mass of the full attention a on them, ã = a/m on K', so
// all three follow from sums of a and a² over K'. The general comparison builds ã instead.
#include <cmath>

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
    .edges =
        "exactly 1 when everything is kept; 0/0 -> 1 in :prompt and :nosink; undefined for dynamic sets in :oracle",
    .variants = {{"", "over all visible keys", OfMoments{{recall, recall}}, true},
                 {"oracle", "of the best static set with the same counts: no such set exceeds it", OfBestSet{}, true},
                 {"prompt", "over the keys below the boundary: kept mass / all mass", OfMoments{{prompt_recall}}},
                 {"nosink", "the same without the first 4 tokens", OfMoments{{nosink_recall}}}},
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
