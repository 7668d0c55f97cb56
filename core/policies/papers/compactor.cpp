#include <algorithm>
#include <string>

#include "policies/arithmetic/pooling.h"
#include "policies/plan_part.h"
#include "policies/policy.h"
#include "policies/scores/block_attention.h"
#include "policies/scores/leverage.h"

namespace kvreplay {
namespace {

/// The value `auto` stands for 1 - B/P.
const std::string automatic = "auto";

std::string normal_mix(std::string_view text) {
  if (text == automatic) return automatic;
  double mix = 0;
  Parameters declared{"compactor"};
  declared.add("mix", mix, RealRange{0.0, 1.0}, "");
  declared.set("mix", text);
  return declared.find("mix")->text();
}

struct Compactor {
  static constexpr Card card{
      .name = "compactor",
      .summary = "Non-causal attention within chunks blended with approximate leverage scores of the keys",
      .paper = "Chari and Van Durme 2025, Compactor, arXiv:2507.08143",
      .score =
          "s[h,j] = mix z(leverage) + z(avgpool_3(n_j |v_j|_2)) over the unprotected tokens, n_j = group mean of the "
          "column sums of the unscaled softmax_j(q_t k_j) within the chunk of j, z: z-scores over the layer",
      .family = Family::geometry,
  };

  std::string mix = automatic;
  Leverage leverage = {};
  int sinks = 8;
  int recent = 4;
  int block = 256;

  void parameters(Parameters& p) {
    p.add("mix", mix, "auto, or 0..1", normal_mix, "weight of the leverage scores; auto: 1 - B/P");
    leverage.parameters(p);
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens, always kept and not scored");
    p.add("recent", recent, IntRange{.up_to = UpTo::prompt}, "recent window: last tokens, always kept and not scored");
    p.add("block", block, IntRange{.least = 1}, "tokens per chunk; they attend to each other");
    p.preset({"kvpress", "defaults of kvpress", {{"sketch", "48"}}});
  }

  Matrix scores(const LayerView& view, const Scoring& how) const {
    Matrix scores(view.kv_heads(), view.tokens());
    const int first = how.sinks, end = view.tokens() - how.recent;
    if (first == end) return scores;  // every token is protected
    const LayerView& scored = view.tokens_between(first, end);

    Matrix received = Grouping{}(block_attention(scored, block), view.group());
    const Matrix& lengths = view.value_norms(2.0);
    for (int row = 0; row < received.rows(); ++row)
      for (int j = 0; j < received.columns(); ++j) received(row, j) *= lengths(row, first + j);
    Matrix blended = z_scores(pooled(std::move(received), Pool::average, 3, scored.tokens()));
    const double weight =
        mix == automatic ? 1.0 - static_cast<double>(how.budget) / view.prompt() : parse_real("compactor:mix", mix);
    const Matrix& of_keys = leverage(scored);
    for (int row = 0; row < blended.rows(); ++row)
      for (int j = 0; j < blended.columns(); ++j) blended(row, j) += weight * of_keys(row, j);

    // Protected tokens get the largest score of the layer, as in kvpress.
    std::ranges::fill(scores.values(), std::ranges::max(blended.values()));
    for (int row = 0; row < blended.rows(); ++row) std::ranges::copy(blended.row(row), scores.row(row).begin() + first);
    return scores;
  }

  Plan plan() const {
    const auto score = [*this](const LayerView& view, const Scoring& how) { return scores(view, how); };
    return {
        .score = {.score = score,
                  .needs = {.all_queries = true, .rope = true},
                  .reads_recent = true,
                  .reads_budget = mix == automatic,
                  .reads_sinks = true,
                  .of_prompt = true,
                  .name = name_with_values(card.name, *this)},
        .protect = {.sinks = sinks, .recent = Amount::tokens(recent)},
    };
  }
};

const Registered<Compactor> registered;

}  // namespace
}  // namespace kvreplay
