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
};

struct Command {
  const char* name;
  const char* summary;
  const char* operands;  // "TRACE...", "FROM TO", "[POLICY]" or nothing: how many there are follows from it
  std::span<const Option> options;
  int (*run)(const Arguments&);  // returns the program's exit code
  std::string (*details)() = nullptr;
};

/// Options that several commands have.
inline constexpr Option json_option{"json", 0, "", "", "the same as JSON"};
inline constexpr Option progress_option{"progress", 0, "auto|always|never", "auto",
                                        "a line on stderr that tells how far the work is; auto: on a terminal"};
inline constexpr Option plugin_option{"plugin", 0, "FILE", "", "policies that are compiled apart; may be repeated",
                                      true};
inline constexpr Option boundary_option{"boundary", 0, "prompt|TOKENS|span:NAME", "prompt",
                                        "tokens under compression: the prompt, so many, or those up to a span's end; "
                                        "what follows stays, and policies choose without its queries"};
/// Every command has it; the program itself answers it.
inline constexpr Option help_option{"help", 'h', "", "", "this help"};

/// Those of the command, and help.
std::vector<Option> all_options(const Command& command);

/// The words that `value` offers as they stand: "auto|cpu|cuda[:N]" has auto, cpu and cuda, "last:N" has last:.
std::vector<std::string> words_of(std::string_view value);

/// Whether nothing but the words of `value` can be meant.
bool only_words(std::string_view value);

/// Whether `value` is a comma-separated list.
bool is_list(std::string_view value);

/// Pieces between separators, without empty ones.
std::vector<std::string> split(std::string_view text, char separator);

/// Fewest and most operands; most is -1 without limit.
struct OperandCount {
  int least = 0;
  int most = 0;
};
OperandCount operand_count(std::string_view operands);

}  // namespace kvreplay
