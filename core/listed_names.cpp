#include "listed_names.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>
#include <utility>

#include "edit_distance.h"
#include "nearest.h"

namespace kvreplay {

std::string nearest_listed(std::string_view name, std::vector<std::string> known, std::string_view command) {
  constexpr std::size_t many = 12, shown = 3;
  std::string text = nearest(name, known);
  if (known.size() <= many || text.starts_with(suggestion)) return text;
  std::vector<std::pair<std::size_t, std::size_t>> by_distance;  // of equally near names the first
  for (std::size_t i = 0; i < known.size(); ++i) by_distance.emplace_back(edit_distance(name, known[i]), i);
  std::ranges::sort(by_distance);
  std::vector<std::string> nearest_names;
  for (const auto& [distance, i] : std::span(by_distance).first(shown)) nearest_names.push_back(known[i]);
  return fmt::format("one of {} names, such as {} (see {})", known.size(), fmt::join(nearest_names, ", "), command);
}

}  // namespace kvreplay
