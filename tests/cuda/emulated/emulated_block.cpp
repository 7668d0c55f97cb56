#include "emulated_block.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>

#if defined(__SANITIZE_ADDRESS__)
#define KVREPLAY_ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVREPLAY_ADDRESS_SANITIZER
#endif
#endif
#ifdef KVREPLAY_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulated {
namespace {

constexpr unsigned warp_threads = 32;
constexpr unsigned warpgroup_threads = 128;

#ifdef KVREPLAY_ADDRESS_SANITIZER
constexpr std::size_t stack_bytes = std::size_t{256} << 10;  // red zones around every variable
#else
constexpr std::size_t stack_bytes = std::size_t{64} << 10;
#endif

/// A stack that the sanitizer is told about: Debian's Boost does not tell it.
struct Stack {
  const void* bottom = nullptr;
  std::size_t bytes = 0;
};

// Before and after each switch; [kept] holds what the sanitizer keeps of the stack that is left.
void leave_stack([[maybe_unused]] void** kept, [[maybe_unused]] const Stack& next) {
#ifdef KVREPLAY_ADDRESS_SANITIZER
  __sanitizer_start_switch_fiber(kept, next.bottom, next.bytes);
#endif
}
void enter_stack([[maybe_unused]] void* kept, [[maybe_unused]] Stack* previous) {
#ifdef KVREPLAY_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(kept, previous ? &previous->bottom : nullptr, previous ? &previous->bytes : nullptr);
#endif
}

class StackAllocator {
 public:
  explicit StackAllocator(Stack* stack) : stack_(stack) {}
  boost::context::stack_context allocate() {
    const boost::context::stack_context context = allocator_.allocate();
    *stack_ = {static_cast<const char*>(context.sp) - context.size, context.size};
    return context;
  }
  void deallocate(boost::context::stack_context& context) {
#ifdef KVREPLAY_ADDRESS_SANITIZER
    __asan_unpoison_memory_region(static_cast<char*>(context.sp) - context.size, context.size);
#endif
    allocator_.deallocate(context);
  }

 private:
  boost::context::protected_fixedsize_stack allocator_{stack_bytes};
  Stack* stack_;
};

/// (first + i step) mod count visits each of [count] once, as step and count have no common divisor.
struct Sweep {
  std::uint64_t first, step, count;
  std::uint64_t operator[](std::uint64_t i) const { return (first + i * step) % count; }
  unsigned next() {
    const std::uint64_t now = first;
    first = first + step < count ? first + step : first + step - count;
    return static_cast<unsigned>(now);
  }
};

/// Sweeps in the order that was asked for.
class Sweeps {
 public:
  Sweeps() = default;
  Sweeps(Order order, std::uint64_t number) : kind_(order.kind), state_(order.seed * 0x9E3779B97F4A7C15 + number) {}

  Sweep next(std::uint64_t count) {
    switch (kind_) {
      case Order::Kind::forward:
        return {0, 1, count};
      case Order::Kind::backward:
        return {count - 1, count - 1, count};
      case Order::Kind::shuffled:
        break;
    }
    std::uint64_t step = 1 + random() % count;
    while (std::gcd(step, count) != 1) step = 1 + step % count;
    return {random() % count, step, count};
  }

 private:
  // SplitMix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 17.
  std::uint64_t random() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return (z ^ (z >> 31)) >> 16;
  }

  Order::Kind kind_ = Order::Kind::forward;
  std::uint64_t state_ = 0;
};

std::string text(uint3 v) {
  return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
}

/// Thrown in threads that still wait where their block has failed.
struct Abandoned {};

/// What can be switched to: a fiber, or what runs fibers.
struct Context {
  boost::context::fiber handle;
  Stack stack;
  void* kept = nullptr;
};

struct Thread : Context {
  uint3 index{};
  bool begun = false, ended = false;
  // What it waits for, if it does.
  Place place{};
  void (*kind)() = nullptr;
  void* argument = nullptr;
  std::uint32_t mask = 0;
  AsynchronousWork work;
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

/// The fibers of one thread of the operating system; blocks reuse them.
class Block {
 public:
  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();

  void run(const Launch& launch, uint3 index, std::uint64_t linear_index);

