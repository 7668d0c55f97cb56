// Queries that read single tokens of the prompt, selected by a score of each query and token.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "policies/policy.h"

namespace kvreplay {

/// Scores of the tokens of a layer, made once for the layer.
struct TokenIndex {
  /// [Hq, end - first]: scores of the tokens first <= j < end for the query at a position.
  std::function<Matrix(int query, int first, int end)> scores = {};
  double bytes = 0;  // of the index, which is stored beside keys and values
};

using MakeTokenIndex = std::function<TokenIndex(const LayerView&)>;

/// Which of the tokens a query head reads, ascending, by their scores.
using ReadTokens = std::function<std::vector<std::int32_t>(std::span<const double> scores)>;

/// The weights of the tokens of a layer that are selected by scores, made once for the layer; `first` and the tokens
/// behind it are some of these, without the query's own.
using MakeTokenWeights = std::function<LogWeights(const LayerView&)>;

/// The visible tokens of the prompt that are read without regard to scores: the first `sinks` tokens, and the last
/// `local` tokens up to the query. A query reads
///   sinks' = min(sinks, B) of the first, local' = min(local, B - sinks') of the last,
/// and selects among the visible tokens of the prompt between them that are not before `first_ranked`.
struct TokenReads {
  int sinks = 0;
  int local = 0;
  int first_ranked = 0;

  void parameters(Parameters& p);
  /// Selects the best B - sinks' - local' tokens, of equal scores the earlier one.
  SchedulePtr best_of(MakeTokenIndex index) const;
  /// Selects by `read`, and ignores the budget. Without `weights` each token has the weight 1; sinks, local tokens, the
  /// query's own and those after the prompt always have it.
  SchedulePtr selected_by(MakeTokenIndex index, ReadTokens read, MakeTokenWeights weights = {}) const;
};

}  // namespace kvreplay
