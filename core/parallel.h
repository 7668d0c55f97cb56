// Independent pieces of work on several threads.
#pragma once

#include <cstddef>
#include <exception>
#include <vector>

namespace kvreplay {

/// work(i) for all i < count, on up to `threads` threads and in any order: what one call writes, no other may read or
/// write. [count] what each threw, null for nothing.
template <class Work>
std::vector<std::exception_ptr> side_by_side(int threads, std::size_t count, const Work& work) {
  std::vector<std::exception_ptr> thrown(count);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (std::size_t i = 0; i < count; ++i) {
    try {
      work(i);
    } catch (...) {
      thrown[i] = std::current_exception();
    }
  }
  return thrown;
}

}  // namespace kvreplay
