#include "cpu/combination_kernels.h"

#include <algorithm>
#include <cmath>

#include "cpu/simd_level.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/combination_kernels.cpp"
#include <hwy/foreach_target.h>
// Highway's order: its own headers come after foreach_target.h, in every pass over this file.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace kvreplay {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

/// a + weight x: the product and the sum are rounded one after the other.
struct Product {
  static auto add(auto a, auto weight, auto x) { return hn::Add(a, hn::Mul(weight, x)); }
  static auto add_number(auto a, auto weight, auto x) { return a + weight * x; }
};

template <class Number>
void combine(const Number* weights, int count, const Number* rows, std::ptrdiff_t stride, int n, Number* out) {
  const hn::ScalableTag<Number> tag;
  const int lanes = static_cast<int>(hn::Lanes(tag));
  int i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {  // four sums: each waits for the one before
    auto a = hn::Zero(tag), b = a, c = a, d = a;
    for (int row = 0; row < count; ++row) {
      const auto weight = hn::Set(tag, weights[row]);
      const Number* p = rows + row * stride + i;
      a = Product::add(a, weight, hn::LoadU(tag, p));
      b = Product::add(b, weight, hn::LoadU(tag, p + lanes));
      c = Product::add(c, weight, hn::LoadU(tag, p + 2 * lanes));
      d = Product::add(d, weight, hn::LoadU(tag, p + 3 * lanes));
    }
    hn::StoreU(a, tag, out + i);
    hn::StoreU(b, tag, out + i + lanes);
    hn::StoreU(c, tag, out + i + 2 * lanes);
    hn::StoreU(d, tag, out + i + 3 * lanes);
  }
  for (; i < n; ++i) {
    Number sum = 0;
    for (int row = 0; row < count; ++row) sum = Product::add_number(sum, weights[row], rows[row * stride + i]);
    out[i] = sum;
  }
}

int nearest_column(const double* vector, int count, const double* rows, std::ptrdiff_t stride, int n) {
  const hn::ScalableTag<double> tag;
  constexpr int lanes = static_cast<int>(hn::MaxLanes(tag)), vectors = 4;  // four sums: each waits for the one before
  auto least = hn::Set(tag, HUGE_VAL), where = hn::Zero(tag), number = hn::Iota(tag, 0);
  int i = 0;
  for (; i + vectors * lanes <= n; i += vectors * lanes) {
    hn::Vec<decltype(tag)> sums[vectors];
    for (auto& sum : sums) sum = hn::Zero(tag);
    for (int row = 0; row < count; ++row) {
      const auto component = hn::Set(tag, vector[row]);
      for (int v = 0; v < vectors; ++v) {
        const auto difference = hn::Sub(component, hn::LoadU(tag, rows + row * stride + i + v * lanes));
        sums[v] = hn::Add(sums[v], hn::Mul(difference, difference));
      }
    }
    for (const auto& sum : sums) {
      const auto nearer = hn::Lt(sum, least);
      least = hn::IfThenElse(nearer, sum, least);
      where = hn::IfThenElse(nearer, number, where);
      number = hn::Add(number, hn::Set(tag, static_cast<double>(lanes)));
    }
  }
  HWY_ALIGN double distances[lanes], columns[lanes];
  hn::Store(least, tag, distances);
  hn::Store(where, tag, columns);
  int best = 0;
  for (int lane = 1; lane < lanes; ++lane)
    if (distances[lane] < distances[best] || (distances[lane] == distances[best] && columns[lane] < columns[best]))
      best = lane;
  double distance = distances[best], column = columns[best];
  for (; i < n; ++i) {
    double sum = 0;
    for (int row = 0; row < count; ++row) {
      const double difference = vector[row] - rows[row * stride + i];
      sum += difference * difference;
    }
    if (sum < distance) {
      distance = sum;
      column = i;
    }
  }
  return static_cast<int>(column);
}

/// Products of `a` with each of `Rows` neighbouring rows.
template <int Rows>
void products_of_rows(const double* a, const double* rows, int n, double* out) {
  constexpr int sums = 8;
  const hn::CappedTag<double, sums> tag;
  constexpr int lanes = static_cast<int>(hn::MaxLanes(tag)), vectors = sums / lanes;
  hn::Vec<decltype(tag)> side_by_side[Rows][vectors];
  for (auto& of_row : side_by_side)
    for (auto& vector : of_row) vector = hn::Zero(tag);
  int c = 0;
  for (; c + sums <= n; c += sums)
    for (int v = 0; v < vectors; ++v) {
      const auto weights = hn::LoadU(tag, a + c + v * lanes);
      for (int row = 0; row < Rows; ++row)
        side_by_side[row][v] =
            Product::add(side_by_side[row][v], weights, hn::LoadU(tag, rows + row * n + c + v * lanes));
    }
  HWY_ALIGN double of_each[Rows][sums];
  for (int row = 0; row < Rows; ++row)
    for (int v = 0; v < vectors; ++v) hn::Store(side_by_side[row][v], tag, of_each[row] + v * lanes);
  for (int each = 0; c < n; ++c, ++each)
    for (int row = 0; row < Rows; ++row) of_each[row][each] += a[c] * rows[row * n + c];
  std::fill_n(out, Rows, 0.0);
  for (int each = 0; each < sums; ++each)
    for (int row = 0; row < Rows; ++row) out[row] += of_each[row][each];
}

