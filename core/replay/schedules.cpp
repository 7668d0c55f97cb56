#include "replay/schedules.h"

#include <fmt/format.h>

#include <algorithm>

#include "error.h"
#include "positions.h"

namespace kvreplay {
namespace {

using Poll = std::function<void()>;
using Lists = std::vector<std::vector<std::int32_t>>;

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
    const std::size_t head_bytes = static_cast<std::size_t>(tensor.tokens) * tensor.row_bytes();
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

/// What is held of one layer while its tokens come, row by row, and the attention that the held ones have received.
class Cache {
 public:
  Cache(const LayerView& view, const Plan& plan, std::string who)
      : view_(view),
        plan_(plan),
        who_(std::move(who)),
        place_(std::holds_alternative<CachePositions>(plan.store) ? Positions::cache : Positions::original),
        tokens_(view.tensors().k.tokens),
        selection_(empty_selection(view, plan.grouping.heads)),
        held_(static_cast<std::size_t>(selection_.set.rows())) {
    selection_.evicted_at.assign(held_.size() * static_cast<std::size_t>(tokens_), -1);
  }

  int tokens() const { return tokens_; }
  /// Of each row: all rows hold equally many.
  int held() const { return static_cast<int>(held_.front().size()); }

  /// Tokens [seen, end) come; then the rows are cut to `keep`. Sinks and recent tokens are protected within `budget`
  /// and `keep`: a sink that was evicted while fewer were kept is no sink any more, and recent tokens may take its
  /// slot. With `by_relevance` the kept tokens are in the order of their scores.
  void append_and_cut(int end, int keep, int budget, bool by_relevance) {
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
    protect.sinks = std::min(resident_sinks(held_.front(), protect.sinks), keep);
    Protection::Clamped by_rule = protect.within(budget, view_.prompt(), view_.question());
    by_rule.recent = recent_ = std::min(by_rule.recent, keep - by_rule.sinks);
    if (!cuts && !plan_.score.accumulates) return;

    const LayerView now(view_, std::move(residents));
    if (cuts) {
      const Scoring how = scoring_of(plan_, by_rule, keep, view_.prompt(), view_.question());
      const Matrix scores = score_tokens(now, plan_, how, who_);
      for (int row = 0; row < selection_.set.rows(); ++row)
        cut_row(now, scores, row, {keep, by_rule, row}, by_relevance);
    }
    if (plan_.score.accumulates) carry_attention(now);
  }

  /// The rest of the tokens comes, and nothing goes.
  LayerSelection finish() {
    for (int row = 0; row < selection_.set.rows(); ++row) hold_at_end_of_prompt(selection_, row);
    return std::move(selection_);
  }

  LayerSelection& selection() { return selection_; }
  /// Tokens that the latest eviction protected at the end.
  int recent() const { return recent_; }
  const std::vector<std::int32_t>& row(int number) const { return held_[static_cast<std::size_t>(number)]; }

 private:
  void cut_row(const LayerView& now, const Matrix& scores, int row, RowBudget budget, bool by_relevance) {
    const std::span<const double> of_row = scores.empty() ? std::span<const double>() : scores.row(row);
    std::vector<std::int32_t>& list = held_[static_cast<std::size_t>(row)];
    const std::vector<std::int32_t> before = list;
    const Kept kept = choose_row(plan_.select, before, of_row, budget, &now, who_);
    for (const std::int32_t position : before)
      if (!std::ranges::binary_search(kept.positions, position))
        selection_.evicted_of(row)[static_cast<std::size_t>(position)] = seen_ - 1;
    list = kept.positions;
    if (!by_relevance) return;
    std::vector<double> score_of(static_cast<std::size_t>(seen_));
    for (std::size_t i = 0; i < before.size(); ++i) score_of[static_cast<std::size_t>(before[i])] = of_row[i];
    std::ranges::sort(list, [&](std::int32_t a, std::int32_t b) {
      const double score_a = score_of[static_cast<std::size_t>(a)], score_b = score_of[static_cast<std::size_t>(b)];
      return score_a != score_b ? score_a > score_b : a < b;
    });
  }

