// Which tokens say least that others do not say: SCA's greedy elimination (SCA, eq. 1 and algorithm 1).
#pragma once

#include "policies/policy.h"

namespace kvreplay {

enum class Similarity { both, key, value };
enum class Objective { least, most };

struct Redundancy {
  Similarity use = Similarity::both;
  Objective objective = Objective::least;

  void parameters(Parameters& p);
  Selector selector() const;
};

}  // namespace kvreplay
