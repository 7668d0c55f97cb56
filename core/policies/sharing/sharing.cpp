#include "policies/sharing/sharing.h"

#include <algorithm>

#include "policies/plan_part.h"

namespace kvreplay {
namespace {

struct Every {
  static constexpr PartKind kind = PartKind::share;
  static constexpr const char* name = "every";
  static constexpr const char* summary = "groups of `reuse` adjacent layers use the set of their first layer";

  int reuse = 2;

  void parameters(Parameters& p) {
    p.add("reuse", reuse, IntRange{.least = 1, .up_to = UpTo::layers}, "number of adjacent layers that share a set");
  }
  void fill(Plan& plan) const { plan.share = every(reuse); }
};

struct OneLayer {
  static constexpr PartKind kind = PartKind::share;
  static constexpr const char* name = "one";
  static constexpr const char* summary = "all layers use the set of one layer";

  int layer = -1;

  void parameters(Parameters& p) {
    p.add("layer", layer, any_layer, "layer whose set all layers use; -1 is the last layer");
  }
  void fill(Plan& plan) const { plan.share = one_layer(layer); }
};

const RegisteredFixedPart registered_none{PartKind::share, "none", "every layer has its own set",
                                          [](Plan& plan) { plan.share = {}; }};
const RegisteredPart<Every> registered_every;
const RegisteredPart<OneLayer> registered_one;

}  // namespace

Sharing every(int n) {
  if (n == 1) return {};
  return {[n](int layer, int) { return layer / n * n; }};
}

Sharing last_of(int n) {
  if (n == 1) return {};
  return {[n](int layer, int layers) { return std::min(layers, (layer / n + 1) * n) - 1; }};
}

Sharing one_layer(int layer) {
  return {[layer](int, int layers) { return layer < 0 ? layers + layer : layer; }};
}

}  // namespace kvreplay
