#include "program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "build.h"
#include "commands.h"
#include "completion.h"
#include "error.h"
#include "machine.h"
#include "nearest.h"
#include "open_file.h"
#include "output.h"

namespace kvreplay {
namespace {

/// "1.2.3 (commit)".
std::string build_line() { return fmt::format("{} ({})", build_version, build_commit); }

/// Whether stdout is to be discarded: not where it is the answer.
bool discards_output(const Arguments& arguments) {
  return arguments.is_quiet() && arguments.command().writes_files && !arguments.given(json_option.name) &&
         !arguments.given("dry-run");
}

/// Discards stdout while it lives.
class DiscardedOutput {
 public:
  DiscardedOutput() : stdout_(dup(STDOUT_FILENO)) { redirect(open("/dev/null", O_WRONLY | O_CLOEXEC)); }
  ~DiscardedOutput() { redirect(stdout_); }
  DiscardedOutput(const DiscardedOutput&) = delete;
  DiscardedOutput& operator=(const DiscardedOutput&) = delete;

 private:
  static void redirect(int file) {
    std::fflush(stdout);
    dup2(file, STDOUT_FILENO);
    close(file);
  }
  int stdout_;
};

int print_version() {
  fmt::print("kvreplay {}\n", build_line());
  return 0;
}

int run_command(const std::string& program, const std::vector<std::string>& words) {
  if (words.empty() || words.front() == "--help" || words.front() == "-h") {
    print_overview();
    return 0;
  }
  const auto command_word =
      std::ranges::find_if_not(words, [](const std::string& word) { return word == "-q" || word == "--quiet"; });
  if (command_word != words.begin() && command_word != words.end()) {
    std::vector<std::string> reordered = words;
    std::rotate(reordered.begin(), reordered.begin() + (command_word - words.begin()),
                reordered.begin() + (command_word - words.begin()) + 1);
    return run_command(program, reordered);
  }
  const std::string& name = words.front();
  if (name == "--version" || name == "-V") return print_version();
  const std::vector<std::string> rest(words.begin() + 1, words.end());
  if (name == "--complete") {
    print_candidates(rest);
    return 0;
  }
  const Command* command = find_command(name);
  if (command == nullptr && name.starts_with('-'))
    throw Error{Refusal::usage, name, "unknown option before the command",
                "--help, --version, or kvreplay COMMAND OPTIONS"};
  if (command == nullptr) run_companion(name, rest);

  const Arguments arguments(*command, program, rest);
  if (arguments.given(help_option.name)) {
    print_help(*command);
    return 0;
  }
  if (arguments.given(version_option.name)) return print_version();
  const std::optional<DiscardedOutput> discarded =
      discards_output(arguments) ? std::make_optional<DiscardedOutput>() : std::nullopt;
  return command->run(arguments);
}

/// HDF5 does not survive an allocation that fails: some room there must be before it begins.
void require_addresses() {
  constexpr std::size_t least = std::size_t{16} << 20;
  if (const std::size_t free = free_addresses(); free < least)
    throw Error{Refusal::resources, "address space", "too small (ulimit -v)", size_text(least) + " free",
                size_text(free)};
}

const Error cannot_be_written{Refusal::resources, "standard output", "cannot be written"};

/// The exit code, once all of stdout is where it should be.
int flushed(int code) {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) throw cannot_be_written;
  return code;
}

int refused(const std::string& line, Refusal refusal) {
  say("kvreplay: {}\n", line);
  if (refusal == Refusal::internal)
    say("kvreplay: this is a bug of kvreplay {}: please report the command line, these lines and the "
        "output of \"kvreplay doctor\"\n",
        build_line());
  return static_cast<int>(refusal);
}

}  // namespace

int run_program(const std::string& program, const std::vector<std::string>& words) {
  try {
    require_addresses();
    return flushed(run_command(program, words));
  } catch (const Error& error) {
    return refused(error.what(), error.refusal());
  } catch (const std::bad_alloc&) {
    return refused("out of memory", Refusal::resources);
  } catch (const std::filesystem::filesystem_error& error) {
    const Refusal refusal = means_resources(error.code().value()) ? Refusal::resources : Refusal::input;
    return refused(Error{refusal, error.path1().string(), error.code().message()}.what(), refusal);
  } catch (const std::exception& error) {
    // What is longer than the stream's buffer is written, and thrown by fmt, before it is flushed.
    if (std::ferror(stdout) != 0) return refused(cannot_be_written.what(), cannot_be_written.refusal());
    return refused(error.what(), Refusal::internal);
  }
}

}  // namespace kvreplay