void inner_products(const double* a, const double* rows, int count, int n, double* out) {
  constexpr int at_once = 4;  // each sum waits for the one before
  int row = 0;
  for (; row + at_once <= count; row += at_once)
    products_of_rows<at_once>(a, rows + static_cast<std::ptrdiff_t>(row) * n, n, out + row);
  for (; row < count; ++row) products_of_rows<1>(a, rows + static_cast<std::ptrdiff_t>(row) * n, n, out + row);
}

void add_to_each(double weight, const double* row, int n, double* const* sums, int count) {
  const hn::ScalableTag<double> tag;
  const int lanes = static_cast<int>(hn::Lanes(tag));
  for (int s = 0; s < count; ++s) {
    double* const sum = sums[s];
    int i = 0;
    for (; i + lanes <= n; i += lanes)
      hn::StoreU(Product::add(hn::LoadU(tag, sum + i), hn::Set(tag, weight), hn::LoadU(tag, row + i)), tag, sum + i);
    for (; i < n; ++i) sum[i] = Product::add_number(sum[i], weight, row[i]);
  }
}

/// Of `Vectors` neighbouring vectors of columns.
template <int Lists, int Vectors>
void combine_columns(const double* weights, int count, const double* rows, std::ptrdiff_t stride, double* out,
                     std::ptrdiff_t out_stride) {
  const hn::ScalableTag<double> tag;
  const int lanes = static_cast<int>(hn::Lanes(tag));
  hn::Vec<decltype(tag)> sums[Lists][Vectors], columns[Vectors];
  for (auto& of_list : sums)
    for (auto& sum : of_list) sum = hn::Zero(tag);
  for (int row = 0; row < count; ++row) {
    for (int v = 0; v < Vectors; ++v) columns[v] = hn::LoadU(tag, rows + row * stride + v * lanes);
    for (int list = 0; list < Lists; ++list) {
      const auto weight = hn::Set(tag, weights[list * count + row]);
      for (int v = 0; v < Vectors; ++v) sums[list][v] = Product::add(sums[list][v], weight, columns[v]);
    }
  }
  for (int list = 0; list < Lists; ++list)
    for (int v = 0; v < Vectors; ++v) hn::StoreU(sums[list][v], tag, out + list * out_stride + v * lanes);
}

template <int Lists>
void combine_lists(const double* weights, int count, const double* rows, std::ptrdiff_t stride, int n, double* out,
                   std::ptrdiff_t out_stride) {
  const hn::ScalableTag<double> tag;
  const int lanes = static_cast<int>(hn::Lanes(tag));
  int i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes)
    combine_columns<Lists, 2>(weights, count, rows + i, stride, out + i, out_stride);
  for (; i + lanes <= n; i += lanes) combine_columns<Lists, 1>(weights, count, rows + i, stride, out + i, out_stride);
  if (i == n) return;
  HWY_ALIGN double rest[hn::MaxLanes(tag)] = {};
  hn::Vec<decltype(tag)> sums[Lists];
  for (auto& sum : sums) sum = hn::Zero(tag);
  for (int row = 0; row < count; ++row) {
    std::copy_n(rows + row * stride + i, n - i, rest);
    for (int list = 0; list < Lists; ++list)
      sums[list] = Product::add(sums[list], hn::Set(tag, weights[list * count + row]), hn::Load(tag, rest));
  }
  for (int list = 0; list < Lists; ++list) {
    hn::Store(sums[list], tag, rest);
    std::copy_n(rest, n - i, out + list * out_stride + i);
  }
}

void combine_all_lists(const double* weights, int lists, int count, const double* rows, std::ptrdiff_t stride, int n,
                       double* out, std::ptrdiff_t out_stride) {
  for (; lists >= 4; lists -= 4, weights += 4 * count, out += 4 * out_stride)
    combine_lists<4>(weights, count, rows, stride, n, out, out_stride);
  for (; lists > 0; --lists, weights += count, out += out_stride)
    combine_lists<1>(weights, count, rows, stride, n, out, out_stride);
}

}  // namespace

const CombinationKernels& combination_table() {
  static const CombinationKernels table{.doubles = combine<double>,
                                        .lists_of_doubles = combine_all_lists,
                                        .inner_products = inner_products,
                                        .nearest_column = nearest_column,
                                        .add_to_each = add_to_each,
                                        .floats = combine<float>};
  return table;
}

}  // namespace HWY_NAMESPACE
}  // namespace kvreplay
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvreplay {

HWY_EXPORT(combination_table);

const CombinationKernels& combination_kernels() {
  simd_level();
  return HWY_DYNAMIC_DISPATCH(combination_table)();
}

}  // namespace kvreplay
#endif
