#include <fmt/format.h>

#include <boost/algorithm/string/case_conv.hpp>
#include <boost/algorithm/string/replace.hpp>
#include <string>
#include <string_view>

#include "build.h"
#include "commands.h"

namespace kvreplay {
namespace {

/// Text as roff reads it: no character of it is a request, and a hyphen can be copied into a command line.
std::string escaped(std::string_view text) {
  std::string line(text);
  boost::replace_all(line, "\\", "\\e");
  boost::replace_all(line, "-", "\\-");
  boost::replace_all(line, "\n.", "\n\\&.");
  boost::replace_all(line, "\n'", "\n\\&'");
  return line.starts_with('.') || line.starts_with('\'') ? "\\&" + line : line;
}

void print_section(const char* title, std::string_view text = "") { fmt::print(".SH {}\n{}", title, text); }

void print_entry(std::string_view term, std::string_view text) {
  fmt::print(".TP\n.B {}\n{}\n", escaped(term), escaped(text));
}

void print_lines(std::string_view lines) { fmt::print(".PP\n.nf\n{}.fi\n", escaped(lines)); }

void print_command(const Command& command) {
  fmt::print(".SS {}\n{}.\n", escaped(synopsis(command)), escaped(capitalised(command.summary)));
  for (const Option& option : command.options) print_entry(spelling(option), help_text(option));
  if (command.details != nullptr) print_lines(command.details());
  if (*command.examples != '\0') print_lines(command.examples);
}

}  // namespace

void print_manual() {
  fmt::print(".TH KVREPLAY 1 \"\" \"kvreplay {}\" \"User Commands\"\n", escaped(build_version));
  print_section("NAME", "kvreplay \\- replays KV\\-cache eviction policies on captured queries, keys and values\n");
  print_section("SYNOPSIS", ".B kvreplay\n.I COMMAND\n[options]\n");
  print_section("OPTIONS OF EVERY COMMAND");
  for (const Option& option : {quiet_option, version_option, help_option})
    print_entry(spelling(option), help_text(option));
  for (const CommandGroup& group : command_groups()) {
    print_section(("COMMANDS: " + boost::to_upper_copy(std::string(group.heading))).c_str());
    for (const Command* command : group.commands) print_command(*command);
  }
  print_section("EXIT STATUS");
  for (const auto& [code, meaning] : exit_codes()) print_entry(code, meaning);
  print_section("FILES");
  std::string names;
  for (const Option& option : replay_command.options)
    if (option.has_user_default) names += (names.empty() ? "" : ", ") + std::string(option.name);
  print_entry("kvreplay.yaml",
              fmt::format("defaults of options, as KEY: VALUE; keys: {}. The file of the working directory or of the "
                          "nearest folder above it is read, else that in $XDG_CONFIG_HOME/kvreplay.",
                          names));
}

}  // namespace kvreplay
