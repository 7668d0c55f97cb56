#include "parameters.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <set>

#include "nearest.h"

namespace kvreplay {
namespace {

std::string quoted(std::string_view text) { return "\"" + std::string(text) + "\""; }

template <class Number>
Number parse_number(const std::string& where, std::string_view text, const char* kind,
                    Number least = std::numeric_limits<Number>::lowest(),
                    Number most = std::numeric_limits<Number>::max()) {
  Number value{};
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool too_large = problem == std::errc::result_out_of_range;
  if ((problem != std::errc{} && !too_large) || end != text.data() + text.size())
    throw Error{Refusal::usage, where, "not a number", kind, quoted(text)};
  if (too_large || value < least || value > most)
    throw Error{Refusal::usage, where, "out of range", fmt::format("{}..{}", least, most), std::string(text)};
  return value;
}

/// " x " -> "x".
std::string_view without_blanks(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  return text.substr(0, text.find_last_not_of(' ') + 1);
}

std::string range_text(const IntRange& range) {
  if (range.up_to == UpTo::layers && range.least < 0) return "-L..L-1";
  const std::string most = range.up_to == UpTo::prompt                     ? "P"
                           : range.up_to == UpTo::layers                   ? "L"
                           : range.most == std::numeric_limits<int>::max() ? ""
                                                                           : std::to_string(range.most);
  return std::to_string(range.least) + ".." + most + (range.odd ? ", odd" : "");
}

}  // namespace

int parse_int(const std::string& where, std::string_view text, int least, int most) {
  return parse_number<int>(where, text, "a whole number", least, most);
}

double parse_real(const std::string& where, std::string_view text) {
  const double value = parse_number<double>(where, text, "a number");
  if (!std::isfinite(value)) throw Error{Refusal::usage, where, "not finite", "a number", std::string(text)};
  return value;
}

std::vector<std::string_view> split_list(const std::string& where, std::string_view text) {
  // What stands in parentheses is read by whoever reads what stands around them: the stack is not endless.
  constexpr int deepest = 16;
  std::vector<std::string_view> pieces;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= text.size() && depth >= 0 && depth <= deepest; ++i) {
    if (i == text.size() || (text[i] == ',' && depth == 0)) {
      pieces.push_back(without_blanks(text.substr(begin, i - begin)));
      begin = i + 1;
    } else if (text[i] == '(') {
      ++depth;
    } else if (text[i] == ')') {
      --depth;
    }
  }
  if (depth > deepest)
    throw Error{Refusal::usage, where, "too many nested parentheses", fmt::format("at most {} levels", deepest),
                "more"};
  if (depth != 0) throw Error{Refusal::usage, where, "unbalanced parentheses", "", quoted(text)};
  for (const std::string_view piece : pieces)
    if (piece.empty())
      throw Error{Refusal::usage, where, "empty list element", "a value beside each comma", quoted(text)};
  return pieces;
}

Amount Amount::parse(std::string_view where_text, std::string_view text) {
  const std::string where{where_text};
  const bool percent = text.ends_with('%');
  if (percent || text.find_first_of(".eE") != std::string_view::npos) {
    const double share = percent ? parse_real(where, text.substr(0, text.size() - 1)) / 100.0 : parse_real(where, text);
    if (share < 0.0 || share > 1.0)
      throw Error{Refusal::usage, where, "out of range", "a number of tokens, or a fraction 0.0..1.0",
                  std::string(text)};
    return fraction(share);
  }
  const int n = parse_int(where, text);
  if (n < 0) throw Error{Refusal::usage, where, "out of range", "0 or more", std::string(text)};
  return tokens(n);
}

