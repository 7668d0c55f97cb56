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
  int layers = 0;   // treated layers
  int heads = 0;    // KV heads of each layer
  int queries = 0;  // eval queries

  void parameters(Parameters& p);
  /// "layers=6,heads=4,queries=256", or some of them. Throws Error{usage}.
  static SampleSizes parse(std::string_view text);
};

/// Draws `count` of `population` units, an even number of them, in pairs: units 2i and 2i+1 are of one stratum.
///
/// The units stand on a ring, the even ones in ascending and then the odd ones in descending order, so that neighbours
/// on the ring are neighbours among the units. It is cut at a random place into count / 2 strata of equal size, or of
/// two sizes that differ by one. Two units of each stratum are drawn without replacement (Cochran, Sampling
/// Techniques, 3rd edition, sections 5.2 and 5A.12). Since the place is random, each unit is drawn with the probability
/// count / population, and the mean of the drawn units is an unbiased estimate.
std::vector<int> draw_pairs(int population, int count, std::uint64_t seed);

/// Why metrics of the policy cannot be estimated from a sample of the eval queries; empty: they can.
std::string why_no_sample_of_queries(const ConfiguredPolicy& policy, int layers);
/// Why metrics of the policy cannot be estimated from a sample of the layers; empty: they can, as what it keeps of a
/// layer depends on this layer, its number and the number of layers alone.
std::string why_no_sample_of_layers(const ConfiguredPolicy& policy, int layers);

}  // namespace kvreplay
