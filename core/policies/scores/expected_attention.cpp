#include "policies/scores/expected_attention.h"

#include <algorithm>
#include <span>
#include <vector>

#include "observables/softmax.h"
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

struct ExpectedPart : ExpectedAttention {
  static constexpr PartKind kind = PartKind::score;
  static constexpr const char* name = "expected";
  static constexpr const char* summary = "expected attention of future queries";

  void fill(Plan& plan) const { plan.score = expected_attention_score(*this); }
};

const RegisteredPart<ExpectedPart> registered;

/// scale R mu and scale^2 / 2 R Sigma R', [Hq, ...].
QuadraticForms expected_logits(const ExpectedAttention& values, const VectorMoments& queries, const LayerView& view) {
  const LayerTensors& tensors = view.tensors();
  const MeanRotation turned = mean_future_rotation(view, values.future);
  const double scale = tensors.softmax_scale * tensors.rope.attention_scaling;

  QuadraticForms logits{.matrices = Matrix(queries.covariance.rows(), queries.covariance.columns()),
                        .linear = queries.mean};
  const auto dim = static_cast<std::size_t>(queries.mean.columns());
  std::vector<double> column(dim);
  for (int head = 0; head < queries.mean.rows(); ++head) {
    turned.apply(logits.linear.row(head));
    for (double& number : logits.linear.row(head)) number *= scale;
    if (!values.covariance) continue;
    const std::span<double> matrix = logits.matrices.row(head);
    std::ranges::copy(queries.covariance.row(head), matrix.begin());
    for (std::size_t r = 0; r < dim; ++r) turned.apply(matrix.subspan(r * dim, dim));
    for (std::size_t c = 0; c < dim; ++c) {
      for (std::size_t r = 0; r < dim; ++r) column[r] = matrix[r * dim + c];
      turned.apply(column);
      for (std::size_t r = 0; r < dim; ++r) matrix[r * dim + c] = scale * scale / 2 * column[r];
    }
  }
  return logits;
}

/// [Hq, n]
const Matrix& logits_of_keys(const ExpectedAttention& values, const LayerView& view) {
  const LayerView::Arguments arguments{static_cast<double>(values.sinks), static_cast<double>(values.future),
                                       values.covariance ? 1.0 : 0.0};
  const VectorMoments& queries = view.query_moments(values.sinks);
  return view.remember("expected_logits", arguments, [&] {
    return values_of(expected_logits(values, queries, view), view.keys(), view.backend().threads());
  });
}

Matrix scores(const ExpectedAttention& values, const LayerView& view, const Scoring& how) {
  Matrix expected = logits_of_keys(values, view);
  const auto sinks = static_cast<std::size_t>(how.sinks);
  for (int head = 0; head < expected.rows(); ++head) {
    to_softmax(expected.row(head).subspan(sinks));
    for (int j = 0; values.vnorm && j < expected.columns(); ++j)
      expected(head, j) = (expected(head, j) + values.epsilon) * view.value_norms(2.0)(head / view.group(), j);
  }
  Matrix grouped = how.grouping(expected, view.group());
  for (int row = 0; row < grouped.rows(); ++row) {
    const std::span<double> all = grouped.row(row), scored = all.subspan(sinks);
    std::ranges::fill(all.first(sinks), scored.empty() ? 0.0 : std::ranges::max(scored));
  }
  return grouped;
}

}  // namespace

void ExpectedAttention::parameters(Parameters& p) {
  p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt},
        "attention sinks: first tokens, always kept; their queries are left out of the statistics");
  const auto read = p.of_part("score");
  p.add("future", future, IntRange{.least = 1}, "number of future positions to average over");
  p.add("epsilon", epsilon, RealRange{0.0, 1.0},
        "number added to the expected attention before it is multiplied by the value norm");
  p.add("covariance", covariance, "uses the covariance of the queries as well as their mean");
  p.add("vnorm", vnorm, "multiplies the expected attention by the L2 norm of the value");
}

Scorer expected_attention_score(const ExpectedAttention& values) {
  const auto score = [values](const LayerView& view, const Scoring& how) { return scores(values, view, how); };
  return {.score = score,
          .needs = {.all_queries = true, .rope = true},
          .reads_sinks = true,
          .name = name_with_values("expected-attention", values)};
}

MeanRotation mean_future_rotation(const LayerView& view, int future) {
  const int next = view.residents().place == Positions::cache ? view.tokens() : view.residents().seen;
  return {view.tensors().rope, next, future};
}

}  // namespace kvreplay
