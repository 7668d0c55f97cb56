#include <algorithm>

#include "policies/allocators/entropy_allocation.h"
#include "policies/plan_part.h"
#include "policies/policy.h"
#include "policies/scores/window_score.h"

namespace kvreplay {
namespace {

struct Lava {
  static constexpr Card card{
      .name = "lava",
      .summary =
          "Attention of the observation window times the head's largest value norm; per-layer budgets by the entropy "
          "of the scores",
      .paper = "Shen et al. 2025, LAVa, arXiv:2509.09754",
      .score =
          "s[h,j] = max_k |v_k|_1 sum over the last `window` queries t of softmax_j(q_t k_j), pooled over j; head "
          "budgets in proportion to (1 - floor) c + floor b, c the head's number of the layer's highest scores, b the "
          "mean",
      .family = Family::budget,
  };

  int window = 32;
  int kernel = 7;
  Pool pool = Pool::max;
  Grouping grouping = {.aggregate = Aggregate::max};
  EntropyAllocation allocation = {};

  void parameters(Parameters& p) {
    add_window(p, window);
    add_pooling(p, pool, kernel);
    grouping.parameters(p);
    allocation.parameters(p);
  }

  Matrix score(const LayerView& view, const Scoring& how) const {
    Matrix attention = view.window_attention(window, how.window_end);
    for (int head = 0; head < attention.rows(); ++head) {
      const double largest = std::ranges::max(view.value_norms(1).row(head / view.group()));
      for (double& one : attention.row(head)) one *= largest;
    }
    return pooled(how.grouping(attention, view.group()), pool, kernel, candidates_of(view.tokens(), how));
  }

  Plan plan() const {
    return {
        .grouping = grouping,
        .score = {.score = [*this](const LayerView& view, const Scoring& how) { return score(view, how); },
                  .needs = last_queries(window),
                  .reads_recent = pool != Pool::none,
                  .reads_sinks = pool != Pool::none,
                  .places_window = true,
                  .name = name_with_values("lava", *this)},
        .protect = {.recent = Amount::tokens(window)},
        .allocate = across_layers(allocation.allocator()),
    };
  }
};

const Registered<Lava> registered;

}  // namespace
}  // namespace kvreplay
