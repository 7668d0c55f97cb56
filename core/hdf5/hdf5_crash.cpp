#include "hdf5/hdf5_crash.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "error.h"
#include "hdf5/hdf5.h"

namespace kvreplay::hdf5 {
namespace {

/// A stack for the handler: recursion may have used up the other.
alignas(16) std::array<char, 1 << 16> stack;

bool within_hdf5() {
  std::array<void*, 64> frames;
  const int depth = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  for (int i = 0; i < depth; ++i) {
    Dl_info found{};
    if (::dladdr(frames[static_cast<std::size_t>(i)], &found) != 0 && found.dli_fname != nullptr &&
        std::strstr(found.dli_fname, "libhdf5") != nullptr)
      return true;
  }
  return false;
}

void say(const char* text) { static_cast<void>(!::write(STDERR_FILENO, text, std::strlen(text))); }

void on_crash(int signal) {
  if (*last_opened() == '\0' || !within_hdf5()) {
    ::raise(signal);  // which nobody handles any more, once this has returned
    return;
  }
  for (const char* text :
       {"kvreplay: ", last_opened(), ": damaged: expected an HDF5 file that the library can read, found it ends in ",
        ::sigdescr_np(signal), "\n"})
    say(text);
  ::_exit(static_cast<int>(Refusal::input));
}

}  // namespace

void refuse_crashes() {
  void* frame = nullptr;
  ::backtrace(&frame, 1);  // loads what it needs
  const stack_t own{.ss_sp = stack.data(), .ss_flags = 0, .ss_size = stack.size()};
  ::sigaltstack(&own, nullptr);
  struct sigaction action{};
  action.sa_handler = on_crash;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_ONSTACK);
  for (const int signal : {SIGSEGV, SIGABRT, SIGFPE}) ::sigaction(signal, &action, nullptr);
}

}  // namespace kvreplay::hdf5
