#pragma once

// How a grid is carried out: every CUDA thread of a block is a fiber, a block stays on one thread of the operating
// system. A thread runs until it waits for others: at an exchange of its warp, of its warp-group (128 threads), or at a
// barrier of its block. The last thread that arrives at an exchange carries it out for all.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "emulated_device.h"
#include "vector_types.h"

constinit inline thread_local uint3 threadIdx{};
constinit inline thread_local uint3 blockIdx{};
constinit inline thread_local dim3 blockDim{};
constinit inline thread_local dim3 gridDim{};

namespace emulated {

/// What a device cannot do, or what no order of the threads could give a meaning to: the launch fails.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Launch {
  std::function<void()> kernel;  // one thread's run, with the arguments
  dim3 grid, block;
  std::size_t shared_bytes = 0;
  std::uint64_t number = 0;  // counts launches: part of the shuffled order's seed
  int major = 0;             // of the compute capability
  Order order{};
};

/// Carries out all blocks; throws Failure.
void carry_out(const Launch& launch);

/// The dynamic shared memory of the block that this thread belongs to.
std::span<std::byte> shared_memory();

/// Refuses an instruction that devices below compute capability [major].0 lack, or other ones than it if [only].
void require_capability(int major, bool only, const char* instruction);

/// The calling thread's number in its warp.
unsigned lane();

/// Where a thread waits, for messages.
struct Place {
  const char* operation;
  std::source_location where;
};

/// By lane; lanes outside the mask hold nullptr. Masks lose what the warp lacks where the block ends within it.
using WarpExchange = void (*)(const std::array<void*, 32>& arguments, std::uint32_t mask);
void exchange(WarpExchange carry_out, void* argument, std::uint32_t mask, const Place& place);

using WarpgroupExchange = void (*)(const std::array<void*, 128>& arguments);
void exchange(WarpgroupExchange carry_out, void* argument, const Place& place);

void block_barrier(const Place& place);

/// Asynchronous work of one thread: items join the open group; wait carries out closed groups, oldest first, until
/// [pending] closed groups are left.
template <class Item>
class Groups {
 public:
  void add(Item item) { items_.emplace_back(closed_, std::move(item)); }
  void commit() { ++closed_; }
  std::size_t due(int pending) const {
    std::size_t count = 0;
    while (count < items_.size() && items_[count].first + static_cast<std::uint64_t>(pending) < closed_) ++count;
    return count;
  }
  Item& operator[](std::size_t i) { return items_[i].second; }
  std::size_t size() const { return items_.size(); }
  void remove(std::size_t count) { items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(count)); }
  void clear() {
    items_.clear();
    closed_ = 0;
  }

 private:
  std::vector<std::pair<std::uint64_t, Item>> items_;
  std::uint64_t closed_ = 0;
};

/// Sixteen bytes from global to shared memory.
struct Copy {
  void* shared;
  const void* global;
  bool valid;
};
void carry_out(const Copy& copy);

/// A thread's part of a warp-group's product.
struct Product {
  /// sums [64, columns] of the warp-group, by thread
  void (*carry_out)(const std::array<float*, 128>& sums, const Product& product);
  float* sums;
  std::vector<float> begun;  // the sums at the call where no earlier product is still adding to them; else empty
  int columns;
  std::uint64_t a, b;
  bool accumulate;
};

struct AsynchronousWork {
  Groups<Copy> copies;
  Groups<Product> products;
  bool fenced = false;  // the registers, for products
};
AsynchronousWork& asynchronous_work();

}  // namespace emulated