namespace {

__extension__ typedef __int128 Wide;

/// floor(share * whole + halves / 2), the share taken as the decimal number that was written, of up to 15 digits: 0.29
/// of 100 is 29, which the nearest double is not.
int part_of(double share, int whole, int halves) {
  std::array<char, 32> text{};
  const char* const end = std::to_chars(text.begin(), text.end(), share, std::chars_format::scientific, 14).ptr;
  Wide digits = 0, unit = 1;  // share = digits / unit
  const char* c = text.begin();
  for (bool point = false; *c != 'e'; ++c) {
    if (*c == '.') {
      point = true;
      continue;
    }
    digits = 10 * digits + (*c - '0');
    if (point) unit *= 10;
  }
  int exponent = 0;
  std::from_chars(c + (c[1] == '+' ? 2 : 1), end, exponent);
  if (exponent < -18) return halves / 2;  // less than a token of any prompt
  for (; exponent < 0; ++exponent) unit *= 10;
  return static_cast<int>((2 * digits * whole + halves * unit) / (2 * unit));
}

}  // namespace

int Amount::of(int whole) const { return is_fraction() ? part_of(share, whole, 0) : count; }

int Amount::of_prompt(int prompt) const { return is_fraction() ? std::max(1, part_of(share, prompt, 1)) : count; }

std::string Amount::text() const {
  if (!is_fraction()) return std::to_string(count);
  const std::string shortest = fmt::format("{}", share);
  return shortest.find_first_of(".e") == std::string::npos ? shortest + ".0" : shortest;
}

std::string list_value(std::string_view value) {
  for (int depth = 0; const char c : value) {
    depth += (c == '(') - (c == ')');
    if (depth == 0 && (c == ',' || c == ':' || c == '=')) return "(" + std::string(value) + ")";
  }
  return std::string(value);
}

std::string Parameter::value() const { return list_value(text()); }

std::string Parameter::assignment() const { return name + "=" + value(); }

Parameter& Parameters::declare(std::string name, std::string help, std::string range,
                               std::function<std::string()> text) {
  Parameter& parameter = all_.emplace_back();
  parameter.name = std::move(name);
  parameter.help = std::move(help);
  parameter.range = std::move(range);
  parameter.default_text = text();
  parameter.text = std::move(text);
  parameter.part = part_;
  return parameter;
}

void Parameters::add(std::string name, int& value, IntRange range, std::string help) {
  Parameter& parameter =
      declare(std::move(name), std::move(help), range_text(range), [&value] { return std::to_string(value); });
  parameter.up_to = range.up_to;
  // The number of a layer counts from either end.
  if (range.up_to != UpTo::any)
    parameter.tokens = [&value, by_number = range.least < 0] {
      return !by_number ? value : value < 0 ? -value : value + 1;
    };
  parameter.set = [&value, range, where = where(parameter.name)](std::string_view text) {
    const int read = parse_int(where, text);
    if (read < range.least || read > range.most || (range.odd && read % 2 == 0))
      throw Error{Refusal::usage, where, "out of range", range_text(range), std::string(text)};
    value = read;
  };
}

void Parameters::add(std::string name, double& value, RealRange range, std::string help) {
  const std::string limits = fmt::format("{}..{}", range.least, range.most);
  Parameter& parameter =
      declare(std::move(name), std::move(help), limits, [&value] { return fmt::format("{}", value); });
  parameter.set = [&value, range, limits, where = where(parameter.name)](std::string_view text) {
    const double read = parse_real(where, text);
    if (read < range.least || read > range.most)
      throw Error{Refusal::usage, where, "out of range", limits, std::string(text)};
    value = read;
  };
}

void Parameters::add(std::string name, bool& value, std::string help) {
  Parameter& parameter = declare(std::move(name), std::move(help), "false | true",
                                 [&value] { return std::string(value ? "true" : "false"); });
  parameter.set = [&value, where = where(parameter.name)](std::string_view text) {
    if (text != "true" && text != "false")
      throw Error{Refusal::usage, where, "not a Boolean", "false or true", quoted(text)};
    value = text == "true";
  };
}

void Parameters::add(std::string name, Amount& value, std::string help, UpTo up_to, const std::string& whole) {
  const std::string most = up_to == UpTo::prompt ? "P" : "";
  Parameter& parameter =
      declare(std::move(name), std::move(help), "tokens 0.." + most + ", or a fraction 0.0..1.0 of " + whole,
              [&value] { return value.text(); });
  parameter.up_to = up_to;
  parameter.tokens = [&value] { return value.is_fraction() ? 0 : value.count; };
  parameter.set = [&value, where = where(parameter.name)](std::string_view text) {
    value = Amount::parse(where, text);
  };
}

