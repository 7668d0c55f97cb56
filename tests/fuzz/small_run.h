// A run over the small trace whose results have everything in them that results can have.
#pragma once

#include <filesystem>

#include "analysis/run.h"
#include "small_trace.h"

namespace kvreplay {

/// In `folder`: small.h5, small.obs.h5 beside it, and the results in sound/.
inline RunRequest write_small_run(const std::filesystem::path& folder) {
  write_small_trace(folder / "small.h5");
  RunRequest request;
  request.traces = {folder / "small.h5"};
  for (const char* policy : {"h2o:recent=3", "streaming-llm", "kivi", "snapkv:window=2"})
    request.policies.push_back(ConfiguredPolicy::parse(policy));
  request.budgets = {Budget::parse("8")};
  request.metrics = parse_metrics("attention_recall,kv_l1_loss");
  request.eval = "last:2";
  request.output = folder / "sound";
  request.save_scores = true;
  request.save_attention = true;
  request.observables = ObservableUse::keep;
  request.threads = 1;
  run(request);
  return request;
}

}  // namespace kvreplay
