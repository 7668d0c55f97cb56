#include "policies/text/policy_file.h"

#include <fmt/format.h>

#include <cstddef>
#include <string_view>

#include "error.h"
#include "parameters.h"
#include "policies/text/policy_source.h"

namespace kvreplay {
namespace {

using Kind = YamlNode::Kind;

constexpr std::string_view name_key = "policy";
constexpr const char* a_policy = "a string, or a mapping with the key policy";

constexpr std::size_t most_policies = 10'000;

/// The values of a key.
std::vector<std::string> values_of(const std::string& key, const YamlNode& node) {
  std::vector<std::string> values;
  const auto add = [&](const YamlNode& value) {
    if (!value.is(Kind::text))
      throw Error{Refusal::usage, value.where, "value of " + key, "a scalar, or a list of scalars",
                  name_of(value.kind)};
    values.push_back(value.text);
  };
  if (node.is(Kind::list))
    for (const YamlNode& item : node.items) add(item);
  else
    add(node);
  if (values.empty()) throw Error{Refusal::usage, node.where, "value of " + key, "one value or more", "an empty list"};
  return values;
}

/// Each of `texts` with each of the values.
std::vector<std::string> combined(const std::vector<std::string>& texts, const std::string& key,
                                  const std::vector<std::string>& values) {
  std::vector<std::string> all;
  for (const std::string& text : texts)
    for (const std::string& value : values)
      all.push_back(text + (text.empty() ? "" : ",") + key + "=" + list_value(value));
  return all;
}

std::string with_values(const std::string& name, const std::string& values) {
  if (name.empty() || values.empty()) return name + values;
  return name + (end_of_policy_name(name) == name.size() ? ":" : ",") + values;
}

/// `names`: of the policies that a mapping is about.
template <class Names>
void append(const YamlNode& node, std::vector<PolicyText>& all, Names names) {
  if (node.is(Kind::list)) {
    for (const YamlNode& item : node.items) {
      if (item.is(Kind::list)) throw Error{Refusal::usage, item.where, "not a policy", a_policy, name_of(item.kind)};
      append(item, all, names);
    }
    return;
  }
  if (node.is(Kind::text)) {
    all.push_back({node.text, node.where});
    return;
  }
  const std::vector<std::string> of_names = names(node);
  std::vector<std::string> texts{""};
  for (const auto& [key, value] : node.entries) {
    if (key == name_key) continue;
    const std::vector<std::string> values = values_of(key, value);
    if (all.size() + of_names.size() * texts.size() * values.size() > most_policies)
      throw Error{Refusal::usage, node.where, "too many combinations",
                  fmt::format("at most {} policies", most_policies), "more"};
    texts = combined(texts, key, values);
  }
  for (const std::string& name : of_names)
    for (const std::string& text : texts) all.push_back({with_values(name, text), node.where});
}

}  // namespace

std::vector<PolicyText> policies_of(const YamlNode& node) {
  std::vector<PolicyText> all;
  if (node.is(Kind::nothing)) return all;
  append(node, all, [](const YamlNode& mapping) {
    const YamlNode* name = mapping.find(name_key);
    if (name == nullptr)
      throw Error{Refusal::usage, mapping.where, "not a policy", a_policy,
                  mapping.is(Kind::mapping) ? "a mapping without the key" : name_of(mapping.kind)};
    return values_of(std::string(name_key), *name);
  });
  return all;
}

std::vector<PolicyText> exclusions_of(const YamlNode& node) {
  std::vector<PolicyText> all;
  append(node, all, [](const YamlNode& mapping) {
    if (!mapping.is(Kind::mapping) || mapping.entries.empty())
      throw Error{Refusal::usage, mapping.where, "empty exclusion", "a policy, a budget or a parameter",
                  mapping.is(Kind::mapping) ? "an empty mapping" : name_of(mapping.kind)};
    const YamlNode* name = mapping.find(name_key);
    return name == nullptr ? std::vector<std::string>{""} : values_of(std::string(name_key), *name);
  });
  return all;
}

std::vector<std::string> policies_of_file(const std::filesystem::path& path) {
  std::vector<std::string> all;
  for (PolicyText& policy : policies_of(read_yaml(path, "policies"))) all.push_back(std::move(policy.text));
  if (all.empty()) throw Error{Refusal::usage, path.string(), "contains no policy", "one policy, or a list of them"};
  return all;
}

}  // namespace kvreplay
