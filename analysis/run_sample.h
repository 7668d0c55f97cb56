// The sample of a run: the layers that it replays, and the KV heads and eval queries that it measures.
#pragma once

#include <string>

#include "analysis/run_work.h"

namespace kvreplay {

/// Why the sample does not estimate the metrics of a policy; empty: it does.
std::string why_not_estimated(const RunRequest& request, const ConfiguredPolicy& policy, int layers);

/// Throws Error{usage} where the sample estimates no metric that was asked for.
void check_sampled_metrics(const RunRequest& request);

/// Reduces the conditions of the work to the sample of the request. Throws Error{usage} for a policy whose metrics it
/// does not estimate, and for heads of layers that differ in them.
void draw_sample(const RunRequest& request, TraceWork& work);

/// Replaces the eval queries by a sample of `count`, where that is fewer; 0: all.
void draw_queries(const RunRequest& request, TraceWork& work, int count);

}  // namespace kvreplay
