#include "policies/sharing/sharing.h"

#include <algorithm>

#include "policies/plan_part.h"

namespace kvreplay {
namespace {

struct Every {
  static constexpr PartKind kind = PartKind::share;
  static constexpr const char* name = "every";
  static constexpr const char* summary = "the first of every `reuse` layers selects for all of them";

  int reuse = 2;

  void parameters(Parameters& p) {
    p.add("reuse", reuse, IntRange{.least = 1, .up_to = UpTo::layers}, "layers that share the first one's set");
  }
  void fill(Plan& plan) const { plan.share = every(reuse); }
};

struct OneLayer {
  static constexpr PartKind kind = PartKind::share;
  static constexpr const char* name = "one";
  static constexpr const char* summary = "one layer selects for all";

  int layer = -1;

  void parameters(Parameters& p) {
    p.add("layer", layer, any_layer, "the layer whose set all use; -1 is the last one");
  }
  void fill(Plan& plan) const { plan.share = one_layer(layer); }
};

const RegisteredFixedPart registered_none{PartKind::share, "none", "every layer selects for itself",
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
