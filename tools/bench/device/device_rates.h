// What the device itself can do: the most that a kernel can have of its multipliers and of its memory.
#pragma once

#include <string>

#include "tensor.h"

namespace kvreplay::bench {

struct DeviceFacts {
  std::string name;
  std::string capability;
  int processors = 0;
  double memory_bytes = 0;
  std::string driver;  // the newest CUDA that the driver serves
  std::string runtime;
};
DeviceFacts device_facts();

/// A rate a second, and the largest relative error of what was computed on the way.
struct DeviceRate {
  double rate = 0;
  double error = 0;
};

/// The ways to multiply of tiles.h.
enum class Products { warps, warp_groups };
bool has(Products products);

/// Operations, a product and a sum being two: the same tile of shared memory, or of registers, over and over.
DeviceRate product_rate(Products products, DType dtype);
/// The same of float32 fused products and sums.
DeviceRate float_rate();

/// Bytes read and written.
DeviceRate device_copy_rate();
/// Bytes copied, between pinned memory and the device.
DeviceRate to_device_rate();
DeviceRate from_device_rate();

}  // namespace kvreplay::bench
