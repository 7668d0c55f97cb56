// What the kernels of online eviction are told: rows of held tokens, each in slots of its own.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/attention_task.h"

namespace kvreplay {

/// Rows of held tokens and the query heads that decide for them, on the device. A token that goes leaves its slot
/// behind until the slots are closed up.
struct HeldRows {
  int rows = 0;
  int heads = 1;     // query heads of a row
  int capacity = 0;  // slots of a row
  int given = 0;     // tokens that each row held in the beginning
  int first = 0;     // tokens [0, first) had come before
  int tokens = 0;
  bool accumulate = true;                     // scores go on from step to step
  int budget = 0;                             // the largest
  const std::int32_t* budgets = nullptr;      // [tokens] of each token
  const std::int32_t* recents = nullptr;      // [tokens]
  int sinks = 0;                              // positions below are never evicted
  const std::int32_t* lowest_seen = nullptr;  // [tokens] the first position that each token's query sees
  const double* sink_logits = nullptr;        // [rows, heads] in units of log 2; null: there are none
  const std::int32_t* resident = nullptr;     // [rows, given] what they were
  std::int32_t* positions = nullptr;          // [rows, capacity] of the held tokens, -1 for those that have gone
  double* scores = nullptr;                   // [rows, capacity]
  std::int32_t* evicted = nullptr;            // [rows, tokens]
};

/// The given tokens, with their scores [rows, given].
void begin_rows(const HeldRows& held_rows, const double* given_scores, cudaStream_t stream);

/// Steps whose logits are computed at once.
inline constexpr int steps_at_once = 128;

/// logits[rows * heads, steps, capacity], in units of log 2, of the queries [token, token + steps) over slots: [0,
/// held) and one for each of the tokens that come. `task` has the queries [first, tokens) and all keys.
void write_held_logits(const ProductForm& form, const AttentionTask& task, const HeldRows& held_rows, int held,
                       int token, int steps, float* logits, cudaStream_t stream);

/// The tokens [token, token + steps) come; then the slots are closed up. Sets `bad` if a logit is not finite.
void take_steps(const HeldRows& held_rows, int held, int token, int steps, const float* logits, int* bad,
                cudaStream_t stream);

}  // namespace kvreplay
