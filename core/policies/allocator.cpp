#include "policies/allocator.h"

#include <numeric>
#include <utility>

namespace kvreplay {
namespace {

const Requirement divides_scores{Property::has_score, "the allocator needs scores", "a score, or allocate=uniform"};
const Requirement has_count_of_each_layer{Property::own_set_in_each_layer,
                                          "layers that share a set cannot have different budgets",
                                          "share=none, or allocate=uniform"};

AllocatorPtr shared(Allocator allocator) { return std::make_shared<const Allocator>(std::move(allocator)); }

}  // namespace

AllocatorPtr uniform() {
  static const AllocatorPtr allocator = shared({.name = "uniform", .is_uniform = true});
  return allocator;
}

AllocatorPtr every_token() {
  constexpr const char* reason = "every token is kept";
  constexpr const char* remedy = "no score and no selector";
  static const AllocatorPtr allocator =
      shared({.name = "all tokens",
              .required = {{Property::unscored, reason, remedy}, {Property::best_tokens, reason, remedy}},
              .keeps_everything = true});
  return allocator;
}

AllocatorPtr by_layer(ByLayer counts) {
  const auto of_rows = [counts = std::move(counts)](const Division& division) {
    LayerCounts all;
    for (const int count : counts(division)) all.emplace_back(static_cast<std::size_t>(division.rows), count);
    return all;
  };
  return shared({.name = "counts from the number of layers",
                 .required = {has_count_of_each_layer},
                 .is_by_layer = true,
                 .counts = of_rows});
}

AllocatorPtr by_head(ByHead counts) {
  return shared({.name = "counts from the number of layers and heads",
                 .required = {has_count_of_each_layer},
                 .counts = std::move(counts)});
}

AllocatorPtr within_layer(WithinLayer counts) {
  const auto of_scores = [counts = std::move(counts)](const Division& division, const Matrix* scores,
                                                      std::span<const int>) { return counts(division, *scores); };
  return shared({.name = "counts from a layer's scores",
                 .from = CountsFrom::layer,
                 .required = {divides_scores},
                 .counts_of_layer = of_scores});
}

AllocatorPtr across_layers(AcrossLayers counts) {
  const auto of_scores = [counts = std::move(counts)](const Division& division, LayerScores scores, std::int64_t) {
    return counts(division, scores);
  };
  return shared({.name = "counts from all layers' scores",
                 .from = CountsFrom::all_layers,
                 .required = {divides_scores, has_count_of_each_layer},
                 .counts_of_layers = of_scores});
}

AllocatorPtr counts_of(std::shared_ptr<const ConfiguredPolicy> policy, bool has_budget, SlotDivision divide,
                       bool over_layers) {
  const auto of_layer = [divide](const Division&, const Matrix* scores, std::span<const int> of_other) {
    if (!divide) return std::vector<int>(of_other.begin(), of_other.end());
    return divide(std::accumulate(of_other.begin(), of_other.end(), std::int64_t{0}), {&scores, 1}).front();
  };
  const auto of_layers = [divide](const Division&, LayerScores scores, std::int64_t slots) {
    return divide(slots, scores);
  };
  return shared({.name = "another policy's counts",
                 .from = over_layers ? CountsFrom::all_layers : CountsFrom::layer,
                 .required = {divides_scores},
                 .counts_of_layer = of_layer,
                 .counts_of_layers = of_layers,
                 .other = std::move(policy),
                 .other_has_budget = has_budget});
}

AllocatorPtr sets_of(std::shared_ptr<const ConfiguredPolicy> policy, ChangedRow change) {
  return shared({.name = "another policy's kept sets",
                 .from = CountsFrom::layer,
                 .other = std::move(policy),
                 .changed = std::move(change)});
}

}  // namespace kvreplay
