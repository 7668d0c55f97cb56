#include "policies/arithmetic/ranking.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>

namespace kvreplay {
namespace {

constexpr int digit_bits = 10;

double score_of(std::uint64_t key) {
  constexpr std::uint64_t sign = std::uint64_t{1} << 63;
  return std::bit_cast<double>(key ^ ((key & sign) != 0 ? sign : ~std::uint64_t{0}));
}

struct Bounds {
  std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t most = 0;

  void add(std::uint64_t key) {
    least = std::min(least, key);
    most = std::max(most, key);
  }
  /// So many low bits are beyond the leading `bits` of key - least.
  int shift(int bits) const { return std::max(0, static_cast<int>(std::bit_width(most - least)) - bits); }
};

/// The cut among keys, which are moved about: the leading digit, of the bits that differ, says which of them may be it.
Cut cut_of(std::span<std::uint64_t> keys, Bounds bounds, std::int64_t count) {
  while (bounds.least < bounds.most) {
    const int shift = bounds.shift(digit_bits);
    std::array<std::int64_t, std::size_t{1} << digit_bits> of_digit{};
    for (const std::uint64_t key : keys) ++of_digit[(key - bounds.least) >> shift];
    std::size_t digit = (bounds.most - bounds.least) >> shift;
    for (; count > of_digit[digit]; --digit) count -= of_digit[digit];

    std::size_t found = 0;
    Bounds of_found;
    for (const std::uint64_t key : keys) {
      keys[found] = key;
      if ((key - bounds.least) >> shift != digit) continue;
      of_found.add(key);
      ++found;
    }
    keys = keys.first(found);
    bounds = of_found;
  }
  return {score_of(bounds.least), count};
}

}  // namespace

std::vector<std::int32_t> ordered(std::span<const std::uint64_t> keys) {
  struct Entry {
    std::uint64_t key;
    std::int32_t index;
    bool operator<(const Entry& other) const { return key != other.key ? key < other.key : index < other.index; }
  };
  Bounds bounds;
  for (const std::uint64_t key : keys) bounds.add(key);
  // About a key a digit, so that little is left to sort.
  const int shift = bounds.shift(static_cast<int>(std::bit_width(keys.size())));
  const auto digit = [&](std::uint64_t key) { return static_cast<std::size_t>((key - bounds.least) >> shift); };
  std::vector<std::size_t> end(keys.empty() ? 1 : digit(bounds.most) + 1);
  for (const std::uint64_t key : keys) ++end[digit(key)];
  std::exclusive_scan(end.begin(), end.end(), end.begin(), std::size_t{0});

  std::vector<Entry> entries(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i)
    entries[end[digit(keys[i])]++] = {keys[i], static_cast<std::int32_t>(i)};
  auto begin = entries.begin();
  for (const std::size_t e : end) {
    const auto stop = entries.begin() + static_cast<std::ptrdiff_t>(e);
    if (stop - begin > 1) std::sort(begin, stop);
    begin = stop;
  }
  std::vector<std::int32_t> order;
  order.reserve(entries.size());
  for (const Entry& entry : entries) order.push_back(entry.index);
  return order;
}

std::vector<std::int32_t> ranked(std::span<const double> scores) {
  std::vector<std::uint64_t> keys;
  keys.reserve(scores.size());
  for (const double score : scores) keys.push_back(~score_key(score));
  return ordered(keys);
}

std::vector<std::int32_t> largest(std::span<const double> scores, std::int64_t count, std::int32_t first) {
  const auto wanted = static_cast<std::size_t>(std::clamp<std::int64_t>(count, 0, std::ssize(scores)));
  std::vector<std::int32_t> best(wanted);
  if (wanted == scores.size()) std::iota(best.begin(), best.end(), first);
  if (wanted == 0 || wanted == scores.size()) return best;
  Cut cut = cut_after(scores, count);
  const std::uint64_t worst = score_key(cut.score);
  std::size_t taken = 0;
  for (std::size_t i = 0; taken < wanted; ++i) {
    const std::uint64_t key = score_key(scores[i]);
    const bool ties = key == worst && cut.equal > 0;
    best[taken] = first + static_cast<std::int32_t>(i);
    cut.equal -= ties ? 1 : 0;
    taken += key > worst || ties ? 1 : 0;
  }
  return best;
}

std::vector<std::vector<std::int32_t>> largest_of_each(std::span<const double> scores, std::span<const int> counts) {
  std::vector<std::size_t> descending(counts.size());
  std::iota(descending.begin(), descending.end(), std::size_t{0});
  std::ranges::sort(descending, std::greater(), [&](std::size_t i) { return counts[i]; });
  std::vector<std::vector<std::int32_t>> all(counts.size());
  std::vector<std::int32_t> candidates(scores.size());
  std::iota(candidates.begin(), candidates.end(), 0);
  std::vector<double> of_candidates(scores.begin(), scores.end());
  for (const std::size_t i : descending) {
    all[i] = largest(of_candidates, counts[i]);
    of_candidates.clear();
    for (std::int32_t& best : all[i]) {
      best = candidates[static_cast<std::size_t>(best)];
      of_candidates.push_back(scores[static_cast<std::size_t>(best)]);
    }
    candidates = all[i];
  }
  return all;
}

Cut cut_after(std::span<const double> scores, std::int64_t count) {
  const auto keys = std::make_unique_for_overwrite<std::uint64_t[]>(scores.size());
  Bounds bounds;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    keys[i] = score_key(scores[i]);
    bounds.add(keys[i]);
  }
  return cut_of({keys.get(), scores.size()}, bounds, count);
}

void break_ties(std::span<double> counts, std::span<const double> by) {
  const double unit = 1.0 / static_cast<double>(std::bit_ceil(counts.size() + 1));
  double behind = static_cast<double>(counts.size());  // tokens that come after this one
  for (const std::int32_t token : ranked(by)) counts[static_cast<std::size_t>(token)] += --behind * unit;
}

}  // namespace kvreplay
