#include "policies/schedules/held_tokens.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace kvreplay {
namespace {

/// A layer whose query heads each read a KV head of their own, as in code that repeats keys and values before it
/// evicts: a token may be resident for one query head of a group and evicted for another.
class RepeatedLayer {
 public:
  explicit RepeatedLayer(const LayerView& layer)
      : keys_(repeated(layer.tensors().k, layer.group())),
        values_(repeated(layer.tensors().v, layer.group())),
        view_(layer.backend(), tensors(layer.tensors()), layer.place(), layer.eval_queries()) {}
  RepeatedLayer(const RepeatedLayer&) = delete;
  RepeatedLayer& operator=(const RepeatedLayer&) = delete;

  const LayerView& view() const { return view_; }

 private:
  static std::vector<std::byte> repeated(const TensorView& tensor, int times) {
    const std::size_t head_bytes = static_cast<std::size_t>(tensor.tokens) * tensor.stride_bytes();
    std::vector<std::byte> heads;
    heads.reserve(tensor.bytes() * static_cast<std::size_t>(times));
    for (int head = 0; head < tensor.heads; ++head)
      for (int i = 0; i < times; ++i) heads.insert(heads.end(), tensor.row(head, 0), tensor.row(head, 0) + head_bytes);
    return heads;
  }

  LayerTensors tensors(LayerTensors of_layer) const {
    of_layer.k.heads = of_layer.v.heads = of_layer.q.heads;
    of_layer.k.data = keys_.data();
    of_layer.v.data = values_.data();
    return of_layer;
  }

  std::vector<std::byte> keys_, values_;
  LayerView view_;
};

}  // namespace

HeldTokens::HeldTokens(const ScheduledLayer& layer, int whole)
    : view_(layer.view),
      plan_(layer.plan),
      who_(layer.policy),
      place_(plan_.store->moves_tokens ? Positions::cache : Positions::original),
      whole_(whole),
      tokens_(view_.tensors().k.tokens),
      selection_(empty_selection(view_, plan_.grouping.heads)),
      held_(static_cast<std::size_t>(selection_.set.rows())) {
  selection_.evicted_at.assign(held_.size() * static_cast<std::size_t>(tokens_), -1);
}

void HeldTokens::append_and_cut(int end, int keep, int budget, bool by_relevance) {
  Residents residents{.positions = {},
                      .rows = plan_.grouping.heads == Heads::layer ? 1 : view_.kv_heads(),
                      .seen = end,
                      .added = end - seen_,
                      .place = place_,
                      .attention_before = std::move(attention_)};
  for (std::vector<std::int32_t>& row : held_) {
    for (int j = seen_; j < end; ++j) row.push_back(j);
    residents.positions.insert(residents.positions.end(), row.begin(), row.end());
  }
  seen_ = end;
  const bool cuts = keep < held() || by_relevance;
  Protection protect = plan_.protect;
  protect.sinks = whole_ > 0 ? 0 : std::min(resident_sinks(held_.front(), protect.sinks), keep);
  Protection::Clamped by_rule = protect.within(budget, view_.prompt(), view_.question());
  by_rule.sinks = std::max(by_rule.sinks, whole_);
  by_rule.recent = recent_ = std::min(by_rule.recent, keep - by_rule.sinks);
  if (!cuts && !plan_.score.accumulates) return;

  const LayerView now(view_, std::move(residents));
  if (cuts) {
    const Scoring how = scoring_of(plan_, by_rule, keep, view_.prompt(), view_.question());
    const Matrix scores = score_tokens(now, plan_, how, who_);
    for (int row = 0; row < selection_.set.rows(); ++row) cut_row(now, scores, row, {keep, by_rule, row}, by_relevance);
  }
  if (plan_.score.accumulates) carry_attention(now);
}

LayerSelection HeldTokens::finish() {
  for (int row = 0; row < selection_.set.rows(); ++row) hold_at_end_of_prompt(selection_, row);
  return std::move(selection_);
}

void HeldTokens::cut_row(const LayerView& now, const Matrix& scores, int row, RowBudget budget, bool by_relevance) {
  const std::span<const double> of_row = scores.empty() ? std::span<const double>() : scores.row(row);
  std::vector<std::int32_t>& list = held_[static_cast<std::size_t>(row)];
  const std::vector<std::int32_t> before = list;
  const Kept kept = choose_row(plan_.select, before, of_row, budget, &now, who_);
  const std::span<std::int32_t> evicted_at = selection_.evicted_of(row);
  for (const std::int32_t position : before) evicted_at[static_cast<std::size_t>(position)] = seen_ - 1;
  for (const std::int32_t position : kept.positions) evicted_at[static_cast<std::size_t>(position)] = -1;
  list = kept.positions;
  if (!by_relevance) return;
  std::vector<double> score_of(static_cast<std::size_t>(seen_));
  for (std::size_t i = 0; i < before.size(); ++i) score_of[static_cast<std::size_t>(before[i])] = of_row[i];
  std::ranges::sort(list, [&](std::int32_t a, std::int32_t b) {
    const double score_a = score_of[static_cast<std::size_t>(a)], score_b = score_of[static_cast<std::size_t>(b)];
    return score_a != score_b ? score_a > score_b : a < b;
  });
}

/// Scores persist across evictions: [Hq, held] of the tokens that are resident from here on.
void HeldTokens::carry_attention(const LayerView& now) {
  const Matrix& all = now.cumulative_attention();
  attention_ = Matrix(all.rows(), held());
  for (int head = 0; head < all.rows(); ++head) {
    const int row = held_.size() == 1 ? 0 : head / view_.group();
    const std::span<const std::int32_t> before = now.positions(row).numbers();
    std::size_t from = 0;
    for (int i = 0; i < held(); ++i) {
      while (before[from] != held_[static_cast<std::size_t>(row)][static_cast<std::size_t>(i)])
        from = (from + 1) % before.size();
      attention_(head, i) = all(head, static_cast<int>(from));
    }
  }
}

LayerSelection CuttingSchedule::run(const ScheduledLayer& layer) const {
  if (!repeats(layer.plan.grouping.heads)) return cut(layer);
  const RepeatedLayer repeated(layer.view);
  Plan plan = layer.plan;
  plan.grouping.heads = Heads::kv;
  LayerSelection selection = cut({repeated.view(), plan, layer.budget, layer.policy, layer.poll});
  selection.set = selection.set.refined(Heads::query, layer.view.query_heads());
  return selection;
}

}  // namespace kvreplay
