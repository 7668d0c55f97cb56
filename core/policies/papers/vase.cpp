#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "policies/arithmetic/pooling.h"
#include "policies/arithmetic/ranking.h"
#include "policies/plan_part.h"
#include "policies/policy.h"
#include "policies/scores/prefix_attention.h"
#include "policies/scores/window_score.h"
#include "policies/selectors/sampled.h"

namespace kvreplay {
namespace {

struct Vase {
  static constexpr Card card{
      .name = "vase",
      .summary =
          "Value-aware stochastic eviction: keeps the values with the largest range over their channels, and samples "
          "the other tokens by the attention of the last queries",
      .paper = "VaSE, arXiv:2606.03928",
      .score =
          "keeps the floor(large B) largest max_c v_jc - min_c v_jc, sinks included; samples the others in proportion "
          "to s[h,j] = pool over j of the mean over group and window's queries t of softmax_j(q_t k_j / temperature)",
      .family = Family::attention,
  };

  int window = 64;
  int kernel = 5;
  double large = 0.25;
  int sinks = 4;
  double temperature = 1;
  std::uint64_t seed = 0;

  void parameters(Parameters& p) {
    add_window(p, window);
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens, always kept");
    {
      const auto read = p.of_part("score");
      p.add("kernel", kernel, IntRange{.least = 1, .odd = true}, "width of the average pooling");
      p.add("large", large, RealRange{}, "share of the budget for the values with the largest range");
      p.add("temperature", temperature, RealRange{1e-6, 1e6}, "divides the logits of the attention");
    }
    const auto read = p.of_part("select");
    p.add_seed("seed", seed, "random seed");
  }

  /// [Hkv, n]: max_c v_jc - min_c v_jc.
  static const Matrix& value_ranges(const LayerView& view) {
    return view.remember("value_ranges", {}, [&] {
      const Vectors values = view.stored_values();
      Matrix ranges(values.heads, values.count);
      view.on_threads(static_cast<std::size_t>(values.heads), [&](std::size_t number) {
        const auto head = static_cast<int>(number);
        std::vector<double> value(static_cast<std::size_t>(values.dim));
        for (int j = 0; j < values.count; ++j) {
          values.read(head, j, value);
          const auto [least, most] = std::ranges::minmax(value);
          ranges(head, j) = most - least;
        }
      });
      return ranges;
    });
  }

  /// Tokens that are kept for their values have infinite scores.
  Matrix score(const LayerView& view, const Scoring& how) const {
    const int before_recent = view.tokens() - how.recent;
    Matrix scores = pooled(PrefixAttention{.window = window, .temperature = temperature}(view, how), Pool::average,
                           kernel, Candidates(before_recent));
    const Candidates candidates = candidates_of(view.tokens(), how);
    const int slots = how.budget - how.sinks - how.recent;
    const int kept = std::clamp(Amount::fraction(large).of(how.budget) - how.sinks, 0, std::max(0, slots));
    for (int row = 0; row < scores.rows(); ++row)
      for (const std::int32_t j : largest(candidates.of(value_ranges(view).row(row)), kept, candidates.first))
        scores(row, j) = std::numeric_limits<double>::infinity();
    return scores;
  }

  Plan plan() const {
    return {
        .score = {.score = [*this](const LayerView& view, const Scoring& how) { return score(view, how); },
                  .needs = last_queries(window),
                  .reads_recent = true,
                  .reads_budget = true,
                  .reads_sinks = true,
                  .places_window = true,
                  .name = name_with_values(card.name, *this)},
        .protect = {.sinks = sinks, .recent = Amount::tokens(window)},
        .select = Sampled{.share = 1, .seed = seed, .weights = SampleWeights::score}.selector(),
    };
  }
};

const Registered<Vase> registered;

}  // namespace
}  // namespace kvreplay
