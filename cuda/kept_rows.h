// What kernels of kept moments are told: logits of some rows, and what each kept set holds of the keys that they see.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "attention/backend.h"
#include "cuda/attention_task.h"

namespace kvreplay {

/// A kept set as one query has it: bits of a row of its granularity, then those of the next row.
struct PlacedSet {
  std::size_t first_word = 0;  // of all bits
  int row_words = 0;
  int tokens = 0;  // it covers [0, tokens)
  Heads heads = Heads::layer;
};

/// Queries [first_query, first_query + queries) of the KV heads of a task, which are the layer's from `first_kv_head`
/// on. Set number 0 keeps everything. Arrays are on the device.
struct KeptRows {
  AttentionTask task;
  int first_kv_head = 0;
  int query_heads = 0;  // of the layer
  int first_query = 0;
  int queries = 0;
  int boundary = 0;
  int sets = 0;
  const float* logits = nullptr;        // [kv_heads, queries * group, key_count], as write_logits() writes them
  const std::uint32_t* bits = nullptr;  // of all kept sets
  const PlacedSet* placed = nullptr;    // [sets, queries]
};

/// The softmax over what one set holds of one row: exponentials are 2^(logit - reference).
struct HeldState {
  double total = 0.0;
  float reference = 0.0F;
};

/// Of each row and set: moments but those of outputs at moments[sets, heads, queries] of the layer, and
/// states[kv_heads, queries * group, sets].
void add_held_sums(const KeptRows& rows, MomentParts parts, HeldState* states, Moments* moments, cudaStream_t stream);

/// Where outputs go as vectors of `dim` numbers, [sets, heads, queries] of the layer: õ − o, and o of set number 0.
struct KeptOutputs {
  float* vectors = nullptr;  // null: nowhere
  int dim = 0;
};

/// Adds the moments of outputs; values[kv_heads] are matrices of `type`, rows of `depth` numbers. `partials` has room
/// for output_partials() numbers.
std::size_t output_partials(const KeptRows& rows, int depth);
void add_outputs(const KeptRows& rows, DType type, int depth, const void* const* values, const HeldState* states,
                 double* partials, Moments* moments, KeptOutputs outputs, cudaStream_t stream);

}  // namespace kvreplay
