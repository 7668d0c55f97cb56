#include "emulated_runtime.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct CUstream_st {};
struct CUevent_st {};

namespace emulated {
namespace {

using Operation = std::function<void()>;

/// Operations in order; `issued` counts all that there ever were, `done` those that were carried out.
struct Stream : CUstream_st {
  std::deque<Operation> queue;
  std::uint64_t issued = 0, done = 0;
  bool destroyed = false;
};

/// One cudaEventRecord: reached when [number] operations of the stream are done.
struct Record {
  std::shared_ptr<Stream> stream;
  std::uint64_t number = 0;
  std::chrono::steady_clock::time_point time{};
};

struct Event : CUevent_st {
  bool timing = true;
  std::shared_ptr<Record> record;
};

struct Allocation {
  explicit Allocation(std::size_t bytes_) : bytes(bytes_) {
    void* fresh = nullptr;
    if (posix_memalign(&fresh, 512, bytes) != 0) throw std::bad_alloc();
    memory = static_cast<std::byte*>(fresh);
    std::memset(memory, 0xFF, bytes);
  }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  ~Allocation() { std::free(memory); }

  std::byte* memory;
  std::size_t bytes;
};

struct Allocations {
  std::map<std::uintptr_t, std::shared_ptr<Allocation>> of_address;
  std::size_t bytes = 0, peak = 0;

  void* add(std::size_t size) {
    auto allocation = std::make_shared<Allocation>(size);
    void* memory = allocation->memory;
    of_address.emplace(reinterpret_cast<std::uintptr_t>(memory), std::move(allocation));
    bytes += size;
    peak = std::max(peak, bytes);
    return memory;
  }

  bool remove(void* memory) {
    const auto found = of_address.find(reinterpret_cast<std::uintptr_t>(memory));
    if (found == of_address.end()) return false;
    bytes -= found->second->bytes;
    of_address.erase(found);
    return true;
  }

  /// The allocation that holds the byte at [address].
  std::shared_ptr<Allocation> at(const void* address) const {
    const auto wanted = reinterpret_cast<std::uintptr_t>(address);
    auto next = of_address.upper_bound(wanted);
    if (next == of_address.begin()) return nullptr;
    --next;
    return wanted < next->first + next->second->bytes ? next->second : nullptr;
  }
};

bool holds(const std::shared_ptr<Allocation>& allocation, const void* address, std::size_t bytes) {
  return allocation && static_cast<const std::byte*>(address) + bytes <= allocation->memory + allocation->bytes;
}

/// Fails the device: the error stays.
struct DeviceFailure : std::runtime_error {
  DeviceFailure(cudaError_t error_, const std::string& text) : std::runtime_error(text), error(error_) {}
  cudaError_t error;
};

bool of_kernels(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
      return true;
    default:
      return false;
  }
}

/// CUDA C++ Programming Guide, "Technical specifications per compute capability".
std::size_t shared_bytes_per_multiprocessor(int major, int minor) {
  if (major == 7) return std::size_t{64 + 1} << 10;
  if (major == 8 && minor == 0) return std::size_t{164} << 10;
  if (major == 8 || major >= 12) return std::size_t{100} << 10;
  return std::size_t{228} << 10;
}

Order order_of_environment() {
  const char* text = std::getenv("KVREPLAY_EMULATED_ORDER");
  if (!text || std::string(text) == "forward") return forward;
  if (std::string(text) == "backward") return backward;
  char* end = nullptr;
  const std::uint64_t seed = std::strtoull(text, &end, 10);
  if (*text < '0' || *text > '9' || *end) {
    throw std::invalid_argument("KVREPLAY_EMULATED_ORDER: expected forward, backward or a seed, found " +
                                std::string(text));
  }
  return shuffled(seed);
}

constinit thread_local cudaError_t last_error = cudaSuccess;
constinit thread_local bool in_host_function = false;

class Device {
 public:
  struct Settings {
    Order order = order_of_environment();
    std::size_t memory = std::size_t{1} << 30;
    int major = 9, minor = 0;
    cudaError_t count_error = cudaSuccess;
    int calls = 0, failing_call = 0;
    cudaError_t failing_error = cudaSuccess;
  };

