#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <vector>

#include "cuda/launch.h"
#include "cuda/runtime.h"
#include "cuda/tiles.h"
#include "device_rates.h"
#include "random.h"

namespace kvreplay::bench {
namespace {

constexpr double wanted_seconds = 0.2;

cudaDeviceProp properties() {
  int device = 0;
  cudaDeviceProp facts{};
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaGetDeviceProperties(&facts, device), "cudaGetDeviceProperties");
  return facts;
}

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

/// Device memory for one scope.
template <class T>
class Numbers {
 public:
  explicit Numbers(std::size_t count) : count_(count) { check(cudaMalloc(&numbers_, count * sizeof(T)), "cudaMalloc"); }
  explicit Numbers(const std::vector<T>& values) : Numbers(values.size()) {
    check(cudaMemcpy(numbers_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // other streams do not wait for it
  }
  ~Numbers() { cudaFree(numbers_); }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  T* get() const { return numbers_; }
  std::vector<T> values() const {
    std::vector<T> values(count_);
    check(cudaMemcpy(values.data(), numbers_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return values;
  }

 private:
  T* numbers_ = nullptr;
  std::size_t count_;
};

/// Seconds of what `queue` puts on the stream.
double seconds_of(const Stream& stream, const std::function<void()>& queue) {
  stream.wait();
  const auto begin = std::chrono::steady_clock::now();
  queue();
  stream.wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Seconds of one round, of so many that a clock can tell; the best of three.
double seconds_a_round(const Stream& stream, const std::function<void(int rounds)>& queue) {
  int rounds = 16;
  double seconds = 0;
  while ((seconds = seconds_of(stream, [&] { queue(rounds); })) < wanted_seconds / 4 && rounds < 1 << 28) rounds *= 4;
  for (int i = 0; i < 3; ++i) seconds = std::min(seconds, seconds_of(stream, [&] { queue(rounds); }));
  return seconds / rounds;
}

constexpr int depth = 128;

/// sums[rows, columns] = rounds * held[rows, numbers] * tile[columns, numbers]^T, by every block; rows of both have
/// `depth` numbers. One block writes.
template <class Element>
struct WarpGroupRounds : WarpGroupProducts<Element, depth> {
  using Base = WarpGroupProducts<Element, depth>;
  static constexpr int numbers = depth;

  static __device__ __forceinline__ void repeat(const unsigned char* held, const unsigned char* tile, int rounds,
                                                typename Base::Sums& sums) {
    const int first_row = static_cast<int>(threadIdx.x) / 128 * 64;
    for (int round = 0; round < rounds; ++round) {
      warpgroup_begin();
#pragma unroll
      for (int step = 0; step < depth / 16; ++step) {
        const int panel = step / 4;
        const std::uint64_t within = static_cast<std::uint64_t>(step % 4 * 2);
        warpgroup_multiply<Element, Base::columns>(
            sums, matrix_descriptor(held + (panel * Base::rows + first_row) * 128) + within,
            matrix_descriptor(tile + panel * Base::columns * 128) + within, true);
      }
      warpgroup_commit();
      warpgroup_wait<1>();
    }
    warpgroup_wait<0>();
  }
};

template <class Element>
struct WarpRounds : WarpProducts<Element, depth> {
  using Base = WarpProducts<Element, depth>;
  static constexpr int numbers = 16;

  static __device__ __forceinline__ void repeat(const unsigned char* held, const unsigned char* tile, int rounds,
                                                typename Base::Sums& sums) {
    const int first_row = static_cast<int>(threadIdx.x) / 32 * 32;
    std::uint32_t a[2][4], b[4][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
      load_matrices(a[m], held + piece_offset<Base::rows>(first_row + m * 16 + lane() % 16, lane() / 16));
#pragma unroll
    for (int n = 0; n < 4; ++n)
      load_matrices(b[n], tile + piece_offset<Base::columns>(n * 16 + lane() / 16 * 8 + lane() % 8, lane() / 8 % 2));
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply<Element>(sums[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
  }
};

template <class Element, class Rounds>
__global__ void __launch_bounds__(Rounds::threads, Rounds::blocks_a_processor)
    multiply_again(const Element* held, const Element* tile, int rounds, float* out) {
  constexpr int rows = Rounds::rows, columns = Rounds::columns;
  auto* shared_held = dynamic_shared<unsigned char>();
  unsigned char* shared_tile = shared_held + rows * depth * sizeof(Element);
  copy_rows<rows, depth, Rounds::threads>(shared_held, held,
                                          [&](int row) -> const void* { return held + row * depth; });
  copy_rows<columns, depth, Rounds::threads>(shared_tile, tile,
                                             [&](int column) -> const void* { return tile + column * depth; });
  commit_copies();
  wait_copies<0>();
  fence_async_proxy();
  __syncthreads();
  typename Rounds::Sums sums;
#pragma unroll
  for (int i = 0; i < Rounds::row_count; ++i)
#pragma unroll
    for (int j = 0; j < Rounds::column_count; ++j) Rounds::at(sums, i, j) = 0.0F;
  Rounds::repeat(shared_held, shared_tile, rounds, sums);
  if (blockIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < Rounds::row_count; ++i)
#pragma unroll
      for (int j = 0; j < Rounds::column_count; ++j)
        out[Rounds::row(i) * columns + j / 2 * 8 + lane() % 4 * 2 + j % 2] = Rounds::at(sums, i, j);
  }
}

/// Numbers in (-1, 1): multipliers of zeros take less power, and the clock would rise.
template <class Element>
std::vector<Element> some_rows(int rows, std::uint64_t seed) {
  std::vector<Element> numbers;
  for (int i = 0; i < rows * depth; ++i)
    numbers.push_back(Element(static_cast<float>(2.0 * uniform(chain(seed, i)) - 1.0)));
  return numbers;
}

template <class Element, class Rounds>
DeviceRate rate_of_products() {
  constexpr int rows = Rounds::rows, columns = Rounds::columns, checked_rounds = 3;
  const std::vector<Element> held = some_rows<Element>(rows, 1), tile = some_rows<Element>(columns, 2);
  const Numbers<Element> device_held(held), device_tile(tile);
  const Numbers<float> sums(static_cast<std::size_t>(rows) * columns);
  const Stream stream;
  const auto blocks = static_cast<unsigned>(properties().multiProcessorCount * Rounds::blocks_a_processor);
  const auto queue = [&](int rounds) {
    launch(multiply_again<Element, Rounds>, blocks, Rounds::threads, (rows + columns) * depth * sizeof(Element),
           stream.get(), device_held.get(), device_tile.get(), rounds, sums.get());
  };
  queue(checked_rounds);
  stream.wait();
  const std::vector<float> found = sums.values();
  double error = 0;
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      double expected = 0;
      for (int i = 0; i < Rounds::numbers; ++i)
        expected += static_cast<double>(static_cast<float>(held[static_cast<std::size_t>(row * depth + i)])) *
                    static_cast<double>(static_cast<float>(tile[static_cast<std::size_t>(column * depth + i)]));
      const double sum = static_cast<double>(found[static_cast<std::size_t>(row * columns + column)]);
      error = std::max(error, std::abs(sum - checked_rounds * expected) / Rounds::numbers);
    }
  }
  return {2.0 * rows * columns * Rounds::numbers * blocks / seconds_a_round(stream, queue), error};
}

constexpr int chains = 16;

__global__ void add_again(int rounds, float factor, float* out) {
  float numbers[chains];
#pragma unroll
  for (int i = 0; i < chains; ++i) numbers[i] = static_cast<float>(i);
  for (int round = 0; round < rounds; ++round)
#pragma unroll
    for (int i = 0; i < chains; ++i) numbers[i] = __fmaf_rn(numbers[i], factor, 1.0F);
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < chains; ++i) sum += numbers[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

std::size_t copied_bytes(std::size_t wanted) {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return std::min(wanted, free / 4);
}

DeviceRate copy_rate(void* to, const void* from, std::size_t bytes, int moved) {
  const Stream stream;
  const auto queue = [&](int rounds) {
    for (int i = 0; i < rounds; ++i)
      check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream.get()), "cudaMemcpyAsync");
  };
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // for what fills the source
  const double seconds = seconds_a_round(stream, queue);
  std::vector<unsigned char> sent(4096), arrived(4096);
  check(cudaMemcpy(sent.data(), static_cast<const char*>(from) + bytes - 4096, 4096, cudaMemcpyDefault), "cudaMemcpy");
  check(cudaMemcpy(arrived.data(), static_cast<const char*>(to) + bytes - 4096, 4096, cudaMemcpyDefault), "cudaMemcpy");
  return {moved * static_cast<double>(bytes) / seconds, sent == arrived ? 0.0 : 1.0};
}

}  // namespace

DeviceFacts device_facts() {
  const cudaDeviceProp facts = properties();
  int driver = 0, runtime = 0;
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  return {.name = facts.name,
          .capability = std::to_string(facts.major) + "." + std::to_string(facts.minor),
          .processors = facts.multiProcessorCount,
          .memory_bytes = static_cast<double>(facts.totalGlobalMem),
          .driver = version(driver),
          .runtime = version(runtime)};
}

bool has(Products products) { return products == Products::warps || properties().major == 9; }

DeviceRate product_rate(Products products, DType dtype) {
  if (products == Products::warps) {
    return dtype == DType::float16 ? rate_of_products<__half, WarpRounds<__half>>()
                                   : rate_of_products<__nv_bfloat16, WarpRounds<__nv_bfloat16>>();
  }
  return dtype == DType::float16 ? rate_of_products<__half, WarpGroupRounds<__half>>()
                                 : rate_of_products<__nv_bfloat16, WarpGroupRounds<__nv_bfloat16>>();
}

DeviceRate float_rate() {
  constexpr int threads = 256, checked_rounds = 5;
  constexpr float factor = 0.75F;
  const auto blocks = static_cast<unsigned>(properties().multiProcessorCount * 8);
  const Numbers<float> out(static_cast<std::size_t>(blocks) * threads);
  const Stream stream;
  const auto queue = [&](int rounds) {
    launch(add_again, blocks, threads, 0, stream.get(), rounds, factor, out.get());
  };
  queue(checked_rounds);
  stream.wait();
  double expected = 0;
  for (int i = 0; i < chains; ++i) {
    double number = i;
    for (int round = 0; round < checked_rounds; ++round) number = number * static_cast<double>(factor) + 1.0;
    expected += number;
  }
  double error = 0;
  for (const float found : out.values())
    error = std::max(error, std::abs(static_cast<double>(found) - expected) / expected);
  return {2.0 * chains * threads * blocks / seconds_a_round(stream, queue), error};
}

DeviceRate device_copy_rate() {
  const std::size_t bytes = copied_bytes(std::size_t{1} << 30);
  const Numbers<unsigned char> from(bytes), to(bytes);
  check(cudaMemset(from.get(), 0x5A, bytes), "cudaMemset");
  return copy_rate(to.get(), from.get(), bytes, 2);
}

DeviceRate to_device_rate() {
  const std::size_t bytes = copied_bytes(std::size_t{1} << 28);
  PinnedMemory from;
  const Numbers<unsigned char> to(bytes);
  std::fill_n(from.at_least(bytes), bytes, std::byte{0x5A});
  return copy_rate(to.get(), from.at_least(bytes), bytes, 1);
}

DeviceRate from_device_rate() {
  const std::size_t bytes = copied_bytes(std::size_t{1} << 28);
  PinnedMemory to;
  const Numbers<unsigned char> from(bytes);
  check(cudaMemset(from.get(), 0x5A, bytes), "cudaMemset");
  return copy_rate(to.at_least(bytes), from.get(), bytes, 1);
}

}  // namespace kvreplay::bench
