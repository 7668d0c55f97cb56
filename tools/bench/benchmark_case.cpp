#include "benchmark_case.h"

#include <fmt/format.h>
#include <omp.h>

#include <cstdlib>
#include <set>

#include "cpu/simd_level.h"

namespace kvreplay::bench {

void add_at_every_level(Cases& cases, const std::string& name, Rate rate,
                        const std::function<Prepared(std::shared_ptr<Backend>)>& prepare) {
  for (const SimdLevel& level : simd_levels()) {
    for (const int threads : std::set{1, omp_get_num_procs()}) {
      cases.push_back({fmt::format("{}/{}/threads:{}", name, level.name, threads), rate, threads,
                       [prepare, level = std::string(level.name), threads] {
                         setenv("KVREPLAY_SIMD", level.c_str(), 1);
                         const std::shared_ptr<Backend> backend = make_backend("cpu", threads);
                         unsetenv("KVREPLAY_SIMD");
                         return prepare(backend);
                       }});
    }
  }
}

}  // namespace kvreplay::bench
