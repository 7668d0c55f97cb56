#include "policies/text/configured.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <ranges>
#include <utility>

#include "listed_names.h"
#include "nearest.h"
#include "policies/text/layer_ranges.h"
#include "policies/text/policy_file.h"
#include "policies/text/policy_source.h"

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

const Choice<PartKind>* kind_of(std::string_view key) {
  const auto found =
      std::ranges::find(part_kinds, key, [](const Choice<PartKind>& kind) { return std::string_view(kind.word); });
  return found == std::end(part_kinds) ? nullptr : &*found;
}

/// Of parameters that mean the same wherever they stand.
constexpr std::string_view names_of_one_meaning[] = {"seed",     "sinks",           "recent",     "window",
                                                     "question", "question_tokens", "skip_layers"};

constexpr Choice<WindowAt> window_at_words[] = {{"end", WindowAt::end}, {"question", WindowAt::question}};

constexpr std::string_view common_names[] = {"sinks", "window_at", "protect"};

/// Whether the value is a policy, or a word for none.
bool is_policy(const Parameter& parameter) { return parameter.range.find("(POLICY)") != std::string::npos; }

/// A number of a layer, which counts from either end, not a number of layers.
bool counts_layers(const Parameter& parameter) { return parameter.range.starts_with("-L"); }

}  // namespace

std::vector<std::string> split_policies(std::string_view text) {
  std::vector<std::string> found;
  for (const std::string_view piece : split_list("policy", text)) {
    if (piece.starts_with('@')) {
      for (std::string& policy : policies_of_file(std::string(piece.substr(1)))) found.push_back(std::move(policy));
    } else if (is_assignment(piece)) {
      if (found.empty())
        throw Error{Refusal::usage, "policy", "parameter before the first policy", "NAME[:KEY=VALUE,...]",
                    std::string(piece)};
      found.back() += (end_of_policy_name(found.back()) == found.back().size() ? ":" : ",") + std::string(piece);
    } else {
      found.emplace_back(piece);
    }
  }
  return found;
}

ConfiguredPolicy ConfiguredPolicy::made(std::string_view name) {
  ConfiguredPolicy configured;
  configured.name_ = registered_policy(name);
  configured.policy_ = make_policy(configured.name_);
  if (const PolicyEntry* entry = policies().find(configured.name_)) configured.source_ = entry->source;
  return configured;
}

bool ConfiguredPolicy::has_press_preset() const {
  const Parameters own = policy_->parameters();
  return std::ranges::find(own.presets(), press_preset, &Preset::name) != own.presets().end();
}

ConfiguredPolicy ConfiguredPolicy::with_defaults(std::string_view name) {
  ConfiguredPolicy configured = made(name);
  configured.find_common();
  return configured;
}

std::string ConfiguredPolicy::without_preset(std::string_view text) {
  const std::size_t name = end_of_policy_name(text);
  if (!is_press(text.substr(0, name)) && text.find("preset=", name) == std::string_view::npos) return std::string(text);
  return parse(text).label();
}

