// Jaccard similarity |A ∩ B| / |A ∪ B| of the kept sets of two layers, or of two heads of a layer.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "analysis/metrics/metric.h"
#include "analysis/metrics/protection.h"

namespace kvreplay {
namespace {

/// The sets of one layer that are compared, and the number of tokens in each.
struct Compared {
  KeptSet set;
  std::vector<int> counts;
};

/// Jaccard similarity of two rows: 1 for two empty sets, 0 for one empty set.
double jaccard(const Compared& ours, int our_row, const Compared& theirs, int their_row) {
  const int common = count_common(ours.set.row_bits(our_row), theirs.set.row_bits(their_row));
  const int either =
      ours.counts[static_cast<std::size_t>(our_row)] + theirs.counts[static_cast<std::size_t>(their_row)] - common;
  return either == 0 ? 1.0 : static_cast<double>(common) / either;
}

/// Mean over rows; undefined for layers with different numbers of rows.
double jaccard(const Compared& ours, const Compared& theirs) {
  if (ours.set.rows() != theirs.set.rows()) return std::numeric_limits<double>::quiet_NaN();
  double total = 0;
  for (int row = 0; row < ours.set.rows(); ++row) total += jaccard(ours, row, theirs, row);
  return total / ours.set.rows();
}

Compared with_counts(KeptSet set) {
  Compared made{std::move(set), {}};
  for (int row = 0; row < made.set.rows(); ++row) made.counts.push_back(made.set.count(row));
  return made;
}

KeptSet scored(const LayerSelection& layer) { return unprotected(layer); }
KeptSet whole(const LayerSelection& layer) { return layer.set; }

KeptSet first_of(const KeptSet& set) { return set.only(0); }
KeptSet each_of(const KeptSet& set) { return set; }
KeptSet union_of(const KeptSet& set) { return set.union_of_rows(); }

/// All sets in the finest granularity of the layers.
template <KeptSet (*set_of)(const LayerSelection&), KeptSet (*rows_of)(const KeptSet&)>
std::vector<Compared> compared(std::span<const LayerSelection> layers) {
  const KeptSet& finest =
      std::ranges::max_element(layers, {}, [](const LayerSelection& l) { return l.set.rows(); })->set;
  std::vector<Compared> sets;
  for (const LayerSelection& layer : layers) {
    const KeptSet set = set_of(layer);
    const bool divides = finest.rows() % set.rows() == 0;  // layers may differ in heads
    sets.push_back(with_counts(rows_of(divides ? set.refined(finest.heads(), finest.rows()) : set)));
  }
  return sets;
}

template <KeptSet (*set_of)(const LayerSelection&), KeptSet (*rows_of)(const KeptSet&)>
Matrix matrix(std::span<const LayerSelection> layers) {
  const std::vector<Compared> sets = compared<set_of, rows_of>(layers);
  const int n = static_cast<int>(sets.size());
  Matrix result(n, n);
  for (int l = 0; l < n; ++l)
    for (int m = 0; m <= l; ++m)
      result(l, m) = result(m, l) = jaccard(sets[static_cast<std::size_t>(l)], sets[static_cast<std::size_t>(m)]);
  return result;
}

template <KeptSet (*set_of)(const LayerSelection&), KeptSet (*rows_of)(const KeptSet&)>
double adjacent(std::span<const LayerSelection> layers) {
  const std::vector<Compared> sets = compared<set_of, rows_of>(layers);
  double total = 0, pairs = 0;
  for (std::size_t l = 1; l < sets.size(); ++l) {
    const double similarity = jaccard(sets[l - 1], sets[l]);
    if (std::isnan(similarity)) continue;
    total += similarity;
    ++pairs;
  }
  return pairs > 0 ? total / pairs : std::numeric_limits<double>::quiet_NaN();
}

/// Mean over the pairs of rows of a layer.
template <KeptSet (*set_of)(const LayerSelection&)>
LayerValues consensus(const LayerFacts& facts) {
  const Compared heads = with_counts(set_of(facts.selection));
  const int rows = heads.set.rows();
  double total = 0;
  for (int row = 0; row < rows; ++row)
    for (int other = 0; other < row; ++other) total += jaccard(heads, row, heads, other);
  LayerValues values;
  values.layer = rows == 1 ? 1.0 : total / (rows * (rows - 1) / 2.0);
  return values;
}

const char* const first_row = "head 0 of the policy's granularity alone, as plotted in the paper";
const char* const each_row = "for each head, then the mean over heads";
const char* const union_first = "on the union of the sets of all heads";

template <KeptSet (*set_of)(const LayerSelection&), KeptSet (*rows_of)(const KeptSet&)>
struct Pairs {
  static Matrix of(std::span<const LayerSelection> layers) { return matrix<set_of, rows_of>(layers); }
};

template <KeptSet (*set_of)(const LayerSelection&), KeptSet (*rows_of)(const KeptSet&)>
struct Neighbours {
  static double of(std::span<const LayerSelection> layers) { return adjacent<set_of, rows_of>(layers); }
};

/// The six variants of the matrix and of the mean over adjacent layers.
template <class Of, template <KeptSet (*)(const LayerSelection&), KeptSet (*)(const KeptSet&)> class Measured>
std::vector<MetricVariant> readings() {
  const std::string with = "; protected tokens included";
  return {{"first", first_row, Of{Measured<scored, first_of>::of}, true},
          {"mean", each_row, Of{Measured<scored, each_of>::of}, true},
          {"union", union_first, Of{Measured<scored, union_of>::of}, true},
          {"first+protected", first_row + with, Of{Measured<whole, first_of>::of}, true},
          {"mean+protected", each_row + with, Of{Measured<whole, each_of>::of}, true},
          {"union+protected", union_first + with, Of{Measured<whole, union_of>::of}, true}};
}

const char* const edges =
    "two empty sets -> 1, one empty set -> 0; protected tokens are removed first, except in +protected";

const RegisteredMetric jaccard_matrix_metric{{
    .name = "jaccard_matrix",
    .summary = "Jaccard similarity of the kept sets of all pairs of layers; in cells/TRACE.h5, always computed",
    .unit = "share",
    .formula = "J(l,m) = |I_l n I_m| / |I_l u I_m|, on the sets at the end of the prompt",
    .source = "ChunkKV, Table 3, Figs. 2 and 8 to 16",
    .edges = edges,
    .variants = readings<OfLayerPairs, Pairs>(),
}};

const RegisteredMetric jaccard_adjacent_metric{{
    .name = "jaccard_adjacent",
    .summary = "Jaccard similarity of the kept sets of adjacent layers; always computed",
    .unit = "share",
    .formula = "mean over l of J(l,l+1); independent uniformly random sets with a kept share f give f / (2 - f)",
    .source = "ChunkKV, Table 3",
    .edges = std::string(edges) + "; without the pairs of layers with different numbers of rows, except on unions and "
                                  "head 0; undefined without a pair",
    .variants = readings<OfCell, Neighbours>(),
}};

const RegisteredMetric head_consensus_metric{{
    .name = "head_consensus",
    .summary = "Jaccard similarity of the kept sets of the heads of a layer",
    .unit = "share",
    .formula =
        "mean over the pairs of rows g < h of |I_g n I_h| / |I_g u I_h|, on the sets at the end of the prompt; the "
        "mean over layers",
    .source = "kvreplay",
    .edges = "rows are those of the policy's granularity: KV heads or query heads; a set per layer -> 1; two empty "
             "sets -> 1, one empty set -> 0",
    .variants = {{"", "without protected tokens", OfLayer{consensus<scored>}},
                 {"protected", "with protected tokens", OfLayer{consensus<whole>}}},
}};

}  // namespace
}  // namespace kvreplay
