#include "policies/schedules/blocks.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "error.h"
#include "positions.h"

namespace kvreplay {

Requirements BlockSchedule::required() const {
  Requirements all = Schedule::required();
  if (slots_ == Slots::by_relevance) {
    all.push_back({Property::has_score, "order=relevance needs a score", "order=position, or a score"});
    all.push_back(
        {Property::cache_positions, "order=relevance needs cache positions", "store=cache, or order=position"});
  }
  return all;
}

void BlockSchedule::check(const ScheduledPrompt& prompt) const {
  if (!prompt.evicts) return;
  if (const int question = spared(prompt.tokens, prompt.question); prompt.budget.tokens <= question)
    throw Error{Refusal::input, prompt.policy, fmt::format("the {} tokens of the question fill the budget", question),
                fmt::format("a budget of at least {} tokens", question + 1), std::to_string(prompt.budget.tokens)};
  if (slots_ == Slots::by_relevance && prompt.first_query >= 0 && prompt.first_query < prompt.tokens)
    throw Error{Refusal::input, prompt.policy, "order=relevance can only be measured after the prompt",
                "--eval continuation, and no attention_cosine:rows", fmt::format("query {}", prompt.first_query)};
}

LayerSelection BlockSchedule::cut(const ScheduledLayer& layer) const {
  const int prompt = layer.view.prompt();
  const MarkedQuestion question = layer.view.question();
  check({layer.policy, prompt, question, layer.budget});
  const int at_end = spared(prompt, question);
  const int context = prompt - at_end;
  const int slots = layer.budget.tokens - at_end;
  const bool by_relevance = slots_ == Slots::by_relevance;
  HeldTokens tokens(layer);
  for (int begin = 0; begin < context; begin += block_) {
    layer.poll();
    const int end = std::min(begin + block_, context);
    const auto [keep, budget] =
        cut_at({slots, std::max(1, layer.budget.after(end) - at_end), context, end, tokens.held(), end - begin});
    tokens.append_and_cut(end, keep, budget, by_relevance);
  }
  std::vector<std::int32_t> order;
  for (int row = 0; by_relevance && row < tokens.rows(); ++row) {
    std::ranges::copy(tokens.row(row), std::back_inserter(order));
    std::ranges::copy(position_range(context, prompt), std::back_inserter(order));
  }
  const int recent = at_end > 0 ? at_end : tokens.recent();
  LayerSelection selection = tokens.finish();
  selection.slots = std::move(order);
  enter_protected(selection, {layer.plan.protect.within(slots, prompt, question).sinks, recent}, layer.budget.tokens);
  return selection;
}

}  // namespace kvreplay
