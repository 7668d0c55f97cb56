// How the budget is divided over layers and rows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "matrix.h"
#include "policies/properties.h"

namespace kvreplay {

class ConfiguredPolicy;

/// What is divided over layers and rows.
struct Division {
  int layers = 1;  // L
  int prompt = 0;  // P
  int budget = 0;  // B
  int sinks = 0;   // protected tokens at B
  int recent = 0;
  int rows = 1;         // H
  int query_heads = 1;  // Hq

  int by_rule() const { return sinks + recent; }
  /// M: tokens of a row that compete.
  int candidates() const { return prompt - by_rule(); }
  /// b: slots of a row that they compete for, on average.
  int slots() const { return budget - by_rule(); }
};

/// Kept tokens, ascending. The first `sinks` and the last `recent` ones are protected.
struct Kept {
  std::vector<std::int32_t> positions;
  int sinks = 0;
  int recent = 0;
};

/// [L][H] tokens that rows may keep, protected tokens included.
using LayerCounts = std::vector<std::vector<int>>;
/// [L] of [H, P].
using LayerScores = std::span<const Matrix* const>;

/// The changed row of a kept set. `layer`: stored number of the layer that the set belongs to.
using ChangedRow = std::function<std::vector<std::int32_t>(const Kept&, int prompt, int layer, int row)>;

/// How much must be known before the counts of a layer are: the number of layers and heads, the layer's scores, or the
/// scores of all layers.
enum class CountsFrom { sizes, layer, all_layers };

/// Every plan has one, which many plans may share.
struct Allocator {
  std::string name;  // in messages, as "counts from a layer's scores"
  CountsFrom from = CountsFrom::sizes;
  Requirements required = {};     // what the other parts of its plan must provide
  bool is_uniform = false;        // every row of every layer gets B
  bool keeps_everything = false;  // every row keeps all of the prompt, and has no budget
  bool is_by_layer = false;       // all rows of a layer get the same, known from the number of layers

  /// From sizes. Sum at most L*H*B; empty: B each.
  std::function<LayerCounts(const Division&)> counts = [](const Division&) { return LayerCounts{}; };
  /// From a layer: [H], from its scores [H, P]; empty without a score. `of_other`: counts that the policy `other` has
  /// there.
  std::function<std::vector<int>(const Division&, const Matrix* scores, std::span<const int> of_other)>
      counts_of_layer = {};
  /// From all layers. `slots`: the sum of the counts of `other`.
  std::function<LayerCounts(const Division&, LayerScores, std::int64_t slots)> counts_of_layers = {};

  std::shared_ptr<const ConfiguredPolicy> other = {};  // whose counts or sets it takes; null: it takes those of none
  bool other_has_budget = true;
  ChangedRow changed = {};  // kept positions in the place of those of a row of `other`; empty: it takes no sets

  bool changes_sets() const { return static_cast<bool>(changed); }
};

using AllocatorPtr = std::shared_ptr<const Allocator>;

/// Every row of every layer gets B.
AllocatorPtr uniform();
/// Keeps all and has no budget.
AllocatorPtr every_token();

/// Counts from the number of layers alone: [L], each for all rows of its layer.
using ByLayer = std::function<std::vector<int>(const Division&)>;
AllocatorPtr by_layer(ByLayer counts);
/// The same head by head.
using ByHead = std::function<LayerCounts(const Division&)>;
AllocatorPtr by_head(ByHead counts);
/// Counts of one layer, [H], from its scores [H, P]. Sum at most H*B.
using WithinLayer = std::function<std::vector<int>(const Division&, const Matrix& scores)>;
AllocatorPtr within_layer(WithinLayer counts);
/// Counts of all treated layers at once, from all layers' scores. Sum at most L*H*B.
using AcrossLayers = std::function<LayerCounts(const Division&, LayerScores)>;
AllocatorPtr across_layers(AcrossLayers counts);

/// Counts of the rows of some layers that sum to `slots`.
using SlotDivision = std::function<LayerCounts(std::int64_t slots, LayerScores)>;
/// The counts of another policy's selection; its slots anew by `divide` where there is one, those of all layers
/// together where `over_layers` says so.
AllocatorPtr counts_of(std::shared_ptr<const ConfiguredPolicy> policy, bool has_budget, SlotDivision divide,
                       bool over_layers);
/// The kept sets of another policy's selection, each row changed: as many tokens, the protected ones among them.
AllocatorPtr sets_of(std::shared_ptr<const ConfiguredPolicy> policy, ChangedRow change);

}  // namespace kvreplay
