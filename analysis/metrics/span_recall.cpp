// Whether a named span of the prompt survives: a needle, an answer, a question.
#include "analysis/metrics/metric.h"

namespace kvreplay {
namespace {

int kept_of(const KeptSet& set, int row, const Span& span) {
  int kept = 0;
  for (int j = span.begin; j < span.end; ++j) kept += set.keeps(row, j) ? 1 : 0;
  return kept;
}

double any(const LayerFacts& facts, const Span& span) {
  const KeptSet& set = facts.selection.set;
  int kept = 0;
  for (int j = span.begin; j < span.end; ++j) {
    bool by_any = false;
    for (int row = 0; row < set.rows(); ++row) by_any = by_any || set.keeps(row, j);
    kept += by_any ? 1 : 0;
  }
  return static_cast<double>(kept) / static_cast<double>(span.end - span.begin);
}

double mean_share(const LayerFacts& facts, const Span& span) {
  const KeptSet& set = facts.selection.set;
  int kept = 0;
  for (int row = 0; row < set.rows(); ++row) kept += kept_of(set, row, span);
  return static_cast<double>(kept) / static_cast<double>(set.rows() * (span.end - span.begin));
}

double full(const LayerFacts& facts, const Span& span) {
  const KeptSet& set = facts.selection.set;
  for (int row = 0; row < set.rows(); ++row)
    if (kept_of(set, row, span) == span.end - span.begin) return 1.0;
  return 0.0;
}

const RegisteredMetric span_recall_metric{{
    .name = "span_recall",
    .summary = "how much of a named span of the prompt is kept",
    .unit = "share",
    .better = Better::higher,
    .formula = "per layer, over the rows of the policy's granularity; the mean over layers",
    .source = "kvreplay; after needle and passkey retrieval",
    .edges = "spans that end after the boundary have no rows; a trace cannot hold an empty span",
    .variants = {{"any", "SPAN.any: share of its tokens that at least one head keeps", OfSpan{any}, true},
                 {"mean", "SPAN.mean: mean over heads of the share kept", OfSpan{mean_share}, true},
                 {"full", "SPAN.full: 1 when one head keeps all of it", OfSpan{full}, true}},
}};

}  // namespace
}  // namespace kvreplay
