// How much of the cache, by the size of its numbers, is evicted.
#include <Eigen/Core>
#include <cstdint>
#include <limits>

#include "analysis/metrics/metric.h"
#include "analysis/metrics/quotients.h"
#include "trace/float_types.h"

namespace kvreplay {
namespace {

/// Sums over the tokens of some rows: how many there are, the L1 norms of what they hold, and of what became of it.
struct Sizes {
  double tokens = 0;
  double kept_tokens = 0;
  double norms = 0;
  double kept_norms = 0;
  double lost = 0;      // |x - x̂|, x̂ = 0 where evicted
  double relative = 0;  // |x - x̂| / |x|

  void add(const Sizes& other) {
    tokens += other.tokens;
    kept_tokens += other.kept_tokens;
    norms += other.norms;
    kept_norms += other.kept_norms;
    lost += other.lost;
    relative += other.relative;
  }
};

/// Which of a token's vectors count.
enum class Part { both, key, value };

Eigen::ArrayXd vector_of(const TensorView& tensor, int head, int token) {
  return Eigen::ArrayXd::NullaryExpr(tensor.dim, [&](Eigen::Index c) {
    return static_cast<double>(load(tensor.row(head, token), tensor.dtype, static_cast<std::size_t>(c)));
  });
}

double distance(const TensorView& a, const TensorView& b, int head, int token) {
  return (vector_of(a, head, token) - vector_of(b, head, token)).abs().sum();
}

/// What a store changed of a kept token.
template <Part part>
double changed(const LayerFacts& facts, int kv_head, int token) {
  const LayerTensors& before = facts.view.tensors();
  const LayerTensors& after = facts.stored->tensors;
  return (part == Part::value ? 0.0 : distance(before.k, after.k, kv_head, token)) +
         (part == Part::key ? 0.0 : distance(before.v, after.v, kv_head, token));
}

/// What one row of the selection keeps of one KV head.
template <Part part>
Sizes sizes(const LayerFacts& facts, int row, int kv_head) {
  const std::span<const double> keys = facts.view.key_norms(1).row(kv_head);
  const std::span<const double> values = facts.view.value_norms(1).row(kv_head);
  const std::span<const std::uint64_t> kept = facts.selection.set.row_bits(row);
  // Of kept and of lost tokens, without a branch that no machine can foresee; in several sums, because each waits for
  // the one before.
  constexpr std::size_t sums = 4;
  double kept_norms[sums] = {}, lost_norms[sums] = {};
  Sizes result;
  for (std::size_t j = 0; j < keys.size(); ++j) {
    const double norm = (part == Part::value ? 0.0 : keys[j]) + (part == Part::key ? 0.0 : values[j]);
    const bool is_kept = (kept[j / 64] >> (j % 64) & 1) != 0;
    kept_norms[j % sums] += is_kept ? norm : 0.0;
    lost_norms[j % sums] += is_kept ? 0.0 : norm;
    if (facts.stored == nullptr || !is_kept) continue;
    const double changed_by = changed<part>(facts, kv_head, static_cast<int>(j));
    result.lost += changed_by;
    result.relative += quotient(changed_by, norm, 0.0);
  }
  result.tokens = static_cast<double>(keys.size());
  result.kept_tokens = facts.selection.set.count(row);
  result.kept_norms = sum(kept_norms);
  result.norms = result.kept_norms + sum(lost_norms);
  result.lost += sum(lost_norms);
  result.relative += result.tokens - result.kept_tokens;
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

double lost_share(const LayerFacts&, const Sizes& sizes) { return quotient(sizes.lost, sizes.norms, 0.0); }

double lost_per_number(const LayerFacts& facts, const Sizes& sizes) {
  return sizes.lost / (sizes.tokens * 2.0 * facts.view.tensors().k.dim);
}

double lost_of_tokens(const LayerFacts&, const Sizes& sizes) { return sizes.relative / sizes.tokens; }

double kept_norm(const LayerFacts&, const Sizes& sizes) {
  if (sizes.kept_tokens == 0 || sizes.norms == 0) return std::numeric_limits<double>::quiet_NaN();
  return sizes.kept_norms / sizes.kept_tokens / (sizes.norms / sizes.tokens);
}

const RegisteredMetric kv_l1_loss_metric{{
    .name = "kv_l1_loss",
    .summary = "share of the L1 norm of keys and values that is evicted or changed",
    .unit = "share",
    .better = Better::lower,
    .formula =
        "sum of |x - x̂|_1 / sum of |x|_1 over keys and values, x̂ = 0 where evicted; a ratio of sums over rows and "
        "prompt tokens; moved keys are compared unmoved",
    .source = "ChunkKV, Table 8; = 1 - f rho, f the kept share of tokens",
    .edges =
        "rows are the policy's: KV heads, query heads with keys and values repeated, or one for the layer; 0/0 -> 0",
    .variants = {{"", "keys and values", OfLayer{of_rows<Part::both, lost_share>}, true},
                 {"key", "keys alone", OfLayer{of_rows<Part::key, lost_share>}},
                 {"value", "values alone", OfLayer{of_rows<Part::value, lost_share>}},
                 {"rho", "mean norm of kept tokens / mean norm of all; undefined when nothing is kept or all is zero",
                  OfLayer{of_rows<Part::both, kept_norm>}, false, Better::higher, "ratio"},
                 {.name = "absolute",
                  .summary = "mean over numbers of |x - x̂|, x̂ = 0 where evicted",
                  .measure = OfLayer{of_rows<Part::both, lost_per_number>},
                  .unit = "L1 norm per number"},
                 {"token", "mean over tokens of the relative error: the evicted share of tokens, 1 - f",
                  OfLayer{of_rows<Part::both, lost_of_tokens>}, false, Better::neither}},
}};

}  // namespace
}  // namespace kvreplay
