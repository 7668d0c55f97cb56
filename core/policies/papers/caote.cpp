#include <algorithm>
#include <limits>
#include <numeric>

#include "policies/plan_part.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

enum class Base { window, cumulative };
constexpr Choice<Base> base_words[] = {{"window", Base::window}, {"cumulative", Base::cumulative}};

struct Caote {
  static constexpr Card card{
      .name = "caote",
      .summary =
          "Change of the attention output when a token is evicted; one-shot, whereas the paper evicts one token at a "
          "time and renormalises",
      .paper = "Goel et al. 2025, CAOTE, arXiv:2504.14051",
      .score = "s[h,j] = a_j / (1 - a_j) |sum_i a_i v_i - v_j|, a the attention of the base, normalised to sum 1",
      .family = Family::attention,
  };

  Base base = Base::window;
  int window = 8;
  Grouping grouping = {};

  void parameters(Parameters& p) {
    p.add<Base>(
        "base", base, base_words,
        "attention of the observation window (as snapkv; with window=1 as tova), or of all prompt queries (as h2o)");
    p.add("window", window, IntRange{.least = 1},
          "observation window of base=window: its queries score the prompt, its tokens are always kept");
    grouping.parameters(p);
  }

  Matrix score(const LayerView& view, const Scoring& how) const {
    Matrix change = base == Base::window ? view.window_attention(window, how.window_end) : view.cumulative_attention();
    for (int head = 0; head < change.rows(); ++head) {
      const std::span<double> share = change.row(head);
      const double sum = std::accumulate(share.begin(), share.end(), 0.0);
      for (double& one : share) one /= sum;
    }
    const Matrix distance =
        view.in_this_layer([&] { return distances_from_mean(view.stored_values(), change, view.backend().threads()); });
    for (std::size_t i = 0; i < change.values().size(); ++i) {
      const double a = change.values()[i];
      // A token that receives all of the attention determines the whole output.
      change.values()[i] =
          a < 1 ? a / (1 - a) * distance.values()[i] : std::numeric_limits<double>::max() / change.rows();
    }
    return how.grouping(change, view.group());
  }

  Plan plan() const {
    const bool last = base == Base::window;
    return {
        .grouping = grouping,
        .score = {.score = [*this](const LayerView& view, const Scoring& how) { return score(view, how); },
                  .needs = last ? last_queries(window) : all_queries(),
                  .accumulates = !last,
                  .places_window = last,
                  .name = name_with_values("caote", *this)},
        .protect = {.recent = last ? Amount::tokens(window) : Amount::fraction(0.5)},
    };
  }
};

const Registered<Caote> registered;

}  // namespace
}  // namespace kvreplay
