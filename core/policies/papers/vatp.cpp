#include <string>

#include "policies/policy.h"
#include "policies/scores/attention_counts.h"
#include "policies/scores/attention_scores.h"

namespace kvreplay {
namespace {

enum class Base { h2o, scissorhands };

constexpr Choice<Base> base_words[] = {{"h2o", Base::h2o}, {"scissorhands", Base::scissorhands}};

/// Scores per KV head: s[h,j] ||v_j||_1.
Scorer times_value_norm(Scorer base) {
  Scorer product = base;
  product.score = [score = base.score](const LayerView& view, const Scoring& how) {
    Matrix scores = score(view, how);
    const Matrix& norms = view.value_norms(1.0);
    for (int head = 0; head < scores.rows(); ++head)
      for (int i = 0; i < scores.columns(); ++i) scores(head, i) *= norms(head, i);
    return scores;
  };
  product.online = OnlineScore::none;
  product.name = "value-norm(" + base.name + ")";
  return product;
}

struct Vatp {
  static constexpr Card card{
      .name = "vatp",
      .summary = "Accumulated attention times the L1 norm of the value; sinks and recent tokens are protected",
      .paper = "Guo et al. 2024, VATP, arXiv:2406.12335",
      .score = "s[h,j] = ||v_j||_1 times the score of h2o, or the attention of the last `history` queries",
      .family = Family::attention,
  };

  inline static const std::string automatic = "auto";

  static std::string normal_recent(std::string_view text) {
    return text == automatic ? automatic : Amount::parse("vatp:recent", text).text();
  }

  Base base = Base::h2o;
  int sinks = 20;
  std::string recent = automatic;
  int history = 400;

  void parameters(Parameters& p) {
    p.add<Base>(
        "base", base, base_words,
        "attention that is accumulated: of all prompt queries (h2o), or of the last `history` queries (scissorhands)");
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens, always kept");
    p.add("recent", recent, "auto, tokens 0..P, or a fraction 0.0..1.0 of the budget", normal_recent,
          "recent window: last tokens, always kept; auto: 0.5, or 10 with base=scissorhands", UpTo::prompt);
    const auto read = p.of_part("score");
    p.add("history", history, IntRange{.least = 1}, "number of last queries that base=scissorhands reads");
  }

  Plan plan() const {
    const bool all = base == Base::h2o;
    return {
        .score = times_value_norm(all ? cumulative_score() : AttentionCounts{history, false}.scorer()),
        .protect = {.sinks = sinks,
                    .recent = recent != automatic ? Amount::parse("vatp:recent", recent)
                              : all               ? Amount::fraction(0.5)
                                                  : Amount::tokens(10)},
    };
  }
};

const Registered<Vatp> registered;

}  // namespace
}  // namespace kvreplay
