#include <fmt/format.h>

#include "analysis/metrics/metric.h"
#include "arguments.h"
#include "commands.h"
#include "companions.h"
#include "policies/policy.h"
#include "trace/synth.h"

namespace kvreplay {
namespace {

/// What may stand where an option or an operand says `value`.
struct Candidates {
  std::vector<std::string> words;
  bool files = false;
  bool list = false;
};

std::vector<std::string> command_names() {
  std::vector<std::string> names;
  for (const Command* command : commands()) names.emplace_back(command->name);
  for (const Companion& companion : companions()) names.emplace_back(companion.name);
  return names;
}

std::vector<std::string> kind_names() {
  std::vector<std::string> names;
  for (const SynthKind& kind : synth_kinds()) names.push_back(kind.name);
  return names;
}

Candidates candidates(std::string_view value) {
  Candidates found{.words = words_of(value), .list = is_list(value)};
  const auto mentions = [&](std::string_view placeholder) { return value.find(placeholder) != std::string_view::npos; };
  if (mentions("POLICY")) found.words = policies().names();
  if (mentions("METRIC")) found.words = metrics().names();
  if (mentions("COMMAND")) found.words = command_names();
  if (mentions("KIND")) found.words = kind_names();
  found.files = mentions("FILE") || mentions("DIR") || mentions("TRACE") || mentions("RUN");
  return found;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

/// In single quotes, for any of the shells.
std::string quoted(std::string_view text, std::string_view inner_quote) {
  std::string result;
  for (const char c : text) result += c == '\'' ? std::string(inner_quote) : std::string(1, c);
  return fmt::format("'{}'", result);
}

std::vector<Option> options_of(const Command& command) {
  std::vector<Option> all(command.options.begin(), command.options.end());
  all.push_back(help_option);
  return all;
}

std::string bash_reply(const Candidates& found) {
  if (found.files) return "compopt -o filenames; COMPREPLY=($(compgen -f -- \"$word\"))";
  if (found.list)
    return fmt::format("COMPREPLY=($(compgen -P \"${{word%\"${{word##*,}}\"}}\" -W '{}' -- \"${{word##*,}}\"))",
                       joined(found.words));
  return fmt::format("COMPREPLY=($(compgen -W '{}' -- \"$word\"))", joined(found.words));
}

std::string bash() {
  std::string script =
      "_kvreplay() {\n"
      "  local word=\"${COMP_WORDS[COMP_CWORD]}\" before=\"${COMP_WORDS[COMP_CWORD - 1]}\"\n"
      "  COMPREPLY=()\n";
  script += fmt::format("  if ((COMP_CWORD == 1)); then {}; return; fi\n", bash_reply({.words = command_names()}));
  script += "  case \"${COMP_WORDS[1]} $before\" in\n";
  for (const Command* command : commands())
    for (const Option& option : options_of(*command)) {
      if (*option.value == '\0') continue;
      const std::string letter = option.letter == 0 ? "" : fmt::format("|'{} -{}'", command->name, option.letter);
      script += fmt::format("    '{} --{}'{}) {}; return;;\n", command->name, option.name, letter,
                            bash_reply(candidates(option.value)));
    }
  script += "  esac\n  case \"${COMP_WORDS[1]}\" in\n";
  for (const Command* command : commands()) {
    std::vector<std::string> flags;
    for (const Option& option : options_of(*command)) flags.push_back(fmt::format("--{}", option.name));
    script += fmt::format("    {}) if [[ \"$word\" == -* ]]; then {}; else {}; fi;;\n", command->name,
                          bash_reply({.words = flags}), bash_reply(candidates(command->operands)));
  }
  return script + "  esac\n}\ncomplete -F _kvreplay kvreplay\n";
}

std::string zsh_action(const Candidates& found) {
  if (found.files) return "_files";
  if (found.list) return "_values -s , value " + joined(found.words);
  return found.words.empty() ? " " : fmt::format("({})", joined(found.words));
}

/// Colons and brackets have a meaning in an argument specification.
std::string zsh_escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == ':' || c == '[' || c == ']' || c == '\\') result += '\\';
    result += c;
  }
  return result;
}

