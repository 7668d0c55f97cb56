#include "policies/allocators/decay.h"

#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

#include "policies/arithmetic/apportion.h"
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

constexpr Choice<DecayCurve> curve_words[] = {
    {"cosine", DecayCurve::cosine}, {"linear", DecayCurve::linear}, {"constant", DecayCurve::constant}};

constexpr int too_few = 64;  // to prune down to, in PyramidInfer's code

struct DecayPart : Decay {
  static constexpr PartKind kind = PartKind::allocate;
  static constexpr const char* name = "decay";
  static constexpr const char* summary = "per-layer budgets that shrink by a factor from layer to layer";

  void fill(Plan& plan) const { plan.allocate = by_layer(scaled()); }
};

const RegisteredPart<DecayPart> registered;

}  // namespace

void Decay::parameters(Parameters& p) {
  const auto read = p.of_part("allocate");
  p.add("r", r, RealRange{1e-6, 1.0},
        "ratio of a layer's budget to the previous layer's: constant r, from 1 down to r (cosine), or from r up to 1 "
        "(linear)");
  p.add<DecayCurve>("decay", curve, curve_words, "curve of this ratio over depth");
}

double Decay::factor(int layer, int layers) const {
  const double depth = static_cast<double>(layer) / layers;
  switch (curve) {
    case DecayCurve::cosine:
      return r + (1 - r) * (1 + std::cos(std::numbers::pi * depth)) / 2;
    case DecayCurve::linear:
      return r + (1 - r) * depth;
    case DecayCurve::constant:
      break;
  }
  return r;
}

ByLayer Decay::scaled() const {
  return [decay = *this](const Division& division) {
    std::vector<double> sizes{1.0};
    for (int layer = 0; layer + 1 < division.layers; ++layer)
      sizes.push_back(sizes.back() * decay.factor(layer, division.layers));
    const std::int64_t slots = std::int64_t{division.layers} * division.slots();
    std::vector<int> counts = apportion(slots, sizes, 0, division.candidates());
    for (int& count : counts) count += division.by_rule();
    return counts;
  };
}

ByLayer Decay::natural() const {
  return [decay = *this](const Division& division) {
    int context = division.candidates();
    std::vector<int> counts;
    for (int layer = 0; layer < division.layers; ++layer) {
      counts.push_back(division.by_rule() + context);
      const int pruned = static_cast<int>(std::floor(context * decay.factor(layer, division.layers)));
      if (pruned > too_few) context = pruned;
    }
    return counts;
  };
}

}  // namespace kvreplay
