#include "machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "error.h"
#include "nearest.h"
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

int machine_threads() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
  return static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
}

std::size_t page_size() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

std::size_t machine_memory() { return std::min(meminfo("MemTotal"), number_in(container_limit)); }

std::size_t free_memory() {
  const std::size_t limit = number_in(container_limit), used = number_in(container_use);
  const std::size_t within = limit == unlimited ? unlimited : limit - std::min(limit, used);
  return std::min(meminfo("MemAvailable"), within);
}

std::size_t free_disk(const std::filesystem::path& path) {
  std::filesystem::path there = std::filesystem::absolute(path);
  while (!std::filesystem::exists(there) && there.has_relative_path()) there = there.parent_path();
  return std::filesystem::space(there).available;
}

std::string backend_of_device(const std::string& device) {
  const std::string kind = device.substr(0, device.find(':'));
  if (kind == "auto" && kind == device) return backends().find("cuda") && why_not("cuda").empty() ? "cuda" : "cpu";
  if (kind == "cpu" && kind == device) return kind;
  if (kind != "cuda") throw Error{Refusal::usage, "--device", "unknown device", "auto, cpu or cuda[:N]", device};
  if (kind != device && parse_int("--device", device.substr(kind.size() + 1)) < 0)
    throw Error{Refusal::usage, "--device", "out of range", "cuda:0 or higher", device};
  if (backends().find("cuda") == nullptr)
    throw Error{Refusal::capability, "--device " + device, "no CUDA in this build", "--device cpu"};
  if (const std::string reason = why_not("cuda"); !reason.empty())
    throw Error{Refusal::capability, "--device " + device, reason};
  return kind;
}

std::string why_not(const std::string& name) {
  try {
    make_backend(name, 1);
    return {};
  } catch (const Error& error) {
    if (error.refusal() != Refusal::capability) throw;
    return error.what();
  }
}

}  // namespace kvreplay
