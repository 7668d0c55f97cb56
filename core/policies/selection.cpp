#include "policies/selection.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "error.h"
#include "positions.h"

namespace kvreplay {
namespace {

void check_row(const std::vector<std::int32_t>& kept, int tokens, int allowed, const std::string& who) {
  std::int32_t previous = -1;
  for (const std::int32_t token : kept) {
    if (token <= previous || token >= tokens)
      throw Error{Refusal::internal, who, "selection not ascending among the resident tokens",
                  fmt::format("{}..{}", previous + 1, tokens - 1), std::to_string(token)};
    previous = token;
  }
  if (static_cast<int>(kept.size()) > allowed)
    throw Error{Refusal::internal, who, "selection over its budget", fmt::format("at most {}", allowed),
                std::to_string(kept.size())};
}

/// Numbers of the resident tokens by ascending position.
std::vector<std::size_t> ascending(std::span<const std::int32_t> positions) {
  std::vector<std::size_t> order(positions.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) { return positions[i]; });
  return order;
}

}  // namespace

std::span<std::int32_t> LayerSelection::evicted_of(int row) {
  const std::size_t tokens = evicted_at.size() / static_cast<std::size_t>(set.rows());
  return std::span(evicted_at).subspan(static_cast<std::size_t>(row) * tokens, tokens);
}

std::span<const std::int32_t> LayerSelection::evicted_of(int row) const {
  return const_cast<LayerSelection*>(this)->evicted_of(row);
}

std::span<const std::int32_t> LayerSelection::slots_of(int row) const {
  std::size_t before = 0;
  for (int r = 0; r < row; ++r) before += static_cast<std::size_t>(set.count(r));
  return std::span(slots).subspan(before, static_cast<std::size_t>(set.count(row)));
}

std::vector<std::int32_t> LayerSelection::in_slot_order(int row) const {
  if (slots.empty()) return set.positions(row);
  const std::span<const std::int32_t> of_row = slots_of(row);
  return {of_row.begin(), of_row.end()};
}

KeptSet LayerSelection::seen_by(int query) const {
  if (reads.at) return reads.at(query);
  KeptSet seen(set.heads(), set.rows(), static_cast<int>(evicted_of(0).size()));
  for (int row = 0; row < set.rows(); ++row) {
    const std::span<const std::int32_t> gone = evicted_of(row);
    // Whole words, because a branch on each token is unpredictable.
    std::vector<std::uint64_t> bits(seen.row_bits(row).size());
    for (std::size_t j = 0; j <= static_cast<std::size_t>(query); ++j)
      bits[j / 64] |= std::uint64_t{gone[j] < 0 || gone[j] >= query} << (j % 64);
    seen.keep(row, bits);
  }
  return seen;
}

LayerSelection empty_selection(const LayerView& view, Heads heads) {
  const int rows = view.rows(heads);
  const auto size = static_cast<std::size_t>(rows);
  return {KeptSet(heads, rows, view.prompt()), std::vector<int>(size), std::vector<int>(size), std::vector<int>(size),
          view.layer()};
}

void hold_at_end_of_prompt(LayerSelection& selection, int row) {
  const std::span<const std::int32_t> gone = selection.evicted_of(row);
  for (int j = 0; j < selection.set.tokens(); ++j) {
    const std::int32_t at = gone[static_cast<std::size_t>(j)];
    if (at < 0 || at >= selection.set.tokens()) selection.set.keep(row, j);
  }
}

Kept choose_row(const Selector& select, int tokens, std::span<const double> scores, RowBudget budget,
                const LayerView* view, const std::string& who) {
  const int count = std::min(budget.count, tokens);
  const int sinks = std::min(budget.by_rule.sinks, count);
  const int recent = std::min(budget.by_rule.recent, count - sinks);
  if (count == 0 || count == tokens) return {position_range(0, count), sinks, recent};
  if (count == sinks + recent) {  // nothing is left to choose, and there may be no scores
    Kept kept{position_range(0, sinks), sinks, recent};
    std::ranges::copy(position_range(tokens - recent, tokens), std::back_inserter(kept.positions));
    return kept;
  }
  Kept kept = select({scores, tokens, count, sinks, recent, view, budget.row});
  check_row(kept.positions, tokens, count, who);
  return kept;
}

