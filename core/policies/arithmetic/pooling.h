// One-dimensional pooling of scores over neighbouring tokens, stride 1, same length.
#pragma once

#include "policies/policy.h"

namespace kvreplay {

enum class Pool { none, max, average };

/// The columns of a row whose tokens compete.
struct Candidates {
  int first = 0;
  int count = 0;

  Candidates(int columns) : count(columns) {}
  Candidates(int first_column, int columns) : first(first_column), count(columns) {}
  template <class Number>
  std::span<Number> of(std::span<Number> row) const {
    return row.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
  }
};

/// Between protected sinks and recent tokens.
Candidates candidates_of(int tokens, const Scoring& how);

/// Pools the candidates of every row; other columns are left alone. `max` is taken over the neighbours that exist;
/// `average` divides their sum by `kernel` also at the ends, where fewer exist (SnapKV's code: zeros are counted).
Matrix pooled(Matrix scores, Pool pool, int kernel, Candidates candidates);

void add_pooling(Parameters& p, Pool& pool, int& kernel);

}  // namespace kvreplay
