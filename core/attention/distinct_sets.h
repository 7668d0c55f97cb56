// Which of the kept sets that were asked for are equal: the same for all backends.
#pragma once

#include <span>
#include <vector>

#include "attention/backend.h"
#include "attention/kept_set.h"

namespace kvreplay {

/// The sets to compute: the one that keeps everything below the boundary first, equal ones once.
class DistinctSets {
 public:
  DistinctSets(std::span<const KeptSets> kept, int boundary);
  DistinctSets(const DistinctSets&) = delete;
  DistinctSets& operator=(const DistinctSets&) = delete;

  /// One for all queries wherever all queries have equal ones.
  std::span<const KeptSets> sets() const { return sets_; }
  /// Among these, of each set that was asked for.
  std::span<const int> number_of() const { return number_of_; }

 private:
  KeptSet everything_;
  std::vector<KeptSets> sets_;
  std::vector<int> number_of_;
};

}  // namespace kvreplay
