// Python's lock and the threads of the engine. A thread that asks for the lock when the interpreter is ending is ended
// by Python, in the middle of C++, which ends the process with "terminate called". So a thread that is in the engine
// then ends its work first, or sleeps until the process is gone.
#pragma once

#include <nanobind/nanobind.h>

namespace kvreplay::python {

/// Work of the engine without the lock, as nanobind::gil_scoped_release.
class Unlocked {
 public:
  Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked();

 private:
  PyThreadState* state_;
};

/// Python's objects from a thread of the engine, as nanobind::gil_scoped_acquire.
class Locked {
 public:
  Locked();
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked();

 private:
  PyGILState_STATE state_;
};

/// Whether Python has begun to end: no run should go on.
bool is_ending();

/// From now on Python, when it ends, waits for the engine's threads, for ten seconds at most.
void wait_at_exit();

}  // namespace kvreplay::python
