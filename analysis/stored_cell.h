// The keys and values that the store of a finished cell gives back: what a live model reads in the place of its own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "replay/replay.h"
#include "replay/stored_cells.h"
#include "trace/trace.h"

namespace kvreplay {

/// One layer as it is found by queries after the prompt. Tokens that are not kept, and those after the prompt, are as
/// captured.
struct StoredCellLayer {
  Heads heads = Heads::kv;    // whose sets the rows are
  int key_heads = 0;          // Hkv, or Hq where each query head has keys of its own
  std::vector<float> keys;    // [key_heads, T, d]
  std::vector<float> values;  // [Hkv, T, d]
  /// [H] kept positions in the order of their slots, ascending but for policies that order them otherwise.
  std::vector<std::vector<std::int32_t>> positions;
  /// [H] where these keys stand by RoPE. Kept keys that move to slots 0 ... n-1 stand right before the first token
  /// after the prompt, so that queries after it stay where they were.
  std::vector<std::vector<std::int32_t>> stands_at;
  double bytes = 0;  // of the kept tokens, all heads: kv_bytes of the layer
};

/// A cell of a finished run with its trace. Layers are computed on the CPU, one at a time.
class StoredCell {
 public:
  /// The cell `id` of the trace that the results folder calls `name`. Throws Error{input} where the folder has no such
  /// cell, where `trace` is another trace, or where the policy's file has changed since; {usage} for a policy of a file
  /// that this process has not read.
  StoredCell(const std::filesystem::path& folder, const std::string& name, const std::string& id,
             std::shared_ptr<const Trace> trace);

  /// Throws Error{usage} for a stored layer that was not treated.
  StoredCellLayer layer(int stored_layer) const;

 private:
  std::string where_;
  std::shared_ptr<const Trace> trace_;
  Conditions conditions_;
  Cell cell_;
  std::unique_ptr<Backend> backend_;
};

}  // namespace kvreplay
