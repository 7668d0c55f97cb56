#include "policies/parts/allocation.h"

#include <algorithm>

#include "policies/parts/ranking.h"
#include "policies/plan_part.h"

namespace kvreplay {
namespace {

/// How many of the best rows * slots candidates lie in each row, for matrices one after another; what stays by rule
/// included.
std::vector<std::vector<int>> counts_of_best(const Division& division, std::span<const Matrix> scores) {
  std::vector<double> flat;
  int slots = 0;
  for (const Matrix& layer : scores) {
    for (int row = 0; row < layer.rows(); ++row)
      std::ranges::copy(layer.row(row).subspan(static_cast<std::size_t>(division.sinks),
                                               static_cast<std::size_t>(division.candidates())),
                        std::back_inserter(flat));
    slots += layer.rows() * division.slots();
  }
  const std::vector<std::int32_t> best = largest(flat, slots);
  std::vector<std::vector<int>> counts;
  std::int32_t begin = 0;
  for (const Matrix& layer : scores) {
    std::vector<int>& of_layer = counts.emplace_back(static_cast<std::size_t>(layer.rows()));
    for (int& count : of_layer) {
      const std::int32_t end = begin + division.candidates();
      count = division.by_rule() +
              static_cast<int>(std::ranges::lower_bound(best, end) - std::ranges::lower_bound(best, begin));
      begin = end;
    }
  }
  return counts;
}

struct UniformPart {
  static constexpr PartKind kind = PartKind::allocate;
  static constexpr const char* name = "uniform";
  static constexpr const char* summary = "every layer and head gets B";

  void parameters(Parameters&) {}
  void fill(Plan& plan) const { plan.allocate = Uniform{}; }
};

struct RankedLayer {
  static constexpr PartKind kind = PartKind::allocate;
  static constexpr const char* name = "ranked-layer";
  static constexpr const char* summary = "the best entries of all heads of a layer together";

  void parameters(Parameters&) {}
  void fill(Plan& plan) const { plan.allocate = ranked_within_layer(); }
};

struct RankedGlobal {
  static constexpr PartKind kind = PartKind::allocate;
  static constexpr const char* name = "ranked-global";
  static constexpr const char* summary = "the best entries of all layers and heads together";

  void parameters(Parameters&) {}
  void fill(Plan& plan) const { plan.allocate = ranked_across_layers(); }
};

const RegisteredPart<UniformPart> registered_uniform;
const RegisteredPart<RankedLayer> registered_layer;
const RegisteredPart<RankedGlobal> registered_global;

}  // namespace

WithinLayer ranked_within_layer() {
  return [](const Division& division, const Matrix& scores) { return counts_of_best(division, {&scores, 1}).front(); };
}

AcrossLayers ranked_across_layers() { return counts_of_best; }

}  // namespace kvreplay
