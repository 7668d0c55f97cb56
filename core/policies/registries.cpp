#include "policies/plan_part.h"
#include "policies/policy.h"

namespace kvreplay {

Registry<PolicyEntry>& policies() {
  static Registry<PolicyEntry> registry{"policy"};
  return registry;
}

Registry<PartCard>& parts(PartKind kind) {
  static Registry<PartCard> scorers{"scorer"}, selectors{"selector"}, allocators{"allocator"}, sharing{"sharing"},
      schedules{"schedule"}, stores{"store"};
  switch (kind) {
    case PartKind::score:
      return scorers;
    case PartKind::select:
      return selectors;
    case PartKind::allocate:
      return allocators;
    case PartKind::share:
      return sharing;
    case PartKind::schedule:
      return schedules;
    case PartKind::store:
      break;
  }
  return stores;
}

std::unique_ptr<PlanPart> parse_part(PartKind kind, std::string_view text,
                                     std::vector<std::pair<std::string, std::string>>& values) {
  const std::size_t open = text.find('(');
  const std::string name{text.substr(0, open)};
  std::unique_ptr<PlanPart> part = parts(kind).get(name).make();
  if (open == std::string_view::npos) return part;
  if (text.back() != ')') throw Error{Refusal::usage, name, "parentheses do not match", "", std::string(text)};
  const Parameters parameters = part->parameters();
  const std::vector<std::string_view> given = split_list(name, text.substr(open + 1, text.size() - open - 2));
  if (given.size() > parameters.all().size())
    throw Error{Refusal::usage, name, "too many values", "at most " + std::to_string(parameters.all().size()),
                std::string(text)};
  for (std::size_t i = 0; i < given.size(); ++i) values.emplace_back(parameters.all()[i].name, given[i]);
  return part;
}

std::unique_ptr<PlanPart> make_part(PartKind kind, std::string_view text) {
  std::vector<std::pair<std::string, std::string>> values;
  std::unique_ptr<PlanPart> part = parse_part(kind, text, values);
  Parameters parameters = part->parameters();
  for (const auto& [name, value] : values) parameters.set(name, value);
  return part;
}

}  // namespace kvreplay