ConfiguredPolicy ConfiguredPolicy::parse(std::string_view text, std::uint64_t seed) {
  const std::size_t name = end_of_policy_name(text);
  ConfiguredPolicy configured = made(text.substr(0, name));
  configured.policy_->set_seed(seed);
  std::vector<std::pair<std::string, std::string>> values;
  if (name != text.size()) {
    for (const std::string_view piece : split_list(configured.name_, text.substr(name + 1))) {
      const std::size_t equals = piece.find('=');
      if (equals == std::string_view::npos || equals == 0)
        throw Error{Refusal::usage, configured.name_, "not an assignment", "KEY=VALUE",
                    "\"" + std::string(piece) + "\""};
      const std::string_view key = piece.substr(0, equals), value = piece.substr(equals + 1);
      // The comma in protect=sinks=4,recent=3 would end the value, and `recent` may be a parameter of the policy.
      if (key == "protect" && !value.starts_with('(') && configured.policy_->parameters().find(key) == nullptr)
        throw Error{Refusal::usage, configured.name_ + ":protect", "missing parentheses", "(sinks=4,recent=10%)",
                    std::string(value)};
      values.emplace_back(key, without_parentheses(value));
    }
  }
  const bool has_preset = std::ranges::any_of(values, [](const auto& value) { return value.first == "preset"; });
  if (!has_preset && is_press(text.substr(0, name)) && configured.has_press_preset())
    values.emplace_back("preset", press_preset);
  configured.place_parts(values);
  for (const Placed& placed : configured.parts_) placed.part->set_seed(seed);
  for (const auto& [key, value] : values)
    if (!configured.given_.insert(key).second)
      throw Error{Refusal::usage, configured.name_, "given more than once", "one value", key};
  const Parameters parameters = configured.parameters();
  for (const Parameter& parameter : parameters.all())
    if (parameter.is_seed) configured.set(parameter.name, std::to_string(seed));
  const auto is_common = [&parameters](const std::string& key) {
    return std::ranges::find(common_names, key) != std::end(common_names) && parameters.find(key) == nullptr;
  };
  for (const bool is_preset : {true, false})
    for (const auto& [key, value] : values)
      if ((key == "preset") == is_preset && !is_common(key)) configured.set(key, value);
  configured.share_parameters();
  configured.policy_->check();
  configured.find_common();
  for (const auto& [key, value] : values)
    if (is_common(key)) configured.set_common(key, value);
  if (configured.common_->protect && configured.common_->has_sinks && configured.given_.contains("sinks") &&
      configured.common_->sinks != configured.common_->own_sinks)
    throw Error{Refusal::usage, configured.name_ + ":sinks", "contradicts protect", "sinks or protect, not both",
                fmt::format("sinks={}", configured.common_->sinks)};
  if (configured.name_ != layer_ranges_name && !configured.parts_.empty()) configured.check_given();
  return configured;
}

/// Takes the parts out of `values`; what stands in their parentheses becomes values.
void ConfiguredPolicy::place_parts(std::vector<std::pair<std::string, std::string>>& values) {
  const Parameters own = policy_->parameters();
  std::vector<std::pair<std::string, std::string>> rest;
  for (const auto& [key, value] : values) {
    const Choice<PartKind>* kind = kind_of(key);
    if (kind == nullptr || own.find(key) != nullptr) {
      rest.emplace_back(key, value);
      continue;
    }
    if (kind->value == PartKind::store && own.find("positions") != nullptr) {
      if (value == "exact" ||
          value == "cache") {  // the parameter of these policies selects between the same two stores
        rest.emplace_back("positions", value == "cache" ? "cache" : "original");
        continue;
      }
      throw Error{Refusal::usage, name_, "the policy sets the store by its parameter positions", "store=exact or cache",
                  "store=" + value};
    }
    if (std::ranges::find(parts_, kind->value, &Placed::kind) != parts_.end())
      throw Error{Refusal::usage, name_, "given more than once", "one value", key};
    const std::string part_name = value.substr(0, value.find('('));
    if (parts(kind->value).find(part_name) == nullptr)
      throw Error{Refusal::usage, name_ + ":" + key, "unknown value",
                  nearest_listed(part_name, parts(kind->value).names(), "kvreplay policies --parts"), part_name};
    std::vector<std::pair<std::string, std::string>> of_part;
    std::shared_ptr<PlanPart> part = parse_part(kind->value, value, of_part);
    parts_.push_back({kind->value, part_name, std::move(part)});
    for (const auto& [name, of_name] : of_part) rest.emplace_back(name, without_parentheses(of_name));
  }
  values = std::move(rest);
}

/// A parameter of the same name is the same parameter: one that the policy declares for that place in its plan, or one
/// that means the same everywhere. Others would be changed by accident.
void ConfiguredPolicy::share_parameters() {
  Parameters before = policy_->parameters();
  for (const Placed& placed : parts_) {
    const Parameters of_part = placed.part->parameters();
    for (const Parameter& parameter : of_part.all()) {
      const Parameter* same = before.find(parameter.name);
      if (same == nullptr) continue;
      const bool one_meaning =
          std::ranges::find(names_of_one_meaning, parameter.name) != std::end(names_of_one_meaning);
      const bool same_place = !same->part.empty() && kind_of(same->part)->value == placed.kind;
      if (same->range != parameter.range || !(one_meaning || same_place))
        throw Error{Refusal::usage, name_ + ":" + parameter.name, "ambiguous: two parts use this parameter differently",
                    same->help, parameter.help};
      parameter.set(same->text());
    }
    for (const Parameter& parameter : of_part.all())
      if (before.find(parameter.name) == nullptr) before.adopt("", parameter);
  }
}

