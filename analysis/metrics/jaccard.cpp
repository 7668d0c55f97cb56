// How similar the sets of different layers are: |A ∩ B| / |A ∪ B|.
#include <algorithm>
#include <bit>
#include <limits>

#include "analysis/metrics/metric.h"
#include "analysis/metrics/protection.h"

namespace kvreplay {
namespace {

using Sets = std::vector<KeptSet>;

/// 1 for two empty sets, 0 for one.
double jaccard(std::span<const std::uint64_t> ours, std::span<const std::uint64_t> theirs) {
  int common = 0, either = 0;
  for (std::size_t w = 0; w < ours.size(); ++w) {
    common += std::popcount(ours[w] & theirs[w]);
    either += std::popcount(ours[w] | theirs[w]);
  }
  return either == 0 ? 1.0 : static_cast<double>(common) / either;
}

/// All in the finest granularity that a layer has.
Sets alike(Sets sets) {
  const KeptSet finest = *std::ranges::max_element(sets, {}, &KeptSet::rows);
  for (KeptSet& set : sets) set = set.refined(finest.heads(), finest.rows());
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

double of_first_rows(const KeptSet& ours, const KeptSet& theirs) {
  return jaccard(ours.row_bits(0), theirs.row_bits(0));
}

double of_each_row(const KeptSet& ours, const KeptSet& theirs) {
  double total = 0;
  for (int row = 0; row < ours.rows(); ++row) total += jaccard(ours.row_bits(row), theirs.row_bits(row));
  return total / ours.rows();
}

std::vector<std::uint64_t> union_of_rows(const KeptSet& set) {
  std::vector<std::uint64_t> bits(set.row_bits(0).begin(), set.row_bits(0).end());
  for (int row = 1; row < set.rows(); ++row)
    for (std::size_t w = 0; w < bits.size(); ++w) bits[w] |= set.row_bits(row)[w];
  return bits;
}

double of_unions(const KeptSet& ours, const KeptSet& theirs) {
  return jaccard(union_of_rows(ours), union_of_rows(theirs));
}

template <Sets (*sets_of)(std::span<const LayerSelection>), double (*similarity)(const KeptSet&, const KeptSet&)>
Matrix matrix(std::span<const LayerSelection> layers) {
  const Sets sets = sets_of(layers);
  const int n = static_cast<int>(sets.size());
  Matrix result(n, n);
  for (int l = 0; l < n; ++l)
    for (int m = 0; m <= l; ++m)
      result(l, m) = result(m, l) = similarity(sets[static_cast<std::size_t>(l)], sets[static_cast<std::size_t>(m)]);
  return result;
}

template <Sets (*sets_of)(std::span<const LayerSelection>), double (*similarity)(const KeptSet&, const KeptSet&)>
double adjacent(std::span<const LayerSelection> layers) {
  if (layers.size() < 2) return std::numeric_limits<double>::quiet_NaN();
  const Sets sets = sets_of(layers);
  double total = 0;
  for (std::size_t l = 1; l < sets.size(); ++l) total += similarity(sets[l - 1], sets[l]);
  return total / static_cast<double>(sets.size() - 1);
}

const char* const first_row = "row 0 of the policy's granularity, as the paper plots it";
const char* const each_row = "row by row, then the mean over rows";
const char* const union_first = "the union over rows first";

/// The same six readings of the matrix and of the mean over neighbours.
template <class Of, template <Sets (*)(std::span<const LayerSelection>),
                              double (*)(const KeptSet&, const KeptSet&)> class Measured>
std::vector<MetricVariant> readings() {
  const std::string with = "; sinks and recent tokens included";
  return {{"first", first_row, Of{Measured<scored_sets, of_first_rows>::of}, true},
          {"mean", each_row, Of{Measured<scored_sets, of_each_row>::of}, true},
          {"union", union_first, Of{Measured<scored_sets, of_unions>::of}, true},
          {"first+protected", first_row + with, Of{Measured<whole_sets, of_first_rows>::of}, true},
          {"mean+protected", each_row + with, Of{Measured<whole_sets, of_each_row>::of}, true},
          {"union+protected", union_first + with, Of{Measured<whole_sets, of_unions>::of}, true}};
}

template <Sets (*sets_of)(std::span<const LayerSelection>), double (*similarity)(const KeptSet&, const KeptSet&)>
struct Pairs {
  static Matrix of(std::span<const LayerSelection> layers) { return matrix<sets_of, similarity>(layers); }
};

template <Sets (*sets_of)(std::span<const LayerSelection>), double (*similarity)(const KeptSet&, const KeptSet&)>
struct Neighbours {
  static double of(std::span<const LayerSelection> layers) { return adjacent<sets_of, similarity>(layers); }
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
