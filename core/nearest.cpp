#include "nearest.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <numeric>
#include <vector>

namespace kvreplay {
namespace {

std::string lower_case(std::string_view text) {
  std::string lower(text);
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return lower;
}

/// Levenshtein distance.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j] + 1, diagonal + 1, replaced});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest(std::string_view name, std::span<const std::string> known) {
  constexpr std::size_t few = 4;  // read at a glance
  std::string best, all;
  std::size_t best_distance = (name.size() + 1) / 3 + 1;
  for (auto at = known.begin(); at != known.end(); ++at) {
    const std::string& candidate = *at;
    if (std::find(known.begin(), at, candidate) != at) continue;  // a parameter of two parts
    all += (all.empty() ? "" : ", ") + candidate;
    const bool is_part = name.size() > 2 && candidate.find(name) != std::string::npos;
    const std::size_t d = is_part ? 1 : distance(lower_case(name), lower_case(candidate));
    if (d < best_distance) {
      best_distance = d;
      best = candidate;
    }
  }
  if (known.size() == 1) return all;
  return best.empty() || known.size() <= few ? "one of " + all : std::string(suggestion) + best + "?";
}

}  // namespace kvreplay
