#include <algorithm>
#include <cstddef>
#include <cstdint>
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
    return view.remember(
        "gumbel_attention", {tau, static_cast<double>(seed >> 32), static_cast<double>(seed & 0xFFFFFFFFu)}, [&] {
          Matrix sums(view.query_heads(), view.tokens());
          std::vector<QueryLogits> logits;
          for (int head = 0; head < view.kv_heads(); ++head) logits.emplace_back(view, head);
          view.on_threads(static_cast<std::size_t>(view.query_heads()), [&](std::size_t number) {
            const auto head = static_cast<int>(number);
            accumulate(view, logits[number / static_cast<std::size_t>(view.group())], head, sums.row(head));
          });
          return sums;
        });
  }

  void accumulate(const LayerView& view, const QueryLogits& logits, int head, std::span<double> sums) const {
    const std::span<const std::int32_t> positions = view.positions(head / view.group()).numbers();
    const std::vector<std::int32_t> queries = view.last_queries(view.residents().seen);
    std::vector<double> rows(QueryLogits::at_once * sums.size()), noise(sums.size());
    logits.in_blocks(queries, [&](std::span<const std::int32_t> some, std::size_t width) {
      logits.of_each(head, some, std::span(rows).first(some.size() * width));
      for (std::size_t i = 0; i < some.size(); ++i) {
        const std::span row =
            std::span(rows).subspan(i * width, static_cast<std::size_t>(logits.end_of_visible(some[i])));
        const std::uint64_t of_query = chain(seed, view.stored_layer(), head, some[i]);
        gumbel_variates(of_query, positions.first(row.size()), noise);
        for (std::size_t j = 0; j < row.size(); ++j) row[j] = (row[j] + noise[j]) / tau;
        to_softmax(row);
        for (std::size_t j = 0; j < row.size(); ++j) sums[j] += row[j];
      }
    });
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
