// Share of the L1 norm of the cache that is lost by eviction or change.
#include <Eigen/Core>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "analysis/metrics/metric.h"
#include "analysis/metrics/quotients.h"
#include "float_types.h"

namespace kvreplay {
namespace {

/// Sums over the tokens of some rows: their number, their L1 norms, and the L1 norms that are lost.
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

/// The vectors of a token that are included.
enum class Part { both, key, value };

/// The distances from the vectors of one KV head to what a store makes of them.
class Distances {
 public:
  Distances(const TensorView& before, const TensorView& after, int head)
      : before_(before), after_(after), head_(head), vector_(before.dim), changed_(before.dim) {}

  double of(int token) {
    if (before_.data == after_.data) return 0;
    read(before_, token, vector_);
    read(after_, token, changed_);
    return (vector_ - changed_).abs().sum();
  }

 private:
  void read(const TensorView& tensor, int token, Eigen::ArrayXd& vector) const {
    read_row(tensor, head_, token, {vector.data(), static_cast<std::size_t>(vector.size())});
  }

  const TensorView& before_;
  const TensorView& after_;
  int head_;
  Eigen::ArrayXd vector_, changed_;
};

/// The norms of the changes, which all variants and the cells that share the stored layer read: these keep the same
/// tokens.
const std::vector<StoredLayer::ChangeNorms>& change_norms(const LayerFacts& facts) {
  const LayerTensors& before = facts.view.tensors();
  const LayerTensors& after = facts.stored->tensors;
  const KeptSet& set = facts.selection.set;
  std::vector<StoredLayer::ChangeNorms>& norms = facts.stored->change_norms;
  if (!norms.empty()) return norms;
  for (int head = 0; head < facts.view.kv_heads(); ++head) {
    constexpr double unknown = -1;
    std::vector<double> of_keys(static_cast<std::size_t>(set.tokens()), unknown), of_values = of_keys;
    Distances between_keys(before.k, after.k, head), between_values(before.v, after.v, head);
    for (int query_head = head * facts.view.group(); query_head < (head + 1) * facts.view.group(); ++query_head)
      for (const std::int32_t token : set.positions(set.row_of(query_head, facts.view.group()))) {
        const auto t = static_cast<std::size_t>(token);
        if (of_keys[t] != unknown) continue;
        of_keys[t] = between_keys.of(token);
        of_values[t] = between_values.of(token);
      }
    norms.push_back({std::move(of_keys), std::move(of_values)});
  }
  return norms;
}

/// Number of norms added at once, in independent sums: additions to a single sum depend on each other.
using Norms = Eigen::Array4d;
constexpr std::size_t at_once = Norms::SizeAtCompileTime;

/// Weights 1 or 0 from the bits of the tokens, because a branch on them is unpredictable.
const auto shares_of_bits = [] {
  std::array<Norms, std::size_t{1} << at_once> shares;
  for (std::size_t bits = 0; bits < shares.size(); ++bits)
    for (std::size_t token = 0; token < at_once; ++token)
      shares[bits][static_cast<Eigen::Index>(token)] = static_cast<double>(bits >> token & 1);
  return shares;
}();

/// Sums over one KV head for one row of the selection.
template <Part part>
Sizes sizes(const LayerFacts& facts, int row, int kv_head) {
  const std::span<const double> keys = facts.view.key_norms(1).row(kv_head);
  const std::span<const double> values = facts.view.value_norms(1).row(kv_head);
  const std::span<const std::uint64_t> kept = facts.selection.set.row_bits(row);
  const auto norms_of = [&](std::size_t first, std::size_t count) -> Norms {
    Norms norms = Norms::Zero();
    const auto length = static_cast<Eigen::Index>(count);
    if (part != Part::value) norms.head(length) += Eigen::Map<const Eigen::ArrayXd>(&keys[first], length);
    if (part != Part::key) norms.head(length) += Eigen::Map<const Eigen::ArrayXd>(&values[first], length);
    return norms;
  };
  Norms kept_norms = Norms::Zero(), lost_norms = Norms::Zero();
  const auto add = [&](std::size_t first, const Norms& norms) {
    const Norms kept_of_these = norms * shares_of_bits[kept[first / 64] >> (first % 64) & (shares_of_bits.size() - 1)];
    kept_norms += kept_of_these;
    lost_norms += norms - kept_of_these;
  };
  const std::size_t tokens = keys.size(), rest = tokens % at_once;
  for (std::size_t first = 0; first + at_once <= tokens; first += at_once) add(first, norms_of(first, at_once));
  if (rest > 0) add(tokens - rest, norms_of(tokens - rest, rest));
  Sizes result;
  if (facts.stored != nullptr) {
    const StoredLayer::ChangeNorms& changes = change_norms(facts)[static_cast<std::size_t>(kv_head)];
    for (const std::int32_t token : facts.selection.set.positions(row)) {
      const auto t = static_cast<std::size_t>(token);
      const double changed_by =
          (part == Part::value ? 0.0 : changes.keys[t]) + (part == Part::key ? 0.0 : changes.values[t]);
      result.lost += changed_by;
      result.relative += quotient(changed_by, norms_of(t, 1)[0], 0.0);
    }
  }
  result.tokens = static_cast<double>(keys.size());
  result.kept_tokens = facts.selection.set.count(row);
  // The order of the additions is the same on all machines.
  const double lost = sum(std::span(lost_norms.data(), at_once));
  result.kept_norms = sum(std::span(kept_norms.data(), at_once));
  result.norms = result.kept_norms + lost;
  result.lost += lost;
  result.relative += result.tokens - result.kept_tokens;
  return result;
}

/// `ratio` of the sums of each row and of the layer. The row of a per-layer set is the sum over the KV heads; the row
/// of a query head has a copy of its KV head.
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
    .summary = "share of the L1 norm of keys and values lost by eviction or change",
    .unit = "share",
    .better = Better::lower,
    .formula = "sum of |x - x̂|_1 / sum of |x|_1 over keys and values, x̂ = 0 for evicted tokens; a ratio of sums over "
               "rows and prompt tokens; moved keys are compared at their original positions",
    .source = "ChunkKV, Table 8; = 1 - f rho, f the kept share of tokens",
    .edges = "rows are those of the policy's granularity: KV heads, query heads (keys and values repeated), or the "
             "layer; 0/0 -> 0",
    .variants =
        {{"", "keys and values", OfLayer{of_rows<Part::both, lost_share>}, true},
         {"key", "keys alone", OfLayer{of_rows<Part::key, lost_share>}},
         {"value", "values alone", OfLayer{of_rows<Part::value, lost_share>}},
         {"rho",
          "mean norm of kept tokens / mean norm of all tokens; undefined when no token is kept or all norms are zero",
          OfLayer{of_rows<Part::both, kept_norm>}, false, Better::higher, "ratio"},
         {.name = "absolute",
          .summary = "mean of |x - x̂| over all numbers, x̂ = 0 for evicted tokens",
          .measure = OfLayer{of_rows<Part::both, lost_per_number>},
          .unit = "L1 norm per number"},
         {"token", "mean relative error over tokens: the evicted share of tokens, 1 - f",
          OfLayer{of_rows<Part::both, lost_of_tokens>}, false, Better::neither}},
}};

}  // namespace
}  // namespace kvreplay
