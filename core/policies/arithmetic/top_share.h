// The largest softmax weights whose sum exceeds a share of all.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvreplay {

/// With x = softmax(logits) in descending order, i is the first index whose cumulative sum exceeds `share`; the last
/// index if there is none. All j with x_j >= x_i, ascending.
std::vector<std::int32_t> top_share(std::span<const double> logits, double share);

}  // namespace kvreplay
