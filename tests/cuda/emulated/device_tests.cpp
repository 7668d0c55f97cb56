#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "emulated_device.h"
#include "emulated_ptx.h"

namespace {

constexpr emulated::Order orders[] = {emulated::forward, emulated::backward, emulated::shuffled(1),
                                      emulated::shuffled(2)};

/// Every test begins with a new device and ends without anything left on it.
class EmulatedDevice : public testing::Test {
 protected:
  EmulatedDevice() {
    emulated::reset();
    emulated::set_order(emulated::forward);  // whatever the environment says
  }
  ~EmulatedDevice() override { emulated::reset(); }
};

cudaLaunchConfig_t config(dim3 grid, dim3 block, std::size_t shared_bytes = 0, cudaStream_t stream = nullptr) {
  cudaLaunchConfig_t result{};
  result.gridDim = grid;
  result.blockDim = block;
  result.dynamicSmemBytes = shared_bytes;
  result.stream = stream;
  return result;
}

/// Device memory with a copy of [values].
template <class T>
T* on_device(const std::vector<T>& values) {
  T* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, values.size() * sizeof(T)), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  return memory;
}

template <class T>
std::vector<T> on_host(const T* memory, std::size_t size) {
  std::vector<T> values(size);
  EXPECT_EQ(cudaMemcpyAsync(values.data(), memory, size * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  return values;
}

template <class T, class... Parameters, class... Arguments>
std::vector<T> results(std::size_t size, const cudaLaunchConfig_t& launch, void (*kernel)(T*, Parameters...),
                       const Arguments&... arguments) {
  T* memory = on_device(std::vector<T>(size));
  EXPECT_EQ(cudaLaunchKernelEx(&launch, kernel, memory, arguments...), cudaSuccess);
  auto values = on_host(memory, size);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  return values;
}

/// What a launch that fails says.
template <class... Parameters, class... Arguments>
std::string failure(const cudaLaunchConfig_t& launch, void (*kernel)(Parameters...), const Arguments&... arguments) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(cudaLaunchKernelEx(&launch, kernel, arguments...), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(launch.stream), cudaErrorLaunchFailure);
  return testing::internal::GetCapturedStderr();
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

__global__ void add(float* sums, const float* a, const float* b, int size) {
  const unsigned i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  if (static_cast<int>(i) < size) sums[i] = a[i] + b[i];
}

TEST_F(EmulatedDevice, AddsVectors) {
  constexpr int size = 1000;
  std::vector<float> a(size), b(size);
  for (int i = 0; i < size; ++i)
    a[static_cast<std::size_t>(i)] = static_cast<float>(i), b[static_cast<std::size_t>(i)] = 0.5f;
  float *device_a = on_device(a), *device_b = on_device(b);
  for (const auto& order : orders) {
    emulated::set_order(order);
    const auto sums = results<float>(size, config(dim3(3, 3), 128), add, device_a, device_b, size);
    for (std::size_t i = 0; i < size; ++i) ASSERT_EQ(sums[i], static_cast<float>(i) + 0.5f) << i;
  }
  EXPECT_EQ(cudaFree(device_a), cudaSuccess);
  EXPECT_EQ(cudaFree(device_b), cudaSuccess);
  EXPECT_EQ(emulated::allocated(), 0u);
  EXPECT_EQ(emulated::peak_allocated(), 3 * size * sizeof(float));
}

template <bool barrier>
__global__ void tree_sum(int* sum) {
  __shared__ int parts[256];
  const unsigned t = threadIdx.x;
  parts[t] = static_cast<int>(t) + 1;
  if (barrier) __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) parts[t] += parts[t + half];
    if (barrier) __syncthreads();
  }
  if (t == 0) *sum = parts[0];
  __syncthreads();
  parts[t] = 0;
}

TEST_F(EmulatedDevice, AMissingBarrierChangesASum) {
  int wrong = 0;
  for (const auto& order : orders) {
    emulated::set_order(order);
    EXPECT_EQ(results<int>(1, config(1, 256), tree_sum<true>)[0], 256 * 257 / 2);
    wrong += results<int>(1, config(1, 256), tree_sum<false>)[0] != 256 * 257 / 2;
  }
  EXPECT_GE(wrong, 1);
}

// Odd lanes write what even lanes read, and the other way round in the lower half.
template <bool barrier>
__global__ void swap_neighbours(int* out) {
  __shared__ int values[32];
  const unsigned l = threadIdx.x;
  values[l] = static_cast<int>(l);
  if (barrier) __syncwarp();
  out[l] = values[l ^ 1];
  __syncwarp();
  values[l] = -1;
}

TEST_F(EmulatedDevice, AMissingWarpBarrierChangesAnExchange) {
  for (const auto& order : orders) {
    emulated::set_order(order);
    bool wrong = false;
    const auto right = results<int>(32, config(1, 32), swap_neighbours<true>);
    const auto without = results<int>(32, config(1, 32), swap_neighbours<false>);
    for (unsigned l = 0; l < 32; ++l) {
      ASSERT_EQ(right[l], static_cast<int>(l ^ 1));
      wrong = wrong || without[l] != right[l];
    }
    EXPECT_TRUE(wrong);
  }
}

__global__ void record_order(int* out, int* next) {
  const int number = (*next)++;
  out[threadIdx.x] = number;
}

