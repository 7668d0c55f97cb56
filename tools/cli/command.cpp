#include "command.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

namespace kvreplay {
namespace {

constexpr std::string_view list_mark = ",...";

std::vector<std::string> alternatives(std::string_view value) {
  if (is_list(value)) value.remove_suffix(list_mark.size());
  return split(value, '|');
}

/// The part of an alternative before its placeholder.
std::string_view word(std::string_view alternative) {
  return alternative.substr(0, std::min(alternative.find_first_of("[ABCDEFGHIJKLMNOPQRSTUVWXYZ"), alternative.size()));
}

}  // namespace

std::string capitalised(std::string word) {
  if (!word.empty()) word.front() = static_cast<char>(std::toupper(static_cast<unsigned char>(word.front())));
  return word;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> pieces;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(separator), text.size());
    if (end > 0) pieces.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return pieces;
}

std::vector<Option> all_options(const Command& command) {
  std::vector<Option> options(command.options.begin(), command.options.end());
  options.insert(options.end(), {quiet_option, version_option, help_option});
  return options;
}

std::string synopsis(const Command& command) {
  return fmt::format("kvreplay {}{}{}{}", command.name, *command.operands == '\0' ? "" : " ", command.operands,
                     command.options.empty() ? "" : " [options]");
}

std::string spelling(const Option& option) {
  return fmt::format("{}--{}{}{}", option.letter == 0 ? "" : fmt::format("-{}, ", option.letter), option.name,
                     *option.value == '\0' ? "" : " ", option.value);
}

std::string help_text(const Option& option) {
  std::string text = option.help;
  if (*option.plural != '\0') text += fmt::format("; also --{}", option.plural);
  if (*option.standard != '\0') text += fmt::format(" (default: {})", option.standard);
  return text;
}

std::vector<std::string> words_of(std::string_view value) {
  std::vector<std::string> words;
  for (const std::string& alternative : alternatives(value))
    if (!word(alternative).empty()) words.emplace_back(word(alternative));
  return words;
}

bool only_words(std::string_view value) {
  return !value.empty() && std::ranges::all_of(alternatives(value), [](std::string_view a) { return word(a) == a; });
}

bool is_list(std::string_view value) { return value.ends_with(list_mark); }

OperandCount operand_count(std::string_view operands) {
  OperandCount count;
  for (const std::string& operand : split(operands, ' ')) {
    if (!operand.starts_with('[')) ++count.least;
    if (operand.find("...") != std::string::npos) return {count.least, -1};
    ++count.most;
  }
  return count;
}

}  // namespace kvreplay
