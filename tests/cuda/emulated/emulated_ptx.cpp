#include "emulated_ptx.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace emulated {
namespace {

template <class Element>
void to_double(const std::uint16_t* bits, double* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<Element, __half>) {
      out[i] = static_cast<double>(half_to_float(bits[i]));
    } else {
      out[i] = static_cast<double>(bfloat16_to_float(bits[i]));
    }
  }
}

/// Tensor cores add the products of one instruction and the accumulator with few extra bits and cut off the rest
/// (Fasi, Higham, Mikaitis and Pranesh 2021, "Numerical behavior of NVIDIA tensor cores"): here towards
/// zero.
float towards_zero(double sum) {
  const float nearest = static_cast<float>(sum);
  const bool too_far = std::abs(static_cast<double>(nearest)) > std::abs(sum);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(nearest) - static_cast<std::uint32_t>(too_far));
}

// Compilers vectorise sums over k otherwise, which are short, and not over columns.
using EightDoubles [[gnu::vector_size(64)]] = double;

/// sums [8] += a [16] times b [16, 8], and cut off.
void multiply_row(const double* a, const EightDoubles* b, float* sums) {
  EightDoubles wide;
  for (int i = 0; i < 8; ++i) wide[i] = static_cast<double>(sums[i]);
  for (int k = 0; k < 16; ++k) wide += a[k] * b[k];
  for (int i = 0; i < 8; ++i) sums[i] = towards_zero(wide[i]);
}

bool aligned(const void* address, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
}

constexpr int group_rows = 8;  // of shared memory's 128-byte swizzle
constexpr std::uint64_t row_bytes = 128, group_bytes = 1024;
constexpr std::uint64_t swizzle_128 = std::uint64_t{1} << 62, stride = (group_bytes >> 4) << 32;
constexpr std::uint64_t no_leading_stride = std::uint64_t{1} << 16;

/// One row of 16 elements of the tile that [descriptor] names.
void read_row(std::uint64_t descriptor, std::uint64_t row, std::uint16_t* out) {
  const std::span<const std::byte> memory = shared_memory();
  const std::uint64_t start = (descriptor & 0x3FFF) << 4;
  for (std::uint64_t chunk = 0; chunk < 2; ++chunk) {
    std::uint64_t address = start + row / group_rows * group_bytes + row % group_rows * row_bytes + chunk * 16;
    address ^= (address >> 7 & 7) << 4;
    if (address + 16 > memory.size()) throw Failure("warpgroup_multiply reads beyond shared memory");
    std::memcpy(out + chunk * 8, memory.data() + address, 16);
  }
}

}  // namespace

void carry_out(const Copy& copy) {
  if (copy.valid) {
    std::memcpy(copy.shared, copy.global, 16);
  } else {
    std::memset(copy.shared, 0, 16);
  }
}

void load_matrices(const std::array<void*, 32>& lanes, std::uint32_t mask) {
  if (mask != ~0u) throw Failure("load_matrices needs a whole warp");
  const auto part = [&](unsigned l) -> MatrixRow& { return *static_cast<MatrixRow*>(lanes[l]); };
  for (unsigned l = 0; l < 32; ++l) {
    if (!aligned(part(l).shared_row, 16)) throw Failure("load_matrices: a row that is not aligned to 16 bytes");
  }
  for (unsigned l = 0; l < 32; ++l) {
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      const auto* row = static_cast<const std::byte*>(part(matrix * 8 + l / 4).shared_row);
      std::memcpy(&part(l).out[matrix], row + 4 * (l % 4), 4);
    }
  }
}

// PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type": with g = lane / 4 and p = 2 (lane % 4),
// a holds rows g, g + 8 at columns p, p + 1, then the same at p + 8; b holds rows p, p + 1, then p + 8, of column g;
// sums hold row g, then g + 8, at columns p, p + 1.
template <class Element>
void multiply_warp(const std::array<void*, 32>& lanes, std::uint32_t mask) {
  if (mask != ~0u) throw Failure("multiply needs a whole warp");
  require_capability(8, false, "multiply");
  std::uint16_t a_bits[16][16], b_bits[16][8];
  float sums[16][8];
  for (unsigned l = 0; l < 32; ++l) {
    const auto& part = *static_cast<const Fragments*>(lanes[l]);
    const unsigned g = l / 4, p = l % 4 * 2;
    std::memcpy(&a_bits[g][p], &part.a[0], 4);
    std::memcpy(&a_bits[g + 8][p], &part.a[1], 4);
    std::memcpy(&a_bits[g][p + 8], &part.a[2], 4);
    std::memcpy(&a_bits[g + 8][p + 8], &part.a[3], 4);
    for (unsigned upper = 0; upper < 2; ++upper) {
      b_bits[p + upper][g] = static_cast<std::uint16_t>(part.b0 >> 16 * upper);
      b_bits[p + 8 + upper][g] = static_cast<std::uint16_t>(part.b1 >> 16 * upper);
    }
    std::memcpy(&sums[g][p], part.sums, 8);
    std::memcpy(&sums[g + 8][p], part.sums + 2, 8);
  }
  double a[256];
  EightDoubles b[16];
  to_double<Element>(&a_bits[0][0], a, 256);
  to_double<Element>(&b_bits[0][0], reinterpret_cast<double*>(b), 128);
  for (std::size_t row = 0; row < 16; ++row) multiply_row(a + row * 16, b, sums[row]);
  for (unsigned l = 0; l < 32; ++l) {
    const auto& part = *static_cast<const Fragments*>(lanes[l]);
    const unsigned g = l / 4, p = l % 4 * 2;
    std::memcpy(part.sums, &sums[g][p], 8);
    std::memcpy(part.sums + 2, &sums[g + 8][p], 8);
  }
}

template void multiply_warp<__half>(const std::array<void*, 32>&, std::uint32_t);
template void multiply_warp<__nv_bfloat16>(const std::array<void*, 32>&, std::uint32_t);

// PTX ISA, "Matrix fragments for wgmma.mma_async.m64nNk16": warp w of the warp-group holds rows 16 w to 16 w + 15, each
// eight columns as mma.m16n8k16's sums.
template <class Element>
void multiply_warpgroup(const std::array<float*, 128>& parts, const Product& product) {
  const auto columns = static_cast<std::size_t>(product.columns);
  std::uint16_t bits[16];
  double a[16];
  std::vector<EightDoubles> b(2 * columns);  // [columns / 8, 16]
  for (std::size_t column = 0; column < columns; ++column) {
    read_row(product.b, column, bits);
    to_double<Element>(bits, a, 16);
    for (std::size_t k = 0; k < 16; ++k) b[column / 8 * 16 + k][column % 8] = a[k];
  }
  float sums[256];
  for (std::size_t row = 0; row < 64; ++row) {
    // Two columns lie with a thread, eight with four threads.
    const auto pair = [&](std::size_t column) {
      return parts[row / 16 * 32 + row % 8 * 4 + column % 8 / 2] + column / 8 * 4 + row % 16 / 8 * 2;
    };
    for (std::size_t column = 0; column < columns; column += 2) {
      if (product.accumulate) {
        std::memcpy(sums + column, pair(column), 8);
      } else {
        sums[column] = sums[column + 1] = 0.0f;
      }
    }
    read_row(product.a, row, bits);
    to_double<Element>(bits, a, 16);
    for (std::size_t column = 0; column < columns; column += 8) multiply_row(a, &b[2 * column], sums + column);
    for (std::size_t column = 0; column < columns; column += 2) std::memcpy(pair(column), sums + column, 8);
  }
}

template void multiply_warpgroup<__half>(const std::array<float*, 128>&, const Product&);
template void multiply_warpgroup<__nv_bfloat16>(const std::array<float*, 128>&, const Product&);