void Parameters::add_seed(std::string name, std::uint64_t& value, std::string help) {
  Parameter& parameter =
      declare(std::move(name), std::move(help), "0..2^64-1", [&value] { return std::to_string(value); });
  parameter.is_seed = true;
  parameter.set = [&value, where = where(parameter.name)](std::string_view text) {
    value = parse_number<std::uint64_t>(where, text, "a whole number, 0 or more");
  };
}

void Parameters::add(std::string name, std::string& value, std::string range,
                     std::function<std::string(std::string_view)> normal, std::string help, UpTo up_to) {
  Parameter& parameter = declare(std::move(name), std::move(help), std::move(range), [&value] { return value; });
  parameter.up_to = up_to;
  if (up_to != UpTo::any)
    parameter.tokens = [&value] {
      int number = 0;
      const auto [end, problem] = std::from_chars(value.data(), value.data() + value.size(), number);
      return problem == std::errc{} && end == value.data() + value.size() ? number : 0;
    };
  parameter.set = [&value, normal = std::move(normal)](std::string_view text) { value = normal(text); };
}

void Parameters::adopt(const std::string& prefix, Parameter parameter) {
  parameter.name = prefix + parameter.name;
  all_.push_back(std::move(parameter));
}

void Parameters::adopt_all(const std::string& prefix, const Parameters& others) {
  for (const Parameter& parameter : others.all()) adopt(prefix, parameter);
}

void Parameters::add_to_preset(std::string_view name, std::string parameter, std::string value) {
  std::ranges::find(presets_, name, &Preset::name)->values.emplace_back(std::move(parameter), std::move(value));
}

void Parameters::set(std::string_view name, std::string_view text) {
  if (name == "preset" && !presets_.empty()) {
    std::vector<std::string> names;
    for (const Preset& preset : presets_) {
      if (preset.name == text) {
        for (const auto& [key, value] : preset.values) set(key, value);
        return;
      }
      names.push_back(preset.name);
    }
    refuse_word(where("preset"), text, names);
  }
  if (const Parameter* parameter = find(name)) return parameter->set(text);
  std::vector<std::string> names;
  for (const Parameter& parameter : all_) names.push_back(parameter.name);
  if (!presets_.empty()) names.emplace_back("preset");
  if (names.empty()) throw Error{Refusal::usage, owner_, "takes no parameters", "", std::string(name)};
  throw Error{Refusal::usage, owner_, "unknown parameter", nearest(name, names), std::string(name)};
}

void Parameters::set_list(std::string_view text, const char* example) {
  std::set<std::string_view> given;
  for (const std::string_view piece : split_list(owner_, text)) {
    const std::size_t equals = piece.find('=');
    if (equals == std::string_view::npos)
      throw Error{Refusal::usage, owner_, "not an assignment", example, std::string(piece)};
    const std::string_view name = piece.substr(0, equals);
    if (!given.insert(name).second)
      throw Error{Refusal::usage, owner_, "given more than once", "one value", std::string(name)};
    set(name, piece.substr(equals + 1));
  }
}

const Parameter* Parameters::find(std::string_view name) const {
  for (const Parameter& parameter : all_)
    if (parameter.name == name) return &parameter;
  return nullptr;
}

std::string Parameters::canonical() const {
  std::string line;
  for (const Parameter& parameter : all_) line += (line.empty() ? "" : ",") + parameter.assignment();
  return line;
}

std::string Parameters::joined(std::span<const std::string> words) {
  return fmt::format("{}", fmt::join(words, " | "));
}

void Parameters::refuse_word(const std::string& where, std::string_view text, std::span<const std::string> words) {
  throw Error{Refusal::usage, where, "unknown value", nearest(text, words), quoted(text)};
}

}  // namespace kvreplay
