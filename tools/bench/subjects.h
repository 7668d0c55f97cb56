// What is measured, subject by subject; each adds its cases.
#pragma once

#include <filesystem>

#include "benchmark_case.h"
#include "layer_data.h"

namespace kvreplay::bench {

void add_cumulative_attention(Cases& cases, const LayerSource& source);
/// Of the last `window` queries.
void add_window_attention(Cases& cases, const LayerSource& source, int window);
/// Of the last 32 queries over half of the tokens, drawn for each KV head.
void add_resident_attention(Cases& cases, const LayerSource& source);
/// 65 kept sets, 13 of each of five sizes, at the last 32 queries.
void add_kept_moments(Cases& cases, const LayerSource& source);
void add_similarity_row_maxima(Cases& cases, const LayerSource& source);
/// Half of the tokens stay, the last 128 of them unasked; beside it the greedy choice computed anew at every step.
void add_least_redundant(Cases& cases, const LayerSource& source);
/// Half of the tokens are held.
void add_online_eviction(Cases& cases, const LayerSource& source);
void add_key_norms(Cases& cases, const LayerSource& source);
/// Mapped numbers of a trace in the page cache, widened to float32 row by row.
void add_mapped_bytes(Cases& cases, DType dtype, int tokens);

}  // namespace kvreplay::bench
