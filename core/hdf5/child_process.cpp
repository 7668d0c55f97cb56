#include "hdf5/child_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include "error.h"
#include "open_file.h"

namespace kvreplay {
namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr int out_of_memory = 1;   // exit code of the child; that of an Error is its refusal, 0 that of a text
constexpr int between_looks = 20;  // ms

std::uint64_t address_space() {
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

void limit(decltype(RLIMIT_CPU) resource, std::uint64_t most) {
  rlimit now{};
  ::getrlimit(resource, &now);
  now.rlim_cur = std::min<rlim_t>(now.rlim_max, most);
  ::setrlimit(resource, &now);
}

void write_all(int to, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(to, text.data(), text.size());
    if (written < 0 && errno != EINTR) ::_exit(EXIT_FAILURE);
    text.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(written, 0)));
  }
}

/// What the child tells its parent of an error: its pieces, separated by NULs.
std::string pieces_of(const Error& error) {
  std::string text;
  for (const std::string* piece : {&error.where(), &error.problem(), &error.expected(), &error.found()})
    text += *piece + '\0';
  return text;
}

Error error_of(int refusal, const std::string& text) {
  std::array<std::string, 4> pieces;
  std::istringstream rest(text);
  for (std::string& piece : pieces) std::getline(rest, piece, '\0');
  return {static_cast<Refusal>(refusal), pieces[0], pieces[1], pieces[2], pieces[3]};
}

[[noreturn]] void be_the_child(pid_t parent, int to, const std::function<std::string()>& work, std::uint64_t seconds,
                               std::uint64_t memory) {
  // Locks of the parent are held by the child as well: it must not outlive a parent that is killed.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(EXIT_FAILURE);
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTERM, SIGXCPU}) std::signal(signal, SIG_DFL);
  std::signal(SIGINT, SIG_IGN);  // the parent handles it
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_CPU, seconds);
  limit(RLIMIT_AS, address_space() + memory);
  to = ::fcntl(to, F_DUPFD, STDERR_FILENO + 1);  // it may be one of the standard streams, if those were closed
  if (const int nowhere = ::open("/dev/null", O_WRONLY); nowhere >= 0) {
    ::dup2(nowhere, STDOUT_FILENO);
    ::dup2(nowhere, STDERR_FILENO);
  }
  try {
    write_all(to, work());
  } catch (const Error& error) {
    write_all(to, pieces_of(error));
    ::_exit(static_cast<int>(error.refusal()));
  } catch (const std::bad_alloc&) {
    ::_exit(out_of_memory);
  }
  ::_exit(EXIT_SUCCESS);
}

/// Killed, if it still runs, when this is destroyed.
class Child {
 public:
  explicit Child(pid_t id) : id_(id) {}
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (id_ < 0) return;
    ::kill(id_, SIGKILL);
    wait();
  }
  int wait() {
    int status = 0;
    while (::waitpid(id_, &status, 0) < 0 && errno == EINTR) {
    }
    id_ = -1;
    return status;
  }

 private:
  pid_t id_;
};

/// All that is written to the pipe, until it is closed.
std::string read_all(int from, const std::string& where, const std::function<bool()>& interrupted) {
  std::string all;
  std::array<char, 4096> some;
  for (;;) {
    if (interrupted()) throw Error{Refusal::interrupted, where, "interrupted"};
    pollfd ready{.fd = from, .events = POLLIN, .revents = 0};
    if (::poll(&ready, 1, between_looks) <= 0) continue;
    const ssize_t got = ::read(from, some.data(), some.size());
    if (got == 0 || (got < 0 && errno != EINTR)) return all;
    all.append(some.data(), static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  }
}

}  // namespace

std::string run_in_child(const std::filesystem::path& path, const std::function<std::string()>& work,
                         const std::function<bool()>& interrupted) {
  const std::string where = path.string();
  std::uint64_t length = 0;
  open_file(where, length);
  const std::uint64_t seconds = 60 + length / mib, memory = 1024 * mib + length;
  std::array<int, 2> ends{-1, -1};
  const auto lacking = [&] {
    return Error{Refusal::resources, where, std::string("cannot start a child process: ") + std::strerror(errno)};
  };
  if (::pipe2(ends.data(), O_CLOEXEC) < 0) throw lacking();
  const FileDescriptor from{ends[0]};
  std::optional<FileDescriptor> to{ends[1]};
  const pid_t parent = ::getpid(), made = ::fork();
  if (made < 0) throw lacking();
  if (made == 0) be_the_child(parent, to->get(), work, seconds, memory);
  Child child(made);
  to.reset();
  std::string text = read_all(from.get(), where, interrupted);
  const int status = child.wait();
  const auto damaged = [&](const std::string& found) {
    return Error{Refusal::input, where, "damaged", "an HDF5 file that the library can read", found};
  };
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGXCPU)
    throw damaged(fmt::format("more than {} seconds of CPU time needed", seconds));
  if (WIFSIGNALED(status)) throw damaged(fmt::format("a crash: {}", ::strsignal(WTERMSIG(status))));
  if (WEXITSTATUS(status) == out_of_memory)
    throw damaged(fmt::format("more than {} MiB of memory needed", memory / mib));
  if (WEXITSTATUS(status) != EXIT_SUCCESS) throw error_of(WEXITSTATUS(status), text);
  return text;
}

}  // namespace kvreplay
