#include "random.h"

#include <string>
#include <vector>

#include "policies/arithmetic/ranking.h"
#include "policies/plan_part.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

/// Minus the rank of chain(seed, stored layer, head, position). Ranks are exact; as doubles, two numbers of the chain
/// could be equal.
Matrix negated_ranks(const LayerView& view, Heads heads, std::uint64_t seed) {
  Matrix scores(view.rows(heads), view.tokens());
  std::vector<std::uint64_t> drawn(static_cast<std::size_t>(view.tokens()));
  for (int head = 0; head < scores.rows(); ++head) {
    const std::span<const std::int32_t> positions = view.positions(head).numbers();
    for (std::size_t i = 0; i < drawn.size(); ++i) drawn[i] = chain(seed, view.stored_layer(), head, positions[i]);
    double rank = 0;
    for (const std::int32_t token : ordered(drawn)) scores(head, token) = rank--;
  }
  return scores;
}

Scorer random_score(std::uint64_t seed) {
  const auto score = [seed](const LayerView& view, const Scoring& how) {
    return negated_ranks(view, how.grouping.heads, seed);
  };
  return {.score = score, .name = "random(" + std::to_string(seed) + ")"};
}

constexpr Choice<Heads> heads_words[] = {{"kv", Heads::kv}, {"layer", Heads::layer}};

struct Random {
  static constexpr Card card{
      .name = "random",
      .summary = "Uniformly random tokens, drawn by a counter-based generator",
      .paper = "",
      .score = "keeps the tokens with the smallest hash chain(seed, layer, head, position)",
      .family = Family::control,
  };

  std::uint64_t seed = 0;
  int sinks = 0;
  int window = 0;
  Heads heads = Heads::kv;

  void parameters(Parameters& p) {
    p.add_seed("seed", seed, "random seed");
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens, always kept");
    p.add("window", window, IntRange{.up_to = UpTo::prompt}, "recent window: last tokens, always kept");
    p.add<Heads>("heads", heads, heads_words, "granularity: a kept set per KV head, or per layer");
  }

  Plan plan() const {
    return {
        .grouping = {.heads = heads},
        .score = random_score(seed),
        .protect = {.sinks = sinks, .recent = Amount::tokens(window)},
    };
  }
};

struct RandomPart {
  static constexpr PartKind kind = PartKind::score;
  static constexpr const char* name = "random";
  static constexpr const char* summary = "random order of the tokens";

  std::uint64_t seed = 0;

  void parameters(Parameters& p) { p.add_seed("seed", seed, "random seed"); }
  void fill(Plan& plan) const { plan.score = random_score(seed); }
};

const Registered<Random> registered;
const RegisteredPart<RandomPart> registered_part;

}  // namespace
}  // namespace kvreplay
