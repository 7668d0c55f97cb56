// Quantised keys and values in a number format, with options that all formats share.
#pragma once

#include <string>

#include "policies/allocators/skipped_layers.h"
#include "policies/policy.h"
#include "policies/stores/number_format.h"

namespace kvreplay {

/// The kept tokens of the prompt are stored in a number format, except the last `residual` ones of each head and those
/// of skipped layers. Tokens after the prompt are exact. Keys whose first components are the values are encoded once,
/// in the format of keys.
struct FormatStore {
  NumberFormat keys = {};
  NumberFormat values = {};
  int residual = 0;
  LayerList skip_layers = {};
  /// Rotation before encoding and back after decoding: "false"; "true": by the largest power of two that divides the
  /// head dimension, of values at most 64 (llama.cpp's rule if 64 divides it); or the size of blocks.
  std::string hadamard = "false";

  void parameters(Parameters& p);
  /// Its bytes: those of the formats, with scales; 16 bits for each exact number.
  StorePtr store(const std::string& name) const;
};

}  // namespace kvreplay