void ConfiguredPolicy::Common::apply_to(Plan& plan, const Plan& filled) const {
  if (window_at == WindowAt::question && filled.score.places_window) end_window_at_question(plan);
  if (!kvreplay::lacks_protection(filled).empty()) return;
  if (has_sinks && sinks != own_sinks) plan.protect.sinks = sinks;
  if (protect) protect->replace_in(plan);
}

/// The plans with their parts decide which of them the policy has.
void ConfiguredPolicy::find_common() {
  if (name_ == layer_ranges_name) return;  // the policies of the ranges have them
  constexpr int some_layers = 2;
  const Parameters own = parameters();
  std::vector<LayerPlan> plans;
  try {
    plans = policy_->plans(some_layers);
  } catch (const Error&) {
    // An oracle over ranges of layers has plans for its number of layers alone, and a broken policy in Python has none.
    // plans() reports the reason.
    common_->lacks_protection = "has plans for one number of layers only";
    return;
  }
  bool protects = false;
  for (const LayerPlan& of_range : plans) {
    Plan plan = of_range.plan;
    fill_parts(plan);
    common_->has_window_at |= plan.score.places_window && plan.protect.question.last_tokens == 0;
    if (const std::string reason = kvreplay::lacks_protection(plan); !reason.empty()) {
      common_->lacks_protection = reason;
      continue;
    }
    if (!protects) common_->own_sinks = common_->sinks = of_range.plan.protect.sinks;
    protects = true;
  }
  if (protects) common_->lacks_protection.clear();
  common_->has_sinks = protects && own.find("sinks") == nullptr;
}

void ConfiguredPolicy::set_common(const std::string& name, const std::string& text) {
  const std::string where = name_ + ":" + name;
  if (name_ == layer_ranges_name)
    throw Error{Refusal::usage, name_, "has a separate plan for each range of layers",
                name + "= in the policies of the ranges", name};
  if (name == "window_at" && !common_->has_window_at)
    throw Error{Refusal::usage, where, name_ + " has no observation window",
                "a policy with an observation window, such as snapkv", text};
  if (name != "window_at" && !common_->lacks_protection.empty())
    throw Error{Refusal::usage, where, name_ + " " + common_->lacks_protection,
                "a policy that selects by score within a budget", text};
  if (name == "protect")
    common_->protect = ProtectedTokens::parse(where, text);
  else
    parameters().set(name, text);
}

void ConfiguredPolicy::replace_protected(const ProtectedTokens& tokens) {
  if (name_ != layer_ranges_name && common_->lacks_protection.empty()) {
    if (common_->protect)
      throw Error{Refusal::usage, name_ + ":protect", "given more than once", "one of protect=(...) and --protect",
                  "--protect"};
    common_->sinks = common_->own_sinks;
    common_->protect = tokens;
    return;
  }
  const Parameters own = policy_->parameters();
  for (const Parameter& parameter : own.all()) {
    if (!is_policy(parameter) || parameter.text() == "none") continue;
    ConfiguredPolicy inner = parse(parameter.text());
    inner.replace_protected(tokens);
    parameter.set(inner.label_with_seeds());
  }
}

void ConfiguredPolicy::set(std::string_view name, std::string_view text) {
  Parameters own = policy_->parameters();
  if (own.find(name) != nullptr || (name == "preset" && !own.presets().empty())) return own.set(name, text);
  for (const Placed& placed : parts_)
    if (Parameters of_part = placed.part->parameters(); of_part.find(name) != nullptr) return of_part.set(name, text);
  if (policy_->declare(name)) return policy_->parameters().set(name, text);
  find_common();
  std::vector<std::string> known;
  const Parameters all = parameters();
  if (all.all().empty())
    throw Error{Refusal::usage, name_, "takes no parameters", "a part, as in select=chunks", std::string(name)};
  for (const Parameter& parameter : all.all()) known.push_back(parameter.name);
  for (const Choice<PartKind>& kind : part_kinds) known.emplace_back(kind.word);
  if (common_->lacks_protection.empty()) known.emplace_back("protect");
  if (!all.presets().empty()) known.emplace_back("preset");
  throw Error{Refusal::usage, name_, "unknown parameter", nearest(name, known), std::string(name)};
}

