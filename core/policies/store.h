// What is kept of a kept token, and where it stands.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "attention/kept_set.h"
#include "observables/layer_view.h"
#include "policies/needs.h"
#include "policies/properties.h"

namespace kvreplay {

/// Keys and values as a store gives them back, for the layer's tokens [0, T); float32.
struct StoredLayer {
  std::vector<float> keys;    // [Hkv, T, d]
  std::vector<float> values;  // [Hkv, T, d]
  LayerTensors tensors;       // the layer's, with these keys and values
  double bytes = 0;           // that the kept tokens take, all heads
};

/// The layer that another one is stored with, or that one itself where it is stored alone.
struct Partner {
  int layer = 0;  // treated
  LayerTensors tensors = {};
};

/// Every plan has one, which many plans may share.
class Store {
 public:
  virtual ~Store() = default;

  /// As it is asked for: "store=quantised".
  virtual std::string name() const = 0;
  /// What apply() reads, whatever the scorer does.
  virtual Needs needs() const { return {}; }
  /// What the other parts of its plan must provide.
  virtual Requirements required() const { return {}; }
  /// Whether kept tokens move to their slots 0, 1, 2 ... in the cache, and the query to its own.
  virtual bool moves_tokens() const { return false; }
  /// Whether keys or values are other numbers: apply() makes them.
  virtual bool changes_tokens() const { return false; }
  /// Whether a kept token takes as many bytes as it does unchanged.
  virtual bool has_exact_size() const { return true; }
  /// Whether some layers are stored with another one, partner(): of layer l of L, l itself where it is stored alone.
  virtual bool pairs_layers() const { return false; }
  virtual int partner(int layer, int /*layers*/) const { return layer; }

  /// What a store that changes tokens makes of a layer. `kept` is the set at the end of the prompt.
  virtual std::unique_ptr<StoredLayer> apply(const LayerView&, const KeptSet& /*kept*/, const Partner&) const;
};

/// A store that changes tokens, each once a KV head, at the end of the prompt.
class ChangingStore : public Store {
 public:
  Requirements required() const override;
  bool changes_tokens() const final { return true; }
  bool has_exact_size() const override { return false; }
};

using StorePtr = std::shared_ptr<const Store>;

}  // namespace kvreplay
