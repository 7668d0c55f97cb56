// Runs of token positions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvreplay {

/// begin, begin + step, ... below end.
inline std::vector<std::int32_t> position_range(int begin, int end, int step = 1) {
  std::vector<std::int32_t> positions;
  positions.reserve(end > begin ? static_cast<std::size_t>((end - begin - 1) / step + 1) : 0);
  for (std::int64_t position = begin; position < end; position += step)
    positions.push_back(static_cast<std::int32_t>(position));
  return positions;
}

/// The marked question at the end of the tokens under compression: [begin, end); both -1: none is marked. A few tokens
/// of a chat template may follow it.
struct MarkedQuestion {
  int begin = -1;
  int end = -1;

  bool is_marked() const { return begin >= 0; }
};

}  // namespace kvreplay
