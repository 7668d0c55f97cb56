#pragma once

// What cuda/ptx.h does by inline PTX, for an emulated device. Asynchronous work is carried out as late as its wait
// allows.

#include <cstdint>

#include "emulated_numbers.h"
#include "emulated_runtime.h"

namespace emulated {

/// A lane's part of mma.m16n8k16.
struct Fragments {
  float* sums;
  const std::uint32_t* a;
  std::uint32_t b0, b1;
};

/// Element is __half or __nv_bfloat16.
template <class Element>
void multiply_warp(const std::array<void*, 32>& lanes, std::uint32_t mask);

template <class Element>
void multiply_warpgroup(const std::array<float*, 128>& sums, const Product& product);

struct MatrixRow {
  const void* shared_row;
  std::uint32_t* out;
};
void load_matrices(const std::array<void*, 32>& lanes, std::uint32_t mask);

void begin_product(Product product);
void wait_products(int pending, const Place& place);

}  // namespace emulated

namespace kvreplay {

template <class T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(emulated::shared_memory().data());
}

float exp2_fast(float x);

void copy_async(void* shared, const void* global, bool valid);

void commit_copies();

template <int pending>
void wait_copies() {
  auto& copies = emulated::asynchronous_work().copies;
  const std::size_t due = copies.due(pending);
  for (std::size_t i = 0; i < due; ++i) emulated::carry_out(copies[i]);
  copies.remove(due);
}

inline void load_matrices(std::uint32_t (&out)[4], const void* shared_row,
                          emulated::Where where = emulated::Where::current()) {
  emulated::MatrixRow row{shared_row, out};
  emulated::exchange(&emulated::load_matrices, &row, ~0u, {"load_matrices", where});
}

template <class Element>
void multiply(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
              emulated::Where where = emulated::Where::current()) {
  emulated::Fragments fragments{sums, a, b0, b1};
  emulated::exchange(&emulated::multiply_warp<Element>, &fragments, ~0u, {"multiply", where});
}

std::uint64_t matrix_descriptor(const void* shared);

inline bool has_warp_groups() { return true; }
template <int blocks>
void warpgroup_pin(float (&)[blocks][4]) {}
void warpgroup_begin();
void warpgroup_commit();

template <int pending>
void warpgroup_wait(emulated::Where where = emulated::Where::current()) {
  emulated::wait_products(pending, {"warpgroup_wait", where});
}

/// Nothing: the emulated units see every write at once.
inline void fence_async_proxy() {}

template <class Element, int columns>
void warpgroup_multiply(float (&sums)[columns / 8][4], std::uint64_t a, std::uint64_t b, bool accumulate) {
  static_assert(columns % 8 == 0 && columns >= 8 && columns <= 256);
  emulated::begin_product({&emulated::multiply_warpgroup<Element>, &sums[0][0], {}, columns, a, b, accumulate});
}

}  // namespace kvreplay
