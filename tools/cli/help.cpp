#include <fmt/format.h>

#include <string>
#include <vector>

#include "arguments.h"
#include "build.h"
#include "commands.h"
#include "output.h"

namespace kvreplay {
namespace {

std::string with_space(std::string_view text) { return fmt::format("{}{}", text.empty() ? "" : " ", text); }

int help(const Arguments& arguments) {
  if (arguments.operands().empty()) {
    print_overview();
    return 0;
  }
  const std::string& name = arguments.operands().front();
  const Command* command = find_command(name);
  if (command == nullptr) run_companion(name, {"--help"});
  print_help(*command);
  return 0;
}

}  // namespace

void print_overview() {
  fmt::print(
      "kvreplay {}: replays KV-cache eviction policies on captured queries, keys and values\n\n"
      "  kvreplay COMMAND ...\n\n",
      build_version);
  std::vector<TableRow> rows;
  for (const Command* command : commands()) rows.push_back({command->name, command->summary});
  for (const Companion& companion : companions())
    rows.push_back({companion.name,
                    fmt::format("{}{}", companion.summary, find_companion(companion.name) ? "" : "  (not installed)")});
  print_columns(rows, 2);
  fmt::print(
      "\nkvreplay help COMMAND says more; kvreplay --version prints the version.\n\n"
      "exit codes\n");
  print_columns({{"0", "done; yes, valid or equal where there is an answer"},
                 {"1", "done, and the answer is no: an invalid trace, different runs"},
                 {"2", "usage: an unknown name, a bad value, contradictory options"},
                 {"3", "input refused: an unreadable file, a trace that lacks what is needed"},
                 {"4", "this build or machine cannot do it, or a program is not installed"},
                 {"5", "memory or disk would not suffice"},
                 {"6", "finished, but some cells failed; they are listed"},
                 {"70", "a bug of kvreplay"},
                 {"130", "interrupted; finished work is kept"}},
                2);
}

void print_help(const Command& command) {
  fmt::print("kvreplay {}{}{}\n  {}\n", command.name, with_space(command.operands),
             command.options.empty() ? "" : " [options]", command.summary);
  if (!command.options.empty()) {
    fmt::print("\noptions\n");
    std::vector<TableRow> rows;
    for (const Option& option : command.options) {
      const std::string letter = option.letter == 0 ? "    " : fmt::format("-{}, ", option.letter);
      const std::string standard = *option.standard == '\0' ? "" : fmt::format(" (default {})", option.standard);
      rows.push_back({fmt::format("{}--{}{}", letter, option.name, with_space(option.value)), option.help + standard});
    }
    print_columns(rows, 2);
  }
  if (command.details != nullptr) fmt::print("\n{}", command.details());
}

const Command help_command{"help", "this overview, or one command with its options", "[COMMAND]", {}, help};

}  // namespace kvreplay
