// What this machine offers.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>

#include "attention/backend.h"

namespace kvreplay {

int machine_threads();
std::size_t page_size();
/// Memory in all and what is free now, within the limit of a container where there is one.
std::size_t machine_memory();
std::size_t free_memory();
/// Bytes that fit on the disk that holds `path`, or would.
std::size_t free_disk(const std::filesystem::path& path);

/// The backend that "auto", "cpu" or "cuda[:N]" means here: its registered name. Throws Error{usage} for other words,
/// Error{capability} for a device that this build does not know.
std::string backend_of_device(const std::string& device);

/// Why the registered backend `name` does not run here; empty: it does.
std::string why_not(const std::string& name);

}  // namespace kvreplay
