#include "policies/plan_part.h"

namespace kvreplay {
namespace {

class FixedPart final : public PlanPart {
 public:
  FixedPart(const char* name, void (*fill_plan)(Plan&)) : name_(name), fill_(fill_plan) {}
  Parameters parameters() override { return Parameters{name_}; }
  void fill(Plan& plan) const override { fill_(plan); }

 private:
  const char* name_;
  void (*fill_)(Plan&);
};

}  // namespace

Registry<PartCard>& parts(PartKind kind) {
  static Registry<PartCard> scorers{"scorer"}, selectors{"selector"}, allocators{"allocator"}, sharing{"sharing"},
      schedules{"schedule"}, stores{"store"}, heads{"heads"};
  switch (kind) {
    case PartKind::score:
      return scorers;
    case PartKind::heads:
      return heads;
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

RegisteredFixedPart::RegisteredFixedPart(PartKind kind, const char* name, const char* summary, void (*fill)(Plan&)) {
  parts(kind).add({name, summary, [name, fill] { return std::make_unique<FixedPart>(name, fill); }});
}

std::unique_ptr<PlanPart> parse_part(PartKind kind, std::string_view text,
                                     std::vector<std::pair<std::string, std::string>>& values) {
  const std::size_t open = text.find('(');
  const std::string name{text.substr(0, open)};
  std::unique_ptr<PlanPart> part = parts(kind).get(name).make();
  if (open == std::string_view::npos) return part;
  if (text.back() != ')') throw Error{Refusal::usage, name, "parentheses do not match", "", std::string(text)};
  const Parameters parameters = part->parameters();
  const std::string_view inside = text.substr(open + 1, text.size() - open - 2);
  if (inside.empty()) return part;
  const std::vector<std::string_view> given = split_list(name, inside);
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
