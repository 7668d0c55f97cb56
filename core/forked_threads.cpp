#include "forked_threads.h"

#include <pthread.h>

#include <atomic>

namespace kvreplay {
namespace {

std::atomic<bool> begun = false, lost = false;
[[maybe_unused]] const int at_fork = ::pthread_atfork(nullptr, nullptr, [] { lost = begun.load(); });

}  // namespace

void note_threads_begin() { begun = true; }
bool has_lost_threads() { return lost; }

}  // namespace kvreplay
