#include "policies/protection.h"

#include <algorithm>

namespace kvreplay {

Protection::Clamped Protection::within(int budget, int prompt, int marked) const {
  const int most = recent_of_prompt ? prompt : budget;
  const int first = std::min(sinks, most);
  const int last = question.last_tokens > 0 ? question.tokens(prompt, marked)
                   : !recent.is_fraction()  ? recent.count
                   : recent_of_prompt       ? recent.of(prompt) + 1
                                            : std::max(least_recent, recent.of(budget));
  return {first, std::min(last, most - first)};
}

}  // namespace kvreplay
