#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arguments.h"
#include "build.h"
#include "commands.h"
#include "output.h"

namespace kvreplay {
namespace {

constexpr std::size_t widest = 118;
constexpr std::size_t least_width = 40;         // of the texts beside long options
constexpr std::size_t widest_narrow_name = 24;  // beside its text

/// In a pipe as the help of the commands in Python.
std::size_t help_width() { return std::min(widest, page_width()); }

/// Names and their texts in two columns, the first at least `names` wide. On a narrow terminal a long name has its own
/// line.
void print_pairs(const std::vector<std::pair<std::string, std::string>>& pairs, std::size_t names = 0) {
  const std::size_t line = help_width();
  for (const auto& [name, text] : pairs) names = std::max(names, name.size());
  if (line < widest) names = std::min(names, widest_narrow_name);
  const std::size_t width = std::max(least_width, line - std::min(line, names + 4));
  for (const auto& [name, text] : pairs) {
    std::string beside = name;
    if (name.size() > names) fmt::print("  {}\n", std::exchange(beside, ""));
    for (const std::string& piece : wrapped(text, width))
      fmt::print("  {:{}}  {}\n", std::exchange(beside, ""), names, piece);
  }
}

void print_paragraph(std::string_view text, std::size_t indent = 0) {
  for (const std::string& line : wrapped(text, help_width() - indent)) fmt::print("{:{}}{}\n", "", indent, line);
}

constexpr Option options[] = {
    {"man", 0, "", "", "print the manual page of all commands, in the format of man(7)"},
};

int help(const Arguments& arguments) {
  if (arguments.given("man")) {
    print_manual();
    return 0;
  }
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

std::span<const std::pair<const char*, const char*>> exit_codes() {
  static constexpr std::pair<const char*, const char*> codes[] = {
      {"0", "success; the files are valid or equal"},
      {"1", "finished, with a negative answer: an invalid trace, different runs"},
      {"2", "usage error: an unknown name, an invalid value, contradictory options"},
      {"3", "input rejected: an unreadable file, a trace without the required data"},
      {"4", "not supported by this build or machine, or a program is not installed"},
      {"5", "too little memory or disk space"},
      {"6", "finished, but some cells failed (they are listed)"},
      {"70", "internal error: a bug of kvreplay"},
      {"130", "interrupted; finished cells are kept"}};
  return codes;
}

void print_overview() {
  print_paragraph(fmt::format("kvreplay {}: replays KV-cache eviction policies on captured queries, keys and values",
                              build_version));
  fmt::print("\n  kvreplay COMMAND ...\n\n");
  const std::vector<CommandGroup> groups = command_groups();
  std::size_t names = 0;
  for (const CommandGroup& group : groups)
    for (const Command* command : group.commands) names = std::max(names, std::string_view(command->name).size());
  std::vector<std::pair<std::string, std::string>> rows;
  for (const CommandGroup& group : groups) {
    rows.clear();
    for (const Command* command : group.commands) {
      const bool is_missing = command->run == nullptr && !find_companion(command->name);
      rows.emplace_back(command->name, fmt::format("{}{}", command->summary, is_missing ? "  (not installed)" : ""));
    }
    fmt::print("{}\n", group.heading);
    print_pairs(rows, names);
    fmt::print("\n");
  }
  print_paragraph("kvreplay help COMMAND prints the options of a command; kvreplay -V (--version) prints the version.");
  print_paragraph(fmt::format("Every command accepts -q (--quiet): {}.", quiet_option.help));
  print_paragraph("The file kvreplay.yaml sets your defaults of options (see kvreplay help --man).");
  fmt::print("\nexit codes\n");
  rows.assign(exit_codes().begin(), exit_codes().end());
  print_pairs(rows);
}

void print_help(const Command& command) {
  fmt::print("{}\n", synopsis(command));
  print_paragraph(command.summary, 2);
  std::vector<std::pair<std::string, std::string>> rows;
  const char* group = "options";
  const auto print_group = [&](const char* next) {
    if (!rows.empty()) fmt::print("\n{}\n", group);
    print_pairs(std::exchange(rows, {}));
    group = next;
  };
  for (const Option& option : all_options(command)) {
    if (option.group != nullptr) print_group(option.group);
    if (option.name == std::string_view(quiet_option.name)) print_group("every command");
    rows.emplace_back((option.letter == 0 ? "    " : "") + spelling(option), help_text(option));
  }
  print_group(nullptr);
  if (command.details != nullptr) {
    fmt::print("\n");
    for (const std::string& line : split(command.details(), '\n')) {
      const std::size_t indent = line.find_first_not_of(' ');
      if (line.size() <= help_width())
        fmt::print("{}\n", line);
      else
        print_paragraph(line.substr(indent), indent);
    }
  }
  if (*command.examples != '\0') {
    fmt::print("\nexamples\n");
    for (const std::string& example : split(command.examples, '\n')) fmt::print("  {}\n", example);
  }
}

const Command help_command{"help", "prints this overview, or the options of one command", "[COMMAND]", options, help};

}  // namespace kvreplay
