#include "policies/policy.h"
#include "policies/stores/merged_layers.h"

namespace kvreplay {
namespace {

struct MiniCache {
  static constexpr Card card{
      .name = "minicache",
      .summary = "every token; in the upper half of the layers two neighbours share a direction for each key and value",
      .paper = "Liu et al. 2024, MiniCache, arXiv:2405.14366",
      .score =
          "none; of layers l-1 and l: e = (sin((1-t) w) x(l-1)/|x(l-1)| + sin(t w) x(l)/|x(l)|) / sin w, w the angle "
          "between them, is given back as |x| e",
      .family = Family::store,
  };

  MergedLayers merged = {};

  void parameters(Parameters& p) { merged.parameters(p); }

  Plan plan() const { return {.allocate = every_token(), .store = merged.store()}; }
};

const Registered<MiniCache> registered;

}  // namespace
}  // namespace kvreplay
