#include "nearest.h"

#include <algorithm>
#include <cstddef>

#include "edit_distance.h"

namespace kvreplay {
std::string nearest(std::string_view name, std::span<const std::string> known) {
  constexpr std::size_t few = 4;  // read at a glance
  std::string best, all;
  std::size_t best_distance = (name.size() + 1) / 3 + 1;
  for (auto at = known.begin(); at != known.end(); ++at) {
    const std::string& candidate = *at;
    if (std::find(known.begin(), at, candidate) != at) continue;  // a parameter of two parts
    all += (all.empty() ? "" : ", ") + candidate;
    const bool is_part = name.size() > 2 && candidate.find(name) != std::string::npos;
    const std::size_t d = is_part ? 1 : edit_distance(name, candidate);
    if (d < best_distance) {
      best_distance = d;
      best = candidate;
    }
  }
  if (known.size() == 1) return all;
  const bool is_number = name.find_first_not_of("0123456789.%") == std::string_view::npos;
  return best.empty() || is_number || known.size() <= few ? "one of " + all : std::string(suggestion) + best + "?";
}

}  // namespace kvreplay
