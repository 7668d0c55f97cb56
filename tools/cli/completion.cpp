#include "completion.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "analysis/metrics/metric.h"
#include "arguments.h"
#include "commands.h"
#include "error.h"
#include "machine.h"
#include "nearest.h"
#include "policies/policy.h"
#include "trace/synth.h"

namespace kvreplay {
namespace {

/// Each with its meaning, which may be empty.
using Words = std::vector<std::pair<std::string, std::string>>;

Words command_names() {
  Words names;
  for (const Command* command : commands()) names.emplace_back(command->name, command->summary);
  for (const Command& companion : companions()) names.emplace_back(companion.name, companion.summary);
  return names;
}

/// The words for an option or an operand that is declared as `value`; FILE alone: the name of a file.
Words words_for(std::string_view value) {
  const auto mentions = [&](const char* placeholder) { return value.find(placeholder) != std::string_view::npos; };
  if (std::ranges::any_of(std::array{"FILE", "DIR", "TRACE", "RUN"}, mentions)) return {{"FILE", ""}};
  if (mentions("COMMAND")) return command_names();
  std::vector<std::string> names = words_of(value);
  if (mentions("POLICY")) names = policies().names();
  if (mentions("METRIC")) names = metrics().names();
  if (value == "KIND")
    for (const SynthKind& kind : synth_kinds()) names.push_back(kind.name);
  Words words;
  for (const std::string& name : names) words.emplace_back(name, "");
  return words;
}

/// Of a list, the piece behind the last comma is completed.
void print_words(const Words& words, std::string_view typed, bool is_list) {
  const std::size_t begin = is_list ? typed.rfind(',') + 1 : 0;
  for (const auto& [word, meaning] : words)
    if (word == "FILE" || word.starts_with(typed.substr(begin)))
      fmt::print("{}{}\t{}\n", typed.substr(0, begin), word, meaning);
}

struct Shell {
  const char* name;
  std::string_view script;
};

constexpr std::string_view program_mark = "@program@";

constexpr Shell shells[] = {{"bash", R"(_kvreplay() {
  mapfile -t COMPREPLY < <('@program@' --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f 1)
  if [[ ${COMPREPLY[0]} == FILE ]]; then
    compopt -o filenames
    mapfile -t COMPREPLY < <(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")
  fi
}
complete -F _kvreplay kvreplay
)"},
                            {"zsh", R"(#compdef kvreplay
_kvreplay() {
  local -a found=("${(@f)$('@program@' --complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  if [[ $found[1] == FILE* ]]; then _files; return; fi
  found=("${(@)found//:/\\:}")
  found=("${(@)found/$'\t'/:}")
  _describe value found
}
if [ "$funcstack[1]" = _kvreplay ]; then _kvreplay "$@"; else compdef _kvreplay kvreplay; fi
)"},
                            {"fish", R"(function __kvreplay
  set -l typed (commandline -opc) (commandline -ct)
  set -l found ('@program@' --complete $typed[2..-1] 2>/dev/null)
  if string match -q 'FILE*' -- $found[1]
    __fish_complete_path $typed[-1]
  else
    printf '%s\n' $found
  end
end
complete -c kvreplay -f -a '(__kvreplay)'
)"}};

int run(const Arguments& arguments) {
  const std::string& name = arguments.operands().front();
  std::vector<std::string> known;
  for (const Shell& shell : shells) known.emplace_back(shell.name);
  const auto shell = std::ranges::find(shells, name, &Shell::name);
  if (shell == std::end(shells)) throw Error{Refusal::usage, "completion", "unknown shell", nearest(name, known), name};
  std::string script{shell->script};
  script.replace(script.find(program_mark), program_mark.size(), (program_folder() / "kvreplay").string());
  fmt::print("{}", script);
  return 0;
}

constexpr const char* use_examples =
    "source <(kvreplay completion bash)   # in ~/.bashrc; with zsh in ~/.zshrc\n"
    "kvreplay completion fish | source    # in ~/.config/fish/config.fish\n";

}  // namespace

void print_candidates(std::span<const std::string> words) {
  if (words.empty()) return;
  const std::string& typed = words.back();
  if (words.size() == 1) return print_words(command_names(), typed, false);
  const Command* command = find_command(words.front());
  const auto companion = std::ranges::find(companions(), words.front(), &Command::name);
  if (command == nullptr && companion == companions().end()) return;
  if (command == nullptr) command = &*companion;
  const std::string& before = words[words.size() - 2];
  Words flags;
  for (const Option& option : all_options(*command)) {
    flags.emplace_back(fmt::format("--{}", option.name), option.help);
    if (*option.value != '\0' && (before == flags.back().first || before == fmt::format("-{}", option.letter)))
      return print_words(words_for(option.value), typed, is_list(option.value));
  }
  if (typed.starts_with('-')) return print_words(flags, typed, false);
  print_words(words_for(command->operands), typed, is_list(command->operands));
}

const Command completion_command{"completion",
                                 "prints a script that completes commands, options and names in a shell",
                                 "bash|zsh|fish",
                                 {},
                                 run,
                                 nullptr,
                                 use_examples};

}  // namespace kvreplay