// Until its wait a product owns the registers of its sums: they read as NaN, and what is written to them is lost.
void begin_product(Product product) {
  require_capability(9, true, "warpgroup_multiply");
  AsynchronousWork& work = asynchronous_work();
  if (!work.fenced) throw Failure("warpgroup_multiply without warpgroup_begin");
  for (const std::uint64_t descriptor : {product.a, product.b}) {
    if ((descriptor & ~std::uint64_t{0x3FFF} & ~no_leading_stride) != (swizzle_128 | stride)) {
      throw Failure("warpgroup_multiply: a descriptor of another layout than 128-byte swizzled rows of 128 bytes");
    }
  }
  bool adding = false;
  for (std::size_t i = 0; i < work.products.size(); ++i) adding |= work.products[i].sums == product.sums;
  if (!adding) {
    product.begun.assign(product.sums, product.sums + product.columns / 2);
    std::fill_n(product.sums, product.columns / 2, std::numeric_limits<float>::quiet_NaN());
  }
  work.products.add(std::move(product));
}

namespace {

struct ProductWait {
  AsynchronousWork* work;
  int pending;
};

void carry_out_products(const std::array<void*, 128>& threads) {
  const auto work = [&](unsigned t) -> Groups<Product>& {
    return static_cast<const ProductWait*>(threads[t])->work->products;
  };
  const int pending = static_cast<const ProductWait*>(threads[0])->pending;
  const std::size_t due = work(0).due(pending);
  for (unsigned t = 0; t < 128; ++t) {
    if (static_cast<const ProductWait*>(threads[t])->pending != pending || work(t).due(pending) != due) {
      throw Failure("warpgroup_wait: the warp-group's threads wait for different products");
    }
  }
  for (std::size_t i = 0; i < due; ++i) {
    const Product& first = work(0)[i];
    std::array<float*, 128> sums{};
    for (unsigned t = 0; t < 128; ++t) {
      const Product& part = work(t)[i];
      if (part.carry_out != first.carry_out || part.columns != first.columns || part.a != first.a ||
          part.b != first.b || part.accumulate != first.accumulate) {
        throw Failure("warpgroup_multiply: the warp-group's threads ask for different products");
      }
      std::copy(part.begun.begin(), part.begun.end(), part.sums);
      sums[t] = part.sums;
    }
    first.carry_out(sums, first);
  }
  for (unsigned t = 0; t < 128; ++t) work(t).remove(due);
}

}  // namespace

void wait_products(int pending, const Place& place) {
  require_capability(9, true, "warpgroup_wait");
  AsynchronousWork& work = asynchronous_work();
  ProductWait wait{&work, pending};
  exchange(&carry_out_products, &wait, place);
  if (work.products.size() == 0) work.fenced = false;
}

}  // namespace emulated

namespace kvreplay {

float exp2_fast(float x) {
  const float value = ::exp2f(x);
  return value < std::numeric_limits<float>::min() ? 0.0f : value;
}

void copy_async(void* shared, const void* global, bool valid) {
  emulated::require_capability(8, false, "copy_async");
  if (!emulated::aligned(shared, 16) || (valid && !emulated::aligned(global, 16))) {
    throw emulated::Failure("copy_async: an address that is not aligned to 16 bytes");
  }
  emulated::asynchronous_work().copies.add({shared, global, valid});
}

void commit_copies() { emulated::asynchronous_work().copies.commit(); }

std::uint64_t matrix_descriptor(const void* shared) {
  const auto offset = static_cast<const std::byte*>(shared) - emulated::shared_memory().data();
  if (offset % std::ptrdiff_t{emulated::group_bytes} != 0) {
    throw emulated::Failure("matrix_descriptor: a tile that does not begin at a multiple of 1024 bytes");
  }
  const auto address = (static_cast<std::uint64_t>(offset) & 0x3FFFF) >> 4;
  return emulated::swizzle_128 | emulated::stride | emulated::no_leading_stride | address;
}

void warpgroup_begin() {
  emulated::require_capability(9, true, "warpgroup_begin");
  emulated::asynchronous_work().fenced = true;
}

void warpgroup_commit() { emulated::asynchronous_work().products.commit(); }

}  // namespace kvreplay
