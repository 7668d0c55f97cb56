#include "policies/allocators/head_roles.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "attention/rope.h"

namespace kvreplay {
namespace {

/// The area under the cumulative attention of the mean query at position 499 to copies of the mean key, each rotated by
/// RoPE to its position: near 1 for attention on the first tokens, near 0 for attention on the last ones.
double cumulated_attention(const LayerView& view, std::span<const double> query, std::span<const double> key) {
  constexpr int positions = 500;
  const LayerTensors& tensors = view.tensors();
  const double scaling = tensors.rope.attention_scaling;
  const BackwardRotation rotation(tensors.rope, positions);
  std::vector<double> weights;
  for (int j = 0; j < positions; ++j) {
    std::vector<double> turned(key.begin(), key.end());
    rotation.apply(j - (positions - 1), turned);  // as far as the query stands behind it
    weights.push_back(static_cast<double>(tensors.softmax_scale) * scaling * scaling *
                      std::inner_product(query.begin(), query.end(), turned.begin(), 0.0));
  }
  const double most = std::ranges::max(weights);
  for (double& weight : weights) weight = std::exp(weight - most);
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  double cumulated = 0, area = 0;
  for (const double weight : weights) area += (cumulated += weight / sum) / positions;
  return area;
}

/// [Hkv, n]: the group mean of it, the same for each token of a head.
Matrix score_of_heads(const LayerView& view, const Scoring&) {
  Matrix scores(view.kv_heads(), view.tokens());
  for (int head = 0; head < view.query_heads(); ++head) {
    const int kv_head = head / view.group();
    const double area =
        cumulated_attention(view, view.query_moments(0).mean.row(head), view.key_moments().mean.row(kv_head));
    for (double& score : scores.row(kv_head)) score += area / view.group();
  }
  return scores;
}

}  // namespace

Scorer head_role_score() {
  return {
      .score = score_of_heads, .needs = {.all_queries = true, .rope = true}, .of_prompt = true, .name = "head-role"};
}

}  // namespace kvreplay