TEST_F(EmulatedDevice, RunsLanesAndWarpsInTheOrderAskedFor) {
  std::vector<std::vector<int>> found;
  for (const auto& order : {emulated::forward, emulated::backward, emulated::shuffled(1), emulated::shuffled(3)}) {
    emulated::set_order(order);
    int* next = on_device(std::vector<int>{0});
    found.push_back(results<int>(64, config(1, 64), record_order, next));
  }
  for (int t = 0; t < 64; ++t) {
    EXPECT_EQ(found[0][static_cast<std::size_t>(t)], t);
    EXPECT_EQ(found[1][static_cast<std::size_t>(t)], 63 - t);
  }
  EXPECT_NE(found[2], found[0]);
  EXPECT_NE(found[2], found[3]);
}

TEST_F(EmulatedDevice, TakesItsOrderFromTheEnvironment) {
  const char* before = std::getenv("KVREPLAY_EMULATED_ORDER");
  const std::string kept = before ? before : "forward";
  const auto first = [&](const char* order) {
    setenv("KVREPLAY_EMULATED_ORDER", order, 1);
    emulated::reset();
    return results<int>(64, config(1, 64), record_order, on_device(std::vector<int>{0}))[0];
  };
  EXPECT_EQ(first("forward"), 0);
  EXPECT_EQ(first("backward"), 63);
  EXPECT_NE(first("1"), first("2"));
  EXPECT_THROW(first("sideways"), std::invalid_argument);
  setenv("KVREPLAY_EMULATED_ORDER", kept.c_str(), 1);
}

__global__ void shuffles(double* out) {
  const auto l = threadIdx.x;
  const auto value = static_cast<float>(l);
  out[l] = static_cast<double>(__shfl_xor_sync(~0u, value, 5));
  out[32 + l] = __shfl_sync(~0u, static_cast<double>(l) + 0.25, static_cast<int>(l * 7));
  out[64 + l] = static_cast<double>(__shfl_down_sync(~0u, value, 3));
  out[96 + l] = static_cast<double>(__shfl_up_sync(~0u, static_cast<long long>(l), 3));
  out[128 + l] = static_cast<double>(__ballot_sync(~0u, l % 3 == 0));
  out[160 + l] = __any_sync(~0u, l == 31) + 2 * __any_sync(~0u, l > 31) + 4 * __all_sync(~0u, l < 32) +
                 8 * __all_sync(~0u, l < 31);
  const unsigned half = l < 16 ? 0xFFFFu : 0xFFFF0000u;
  out[192 + l] = static_cast<double>(__shfl_xor_sync(half, value, 1));
  if (l < 4) out[224 + l] = static_cast<double>(__ballot_sync(0xFu, l == 2));
}

TEST_F(EmulatedDevice, ExchangesWithinAWarp) {
  for (const auto& order : orders) {
    emulated::set_order(order);
    const auto out = results<double>(228, config(1, 32), shuffles);
    unsigned thirds = 0;
    for (unsigned l = 0; l < 32; l += 3) thirds |= 1u << l;
    for (unsigned l = 0; l < 32; ++l) {
      EXPECT_EQ(out[l], l ^ 5);
      EXPECT_EQ(out[32 + l], l * 7 % 32 + 0.25);
      EXPECT_EQ(out[64 + l], l + 3 < 32 ? l + 3 : l);
      EXPECT_EQ(out[96 + l], l >= 3 ? l - 3 : l);
      EXPECT_EQ(out[128 + l], thirds);
      EXPECT_EQ(out[160 + l], 1 + 4);
      EXPECT_EQ(out[192 + l], l ^ 1);
    }
    for (unsigned l = 0; l < 4; ++l) EXPECT_EQ(out[224 + l], 4);
  }
}

__global__ void integers(long long* out) {
  const float infinity = std::numeric_limits<float>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const long long values[] = {__popc(0xF0F0u),
                              __popcll(~0ull),
                              __ffs(0),
                              __ffs(8),
                              __ffsll(1ll << 40),
                              __clz(1),
                              __clz(0),
                              __float2int_rn(2.5f),
                              __float2int_rn(-3.5f),
                              __float2int_rn(infinity),
                              __double2int_rn(-3e10),
                              __double2int_rn(0.5),
                              __double2ll_rn(1e19),
                              __double2ll_rn(-4.5e15 - 0.5),
                              __double2ll_rn(nan),
                              __float_as_uint(-0.0f),
                              min(3, -2),
                              max(3ll, 4ll)};
  for (std::size_t i = 0; i < std::size(values); ++i) out[i] = values[i];
}

TEST_F(EmulatedDevice, CountsAndRounds) {
  const std::vector<long long> expected = {8,
                                           64,
                                           0,
                                           4,
                                           41,
                                           31,
                                           32,
                                           2,
                                           -4,
                                           std::numeric_limits<int>::max(),
                                           std::numeric_limits<int>::min(),
                                           0,
                                           std::numeric_limits<long long>::max(),
                                           -4500000000000000,
                                           std::numeric_limits<long long>::min(),
                                           0x80000000u,
                                           -2,
                                           4};
  EXPECT_EQ(results<long long>(expected.size(), config(1, 1), integers), expected);
}

