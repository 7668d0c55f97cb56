// A sample of the units that a replay measures. Decisions of policies are never sampled: a policy reads all that it
// reads in the exact replay.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parameters.h"
#include "policies/text/configured.h"

namespace kvreplay {

/// How many units of each kind are measured; 0: all.
struct SampleSizes {
  int queries = 0;  // eval queries

  void parameters(Parameters& p);
  /// "queries=256". Throws Error{usage}.
  static SampleSizes parse(std::string_view text);
};

/// Draws `count` of `population` units, an even number of them, in pairs: units 2i and 2i+1 are of one stratum.
///
/// The units stand in their order on a circle, which is cut at a random place into count / 2 strata of equal size, or
/// of two sizes that differ by one. Two units of each stratum are drawn without replacement (Cochran, Sampling
/// Techniques, 3rd edition, sections 5.2 and 5A.12). Since the place is random, each unit is drawn with the probability
/// count / population, and the mean of the drawn units is an unbiased estimate.
std::vector<int> draw_pairs(int population, int count, std::uint64_t seed);

/// Why metrics of the policy cannot be estimated from a sample of the eval queries; empty: they can.
std::string why_no_sample_of_queries(const ConfiguredPolicy& policy, int layers);

}  // namespace kvreplay
