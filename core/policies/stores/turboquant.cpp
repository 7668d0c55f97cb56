// TurboQuant (Zandieh et al. 2025, arXiv:2504.19874): rotated unit vectors in a Lloyd-Max codebook (docs/stores.md).
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "matrix.h"
#include "policies/stores/number_format.h"
#include "random.h"

namespace kvreplay {
namespace {

using Vector = std::vector<double>;

double product(std::span<const double> x, std::span<const double> y) {
  return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
}

/// [dim, dim] independent numbers; `number` distinguishes matrices of one seed.
Matrix gaussian_matrix(std::uint64_t seed, int number, int dim) {
  Matrix matrix(dim, dim);
  for (int row = 0; row < dim; ++row)
    for (int column = 0; column < dim; ++column)
      matrix(row, column) = gaussian(chain(seed, number, row, column, 0), chain(seed, number, row, column, 1));
  return matrix;
}

Matrix transposed(const Matrix& matrix) {
  Matrix result(matrix.columns(), matrix.rows());
  for (int row = 0; row < matrix.rows(); ++row)
    for (int column = 0; column < matrix.columns(); ++column) result(column, row) = matrix(row, column);
  return result;
}

/// The orthogonal factor of the QR decomposition, by modified Gram-Schmidt over the columns.
Matrix orthogonal_factor(const Matrix& matrix) {
  Matrix columns = transposed(matrix);
  for (int i = 0; i < columns.rows(); ++i) {
    const std::span<double> column = columns.row(i);
    for (int before = 0; before < i; ++before) {
      const double along = product(columns.row(before), column);
      for (std::size_t c = 0; c < column.size(); ++c) column[c] -= along * columns.row(before)[c];
    }
    const double length = std::sqrt(product(column, column));
    for (double& x : column) x /= length;
  }
  return transposed(columns);
}

/// Blocks H(i, j) = (-1)^popcount(i & j) / sqrt(n) on the diagonal, n the largest power of two that divides `dim`.
Matrix hadamard_matrix(int dim) {
  const int block = 1 << std::countr_zero(static_cast<unsigned>(dim));
  Matrix matrix(dim, dim);
  for (int row = 0; row < dim; ++row)
    for (int column = row / block * block; column < (row / block + 1) * block; ++column) {
      const int common_bits = std::popcount(static_cast<unsigned>(row % block & column % block));
      matrix(row, column) = (common_bits % 2 == 0 ? 1 : -1) / std::sqrt(block);
    }
  return matrix;
}

Vector times(const Matrix& matrix, std::span<const double> x) {
  Vector result;
  for (int row = 0; row < matrix.rows(); ++row) result.push_back(product(matrix.row(row), x));
  return result;
}

/// Integral of cos^power from 0 to `angle`, by the recurrence of integration by parts.
double cosine_integral(int power, double angle) {
  double integral = power % 2 == 0 ? angle : std::sin(angle);
  for (int n = power % 2 + 2; n <= power; n += 2)
    integral = (std::pow(std::cos(angle), n - 1) * std::sin(angle) + (n - 1) * integral) / n;
  return integral;
}

/// Antiderivatives of a density f(u), up to one factor, and of u f.
struct Integrals {
  std::function<double(double)> mass, moment;
  double least = -std::numeric_limits<double>::infinity(), most = std::numeric_limits<double>::infinity();
};

/// f(u) = (1 - u^2)^((d - 3) / 2) on [-1, 1]: the density of a coordinate of a random unit vector. With u = sin(t), the
/// integral of f is that of cos^(d - 2) t, and the integral of u f is -cos^(d - 1) t / (d - 1).
Integrals of_unit_vector(int dim) {
  return {.mass = [dim](double u) { return cosine_integral(dim - 2, std::asin(u)); },
          .moment = [dim](double u) { return -std::pow(1 - u * u, (dim - 1) / 2.0) / (dim - 1); },
          .least = -1,
          .most = 1};
}

/// The normal distribution of variance 1/d.
Integrals of_normal(int dim) {
  const double deviation = 1 / std::sqrt(dim);
  return {.mass = [deviation](double u) { return std::erfc(-u / deviation / std::numbers::sqrt2) / 2; },
          .moment =
              [deviation](double u) {
                return -deviation * std::exp(-u * u / (2 * deviation * deviation)) / std::sqrt(2 * std::numbers::pi);
              }};
}

/// Centroids of the Lloyd-Max quantiser of a density.
Vector lloyd_max_centroids(int levels, int dim, const Integrals& below) {
  constexpr double enough = 1e-12;
  constexpr int most_rounds = 100'000;
  const double width = std::min(1.0, 3.5 / std::sqrt(dim));
  Vector centroids;
  for (int i = 0; i < levels; ++i) centroids.push_back(width * (2.0 * (i + 0.5) / levels - 1));
  double change = 1;
  for (int round = 0; round < most_rounds && change >= enough; ++round) {
    change = 0;
    double mass_below = below.mass(below.least), moment_below = 0;
    for (std::size_t i = 0; i < centroids.size(); ++i) {
      const bool is_last = i + 1 == centroids.size();
      const double edge = is_last ? below.most : (centroids[i] + centroids[i + 1]) / 2;
      const double mass = below.mass(edge), moment = below.moment(edge);
      const double centroid = (moment - moment_below) / (mass - mass_below);
      change = std::max(change, std::abs(centroid - centroids[i]));
      centroids[i] = centroid;
      mass_below = mass;
      moment_below = moment;
    }
  }
  return centroids;
}

/// The nearest centroid, the upper one of two.
double nearest_centroid(const Vector& centroids, const Vector& midpoints, double x) {
  return centroids[static_cast<std::size_t>(std::ranges::upper_bound(midpoints, x) - midpoints.begin())];
}

struct Turboquant {
  enum class Form { mse, product, hadamard };
  static constexpr Choice<Form> words[] = {
      {"mse", Form::mse}, {"product", Form::product}, {"hadamard", Form::hadamard}};