TEST_F(EmulatedDevice, FloatsOfSixteenBits) {
#ifdef __FLT16_MANT_DIG__
#ifdef __aarch64__
  using Half = __fp16;  // g++ 12 has _Float16 for Arm in C alone
#else
  using Half = _Float16;
#endif
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const auto value = static_cast<float>(std::bit_cast<Half>(static_cast<std::uint16_t>(bits)));
    const auto ours = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    if (value != value) {
      ASSERT_TRUE(ours != ours) << bits;
    } else {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(ours), std::bit_cast<std::uint32_t>(value)) << bits;
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 1000000; ++i) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (value != value) continue;
    ASSERT_EQ(__half_as_ushort(__float2half_rn(value)), std::bit_cast<std::uint16_t>(static_cast<Half>(value)));
  }
  for (std::uint32_t bits = 0x33000000; bits < 0x39000000; bits += 257) {  // subnormal halves
    const auto value = std::bit_cast<float>(bits);
    ASSERT_EQ(__half_as_ushort(__float2half_rn(value)), std::bit_cast<std::uint16_t>(static_cast<Half>(value)));
  }
#endif
  EXPECT_EQ(__half_as_ushort(__float2half_rn(65519.0f)), 0x7BFF);
  EXPECT_EQ(__half_as_ushort(__float2half_rn(-65520.0f)), 0xFC00);
  EXPECT_EQ(__bfloat16_as_ushort(__float2bfloat16_rn(1.00390625f)), 0x3F80);  // a tie, to even
  EXPECT_EQ(__bfloat16_as_ushort(__float2bfloat16_rn(1.01171875f)), 0x3F82);  // a tie, to even
  EXPECT_EQ(__bfloat16_as_ushort(__float2bfloat16_rn(-1.00390637f)), 0xBF81);
  EXPECT_EQ(__bfloat162float(__ushort_as_bfloat16(0x4049)), 3.140625f);
}

// Lane l gives row l % 8 of matrix l / 8 and gets two elements of row l / 4 of each.
__global__ void load(std::uint32_t* out) {
  auto* elements = kvreplay::dynamic_shared<std::uint16_t>();
  const unsigned l = threadIdx.x;
  for (unsigned i = l; i < 4 * 8 * 8; i += 32) elements[i] = static_cast<std::uint16_t>(i);
  __syncwarp();
  std::uint32_t fragments[4];
  kvreplay::load_matrices(fragments, elements + l * 8);
  for (unsigned i = 0; i < 4; ++i) out[l * 4 + i] = fragments[i];
}

TEST_F(EmulatedDevice, LoadsMatrices) {
  const auto out = results<std::uint32_t>(128, config(1, 32, 512), load);
  for (unsigned l = 0; l < 32; ++l) {
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      const unsigned first = matrix * 64 + l / 4 * 8 + l % 4 * 2;
      EXPECT_EQ(out[l * 4 + matrix], first | (first + 1) << 16) << l;
    }
  }
}

template <class Element>
std::vector<Element> random_elements(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Element> values(size);
  for (Element& value : values) value = static_cast<float>(static_cast<int>(random() % 256) - 128) / 64.0f;
  return values;
}

/// a [rows, depth] times b [columns, depth], transposed: exact, as the elements are small multiples of 1/64.
template <class Element>
std::vector<float> plain_product(const std::vector<Element>& a, const std::vector<Element>& b, std::size_t rows,
                                 std::size_t columns, std::size_t depth) {
  std::vector<float> out(rows * columns);
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (std::size_t k = 0; k < depth; ++k) {
        sum += static_cast<double>(static_cast<float>(a[i * depth + k])) *
               static_cast<double>(static_cast<float>(b[j * depth + k]));
      }
      out[i * columns + j] = static_cast<float>(sum);
    }
  }
  return out;
}

