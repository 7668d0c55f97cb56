// Per-layer budgets that decrease with depth: an arithmetic sequence of sizes (Cai et al. 2024, PyramidKV,
// arXiv:2406.02069).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Of M candidates a row gets b on average, protected tokens apart: from 2b - b/beta in the first layer down to
/// b/beta in the last one, or from M down to 2b - M where the first would exceed M. The sum is exactly L*b.
struct Pyramid {
  int beta = 20;
  bool short_uniform = false;

  void parameters(Parameters& p);
  ByLayer allocator() const;
};

}  // namespace kvreplay
