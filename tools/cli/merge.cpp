#include "analysis/merge.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "analysis/run_json.h"
#include "arguments.h"
#include "commands.h"
#include "error.h"
#include "interruption.h"
#include "output.h"
#include "progress_line.h"

namespace kvreplay {
namespace {

constexpr const char* standard_input = "-";

constexpr Option options[] = {
    {"no-tables", 0, "", "", "merge only cells and run.json, without tables"}, progress_option, json_option};

std::string details() {
  return "FROM is a folder of results, a folder of such folders, or @FILE with one folder per line.\n"
         "-: reads folders from standard input, one per line, and checks each as it arrives.\n"
         "Earlier results in DIR are kept. DIR then equals the results of a single replay.\n"
         "Without FROM, rewrites the tables and run.json of DIR.\n"
         "Converts results of format 1 (parts/ in place of cells/).\n";
}

/// Folders as given, and those of "@FILE".
std::vector<std::filesystem::path> given_folders(std::span<const std::string> operands) {
  std::vector<std::filesystem::path> folders;
  for (const std::string& operand : operands) {
    if (operand == standard_input) continue;
    if (!operand.starts_with('@')) {
      folders.emplace_back(operand);
      continue;
    }
    std::ifstream list(operand.substr(1));
    if (!list) throw Error{Refusal::input, operand.substr(1), "cannot be read", "a text file with one folder per line"};
    for (std::string line; std::getline(list, line);)
      if (!line.empty()) folders.emplace_back(line);
  }
  return folders;
}

/// Lines of standard input, as they arrive.
class InputLines {
 public:
  /// The next line that is not empty; nothing after the last one, and after an interruption.
  std::optional<std::string> next() {
    for (;;) {
      while (unread_.find('\n') == std::string::npos && receive()) {
      }
      if (unread_.empty() || interrupted()) return std::nullopt;
      const std::string line = unread_.substr(0, unread_.find('\n'));
      unread_.erase(0, line.size() + 1);
      if (!line.empty()) return line;
    }
  }

 private:
  /// False at the end, and after an interruption: a signal may come right before the wait, which is therefore short.
  bool receive() {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    while (poll(&input, 1, 100) <= 0)
      if (interrupted()) return false;
    std::array<char, 4096> piece;
    const ssize_t count = read(STDIN_FILENO, piece.data(), piece.size());
    if (count < 0 && errno == EINTR) return !interrupted();
    if (count < 0) throw Error{Refusal::input, "standard input", "cannot be read", "", std::strerror(errno)};
    if (count > 0) unread_.append(piece.data(), static_cast<std::size_t>(count));
    return count > 0;
  }

  std::string unread_;
};

int run(const Arguments& arguments) {
  heed_interruptions();
  const std::filesystem::path output = arguments.operands().front();
  const std::span operands = std::span(arguments.operands()).subspan(1);
  std::vector<std::filesystem::path> given = results_folders(given_folders(operands), output);
  std::optional<InputLines> input;
  if (std::ranges::find(operands, standard_input) != operands.end()) input.emplace();
  const auto next_folders = [&] {
    std::optional<std::string> line;
    if (given.empty() && input) line = input->next();
    return line ? results_folders({*line}, output) : std::exchange(given, {});
  };
  const MergeSummary summary = [&] {
    ProgressLine line(arguments);
    return merge(
        output, next_folders, arguments.given("no-tables") ? Tables::leave : Tables::write, arguments.command_line(),
        [&line](double done, const std::string& trace) { line.show(done, trace); }, interrupted);
  }();
  if (arguments.given("json")) {
    Json document{{"output", output.string()}, {"folders", summary.folders},   {"traces", summary.traces},
                  {"cells", summary.cells},    {"warnings", summary.warnings}, {"failed", Json::array()}};
    for (const CellRecord& cell : summary.failed) document["failed"].push_back(cell_json(cell));
    print_json(document);
  } else {
    const auto counted = [](std::size_t n, const char* what) {
      return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
    };
    fmt::print("{}: {}, {}     {}\n", counted(summary.folders, "folder"), counted(summary.traces, "trace"),
               counted(summary.cells, "cell"), output.string());
  }
  for (const std::string& warning : summary.warnings) say("kvreplay: warning: {}\n", warning);
  for (const CellRecord& cell : summary.failed)
    say("kvreplay: failed: {}, {} at budget {}: {}\n", cell.trace, cell.policy, cell.budget, cell.error);
  return summary.failed.empty() ? 0 : 6;
}

}  // namespace

const Command merge_command{"merge",
                            "merges results of several runs or machines into one folder",
                            "DIR [FROM...]",
                            options,
                            run,
                            details,
                            "kvreplay merge out shard-1 shard-2\nkvreplay merge out @folders.txt --no-tables\n"
                            "ls -d runs/* | kvreplay merge out -\n",
                            true};

}  // namespace kvreplay