// sums [16, 8] = a [16, 16] times b [8, 16], transposed; a by load_matrices, b from memory as the fragments ask for it.
template <class Element>
__global__ void multiply_tile(float* out, const Element* a, const Element* b) {
  auto* tile = kvreplay::dynamic_shared<Element>();
  const unsigned l = threadIdx.x;
  for (unsigned i = l; i < 256; i += 32) tile[i] = a[i];
  __syncwarp();
  std::uint32_t a_fragments[4];
  kvreplay::load_matrices(a_fragments, tile + l % 16 * 16 + l / 16 * 8);
  const auto* pairs = reinterpret_cast<const std::uint32_t*>(b + l / 4 * 16);
  float sums[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  kvreplay::multiply<Element>(sums, a_fragments, pairs[l % 4], pairs[l % 4 + 4]);
  for (unsigned i = 0; i < 4; ++i) out[(l / 4 + i / 2 * 8) * 8 + l % 4 * 2 + i % 2] = sums[i];
}

template <class Element>
class Products : public EmulatedDevice {};
using Elements = testing::Types<__half, __nv_bfloat16>;
TYPED_TEST_SUITE(Products, Elements);

TYPED_TEST(Products, OfAWarp) {
  const auto a = random_elements<TypeParam>(256, 1), b = random_elements<TypeParam>(128, 2);
  auto expected = plain_product(a, b, 16, 8, 16);
  for (float& value : expected) value += 1.0f;
  const TypeParam *device_a = on_device(a), *device_b = on_device(b);
  for (const auto& order : orders) {
    emulated::set_order(order);
    EXPECT_EQ(results<float>(128, config(1, 32, 512), multiply_tile<TypeParam>, device_a, device_b), expected);
  }
}

TYPED_TEST(Products, AreCutOffTowardsZero) {
  for (const float sign : {1.0f, -1.0f}) {
    std::vector<TypeParam> a(256, TypeParam(0.0f)), b(128, TypeParam(0.0f));
    // 1, the accumulator, and 1.25 x 2^-24: the nearest float lies farther from zero
    a[0] = sign * 0x1p-12f;
    b[0] = 0x1.4p-12f;
    const auto out = results<float>(128, config(1, 32, 512), multiply_tile<TypeParam>, on_device(a), on_device(b));
    EXPECT_EQ(out[0], sign > 0 ? 1.0f : 1.0f - 0x1p-23f);
    EXPECT_EQ(out[1], 1.0f);
  }
}

/// The place of 16-bit element [row, column] in a tile of 64 columns with 128-byte swizzle, in elements.
__device__ constexpr unsigned swizzled(unsigned row, unsigned column) {
  return row * 64 + ((column / 8) ^ (row % 8)) * 8 + column % 8;
}

// out [64, columns] = 4 x (a [64, 64] times b [columns, 64], transposed): two sums, and the second pass adds to the
// first.
template <class Element, int columns, bool waits>
__global__ void multiply_tiles(float* out, const Element* a, const Element* b) {
  auto* tile_a = kvreplay::dynamic_shared<Element>();
  auto* tile_b = tile_a + 64 * 64;
  const unsigned t = threadIdx.x;
  for (unsigned i = t; i < 64 * 64; i += 128) tile_a[swizzled(i / 64, i % 64)] = a[i];
  for (unsigned i = t; i < columns * 64; i += 128) tile_b[swizzled(i / 64, i % 64)] = b[i];
  kvreplay::fence_async_proxy();
  __syncthreads();
  float sums[columns / 8][4], others[columns / 8][4];
  const std::uint64_t first_a = kvreplay::matrix_descriptor(tile_a), first_b = kvreplay::matrix_descriptor(tile_b);
  for (int pass = 0; pass < 2; ++pass) {
    kvreplay::warpgroup_begin();
    for (unsigned step = 0; step < 4; ++step) {
      const std::uint64_t step_a = first_a + 2 * step, step_b = first_b + 2 * step;
      kvreplay::warpgroup_multiply<Element, columns>(sums, step_a, step_b, pass > 0 || step > 0);
      kvreplay::warpgroup_multiply<Element, columns>(others, step_a, step_b, pass > 0 || step > 0);
    }
    kvreplay::warpgroup_commit();
    if (waits || pass == 0) kvreplay::warpgroup_wait<0>();
  }
  constexpr unsigned width = columns;
  const unsigned row = t / 32 * 16 + t % 32 / 4;
  for (unsigned n = 0; n < columns / 8; ++n) {
    for (unsigned i = 0; i < 4; ++i)
      out[(row + i / 2 * 8) * width + n * 8 + t % 4 * 2 + i % 2] = sums[n][i] + others[n][i];
  }
  kvreplay::warpgroup_wait<0>();
}

TYPED_TEST(Products, OfAWarpgroup) {
  constexpr int columns = 24;
  const auto a = random_elements<TypeParam>(64 * 64, 3), b = random_elements<TypeParam>(columns * 64, 4);
  auto expected = plain_product(a, b, 64, columns, 64);
  for (float& value : expected) value *= 4.0f;
  const TypeParam *device_a = on_device(a), *device_b = on_device(b);
  const auto launch = config(2, 128, (64 + columns) * 128);
  for (const auto& order : orders) {
    emulated::set_order(order);
    EXPECT_EQ((results<float>(expected.size(), launch, multiply_tiles<TypeParam, columns, true>, device_a, device_b)),
              expected);
  }
  for (const float value :
       results<float>(expected.size(), launch, multiply_tiles<TypeParam, columns, false>, device_a, device_b)) {
    ASSERT_TRUE(std::isnan(value));
  }
}

TEST_F(EmulatedDevice, OnlyHopperHasProductsOfWarpgroups) {
  emulated::set_capability(8, 0);
  const __half* tile = on_device(std::vector<__half>(64 * 64));
  const auto text = failure(config(1, 128, 3 * 64 * 128), multiply_tiles<__half, 64, true>,
                            on_device(std::vector<float>(64 * 64)), tile, tile);
  EXPECT_SAYS(text, "warpgroup_begin needs compute capability 9, found 8");
}

__global__ void unfenced() {
  float sums[1][4] = {};
  const auto tile = kvreplay::matrix_descriptor(kvreplay::dynamic_shared<std::byte>());
  kvreplay::warpgroup_multiply<__half, 8>(sums, tile, tile, false);
  kvreplay::warpgroup_commit();
  kvreplay::warpgroup_wait<0>();
}

__global__ void not_waited_for() {
  float sums[1][4] = {};
  const auto tile = kvreplay::matrix_descriptor(kvreplay::dynamic_shared<std::byte>());
  kvreplay::warpgroup_begin();
  kvreplay::warpgroup_multiply<__half, 8>(sums, tile, tile, false);
  kvreplay::warpgroup_commit();
}

__global__ void misplaced_tile() { kvreplay::matrix_descriptor(kvreplay::dynamic_shared<std::byte>() + 512); }

__global__ void tile_beyond_memory() {
  float sums[1][4] = {};
  const auto tile = kvreplay::matrix_descriptor(kvreplay::dynamic_shared<std::byte>());
  kvreplay::warpgroup_begin();
  kvreplay::warpgroup_multiply<__half, 8>(sums, tile, tile, false);
  kvreplay::warpgroup_commit();
  kvreplay::warpgroup_wait<0>();
}

__global__ void different_products(unsigned which) {
  float sums[1][4] = {};
  const auto tile = kvreplay::matrix_descriptor(kvreplay::dynamic_shared<std::byte>());
  const bool odd = threadIdx.x == 64;
  kvreplay::warpgroup_begin();
  kvreplay::warpgroup_multiply<__half, 8>(sums, tile + (odd && which == 0 ? 2 : 0), tile + (odd && which == 1 ? 2 : 0),
                                          odd && which == 2);
  kvreplay::warpgroup_commit();
  kvreplay::warpgroup_wait<0>();
}

TEST_F(EmulatedDevice, RefusesMisusedProductsOfWarpgroups) {
  const auto whole = config(1, 128, 64 * 128);
  EXPECT_SAYS(failure(whole, unfenced), "warpgroup_multiply without warpgroup_begin");
  emulated::reset();
  EXPECT_SAYS(failure(whole, not_waited_for), "ends before warpgroup_wait");
  emulated::reset();
  EXPECT_SAYS(failure(whole, misplaced_tile), "multiple of 1024 bytes");
  emulated::reset();
  EXPECT_SAYS(failure(config(1, 128, 1024), tile_beyond_memory), "beyond shared memory");
  emulated::reset();
  EXPECT_SAYS(failure(config(1, 64, 64 * 128), tile_beyond_memory), "not a whole warp-group");
  emulated::reset();
  for (const unsigned which : {0u, 1u, 2u}) {
    EXPECT_SAYS(failure(whole, different_products, which), "ask for different products");
    emulated::reset();
  }
}

// Two groups of copies; the second is waited for only if asked. The last copy is not valid: zeros, and nothing is read.
template <bool waits>
__global__ void copy_rows(std::uint32_t* out, const std::uint32_t* values) {
  auto* rows = kvreplay::dynamic_shared<std::uint32_t>();
  const unsigned t = threadIdx.x;
  kvreplay::copy_async(rows + t * 4, values + t * 4, true);
  kvreplay::commit_copies();
  kvreplay::copy_async(rows + 128 + t * 4, t == 31 ? nullptr : values + 128 + t * 4, t != 31);
  kvreplay::commit_copies();
  kvreplay::wait_copies<waits ? 0 : 1>();
  __syncwarp();
  for (unsigned i = t; i < 256; i += 32) out[i] = rows[i];
}

TEST_F(EmulatedDevice, CopiesWhenWaitedFor) {
  std::vector<std::uint32_t> values(256);
  for (unsigned i = 0; i < 256; ++i) values[i] = i;
  const auto* memory = on_device(values);
  const auto all = results<std::uint32_t>(256, config(1, 32, 1024), copy_rows<true>, memory);
  const auto some = results<std::uint32_t>(256, config(1, 32, 1024), copy_rows<false>, memory);
  for (unsigned i = 0; i < 256; ++i) {
    EXPECT_EQ(all[i], i < 252 ? i : 0);
    EXPECT_EQ(some[i], i < 128 ? i : ~0u);
  }
}

__global__ void misaligned_copy() { kvreplay::copy_async(kvreplay::dynamic_shared<std::byte>() + 8, nullptr, false); }

TEST_F(EmulatedDevice, RefusesMisalignedCopies) {
  EXPECT_SAYS(failure(config(1, 32, 1024), misaligned_copy), "not aligned to 16 bytes");
}

__global__ void powers(float* out) {
  out[0] = kvreplay::exp2_fast(-3.0f);
  out[1] = kvreplay::exp2_fast(-127.0f);
  out[2] = kvreplay::exp2_fast(-126.0f);
  out[3] = kvreplay::exp2_fast(-std::numeric_limits<float>::infinity());
}

TEST_F(EmulatedDevice, PowersOfTwoAreNeverSubnormal) {
  EXPECT_EQ(results<float>(4, config(1, 1), powers), (std::vector<float>{0.125f, 0.0f, 0x1p-126f, 0.0f}));
}

__global__ void spoil(unsigned* out) {
  auto* memory = kvreplay::dynamic_shared<unsigned>();
  out[blockIdx.x] = memory[7] + 1;
  memory[7] = 5;
}

TEST_F(EmulatedDevice, MemoryBeginsAsNan) {
  for (const unsigned word : results<unsigned>(64, config(64, 1, 32), spoil)) EXPECT_EQ(word, 0u);
  float* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 4), cudaSuccess);
  EXPECT_TRUE(std::isnan(on_host(memory, 1)[0]));
  unsigned* pinned = nullptr;
  ASSERT_EQ(cudaMallocHost(&pinned, 4), cudaSuccess);
  EXPECT_EQ(*pinned, ~0u);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
  EXPECT_EQ(emulated::host_allocated(), 0u);
}

