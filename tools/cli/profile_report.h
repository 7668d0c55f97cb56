// The profile of a replay: a table on stdout, and a flame graph.
#pragma once

#include <string>

#include "attention/backend.h"
#include "profile.h"

namespace kvreplay {

/// Multiply-adds a second of the backend in a matrix product: the cosine similarities of 4,096 random float32 tokens of
/// 1,024 components, which run at the rate of sgemm (docs/performance.md).
double peak_rate(Backend& backend);

/// Seconds by observable, policy, metric and layer. Work inside other work counts for itself alone.
void print_profile(const Profile& profile, double peak);

/// The pieces as a file for https://www.speedscope.app, one flame graph for each thread.
std::string speedscope_json(const Profile& profile);

}  // namespace kvreplay
