// Matrices and vectors of the engine as numpy arrays that own what they show.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <initializer_list>
#include <utility>
#include <vector>

#include "matrix.h"

namespace kvreplay::python {

template <class Number>
using Array = nanobind::ndarray<nanobind::numpy, Number>;

/// `shape` has as many places as `numbers`.
template <class Number>
Array<Number> as_array(std::vector<Number> numbers, std::initializer_list<std::size_t> shape) {
  auto* held = new std::vector<Number>(std::move(numbers));
  const nanobind::capsule owner(held, [](void* kept) noexcept { delete static_cast<std::vector<Number>*>(kept); });
  return Array<Number>(held->data(), shape, owner);
}

inline Array<double> as_array(const Matrix& matrix) {
  const auto values = matrix.values();
  return as_array(std::vector<double>(values.begin(), values.end()),
                  {static_cast<std::size_t>(matrix.rows()), static_cast<std::size_t>(matrix.columns())});
}

}  // namespace kvreplay::python
