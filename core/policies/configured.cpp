#include "policies/configured.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace kvreplay {
namespace {

/// "key=value": an '=' before any ':' or '('.
bool is_assignment(std::string_view piece) {
  const std::size_t mark = piece.find_first_of("=:(");
  return mark != std::string_view::npos && piece[mark] == '=';
}

/// "(x)" -> "x".
std::string_view without_parentheses(std::string_view value) {
  return value.size() >= 2 && value.front() == '(' && value.back() == ')' ? value.substr(1, value.size() - 2) : value;
}

}  // namespace

std::vector<std::string> split_policies(std::string_view text) {
  std::vector<std::string> found;
  for (const std::string_view piece : split_list("policy", text)) {
    if (is_assignment(piece)) {
      if (found.empty())
        throw Error{Refusal::usage, "policy", "value without a policy", "NAME[:KEY=VALUE,...]", std::string(piece)};
      found.back() += (found.back().find(':') == std::string::npos ? ":" : ",") + std::string(piece);
    } else {
      found.emplace_back(piece);
    }
  }
  return found;
}

ConfiguredPolicy ConfiguredPolicy::parse(std::string_view text, std::uint64_t seed) {
  const std::size_t colon = text.find(':');
  ConfiguredPolicy configured;
  configured.name_ = std::string(text.substr(0, colon));
  configured.policy_ = policies().get(configured.name_).make();

  std::vector<std::pair<std::string_view, std::string_view>> values;
  if (colon != std::string_view::npos) {
    for (const std::string_view piece : split_list(configured.name_, text.substr(colon + 1))) {
      const std::size_t equals = piece.find('=');
      if (equals == std::string_view::npos || equals == 0)
        throw Error{Refusal::usage, configured.name_, "not a parameter", "KEY=VALUE", "\"" + std::string(piece) + "\""};
      values.emplace_back(piece.substr(0, equals), without_parentheses(piece.substr(equals + 1)));
    }
  }
  Parameters parameters = configured.policy_->parameters();
  for (const Parameter& parameter : parameters.all())
    if (parameter.is_seed) parameter.set(std::to_string(seed));
  for (const auto& [key, value] : values)
    if (!configured.given_.insert(std::string(key)).second)
      throw Error{Refusal::usage, configured.name_, "given twice", "", std::string(key)};
  for (const bool is_preset : {true, false})
    for (const auto& [key, value] : values)
      if ((key == "preset") == is_preset) parameters.set(key, value);
  configured.plan();  // throws when values contradict each other
  return configured;
}

std::string ConfiguredPolicy::label() const {
  const std::unique_ptr<Policy> fresh = policies().get(name_).make();
  const Parameters defaults = fresh->parameters();
  const Parameters own = parameters();
  std::string line;
  for (const Parameter& parameter : own.all()) {
    if (parameter.text() != defaults.find(parameter.name)->default_text)
      line += (line.empty() ? ":" : ",") + parameter.assignment();
  }
  return name_ + line;
}

void ConfiguredPolicy::check_limits(int prompt, int layers) const {
  const Parameters own = parameters();
  for (const Parameter& parameter : own.all()) {
    if (parameter.up_to == UpTo::any || !given_.contains(parameter.name)) continue;
    const int most = parameter.up_to == UpTo::prompt ? prompt : layers;
    if (const int value = parameter.tokens(); value > most)
      throw Error{Refusal::usage, name_ + ":" + parameter.name, "larger than the trace",
                  "at most " + std::to_string(most) + (parameter.up_to == UpTo::prompt ? " tokens" : " layers"),
                  std::to_string(value)};
  }
}

Budget Budget::parse(std::string_view text) {
  const std::string where = "budget " + std::string(text);
  Budget budget{.literal = std::string(text)};
  if (text.empty()) throw Error{Refusal::usage, "budget", "empty", "a fraction in (0, 1] or a count of tokens"};
  const bool percent = text.ends_with('%');
  if (percent || text.find_first_of(".eE") != std::string_view::npos) {
    budget.fraction = percent ? parse_real(where, text.substr(0, text.size() - 1)) / 100.0 : parse_real(where, text);
    if (!(budget.fraction > 0.0 && budget.fraction <= 1.0))
      throw Error{Refusal::usage, where, "out of range", "a fraction in (0, 1]", std::string(text)};
  } else {
    budget.count = parse_int(where, text, 1);
  }
  return budget;
}

int Budget::tokens(int prompt) const {
  if (count > 0) return count;
  return std::max(1, static_cast<int>(std::floor(fraction * static_cast<double>(prompt) + 0.5)));
}

}  // namespace kvreplay
