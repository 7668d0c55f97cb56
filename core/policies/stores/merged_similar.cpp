#include "policies/stores/merged_similar.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <span>
#include <tuple>
#include <vector>

#include "policies/plan_part.h"
#include "policies/stores/merging_layer.h"
#include "policies/stores/most_similar.h"

namespace kvreplay {
namespace {

struct MergedSimilarPart : MergedSimilar {
  static constexpr PartKind kind = PartKind::store;
  static constexpr const char* name = "merged-similar";
  static constexpr const char* summary =
      "merges the value of each evicted token into the kept token with the most similar key";

  void fill(Plan& plan) const { plan.store = store(); }
};

const RegisteredPart<MergedSimilarPart> registered;

double square_of(std::span<const double> vector) {
  return std::inner_product(vector.begin(), vector.end(), vector.begin(), 0.0);
}

/// An evicted token, and the token that takes its value.
struct Merge {
  std::int32_t step = 0;
  std::int32_t target = 0;
  std::int32_t token = 0;
  double cosine = 0;
};

class SimilarLayer final : public MergingLayer {
 public:
  SimilarLayer(const MergedSimilar& part, const LayerView& view, const LayerSelection& selection)
      : MergingLayer(view, selection), part_(part), merges_(static_cast<std::size_t>(view.kv_heads())) {
    view.on_threads(merges_.size(), [&](std::size_t head) { find_merges(static_cast<int>(head)); });
  }

 private:
  void find_merges(int head) {
    std::vector<std::int32_t> resident, evicted, remaining;
    std::int32_t first = 0;
    for (const std::int32_t step : steps()) {
      for (; first <= step; ++first) resident.push_back(first);
      evicted.clear();
      remaining.clear();
      for (const std::int32_t token : resident)
        (remains(row_of(head), token, step) ? remaining : evicted).push_back(token);
      if (!remaining.empty() && !evicted.empty()) add_merges(head, step, evicted, remaining);
      resident = remaining;
    }
  }

  void add_merges(int head, std::int32_t step, std::span<const std::int32_t> evicted,
                  std::span<const std::int32_t> remaining) {
    std::vector<Merge> found;
    const std::vector<SimilarToken> similar = most_similar(view().tensors().k, head, evicted, remaining);
    for (std::size_t e = 0; e < evicted.size(); ++e)
      found.push_back({step, similar[e].token, evicted[e], similar[e].cosine});
    std::erase_if(found, [&](const Merge& merge) { return merge.cosine < part_.similarity_threshold; });
    const auto merging = 1 + static_cast<std::size_t>(part_.merge_fraction * static_cast<double>(evicted.size() - 1));
    if (found.size() > merging) {
      const auto cut = found.begin() + static_cast<std::ptrdiff_t>(merging) - 1;
      std::ranges::nth_element(found, cut, std::ranges::greater(), &Merge::cosine);
      std::erase_if(found, [least = cut->cosine](const Merge& merge) { return merge.cosine < least; });
    }
    std::ranges::sort(found, {}, [](const Merge& merge) { return std::tuple(merge.target, merge.token); });
    std::vector<Merge>& all = merges_[static_cast<std::size_t>(head)];
    all.insert(all.end(), found.begin(), found.end());
  }

  void merge(int head, std::span<const std::int32_t> some, HeadValues& values) const override {
    const std::span<const Merge> merges = merges_of(some, merges_[static_cast<std::size_t>(head)]);
    std::vector<double> sum;
    for (auto next = merges.begin(); next != merges.end();) {
      const std::int32_t step = next->step, target = next->target;
      const std::span<double> kept = values.sum_of(target);
      const double length = std::sqrt(square_of(kept));
      sum.assign(kept.begin(), kept.end());
      double weights = 1;
      for (; next != merges.end() && next->step == step && next->target == target; ++next) {
        const std::span<const double> evicted = values.of(next->token);
        const double own = std::sqrt(square_of(evicted));
        const double weight = next->cosine * own / (own + length + least_length);
        weights += weight;
        for (std::size_t c = 0; c < sum.size(); ++c) sum[c] += weight * evicted[c];
      }
      std::ranges::transform(sum, kept.begin(), [weights](double number) { return number / weights; });
    }
  }

  const MergedSimilar part_;
  std::vector<std::vector<Merge>> merges_;  // of each KV head, by step, then by target
};

}  // namespace

void MergedSimilar::parameters(Parameters& p) {
  const auto read = p.of_part("store");
  p.add("similarity_threshold", similarity_threshold, RealRange{},
        "least cosine of the keys of an evicted token and of the token that takes its value");
  p.add("merge_fraction", merge_fraction, RealRange{},
        "share of the evicted tokens, those with the largest cosines, whose values are merged");
}

StorePtr MergedSimilar::store() const {
  return std::make_shared<const Store>(
      merging_store("store=merged-similar", [part = *this](const LayerView& view, const LayerSelection& selection) {
        return std::make_unique<SimilarLayer>(part, view, selection);
      }));
}

}  // namespace kvreplay