  /// Scores survive compression: [Hq, held] of those that are held from here on.
  void carry_attention(const LayerView& now) {
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

  const LayerView& view_;
  const Plan& plan_;
  std::string who_;
  Positions place_;
  int tokens_;
  int seen_ = 0;
  LayerSelection selection_;
  Lists held_;
  int recent_ = 0;
  Matrix attention_;
};

void note_rules(LayerSelection& selection, Protection::Clamped by_rule, int granted) {
  for (int row = 0; row < selection.set.rows(); ++row) {
    const auto r = static_cast<std::size_t>(row);
    const int held = selection.set.count(row);
    selection.sinks[r] = std::min(by_rule.sinks, held);
    selection.recent[r] = std::min(by_rule.recent, held - selection.sinks[r]);
    selection.granted[r] = granted;
  }
}

LayerSelection run(const Once&, const LayerView&, const Plan&, Allowance, const std::string& who, const Poll&) {
  throw Error{Refusal::internal, who, "no schedule"};
}

LayerSelection run(const Reads&, const LayerView&, const Plan&, Allowance, const std::string& who, const Poll&) {
  throw Error{Refusal::internal, who, "no schedule"};
}

LayerSelection run(const Blocks& blocks, const LayerView& view, const Plan& plan, Allowance budget,
                   const std::string& who, const Poll& poll) {
  const int spared = blocks.spared_tokens(view.prompt(), view.question().begin);
  const int context = view.prompt() - spared;
  const int slots = budget.tokens - spared;
  if (slots < 1)
    throw Error{Refusal::input, who,
                fmt::format("budget {} has no room beside the {} tokens of the question", budget.tokens, spared),
                fmt::format("at least {}", spared + 1), std::to_string(budget.tokens)};
  Cache cache(view, plan, who);
  for (int begin = 0; begin < context; begin += blocks.block) {
    poll();
    const int end = std::min(begin + blocks.block, context);
    const BlockEnd now{slots, context, end, cache.held(), end - begin};
    // A schedule's own rule already keeps a share of what has been seen.
    const int room = blocks.keep ? slots : std::max(1, budget.after(end) - spared);
    cache.append_and_cut(end, blocks.keep ? blocks.keep(now) : room, room, blocks.by_relevance);
  }
  const Protection::Clamped by_rule = plan.protect.within(slots, view.prompt(), view.question());
  std::vector<std::int32_t> slots_of_all;
  if (blocks.by_relevance)
    for (int row = 0; row < cache.selection().set.rows(); ++row) {
      std::ranges::copy(cache.row(row), std::back_inserter(slots_of_all));
      std::ranges::copy(position_range(context, view.prompt()), std::back_inserter(slots_of_all));
    }
  const int recent = cache.recent();
  LayerSelection selection = cache.finish();
  selection.slots = std::move(slots_of_all);
  note_rules(selection, {by_rule.sinks, spared > 0 ? spared : recent}, budget.tokens);
  return selection;
}

LayerSelection run(const Threshold& threshold, const LayerView& view, const Plan& plan, Allowance /*budget*/,
                   const std::string& who, const Poll& poll) {
  const auto [peak, keep] = tokens_of(threshold, view.prompt(), who);
  const Protection::Clamped by_rule = plan.protect.within(keep, view.prompt(), view.question());
  Cache cache(view, plan, who);
  for (int seen = peak; seen <= cache.tokens(); seen += peak - keep) {
    poll();
    cache.append_and_cut(seen, keep, keep, false);
  }
  LayerSelection selection = cache.finish();
  note_rules(selection, by_rule, peak);
  return selection;
}

LayerSelection run(const Rolling&, const LayerView& view, const Plan& plan, Allowance budget, const std::string&,
                   const Poll&) {
  const auto [sinks, recent] = plan.protect.within(budget.tokens, view.prompt(), view.question());
  LayerSelection selection = empty_selection(view, plan.grouping.heads);
  const int tokens = view.tensors().k.tokens;
  for (int row = 0; row < selection.set.rows(); ++row) {
    for (int j = 0; j < tokens; ++j) {
      const int last_query = recent > 0 ? j + recent - 1 : j;
      selection.evicted_at.push_back(j < sinks || last_query >= tokens - 1 ? -1 : last_query);
    }
    // The set that the last prompt query saw.
    for (const std::int32_t position : position_range(0, sinks)) selection.set.keep(row, position);
    for (const std::int32_t position : position_range(view.prompt() - recent, view.prompt()))
      selection.set.keep(row, position);
  }
  note_rules(selection, {sinks, recent}, budget.tokens);
  return selection;
}

/// [H, n] scores and positions of what is kept of the prompt, for going on token by token.
struct Prefilled {
  std::vector<std::int32_t> positions;
  std::vector<double> scores;
};

Prefilled cut_once(const LayerView& view, const Plan& plan, RowBudget budget, const std::string& who) {
  // Online scores are means over a row's query heads; those of a layer are sums.
  const double heads = plan.grouping.heads == Heads::layer ? view.query_heads() : 1.0;
  const Scoring how = scoring_of(plan, budget.by_rule, budget.count, view.prompt(), view.question());
  const Matrix scores = score_tokens(view, plan, how, who);
  Prefilled held;
  for (int row = 0; row < scores.rows(); ++row) {
    budget.row = row;
    for (const std::int32_t position :
         choose_row(plan.select, view.positions(row).numbers(), scores.row(row), budget, &view, who).positions) {
      held.positions.push_back(position);
      held.scores.push_back(scores(row, position) / heads);
    }
  }
  return held;
}

LayerSelection run(const Online& online, const LayerView& view, const Plan& plan, Allowance budget,
                   const std::string& who, const Poll&) {
  const int tokens = view.tensors().k.tokens;
  const int prompt = view.prompt();
  const bool accumulate = plan.score.online == OnlineScore::sum;
  // No other query has added to the newest token's sum: it is kept where the sinks leave room. Scores of one query
  // compare all tokens.
  const auto protected_within = [&](int room, int sinks) {
    Protection protect = plan.protect;
    protect.sinks = sinks;
    Protection::Clamped within = protect.within(room, prompt, view.question());
    within.recent = std::max(accumulate ? std::min(1, room - within.sinks) : 0, within.recent);
    return within;
  };
  Protection::Clamped by_rule = protected_within(budget.tokens, plan.protect.sinks);
  OnlineEviction what{.heads = plan.grouping.heads,
                      .tokens = online.grow ? prompt : tokens,
                      .accumulate = accumulate,
                      .budget = budget.tokens,
                      .recent = by_rule.recent,
                      .sinks = plan.protect.sinks};
  std::vector<std::int32_t> budgets, recents;
  if (budget.of_seen > 0) {
    // A sink that was evicted while fewer tokens were kept is no sink any more.
    int resident = online.prefill_once ? by_rule.sinks : 0;
    for (int t = 0; t < what.tokens; ++t) {
      budgets.push_back(budget.after(t + 1));
      if (!online.prefill_once && t < plan.protect.sinks) resident = std::min(resident + 1, budgets.back());
      const Protection::Clamped now = protected_within(budgets.back(), resident);
      recents.push_back(now.recent);
      if (t == prompt - 1) by_rule = now;
    }
    what.budget = budgets.back();
    what.recent = recents.back();
    what.budgets = budgets;
    what.recents = recents;
  }
  Prefilled held;
  if (online.prefill_once) {
    held = cut_once(view, plan, {budget.tokens, by_rule}, who);
    what.first = prompt;
    what.resident = held.positions;
    what.scores = held.scores;
  }
  const std::vector<std::int32_t> gone = view.backend().online_eviction(view.tensors(), what);

  LayerSelection selection = empty_selection(view, plan.grouping.heads);
  const auto rows = static_cast<std::size_t>(selection.set.rows());
  const auto width = static_cast<std::size_t>(what.tokens);
  selection.evicted_at.assign(rows * static_cast<std::size_t>(tokens), -1);
  const std::size_t held_a_row = held.positions.size() / rows;
  for (std::size_t row = 0; row < rows; ++row) {
    const std::span<std::int32_t> of_row = selection.evicted_of(static_cast<int>(row));
    std::ranges::copy(std::span(gone).subspan(row * width, width), of_row.begin());
    if (online.prefill_once) {
      const std::span<const std::int32_t> kept = std::span(held.positions).subspan(row * held_a_row, held_a_row);
      for (int j = 0; j < prompt; ++j)
        if (!std::ranges::binary_search(kept, j)) of_row[static_cast<std::size_t>(j)] = prompt - 1;
    }
    hold_at_end_of_prompt(selection, static_cast<int>(row));
  }
  note_rules(selection, by_rule, budget.tokens);
  return selection;
}

}  // namespace

PeakAndKeep tokens_of(const Threshold& threshold, int prompt, const std::string& who) {
  const PeakAndKeep found{threshold.peak.of_prompt(prompt), threshold.keep.of_prompt(prompt)};
  if (found.keep < 1 || found.keep >= found.peak)
    throw Error{Refusal::usage, who, "threshold(peak,keep)", "1 <= keep < peak",
                fmt::format("peak {}, keep {}", found.peak, found.keep)};
  return found;
}

bool repeats_heads(const Plan& plan) {
  return plan.grouping.heads == Heads::query &&
         (std::holds_alternative<Blocks>(plan.schedule) || std::holds_alternative<Threshold>(plan.schedule));
}

LayerSelection run_schedule(const LayerView& view, const Plan& plan, Allowance budget, const std::string& who,
                            const std::function<void()>& poll) {
  if (repeats_heads(plan)) {
    const RepeatedLayer layer(view);
    Plan of_repeated = plan;
    of_repeated.grouping.heads = Heads::kv;
    LayerSelection selection = run_schedule(layer.view(), of_repeated, budget, who, poll);
    selection.set = selection.set.refined(Heads::query, view.query_heads());
    return selection;
  }
  return std::visit([&](const auto& schedule) { return run(schedule, view, plan, budget, who, poll); }, plan.schedule);
}

}  // namespace kvreplay
