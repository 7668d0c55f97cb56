#include "policies/twin.h"

#include <span>

#include "policies/arithmetic/ranking.h"
#include "random.h"

namespace kvreplay {
namespace {

/// The lengths in ascending order of their keys.
std::vector<std::int32_t> permuted(const std::vector<std::int32_t>& lengths, const std::vector<std::uint64_t>& keys) {
  std::vector<std::int32_t> result;
  result.reserve(lengths.size());
  for (const std::int32_t i : ordered(keys)) result.push_back(lengths[static_cast<std::size_t>(i)]);
  return result;
}

}  // namespace

std::vector<std::int32_t> random_twin(const Kept& kept, int prompt, std::uint64_t seed, int layer, int row) {
  const auto sinks = static_cast<std::size_t>(kept.sinks), recent = static_cast<std::size_t>(kept.recent);
  const std::span all(kept.positions);
  const std::span candidates = all.subspan(sinks, all.size() - sinks - recent);
  std::vector<std::int32_t> runs, gaps;
  std::vector<std::uint64_t> run_keys, gap_keys;
  const auto add_gap = [&](std::int32_t length) {
    gap_keys.push_back(chain(seed, layer, row, gaps.size(), 1));
    gaps.push_back(length);
  };
  std::int32_t next = kept.sinks;  // behind the run so far
  for (const std::int32_t position : candidates) {
    if (runs.empty() || position > next) {
      add_gap(position - next);
      run_keys.push_back(chain(seed, layer, row, runs.size()));
      runs.push_back(0);
    }
    ++runs.back();
    next = position + 1;
  }
  add_gap(prompt - kept.recent - next);

  const std::vector<std::int32_t> run_order = permuted(runs, run_keys), gap_order = permuted(gaps, gap_keys);
  std::vector<std::int32_t> twin(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(sinks));
  next = kept.sinks;
  for (std::size_t i = 0; i < run_order.size(); ++i) {
    next += gap_order[i];
    for (std::int32_t j = 0; j < run_order[i]; ++j) twin.push_back(next++);
  }
  twin.insert(twin.end(), all.end() - static_cast<std::ptrdiff_t>(recent), all.end());
  return twin;
}

}  // namespace kvreplay
