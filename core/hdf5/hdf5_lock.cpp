#include "hdf5/hdf5_lock.h"

#include <pthread.h>

#include <mutex>

namespace kvreplay::hdf5 {
namespace {

std::mutex mutex;
/// A recursive mutex names its owner by a number that changes in a forked child; this count does not.
thread_local int locks_held = 0;

void lock() {
  if (locks_held++ == 0) mutex.lock();
}

void unlock() {
  if (--locks_held == 0) mutex.unlock();
}

/// Python, too, may fork this process.
[[maybe_unused]] const int fork_waits = ::pthread_atfork(lock, unlock, unlock);

}  // namespace

Lock::Lock() { lock(); }
Lock::~Lock() { unlock(); }

}  // namespace kvreplay::hdf5
