#include "policies/text/layer_ranges.h"

#include <fmt/format.h>

#include <algorithm>
#include <list>

#include "listed_names.h"
#include "policies/text/configured.h"
#include "policies/text/inner_policy.h"
#include "policies/text/policy_source.h"

namespace kvreplay {
namespace {

constexpr Card card{
    .name = layer_ranges_name,
    .summary = "Ranges of layers, each with its own policy",
    .paper = "",
    .score = "that of the policy of each range",
};

/// "0-14" or "15".
struct Range {
  std::string text;
  int first = 0;
  int last = 0;
  InnerPolicy policy = {};
};

bool is_range(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789-") == std::string_view::npos;
}

Range range_of(std::string_view text) {
  const std::string where = fmt::format("layers:{}", text);
  const std::size_t dash = text.find('-');
  Range range{std::string(text), parse_int(where, text.substr(0, dash), 0)};
  range.last = dash == std::string_view::npos ? range.first : parse_int(where, text.substr(dash + 1), 0);
  if (const std::string plain =
          range.first == range.last ? std::to_string(range.first) : fmt::format("{}-{}", range.first, range.last);
      range.last >= range.first && plain != text)
    throw Error{Refusal::usage, where, "not in canonical form", plain, std::string(text)};
  if (range.last < range.first)
    throw Error{Refusal::usage, where, "ends before it begins", "FIRST-LAST", std::string(text)};
  return range;
}

class LayerRanges final : public Policy {
 public:
  const Card& card() const override { return kvreplay::card; }

  bool declare(std::string_view name) override {
    if (!is_range(name)) return false;
    ranges_.push_back(range_of(name));
    return true;
  }

  Parameters parameters() override {
    Parameters declared{layer_ranges_name};
    for (Range& range : ranges_)
      declared.add(
          range.text, range.policy.text, "(POLICY)",
          [&](std::string_view text) { return range.policy.set(text, seed_); }, "the policy of these treated layers");
    return declared;
  }

  void set_seed(std::uint64_t seed) override { seed_ = seed; }

  std::vector<Source> sources() const override {
    std::vector<Source> all;
    for (const Range& range : ranges_)
      for (const Source& source : range.policy.sources()) all.push_back(source);
    return all;
  }

  void check() const override {}

  void check_limits(int prompt, int) const override {
    for (const Range& range : ranges_) range.policy->check_limits(prompt, range.last - range.first + 1);
  }

  std::vector<LayerPlan> plans(int layers) const override {
    std::vector<const Range*> ascending;
    for (const Range& range : ranges_) ascending.push_back(&range);
    std::ranges::sort(ascending, {}, &Range::first);
    std::vector<LayerPlan> all;
    int next = 0;
    for (const Range* range : ascending) {
      if (range->first != next || range->last >= layers) refuse(layers);
      for (LayerPlan& plan : range->policy->plans(range->last - range->first + 1)) {
        if (plan.plan.allocate->other != nullptr)
          throw Error{Refusal::usage, fmt::format("layers:{}", range->text),
                      "the policy copies counts or sets of another policy",
                      "a policy that does not use another policy's counts or sets", range->policy.text};
        plan.first += range->first;
        all.push_back(std::move(plan));
      }
      next = range->last + 1;
    }
    if (next != layers) refuse(layers);
    return all;
  }

 private:
  [[noreturn]] void refuse(int layers) const {
    std::string found;
    for (const Range& range : ranges_) found += (found.empty() ? "" : ", ") + range.text;
    throw Error{Refusal::usage, layer_ranges_name, "ranges must cover each treated layer once",
                fmt::format("0-{}", layers - 1), found.empty() ? "no range" : found};
  }

  std::uint64_t seed_ = 0;
  std::list<Range> ranges_;  // parameters hold references
};

}  // namespace

std::unique_ptr<Policy> make_policy(const std::string& name) {
  if (name == layer_ranges_name) return std::make_unique<LayerRanges>();
  const std::string registered = registered_policy(name);
  const PolicyEntry* const entry = policies().find(registered);
  if (entry == nullptr)
    throw Error{Refusal::usage, registered.empty() ? "policy" : registered,
                registered.empty() ? "no name" : "unknown policy",
                nearest_listed(registered, policies().names(), "kvreplay policies"), registered};
  return entry->make();
}

}  // namespace kvreplay
