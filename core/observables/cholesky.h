// Inverses of small symmetric matrices.
#pragma once

#include <optional>

#include "matrix.h"

namespace kvreplay {

/// A^-1 = L^-T L^-1 with A = L L^T (Cholesky) of a symmetric positive definite matrix; none where it is not. O(d^3).
std::optional<Matrix> inverse_of_positive(const Matrix& matrix);

}  // namespace kvreplay
