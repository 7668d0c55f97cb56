// Whole chunks of neighbouring tokens instead of single ones (Liu et al. 2025, ChunkKV, Algorithm 1).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Use of the slots left over by whole chunks, if the window has its own slots.
enum class Fill {
  cut,    // the next best chunk is cut to what is left
  none,   // left empty: the best floor((B - window) / chunk) chunks, literally
  tokens  // the best single tokens outside the chosen chunks
};
enum class ChunkScore { sum, mean };
enum class WindowMode {
  reserve,  // chunks cover the tokens before the window, which has its own slots
  replace,  // chunks cover all tokens; the chosen ones, in order, are cut to B - window positions, the window appended
  whole     // chunks cover all tokens; those of the sinks and of the window are kept first
};

struct Chunks {
  int chunk = 10;
  Fill fill = Fill::cut;
  ChunkScore score = ChunkScore::sum;
  WindowMode window_mode = WindowMode::reserve;

  void parameters(Parameters& p);
  Selector selector() const;
};

}  // namespace kvreplay
