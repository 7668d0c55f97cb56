// Evicts the token with the lowest score after each token while more than B are resident, also after the prompt.
#include <algorithm>
#include <deque>
#include <memory>

#include "attention/backend.h"
#include "policies/plan_part.h"
#include "policies/schedules/schedules.h"
#include "policies/selection.h"

namespace kvreplay {
namespace {

/// [H, n] scores and positions of the kept prompt tokens, with which online eviction starts.
struct Prefilled {
  std::vector<std::int32_t> positions;
  std::vector<double> scores;
};

/// A call whose spans are of these vectors.
struct HeldCall final : OnlineCall {
  Prefilled prefilled;
  std::vector<std::int32_t> budgets, recents;
  Protection::Clamped by_rule = {};  // at the end of the prompt
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

/// Without scores all of the budget is protected, so that the positions decide: the token behind the resident sinks is
/// evicted. [T] position of the query after which each token is evicted, -1 never.
std::vector<std::int32_t> evicted_by_position(const ScheduledLayer& layer, int first, int end) {
  const LayerView& view = layer.view;
  std::vector<std::int32_t> evicted(static_cast<std::size_t>(view.tensors().k.tokens), -1);
  std::deque<std::int32_t> resident;
  for (int t = 0; t < end; ++t) {
    resident.push_back(t);
    const int budget = layer.budget.after(t + 1);
    const int excess = static_cast<int>(resident.size()) - budget;
    if (t < first || excess <= 0) continue;
    const int sinks = layer.plan.protect.within(budget, view.prompt(), view.question()).sinks;
    const auto from = std::find_if(resident.begin(), resident.begin() + std::min(sinks, budget),
                                   [&](std::int32_t j) { return j >= layer.plan.protect.sinks; });
    std::for_each(from, from + excess, [&](std::int32_t j) { evicted[static_cast<std::size_t>(j)] = t; });
    resident.erase(from, from + excess);
  }
  return evicted;
}

class Online final : public Schedule {
 public:
  Online(bool grow, bool prefill_once) : grow_(grow), prefill_once_(prefill_once) {}

  std::string name() const override { return "schedule=online"; }
  bool goes_on_after_prompt() const override { return !grow_; }
  bool is_online() const override { return true; }

  Requirements required() const override {
    Requirements all = Schedule::required();
    all.push_back({Property::best_tokens, "schedule=online selects the evicted token itself", "select=top-k"});
    all.push_back(
        {Property::scored_in_place, "schedule=online scores tokens at their original positions", "store=exact"});
    all.push_back({Property::group_mean, "schedule=online averages over the query heads of a group", "agg=mean"});
    all.push_back({Property::attention_by_query, "schedule=online evicts by attention, query by query",
                   "score=cumulative or score=newest"});
    return all;
  }

  LayerSelection run(const ScheduledLayer& layer) const override {
    const std::unique_ptr<OnlineCall> made = call(layer);
    if (made == nullptr) return by_position(layer);
    return after(layer, *made, layer.view.backend().online_eviction(layer.view.tensors(), made->what));
  }

  std::unique_ptr<OnlineCall> call(const ScheduledLayer& layer) const override {
    const auto& [view, plan, budget, who, poll] = layer;
    if (!plan.score) return nullptr;
    const int prompt = view.prompt();
    const bool accumulate = plan.score.online == OnlineScore::sum;
    // The sum of the newest token has one term, so it is protected if the sinks leave room. Scores of a single query
    // are comparable for all tokens.
    const auto protected_within = [&](int room, int sinks) {
      Protection protect = plan.protect;
      protect.sinks = sinks;
      Protection::Clamped within = protect.within(room, prompt, view.question());
      within.recent = std::max(accumulate ? std::min(1, room - within.sinks) : 0, within.recent);
      return within;
    };
    auto made = std::make_unique<HeldCall>();
    OnlineEviction& what = made->what;
    Prefilled& held = made->prefilled;
    Protection::Clamped& by_rule = made->by_rule;
    by_rule = protected_within(budget.tokens, plan.protect.sinks);
    what = {.heads = plan.grouping.heads,
            .tokens = grow_ ? prompt : view.tensors().k.tokens,
            .accumulate = accumulate,
            .budget = budget.tokens,
            .recent = by_rule.recent,
            .sinks = plan.protect.sinks};
    if (budget.of_seen > 0) {
      // A sink that was evicted at a smaller budget is no longer protected.
      int resident = prefill_once_ ? by_rule.sinks : 0;
      for (int t = 0; t < what.tokens; ++t) {
        made->budgets.push_back(budget.after(t + 1));
        if (!prefill_once_ && t < plan.protect.sinks) resident = std::min(resident + 1, made->budgets.back());
        const Protection::Clamped now = protected_within(made->budgets.back(), resident);
        made->recents.push_back(now.recent);
        if (t == prompt - 1) by_rule = now;
      }
      what.budget = made->budgets.back();
      what.recent = made->recents.back();
      what.budgets = made->budgets;
      what.recents = made->recents;
    }
    if (prefill_once_) {
      held = cut_once(view, plan, {budget.tokens, by_rule}, who);
      what.first = prompt;
      what.resident = held.positions;
      what.scores = held.scores;
    }
    return made;
  }

