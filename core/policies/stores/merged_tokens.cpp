// Merges the keys and values of evicted tokens into the kept tokens with the most similar keys (D2O,
// AIoT-MLSys-Lab/D2O at 93adb56, LLM_merge_new/LMEval_kv_token_merge/modeling_llama3_7b_13b_d2o.py: the eviction after
// the prompt).
//
// e(h,i): the i-th token of the prompt that KV head h evicts, c(h,i) the largest cosine of its key and a kept key, j
// the token with that key. The i-th tokens merge if the mean of c(h,i) over the heads with an i-th token is at least
// the mean of all c(h,i). All m tokens with target j change it at once:
//   k_j <- (k_j + sum of c k_e) / (1 + m),  v_j <- (v_j + sum of c v_e) / (1 + m)
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "float_types.h"
#include "policies/plan_part.h"
#include "policies/policy.h"
#include "policies/stores/most_similar.h"
#include "policies/stores/stores.h"

namespace kvreplay {
namespace {

/// Of one KV head.
struct Evictions {
  std::vector<std::int32_t> tokens;   // ascending
  std::vector<SimilarToken> similar;  // of each the kept token
};

Evictions evictions_of(const LayerView& view, const KeptSet& kept, int head) {
  Evictions found;
  const std::vector<std::int32_t> held = held_of_prompt(view, kept, head);
  auto next = held.begin();
  for (std::int32_t token = 0; token < view.prompt(); ++token)
    if (next != held.end() && *next == token)
      ++next;
    else
      found.tokens.push_back(token);
  if (held.empty()) found.tokens.clear();
  if (!found.tokens.empty()) found.similar = most_similar(view.tensors().k, head, found.tokens, held);
  return found;
}

/// Whether the i-th evicted tokens of the heads merge.
std::vector<bool> merging(std::span<const Evictions> heads) {
  constexpr double rounding = 1e-12;  // equal means are equal however they were summed
  std::vector<double> sums, counts;
  for (const Evictions& head : heads)
    for (std::size_t i = 0; i < head.similar.size(); ++i) {
      sums.resize(std::max(sums.size(), i + 1));
      counts.resize(sums.size());
      sums[i] += head.similar[i].cosine;
      counts[i] += 1;
    }
  double sum = 0, count = 0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    sum += sums[i];
    count += counts[i];
  }
  std::vector<bool> merge(sums.size());
  for (std::size_t i = 0; i < sums.size(); ++i) merge[i] = sums[i] / counts[i] >= sum / count - rounding;
  return merge;
}

/// vectors: [H, T, d] of `shape`, those of one head are changed. Targets and the evicted tokens with their cosines.
void merge(std::vector<float>& vectors, const TensorView& shape, int head,
           const std::map<std::int32_t, std::vector<SimilarToken>>& targets) {
  std::vector<double> sum(static_cast<std::size_t>(shape.dim)), evicted(sum.size());
  for (const auto& [target, merged] : targets) {
    read_row(shape, head, target, sum);
    for (const SimilarToken& one : merged) {
      read_row(shape, head, one.token, evicted);
      for (std::size_t c = 0; c < sum.size(); ++c) sum[c] += one.cosine * evicted[c];
    }
    const double count = 1 + static_cast<double>(merged.size());
    std::ranges::transform(sum, row_of(vectors, shape, head, target).begin(),
                           [count](double number) { return static_cast<float>(number / count); });
  }
}

std::unique_ptr<StoredLayer> stored(const LayerView& view, const KeptSet& kept) {
  std::unique_ptr<StoredLayer> layer = exact_copy(view);
  const LayerTensors& exact = view.tensors();
  std::vector<Evictions> heads(static_cast<std::size_t>(view.kv_heads()));
  view.on_threads(heads.size(),
                  [&](std::size_t head) { heads[head] = evictions_of(view, kept, static_cast<int>(head)); });
  const std::vector<bool> merges = merging(heads);
  view.on_threads(heads.size(), [&](std::size_t number) {
    const auto& [tokens, similar] = heads[number];
    std::map<std::int32_t, std::vector<SimilarToken>> targets;
    for (std::size_t i = 0; i < similar.size(); ++i)
      if (merges[i]) targets[similar[i].token].push_back({tokens[i], similar[i].cosine});
    const auto head = static_cast<int>(number);
    merge(layer->keys, exact.k, head, targets);
    merge(layer->values, exact.v, head, targets);
  });
  for (int head = 0; head < view.kv_heads(); ++head)
    layer->bytes += static_cast<double>(held_of_prompt(view, kept, head).size() * exact.token_bytes());
  return layer;
}

const RegisteredFixedPart registered{
    PartKind::store, "merged-tokens",
    "merges key and value of evicted tokens into the kept token with the most similar key, at the end of the prompt",
    [](Plan& plan) {
      Store store = changing_store("store=merged-tokens", [](const LayerView& view, const KeptSet& kept,
                                                             const Partner&) { return stored(view, kept); });
      store.has_exact_size = true;
      plan.store = std::make_shared<const Store>(std::move(store));
    }};

}  // namespace
}  // namespace kvreplay
