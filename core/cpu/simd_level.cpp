#include "cpu/simd_level.h"

#include <hwy/targets.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "error.h"
#include "nearest.h"

namespace kvreplay {
namespace {

std::atomic<const SimdLevel*> chosen_level = nullptr;

std::vector<SimdLevel> found_levels() {
  std::vector<SimdLevel> levels;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {  // best first
#if HWY_ARCH_X86
    if (target <= HWY_AVX3) {  // Highway numbers the better ones lower
      if (!levels.empty()) continue;
      if (__builtin_cpu_supports("avx512bf16")) levels.push_back({"AVX512_BF16", target, true});
      levels.push_back({"AVX512", target});
      continue;
    }
#endif
    levels.push_back({hwy::TargetName(target), target});
  }
  return levels;
}

}  // namespace

const std::vector<SimdLevel>& simd_levels() {
  static const std::vector<SimdLevel> levels = found_levels();
  return levels;
}

const SimdLevel& choose_simd_level() {
  const std::vector<SimdLevel>& levels = simd_levels();
  const char* const wanted = std::getenv("KVREPLAY_SIMD");
  const bool best = wanted == nullptr || *wanted == '\0';
  const auto chosen = best ? levels.begin() : std::ranges::find(levels, wanted, &SimdLevel::name);
  if (chosen == levels.end()) {
    std::vector<std::string> names;
    std::ranges::transform(levels, std::back_inserter(names), &SimdLevel::name);
    throw Error{Refusal::usage, "KVREPLAY_SIMD", "unknown SIMD level", nearest(wanted, names), wanted};
  }
  hwy::GetChosenTarget().Update(chosen->target);
  chosen_level = &*chosen;
  return *chosen;
}

const SimdLevel& simd_level() {
  const SimdLevel* const chosen = chosen_level;
  return chosen != nullptr ? *chosen : choose_simd_level();
}

}  // namespace kvreplay
