// What is kept of a kept token, and where it stands.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "attention/kept_set.h"
#include "observables/layer_view.h"
#include "policies/needs.h"
#include "policies/properties.h"

namespace kvreplay {

struct LayerSelection;  // policies/selection.h

/// Keys and values as a store gives them back, for the layer's tokens [0, T); float32.
struct StoredLayer {
  std::vector<float> keys;    // [Hkv, T, d]
  std::vector<float> values;  // [Hkv, T, d]
  LayerTensors tensors;       // the layer's, with these keys and values
  double bytes = 0;           // that the kept tokens take, all heads

  /// L1 norms of the changes of one KV head's vectors, [P].
  struct ChangeNorms {
    std::vector<double> keys, values;
  };
  mutable std::vector<ChangeNorms> change_norms = {};  // [Hkv], -1 of tokens that are not kept; made by kv_l1_loss
};

/// A layer with values that change whenever tokens are evicted.
class EvolvingLayer : public EvolvingValues {
 public:
  /// The layer that query t reads, changed by every eviction before it.
  virtual std::unique_ptr<StoredLayer> before(int query) const = 0;
};

/// The layer that another one is stored with, or that one itself where it is stored alone.
struct Partner {
  int layer = 0;  // treated
  LayerTensors tensors = {};
  int first = 0;  // treated layer at which the range of the plan begins
};

/// Every plan has one, which many plans may share.
struct Store {
  /// Bytes of `tokens` kept tokens in each KV head of a layer, which has this number among the treated ones of the
  /// plan. They rise with the tokens, by less or as much for each next one: other divisions of equal tokens take no
  /// more.
  using Bytes = std::function<double(const LayerTensors&, int layer, int tokens)>;
  /// What a store that changes tokens makes of a layer. `kept` is the set at the end of the prompt.
  using Apply = std::function<std::unique_ptr<StoredLayer>(const LayerView&, const KeptSet& kept, const Partner&)>;
  /// What a store that changes tokens at each eviction makes of a layer whose sets change with time.
  using Evolve = std::function<std::unique_ptr<EvolvingLayer>(const LayerView&, const LayerSelection&)>;

  std::string name;             // as it is asked for: "store=quantised"
  Needs needs = {};             // what apply() reads, whatever the scorer does
  Requirements required = {};   // what the other parts of its plan must provide
  bool moves_tokens = false;    // kept tokens move to their slots 0, 1, 2 ... in the cache, and the query to its own
  bool has_exact_size = true;   // a kept token takes as many bytes as it does unchanged
  Bytes bytes = {};             // of another size; empty: the number of tokens does not determine it
  bool exempts_layers = false;  // a token takes more bytes in some layers than in others of their shape
  bool stores_latents = false;  // also keys whose first components are the values
  Apply apply = {};             // empty: keys and values are the same numbers
  Evolve evolve = {};           // beside apply(); empty: tokens change once, at the end of the prompt
  /// The layer that layer l of L is stored with, l itself where it is stored alone; empty: all are.
  std::function<int(int layer, int layers)> partner = {};
  /// Throws Error{usage} at `who` for layers that cannot be stored; of latent keys the value dimension is 0. Empty: all
  /// can.
  std::function<void(const std::string& who, int layers, int key_dim, int value_dim)> check = {};

  bool changes_tokens() const { return static_cast<bool>(apply); }
  bool pairs_layers() const { return static_cast<bool>(partner); }
};

/// A store that changes tokens, each once a KV head, at the end of the prompt.
Store changing_store(std::string name, Store::Apply apply);
/// The same at each eviction; tokens keep their size.
Store evolving_store(std::string name, Store::Apply apply, Store::Evolve evolve);

using StorePtr = std::shared_ptr<const Store>;

}  // namespace kvreplay
