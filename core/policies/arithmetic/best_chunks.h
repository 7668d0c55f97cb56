// The most that whole chunks can keep of given scores: which of the sets that some scores would make a selector of
// chunks choose has the largest sum of these.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvreplay {

/// Positions, ascending, of the `slots` tokens with the largest sum of scores among all sets that consist of whole
/// chunks and, of one more chunk at most, its first tokens. Chunks of `chunk` tokens begin at 0; the last may be short.
/// O(n log n).
std::vector<std::int32_t> best_chunks_and_a_part(std::span<const double> scores, int slots, int chunk);

/// The same among all sets that consist of floor(slots / chunk) whole chunks, a short last one counting as one, and any
/// single tokens. With r < 2 `chunk` of these, O(n log n + (slots + r chunk) r^2).
std::vector<std::int32_t> best_chunks_and_tokens(std::span<const double> scores, int slots, int chunk);

}  // namespace kvreplay