  std::mutex state;  // all members below; never held while an operation runs
  Settings settings;
  Allocations device, host;
  std::map<cudaEvent_t, std::unique_ptr<Event>> events;
  std::map<const void*, std::size_t> shared_bytes_of_kernel;
  cudaError_t failed = cudaSuccess;
  std::uint64_t launches = 0;

  ~Device() {
    for (const auto& stream : streams_) drop(*stream);  // operations hold on to streams
  }

  void reset() {
    const std::scoped_lock lock(execution_, state);
    settings = {};
    for (const auto& stream : streams_) drop(*stream);
    streams_ = {std::make_shared<Stream>()};
    events.clear();
    device = {};
    host = {};
    failed = cudaSuccess;
    launches = 0;
  }

  int handles() const {
    const auto alive = std::count_if(streams_.begin(), streams_.end(), [](const auto& s) { return !s->destroyed; });
    return static_cast<int>(alive - 1) + static_cast<int>(events.size());
  }

  cudaStream_t add_stream() { return streams_.emplace_back(std::make_shared<Stream>()).get(); }

  std::shared_ptr<Stream> stream(cudaStream_t handle) const {
    if (!handle) return streams_.front();
    for (const auto& stream : streams_) {
      if (stream.get() == handle) return stream->destroyed ? nullptr : stream;
    }
    return nullptr;
  }

  Event* event(cudaEvent_t handle) const {
    const auto found = events.find(handle);
    return found == events.end() ? nullptr : found->second.get();
  }

  std::uint64_t enqueue(Stream& stream, Operation operation) {
    stream.queue.push_back(std::move(operation));
    return ++stream.issued;
  }

  /// Carries out [number] operations of the stream, and what they wait for: called by operations.
  void reach(const std::shared_ptr<Stream>& stream, std::uint64_t number) {
    for (;;) {
      Operation operation;
      {
        const std::lock_guard lock(state);
        if (stream->done >= number || stream->queue.empty()) return;
        operation = std::move(stream->queue.front());
        stream->queue.pop_front();
      }
      operation();
      const std::lock_guard lock(state);
      ++stream->done;
    }
  }

  /// What a synchronisation does; none of it needs the state's lock. nullptr: all streams.
  cudaError_t synchronize(std::shared_ptr<Stream> wanted, std::uint64_t number) {
    const std::lock_guard lock(execution_);
    std::vector<std::shared_ptr<Stream>> first;
    {
      const std::lock_guard state_lock(state);
      if (failed) return failed;
      for (std::size_t i = streams_.size(); i-- > 0;) {
        const bool ahead =
            settings.order.kind == Order::Kind::backward || (settings.order.kind == Order::Kind::shuffled && coin());
        if (!wanted || (ahead && streams_[i] != wanted)) first.push_back(streams_[i]);
      }
      if (settings.order.kind == Order::Kind::forward) std::reverse(first.begin(), first.end());
    }
    try {
      for (const auto& stream : first) reach(stream, std::numeric_limits<std::uint64_t>::max());
      if (wanted) reach(wanted, number);
    } catch (const DeviceFailure& failure) {
      fail(failure.error, failure.what());
    } catch (const Failure& failure) {
      fail(cudaErrorLaunchFailure, failure.what());
    }
    const std::lock_guard state_lock(state);
    std::erase_if(streams_, [](const auto& stream) { return stream->destroyed && stream->queue.empty(); });
    return failed;
  }

 private:
  bool coin() {
    coins_ = coins_ * 6364136223846793005 + settings.order.seed * 2 + 1;
    return coins_ >> 63 != 0;
  }

  static void drop(Stream& stream) {
    stream.queue.clear();
    stream.done = stream.issued;
  }

  void fail(cudaError_t error, const char* text) {
    std::fprintf(stderr, "emulated device: %s: %s\n", cudaGetErrorName(error), text);
    const std::lock_guard lock(state);
    failed = error;
    for (const auto& stream : streams_) drop(*stream);
  }

