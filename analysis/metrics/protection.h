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
    scored.drop(row, 0, selection.sinks[r]);
    scored.drop(row, scored.tokens() - selection.recent[r], scored.tokens());
  }
  return scored;
}

}  // namespace kvreplay
