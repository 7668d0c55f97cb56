// What a part of a plan reads beside keys and values.
#pragma once

namespace kvreplay {

/// Which captured queries the observables read. A trace that lacks them is refused before the run.
struct Needs {
  int last_queries = 0;         // how many of the last ones of the prompt
  bool all_queries = false;     // all of the prompt
  bool future_queries = false;  // eval queries: the mark of an oracle
  bool recent_queries = false;  // those of the protected tokens at the end of the prompt
  bool question = false;        // those of the question that ends the prompt
  bool projection = false;      // no queries: the layers' output projections
  bool reconstruction = false;  // no queries of the prompt: those of the passes that repeat it
  // A file that it reads has one shape for all layers: by KV heads and dimensions, or by query heads.
  bool same_kv_shapes = false, same_query_heads = false;
  bool rope = false;  // the model's RoPE, because it un-rotates keys or queries
};

inline Needs last_queries(int window) { return {.last_queries = window}; }
inline Needs all_queries() { return {.all_queries = true}; }
inline Needs future_queries() { return {.future_queries = true}; }

}  // namespace kvreplay
