#include "random.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "policies/parts/grouping.h"
#include "policies/parts/top_k.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

/// Minus the rank of chain(seed, stored layer, head, position): exact where a double could not tell two numbers apart.
Matrix negated_ranks(const LayerView& view, Heads heads, std::uint64_t seed) {
  Matrix scores(view.rows(heads), view.prompt());
  std::vector<std::pair<std::uint64_t, int>> drawn(static_cast<std::size_t>(view.prompt()));
  for (int head = 0; head < scores.rows(); ++head) {
    for (int j = 0; j < view.prompt(); ++j)
      drawn[static_cast<std::size_t>(j)] = {chain(seed, view.stored_layer(), head, j), j};
    std::ranges::sort(drawn);
    double rank = 0;
    for (const auto& [number, position] : drawn) scores(head, position) = rank--;
  }
  return scores;
}

constexpr Choice<Heads> heads_words[] = {{"kv", Heads::kv}, {"layer", Heads::layer}};

struct Random {
  static constexpr Card card{
      .name = "random",
      .summary = "tokens drawn by a counter-based generator: what chance alone keeps",
      .paper = "",
      .score = "the smallest chain(seed, layer, head, position) stay",
  };

  std::uint64_t seed = 0;
  int sinks = 0;
  int window = 0;
  Heads heads = Heads::kv;

  void parameters(Parameters& p) {
    p.add_seed("seed", seed, "first number of the chain");
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "first tokens that always stay");
    p.add("window", window, IntRange{.up_to = UpTo::prompt}, "last tokens that always stay");
    p.add<Heads>("heads", heads, heads_words, "one set per KV head, or one for the layer");
  }

  Plan plan() const {
    return {
        .heads = heads,
        .score = [*this](const LayerView& view) { return negated_ranks(view, heads, seed); },
        .select = top_k({.sinks = sinks, .recent = Amount::tokens(window)}),
    };
  }
};

const Registered<Random> registered;
const RegisteredPart registered_part{{"random", PartKind::scorer, "a random order of the tokens"}};

}  // namespace
}  // namespace kvreplay
