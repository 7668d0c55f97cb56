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
      sums_(rounded_.begin(), rounded_.end()),
      changed_(static_cast<std::size_t>(values.tokens)) {}

std::span<const float> HeadValues::rounded() {
  for (const std::int32_t token : to_round_) {
    std::ranges::transform(of(token), rounded_.begin() + static_cast<std::ptrdiff_t>(first(token)),
                           [](double sum) { return static_cast<float>(sum); });
    changed_[static_cast<std::size_t>(token)] = false;
  }
  to_round_.clear();
  return rounded_;
}

MergingLayer::MergingLayer(const LayerView& view, const LayerSelection& selection)
    : view_(view),
      rows_(selection.set.rows()),
      tokens_(selection.evicted_at.size() / static_cast<std::size_t>(rows_)),
      evicted_at_(selection.evicted_at),
      steps_(selection.evicted_at) {
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
    HeadValues values(view_.tensors().v, static_cast<int>(head));  // those of evicted tokens, too
    merge_before(query, static_cast<int>(head), 0, values);
    const std::span<const float> rounded = values.rounded();
    std::ranges::copy(rounded, layer->values.begin() + static_cast<std::ptrdiff_t>(head * rounded.size()));
  });
  return layer;
}

EvolvingValues::Reader MergingLayer::of_head(int kv_head) const {
  return [this, kv_head, values = HeadValues(view_.tensors().v, kv_head), done = std::size_t{0}](int query) mutable {
    if (done == 0 && query >= view_.prompt() && !after_prompt_.empty()) {
      const double* sums = after_prompt_[static_cast<std::size_t>(kv_head)].data();
      for (const std::int32_t token : resident_after_prompt(row_of(kv_head))) {
        const std::span<double> sum = values.sum_of(token);
        std::copy_n(sums, sum.size(), sum.begin());
        sums += sum.size();
      }
      done = static_cast<std::size_t>(std::ranges::lower_bound(steps_, view_.prompt()) - steps_.begin());
    }
    done = merge_before(query, kv_head, done, values);
    return values.rounded();
  };
}

void MergingLayer::merge_prompt() {
  after_prompt_.resize(static_cast<std::size_t>(view_.kv_heads()));
  view_.on_threads(after_prompt_.size(), [&](std::size_t number) {
    const int head = static_cast<int>(number);
    HeadValues values(view_.tensors().v, head);
    merge_before(view_.prompt(), head, 0, values);
    for (const std::int32_t token : resident_after_prompt(row_of(head))) {
      const std::span<const double> sum = values.of(token);
      after_prompt_[number].insert(after_prompt_[number].end(), sum.begin(), sum.end());
    }
  });
}

std::size_t MergingLayer::merge_before(int query, int head, std::size_t done, HeadValues& values) const {
  const std::span<const std::int32_t> left = std::span(steps_).subspan(done);
  const auto count = static_cast<std::size_t>(std::ranges::lower_bound(left, query) - left.begin());
  if (count > 0) merge(head, left.first(count), values);
  return done + count;
}

/// Others are read by no later query.
std::vector<std::int32_t> MergingLayer::resident_after_prompt(int row) const {
  std::vector<std::int32_t> tokens;
  for (std::int32_t token = 0; token < view_.prompt(); ++token)
    if (remains(row, token, view_.prompt() - 1)) tokens.push_back(token);
  return tokens;
}

Store merging_store(std::string name, const MakeMergingLayer& make) {
  return evolving_store(
      std::move(name),
      [make](const LayerView& view, const KeptSet& kept, const Partner&) {
        return make(view, evicted_after_prompt(view, kept))->before(view.prompt());
      },
      [make](const LayerView& view, const LayerSelection& selection) {
        std::unique_ptr<MergingLayer> layer = make(view, selection);
        layer->merge_prompt();
        return layer;
      });
}

}  // namespace kvreplay