  Thread& current() { return *threads_[current_]; }
  unsigned current_number() const { return current_; }
  std::span<std::byte> shared() { return {shared_.get(), shared_bytes_}; }
  const Launch& launch() const { return *launch_; }

  void exchange(WarpExchange carry_out, void* argument, std::uint32_t mask, const Place& place);
  void exchange(WarpgroupExchange carry_out, void* argument, const Place& place);
  void barrier(const Place& place);

 private:
  struct Warp {
    std::uint32_t threads = 0;  // the lanes that exist
    std::uint32_t ready = 0;
    std::uint32_t exchanging = 0;
  };

  void add_thread();
  Context& begin(unsigned thread);
  Context& next();
  void switch_to(Context& from, Context& to);
  void wait(const Place& place, void (*kind)(), void* argument, std::uint32_t mask);
  void suspend();
  void run_thread(Thread& thread);
  void abandon();
  std::string stuck() const;

  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Warp> warps_;
  std::vector<unsigned> warpgroups_;  // threads that have arrived at an exchange of their warp-group
  unsigned count_ = 0, current_ = 0, arrived_ = 0;
  const Launch* launch_ = nullptr;
  std::unique_ptr<std::byte, Free> shared_;
  std::size_t shared_bytes_ = 0;
  std::string failure_;
  bool abandoned_ = false, finished_ = false;
  Context scheduler_;
  Context* previous_ = nullptr;  // where the last switch came from
  unsigned warp_ = 0;            // whose lanes take turns
  Sweep lanes_{};
  unsigned lanes_left_ = 0;
  Sweeps sweeps_;
};

thread_local Block block_of_this_thread;

constinit thread_local Block* running = nullptr;

Block& running_block() {
  if (!running) throw std::logic_error("emulated device: device code called outside a kernel");
  return *running;
}

Block::~Block() {
  finished_ = true;
  for (const auto& thread : threads_) switch_to(scheduler_, *thread);
}

void Block::add_thread() {
  auto thread = std::make_unique<Thread>();
  Thread& added = *thread;
  added.handle = boost::context::fiber(std::allocator_arg, StackAllocator(&added.stack),
                                       [this, &added](boost::context::fiber&& previous) {
                                         enter_stack(nullptr, previous_ == &scheduler_ ? &scheduler_.stack : nullptr);
                                         previous_->handle = std::move(previous);
                                         while (!finished_) {
                                           run_thread(added);
                                           switch_to(added, next());
                                         }
                                         previous_ = &added;
                                         leave_stack(nullptr, scheduler_.stack);
                                         return std::move(scheduler_.handle);
                                       });
  threads_.push_back(std::move(thread));
}

void Block::switch_to(Context& from, Context& to) {
  previous_ = &from;
  leave_stack(&from.kept, to.stack);
  boost::context::fiber previous = std::move(to.handle).resume();
  enter_stack(from.kept, nullptr);
  previous_->handle = std::move(previous);
}

Context& Block::begin(unsigned number) {
  Thread& thread = *threads_[number];
  current_ = number;
  threadIdx = thread.index;
  return thread;
}

// Lanes hand over to each other; the scheduler only has its turn when the warp's lanes all wait.
Context& Block::next() {
  const Warp& warp = warps_[warp_];
  while (warp.ready && failure_.empty()) {
    if (lanes_left_ == 0) {
      lanes_ = sweeps_.next(warp_threads);
      lanes_left_ = warp_threads;
    }
    --lanes_left_;
    const unsigned l = lanes_.next();
    if (warp.ready >> l & 1u) return begin(warp_ * warp_threads + l);
  }
  return scheduler_;
}

void Block::run_thread(Thread& thread) {
  thread.begun = true;
  try {
    launch_->kernel();
    if (thread.work.products.size() > 0) throw Failure("ends before warpgroup_wait");
  } catch (const Abandoned&) {
  } catch (const std::exception& error) {
    if (failure_.empty()) failure_ = "thread " + text(thread.index) + ": " + error.what();
  }
  thread.work.copies.clear();
  thread.work.products.clear();
  thread.ended = true;
  warps_[current_ / warp_threads].ready &= ~(1u << current_ % warp_threads);
}

void Block::suspend() {
  Thread& waiting = current();
  switch_to(waiting, next());
  if (abandoned_) throw Abandoned{};
}

void Block::wait(const Place& place, void (*kind)(), void* argument, std::uint32_t mask) {
  Thread& thread = current();
  thread.place = place;
  thread.kind = kind;
  thread.argument = argument;
  thread.mask = mask;
  warps_[current_ / warp_threads].ready &= ~(1u << current_ % warp_threads);
}

void Block::exchange(WarpExchange carry_out, void* argument, std::uint32_t mask, const Place& place) {
  Warp& warp = warps_[current_ / warp_threads];
  const unsigned first = current_ - current_ % warp_threads;
  const std::uint32_t bit = 1u << current_ % warp_threads;
  mask &= warp.threads;
  if (!(mask & bit)) throw Failure(std::string(place.operation) + ": the calling lane is not in the mask");
  const auto kind = reinterpret_cast<void (*)()>(carry_out);
  wait(place, kind, argument, mask);
  warp.exchanging |= bit;
  if ((warp.exchanging & mask) == mask) {
    std::array<void*, warp_threads> arguments{};
    bool same = true;
    for (std::uint32_t rest = mask; rest; rest &= rest - 1) {
      const auto l = static_cast<unsigned>(std::countr_zero(rest));
      const Thread& thread = *threads_[first + l];
      same = same && thread.kind == kind && thread.mask == mask;
      arguments[l] = thread.argument;
    }
    if (same) {
      carry_out(arguments, mask);
      warp.exchanging &= ~mask;
      warp.ready |= mask;
      return;
    }
  }
  suspend();
}

void Block::exchange(WarpgroupExchange carry_out, void* argument, const Place& place) {
  const unsigned group = current_ / warpgroup_threads, first = group * warpgroup_threads;
  if (first + warpgroup_threads > count_) throw Failure(std::string(place.operation) + ": not a whole warp-group");
  const auto kind = reinterpret_cast<void (*)()>(carry_out);
  wait(place, kind, argument, ~0u);
  if (++warpgroups_[group] == warpgroup_threads) {
    std::array<void*, warpgroup_threads> arguments{};
    bool same = true;
    for (unsigned t = 0; t < warpgroup_threads; ++t) {
      same = same && threads_[first + t]->kind == kind;
      arguments[t] = threads_[first + t]->argument;
    }
    if (same) {
      carry_out(arguments);
      warpgroups_[group] = 0;
      for (unsigned t = 0; t < warpgroup_threads; t += warp_threads) warps_[(first + t) / warp_threads].ready = ~0u;
      return;
    }
  }
  suspend();
}

void Block::barrier(const Place& place) {
  wait(place, nullptr, nullptr, 0);
  if (++arrived_ == count_) {
    arrived_ = 0;
    for (Warp& warp : warps_) warp.ready = warp.threads;
    return;
  }
  suspend();
}

void Block::run(const Launch& launch, uint3 index, std::uint64_t linear_index) {
  launch_ = &launch;
  count_ = launch.block.x * launch.block.y * launch.block.z;
  while (threads_.size() < count_) add_thread();
  warps_.assign((count_ + warp_threads - 1) / warp_threads, {});
  warpgroups_.assign(count_ / warpgroup_threads + 1, 0);
  arrived_ = 0;
  failure_.clear();
  for (unsigned t = 0; t < count_; ++t) {
    Thread& thread = *threads_[t];
    thread.index = {t % launch.block.x, t / launch.block.x % launch.block.y, t / launch.block.x / launch.block.y};
    thread.begun = thread.ended = false;
    thread.work.fenced = false;
    warps_[t / warp_threads].threads |= 1u << t % warp_threads;
  }
  for (Warp& warp : warps_) warp.ready = warp.threads;
  if (shared_bytes_ != launch.shared_bytes || !shared_) {
    void* memory = nullptr;
    if (launch.shared_bytes && posix_memalign(&memory, 1024, launch.shared_bytes) != 0) throw std::bad_alloc();
    shared_.reset(static_cast<std::byte*>(memory));
    shared_bytes_ = launch.shared_bytes;
  }
  if (shared_) std::memset(shared_.get(), 0xFF, shared_bytes_);
  blockIdx = index;
  blockDim = launch.block;
  gridDim = launch.grid;
  running = this;

  sweeps_ = Sweeps(launch.order, (launch.number << 32) + linear_index);
  for (bool moved = true; moved && failure_.empty();) {
    moved = false;
    Sweep over_warps = sweeps_.next(warps_.size());
    for (std::size_t i = 0; i < warps_.size() && failure_.empty(); ++i) {
      warp_ = over_warps.next();
      lanes_left_ = 0;
      if (!warps_[warp_].ready) continue;
      moved = true;
      switch_to(scheduler_, next());
    }
  }
  if (failure_.empty()) failure_ = stuck();
  if (!failure_.empty()) abandon();
  running = nullptr;
  if (!failure_.empty()) throw Failure("block " + text(index) + ": " + failure_);
}

void Block::abandon() {
  abandoned_ = true;
  for (unsigned t = 0; t < count_; ++t) {
    if (threads_[t]->begun && !threads_[t]->ended) switch_to(scheduler_, begin(t));
  }
  abandoned_ = false;
}

std::string Block::stuck() const {
  struct Waiting {
    std::string where, first;
    unsigned threads;
  };
  std::vector<Waiting> places;
  for (unsigned t = 0; t < count_; ++t) {
    const Thread& thread = *threads_[t];
    std::string where = "have ended";
    if (!thread.ended) {
      const std::source_location& source = thread.place.where;
      where = std::string("wait at ") + thread.place.operation + " (" + source.file_name() + ":" +
              std::to_string(source.line()) + ")";
      if (thread.mask && thread.mask != ~0u) where += " with mask " + std::to_string(thread.mask);
    }
    const auto same = std::find_if(places.begin(), places.end(), [&](const Waiting& w) { return w.where == where; });
    if (same == places.end()) {
      places.push_back({where, text(thread.index), 1});
    } else {
      ++same->threads;
    }
  }
  if (std::all_of(threads_.begin(), threads_.begin() + count_, [](const auto& t) { return t->ended; })) return {};
  std::string message = "no thread can go on:";
  for (const Waiting& waiting : places) {
    message += " " + std::to_string(waiting.threads) + " of " + std::to_string(count_) + " threads, the first " +
               waiting.first + ", " + waiting.where + ";";
  }
  message.pop_back();
  return message;
}

}  // namespace

