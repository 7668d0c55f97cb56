#include "observables/cholesky.h"

#include <cmath>

namespace kvreplay {
namespace {

/// L, lower triangular.
std::optional<Matrix> factor(const Matrix& matrix) {
  const int dim = matrix.rows();
  Matrix lower(dim, dim);
  for (int j = 0; j < dim; ++j)
    for (int i = j; i < dim; ++i) {
      double rest = matrix(i, j);
      for (int k = 0; k < j; ++k) rest -= lower(i, k) * lower(j, k);
      if (i == j && !(rest > 0)) return std::nullopt;
      lower(i, j) = i == j ? std::sqrt(rest) : rest / lower(j, j);
    }
  return lower;
}

}  // namespace

std::optional<Matrix> inverse_of_positive(const Matrix& matrix) {
  const std::optional<Matrix> lower = factor(matrix);
  if (!lower) return std::nullopt;
  const int dim = matrix.rows();
  Matrix of_lower(dim, dim);
  for (int j = 0; j < dim; ++j)
    for (int i = j; i < dim; ++i) {
      double rest = i == j ? 1.0 : 0.0;
      for (int k = j; k < i; ++k) rest -= (*lower)(i, k) * of_lower(k, j);
      of_lower(i, j) = rest / (*lower)(i, i);
    }
  Matrix inverse(dim, dim);
  for (int k = 0; k < dim; ++k)
    for (int i = 0; i <= k; ++i)
      for (int j = 0; j <= k; ++j) inverse(i, j) += of_lower(k, i) * of_lower(k, j);
  return inverse;
}

}  // namespace kvreplay
