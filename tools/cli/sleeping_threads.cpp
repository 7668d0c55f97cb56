#include "sleeping_threads.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>

namespace kvreplay {
namespace {

bool is_set_here = false;

/// libgomp reads its settings in a constructor of the default priority, libomp when OpenMP is first used.
__attribute__((constructor(101))) void let_threads_sleep() {
  constexpr const char* settings[] = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"};
  if (std::ranges::any_of(settings, [](const char* name) { return std::getenv(name) != nullptr; })) return;
  is_set_here = ::setenv("OMP_WAIT_POLICY", "passive", 1) == 0;
}

}  // namespace

void restore_environment() {
  if (!is_set_here) return;
  omp_get_max_threads();  // libomp has read it from here on
  ::unsetenv("OMP_WAIT_POLICY");
}

}  // namespace kvreplay
