// How much of the cache, by the size of its numbers, is evicted.
#include <cmath>
#include <limits>

#include "analysis/metrics/metric.h"
#include "analysis/metrics/quotients.h"

namespace kvreplay {
namespace {

/// Sums over the tokens of some rows: how many there are, and the L1 norms of what they hold.
struct Sizes {
  double tokens = 0;
  double kept_tokens = 0;
  double norms = 0;
  double lost_norms = 0;

  void add(const Sizes& other) {
    tokens += other.tokens;
    kept_tokens += other.kept_tokens;
    norms += other.norms;
    lost_norms += other.lost_norms;
  }
};

/// Which of a token's vectors count.
enum class Part { both, key, value };

/// What one row of the selection keeps of one KV head.
template <Part part>
Sizes sizes(const LayerFacts& facts, int row, int kv_head) {
  const std::span<const double> keys = facts.view.key_norms(1).row(kv_head);
  const std::span<const double> values = facts.view.value_norms(1).row(kv_head);
  Sizes result;
  for (std::size_t j = 0; j < keys.size(); ++j) {
    const double norm = (part == Part::value ? 0.0 : keys[j]) + (part == Part::key ? 0.0 : values[j]);
    const bool kept = facts.selection.set.keeps(row, static_cast<int>(j));
    result.tokens += 1;
    result.kept_tokens += kept ? 1 : 0;
    result.norms += norm;
    result.lost_norms += kept ? 0.0 : norm;
  }
  return result;
}

/// `ratio` of each row's sums and of the layer's. A row of one set for the layer is the sum over its KV heads; a row of
/// a query head holds a copy of its KV head.
template <Part part, double (*ratio)(const LayerFacts&, const Sizes&)>
LayerValues of_rows(const LayerFacts& facts) {
  LayerValues result;
  Sizes layer;
  const KeptSet& set = facts.selection.set;
  for (int row = 0; row < set.rows(); ++row) {
    Sizes of_row;
    if (set.heads() == Heads::layer)
      for (int head = 0; head < facts.view.kv_heads(); ++head) of_row.add(sizes<part>(facts, row, head));
    else
      of_row = sizes<part>(facts, row, set.heads() == Heads::query ? row / facts.view.group() : row);
    result.heads.push_back(ratio(facts, of_row));
    layer.add(of_row);
  }
  result.layer = ratio(facts, layer);
  return result;
}

double lost_share(const LayerFacts&, const Sizes& sizes) { return quotient(sizes.lost_norms, sizes.norms, 0.0); }

double lost_per_number(const LayerFacts& facts, const Sizes& sizes) {
  return sizes.lost_norms / (sizes.tokens * 2.0 * facts.view.tensors().k.dim);
}

double lost_tokens(const LayerFacts&, const Sizes& sizes) { return 1.0 - sizes.kept_tokens / sizes.tokens; }

double kept_norm(const LayerFacts&, const Sizes& sizes) {
  if (sizes.kept_tokens == 0 || sizes.norms == 0) return std::numeric_limits<double>::quiet_NaN();
  return (sizes.norms - sizes.lost_norms) / sizes.kept_tokens / (sizes.norms / sizes.tokens);
}

const RegisteredMetric kv_l1_loss_metric{{
    .name = "kv_l1_loss",
    .summary = "share of the L1 norm of keys and values that is evicted",
    .unit = "share",
    .formula = "sum over evicted of (|k|_1 + |v|_1) / sum over all; a ratio of sums over rows and prompt tokens",
    .source = "ChunkKV, Table 8; = 1 - f rho, f the kept share of tokens",
    .edges =
        "rows are the policy's: KV heads, query heads with keys and values repeated, or one for the layer; 0/0 -> 0",
    .variants = {{"", "keys and values", OfLayer{of_rows<Part::both, lost_share>}, true},
                 {"key", "keys alone", OfLayer{of_rows<Part::key, lost_share>}},
                 {"value", "values alone", OfLayer{of_rows<Part::value, lost_share>}},
                 {"rho", "mean norm of kept tokens / mean norm of all; undefined when nothing is kept or all is zero",
                  OfLayer{of_rows<Part::both, kept_norm>}},
                 {"absolute", "mean over numbers of |x - x̂|, x̂ = 0 where evicted",
                  OfLayer{of_rows<Part::both, lost_per_number>}},
                 {"token", "mean over tokens of the relative error: the evicted share of tokens, 1 - f",
                  OfLayer{of_rows<Part::both, lost_tokens>}}},
}};

}  // namespace
}  // namespace kvreplay
