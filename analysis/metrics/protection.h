// Tokens that are kept by rule, not by score: sinks and the recent window.
#pragma once

#include <cstddef>

#include "replay/replay.h"

namespace kvreplay {

/// What was kept by score: the set without each row's sinks and recent tokens.
inline KeptSet unprotected(const LayerSelection& selection) {
  KeptSet scored = selection.set;
  for (int row = 0; row < scored.rows(); ++row) {
    const std::size_t r = static_cast<std::size_t>(row);
    for (int j = 0; j < selection.sinks[r]; ++j) scored.drop(row, j);
    for (int j = scored.tokens() - selection.recent[r]; j < scored.tokens(); ++j) scored.drop(row, j);
  }
  return scored;
}

}  // namespace kvreplay
