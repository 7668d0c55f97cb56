// Queries that read pages of the prompt, selected by a score of each query and page.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

enum class PageRank {
  bounds,  // Σ_c max(q_c min_c, q_c max_c), with the extremes of each channel (Tang et al. 2024, arXiv:2406.10774)
  mean     // <q, mean key> (Lu et al. 2025, arXiv:2502.13189)
};

/// Each query of each query head reads the best max(`least_pages`, floor(B / `page`)) of the pages that begin at or
/// before it, of equal ones the earlier page. Extremes and means are those of the keys as they are stored, and are
/// stored beside them in the same type. With `mean`, a query of the prompt reads its own page whatever its score.
struct PageReads {
  PageRank rank_by = PageRank::bounds;
  int page = 16;
  int least_pages = 3;

  void parameters(Parameters& p);
  SchedulePtr schedule() const;
};

}  // namespace kvreplay
