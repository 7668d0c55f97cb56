// Kept share of a named span of the prompt: a needle, an answer, a question.
#include <algorithm>

#include "analysis/metrics/metric.h"

namespace kvreplay {
namespace {

int kept_of(const KeptSet& set, int row, const Span& span) { return set.count_within(row, span.begin, span.end); }

bool kept_by_any(const KeptSet& set, int token) {
  for (int row = 0; row < set.rows(); ++row)
    if (set.keeps(row, token)) return true;
  return false;
}

double share_of(int tokens, const Span& span) { return static_cast<double>(tokens) / (span.end - span.begin); }

double any(const LayerFacts& facts, const Span& span) {
  return share_of(kept_of(facts.selection.set.union_of_rows(), 0, span), span);
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

double erased_of_layer(const LayerFacts& facts, const Span& span) {
  const int tokens = span.end - span.begin;
  return share_of(tokens - kept_of(facts.selection.set.union_of_rows(), 0, span), span);
}

double erased_of_all_layers(std::span<const LayerSelection> layers, const Span& span) {
  int erased = 0;
  for (int j = span.begin; j < span.end; ++j)
    erased += std::ranges::none_of(layers, [&](const LayerSelection& layer) { return kept_by_any(layer.set, j); });
  return share_of(erased, span);
}

const RegisteredMetric span_recall_metric{{
    .name = "span_recall",
    .summary = "kept share of a named span of the prompt",
    .unit = "share",
    .better = Better::higher,
    .formula = "per layer, over the rows of the policy's granularity; then the mean over layers",
    .source = "kvreplay; after needle and passkey retrieval",
    .edges = "no value for spans that end after the boundary; empty spans do not occur in traces",
    .variants = {{"any", "SPAN.any: share of the span's tokens that at least one head keeps", OfSpan{any}, true},
                 {"mean", "SPAN.mean: kept share, mean over heads", OfSpan{mean_share}, true},
                 {"full", "SPAN.full: 1 if at least one head keeps the whole span, else 0", OfSpan{full}, true}},
}};

const RegisteredMetric span_erased_metric{{
    .name = "span_erased",
    .summary = "share of a named span of the prompt that no head keeps",
    .unit = "share",
    .better = Better::lower,
    .formula = "span tokens that are in no row's kept set at the end of the prompt / span tokens",
    .source = "kvreplay; after arXiv:2603.01426, which relates it to hallucination",
    .edges = "no value for spans that end after the boundary; both variants are equal with one treated layer",
    .variants = {{"all", "SPAN.all: share of the span that no head of any treated layer keeps",
                  OfSpanInAllLayers{erased_of_all_layers}},
                 {"layer", "SPAN.layer: share of the span that no head of a layer keeps, mean over layers",
                  OfSpan{erased_of_layer}}},
}};

}  // namespace
}  // namespace kvreplay
