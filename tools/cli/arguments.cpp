#include "arguments.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/program_options.hpp>
#include <charconv>
#include <cmath>
#include <limits>

#include "error.h"
#include "listed_names.h"
#include "nearest.h"
#include "parameters.h"
#include "user_defaults.h"

namespace kvreplay {
namespace {

namespace po = boost::program_options;

std::string flag(std::string_view option) { return "--" + std::string(option); }

const Option& declaration(const Command& command, std::string_view name) {
  static constexpr Option none{"", 0, "", "", ""};
  const auto found = std::ranges::find_if(command.options, [&](const Option& option) {
    return option.name == name || (!name.empty() && option.plural == name);
  });
  return found == command.options.end() ? none : *found;
}

po::options_description description(std::span<const Option> options) {
  po::options_description described;
  for (const Option& option : options) {
    const std::string names = option.letter == 0 ? option.name : fmt::format("{},{}", option.name, option.letter);
    for (const std::string& name : {names, std::string(option.plural)}) {
      if (name.empty()) continue;
      if (*option.value == '\0')
        described.add_options()(name.c_str(), option.help);
      else
        described.add_options()(name.c_str(), po::value<std::string>(), option.help);
    }
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
  for (const Option& option : options) {
    if (!bare.empty() && bare == option.confused_with)
      return {Refusal::usage, command.name, "unknown option", fmt::format("{}{}?", suggestion, flag(option.name)),
              name};
    known.push_back(flag(option.name));
  }
  return {Refusal::usage, command.name, "unknown option",
          nearest_listed(flag(bare), known, fmt::format("kvreplay {} --help", command.name)), name};
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

/// Throws Error{usage} for an empty piece of a list, and for a word that the option does not offer.
void check(const Option& declared, const GivenValue& value) {
  const auto pieces =
      is_list(declared.value) ? split_list(value.where, value.text) : std::vector{std::string_view(value.text)};
  if (!only_words(declared.value)) return;
  const std::vector<std::string> offered = words_of(declared.value);
  for (const std::string_view word : pieces)
    if (std::ranges::find(offered, word) == offered.end())
      throw Error{Refusal::usage, value.where, "unknown value", nearest(word, offered), std::string(word)};
}

/// The value in the form of the option's target.
GivenValue converted(const Option& declared, GivenValue value) {
  std::string all;
  for (const std::string_view piece : split_list(value.where, value.text))
    all += (all.empty() ? "" : ",") + at_place(value, [&] { return declared.converted(piece); });
  value.text = std::move(all);
  return value;
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
  if (given(help_option.name) || given(version_option.name)) return;
  const OperandCount count = operand_count(command.operands);
  const int n = static_cast<int>(operands_.size());
  if (count.most >= 0 && n > count.most)
    throw Error{Refusal::usage, command.name, "unexpected argument", "",
                operands_[static_cast<std::size_t>(count.most)]};
  if (n < count.least) throw Error{Refusal::usage, command.name, "missing argument", command.operands};
  if (std::ranges::none_of(command.options, &Option::has_user_default)) return;
  for (auto& [name, value] : read_user_defaults()) {
    const Option& declared = declaration(command, name);
    if (!declared.has_user_default || given(name)) continue;
    check(declared, value);
    user_defaults_.emplace(name, value);
  }
}

void Arguments::add(std::string_view option, GivenValue value) {
  const Option& declared = declaration(command_, option);
  if (*declared.name == '\0') {  // of every command
    values_[std::string(option)].push_back(std::move(value));
    return;
  }
  check(declared, value);
  value.option = declared.name;
  const bool has_target = *declared.target != '\0';
  std::vector<GivenValue>& values = values_[has_target ? declared.target : declared.name];
  if (!values.empty() && values.front().option != value.option)
    throw Error{Refusal::usage, value.where, "contradicts " + values.front().where, "one of the two"};
  if (!values.empty() && !declared.repeatable)
    throw Error{Refusal::usage, value.where, "given more than once", "one value"};
  values.push_back(has_target ? converted(declared, std::move(value)) : std::move(value));
}

std::vector<std::string> Arguments::spelled_out(std::span<const std::string_view> left_out) const {
  std::vector<std::string> words;
  const auto is_left_out = [&](const std::string& option) {
    return std::ranges::find(left_out, option) != left_out.end();
  };
  for (const auto& [option, value] : user_defaults_)
    if (!given(option) && !is_left_out(option)) words.insert(words.end(), {flag(option), value.text});
  for (const auto& [option, values] : values_) {
    if (is_left_out(option)) continue;
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

GivenValue Arguments::value(std::string_view option) const {
  if (given(option)) return values(option).front();
  const auto found = user_defaults_.find(option);
  if (found != user_defaults_.end()) return found->second;
  return {declaration(command_, option).standard, flag(option)};
}

std::vector<std::string> Arguments::all(std::string_view option) const {
  std::vector<std::string> texts;
  for (const GivenValue& value : values(option)) texts.push_back(value.text);
  return texts;
}

int Arguments::whole_number(std::string_view option, int least, int most) const {
  const GivenValue given = value(option);
  return parse_int(given.where, given.text, least, most);
}

double Arguments::real_number(std::string_view option, double least, double most) const {
  const GivenValue given = value(option);
  const std::string& text = given.text;
  const double number = parse_real(given.where, text);
  if (number < least || number > most) {
    const bool open = most == std::numeric_limits<double>::max();
    throw Error{Refusal::usage, given.where, "out of range",
                open ? fmt::format("{} or more", least) : fmt::format("{}..{}", least, most), text};
  }
  return number;
}

std::uint64_t Arguments::seed(std::string_view option) const {
  const GivenValue given = value(option);
  const std::string& text = given.text;
  std::uint64_t number = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem != std::errc{} || end != text.data() + text.size())
    throw Error{Refusal::usage, given.where, "not a random seed", "0..2^64-1", "\"" + text + "\""};
  return number;
}

std::size_t Arguments::bytes(std::string_view option) const {
  const GivenValue given = value(option);
  const std::string& text = given.text;
  const Error refused{Refusal::usage, given.where, "not a size", "a number of bytes, as 4096, 512M or 1.5G",
                      "\"" + text + "\""};
  double number = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem != std::errc{} || !std::isfinite(number) || number <= 0) throw refused;
  std::string unit(end, text.data() + text.size());
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
