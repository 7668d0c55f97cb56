// SIMD levels in this binary that this machine can run: the kernels are compiled once for each of Highway's targets,
// and those of AVX-512 multiply pairs of bfloat16 numbers where the machine has the instruction.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvreplay {

struct SimdLevel {
  std::string name;         // AVX512_BF16, AVX512, AVX2, SSE4, SSSE3, SCALAR; NEON
  std::int64_t target = 0;  // Highway's
  bool bfloat16 = false;    // products of bfloat16 numbers on the instruction made for them
};

/// Best first, never empty.
const std::vector<SimdLevel>& simd_levels();

/// Chooses the best level, or the one that the environment variable KVREPLAY_SIMD names; from now on Highway's dispatch
/// takes the kernels of that level. Throws Error{usage} when it names none.
const SimdLevel& choose_simd_level();

/// That of the last choose_simd_level(), which is called if there was none.
const SimdLevel& simd_level();

}  // namespace kvreplay