#if defined(__SANITIZE_ADDRESS__)
#define KVREPLAY_SEES_OVERRUNS
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVREPLAY_SEES_OVERRUNS
#endif
#endif
#ifdef KVREPLAY_SEES_OVERRUNS
__global__ void overrun(int* out, unsigned shared_index, unsigned index) {
  kvreplay::dynamic_shared<int>()[shared_index] = 1;
  out[index] = 1;
}

TEST_F(EmulatedDevice, MemoryEndsWhereItEnds) {
  int* out = on_device(std::vector<int>(7));
  const auto wanted = config(1, 1, 9 * sizeof(int));
  const auto run = [&](unsigned shared_index, unsigned index) {
    EXPECT_EQ(cudaLaunchKernelEx(&wanted, overrun, out, shared_index, index), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  };
  run(8, 6);
  EXPECT_DEATH(run(9, 6), "heap-buffer-overflow");
  EXPECT_DEATH(run(8, 7), "heap-buffer-overflow");
}
#endif

__global__ void some_leave() {
  if (threadIdx.x == 40) return;
  __syncthreads();
}

__global__ void different_exchanges() {
  if (threadIdx.x < 16) {
    __shfl_sync(~0u, 1.0f, 0);
  } else {
    __ballot_sync(~0u, 1);
  }
}

__global__ void barrier_and_exchange() {
  if (threadIdx.x == 3) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

__global__ void outside_the_mask() { __shfl_sync(0xFu, 1, 0); }

__global__ void from_outside_the_mask() {
  if (threadIdx.x < 4) __shfl_sync(0xFu, 1, 7);
}

TEST_F(EmulatedDevice, SaysWhoWaitsForWhatAndStops) {
  for (const auto& order : orders) {
    emulated::set_order(order);
    auto text = failure(config(dim3(1, 2), 64), some_leave);
    EXPECT_SAYS(text, "cudaErrorLaunchFailure: block (0, ");
    EXPECT_SAYS(text, "no thread can go on: 63 of 64 threads, the first (0, 0, 0), wait at __syncthreads (");
    EXPECT_SAYS(text, "device_tests.cpp:");
    EXPECT_SAYS(text, "1 of 64 threads, the first (40, 0, 0), have ended");
    // The error stays; nothing runs any more.
    EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, 1), cudaErrorLaunchFailure);
    emulated::reset();
    emulated::set_order(order);
    text = failure(config(1, 32), different_exchanges);
    EXPECT_SAYS(text, "16 of 32 threads, the first (0, 0, 0), wait at __shfl_sync (");
    EXPECT_SAYS(text, "16 of 32 threads, the first (16, 0, 0), wait at __ballot_sync (");
    emulated::reset();
    emulated::set_order(order);
    text = failure(config(1, 32), barrier_and_exchange);
    EXPECT_SAYS(text, "31 of 32 threads, the first (0, 0, 0), wait at __syncwarp (");
    EXPECT_SAYS(text, "1 of 32 threads, the first (3, 0, 0), wait at __syncthreads (");
    emulated::reset();
    emulated::set_order(order);
    EXPECT_SAYS(failure(config(1, 32), outside_the_mask), "the calling lane is not in the mask");
    emulated::reset();
    emulated::set_order(order);
    EXPECT_SAYS(failure(config(1, 32), from_outside_the_mask), "reads from a lane that is not in the mask");
    emulated::reset();
  }
  // Fibers of failed blocks serve again.
  EXPECT_EQ(results<int>(1, config(1, 256), tree_sum<true>)[0], 256 * 257 / 2);
}

