// Rows of kept moments, and which keys they hold.
#pragma once

#include "attention/row_sums.h"
#include "cuda/kept_rows.h"

namespace kvreplay {

/// A row of a KV head of the task: these are numbered query by query, head within head. One that is missing sees
/// nothing.
struct KeptRow {
  int kv_head;
  int row;
  int query;       // number among those of the rows
  int query_head;  // of the layer
  int2 visible;
  int own;
};

__device__ __forceinline__ int row_count(const KeptRows& rows) { return rows.queries * rows.task.group; }

__device__ __forceinline__ KeptRow kept_row(const KeptRows& rows, int kv_head, int row) {
  const int group = rows.task.group;
  const int query = row / group;
  const int list = rows.task.lists == 1 ? 0 : kv_head;
  const int at = list * rows.task.padded_queries + rows.first_query + query;
  return {kv_head,          row, query, (rows.first_kv_head + kv_head) * group + row % group, rows.task.visible[at],
          rows.task.own[at]};
}

__device__ __forceinline__ std::size_t row_number(const KeptRows& rows, const KeptRow& row) {
  return static_cast<std::size_t>(row.kv_head) * static_cast<std::size_t>(row_count(rows)) +
         static_cast<std::size_t>(row.row);
}
__device__ __forceinline__ const float* logits_of(const KeptRows& rows, const KeptRow& row) {
  return rows.logits + row_number(rows, row) * static_cast<std::size_t>(rows.task.key_count);
}
/// In units of log 2; -infinity: there is none.
__device__ __forceinline__ double sink_logit_of(const KeptRows& rows, const KeptRow& row) {
  const double* logits = rows.task.sink_logits;
  return logits == nullptr ? -HUGE_VAL : logits[row.query_head - rows.first_kv_head * rows.task.group];
}
__device__ __forceinline__ std::size_t moments_at(const KeptRows& rows, const KeptRow& row, int set) {
  return (static_cast<std::size_t>(set) * static_cast<std::size_t>(rows.query_heads) +
          static_cast<std::size_t>(row.query_head)) *
             static_cast<std::size_t>(rows.task.query_count) +
         static_cast<std::size_t>(rows.first_query + row.query);
}

/// Of 32 keys from `key` on, those of [begin, end) that a row sees and a set holds.
__device__ __forceinline__ unsigned held_word(const KeptRows& rows, const KeptRow& row, int set, int key, int begin,
                                              int end) {
  begin = max(begin, row.visible.x);
  end = min(end, row.visible.y);
  if (key >= end || key + 32 <= begin) return 0;
  const PlacedSet& placed = rows.placed[set * rows.queries + row.query];
  unsigned kept = 0;
  if (key < placed.tokens) {
    const int of_row = placed.heads == Heads::kv      ? rows.first_kv_head + row.kv_head
                       : placed.heads == Heads::query ? row.query_head
                                                      : 0;
    kept = rows.bits[placed.first_word + static_cast<std::size_t>(of_row) * static_cast<std::size_t>(placed.row_words) +
                     static_cast<std::size_t>(key / 32)];
  }
  return held_keys<unsigned>(kept, key, placed.tokens, row.own, begin, end);
}

/// 2^n for an integer n that is 0 or less.
__device__ __forceinline__ double whole_power_of_two(float n) {
  constexpr float lowest = -1100.0F;  // it is 0 from there on
  return ldexp(1.0, static_cast<int>(fmaxf(n, lowest)));
}

}  // namespace kvreplay
