// What this build's device code is.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device_memory.h"

namespace kvreplay {

/// Whether the code that the device runs has Hopper's products of warp groups. Throws Error{capability} when this build
/// has no code for the device.
bool compiled_for_warp_groups(DeviceMemory& memory, cudaStream_t stream);

}  // namespace kvreplay
