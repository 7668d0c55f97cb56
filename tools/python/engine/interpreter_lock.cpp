#include "interpreter_lock.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace kvreplay::python {
namespace {

namespace nb = nanobind;

std::mutex mutex;
int working = 0;  // Unlocked objects
bool closed = false;
std::atomic<bool> ending = false;

/// Never destroyed: threads may wait for it when the process ends.
std::condition_variable& change() {
  static auto* const made = new std::condition_variable;
  return *made;
}

/// Returns while the interpreter still gives its lock to other threads, and in the thread that has it: at the end of
/// the interpreter, this thread deletes the traces in memory that are left.
void require_interpreter() {
  if (PyGILState_Check() != 0) return;
  {
    const std::scoped_lock lock(mutex);
    if (!closed) return;
  }
  for (;;) ::pause();
}

void end() {
  constexpr std::chrono::seconds most{10};
  ending = true;
  const nb::gil_scoped_release unlocked;
  std::unique_lock lock(mutex);
  change().wait_for(lock, most, [] { return working == 0; });
  closed = true;
}

}  // namespace

Unlocked::Unlocked() {
  {
    const std::scoped_lock lock(mutex);
    ++working;
  }
  state_ = PyEval_SaveThread();
}

Unlocked::~Unlocked() {
  const bool returns = !is_ending();
  if (returns) {
    require_interpreter();
    PyEval_RestoreThread(state_);
  }
  {
    const std::scoped_lock lock(mutex);
    --working;
    change().notify_all();
  }
  // Its work is done. In Python it would print, or not, that the run was interrupted, as the end of Python overtakes
  // it.
  while (!returns) ::pause();
}

Locked::Locked() {
  require_interpreter();
  state_ = PyGILState_Ensure();
}

Locked::~Locked() { PyGILState_Release(state_); }

bool is_ending() { return ending; }

void wait_at_exit() { nb::module_::import_("atexit").attr("register")(nb::cpp_function(end)); }

}  // namespace kvreplay::python