void carry_out(const Launch& launch) {
  const std::uint64_t blocks = std::uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  const Sweep over_blocks = Sweeps(launch.order, launch.number << 32).next(blocks);
  std::atomic<bool> failed = false;
  std::string failure;
#pragma omp parallel for schedule(dynamic) if (blocks > 1)
  for (std::uint64_t i = 0; i < blocks; ++i) {
    if (failed) continue;
    const std::uint64_t linear = over_blocks[i];
    const uint3 index{static_cast<unsigned>(linear % launch.grid.x),
                      static_cast<unsigned>(linear / launch.grid.x % launch.grid.y),
                      static_cast<unsigned>(linear / launch.grid.x / launch.grid.y)};
    try {
      block_of_this_thread.run(launch, index, linear);
    } catch (const std::exception& error) {
#pragma omp critical(kvreplay_emulated_failure)
      {
        if (!failed) failure = error.what();
        failed = true;
      }
    }
  }
  if (failed) throw Failure(failure);
}

std::span<std::byte> shared_memory() { return running_block().shared(); }

void require_capability(int major, bool only, const char* instruction) {
  const int found = running_block().launch().major;
  if (only ? found != major : found < major) {
    throw Failure(std::string(instruction) + " needs compute capability " + std::to_string(major) + ", found " +
                  std::to_string(found));
  }
}

unsigned lane() { return running_block().current_number() % warp_threads; }

void exchange(WarpExchange carry_out, void* argument, std::uint32_t mask, const Place& place) {
  running_block().exchange(carry_out, argument, mask, place);
}

void exchange(WarpgroupExchange carry_out, void* argument, const Place& place) {
  running_block().exchange(carry_out, argument, place);
}

void block_barrier(const Place& place) { running_block().barrier(place); }

AsynchronousWork& asynchronous_work() { return running_block().current().work; }

}  // namespace emulated
