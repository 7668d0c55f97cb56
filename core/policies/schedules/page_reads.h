// Queries that read pages of the prompt, selected by upper bounds on their logits (Tang et al. 2024, Quest,
// arXiv:2406.10774).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

/// Each query of each query head reads the best max(`least_pages`, floor(B / `page`)) of the pages that begin at or
/// before it, of equal ones the earlier page. The bound of a page is
///   Σ_c max(q_c min_c, q_c max_c)
/// with the extremes of each channel over its keys as they are stored, which are stored beside them in the same type.
struct PageReads {
  int page = 16;
  int least_pages = 3;

  void parameters(Parameters& p);
  SchedulePtr schedule() const;
};

}  // namespace kvreplay