Kept choose_row(const Selector& select, std::span<const std::int32_t> positions, std::span<const double> scores,
                RowBudget budget, const LayerView* view, const std::string& who) {
  std::vector<std::int32_t> by_position(positions.begin(), positions.end());
  std::vector<double> in_order;
  if (!std::ranges::is_sorted(positions)) {
    const std::vector<std::size_t> order = ascending(positions);
    for (std::size_t i = 0; i < order.size(); ++i) by_position[i] = positions[order[i]];
    if (!scores.empty())
      for (const std::size_t i : order) in_order.push_back(scores[i]);
  }
  Kept kept =
      choose_row(select, static_cast<int>(positions.size()), in_order.empty() ? scores : in_order, budget, view, who);
  for (std::int32_t& token : kept.positions) token = by_position[static_cast<std::size_t>(token)];
  return kept;
}

void enter_row(LayerSelection& selection, int row, const Kept& kept, int granted) {
  const std::vector<std::int32_t>& positions = kept.positions;
  const bool one_run = !positions.empty() && positions.back() - positions.front() + 1 == std::ssize(positions);
  if (one_run)
    selection.set.keep(row, positions.front(), positions.back() + 1);
  else
    for (const std::int32_t position : positions) selection.set.keep(row, position);
  const auto r = static_cast<std::size_t>(row);
  selection.sinks[r] = kept.sinks;
  selection.recent[r] = kept.recent;
  selection.granted[r] = granted;
}

void enter_protected(LayerSelection& selection, Protection::Clamped protected_tokens, int granted) {
  for (int row = 0; row < selection.set.rows(); ++row) {
    const auto r = static_cast<std::size_t>(row);
    const int held = selection.set.count(row);
    selection.sinks[r] = std::min(protected_tokens.sinks, held);
    selection.recent[r] = std::min(protected_tokens.recent, held - selection.sinks[r]);
    selection.granted[r] = granted;
  }
}

Protection::Clamped kept_by_rule(const Plan& plan, int budget, int prompt, MarkedQuestion question) {
  return plan.protect.within(plan.own_memory ? prompt : budget, prompt, question);
}

Scoring scoring_of(const Plan& plan, Protection::Clamped by_rule, int budget, int prompt, MarkedQuestion question) {
  const bool at_question = plan.window_at == WindowAt::question && question.is_marked();
  return {.grouping = plan.grouping,
          .recent = by_rule.recent,
          .budget = budget,
          .sinks = by_rule.sinks,
          .observing = plan.observing
                           ? plan.observing->within(plan.own_memory ? prompt : budget, prompt, question).recent
                           : by_rule.recent,
          .window_end = at_question ? question.end : LayerView::newest};
}

Scoring inputs_of_scorer(const Plan& plan, Scoring how) {
  if (!plan.score.reads_recent) how.recent = 0;
  if (!plan.score.reads_budget) how.budget = 0;
  if (!plan.score.reads_sinks) how.sinks = 0;
  if (!plan.score.needs.recent_queries) how.observing = 0;
  return how;
}

Matrix score_tokens(const LayerView& view, const Plan& plan, const Scoring& how, const std::string& who) {
  if (!plan.score) return {};
  Matrix scores = plan.score.score(view, inputs_of_scorer(plan, how));
  bool numbers = true;
  for (const double score : scores.values()) numbers &= score == score;
  if (!numbers)
    throw Error{Refusal::input, fmt::format("layer {}", view.stored_layer()), "score of " + who + " is NaN"};
  return scores;
}

}  // namespace kvreplay
