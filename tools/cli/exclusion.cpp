#include "exclusion.h"

#include <algorithm>
#include <set>

#include "error.h"
#include "nearest.h"
#include "parameters.h"
#include "policies/text/policy_source.h"

namespace kvreplay {
namespace {

constexpr std::string_view budget_key = "budget";

/// Whether the parameter has the value, which is written in any form.
bool has_value(const Parameter& parameter, const std::string& value) {
  const std::string now = parameter.text();
  if (!parameter.set) return now == value;
  parameter.set(value);
  const bool same = parameter.text() == now;
  parameter.set(now);
  return same;
}

}  // namespace

Exclusion::Exclusion(GivenValue given) : given_(std::move(given)) {
  const std::string& text = given_.text;
  const std::size_t equals = text.find('=');
  const bool named = equals > text.find_first_of(":(") || equals == std::string::npos;
  const std::size_t end = named ? end_of_policy_name(text) : 0;
  if (named) policy_ = read_at(given_.where, [&] { return registered_policy(std::string_view(text).substr(0, end)); });
  const std::string_view rest = std::string_view(text).substr(named && end < text.size() ? end + 1 : end);
  const auto refused = [&](std::string found) {
    return Error{Refusal::usage, given_.where, "not an exclusion", "[POLICY:]KEY=VALUE,...", "\"" + found + "\""};
  };
  if (text.empty() || (named && end < text.size() && rest.empty())) throw refused(text);
  if (rest.empty()) return;
  for (const std::string_view piece : split_list(given_.where, rest)) {
    const std::size_t at = piece.find('=');
    if (at == std::string_view::npos || at == 0 || at + 1 == piece.size()) throw refused(std::string(piece));
    std::string value(piece.substr(at + 1));
    if (value.starts_with('(') && value.ends_with(')')) value = value.substr(1, value.size() - 2);
    const std::string key(piece.substr(0, at));
    if (key == budget_key && budget_) throw Error{Refusal::usage, given_.where, "given more than once", "", key};
    if (key == budget_key)
      budget_ = read_at(given_.where, [&] { return Budget::parse(value); });
    else
      values_.emplace_back(key, std::move(value));
  }
}

bool Exclusion::covers(const ConfiguredPolicy& policy) const {
  if (!policy_.empty() && policy.name() != policy_) return false;
  const Parameters parameters = policy.parameters();
  return std::ranges::all_of(values_, [&](const auto& value) {
    const Parameter* parameter = parameters.find(value.first);
    if (parameter == nullptr) return false;
    if (!policy_.empty()) return read_at(given_.where, [&] { return has_value(*parameter, value.second); });
    try {
      return has_value(*parameter, value.second);
    } catch (const Error&) {
      return false;  // another policy's parameter of that name may have it
    }
  });
}

bool Exclusion::covers(const Budget& budget) const {
  return !budget_ || (budget.fraction == budget_->fraction && budget.count == budget_->count &&
                      budget.bytes == budget_->bytes && budget.at_seen == budget_->at_seen);
}

Error Exclusion::covers_nothing(const std::vector<ConfiguredPolicy>& policies) const {
  std::set<std::string> names, keys;
  for (const ConfiguredPolicy& policy : policies) {
    names.insert(policy.name());
    if (!policy_.empty() && policy.name() != policy_) continue;
    const Parameters parameters = policy.parameters();
    for (const Parameter& parameter : parameters.all()) keys.insert(parameter.name);
  }
  keys.insert({std::string(budget_key), "policy"});
  const auto known = [](const std::set<std::string>& all) { return std::vector(all.begin(), all.end()); };
  if (!policy_.empty() && !names.contains(policy_))
    return {Refusal::usage, given_.where, "unknown policy", nearest(policy_, known(names)), policy_};
  for (const auto& [key, value] : values_)
    if (!keys.contains(key)) return {Refusal::usage, given_.where, "unknown key", nearest(key, known(keys)), key};
  return {Refusal::usage, given_.where, "excludes no cell", "values that some policy and budget have", given_.text};
}

}  // namespace kvreplay
