// Greedy elimination of redundant tokens (SCA, eq. 1 and algorithm 1).
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
