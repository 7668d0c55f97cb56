// Vectors of tokens on the device as they lie in matrices of their heads: the rows of all heads side by side.
#pragma once

#include <cstddef>

namespace kvreplay {

/// Number head * depth + c of token i is number c in row rows[i] (null: i) of matrix `head`. Arrays are on the device.
struct TokenVectors {
  const void* const* heads = nullptr;  // [head_count] matrices
  int head_count = 0;
  int depth = 0;  // numbers of a row: zeros fill it up
  const int* rows = nullptr;
  int tokens = 0;

  template <class Element>
  __device__ __forceinline__ const Element* row(int head, int token) const {
    return static_cast<const Element*>(heads[head]) +
           static_cast<std::size_t>(rows != nullptr ? rows[token] : token) * static_cast<std::size_t>(depth);
  }
};

}  // namespace kvreplay