  LayerSelection after(const ScheduledLayer& layer, const OnlineCall& made,
                       std::span<const std::int32_t> gone) const override {
    const LayerView& view = layer.view;
    const int prompt = view.prompt();
    const auto& held = static_cast<const HeldCall&>(made);
    const std::vector<std::int32_t>& positions = held.prefilled.positions;
    LayerSelection selection = empty_selection(view, layer.plan.grouping.heads);
    const auto rows = static_cast<std::size_t>(selection.set.rows());
    const auto width = static_cast<std::size_t>(made.what.tokens);
    selection.evicted_at.assign(rows * static_cast<std::size_t>(view.tensors().k.tokens), -1);
    const std::size_t held_a_row = positions.size() / rows;
    for (std::size_t row = 0; row < rows; ++row) {
      const std::span<std::int32_t> of_row = selection.evicted_of(static_cast<int>(row));
      std::ranges::copy(gone.subspan(row * width, width), of_row.begin());
      if (prefill_once_) {
        const std::span<const std::int32_t> kept = std::span(positions).subspan(row * held_a_row, held_a_row);
        for (int j = 0; j < prompt; ++j)
          if (!std::ranges::binary_search(kept, j)) of_row[static_cast<std::size_t>(j)] = prompt - 1;
      }
      hold_at_end_of_prompt(selection, static_cast<int>(row));
    }
    enter_protected(selection, held.by_rule, layer.budget.tokens);
    return selection;
  }

 private:
  LayerSelection by_position(const ScheduledLayer& layer) const {
    const LayerView& view = layer.view;
    const std::vector<std::int32_t> evicted = evicted_by_position(layer, prefill_once_ ? view.prompt() - 1 : 0,
                                                                  grow_ ? view.prompt() : view.tensors().k.tokens);
    LayerSelection selection = empty_selection(view, layer.plan.grouping.heads);
    for (int row = 0; row < selection.set.rows(); ++row)
      selection.evicted_at.insert(selection.evicted_at.end(), evicted.begin(), evicted.end());
    for (int row = 0; row < selection.set.rows(); ++row) hold_at_end_of_prompt(selection, row);
    const int sinks = selection.set.count_within(0, 0, std::min(layer.plan.protect.sinks, view.prompt()));
    enter_protected(selection, {sinks, selection.set.count(0) - sinks}, layer.budget.tokens);
    return selection;
  }

  bool grow_;          // after the prompt nothing goes
  bool prefill_once_;  // the prompt is cut as by schedule=once, its scores go on
};

constexpr Choice<Prefill> prefill_words[] = {{"online", Prefill::online}, {"once", Prefill::once}};

struct OnlinePart : OnlineEvictions {
  static constexpr PartKind kind = PartKind::schedule;
  static constexpr const char* name = "online";
  static constexpr const char* summary =
      "evicts, after every token, the one with the least accumulated (score=cumulative) or current (score=newest) "
      "attention; without a score, the oldest one behind the attention sinks";

  void fill(Plan& plan) const { plan.schedule = schedule(); }
};

const RegisteredPart<OnlinePart> registered;

}  // namespace

void OnlineEvictions::parameters(Parameters& p) {
  const auto read = p.of_part("schedule");
  p.add("grow", grow, "evicts nothing after the prompt: the cache grows by the continuation");
  p.add<Prefill>("prefill", prefill, prefill_words, "evicts token by token in the prompt, or once after it");
}

SchedulePtr OnlineEvictions::schedule() const { return std::make_shared<Online>(grow, prefill == Prefill::once); }

}  // namespace kvreplay
