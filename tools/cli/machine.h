// What this machine offers.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

#include "attention/backend.h"

namespace kvreplay {

/// The folder of this program, for a wheel that of its script; empty: the system does not say.
std::filesystem::path program_folder();
/// Cores that this process may use; 1 in a forked process that has lost its threads.
int machine_threads();
/// libgomp has read the environment when it was loaded, libomp does so here, unless OpenMP was used before.
void read_openmp_settings();
std::size_t page_size();
/// Memory in all and what is free now, within the limits of a container and of the process where there are some.
std::size_t machine_memory();
std::size_t free_memory();
/// What `ulimit -v` leaves of the address space.
std::size_t free_addresses();
/// As many of `wanted` threads as leave the work at least as much of a limited address space as their stacks take.
int affordable_threads(int wanted);
/// Bytes that fit on the disk that holds `path`, or would.
std::size_t free_disk(const std::filesystem::path& path);

/// What computes: a registered backend, and the device where it has several.
struct Device {
  std::string backend;
  int number = 0;
  std::string reason;  // why "auto" means it; empty: it was asked for
};

/// What "auto", "cpu" or "cuda[:N]" means here. Throws Error{usage} for other words, Error{capability} for a device
/// that this build or this machine does not have.
Device find_device(const std::string& text);

/// Why the registered backend `name` does not run here; empty: it does.
std::string why_not(const std::string& name, int number = 0);

}  // namespace kvreplay
