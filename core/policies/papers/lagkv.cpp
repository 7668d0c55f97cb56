#include <span>
#include <vector>

#include "observables/softmax.h"
#include "policies/arithmetic/ranking.h"
#include "policies/plan_part.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

std::vector<double> softmax_of(std::span<const double> logits) {
  std::vector<double> shares(logits.begin(), logits.end());
  to_softmax(shares);
  return shares;
}

struct LagKv {
  static constexpr Card card{
      .name = "lagkv",
      .summary =
          "Standard deviation of keys and values over the channels, each partition normalised by the minima and maxima "
          "of the next one",
      .paper = "Liang et al. 2025, LagKV, arXiv:2504.04704",
      .score =
          "s[h,j] = rank in its partition of the mean over K and V of softmax_j(std_c((x_jc - min_c) / (max_c - "
          "min_c))), divided by `lag`; min and max over the next partition",
      .family = Family::geometry,
  };

  int sinks = 4;
  int lag = 128;

  void parameters(Parameters& p) {
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt},
          "attention sinks: first tokens, always kept, outside all partitions");
    p.add("lag", lag, IntRange{.least = 1}, "tokens per partition");
  }

  /// Tokens that no whole partition follows get the score 1. With fewer than two partitions, scores grow with the
  /// position, so that the most recent tokens are kept.
  Matrix scores(const LayerView& view, int before) const {
    const int partitions = (view.tokens() - before) / lag;
    Matrix scores(view.kv_heads(), view.tokens(), 1.0);
    if (partitions < 2)
      for (int row = 0; row < scores.rows(); ++row)
        for (int j = 0; j < view.tokens(); ++j) scores(row, j) = j;
    const auto deviations = [&](const char* observable, const Vectors& vectors) -> const Matrix& {
      return view.remember(observable, {static_cast<double>(before), static_cast<double>(lag)},
                           [&] { return lag_deviations(vectors, before, lag, view.backend().threads()); });
    };
    const Matrix& of_keys = deviations("key_lag_deviations", view.keys());
    const Matrix& of_values = deviations("value_lag_deviations", view.stored_values());
    const auto length = static_cast<std::size_t>(lag);
    for (int row = 0; row < scores.rows(); ++row)
      for (int first = before; first < before + (partitions - 1) * lag; first += lag) {
        const auto begin = static_cast<std::size_t>(first);
        std::vector<double> shares = softmax_of(of_keys.row(row).subspan(begin, length));
        const std::vector<double> more = softmax_of(of_values.row(row).subspan(begin, length));
        for (std::size_t i = 0; i < length; ++i) shares[i] += more[i];
        int rank = lag;
        for (const std::int32_t i : ranked(shares)) scores(row, first + i) = static_cast<double>(--rank) / lag;
      }
    return scores;
  }

  Plan plan() const {
    const auto score = [*this](const LayerView& view, const Scoring& how) { return scores(view, how.sinks); };
    return {.score = {.score = score, .reads_sinks = true, .name = name_with_values(card.name, *this)},
            .protect = {.sinks = sinks}};
  }
};

const Registered<LagKv> registered;

}  // namespace
}  // namespace kvreplay
