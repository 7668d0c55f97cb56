// How similar the sets of different layers are: |A ∩ B| / |A ∪ B|.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "analysis/metrics/metric.h"
#include "analysis/metrics/protection.h"

namespace kvreplay {
namespace {

using Sets = std::vector<KeptSet>;

/// The kept positions of one row, or of several together.
struct Members {
  std::vector<std::uint64_t> bits;
  int count = 0;
};

/// 1 for two empty sets, 0 for one.
double jaccard(const Members& ours, const Members& theirs) {
  const int common = count_common(ours.bits, theirs.bits);
  const int either = ours.count + theirs.count - common;
  return either == 0 ? 1.0 : static_cast<double>(common) / either;
}

/// All in the finest granularity that a layer has.
Sets alike(Sets sets) {
  const KeptSet finest = *std::ranges::max_element(sets, {}, &KeptSet::rows);
  for (KeptSet& set : sets)
    if (set.heads() != finest.heads()) set = set.refined(finest.heads(), finest.rows());
  return sets;
}

Sets scored_sets(std::span<const LayerSelection> layers) {
  Sets sets;
  for (const LayerSelection& layer : layers) sets.push_back(unprotected(layer));
  return alike(std::move(sets));
}

Sets whole_sets(std::span<const LayerSelection> layers) {
  Sets sets;
  for (const LayerSelection& layer : layers) sets.push_back(layer.set);
  return alike(std::move(sets));
}

Members row(const KeptSet& set, int number) {
  const std::span<const std::uint64_t> bits = set.row_bits(number);
  return {{bits.begin(), bits.end()}, set.count(number)};
}

/// What is compared of a layer: so many sets of positions, each with that of the other layer.
using Rows = std::vector<Members>;

Rows first(const KeptSet& set) { return {row(set, 0)}; }

Rows each(const KeptSet& set) {
  Rows rows;
  for (int r = 0; r < set.rows(); ++r) rows.push_back(row(set, r));
  return rows;
}

Rows united(const KeptSet& set) {
  Members all = row(set, 0);
  for (int r = 1; r < set.rows(); ++r)
    for (std::size_t w = 0; w < all.bits.size(); ++w) all.bits[w] |= set.row_bits(r)[w];
  all.count = count_common(all.bits, all.bits);
  return {all};
}

double similarity(const Rows& ours, const Rows& theirs) {
  double total = 0;
  for (std::size_t r = 0; r < ours.size(); ++r) total += jaccard(ours[r], theirs[r]);
  return total / static_cast<double>(ours.size());
}

template <Sets (*sets_of)(std::span<const LayerSelection>), Rows (*rows_of)(const KeptSet&)>
std::vector<Rows> compared(std::span<const LayerSelection> layers) {
  std::vector<Rows> rows;
  for (const KeptSet& set : sets_of(layers)) rows.push_back(rows_of(set));
  return rows;
}

template <Sets (*sets_of)(std::span<const LayerSelection>), Rows (*rows_of)(const KeptSet&)>
Matrix matrix(std::span<const LayerSelection> layers) {
  const std::vector<Rows> rows = compared<sets_of, rows_of>(layers);
  const int n = static_cast<int>(rows.size());
  Matrix result(n, n);
  for (int l = 0; l < n; ++l)
    for (int m = 0; m <= l; ++m)
      result(l, m) = result(m, l) = similarity(rows[static_cast<std::size_t>(l)], rows[static_cast<std::size_t>(m)]);
  return result;
}

template <Sets (*sets_of)(std::span<const LayerSelection>), Rows (*rows_of)(const KeptSet&)>
double adjacent(std::span<const LayerSelection> layers) {
  if (layers.size() < 2) return std::numeric_limits<double>::quiet_NaN();
  const std::vector<Rows> rows = compared<sets_of, rows_of>(layers);
  double total = 0;
  for (std::size_t l = 1; l < rows.size(); ++l) total += similarity(rows[l - 1], rows[l]);
  return total / static_cast<double>(rows.size() - 1);
}

const char* const first_row = "row 0 of the policy's granularity, as the paper plots it";
const char* const each_row = "row by row, then the mean over rows";
const char* const union_first = "the union over rows first";

/// The same six readings of the matrix and of the mean over neighbours.
template <class Of, template <Sets (*)(std::span<const LayerSelection>), Rows (*)(const KeptSet&)> class Measured>
std::vector<MetricVariant> readings() {
  const std::string with = "; sinks and recent tokens included";
  return {{"first", first_row, Of{Measured<scored_sets, first>::of}, true},
          {"mean", each_row, Of{Measured<scored_sets, each>::of}, true},
          {"union", union_first, Of{Measured<scored_sets, united>::of}, true},
          {"first+protected", first_row + with, Of{Measured<whole_sets, first>::of}, true},
          {"mean+protected", each_row + with, Of{Measured<whole_sets, each>::of}, true},
          {"union+protected", union_first + with, Of{Measured<whole_sets, united>::of}, true}};
}

template <Sets (*sets_of)(std::span<const LayerSelection>), Rows (*rows_of)(const KeptSet&)>
struct Pairs {
  static Matrix of(std::span<const LayerSelection> layers) { return matrix<sets_of, rows_of>(layers); }
};

template <Sets (*sets_of)(std::span<const LayerSelection>), Rows (*rows_of)(const KeptSet&)>
struct Neighbours {
  static double of(std::span<const LayerSelection> layers) { return adjacent<sets_of, rows_of>(layers); }
};

const char* const edges =
    "two empty sets -> 1, one empty -> 0; sinks and recent tokens are removed first except in +protected";

const RegisteredMetric jaccard_matrix_metric{{
    .name = "jaccard_matrix",
    .summary = "overlap of the kept sets of every two layers; in selections.h5, always computed",
    .unit = "share",
    .formula = "J(l,m) = |I_l n I_m| / |I_l u I_m|, on the sets at the end of the prompt",
    .source = "ChunkKV, Table 3, Figs. 2 and 8 to 16",
    .edges = edges,
    .variants = readings<OfLayerPairs, Pairs>(),
}};

const RegisteredMetric jaccard_adjacent_metric{{
    .name = "jaccard_adjacent",
    .summary = "overlap of the kept sets of neighbouring layers; always computed",
    .unit = "share",
    .formula = "mean over l of J(l,l+1); independent uniform sets of a share f give f / (2 - f)",
    .source = "ChunkKV, Table 3",
    .edges = std::string(edges) + "; undefined with a single layer",
    .variants = readings<OfCell, Neighbours>(),
}};

}  // namespace
}  // namespace kvreplay