std::string zsh() {
  constexpr std::string_view quote = "'\\''";
  std::string script = "#compdef kvreplay\n_kvreplay() {\n  local -a names\n  names=(\n";
  for (const Command* command : commands())
    script += fmt::format("    {}\n", quoted(fmt::format("{}:{}", command->name, command->summary), quote));
  for (const Companion& companion : companions())
    script += fmt::format("    {}\n", quoted(fmt::format("{}:{}", companion.name, companion.summary), quote));
  script +=
      "  )\n  if ((CURRENT == 2)); then _describe command names; return; fi\n"
      "  local command=$words[2]\n  shift words\n  ((CURRENT--))\n  case $command in\n";
  for (const Command* command : commands()) {
    script += fmt::format("    {}) _arguments", command->name);
    for (const Option& option : options_of(*command)) {
      const std::string value = *option.value == '\0' ? ""
                                                      : fmt::format(":{}:{}", zsh_escaped(option.value),
                                                                    zsh_action(candidates(option.value)));
      const std::string tail = fmt::format("[{}]{}", zsh_escaped(option.help), value);
      const std::string star = option.repeatable ? "*" : "";
      script += " \\\n      " + quoted(fmt::format("{}--{}{}", star, option.name, tail), quote);
      if (option.letter != 0)
        script += " \\\n      " + quoted(fmt::format("{}-{}{}", star, option.letter, tail), quote);
    }
    if (*command->operands != '\0')
      script += " \\\n      " + quoted(fmt::format("*:{}:{}", zsh_escaped(command->operands),
                                                   zsh_action(candidates(command->operands))),
                                       quote);
    script += ";;\n";
  }
  return script +
         "  esac\n}\nif [ \"$funcstack[1]\" = _kvreplay ]; then _kvreplay \"$@\"; else compdef _kvreplay "
         "kvreplay; fi\n";
}

std::string fish_words(const Candidates& found, std::string_view quote) {
  if (found.files) return "-F";
  if (found.list) return "-f -a " + quoted(fmt::format("(__fish_append , {})", joined(found.words)), quote);
  return "-f -a " + quoted(joined(found.words), quote);
}

std::string fish() {
  constexpr std::string_view quote = "\\'";
  std::string script = "complete -c kvreplay -f\n";
  const auto name = [&](const char* command, const char* summary) {
    script +=
        fmt::format("complete -c kvreplay -n __fish_use_subcommand -a {} -d {}\n", command, quoted(summary, quote));
  };
  for (const Command* command : commands()) name(command->name, command->summary);
  for (const Companion& companion : companions()) name(companion.name, companion.summary);
  for (const Command* command : commands()) {
    const std::string when = fmt::format("complete -c kvreplay -n '__fish_seen_subcommand_from {}'", command->name);
    for (const Option& option : options_of(*command)) {
      const std::string letter = option.letter == 0 ? "" : fmt::format(" -s {}", option.letter);
      const std::string value =
          *option.value == '\0' ? "" : fmt::format(" -r {}", fish_words(candidates(option.value), quote));
      script += fmt::format("{} -l {}{}{} -d {}\n", when, option.name, letter, value, quoted(option.help, quote));
    }
    const Candidates operands = candidates(command->operands);
    if (operands.files || !operands.words.empty()) script += fmt::format("{} {}\n", when, fish_words(operands, quote));
  }
  return script;
}

struct Shell {
  const char* name;
  std::string (*script)();
};
constexpr Shell shells[] = {{"bash", bash}, {"zsh", zsh}, {"fish", fish}};

int run(const Arguments& arguments) {
  std::vector<std::string> known;
  for (const Shell& shell : shells) {
    if (arguments.operands().front() == shell.name) {
      fmt::print("{}", shell.script());
      return 0;
    }
    known.emplace_back(shell.name);
  }
  throw Error{Refusal::usage, "completion", "unknown shell", nearest(arguments.operands().front(), known),
              arguments.operands().front()};
}

std::string use() {
  return "source <(kvreplay completion bash)        in ~/.bashrc, or the same with zsh in ~/.zshrc\n"
         "kvreplay completion fish | source         in ~/.config/fish/config.fish\n";
}

}  // namespace

const Command completion_command{
    "completion", "lets a shell complete commands, options and names", "bash|zsh|fish", {}, run, use};

}  // namespace kvreplay
