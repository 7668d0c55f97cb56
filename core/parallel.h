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

/// The same; throws what the first of the calls that threw has thrown.
template <class Work>
void all_side_by_side(int threads, std::size_t count, const Work& work) {
  for (const std::exception_ptr& thrown : side_by_side(threads, count, work))
    if (thrown) std::rethrow_exception(thrown);
}

}  // namespace kvreplay
