#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <span>
#include <vector>

#include "observables/query_logits.h"
#include "observables/softmax.h"
#include "policies/plan_part.h"
#include "policies/policy.h"
#include "policies/selectors/top_k.h"
#include "random.h"

namespace kvreplay {
namespace {

/// The authors' code evicts the first token of the recent window without comparing its score: one token fewer is kept.
Kept without_first_recent(const Row& row) {
  Kept kept = top_k()(row);
  if (kept.recent == 0) return kept;
  kept.positions.erase(kept.positions.end() - kept.recent);
  --kept.recent;
  return kept;
}

struct Keyformer {
  static constexpr Card card{
      .name = "keyformer",
      .summary = "Accumulated attention with Gumbel noise on the logits, and a recent window",
      .paper = "Adnan et al. 2024, Keyformer, arXiv:2403.09054",
      .score =
          "s[h,j] = sum over prompt queries t of softmax_j((q_t k_j + G_tj) / tau), group mean; G = -ln(-ln u), u the "
          "hash chain(seed, layer, query head, t, j)",
      .family = Family::attention,
  };

  Amount recent = Amount::fraction(0.3);
  double tau = 1;
  bool gap = false;
  std::uint64_t seed = 0;
  Grouping grouping = {};

  void parameters(Parameters& p) {
    p.add("recent", recent, "recent window: last tokens, always kept");
    {
      const auto read = p.of_part("score");
      p.add("tau", tau, RealRange{1e-6, 1e6}, "temperature: divides logits and noise");
      p.add_seed("seed", seed, "random seed of the noise");
    }
    grouping.parameters(p);
    const auto read = p.of_part("select");
    p.add("gap", gap, "evicts the first token of the recent window, as the authors' code does; keeps B - 1 tokens");
  }

  /// [Hq, n]: accumulated by all queries so far.
  const Matrix& accumulated(const LayerView& view) const {
    return view.remember("gumbel_attention",
                         {tau, static_cast<double>(seed >> 32), static_cast<double>(seed & 0xFFFFFFFFu)}, [&] {
                           Matrix sums(view.query_heads(), view.tokens());
                           for (int head = 0; head < view.kv_heads(); ++head) accumulate(view, head, sums);
                           return sums;
                         });
  }

  void accumulate(const LayerView& view, int kv_head, Matrix& sums) const {
    // Each with its own sums, which are added in order: the same bits on any number of threads.
    constexpr std::size_t pieces = 16;
    const QueryLogits logits(view, kv_head);
    const std::span<const std::int32_t> positions = view.positions(kv_head).numbers();
    const std::vector<std::int32_t> queries = view.last_queries(view.residents().seen);
    std::vector<Matrix> of_pieces(pieces);
    view.on_threads(pieces, [&](std::size_t number) {
      Matrix& of_piece = of_pieces[number] = Matrix(view.group(), view.tokens());
      const std::size_t begin = number * queries.size() / pieces, end = (number + 1) * queries.size() / pieces;
      logits.of_each(
          std::span(queries).subspan(begin, end - begin), [&](std::int32_t query, std::span<const HeadLogits> heads) {
            for (const HeadLogits& head : heads) {
              const std::span<float> seen = head.seen();
              add_gumbel_noise(chain(seed, view.stored_layer(), head.head, query),
                               positions.subspan(static_cast<std::size_t>(head.first), seen.size()), tau, seen);
              head.add_softmax(1, of_piece.row(head.head % view.group()));
            }
          });
    });
    for (const Matrix& of_piece : of_pieces)
      for (int member = 0; member < view.group(); ++member)
        std::ranges::transform(of_piece.row(member), sums.row(kv_head * view.group() + member),
                               sums.row(kv_head * view.group() + member).begin(), std::plus());
  }

  Plan plan() const {
    const auto score = [*this](const LayerView& view, const Scoring& how) {
      return how.grouping(accumulated(view), view.group());
    };
    Plan plan{
        .grouping = grouping,
        .score = {.score = score,
                  .needs = all_queries(),
                  .quadratic = true,
                  .name = name_with_values(card.name, *this)},
        .protect = {.recent = recent},
    };
    if (gap) plan.select = {.select = without_first_recent, .fills = false};
    return plan;
  }
};

const Registered<Keyformer> registered;

}  // namespace
}  // namespace kvreplay
