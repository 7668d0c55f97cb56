#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "observables/cholesky.h"
#include "policies/plan_part.h"
#include "policies/policy.h"
#include "policies/scores/expected_attention.h"

namespace kvreplay {
namespace {

struct CapKv {
  static constexpr Card card{
      .name = "cap-kv",
      .summary =
          "Information capacity: leverage scores of the values, weighted by the cosine of the key with the mean future "
          "query",
      .paper = "CapKV, arXiv:2604.25975, as in kvpress (CapPress)",
      .score =
          "s[h,j] = w_j v_j' A^-1 v_j, group mean; A = I + sum over j of (w_j + epsilon) v_j v_j'; w_j = exp(tau c_j - "
          "max over j of tau c_j), c_j = cos(R mu, k_j), mu the mean query without RoPE, R the mean rotation to the "
          "next "
          "`future` positions",
      .family = Family::geometry,
      .other_names = "CapPress",
  };

  int sinks = 4;
  double tau = 5;
  int future = 512;
  double epsilon = 1e-6;
  Grouping grouping = {};

  void parameters(Parameters& p) {
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt},
          "attention sinks: first tokens, always kept; their queries, keys and values are left out");
    p.add("tau", tau, RealRange{0.0, 1e6}, "factor of the cosines in the exponent of the weights");
    p.add("future", future, IntRange{.least = 1}, "number of future positions to average over");
    p.add("epsilon", epsilon, RealRange{0.0, 1.0}, "number added to the weights in the matrix A");
    grouping.parameters(p);
  }

  /// [Hq, n]: w, 0 for the first `protected_sinks` tokens.
  Matrix weights(const LayerView& view, int protected_sinks) const {
    Matrix anchors = view.query_moments(sinks).mean;
    const MeanRotation turned = mean_future_rotation(view, future);
    for (int head = 0; head < anchors.rows(); ++head) turned.apply(anchors.row(head));
    const Vectors keys = view.keys();
    const auto read = [&](int head, int i, std::span<double> key) { keys.read(head / view.group(), i, key); };
    Matrix weights = cosines({view.query_heads(), keys.count, keys.dim, read}, anchors, view.backend().threads());
    for (int head = 0; head < weights.rows(); ++head) {
      const std::span<double> row = weights.row(head), scored = row.subspan(static_cast<std::size_t>(protected_sinks));
      std::ranges::fill(row.first(row.size() - scored.size()), 0.0);
      double most = -std::numeric_limits<double>::infinity();
      for (double& exponent : scored) most = std::max(most, exponent = tau * std::clamp(exponent, -1.0, 1.0));
      for (double& number : scored) number = std::exp(number - most);
    }
    return weights;
  }

  /// [Hq, n]: w_j v_j' A^-1 v_j.
  Matrix leverages(const LayerView& view, int protected_sinks) const {
    const Matrix of_keys = weights(view, protected_sinks);
    const Vectors values = view.stored_values();
    const auto read = [&](int head, int j, std::span<double> value) { values.read(head / view.group(), j, value); };
    Matrix summed = of_keys;
    for (int head = 0; head < summed.rows(); ++head)
      for (double& weight : summed.row(head).subspan(static_cast<std::size_t>(protected_sinks))) weight += epsilon;
    QuadraticForms forms{.matrices = product_sums({view.query_heads(), values.count, values.dim, read}, summed, {},
                                                  view.backend().threads())};
    view.on_threads(static_cast<std::size_t>(view.query_heads()), [&](std::size_t number) {
      const auto head = static_cast<int>(number);
      Matrix capacity(values.dim, values.dim);
      std::ranges::copy(forms.matrices.row(head), capacity.values().begin());
      for (int i = 0; i < values.dim; ++i) capacity(i, i) += 1;
      const std::optional<Matrix> inverse = inverse_of_positive(capacity);
      if (!inverse) throw Error{Refusal::input, "cap-kv", "the matrix of the values is singular", "smaller values"};
      std::ranges::copy(inverse->values(), forms.matrices.row(head).begin());
    });
    Matrix all = values_of(forms, values, view.backend().threads());
    for (std::size_t i = 0; i < all.values().size(); ++i) all.values()[i] *= of_keys.values()[i];
    return all;
  }

  /// Sinks have the largest score of their row.
  Matrix score(const LayerView& view, const Scoring& how) const {
    Matrix scores = how.grouping(view.in_this_layer([&] { return leverages(view, how.sinks); }), view.group());
    for (int row = 0; row < scores.rows(); ++row)
      std::ranges::fill(scores.row(row).first(static_cast<std::size_t>(how.sinks)), std::ranges::max(scores.row(row)));
    return scores;
  }

  Plan plan() const {
    return {
        .grouping = grouping,
        .score = {.score = [*this](const LayerView& view, const Scoring& how) { return score(view, how); },
                  .needs = {.all_queries = true, .rope = true},
                  .reads_sinks = true,
                  .name = name_with_values(card.name, *this)},
        .protect = {.sinks = sinks},
    };
  }
};

const Registered<CapKv> registered;

}  // namespace
}  // namespace kvreplay
