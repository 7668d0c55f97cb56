// Layers while they are in use.
#pragma once

#include <cstddef>
#include <vector>

#include "attention/backend.h"
#include "policies/store.h"
#include "trace/trace.h"

namespace kvreplay {

/// Whatever happens, the backend lets go of the layer before the trace does.
class HeldLayer {
 public:
  HeldLayer(Backend& backend, const LayerTensors& layer) : backend_(backend), layer_(layer) {}
  ~HeldLayer() { backend_.let_go(layer_); }
  HeldLayer(const HeldLayer&) = delete;
  HeldLayer& operator=(const HeldLayer&) = delete;

  void hold(bool queries) { backend_.hold(layer_, queries); }

 private:
  Backend& backend_;
  LayerTensors layer_;
};

/// Keys and values of a layer that another one is stored with.
struct PairedLayer {
  Partner partner;
  std::vector<std::byte> keys = {}, values = {};  // copies of archived ones: a trace holds one such layer at a time

  PairedLayer(const Trace& trace, int layer, int stored_layer) : partner{layer, trace.layer(stored_layer)} {
    LayerTensors& tensors = partner.tensors;
    if (trace.archived_bytes(stored_layer) == 0) return;
    const auto copy = [](TensorView& tensor, std::vector<std::byte>& bytes) {
      bytes.assign(tensor.data, tensor.data + tensor.bytes());
      tensor.data = bytes.data();
    };
    copy(tensors.k, keys);
    copy(tensors.v, values);
    tensors.q = {};
  }
};

}  // namespace kvreplay