  std::mutex execution_;  // taken before the state's: one thread at a time carries out operations
  std::vector<std::shared_ptr<Stream>> streams_ = {std::make_shared<Stream>()};  // the first is the null stream
  std::uint64_t coins_ = 0;
};

Device& device() {
  static Device device;
  return device;
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

/// What every call does first. True: the call ends with [error].
bool refused(Device& d, cudaError_t& error) {
  if (in_host_function) return error = cudaErrorNotPermitted, true;
  ++d.settings.calls;
  if (d.settings.count_error) return error = d.settings.count_error, true;
  if (d.failed) return error = d.failed, true;
  if (d.settings.failing_call == 0 || --d.settings.failing_call > 0) return false;
  error = d.settings.failing_error;
  if (of_kernels(error)) d.failed = error;
  return true;
}

/// A call that is done when it returns: [body] runs under the state's lock.
template <class Body>
cudaError_t call(Body body) {
  Device& d = device();
  const std::lock_guard lock(d.state);
  cudaError_t error = cudaSuccess;
  return remember(refused(d, error) ? error : body(d));
}

/// A call that adds an operation to a stream: [body] makes it, or returns an error.
template <class Body>
cudaError_t queue(cudaStream_t handle, Body body) {
  return call([&](Device& d) {
    const auto stream = d.stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    return body(d, *stream, stream);
  });
}

/// An error that fail_call asked for at a call that only queues.
bool fails_later(Device& d, cudaStream_t handle) {
  const std::lock_guard lock(d.state);
  if (in_host_function || d.failed || d.settings.count_error || d.settings.failing_call != 1) return false;
  const cudaError_t error = d.settings.failing_error;
  const auto stream = d.stream(handle);
  if (!of_kernels(error) || !stream) return false;
  ++d.settings.calls;
  d.settings.failing_call = 0;
  d.enqueue(*stream, [error] { throw DeviceFailure(error, "as fail_call asked for"); });
  return true;
}

/// A call that waits: [target] says for which stream and how far.
template <class Target>
cudaError_t synchronizing(Target target) {
  Device& d = device();
  std::shared_ptr<Stream> stream;
  std::uint64_t number = 0;
  cudaError_t error = cudaSuccess;
  {
    const std::lock_guard lock(d.state);
    if (refused(d, error)) return remember(error);
    bool waits = true;
    error = target(d, stream, number, waits);
    if (error || !waits) return remember(error);
  }
  return remember(d.synchronize(stream, number));
}

/// Keeps [bytes] from an address on in sight until an operation uses them: on the device they must lie in one live
/// allocation; pinned memory of the host must still be there when the operation is carried out.
struct Range {
  std::weak_ptr<Allocation> pinned;
  bool watched = false;

  cudaError_t find(const Device& d, const void* address, std::size_t bytes, bool on_device) {
    const auto of_device = d.device.at(address);
    if (on_device) return holds(of_device, address, bytes) ? cudaSuccess : cudaErrorInvalidValue;
    if (of_device || !address) return cudaErrorInvalidValue;
    const auto of_host = d.host.at(address);
    if (of_host && !holds(of_host, address, bytes)) return cudaErrorInvalidValue;
    pinned = of_host;
    watched = of_host != nullptr;
    return cudaSuccess;
  }

  std::shared_ptr<Allocation> held() const {
    auto allocation = pinned.lock();
    if (watched && !allocation)
      throw DeviceFailure(cudaErrorIllegalAddress, "a copy's host memory was freed before it");
    return allocation;
  }
};

cudaError_t copy(void* target, std::size_t target_pitch, const void* source, std::size_t source_pitch,
                 std::size_t width, std::size_t height, cudaMemcpyKind kind, cudaStream_t handle) {
  if (fails_later(device(), handle)) return cudaSuccess;
  return queue(handle, [&](Device& d, Stream& stream, const auto&) {
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
    if (width > target_pitch || width > source_pitch) return cudaErrorInvalidPitchValue;
    if (width == 0 || height == 0) return cudaSuccess;
    const auto on_device = [&](const void* address, cudaMemcpyKind other) {
      return kind == cudaMemcpyDefault ? d.device.at(address) != nullptr
                                       : kind == other || kind == cudaMemcpyDeviceToDevice;
    };
    Range to, from;
    if (const auto error =
            to.find(d, target, (height - 1) * target_pitch + width, on_device(target, cudaMemcpyHostToDevice))) {
      return error;
    }
    if (const auto error =
            from.find(d, source, (height - 1) * source_pitch + width, on_device(source, cudaMemcpyDeviceToHost))) {
      return error;
    }
    d.enqueue(stream, [=] {
      const auto held_to = to.held(), held_from = from.held();
      for (std::size_t row = 0; row < height; ++row) {
        std::memcpy(static_cast<std::byte*>(target) + row * target_pitch,
                    static_cast<const std::byte*>(source) + row * source_pitch, width);
      }
    });
    return cudaSuccess;
  });
}

struct Name {
  cudaError_t error;
  const char* name;
  const char* text;
};

constexpr Name names[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidPitchValue, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorHardwareStackError, "cudaErrorHardwareStackError", "hardware stack error"},
    {cudaErrorIllegalInstruction, "cudaErrorIllegalInstruction", "an illegal instruction was encountered"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const Name* name_of(cudaError_t error) {
  const auto* found = std::find_if(std::begin(names), std::end(names), [&](const Name& n) { return n.error == error; });
  return found == std::end(names) ? nullptr : found;
}

template <class Change>
void change(Change change) {
  const std::lock_guard lock(device().state);
  change(device().settings);
}

}  // namespace

void set_order(Order order) {
  change([&](auto& settings) { settings.order = order; });
}
void set_memory(std::size_t bytes) {
  change([&](auto& settings) { settings.memory = bytes; });
}
void set_capability(int major, int minor) {
  change([&](auto& settings) { settings.major = major, settings.minor = minor; });
}
void set_device_count_error(cudaError error) {
  change([&](auto& settings) { settings.count_error = error; });
}
void fail_call(int n, cudaError error) {
  change([&](auto& settings) { settings.failing_call = n, settings.failing_error = error; });
}
int calls() {
  const std::lock_guard lock(device().state);
  return device().settings.calls;
}
std::size_t allocated() {
  const std::lock_guard lock(device().state);
  return device().device.bytes;
}
std::size_t peak_allocated() {
  const std::lock_guard lock(device().state);
  return device().device.peak;
}
std::size_t host_allocated() {
  const std::lock_guard lock(device().state);
  return device().host.bytes;
}
int handles() {
  const std::lock_guard lock(device().state);
  return device().handles();
}
void reset() {
  device().reset();
  last_error = cudaSuccess;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> thread) {
  if (fails_later(device(), config.stream)) return cudaSuccess;
  return queue(config.stream, [&](Device& d, Stream& stream, const auto&) {
    const dim3 grid = config.gridDim, block = config.blockDim;
    if (config.numAttrs != 0) return cudaErrorNotSupported;
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7FFFFFFFu || grid.y > 65535 || grid.z > 65535 || !block.x ||
        !block.y || !block.z || block.x > 1024 || block.y > 1024 || block.z > 64 ||
        block.x * block.y * block.z > 1024) {
      return cudaErrorInvalidConfiguration;
    }
    const auto allowed = d.shared_bytes_of_kernel.find(kernel);
    std::size_t limit = std::size_t{48} << 10;
    if (allowed != d.shared_bytes_of_kernel.end()) limit = std::max(limit, allowed->second);
    if (config.dynamicSmemBytes > limit) return cudaErrorInvalidValue;
    const Launch launch{std::move(thread), grid, block, config.dynamicSmemBytes, d.launches++, d.settings.major,
                        d.settings.order};
    d.enqueue(stream, [launch] { carry_out(launch); });
    return cudaSuccess;
  });
}

}  // namespace emulated

