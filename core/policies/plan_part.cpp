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

PartText PartText::parse(std::string_view text) {
  const std::size_t open = text.find('(');
  PartText parsed{std::string(text), std::string(text.substr(0, open)), {}};
  if (open == std::string_view::npos) return parsed;
  if (text.back() != ')') throw Error{Refusal::usage, parsed.name, "parentheses do not match", "", std::string(text)};
  const std::string_view inside = text.substr(open + 1, text.size() - open - 2);
  if (inside.empty()) return parsed;
  for (const std::string_view value : split_list(parsed.name, inside)) parsed.values.emplace_back(value);
  return parsed;
}

std::vector<std::pair<std::string, std::string>> PartText::assignments(const Parameters& parameters) const {
  if (values.size() > parameters.all().size())
    throw Error{Refusal::usage, name, "too many values", "at most " + std::to_string(parameters.all().size()), text};
  std::vector<std::pair<std::string, std::string>> all;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t mark = values[i].find_first_of("=(");
    if (mark == std::string::npos || values[i][mark] != '=') {
      all.emplace_back(parameters.all()[i].name, values[i]);
      continue;
    }
    all.emplace_back(values[i].substr(0, mark), values[i].substr(mark + 1));
    const std::string& key = all.back().first;
    if (parameters.find(key) != nullptr) continue;
    std::vector<std::string> known;
    for (const Parameter& parameter : parameters.all()) known.push_back(parameter.name);
    throw Error{Refusal::usage, name, "unknown parameter", nearest(key, known), key};
  }
  return all;
}

std::unique_ptr<PlanPart> parse_part(PartKind kind, std::string_view text,
                                     std::vector<std::pair<std::string, std::string>>& values) {
  const PartText parsed = PartText::parse(text);
  std::unique_ptr<PlanPart> part = parts(kind).get(parsed.name).make();
  for (auto& assignment : parsed.assignments(part->parameters())) values.push_back(std::move(assignment));
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
