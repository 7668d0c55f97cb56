#include "hdf5/mapping.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <fstream>
#include <mutex>
#include <optional>
#include <utility>

#include "error.h"

namespace kvreplay {

/// Ranges are never freed, so that the handler can walk their list at any moment; a free one has no end.
struct WatchedRange {
  std::atomic<std::uintptr_t> begin = 0, end = 0;
  std::atomic<bool> lost = false;
  WatchedRange* next = nullptr;
};

namespace {

std::uint64_t page() {
  static const auto size = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

std::atomic<WatchedRange*> all_watched = nullptr;
struct sigaction before_us;

/// Where pages of a mapping are gone, zeros take the place of all that follow, and the access goes on. What is not ours
/// goes to the handler that was there before.
void fill_in(int, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (WatchedRange* range = all_watched.load(); range != nullptr; range = range->next) {
    const std::uintptr_t end = range->end.load();
    if (address < range->begin.load() || address >= end) continue;
    const std::uintptr_t first = address / page() * page();
    if (::mmap(reinterpret_cast<void*>(first), end - first, PROT_READ,
               MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED)
      break;
    range->lost.store(true);
    return;
  }
  // The access is tried again, and again fails.
  ::sigaction(SIGBUS, &before_us, nullptr);
}

WatchedRange* watch(const std::byte* base, std::uint64_t length) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  page();  // the handler must not be the first to ask
  struct sigaction installed{};
  ::sigaction(SIGBUS, nullptr, &installed);
  if (installed.sa_sigaction != fill_in) {
    struct sigaction ours{};
    ours.sa_sigaction = fill_in;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigaction(SIGBUS, &ours, &before_us);
  }
  WatchedRange* range = all_watched.load();
  while (range != nullptr && range->end.load() != 0) range = range->next;
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  if (range == nullptr) {
    range = new WatchedRange;
    range->next = all_watched.load();
    all_watched.store(range);
  }
  range->lost.store(false);
  range->begin.store(begin);
  range->end.store((begin + length + page() - 1) / page() * page());
  return range;
}

/// Pages of files that this process has mapped and resident; none: the system does not say.
std::optional<std::size_t> resident_file_bytes() noexcept {
  try {
    std::size_t all = 0, resident = 0, shared = 0;
    if (std::ifstream("/proc/self/statm") >> all >> resident >> shared)
      return shared * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  } catch (const std::exception&) {
    // Out of memory: as good as no answer.
  }
  return std::nullopt;
}

/// By all hardware threads at once; at most a millisecond.
std::chrono::microseconds time_to_read(std::size_t bytes) {
  const std::size_t bytes_a_microsecond = 30'000 * std::max<std::size_t>(1, std::thread::hardware_concurrency());
  return std::chrono::microseconds(std::min<std::size_t>(1000, bytes / bytes_a_microsecond));
}

}  // namespace

Mapping::Mapping(FileDescriptor file, std::uint64_t length, const std::string& where)
    : length_(length), file_(std::move(file)), where_(where), identity_(identity_of(file_, where)) {
  void* mapped = ::mmap(nullptr, length_, PROT_READ, MAP_PRIVATE | MAP_NORESERVE, file_.get(), 0);
  if (mapped == MAP_FAILED)
    throw Error{Refusal::resources, where, std::string("cannot be mapped: ") + std::strerror(errno)};
  base_ = static_cast<std::byte*>(mapped);
  // Read in large pages where the file system has them: fewer faults bring the bytes to a kernel.
  ::madvise(base_, length_, MADV_HUGEPAGE);
  watched_ = watch(base_, length_);
}

Mapping::Mapping(Mapping&& other) noexcept { *this = std::move(other); }

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(length_, other.length_);
  std::swap(file_, other.file_);
  std::swap(where_, other.where_);
  std::swap(identity_, other.identity_);
  std::swap(watched_, other.watched_);
  return *this;
}

Mapping::~Mapping() {
  if (base_ == nullptr) return;
  watched_->begin.store(0);
  watched_->end.store(0);
  ::munmap(base_, length_);
}

void Mapping::require_unchanged() const {
  if (base_ == nullptr) return;
  const FileIdentity now = identity_of(file_, where_);
  if (now.length != length_)
    throw Error{Refusal::input, where_, "changed while it was read", fmt::format("{} bytes", length_),
                fmt::format("{} bytes", now.length)};
  if (now.modified != identity_.modified)
    throw Error{Refusal::input, where_, "changed while it was read", "an unchanged file", "a later modification time"};
  if (watched_->lost.load()) throw Error{Refusal::input, where_, "a part of the file could not be read"};
}

void Mapping::read_ahead(std::uint64_t offset, std::uint64_t bytes) const {
  const std::uint64_t begin = offset / page() * page();
  ::madvise(base_ + begin, offset + bytes - begin, MADV_WILLNEED);
}

void Mapping::let_go(std::uint64_t offset, std::uint64_t bytes) const {
  const std::uint64_t begin = (offset + page() - 1) / page() * page(), end = (offset + bytes) / page() * page();
  if (begin < end) ::madvise(base_ + begin, end - begin, MADV_DONTNEED);
}

void Mapping::let_all_go() const { ::madvise(base_, length_, MADV_DONTNEED); }

MappedLimit::MappedLimit(const Mapping& mapping, std::size_t limit)
    : watcher_([&mapping, limit, before = resident_file_bytes().value_or(0)](const std::stop_token& stop) {
        const std::chrono::microseconds pause = time_to_read(limit / 2);
        while (!stop.stop_requested()) {
          const std::optional<std::size_t> now = resident_file_bytes();
          if (!now || *now > before + limit / 2) mapping.let_all_go();
          std::this_thread::sleep_for(pause);
        }
      }) {}

}  // namespace kvreplay
