#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "policies/allocators/head_roles.h"
#include "policies/arithmetic/ranking.h"
#include "policies/policy.h"
#include "policies/selectors/rules.h"
#include "policies/text/array_file.h"

namespace kvreplay {
namespace {

struct DuoAttention {
  static constexpr Card card{
      .name = "duo-attention",
      .summary = "Retrieval heads keep the full cache, streaming heads keep sinks and a recent window",
      .paper = "Xiao et al. 2024, DuoAttention, arXiv:2410.10819; kvpress for scores without a table",
      .score =
          "of a KV head: from a table, or the area under the cumulative attention of its mean query to 500 copies of "
          "its mean key",
      .family = Family::budget,
  };

  ArrayFile table{"kvpress"};
  double full_heads = 0.5;
  int sinks = 128;
  int recent = 256;

  void parameters(Parameters& p) {
    table.parameter(p, "table",
                    "head scores [L, Hkv] of the treated layers, or the scores of kvpress computed from this prompt");
    p.add("full_heads", full_heads, RealRange{}, "share of the KV heads of all layers that are retrieval heads");
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens that streaming heads keep");
    p.add("recent", recent, IntRange{.up_to = UpTo::prompt}, "recent window: last tokens that streaming heads keep");
  }

  std::vector<Source> sources() const { return table.sources(); }

  /// Token counts of the heads, layer by layer, from their scores.
  std::vector<std::vector<int>> counts(const Division& division, std::span<const double> scores) const {
    const auto full = static_cast<std::int64_t>(std::floor(full_heads * static_cast<double>(scores.size()) + 0.5));
    std::vector<std::vector<int>> all(static_cast<std::size_t>(division.layers),
                                      std::vector<int>(static_cast<std::size_t>(division.rows), division.by_rule()));
    for (const std::int32_t head : largest(scores, full))
      all[static_cast<std::size_t>(head / division.rows)][static_cast<std::size_t>(head % division.rows)] =
          division.prompt;
    return all;
  }

  Plan plan() const {
    Plan plan{.protect = {.sinks = sinks, .recent = Amount::tokens(recent)}, .own_memory = true};
    if (table.is_file()) {
      plan.select = by_rule_alone();
      plan.allocate = by_head([*this](const Division& division) {
        return counts(
            division,
            table.of_shape("duo-attention:table", {division.layers, division.rows}, "[treated layers, KV heads]")
                .numbers);
      });
    } else {
      plan.score = head_role_score();
      plan.allocate = across_layers([*this](const Division& division, std::span<const Matrix* const> layers) {
        std::vector<double> scores;
        for (const Matrix* layer : layers)
          for (int head = 0; head < layer->rows(); ++head) scores.push_back((*layer)(head, 0));
        return counts(division, scores);
      });
    }
    return plan;
  }
};

const Registered<DuoAttention> registered;

}  // namespace
}  // namespace kvreplay
