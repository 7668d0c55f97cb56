// Rotation by a Hadamard matrix before quantisation.
#pragma once

#include <span>

namespace kvreplay {

/// Multiplies each `block` numbers (a power of two) by H / sqrt(block), H(i, j) = (-1)^popcount(i & j): its own
/// inverse. Sums are float64 and rounded once; 1 / sqrt(block) is float32, as in llama.cpp.
void rotate_by_hadamard(std::span<float> vector, int block);

}  // namespace kvreplay
