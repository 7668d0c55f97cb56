#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "commands.h"
#include "error.h"
#include "policies/text/policy_source.h"
#include "program.h"
#include "sleeping_threads.h"

namespace {

/// Nothing that is thrown leaves one of OpenMP's threads; memory that ends there is no bug.
[[noreturn]] void end_at_once() {
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::bad_alloc&) {
    std::fputs("kvreplay: out of memory\n", stderr);
    _exit(static_cast<int>(kvreplay::Refusal::resources));
  } catch (...) {
    // A bug: the core shows where.
  }
  std::abort();
}

/// No file that is opened may take the place of a stream that the caller has closed.
void open_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(stream, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) std::abort();
}

}  // namespace

int main(int argc, char** argv) {
  using namespace kvreplay;
  const std::vector<std::string> words(argv + 1, argv + argc);
  open_closed_streams();
  restore_environment();
  std::set_terminate(end_at_once);
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is a full disk: the write fails and says so
  // A policy in Python runs inside Python, beside the same engine: it is given the whole command line. Policies are
  // read before anything else is done.
  python_policy_reader() = [&words](const std::string&, const std::string&) -> std::string {
    run_companion("python", words);
  };
  return run_program(argv[0], words);
}
