#include "machine.h"

#include <omp.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>

#include "error.h"
#include "forked_threads.h"
#include "parameters.h"

namespace kvreplay {
namespace {

constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();

/// A number in a file of its own, or `unlimited`: "max", or no such file.
std::size_t number_in(const char* path) {
  std::size_t number = 0;
  return std::ifstream(path) >> number ? number : unlimited;
}

/// The line "NAME:   123 kB" of /proc/meminfo, in bytes.
std::size_t meminfo(const std::string& name) {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  std::size_t kilobytes = 0;
  while (file >> key >> kilobytes) {
    if (key == name + ":") return kilobytes * 1024;
    std::getline(file, unit);
  }
  return unlimited;
}

constexpr const char* container_limit = "/sys/fs/cgroup/memory.max";
constexpr const char* container_use = "/sys/fs/cgroup/memory.current";

}  // namespace

std::filesystem::path program_folder() {
  std::error_code problem;
  const std::filesystem::path folder = std::filesystem::read_symlink("/proc/self/exe", problem).parent_path();
  // auditwheel moves the program of a wheel into this folder; a script in bin starts it under the script's path.
  if (folder.filename() == "kvreplay.scripts")
    return std::filesystem::absolute(program_invocation_name, problem).lexically_normal().parent_path();
  return folder;
}

int machine_threads() {
  if (has_lost_threads()) return 1;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
  return static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
}

void read_openmp_settings() { omp_get_max_threads(); }

std::size_t page_size() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

std::size_t machine_memory() { return std::min(meminfo("MemTotal"), number_in(container_limit)); }

std::size_t free_addresses() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return unlimited;
  const std::size_t pages = number_in("/proc/self/statm");
  const std::size_t used = pages == unlimited ? 0 : pages * page_size();
  return limit.rlim_cur - std::min<std::size_t>(limit.rlim_cur, used);
}

std::size_t free_memory() {
  const std::size_t limit = number_in(container_limit), used = number_in(container_use);
  const std::size_t within = limit == unlimited ? unlimited : limit - std::min(limit, used);
  return std::min({meminfo("MemAvailable"), within, free_addresses()});
}

int affordable_threads(int wanted) {
  const std::size_t free = free_addresses();
  rlimit stack = {};
  if (free == unlimited || getrlimit(RLIMIT_STACK, &stack) != 0 || stack.rlim_cur == RLIM_INFINITY) return wanted;
  return static_cast<int>(std::clamp<std::size_t>(free / 2 / stack.rlim_cur, 1, static_cast<std::size_t>(wanted)));
}

std::size_t free_disk(const std::filesystem::path& path) {
  std::filesystem::path there = std::filesystem::absolute(path);
  while (!std::filesystem::exists(there) && there.has_relative_path()) there = there.parent_path();
  return std::filesystem::space(there).available;
}

Device find_device(const std::string& text) {
  const bool built = backends().find("cuda") != nullptr;
  if (text == "cpu") return {text, 0, ""};
  if (text == "auto") {
    if (!built) return {"cpu", 0, "CUDA is not in this build"};
    const std::string reason = why_not("cuda");
    return reason.empty() ? Device{"cuda", 0, "a CUDA device is available"} : Device{"cpu", 0, reason};
  }
  const std::string kind = text.substr(0, text.find(':'));
  if (kind != "cuda") throw Error{Refusal::usage, "--device", "unknown device", "auto, cpu or cuda[:N]", text};
  const int number = kind == text ? 0 : parse_int("--device", text.substr(kind.size() + 1));
  if (number < 0) throw Error{Refusal::usage, "--device", "out of range", "cuda:0 or a higher number", text};
  if (!built) throw Error{Refusal::capability, "--device " + text, "CUDA is not in this build", "--device cpu"};
  if (const std::string reason = why_not(kind, number); !reason.empty())
    throw Error{Refusal::capability, "--device " + text, reason};
  return {kind, number, ""};
}

std::string why_not(const std::string& name, int number) {
  try {
    make_backend(name, 1, {.number = number});
    return {};
  } catch (const Error& error) {
    if (error.refusal() != Refusal::capability) throw;
    return error.what();
  }
}

}  // namespace kvreplay
