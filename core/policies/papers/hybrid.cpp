#include <memory>

#include "policies/policy.h"

namespace kvreplay {
namespace {

struct Hybrid {
  static constexpr Card card{
      .name = "hybrid",
      .summary = "ChunkKV in the lower half of the layers, SnapKV in the upper half",
      .paper = "ChunkKV (NeurIPS version), section 4.6",
      .score = "chunkkv for l < floor(L/2), snapkv from there on",
      .family = Family::chunk,
  };

  std::unique_ptr<Policy> chunkkv = policies().get("chunkkv").make();
  std::unique_ptr<Policy> snapkv = policies().get("snapkv").make();

  void parameters(Parameters& p) {
    p.adopt_all("chunkkv.", chunkkv->parameters());
    p.adopt_all("snapkv.", snapkv->parameters());
  }

  std::vector<LayerPlan> plans(int layers) const {
    std::vector<LayerPlan> all;
    append_plans(all, *chunkkv, layers / 2);
    append_plans(all, *snapkv, layers - layers / 2);
    return all;
  }
};

const Registered<Hybrid> registered;

}  // namespace
}  // namespace kvreplay
