#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "observables/principal_direction.h"
#include "policies/policy.h"
#include "policies/scores/key_products.h"
#include "policies/text/array_file.h"

namespace kvreplay {
namespace {

/// [Hq, d]: first right singular vector of the queries so far, as they are stored; its sign is chosen so that the mean
/// query has a positive projection.
const Matrix& query_directions(const LayerView& view) {
  return view.remember("query_directions", {}, [&] {
    return principal_directions(view.tensors(), position_range(0, view.residents().seen), view.backend().threads());
  });
}

struct QFilter {
  static constexpr Card card{
      .name = "q-filter",
      .summary =
          "Projection of the keys on the principal query direction of each KV head, computed from the prompt or read "
          "from a file",
      .paper = "Godey et al. 2025, Q-Filters, arXiv:2503.02812",
      .score = "s[h,j] = <k_j, u>, u the group mean of the queries' first right singular vectors, signed by their mean",
      .family = Family::geometry,
  };

  ArrayFile filters{"trace"};

  void parameters(Parameters& p) {
    filters.parameter(p, "filters",
                      "directions [L, Hkv, d] of the treated layers, or those of this prompt's queries; keys along "
                      "them are kept (published filters have the opposite sign)");
  }

  std::vector<Source> sources() const { return filters.sources(); }

  /// [Hkv, d]: one direction per KV head.
  Matrix directions(const LayerView& view) const {
    Matrix result(view.kv_heads(), view.tensors().k.dim);
    if (!filters.is_file()) return Grouping{}(query_directions(view), view.group());
    const std::span<const double> all =
        filters
            .of_shape("q-filter:filters", {view.layers(), result.rows(), result.columns()},
                      "[treated layers, KV heads, head dimension]")
            .numbers;
    std::ranges::copy(
        all.subspan(static_cast<std::size_t>(view.layer()) * result.values().size(), result.values().size()),
        result.values().begin());
    return result;
  }

  Plan plan() const {
    const auto score = [*this](const LayerView& view, const Scoring&) { return key_products(view, directions(view)); };
    const std::vector<Source> files = sources();
    return {.score = {.score = score,
                      .needs = filters.is_file() ? Needs{.same_kv_shapes = true} : all_queries(),
                      .name = "q-filter(" + (files.empty() ? "trace" : files.front().hash) + ")"}};
  }
};

const Registered<QFilter> registered;

}  // namespace
}  // namespace kvreplay