  int bits = 3;
  Form form = Form::mse;
  std::uint64_t seed = 0;

  void parameters(Parameters& p) {
    p.add("bits", bits, IntRange{.least = 1, .most = 4}, "bits per quantised number");
    p.add<Form>("form", form, words,
                "mse: least squared error; product: one bit of each number for an unbiased inner product with queries; "
                "hadamard: keys of vLLM's TurboQuant, with a Hadamard rotation and decoded directions of length 1");
    p.add_seed("seed", seed, "random seed of the rotation");
  }
  NumberFormat format() const {
    const int norms = form == Form::product ? 2 : 1;
    return {.bytes = [of_number = bits, norms](int dim) { return std::ceil(dim * of_number / 8.0) + 2.0 * norms; },
            .coder = [part = *this](int dim) { return part.coder(dim); }};
  }
  Coder coder(int dim) const;
};

/// A coder's matrices and codebook for one head dimension.
struct Setup {
  Matrix rotation, rotation_back, signs, signs_back;  // the last two of the product form only
  Vector centroids, midpoints;
  bool keeps_length;  // decoded directions have the length 1

  Setup(const Turboquant& part, int dim)
      : rotation(part.form == Turboquant::Form::hadamard ? hadamard_matrix(dim)
                                                         : orthogonal_factor(gaussian_matrix(part.seed, 0, dim))),
        rotation_back(transposed(rotation)),
        keeps_length(part.form == Turboquant::Form::hadamard) {
    int code_bits = part.bits;
    if (part.form == Turboquant::Form::product) {
      --code_bits;
      signs = gaussian_matrix(part.seed, 1, dim);
      signs_back = transposed(signs);
    }
    centroids = lloyd_max_centroids(1 << code_bits, dim, keeps_length ? of_normal(dim) : of_unit_vector(dim));
    for (std::size_t i = 0; i + 1 < centroids.size(); ++i) midpoints.push_back((centroids[i] + centroids[i + 1]) / 2);
  }

  void code(std::span<float> vector) const {
    Vector unit(vector.begin(), vector.end());
    const double length = std::sqrt(product(unit, unit));
    if (length == 0) return;
    for (double& x : unit) x /= length;
    Vector codes = times(rotation, unit);
    for (double& x : codes) x = nearest_centroid(centroids, midpoints, x);
    if (keeps_length)
      for (const double length_of_codes = std::sqrt(product(codes, codes)); double& x : codes) x /= length_of_codes;
    Vector decoded = times(rotation_back, codes);
    if (!signs.empty()) add_residual(unit, decoded);
    const double stored_length = rounded_to_float16(static_cast<float>(length));
    for (std::size_t i = 0; i < vector.size(); ++i) vector[i] = static_cast<float>(stored_length * decoded[i]);
  }

 private:
  /// Adds sqrt(pi / 2) / d |r| S^T sign(S r), r the residual of the decoded unit vector.
  void add_residual(const Vector& unit, Vector& decoded) const {
    Vector residual(unit.size());
    std::ranges::transform(unit, decoded, residual.begin(), std::minus<>());
    const double length = rounded_to_float16(static_cast<float>(std::sqrt(product(residual, residual))));
    Vector codes = times(signs, residual);
    for (double& x : codes) x = x >= 0 ? 1 : -1;
    const Vector correction = times(signs_back, codes);
    const double scale = std::sqrt(std::numbers::pi / 2) / static_cast<double>(unit.size()) * length;
    for (std::size_t i = 0; i < decoded.size(); ++i) decoded[i] += scale * correction[i];
  }
};

Coder Turboquant::coder(int dim) const {
  return [setup = std::make_shared<const Setup>(*this, dim)](std::span<float> vector, float) { setup->code(vector); };
}

const RegisteredFormat<Turboquant> turboquant{
    "turboquant", "randomly rotated vectors in a Lloyd-Max codebook, with their norms (TurboQuant)"};

}  // namespace
}  // namespace kvreplay
