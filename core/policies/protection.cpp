#include "policies/protection.h"

#include <algorithm>

namespace kvreplay {

Protection::Clamped Protection::within(int budget, int prompt, MarkedQuestion marked) const {
  const int most = recent_of_prompt ? prompt : budget;
  const int first = std::min(sinks, most);
  const int last = question.last_tokens > 0 ? question.tokens(prompt, marked.begin)
                   : !recent.is_fraction()  ? recent.count
                   : recent_of_prompt       ? recent.of(prompt) + 1
                                            : std::max(least_recent, recent.of(budget));
  const int behind = behind_question && marked.is_marked() ? prompt - marked.end : 0;
  return {first, std::min(last + behind, most - first)};
}

int resident_sinks(std::span<const std::int32_t> positions, int sinks) {
  return static_cast<int>(std::ranges::count_if(positions, [sinks](std::int32_t j) { return j < sinks; }));
}

}  // namespace kvreplay
