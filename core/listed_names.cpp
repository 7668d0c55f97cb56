#include "listed_names.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>

#include "edit_distance.h"
#include "nearest.h"

namespace kvreplay {

std::string nearest_listed(std::string_view name, std::vector<std::string> known, std::string_view command) {
  constexpr std::size_t many = 12, shown = 3;
  std::string text = nearest(name, known);
  if (known.size() <= many || text.starts_with(suggestion)) return text;
  std::ranges::stable_sort(known, {}, [name](const std::string& one) { return edit_distance(name, one); });
  return fmt::format("one of {} names, such as {} (see {})", known.size(),
                     fmt::join(std::span(known).first(shown), ", "), command);
}

}  // namespace kvreplay
