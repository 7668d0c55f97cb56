#include "policies/parts/allocation.h"

#include <algorithm>

#include "policies/parts/ranking.h"

namespace kvreplay {
namespace {

const RegisteredPart registered_uniform{{"uniform", PartKind::allocator, "every layer and head gets B"}};
const RegisteredPart registered_everything{{"everything", PartKind::allocator, "all tokens, whatever the budget"}};
const RegisteredPart registered_counts{{"counts", PartKind::allocator, "the counts of another policy's selection"}};
const RegisteredPart registered_layer{
    {"ranked-layer", PartKind::allocator, "the best entries of all heads of a layer together"}};
const RegisteredPart registered_global{
    {"ranked-global", PartKind::allocator, "the best entries of all layers and heads together"}};

/// How many of the best rows * budget entries lie in each row, for matrices one after another.
std::vector<std::vector<int>> counts_of_best(std::span<const Matrix> scores, int budget) {
  std::vector<double> flat;
  int slots = 0;
  for (const Matrix& layer : scores) {
    std::ranges::copy(layer.values(), std::back_inserter(flat));
    slots += layer.rows() * budget;
  }
  const std::vector<std::int32_t> best = largest(flat, slots);
  std::vector<std::vector<int>> counts;
  std::int32_t begin = 0;
  for (const Matrix& layer : scores) {
    std::vector<int>& of_layer = counts.emplace_back(static_cast<std::size_t>(layer.rows()));
    for (int& count : of_layer) {
      const std::int32_t end = begin + layer.columns();
      count = static_cast<int>(std::ranges::lower_bound(best, end) - std::ranges::lower_bound(best, begin));
      begin = end;
    }
  }
  return counts;
}

}  // namespace

WithinLayer ranked_within_layer() {
  return [](const Matrix& scores, int budget) { return counts_of_best({&scores, 1}, budget).front(); };
}

AcrossLayers ranked_across_layers() {
  return [](std::span<const Matrix> scores, int budget) { return counts_of_best(scores, budget); };
}

}  // namespace kvreplay
