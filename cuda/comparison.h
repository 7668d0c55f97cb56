// What kernels of the general comparison are told. Everything is float64, and nothing is shared with the kernels that
// it is held against.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "attention/backend.h"
#include "tensor.h"

namespace kvreplay {

/// Vectors of some heads on the device, in the type in which they are stored.
struct StoredVectors {
  const void* const* heads = nullptr;  // matrices [tokens, depth]
  DType dtype = DType::float32;
  int depth = 0;  // from dim on: zeros
  int dim = 0;
};

/// A query's row in its matrices; it sees keys [first, end), `own` among them.
struct ComparedQuery {
  int row = 0;
  int first = 0;
  int end = 0;
  int own = 0;
};

/// Which keys each query holds, as bits: one set for all queries or one for each.
struct ResidentKeys {
  const std::uint64_t* bits = nullptr;  // [sets, rows, words]
  const int* before = nullptr;          // [sets, rows, words] resident keys before each word
  int sets = 1;
  int rows = 1;
  int words = 0;
  int heads_a_row = 1;  // query heads that read one row
};

/// Some queries of some KV heads. Arrays are on the device. A row is a query of a query head; those of a KV head are
/// numbered query by query, head within head.
struct ComparisonTask {
  StoredVectors queries = {};                          // [kv_heads * group] matrices
  StoredVectors keys = {}, values = {};                // [kv_heads]
  StoredVectors stored_keys = {}, stored_values = {};  // [kv_heads]
  int kv_heads = 0;
  int group = 1;
  int first_head = 0;                     // the layer's number of the first query head
  const ComparedQuery* places = nullptr;  // [query_count]
  int query_count = 0;
  int first_key = 0;  // no query sees a key outside [first_key, end_key)
  int end_key = 0;
  int boundary = 0;
  ResidentKeys resident = {};
  bool moves = false;                   // keys and queries to their slots, by RoPE
  const double* frequencies = nullptr;  // [pairs]
  int pairs = 0;
  bool interleaved = false;
  int offset = 0;  // of the first component of a pair
  double scale = 1.0;
  double cap = 0.0;                     // 0: none
  const double* sink_logits = nullptr;  // [kv_heads * group] in units of log 2; null: there are none
  const double* log_weights = nullptr;  // [kv_heads, rows, width] of stored keys; null: 0

  __host__ __device__ int rows() const { return query_count * group; }
  __host__ __device__ int width() const { return end_key - first_key; }
};

/// Numbers in each of the two panels, one for the full attention, one for that of what was stored.
std::size_t comparison_panel(const ComparisonTask& task);
/// Numbers of sums for the outputs.
std::size_t comparison_outputs(const ComparisonTask& task);

/// results[kv_heads * group, query_count]; `vectors`, where it is not null, [2, kv_heads * group, query_count, dim]: o
/// and õ − o.
void compare(const ComparisonTask& task, double* full, double* stored, double* outputs, Comparison* results,
             float* vectors, cudaStream_t stream);

}  // namespace kvreplay