using namespace emulated;

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  return call([&](Device&) { return *count = 1, cudaSuccess; });
}

cudaError_t cudaSetDevice(int number) {
  return call([&](Device&) { return number == 0 ? cudaSuccess : cudaErrorInvalidDevice; });
}

cudaError_t cudaGetDevice(int* number) {
  return call([&](Device&) { return *number = 0, cudaSuccess; });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int number) {
  return call([&](Device& d) {
    if (number != 0) return cudaErrorInvalidDevice;
    const std::size_t shared_bytes = shared_bytes_per_multiprocessor(d.settings.major, d.settings.minor);
    *properties = {.name = "emulated device",
                   .totalGlobalMem = d.settings.memory,
                   .major = d.settings.major,
                   .minor = d.settings.minor,
                   .multiProcessorCount = 4,
                   .pciBusID = 0,
                   .pciDeviceID = 0,
                   .pciDomainID = 0,
                   .l2CacheSize = 4 << 20,
                   .sharedMemPerMultiprocessor = shared_bytes,
                   .sharedMemPerBlockOptin = shared_bytes - 1024};
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int number) {
  return call([&](Device& d) {
    if (number != 0) return cudaErrorInvalidDevice;
    const auto shared_bytes = static_cast<int>(shared_bytes_per_multiprocessor(d.settings.major, d.settings.minor));
    switch (attribute) {
      case cudaDevAttrMultiProcessorCount:
        *value = 4;
        return cudaSuccess;
      case cudaDevAttrL2CacheSize:
        *value = 4 << 20;
        return cudaSuccess;
      case cudaDevAttrComputeCapabilityMajor:
        *value = d.settings.major;
        return cudaSuccess;
      case cudaDevAttrComputeCapabilityMinor:
        *value = d.settings.minor;
        return cudaSuccess;
      case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = shared_bytes;
        return cudaSuccess;
      case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = shared_bytes - 1024;
        return cudaSuccess;
    }
    return cudaErrorInvalidValue;
  });
}

cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }

cudaError_t cudaDeviceSynchronize() {
  return synchronizing([](Device&, auto&, auto&, bool&) { return cudaSuccess; });
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return call([&](Device& d) {
    *total = d.settings.memory;
    *free = d.settings.memory - std::min(d.settings.memory, d.device.bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  return call([&](Device& d) {
    *memory = nullptr;
    if (bytes > d.settings.memory - std::min(d.settings.memory, d.device.bytes)) return cudaErrorMemoryAllocation;
    if (bytes > 0) *memory = d.device.add(bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaFree(void* memory) {
  if (!memory) return call([](Device&) { return cudaSuccess; });
  const cudaError_t error = cudaDeviceSynchronize();
  if (error) return error;
  const std::lock_guard lock(device().state);
  return remember(device().device.remove(memory) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMallocHost(void** memory, std::size_t bytes, unsigned) {
  return call([&](Device& d) {
    *memory = bytes > 0 ? d.host.add(bytes) : nullptr;
    return cudaSuccess;
  });
}

cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags) {
  return cudaMallocHost(memory, bytes, flags);
}

cudaError_t cudaFreeHost(void* memory) {
  return call([&](Device& d) { return !memory || d.host.remove(memory) ? cudaSuccess : cudaErrorInvalidValue; });
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy(target, bytes, source, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void* target, std::size_t target_pitch, const void* source, std::size_t source_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(target, target_pitch, source, source_pitch, width, height, kind, stream);
}

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t handle) {
  if (fails_later(device(), handle)) return cudaSuccess;
  return queue(handle, [&](Device& d, Stream& stream, const auto&) {
    if (bytes == 0) return cudaSuccess;
    if (!holds(d.device.at(memory), memory, bytes)) return cudaErrorInvalidValue;
    d.enqueue(stream, [=] { std::memset(memory, value, bytes); });
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return call([&](Device& d) {
    if (flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
    return *stream = d.add_stream(), cudaSuccess;
  });
}

// What is queued is still carried out, when all streams are waited for.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return call([&](Device& d) {
    const auto stream = d.stream(handle);
    if (!stream || !handle) return cudaErrorInvalidResourceHandle;
    return stream->destroyed = true, cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return synchronizing([&](Device& d, std::shared_ptr<Stream>& stream, std::uint64_t& number, bool&) {
    stream = d.stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    return number = stream->issued, cudaSuccess;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  if (fails_later(device(), handle)) return cudaSuccess;
  return queue(handle, [&](Device& d, Stream& stream, const auto&) {
    const Event* event = d.event(event_handle);
    if (!event) return cudaErrorInvalidResourceHandle;
    if (!event->record) return cudaSuccess;
    d.enqueue(stream, [&d, record = event->record] { d.reach(record->stream, record->number); });
    return cudaSuccess;
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  if (fails_later(device(), handle)) return cudaSuccess;
  return queue(handle, [&](Device& d, Stream& stream, const auto&) {
    if (!function) return cudaErrorInvalidValue;
    d.enqueue(stream, [=] {
      in_host_function = true;
      function(argument);
      in_host_function = false;
    });
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  return call([&](Device& d) {
    if (flags > (cudaEventBlockingSync | cudaEventDisableTiming)) return cudaErrorInvalidValue;
    auto event = std::make_unique<Event>();
    event->timing = !(flags & cudaEventDisableTiming);
    *handle = event.get();
    d.events.emplace(*handle, std::move(event));
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  return call([&](Device& d) { return d.events.erase(handle) ? cudaSuccess : cudaErrorInvalidResourceHandle; });
}

cudaError_t cudaEventRecord(cudaEvent_t event_handle, cudaStream_t handle) {
  if (fails_later(device(), handle)) return cudaSuccess;
  return queue(handle, [&](Device& d, Stream& stream, const std::shared_ptr<Stream>& shared) {
    Event* event = d.event(event_handle);
    if (!event) return cudaErrorInvalidResourceHandle;
    event->record = std::make_shared<Record>();
    event->record->stream = shared;
    event->record->number = d.enqueue(stream, [&d, record = event->record] {
      const std::lock_guard lock(d.state);
      record->time = std::chrono::steady_clock::now();
    });
    return cudaSuccess;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return synchronizing([&](Device& d, std::shared_ptr<Stream>& stream, std::uint64_t& number, bool& waits) {
    const Event* event = d.event(handle);
    if (!event) return cudaErrorInvalidResourceHandle;
    waits = event->record != nullptr;
    if (waits) stream = event->record->stream, number = event->record->number;
    return cudaSuccess;
  });
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return call([&](Device& d) {
    const Event* event = d.event(handle);
    if (!event) return cudaErrorInvalidResourceHandle;
    const Record* record = event->record.get();
    return !record || record->stream->done >= record->number ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start_handle, cudaEvent_t end_handle) {
  return call([&](Device& d) {
    const Event *start = d.event(start_handle), *end = d.event(end_handle);
    if (!start || !end || !start->timing || !end->timing || !start->record || !end->record) {
      return cudaErrorInvalidResourceHandle;
    }
    for (const Event* event : {start, end}) {
      if (event->record->stream->done < event->record->number) return cudaErrorNotReady;
    }
    *milliseconds = std::chrono::duration<float, std::milli>(end->record->time - start->record->time).count();
    return cudaSuccess;
  });
}

const char* cudaGetErrorName(cudaError_t error) {
  const Name* name = name_of(error);
  return name ? name->name : "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  const Name* name = name_of(error);
  return name ? name->text : "unrecognized error code";
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  return call([&](Device&) { return *attributes = {1024}, cudaSuccess; });
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  return call([&](Device& d) {
    const std::size_t most = shared_bytes_per_multiprocessor(d.settings.major, d.settings.minor) - 1024;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
        static_cast<std::size_t>(value) > most) {
      return cudaErrorInvalidValue;
    }
    d.shared_bytes_of_kernel[kernel] = static_cast<std::size_t>(value);
    return cudaSuccess;
  });
}
