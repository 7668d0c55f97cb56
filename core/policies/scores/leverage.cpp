#include "policies/scores/leverage.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "observables/cholesky.h"
#include "random.h"

namespace kvreplay {
namespace {

/// [d, columns].
Matrix random_combinations(const Leverage& leverage, int layer, int head, int dim) {
  Matrix phi(dim, leverage.sketch);
  for (int channel = 0; channel < dim; ++channel)
    for (int column = 0; column < leverage.sketch; ++column)
      phi(channel, column) = gaussian(chain(leverage.seed, layer, head, channel, column, 0),
                                      chain(leverage.seed, layer, head, channel, column, 1)) /
                             std::sqrt(leverage.sketch);
  return phi;
}

/// [rows of a, columns of b].
Matrix product(const Matrix& a, const Matrix& b) {
  Matrix c(a.rows(), b.columns());
  for (int i = 0; i < a.rows(); ++i)
    for (int k = 0; k < a.columns(); ++k)
      for (int j = 0; j < b.columns(); ++j) c(i, j) += a(i, k) * b(k, j);
  return c;
}

Matrix transposed(const Matrix& a) {
  Matrix b(a.columns(), a.rows());
  for (int i = 0; i < a.rows(); ++i)
    for (int j = 0; j < a.columns(); ++j) b(j, i) = a(i, j);
  return b;
}

/// (X'X + ridge I)^-1 from `products` = X'X.
Matrix inverse_of(Matrix products, double ridge, int layer) {
  for (int i = 0; i < products.rows(); ++i) products(i, i) += ridge;
  std::optional<Matrix> inverse = inverse_of_positive(products);
  if (!inverse)
    throw Error{Refusal::input, "layer " + std::to_string(layer), "the key covariance is singular", "a larger ridge",
                std::to_string(ridge)};
  return *std::move(inverse);
}

/// Whose values of keys are their leverages.
QuadraticForms leverage_forms(const Leverage& leverage, const LayerView& view) {
  const VectorMoments& keys = view.key_moments();
  const int dim = keys.mean.columns();
  QuadraticForms forms{.matrices = Matrix(view.kv_heads(), dim * dim), .centre = keys.centre};
  for (int head = 0; head < view.kv_heads(); ++head) {
    Matrix products(dim, dim);
    for (int i = 0; i < dim * dim; ++i)
      products.values()[static_cast<std::size_t>(i)] = keys.covariance(head, i) * view.tokens();
    Matrix inverse;
    if (leverage.sketch == 0) {
      inverse = inverse_of(std::move(products), leverage.ridge, view.stored_layer());
    } else {
      const Matrix phi = random_combinations(leverage, view.stored_layer(), head, dim);
      const Matrix of_combinations = product(transposed(phi), product(products, phi));
      inverse =
          product(phi, product(inverse_of(of_combinations, leverage.ridge, view.stored_layer()), transposed(phi)));
    }
    std::ranges::copy(inverse.values(), forms.matrices.row(head).begin());
  }
  return forms;
}

}  // namespace

Matrix z_scores(Matrix scores) {
  const auto [least, most] = std::ranges::minmax(scores.values());
  if (least == most) return Matrix(scores.rows(), scores.columns());
  const double count = static_cast<double>(scores.values().size());
  double mean = 0, squares = 0;
  for (const double score : scores.values()) mean += score / count;
  for (const double score : scores.values()) squares += (score - mean) * (score - mean);
  const double deviation = std::sqrt(squares / count);
  for (double& score : scores.values()) score = (score - mean) / deviation;
  return scores;
}

void Leverage::parameters(Parameters& p) {
  p.add("sketch", sketch, IntRange{.least = 0, .most = 4096},
        "number of random combinations of channels (sketch); 0: uses the channels themselves");
  p.add_seed("seed", seed, "random seed of the sketch");
}

const Matrix& Leverage::operator()(const LayerView& view) const {
  const LayerView::Arguments arguments{static_cast<double>(sketch), static_cast<double>(seed >> 32),
                                       static_cast<double>(seed & 0xFFFFFFFFU), ridge};
  const QuadraticForms forms = leverage_forms(*this, view);
  return view.remember("leverage", arguments,
                       [&] { return z_scores(values_of(forms, view.unrotated_keys(), view.backend().threads())); });
}

}  // namespace kvreplay
