#include "policies/stores/merging_layer.h"

#include <algorithm>
#include <utility>

#include "float_types.h"
#include "policies/stores/stores.h"

namespace kvreplay {
namespace {

LayerSelection evicted_after_prompt(const LayerView& view, const KeptSet& kept) {
  LayerSelection selection;
  selection.set = kept;
  for (int row = 0; row < kept.rows(); ++row)
    for (int j = 0; j < view.tensors().k.tokens; ++j)
      selection.evicted_at.push_back(j < view.prompt() && !kept.keeps(row, j) ? view.prompt() - 1 : -1);
  return selection;
}

}  // namespace

HeadValues::HeadValues(const TensorView& values, int head)
    : dim_(static_cast<std::size_t>(values.dim)),
      rounded_(widened(values.heads_from(head))),
      sums_(rounded_.begin(), rounded_.end()) {}

void HeadValues::round(std::int32_t token) {
  std::ranges::transform(of(token), rounded_.begin() + static_cast<std::ptrdiff_t>(first(token)),
                         [](double sum) { return static_cast<float>(sum); });
}

MergingLayer::MergingLayer(const LayerView& view, const LayerSelection& selection)
    : view_(view), rows_(selection.set.rows()), evicted_at_(selection.evicted_at), steps_(selection.evicted_at) {
  std::erase(steps_, -1);
  std::ranges::sort(steps_);
  const auto repeated = std::ranges::unique(steps_);
  steps_.erase(repeated.begin(), repeated.end());
  for (int head = 0; head < view.kv_heads(); ++head)
    bytes_ +=
        static_cast<double>(selection.set.count(row_of(head))) * static_cast<double>(view.tensors().token_bytes());
}

std::unique_ptr<StoredLayer> MergingLayer::before(int query) const {
  std::unique_ptr<StoredLayer> layer = exact_copy(view_);
  layer->tensors.k = view_.tensors().k;  // the same numbers, which need not be compared
  layer->bytes = bytes_;
  view_.on_threads(static_cast<std::size_t>(view_.kv_heads()), [&](std::size_t head) {
    const Reader values_before = of_head(static_cast<int>(head));
    const std::span<const float> values = values_before(query);
    std::ranges::copy(values, layer->values.begin() + static_cast<std::ptrdiff_t>(head * values.size()));
  });
  return layer;
}

EvolvingValues::Reader MergingLayer::of_head(int kv_head) const {
  return [this, kv_head, values = HeadValues(view_.tensors().v, kv_head), done = std::size_t{0}](int query) mutable {
    for (; done < steps_.size() && steps_[done] < query; ++done) merge(kv_head, steps_[done], values);
    return values.rounded();
  };
}

bool MergingLayer::remains(int row, std::int32_t token, std::int32_t step) const {
  const std::size_t tokens = evicted_at_.size() / static_cast<std::size_t>(rows_);
  const std::int32_t at = evicted_at_[static_cast<std::size_t>(row) * tokens + static_cast<std::size_t>(token)];
  return at < 0 || at > step;
}

Store merging_store(std::string name, const MakeMergingLayer& make) {
  return evolving_store(
      std::move(name),
      [make](const LayerView& view, const KeptSet& kept, const Partner&) {
        return make(view, evicted_after_prompt(view, kept))->before(view.prompt());
      },
      make);
}

}  // namespace kvreplay
