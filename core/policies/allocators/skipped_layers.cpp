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

constexpr const char* where = "skip_layers";

/// Ascending, each once.
std::vector<int> skipped_layers_of(std::string_view text) {
  std::vector<int> layers;
  if (text == "none") return layers;
  for (const std::string_view piece : split_list(where, text)) layers.push_back(parse_int(where, piece, 0));
  std::ranges::sort(layers);
  layers.erase(std::ranges::unique(layers).begin(), layers.end());
  return layers;
}

std::vector<int> counts(const std::vector<int>& skipped, const Division& division) {
  if (skipped.back() >= division.layers)
    throw Error{Refusal::usage, where, "no such layer", fmt::format("0..{}", division.layers - 1),
                std::to_string(skipped.back())};
  const auto layers = static_cast<std::size_t>(division.layers);
  std::vector<int> least(layers, std::max(1, division.by_rule()));
  for (const int layer : skipped) least[static_cast<std::size_t>(layer)] = division.prompt;
  const std::int64_t slots = std::int64_t{division.layers} * division.budget;
  std::int64_t needed = 0;
  for (const int count : least) needed += count;
  if (slots < needed)
    throw Error{
        Refusal::usage, where, "budget too small for the layers that keep everything",
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

void SkippedLayers::parameters(Parameters& p) {
  const auto read = p.of_part("allocate");
  const auto normal = [](std::string_view text) {
    return text == "none" ? std::string(text) : fmt::format("{}", fmt::join(skipped_layers_of(text), ","));
  };
  p.add(where, layers, "none, or (LAYER,...)", normal, "treated layers, numbered from 0, that keep the whole prompt");
}

AllocatorPtr SkippedLayers::allocator() const {
  if (layers == "none") return uniform();
  return by_layer(
      [skipped = skipped_layers_of(layers)](const Division& division) { return counts(skipped, division); });
}

}  // namespace kvreplay
