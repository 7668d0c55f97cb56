// From scores per query head to scores per row of the policy's granularity.
#pragma once

#include "attention/kept_set.h"
#include "matrix.h"
#include "parameters.h"

namespace kvreplay {

enum class Aggregate { mean, sum, max };

/// How a policy's rows are made: one for each KV head from its group of query heads (by `aggregate`), one for each
/// query head (untouched), or one for the layer (the sum over all query heads).
struct Grouping {
  Heads heads = Heads::kv;
  Aggregate aggregate = Aggregate::mean;

  void parameters(Parameters& p);
  /// [Hq, n] -> [H, n]; `group` query heads share a KV head.
  Matrix operator()(const Matrix& per_query_head, int group) const;
};

/// The sum over all rows: [1, n].
Matrix sum_over_rows(const Matrix& rows);

/// Declares `heads` alone, with the words that the policy offers.
void add_heads(Parameters& p, Heads& heads);

}  // namespace kvreplay
