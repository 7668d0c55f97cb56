#include "observables/vector_statistics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "cpu/combination_kernels.h"
#include "parallel.h"

namespace kvreplay {
namespace {

// Vectors of a piece: its sums are its own, and pieces are added in order.
constexpr int piece_vectors = 4096;
// Sums of pieces that are held at once.
constexpr int most_pieces = 64;
// Vectors that one pass over a matrix serves.
constexpr int lanes = 8;

std::size_t at(int i) { return static_cast<std::size_t>(i); }

/// work(head, begin, end) for all heads in [first_head, first_head + heads) and all pieces of `size` vectors.
template <class Work>
void in_pieces(const Vectors& vectors, int first_head, int heads, int size, int threads, const Work& work) {
  const int pieces = (vectors.count + size - 1) / size;
  all_side_by_side(threads, at(heads) * at(pieces), [&](std::size_t i) {
    const int begin = static_cast<int>(i % at(pieces)) * size;
    work(first_head + static_cast<int>(i / at(pieces)), begin, std::min(begin + size, vectors.count));
  });
}

/// [heads, width]: sums over pieces of what add(head, begin, end, sums of the piece) adds up.
template <class Add>
Matrix summed(const Vectors& vectors, int width, int threads, const Add& add) {
  Matrix sums(vectors.heads, width);
  const int pieces = (vectors.count + piece_vectors - 1) / piece_vectors;
  const int heads_at_once = std::max(1, most_pieces / std::max(1, pieces));
  for (int first = 0; first < vectors.heads; first += heads_at_once) {
    const int heads = std::min(heads_at_once, vectors.heads - first);
    std::vector<Matrix> parts(at(heads), Matrix(pieces, width));
    in_pieces(vectors, first, heads, piece_vectors, threads, [&](int head, int begin, int end) {
      add(head, begin, end, parts[at(head - first)].row(begin / piece_vectors));
    });
    for (int head = 0; head < heads; ++head)
      for (int piece = 0; piece < pieces; ++piece)
        for (int i = 0; i < width; ++i) sums(first + head, i) += parts[at(head)](piece, i);
  }
  return sums;
}

void divide(Matrix& sums, int count) {
  if (count > 0)
    for (double& sum : sums.values()) sum /= count;
}

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

double length(std::span<const double> x) { return std::sqrt(dot(x, x)); }

std::span<const double> row_or_none(const Matrix& matrix, int row) {
  return matrix.empty() ? std::span<const double>() : matrix.row(row);
}

/// Up to `lanes` vectors one after another, [lanes, d], less a centre; zeros beyond them.
void read_some(const Vectors& vectors, int head, int begin, int end, const Centre& centre, std::span<double> some) {
  const std::span<const double> origin = row_or_none(centre.origin, head), offset = row_or_none(centre.offset, head);
  std::ranges::fill(some, 0.0);
  for (int i = begin; i < end; ++i) {
    const std::span<double> one = some.subspan(at(i - begin) * at(vectors.dim), at(vectors.dim));
    vectors.read(head, i, one);
    for (std::size_t c = 0; c < origin.size(); ++c) one[c] = one[c] - origin[c] - offset[c];
  }
}

Centre centre_of(const Vectors& vectors, int threads) {
  Centre centre{.origin = Matrix(vectors.heads, vectors.dim), .offset = {}};
  for (int head = 0; head < vectors.heads && vectors.count > 0; ++head) vectors.read(head, 0, centre.origin.row(head));
  centre.offset = summed(vectors, vectors.dim, threads, [&](int head, int begin, int end, std::span<double> sums) {
    std::vector<double> vector(at(vectors.dim));
    for (int i = begin; i < end; ++i) {
      vectors.read(head, i, vector);
      for (std::size_t c = 0; c < vector.size(); ++c) sums[c] += vector[c] - centre.origin.row(head)[c];
    }
  });
  divide(centre.offset, vectors.count);
  return centre;
}

constexpr std::size_t product_rows = 4;  // of a matrix of products that are made at once

/// The upper triangle of Σ w x x' over some vectors with their weights, added to `sums` [d, d]. `products`: scratch
/// space, [product_rows, d].
void add_products(const CombinationKernels& kernels, const double* some, std::span<const double, lanes> weights,
                  std::size_t dim, std::span<double> products, std::span<double> sums) {
  constexpr std::size_t rows = product_rows;
  std::array<double, rows * lanes> factors;
  for (std::size_t first = 0; first < dim; first += rows) {
    const std::size_t end = std::min(first + rows, dim), column = first / lanes * lanes;  // whole vectors of columns
    for (std::size_t r = first; r < end; ++r)
      for (std::size_t lane = 0; lane < lanes; ++lane)
        factors[(r - first) * lanes + lane] = weights[lane] * some[lane * dim + r];
    kernels.lists_of_doubles(factors.data(), static_cast<int>(end - first), lanes, some + column,
                             static_cast<std::ptrdiff_t>(dim), static_cast<int>(dim - column), products.data(),
                             static_cast<std::ptrdiff_t>(dim));
    for (std::size_t r = first; r < end; ++r)
      for (std::size_t c = r; c < dim; ++c) sums[r * dim + c] += products[(r - first) * dim + c - column];
  }
}

// Vectors of which a quadratic form is evaluated at once.
constexpr int form_vectors = 64;

/// x' A x + <b, x> of vectors side by side, [d, form_vectors], by the upper triangle of A; b may be empty.
void evaluate(const CombinationKernels& kernels, std::span<const double> matrix, std::span<const double> linear,
              const double* sides, std::size_t dim, std::span<double, form_vectors> values) {
  std::ranges::fill(values, 0.0);
  for (std::size_t r = 0; r < dim; ++r) {
    std::array<double, form_vectors> row;
    kernels.doubles(matrix.data() + r * dim + r + 1, static_cast<int>(dim - r - 1), sides + (r + 1) * form_vectors,
                    form_vectors, form_vectors, row.data());
    for (std::size_t i = 0; i < form_vectors; ++i) {
      const double number = sides[r * form_vectors + i];
      values[i] += number * (matrix[r * dim + r] * number + 2 * row[i]);
      if (!linear.empty()) values[i] += linear[r] * number;
    }
  }
}

}  // namespace

Matrix product_sums(const Vectors& vectors, const Matrix& weights, const Centre& centre, int threads) {
  const std::size_t dim = at(vectors.dim);
  const CombinationKernels& kernels = combination_kernels();
  const auto add = [&](int head, int begin, int end, std::span<double> sums) {
    const std::span<const double> of_head = row_or_none(weights, head);
    std::vector<double> some(dim * lanes), products(dim * product_rows);
    std::array<double, lanes> of_some;
    of_some.fill(1.0);
    for (int i = begin; i < end; i += lanes) {
      const int count = std::min(lanes, end - i);
      read_some(vectors, head, i, i + count, centre, some);
      if (!of_head.empty()) std::ranges::copy(of_head.subspan(at(i), at(count)), of_some.begin());
      add_products(kernels, some.data(), of_some, dim, products, sums);
    }
  };
  Matrix sums = summed(vectors, vectors.dim * vectors.dim, threads, add);
  for (int head = 0; head < vectors.heads; ++head) {
    const std::span<double> square = sums.row(head);
    for (std::size_t r = 0; r < dim; ++r)
      for (std::size_t c = 0; c < r; ++c) square[r * dim + c] = square[c * dim + r];
  }
  return sums;
}

VectorMoments moments_of(const Vectors& vectors, int threads) {
  VectorMoments moments;
  moments.centre = centre_of(vectors, threads);
  moments.mean = moments.centre.origin;
  for (std::size_t i = 0; i < moments.mean.values().size(); ++i)
    moments.mean.values()[i] += moments.centre.offset.values()[i];
  moments.covariance = product_sums(vectors, {}, moments.centre, threads);
  divide(moments.covariance, vectors.count);
  return moments;
}

Matrix squared_lengths(const Vectors& vectors, int threads) {
  Matrix found(vectors.heads, vectors.count);
  in_pieces(vectors, 0, vectors.heads, piece_vectors, threads, [&](int head, int begin, int end) {
    std::vector<double> vector(at(vectors.dim));
    for (int i = begin; i < end; ++i) {
      vectors.read(head, i, vector);
      found(head, i) = dot(vector, vector);
    }
  });
  return found;
}

Matrix mean_direction(const Vectors& vectors, int threads) {
  Matrix mean = summed(vectors, vectors.dim, threads, [&](int head, int begin, int end, std::span<double> sums) {
    std::vector<double> vector(at(vectors.dim));
    for (int i = begin; i < end; ++i) {
      vectors.read(head, i, vector);
      const double norm = length(vector);
      if (norm == 0) continue;
      for (std::size_t c = 0; c < vector.size(); ++c) sums[c] += vector[c] / norm;
    }
  });
  divide(mean, vectors.count);
  return mean;
}

Matrix cosines(const Vectors& vectors, const Matrix& directions, int threads) {
  Matrix found(vectors.heads, vectors.count);
  in_pieces(vectors, 0, vectors.heads, piece_vectors, threads, [&](int head, int begin, int end) {
    const std::span<const double> direction = directions.row(head);
    const double of_direction = length(direction);
    std::vector<double> vector(at(vectors.dim));
    for (int i = begin; i < end; ++i) {
      vectors.read(head, i, vector);
      const double lengths = length(vector) * of_direction;
      if (lengths > 0) found(head, i) = dot(vector, direction) / lengths;
    }
  });
  return found;
}

Matrix values_of(const QuadraticForms& forms, const Vectors& vectors, int threads) {
  const CombinationKernels& kernels = combination_kernels();
  const int rows = forms.matrices.rows(), group = rows / vectors.heads;
  const std::size_t dim = at(vectors.dim);
  Matrix found(rows, vectors.count);
  in_pieces(vectors, 0, vectors.heads, piece_vectors, threads, [&](int head, int begin, int end) {
    std::vector<double> some(dim * lanes), sides(dim * form_vectors);
    std::array<double, form_vectors> values;
    for (int i = begin; i < end; i += form_vectors) {
      const int count = std::min(form_vectors, end - i);
      std::ranges::fill(sides, 0.0);
      for (int first = 0; first < count; first += lanes) {
        read_some(vectors, head, i + first, std::min(i + first + lanes, end), forms.centre, some);
        for (int lane = 0; lane < lanes; ++lane)
          for (std::size_t c = 0; c < dim; ++c) sides[c * form_vectors + at(first + lane)] = some[at(lane) * dim + c];
      }
      for (int row = head * group; row < (head + 1) * group; ++row) {
        evaluate(kernels, forms.matrices.row(row), row_or_none(forms.linear, row), sides.data(), dim, values);
        std::copy_n(values.begin(), count, found.row(row).begin() + i);
      }
    }
  });
  return found;
}

Matrix distances_from_mean(const Vectors& vectors, const Matrix& weights, int threads) {
  Matrix distances(weights.rows(), weights.columns());
  const int group = weights.rows() / vectors.heads;
  all_side_by_side(threads, at(weights.rows()), [&](std::size_t row) {
    const int r = static_cast<int>(row);
    std::vector<double> mean(at(vectors.dim)), vector(at(vectors.dim));
    for (int i = 0; i < vectors.count; ++i) {
      vectors.read(r / group, i, vector);
      for (std::size_t c = 0; c < mean.size(); ++c) mean[c] += weights(r, i) * vector[c];
    }
    for (int i = 0; i < vectors.count; ++i) {
      vectors.read(r / group, i, vector);
      for (std::size_t c = 0; c < mean.size(); ++c) vector[c] -= mean[c];
      distances(r, i) = length(vector);
    }
  });
  return distances;
}

Matrix lag_deviations(const Vectors& vectors, int first, int lag, int threads) {
  Matrix found(vectors.heads, vectors.count);
  const int partitions = std::max(0, vectors.count - first) / lag;
  if (partitions < 2 || vectors.dim < 2) return found;
  const Vectors scored{vectors.heads, (partitions - 1) * lag, vectors.dim};
  in_pieces(scored, 0, scored.heads, lag, threads, [&](int head, int begin, int end) {
    const std::size_t dim = at(vectors.dim);
    std::vector<double> vector(dim), least(dim, std::numeric_limits<double>::infinity());
    std::vector<double> most(dim, -std::numeric_limits<double>::infinity());
    for (int i = end; i < end + lag; ++i) {
      vectors.read(head, first + i, vector);
      for (std::size_t c = 0; c < dim; ++c) {
        least[c] = std::min(least[c], vector[c]);
        most[c] = std::max(most[c], vector[c]);
      }
    }
    for (int i = begin; i < end; ++i) {
      vectors.read(head, first + i, vector);
      double mean = 0, squares = 0;
      for (std::size_t c = 0; c < dim; ++c) {
        vector[c] = most[c] > least[c] ? (vector[c] - least[c]) / (most[c] - least[c]) : 0.0;
        mean += vector[c] / vectors.dim;
      }
      for (const double number : vector) squares += (number - mean) * (number - mean);
      found(head, first + i) = std::sqrt(squares / (vectors.dim - 1));
    }
  });
  return found;
}

}  // namespace kvreplay
