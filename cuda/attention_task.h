// What kernels of attention are told: queries, keys, and who sees whom.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "tensor.h"

namespace kvreplay {

/// Queries come in whole groups of so many; those that are missing have row -1 and see nothing.
inline constexpr int query_granule = 128;
/// The numbers of queries that a QueryRange speaks of.
inline constexpr int range_queries = 64;

/// What some queries see and are: keys [first, end) and the number of their own key, or -1.
struct QueryRange {
  int lowest_first = 0;
  int highest_first = 0;
  int lowest_end = 0;
  int highest_end = 0;
  int lowest_own = 0;  // of those that have one; above highest_own: none has
  int highest_own = -1;
};

/// Queries of some KV heads and the keys that they meet. Arrays are on the device. A row is a query of a query head;
/// those of a KV head are numbered query by query, head within head.
struct AttentionTask {
  const void* const* queries = nullptr;  // [kv_heads * group] matrices
  const void* const* keys = nullptr;     // [kv_heads] matrices, rows 0 ... key_count - 1
  int kv_heads = 0;
  int layer_kv_heads = 0;  // of the layer: work is cut in the same way however many heads come at once
  int group = 1;
  int query_count = 0;
  int padded_queries = 0;
  int key_count = 0;
  int lists = 1;                       // of what follows: one for all KV heads, or one for each
  const int* rows = nullptr;           // [padded_queries] row of the query in its matrices
  const int2* visible = nullptr;       // [lists, padded_queries] keys [first, end)
  const int* own = nullptr;            // [lists, padded_queries]
  const QueryRange* ranges = nullptr;  // [lists, padded_queries / range_queries]
  float scale = 1.0F;                  // logits in units of log 2 are scale * product,
  float cap = 0.0F;                    // or, above 0, cap * tanh(scale * product)
  /// [kv_heads * group] sink logits, in units of log 2; null: there are none.
  const double* sink_logits = nullptr;
};

/// Of a row: exponentials are 2^(logit - reference), an integer; its attention is `factor` times them.
struct RowState {
  float reference = 0.0F;
  float factor = 0.0F;
};

/// Of a row and some of its keys.
struct RowPartial {
  double sum = 0.0;
  float reference = 0.0F;
};

/// How 16-bit and 32-bit matrices of some depth are multiplied.
struct ProductForm {
  DType dtype = DType::float32;  // of queries and keys both
  int depth = 64;                // padded_depth
  bool warp_groups = false;      // the device has Hopper's products
};

/// states[heads, padded_queries] = attention of a row from its exponentials, times weights[query] (null: 1), or with
/// `above_uniform` over 0 in units of so many times 1 / (keys that the query sees). Counts in `bad` that some logit was
/// not a finite number. `partials` has room for row_partials().
std::size_t row_partials(const AttentionTask& task);
void find_row_states(const ProductForm& form, const AttentionTask& task, const double* weights, double above_uniform,
                     RowPartial* partials, RowState* states, int* bad, cudaStream_t stream);

/// sums[heads, columns] = attention of all queries, by key; `with_own`: that to a query's own key too; `counts`: how
/// many of them are above 1. `partials` has room for column_partials().
std::size_t column_partials(const AttentionTask& task, int columns);
void add_columns(const ProductForm& form, const AttentionTask& task, const RowState* states, bool with_own, bool counts,
                 int columns, double* partials, double* sums, cudaStream_t stream);

/// logits[row - first_row, stride], in units of log 2, of rows [first_row, first_row + rows) of each KV head, KV head
/// after KV head; -infinity where the query does not see the key. Counts in `bad` as above.
void write_logits(const ProductForm& form, const AttentionTask& task, int first_row, int rows, int stride,
                  float* logits, int* bad, cudaStream_t stream);

}  // namespace kvreplay
