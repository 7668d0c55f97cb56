#include "arguments.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/program_options.hpp>
#include <charconv>
#include <cmath>
#include <limits>

#include "error.h"
#include "nearest.h"
#include "parameters.h"

namespace kvreplay {
namespace {

namespace po = boost::program_options;

std::string flag(std::string_view option) { return "--" + std::string(option); }

const Option& declaration(const Command& command, std::string_view name) {
  static constexpr Option none{"", 0, "", "", ""};
  const auto found = std::ranges::find(command.options, name, &Option::name);
  return found == command.options.end() ? none : *found;
}

po::options_description description(std::span<const Option> options) {
  po::options_description described;
  for (const Option& option : options) {
    const std::string names = option.letter == 0 ? option.name : fmt::format("{},{}", option.name, option.letter);
    if (*option.value == '\0')
      described.add_options()(names.c_str(), option.help);
    else
      described.add_options()(names.c_str(), po::value<std::string>(), option.help);
  }
  return described;
}

/// The parser may name an option by its letter or with its value attached.
std::string long_name(std::span<const Option> options, std::string name) {
  name = name.substr(0, name.find('='));
  const bool is_long = name.starts_with("--");
  name.erase(0, std::min(name.find_first_not_of('-'), name.size()));
  if (!is_long)
    for (const Option& option : options)
      if (option.letter != 0 && name.starts_with(option.letter) && name != option.name) return option.name;
  return name;
}

Error unknown_option(const Command& command, std::span<const Option> options, std::string name) {
  name = name.substr(0, name.find('='));
  const std::string bare = name.substr(std::min(name.find_first_not_of('-'), name.size()));
  std::vector<std::string> known;
  for (const Option& option : options) known.push_back(flag(option.name));
  return {Refusal::usage, command.name, "unknown option", nearest(flag(bare), known), name};
}

std::vector<po::option> parsed(const Command& command, std::span<const std::string> words) {
  const std::vector<Option> options = all_options(command);
  const po::options_description described = description(options);
  namespace style = po::command_line_style;
  try {
    return po::command_line_parser(std::vector<std::string>(words.begin(), words.end()))
        .options(described)
        .style(style::unix_style & ~style::allow_guessing)
        .run()
        .options;
  } catch (const po::unknown_option& problem) {
    throw unknown_option(command, options, problem.get_option_name());
  } catch (const po::invalid_command_line_syntax& problem) {
    const std::string name = long_name(options, problem.get_option_name());
    if (problem.kind() == po::invalid_syntax::extra_parameter)
      throw Error{Refusal::usage, flag(name), "takes no value"};
    throw Error{Refusal::usage, flag(name), "needs a value", declaration(command, name).value};
  }
}

}  // namespace

Arguments::Arguments(const Command& command, std::string program, std::span<const std::string> words)
    : command_(command), command_line_{std::move(program), command.name} {
  command_line_.insert(command_line_.end(), words.begin(), words.end());
  for (const po::option& option : parsed(command, words)) {
    if (option.string_key.empty()) {
      operands_.insert(operands_.end(), option.value.begin(), option.value.end());
      continue;
    }
    add(option.string_key, {option.value.empty() ? "" : option.value.front(), flag(option.string_key)});
  }
  if (given(help_option.name)) return;
  const OperandCount count = operand_count(command.operands);
  const int n = static_cast<int>(operands_.size());
  if (count.most >= 0 && n > count.most)
    throw Error{Refusal::usage, command.name, "unexpected argument", "",
                operands_[static_cast<std::size_t>(count.most)]};
  if (n < count.least) throw Error{Refusal::usage, command.name, "missing argument", command.operands};
}

void Arguments::add(std::string_view option, GivenValue value) {
  const Option& declared = declaration(command_, option);
  std::vector<GivenValue>& values = values_[std::string(option)];
  if (!values.empty() && !declared.repeatable)
    throw Error{Refusal::usage, value.where, "given more than once", "one value"};
  values.push_back(std::move(value));
  const std::string &text = values.back().text, &where = values.back().where;
  const auto pieces = is_list(declared.value) ? split_list(where, text) : std::vector{std::string_view(text)};
  if (!only_words(declared.value)) return;
  const std::vector<std::string> offered = words_of(declared.value);
  for (const std::string_view word : pieces)
    if (std::ranges::find(offered, word) == offered.end())
      throw Error{Refusal::usage, where, "unknown value", nearest(word, offered), std::string(word)};
}

std::vector<std::string> Arguments::spelled_out(std::span<const std::string_view> left_out) const {
  std::vector<std::string> words;
  for (const auto& [option, values] : values_) {
    if (std::ranges::find(left_out, option) != left_out.end()) continue;
    for (const GivenValue& value : values) {
      words.push_back(flag(option));
      if (*declaration(command_, option).value != '\0') words.push_back(value.text);
    }
  }
  return words;
}

std::span<const GivenValue> Arguments::values(std::string_view option) const {
  const auto found = values_.find(option);
  return found == values_.end() ? std::span<const GivenValue>() : found->second;
}

std::string Arguments::where(std::string_view option) const {
  return given(option) ? values(option).front().where : flag(option);
}

std::string Arguments::text(std::string_view option) const {
  return given(option) ? values(option).front().text : declaration(command_, option).standard;
}

std::vector<std::string> Arguments::all(std::string_view option) const {
  std::vector<std::string> texts;
  for (const GivenValue& value : values(option)) texts.push_back(value.text);
  return texts;
}

int Arguments::whole_number(std::string_view option, int least, int most) const {
  return parse_int(where(option), text(option), least, most);
}

double Arguments::real_number(std::string_view option, double least, double most) const {
  const std::string value = text(option);
  const double number = parse_real(where(option), value);
  if (number < least || number > most) {
    const bool open = most == std::numeric_limits<double>::max();
    throw Error{Refusal::usage, where(option), "out of range",
                open ? fmt::format("{} or more", least) : fmt::format("{}..{}", least, most), value};
  }
  return number;
}

std::uint64_t Arguments::seed(std::string_view option) const {
  const std::string value = text(option);
  std::uint64_t number = 0;
  const auto [end, problem] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (problem != std::errc{} || end != value.data() + value.size())
    throw Error{Refusal::usage, where(option), "not a random seed", "0..2^64-1", "\"" + value + "\""};
  return number;
}

std::size_t Arguments::bytes(std::string_view option) const {
  const std::string value = text(option);
  const Error refused{Refusal::usage, where(option), "not a size", "a number of bytes, as 4096, 512M or 1.5G",
                      "\"" + value + "\""};
  double number = 0;
  const auto [end, problem] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (problem != std::errc{} || !std::isfinite(number) || number <= 0) throw refused;
  std::string unit(end, value.data() + value.size());
  for (const std::string_view suffix : {"iB", "B"})
    if (unit.ends_with(suffix)) {
      unit.erase(unit.size() - suffix.size());
      break;
    }
  static constexpr std::string_view multiples = "kMGT";
  if (!unit.empty()) {
    const std::size_t power = unit == "K" ? 0 : multiples.find(unit);
    if (unit.size() != 1 || power == std::string_view::npos) throw refused;
    number *= std::pow(1024.0, static_cast<double>(power + 1));
  }
  if (number >= 0x1p63) throw refused;
  return static_cast<std::size_t>(number);
}

}  // namespace kvreplay
