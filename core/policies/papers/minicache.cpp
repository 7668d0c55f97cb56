#include "policies/policy.h"
#include "policies/stores/merged_layers.h"

namespace kvreplay {
namespace {

struct MiniCache {
  static constexpr Card card{
      .name = "minicache",
      .summary =
          "Cross-layer merging: pairs of adjacent layers in the upper half share interpolated directions of keys and "
          "values; nothing is evicted",
      .paper = "Liu et al. 2024, MiniCache, arXiv:2405.14366",
      .score =
          "none; for layers l-1 and l, x is stored as |x| e, e = (sin((1-t) w) x(l-1)/|x(l-1)| + sin(t w) x(l)/|x(l)|) "
          "/ sin w, w the angle between the two",
      .family = Family::store,
  };

  MergedLayers merged = {};

  void parameters(Parameters& p) { merged.parameters(p); }

  Plan plan() const { return {.allocate = every_token(), .store = merged.store()}; }
};

const Registered<MiniCache> registered;

}  // namespace
}  // namespace kvreplay