__global__ void big_shared_memory(unsigned* out) { *out = kvreplay::dynamic_shared<unsigned>()[0]; }

TEST_F(EmulatedDevice, RefusesLaunchesThatADeviceCannotMake) {
  unsigned* out = on_device(std::vector<unsigned>(1));
  const auto launch = [&](dim3 grid, dim3 block, std::size_t bytes) {
    const auto wanted = config(grid, block, bytes);
    return cudaLaunchKernelEx(&wanted, big_shared_memory, out);
  };
  EXPECT_EQ(launch(1, 1025, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(1, dim3(32, 33), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(1, 0, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(0, 1, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(dim3(1, 65536), 1, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(1, 1, 48 << 10), cudaSuccess);
  EXPECT_EQ(launch(1, 1, (48 << 10) + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaFuncSetAttribute(big_shared_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, (227 << 10) + 1),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncSetAttribute(big_shared_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10),
            cudaSuccess);
  EXPECT_EQ(launch(1, 1, 227 << 10), cudaSuccess);
  EXPECT_EQ(launch(1, 1, (227 << 10) + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

__global__ void set(int* out, int value) { *out = value; }

struct Streams : EmulatedDevice {
  Streams() {
    for (auto& made : stream) EXPECT_EQ(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  }
  ~Streams() override {
    for (const auto& made : stream) EXPECT_EQ(cudaStreamDestroy(made), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    EXPECT_EQ(emulated::handles(), 0);
  }

  int launch_set(int* memory, int value, cudaStream_t where) {
    const auto wanted = config(1, 1, 0, where);
    return cudaLaunchKernelEx(&wanted, set, memory, value);
  }

  cudaStream_t stream[2] = {};
  cudaEvent_t event = nullptr;
};

TEST_F(Streams, NothingIsDoneBeforeItIsWaitedFor) {
  int value = 1, copied = 0;
  int* memory = on_device(std::vector<int>{0});
  ASSERT_EQ(cudaMemcpyAsync(memory, &value, sizeof value, cudaMemcpyHostToDevice, stream[0]), cudaSuccess);
  value = 2;  // too early: the copy reads this
  ASSERT_EQ(cudaMemcpyAsync(&copied, memory, sizeof value, cudaMemcpyDeviceToHost, stream[0]), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, stream[0]), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamSynchronize(stream[1]), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  EXPECT_EQ(copied, 0);
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  EXPECT_EQ(copied, 2);
}

TEST_F(Streams, AMissingWaitIsSeen) {
  for (const bool waits : {true, false}) {
    int copied = 0;
    int* memory = on_device(std::vector<int>{3});
    ASSERT_EQ(launch_set(memory, 7, stream[0]), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(event, stream[0]), cudaSuccess);
    ASSERT_EQ(launch_set(memory, 8, stream[0]), cudaSuccess);
    if (waits) {
      ASSERT_EQ(cudaStreamWaitEvent(stream[1], event), cudaSuccess);
    }
    ASSERT_EQ(cudaMemcpyAsync(&copied, memory, sizeof copied, cudaMemcpyDeviceToHost, stream[1]), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream[1]), cudaSuccess);
    EXPECT_EQ(copied, waits ? 7 : 3);
    ASSERT_EQ(cudaStreamSynchronize(stream[0]), cudaSuccess);
    EXPECT_EQ(on_host(memory, 1)[0], 8);
  }
}

TEST_F(Streams, OthersMayGetAhead) {
  emulated::set_order(emulated::backward);
  int copied = 0;
  int* memory = on_device(std::vector<int>{3});
  ASSERT_EQ(cudaMemcpyAsync(&copied, memory, sizeof copied, cudaMemcpyDeviceToHost, stream[0]), cudaSuccess);
  ASSERT_EQ(launch_set(memory, 7, stream[1]), cudaSuccess);  // does not wait for the copy
  ASSERT_EQ(cudaStreamSynchronize(stream[0]), cudaSuccess);
  EXPECT_EQ(copied, 7);
}

TEST_F(Streams, AnEventIsTheLastRecordBeforeTheWait) {
  int* memory = on_device(std::vector<int>{0});
  int copied = 0;
  ASSERT_EQ(cudaEventRecord(event, stream[0]), cudaSuccess);
  ASSERT_EQ(launch_set(memory, 1, stream[0]), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(stream[1], event), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, stream[0]), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(&copied, memory, sizeof copied, cudaMemcpyDeviceToHost, stream[1]), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream[1]), cudaSuccess);
  EXPECT_EQ(copied, 0);
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(on_host(memory, 1)[0], 1);
}

TEST_F(Streams, FreeingWaitsForEverything) {
  int* memory = on_device(std::vector<int>{0});
  int* other = on_device(std::vector<int>{0});
  int copied = 0;
  ASSERT_EQ(launch_set(memory, 5, stream[0]), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(&copied, memory, sizeof copied, cudaMemcpyDeviceToHost, stream[0]), cudaSuccess);
  EXPECT_EQ(cudaFree(other), cudaSuccess);
  EXPECT_EQ(copied, 5);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);
}

TEST_F(Streams, CallHostFunctionsInTurn) {
  int* memory = on_device(std::vector<int>{0});
  struct Seen {
    int copied = 0, at_call = -1;
    cudaError_t of_a_call = cudaSuccess;
  } seen;
  ASSERT_EQ(launch_set(memory, 5, stream[0]), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(&seen.copied, memory, sizeof(int), cudaMemcpyDeviceToHost, stream[0]), cudaSuccess);
  ASSERT_EQ(cudaLaunchHostFunc(
                stream[0],
                [](void* argument) {
                  auto& found = *static_cast<Seen*>(argument);
                  found.at_call = found.copied;
                  found.of_a_call = cudaDeviceSynchronize();
                },
                &seen),
            cudaSuccess);
  EXPECT_EQ(seen.at_call, -1);
  EXPECT_EQ(cudaStreamSynchronize(stream[0]), cudaSuccess);
  EXPECT_EQ(seen.at_call, 5);
  EXPECT_EQ(seen.of_a_call, cudaErrorNotPermitted);
}

TEST_F(Streams, AreServedFromSeveralHostThreads) {
  int* memory = on_device(std::vector<int>(2));
  const auto work = [&](std::size_t which) {
    for (int i = 1; i <= 300; ++i) {
      int copied = 0;
      EXPECT_EQ(launch_set(memory + which, i, stream[which]), cudaSuccess);
      EXPECT_EQ(cudaMemcpyAsync(&copied, memory + which, sizeof copied, cudaMemcpyDeviceToHost, stream[which]),
                cudaSuccess);
      EXPECT_EQ(cudaStreamSynchronize(stream[which]), cudaSuccess);
      EXPECT_EQ(copied, i);
    }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
}

TEST_F(Streams, TimesBetweenEvents) {
  cudaEvent_t events[2];
  for (auto& made : events) ASSERT_EQ(cudaEventCreateWithFlags(&made, cudaEventDefault), cudaSuccess);
  float milliseconds = -1;
  ASSERT_EQ(cudaEventRecord(events[0], stream[0]), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(events[1], stream[0]), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, events[0], events[1]), cudaErrorNotReady);
  ASSERT_EQ(cudaEventSynchronize(events[1]), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, events[0], events[1]), cudaSuccess);
  EXPECT_GE(milliseconds, 0.0f);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, event, events[1]), cudaErrorInvalidResourceHandle);
  for (const auto& made : events) EXPECT_EQ(cudaEventDestroy(made), cudaSuccess);
}

TEST_F(EmulatedDevice, RefusesHandlesThatAreGone) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  int* memory = on_device(std::vector<int>{0});
  const auto wanted = config(1, 1, 0, stream);
  ASSERT_EQ(cudaLaunchKernelEx(&wanted, set, memory, 4), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaLaunchKernelEx(&wanted, set, memory, 5), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(on_host(memory, 1)[0], 4);  // what was queued was carried out
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);  // never recorded: complete
  ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, nullptr), cudaErrorInvalidResourceHandle);
}

TEST_F(EmulatedDevice, ChecksWhereCopiesGo) {
  std::vector<int> host(8, 1);
  int* memory = on_device(std::vector<int>(8));
  const auto copy = [&](void* target, const void* source, std::size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(target, source, bytes, kind, nullptr);
  };
  EXPECT_EQ(copy(memory + 4, host.data(), 16, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(copy(memory + 4, host.data(), 20, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(copy(host.data(), memory - 1, 4, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(copy(memory, host.data(), 16, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(copy(memory, memory + 4, 16, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(copy(memory, memory + 4, 16, cudaMemcpyDeviceToDevice), cudaSuccess);
  EXPECT_EQ(copy(memory, host.data(), 4, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(memory, 0, 32, nullptr), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(memory, 0, 33, nullptr), cudaErrorInvalidValue);
  // Rows of 8 bytes, 16 apart on the device and dense on the host.
  for (int i = 0; i < 8; ++i) host[static_cast<std::size_t>(i)] = i;
  EXPECT_EQ(cudaMemcpy2DAsync(memory, 16, host.data(), 8, 8, 2, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemcpy2DAsync(memory, 16, host.data(), 8, 9, 2, cudaMemcpyHostToDevice), cudaErrorInvalidPitchValue);
  EXPECT_EQ(cudaMemcpy2DAsync(memory, 16, host.data(), 8, 8, 3, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(on_host(memory, 8), (std::vector<int>{0, 1, 0, 0, 2, 3, 0, 0}));
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_EQ(copy(host.data(), memory, 4, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
}

TEST_F(EmulatedDevice, SeesPinnedMemoryThatIsFreedTooEarly) {
  int* memory = on_device(std::vector<int>{1});
  int* pinned = nullptr;
  ASSERT_EQ(cudaMallocHost(&pinned, sizeof(int)), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(pinned, memory, sizeof(int), cudaMemcpyDeviceToHost, nullptr), cudaSuccess);
  ASSERT_EQ(cudaFreeHost(pinned), cudaSuccess);
  testing::internal::CaptureStderr();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  EXPECT_SAYS(testing::internal::GetCapturedStderr(), "host memory was freed before it");
}

TEST_F(EmulatedDevice, HasLimitedMemory) {
  emulated::set_memory(1000);
  void *first = nullptr, *second = nullptr;
  ASSERT_EQ(cudaMalloc(&first, 600), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&second, 401), cudaErrorMemoryAllocation);
  std::size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(free, 400u);
  EXPECT_EQ(total, 1000u);
  EXPECT_EQ(cudaMalloc(&second, 400), cudaSuccess);
  EXPECT_EQ(emulated::allocated(), 1000u);
  EXPECT_EQ(cudaFree(first), cudaSuccess);
  EXPECT_EQ(cudaFree(second), cudaSuccess);
  EXPECT_EQ(emulated::allocated(), 0u);
  EXPECT_EQ(emulated::peak_allocated(), 1000u);
}

TEST_F(EmulatedDevice, IsDescribed) {
  cudaDeviceProp properties;
  int count = 0;
  ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 1);
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(cudaSetDevice(1), cudaErrorInvalidDevice);
  ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  EXPECT_EQ(properties.major * 10 + properties.minor, 90);
  EXPECT_EQ(properties.sharedMemPerBlockOptin, 227u << 10);
  emulated::set_capability(8, 9);
  int value = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMinor, 0), cudaSuccess);
  EXPECT_EQ(value, 9);
  ASSERT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), cudaSuccess);
  EXPECT_EQ(value, 99 << 10);
}

TEST_F(EmulatedDevice, FailsAsAskedFor) {
  int count = 5;
  emulated::set_device_count_error(cudaErrorInsufficientDriver);
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorInsufficientDriver);
  EXPECT_EQ(count, 0);
  EXPECT_STREQ(cudaGetErrorName(cudaErrorInsufficientDriver), "cudaErrorInsufficientDriver");
  emulated::set_device_count_error(cudaSuccess);
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  cudaGetLastError();

  // The second call from now; the others are as ever.
  emulated::fail_call(2, cudaErrorMemoryAllocation);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 4), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(memory, 0, 4, nullptr), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMemsetAsync(memory, 0, 4, nullptr), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);

  // An error of a kernel comes out at the next synchronisation, and stays.
  const int calls = emulated::calls();
  emulated::fail_call(1, cudaErrorIllegalAddress);
  const auto wanted = config(1, 1);
  testing::internal::CaptureStderr();
  EXPECT_EQ(cudaLaunchKernelEx(&wanted, set, static_cast<int*>(memory), 1), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(nullptr), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaErrorIllegalAddress);
  EXPECT_SAYS(testing::internal::GetCapturedStderr(), "cudaErrorIllegalAddress");
  EXPECT_EQ(emulated::calls(), calls + 3);
  EXPECT_EQ(cudaFree(memory), cudaErrorIllegalAddress);
  emulated::reset();
  emulated::fail_call(1, cudaErrorLaunchFailure);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetDevice(&count), cudaErrorLaunchFailure);
  emulated::reset();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
