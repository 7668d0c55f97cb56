// A command is a name, what it takes, and a function. Parsing, help and completion read the same declaration.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvreplay {

class Arguments;

/// `value` is what follows the option, as its user writes it: words to choose from ("auto|always|never"), a placeholder
/// in capitals ("FILE"), both ("cpu|cuda[:N]"), a list of any of them ("POLICY,..."), or nothing for a flag.
struct Option {
  const char* name;
  char letter;  // 0: the long form only
  const char* value;
  const char* standard;  // the value when none is given; empty: none
  const char* help;
  bool repeatable = false;
  const char* group = nullptr;  // heading of the group that begins with this option
  const char* plural = "";      // the same in other commands and in files; empty: none
  const char* target = "";      // another option, of whose values this one gives another form; empty: none
  std::string (*converted)(std::string_view) = nullptr;  // a value in the form of the target
  bool has_user_default = false;                         // kvreplay.yaml may give its default (user_defaults.h)
  const char* confused_with = "";                        // an option of other commands, for which errors name this one
};

/// The first option of a group.
constexpr Option in_group(const char* group, Option option) {
  option.group = group;
  return option;
}

constexpr Option with_plural(const char* plural, Option option) {
  option.plural = plural;
  return option;
}

constexpr Option another_form_of(const char* target, std::string (*converted)(std::string_view), Option option) {
  option.target = target;
  option.converted = converted;
  return option;
}

constexpr Option with_user_default(Option option) {
  option.has_user_default = true;
  return option;
}

constexpr Option confused_with(const char* other, Option option) {
  option.confused_with = other;
  return option;
}

struct Command {
  const char* name;
  const char* summary;
  const char* operands;  // "TRACE...", "FROM TO", "[POLICY]" or nothing: how many there are follows from it
  std::span<const Option> options;
  int (*run)(const Arguments&);  // returns the program's exit code
  std::string (*details)() = nullptr;
  const char* examples = "";  // one command a line
  bool writes_files = false;  // stdout repeats the files, and -q discards it
};

/// Options that several commands have.
inline constexpr Option json_option{"json", 0, "", "", "print JSON"};
inline constexpr Option progress_option{"progress", 0, "auto|always|never", "auto",
                                        "progress line on stderr; auto: only on a terminal"};
inline constexpr Option plugin_option{"plugin", 0, "FILE", "", "shared library with more policies; repeatable", true};
inline constexpr Option boundary_option{"boundary", 0, "prompt|TOKENS|span:NAME", "prompt",
                                        "tokens under compression: the prompt, the first TOKENS tokens, or all up to "
                                        "the end of a span; later tokens are kept, and policies do not see their "
                                        "queries"};
inline constexpr Option markdown_option{"markdown", 0, "", "", "print Markdown"};
/// Those of commands that print the table of a run.
inline constexpr Option table_options[] = {
    confused_with(
        "metrics",
        {"columns", 0, "METRIC,...", "",
         "columns of the table: metrics, their titles such as recall, or skill (default: those that fit 80 columns); "
         "repeatable",
         true}),
    {"wide", 0, "", "", "print all columns of the wide table"},
    {"all", 0, "", "",
     "print every policy at every budget (default: at most ten policies, at the first budget that evicts tokens and at "
     "which most policies select tokens besides the protected ones)"},
    {"each", 0, "", "", "print a table for each trace (default: means over the traces)"},
    with_user_default({"color", 0, "auto|always|never", "auto",
                       "bold for the best, dim for controls; auto: on a terminal, unless NO_COLOR is set"}),
};
/// Every command has these three; the program itself answers them.
inline constexpr Option quiet_option{"quiet", 'q', "", "",
                                     "no progress and no notes; no table or names of files from commands that write "
                                     "files (JSON and dry runs are still printed)"};
inline constexpr Option version_option{"version", 'V', "", "", "print the version"};
inline constexpr Option help_option{"help", 'h', "", "", "show this help"};

/// Those of the command, and those of every command.
std::vector<Option> all_options(const Command& command);

/// "kvreplay info TRACE... [options]".
std::string synopsis(const Command& command);
/// "-b, --budget BUDGET,...".
std::string spelling(const Option& option);
/// Help with plural and default.
std::string help_text(const Option& option);

/// The words that `value` offers as they stand: "auto|cpu|cuda[:N]" has auto, cpu and cuda, "last:N" has last:.
std::vector<std::string> words_of(std::string_view value);

/// Whether nothing but the words of `value` can be meant.
bool only_words(std::string_view value);

/// Whether `value` is a comma-separated list.
bool is_list(std::string_view value);

/// The word with an upper-case first letter; an empty one as it is.
std::string capitalised(std::string word);

/// Pieces between separators, without empty ones.
std::vector<std::string> split(std::string_view text, char separator);

/// Fewest and most operands; most is -1 without limit.
struct OperandCount {
  int least = 0;
  int most = 0;
};
OperandCount operand_count(std::string_view operands);

}  // namespace kvreplay
