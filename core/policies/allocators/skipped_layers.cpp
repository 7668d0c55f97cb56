#include "policies/allocators/skipped_layers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "policies/arithmetic/apportion.h"
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

std::vector<int> counts(const std::vector<int>& skipped, const Division& division) {
  const auto layers = static_cast<std::size_t>(division.layers);
  std::vector<int> least(layers, std::max(1, division.by_rule()));
  for (const int layer : skipped) least[static_cast<std::size_t>(layer)] = division.prompt;
  const std::int64_t slots = std::int64_t{division.layers} * division.budget;
  std::int64_t needed = 0;
  for (const int count : least) needed += count;
  if (slots < needed)
    throw Error{
        Refusal::usage, LayerList::name, "budget too small for the layers that keep everything",
        fmt::format("a budget of at least {} tokens per layer", (needed + division.layers - 1) / division.layers),
        std::to_string(division.budget)};
  // Layers at their bound are excluded; the remaining slots are divided equally.
  return apportion(slots, std::vector<std::int64_t>(layers, 1), least, division.prompt);
}

struct SkipPart : SkippedLayers {
  static constexpr PartKind kind = PartKind::allocate;
  static constexpr const char* name = "skip";
  static constexpr const char* summary = "some layers keep every token, the others share the remaining budget equally";

  void fill(Plan& plan) const { plan.allocate = allocator(); }
};

const RegisteredPart<SkipPart> registered;

}  // namespace

void LayerList::add_to(Parameters& p, const char* help) {
  const auto normal = [](std::string_view given) {
    return given == "none" ? std::string(given)
                           : fmt::format("{}", fmt::join(LayerList{std::string(given)}.layers(), ","));
  };
  p.add(name, text, "none, or (LAYER,...)", normal, help);
}

std::vector<int> LayerList::layers() const {
  std::vector<int> layers;
  if (text == "none") return layers;
  for (const std::string_view piece : split_list(name, text)) layers.push_back(parse_int(name, piece, 0));
  std::ranges::sort(layers);
  layers.erase(std::ranges::unique(layers).begin(), layers.end());
  return layers;
}

void LayerList::check(int count) const {
  if (const std::vector<int> all = layers(); !all.empty() && all.back() >= count)
    throw Error{Refusal::usage, name, "no such layer", fmt::format("0..{}", count - 1), std::to_string(all.back())};
}

void SkippedLayers::parameters(Parameters& p) {
  const auto read = p.of_part("allocate");
  skipped.add_to(p, "treated layers, numbered from 0, that keep the whole prompt");
}

AllocatorPtr SkippedLayers::allocator() const {
  if (skipped.text == "none") return uniform();
  return by_layer([list = skipped](const Division& division) {
    list.check(division.layers);
    return counts(list.layers(), division);
  });
}

}  // namespace kvreplay