Parameters ConfiguredPolicy::parameters() const {
  Parameters all = policy_->parameters();
  for (const Placed& placed : parts_) {
    const Choice<PartKind>* kind = std::ranges::find(part_kinds, placed.kind, &Choice<PartKind>::value);
    Parameter choice;
    choice.name = kind->word;
    choice.help = "part that replaces the policy's own";
    choice.text = [name = placed.name] { return name; };
    all.adopt("", choice);
    const Parameters of_part = placed.part->parameters();
    for (const Parameter& parameter : of_part.all())
      if (all.find(parameter.name) == nullptr) all.adopt("", parameter);
  }
  if (common_->has_window_at)
    all.add<WindowAt>(
        "window_at", common_->window_at, window_at_words,
        "end of the observation window: the end of the prompt, or of the marked question; tokens after it "
        "are kept and score nothing");
  if (common_->has_sinks)
    all.add("sinks", common_->sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens, always kept");
  if (common_->protect) {
    Parameter protect;
    protect.name = "protect";
    protect.help = "protected tokens that replace the policy's own";
    protect.text = [common = common_] { return common->protect->text(); };
    all.adopt("", protect);
  }
  return all;
}

std::vector<Source> ConfiguredPolicy::sources() const {
  std::vector<Source> all = policy_->sources();
  all.push_back(source_);
  for (const Placed& placed : parts_) all.push_back(parts(placed.kind).get(placed.name).source);
  std::erase_if(all, &Source::is_built_in);
  std::ranges::sort(all, {}, &Source::hash);
  const auto twice = std::ranges::unique(all, {}, &Source::hash);
  all.erase(twice.begin(), twice.end());
  return all;
}

std::string ConfiguredPolicy::source_hash() const {
  std::string hashes;
  for (const Source& source : sources()) hashes += (hashes.empty() ? "" : ",") + source.hash;
  return hashes;
}

std::string ConfiguredPolicy::label() const {
  return label_of([](const Parameter&) { return false; });
}

std::string ConfiguredPolicy::label_with_seeds() const {
  return label_of([](const Parameter& parameter) { return parameter.is_seed; });
}

/// With the values that differ from the defaults, and those of parameters that are wanted also.
std::string ConfiguredPolicy::label_of(bool (*also)(const Parameter&)) const {
  ConfiguredPolicy fresh = made(name_);
  for (const Placed& placed : parts_)
    fresh.parts_.push_back({placed.kind, placed.name, parts(placed.kind).get(placed.name).make()});
  *fresh.common_ = {
      .has_sinks = common_->has_sinks, .has_window_at = common_->has_window_at, .sinks = common_->own_sinks};
  const Parameters defaults = fresh.parameters();
  const Parameters own = parameters();
  std::string line;
  for (const Parameter& parameter : own.all()) {
    const Parameter* unset = defaults.find(parameter.name);
    const bool differs = unset == nullptr || unset->default_text.empty() || parameter.text() != unset->default_text;
    if (differs || also(parameter)) line += (line.empty() ? ":" : ",") + parameter.assignment();
  }
  return name_ + line;
}

std::vector<LayerPlan> ConfiguredPolicy::plans(int layers) const {
  std::vector<LayerPlan> all;
  append_plans(all, *policy_, layers);
  if (!parts_.empty() && all.size() > 1)
    throw Error{Refusal::usage, name_, "has a separate plan for each range of layers",
                "layers:0-14=(A:...),15-29=(B:...)", parts_.front().name};
  for (LayerPlan& of_range : all) {
    Plan& plan = of_range.plan;
    Plan filled = plan;
    fill_parts(filled);
    common_->apply_to(plan, filled);
    fill_parts(plan);  // they may round the number of protected tokens
    check_plan(name_, plan);
  }
  return all;
}

void ConfiguredPolicy::fill_parts(Plan& plan) const {
  bool scores = false;
  for (const Placed& placed : parts_) {
    if (plan.allocate->changes_sets())
      throw Error{Refusal::usage, name_, "takes its plan from of=(POLICY)", "the part inside of=(POLICY)",
                  fmt::format("{} outside of=({})", placed.name, plan.allocate->other->label_with_seeds())};
    if (placed.kind == PartKind::allocate && plan.nesting == Nesting::prunes_next)
      throw Error{Refusal::usage, name_, "sets the budgets of its layers itself", "lengths=scaled",
                  "allocate=" + placed.name};
    if (placed.kind == PartKind::allocate && plan.own_memory)
      throw Error{Refusal::usage, name_, "sets the budgets of its layers and heads itself",
                  "another policy for this part", "allocate=" + placed.name};
    placed.part->fill(plan);
    scores = scores || placed.kind == PartKind::score;
  }
  // A selector that reads no scores replaces the scorer as well.
  if (!scores && !plan.select.reads_scores) plan.score = {};
}

void ConfiguredPolicy::check_given() const {
  const bool scores = static_cast<bool>(plans(2).front().plan.score);
  const std::unique_ptr<Policy> fresh = make_policy(name_);
  const Parameters defaults = fresh->parameters(), own = policy_->parameters();
  for (const std::string& name : given_) {
    const Parameter* parameter = own.find(name);
    if (parameter == nullptr || parameter->part.empty()) continue;
    // All values of a policy are a text of it: those that nobody has changed, or only a preset, may stand there unread.
    if (parameter->text() == defaults.find(name)->default_text) continue;
    if (std::ranges::any_of(own.presets(), [&](const Preset& preset) {
          return std::ranges::any_of(preset.values, [&](const auto& value) {
            return value.first == name && value.second == parameter->text();
          });
        }))
      continue;
    const auto takes_place = [&](const Placed& placed) { return kind_of(parameter->part)->value == placed.kind; };
    const auto placed = std::ranges::find_if(parts_, takes_place);
    if (placed == parts_.end() && (scores || parameter->part != "score")) continue;
    if (std::ranges::any_of(parts_, [&](const Placed& part) { return part.part->parameters().find(name) != nullptr; }))
      continue;
    throw Error{Refusal::usage, name_ + ":" + name, "unused parameter",
                "the " + parameter->part + " of " + name_ + " itself",
                placed == parts_.end() ? "a selector without scores" : parameter->part + "=" + placed->name};
  }
}

void ConfiguredPolicy::check_limits(int prompt, int layers) const {
  policy_->check_limits(prompt, layers);
  if (const auto& protect = common_->protect)
    for (const int tokens : {protect->sinks, protect->recent.count})
      if (tokens > prompt)
        throw Error{Refusal::usage, name_ + ":protect", "exceeds the trace", fmt::format("at most {} tokens", prompt),
                    std::to_string(tokens)};
  const Parameters own = parameters();
  for (const Parameter& parameter : own.all()) {
    if (parameter.up_to == UpTo::any || !given_.contains(parameter.name)) continue;
    const int most = parameter.up_to == UpTo::prompt ? prompt : layers;
    if (parameter.tokens() <= most) continue;
    if (counts_layers(parameter))
      throw Error{Refusal::usage, name_ + ":" + parameter.name, "no such layer",
                  "-" + std::to_string(most) + ".." + std::to_string(most - 1), parameter.text()};
    throw Error{Refusal::usage, name_ + ":" + parameter.name, "exceeds the trace",
                "at most " + std::to_string(most) + (parameter.up_to == UpTo::prompt ? " tokens" : " layers"),
                parameter.text()};
  }
}

std::string ConfiguredPolicy::why_no_twin(int layers) const {
  if (card().family == Family::control) return "is a control itself";
  std::string keeps_everything;
  bool chooses = false;
  for (const LayerPlan& of_range : plans(layers)) {
    const std::string reason = kvreplay::why_no_twin(of_range.plan);
    const bool is_whole =
        of_range.plan.allocate->keeps_everything && of_range.plan.schedule->decided() == Decision::after_prefill;
    if (!reason.empty() && !is_whole) return reason;
    if (is_whole)
      keeps_everything = reason;
    else
      chooses = true;
  }
  return chooses ? "" : keeps_everything;
}

void ConfiguredPolicy::check_layers_apart() const {
  if (name_ == layer_ranges_name)
    throw Error{Refusal::usage, name_, "is a policy per range of layers", "one policy for all layers"};
  constexpr int some_layers = 64;
  const std::vector<LayerPlan> all = plans(some_layers);
  if (all.size() > 1)
    throw Error{Refusal::usage, name_, "has a separate plan for each range of layers", "one policy for all layers",
                name_};
  kvreplay::check_layers_apart(name_, all.front().plan);
}

Budget Budget::parse(std::string_view text) {
  const std::string where = "budget " + std::string(text);
  Budget budget{.literal = std::string(text)};
  constexpr std::string_view seen = "@seen";
  if (text.ends_with(seen)) {
    budget.at_seen = true;
    text.remove_suffix(seen.size());
  }
  if (text.empty())
    throw Error{Refusal::usage, "budget", "empty", "a fraction in (0, 1] or a number of tokens", budget.literal};
  constexpr std::pair<std::string_view, double> units[] = {{"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}};
  for (const auto& [unit, size] : units) {
    if (!text.ends_with(unit)) continue;
    budget.bytes = std::floor(parse_real(where, text.substr(0, text.size() - unit.size())) * size);
    if (budget.at_seen)
      throw Error{Refusal::usage, where, "@seen needs a fraction",
                  "a fraction in (0, 1] of the tokens seen, as in 0.1@seen", std::string(text)};
    if (budget.bytes < 1) throw Error{Refusal::usage, where, "out of range", "1 byte or more", std::string(text)};
    return budget;
  }
  if (text.ends_with('B') || text.ends_with('b'))
    throw Error{Refusal::usage, where, "unknown unit of memory", "KiB, MiB or GiB", std::string(text)};
  if (text.find_first_of("0123456789") == std::string_view::npos)
    throw Error{Refusal::usage, where, "not a budget", "a share (0.1 or 10%), a number of tokens (48) or bytes (1MiB)",
                std::string(text)};
  const bool percent = text.ends_with('%');
  if (percent || text.find_first_of(".eE") != std::string_view::npos) {
    budget.fraction = percent ? parse_real(where, text.substr(0, text.size() - 1)) / 100.0 : parse_real(where, text);
    if (!(budget.fraction > 0.0 && budget.fraction <= 1.0))
      throw Error{Refusal::usage, where, "out of range", "a fraction in (0, 1]", std::string(text)};
  } else if (budget.at_seen) {
    throw Error{Refusal::usage, where, "@seen needs a fraction",
                "a fraction in (0, 1] of the tokens seen, as in 0.1@seen", std::string(text)};
  } else {
    budget.count = parse_int(where, text, 1);
  }
  return budget;
}

std::string Budget::of_compression_ratio(std::string_view text) {
  const std::string where = "--compression-ratio";
  const double ratio = parse_real(where, text);
  const double kept = std::round((1.0 - ratio) * 1e12) / 1e12;  // the difference has rounding errors below 1e-12
  if (!(ratio >= 0.0 && kept > 0.0))
    throw Error{Refusal::usage, where, "out of range", "the share to evict, in [0, 1)", std::string(text)};
  return kept == 1.0 ? "1.0" : fmt::format("{}", kept);  // "1" would be a number of tokens
}

int Budget::tokens(int prompt, const BytesOfTokens& bytes_of) const {
  if (bytes > 0) {
    const auto fewer = std::views::iota(0, prompt);
    const auto fits_one_more = [&](int kept) { return bytes_of(kept + 1) <= bytes; };
    return static_cast<int>(std::ranges::partition_point(fewer, fits_one_more) - fewer.begin());
  }
  return (count > 0 ? Amount::tokens(count) : Amount::fraction(fraction)).of_prompt(prompt);
}

}  // namespace kvreplay
