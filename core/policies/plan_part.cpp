#include "policies/plan_part.h"

#include <array>
#include <cstddef>

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
  using Parts = Registry<PartCard>;
  static std::array in_order_of_kinds{Parts{"scorer"},  Parts{"heads"},    Parts{"selector"}, Parts{"allocator"},
                                      Parts{"sharing"}, Parts{"schedule"}, Parts{"store"}};
  return in_order_of_kinds.at(static_cast<std::size_t>(kind));
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
