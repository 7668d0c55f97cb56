// One layer as a policy sees it: the tokens under compression and what can be measured on them, computed once and
// shared by every policy and budget of a run.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/backend.h"
#include "matrix.h"
#include "trace/tensor.h"

namespace kvreplay {

/// Where a layer stands in the run.
struct LayerPlace {
  int layer = 0;         // number among the treated layers, 0 ... layers-1: what rules and means count
  int layers = 1;        // L, treated layers
  int stored_layer = 0;  // number among the layers of the trace
  int prompt = 0;        // P: tokens under compression, [0, P)
};

class LayerView {
 public:
  /// `eval_queries`: positions at which metrics are taken, ascending. Everything must outlive the view.
  LayerView(Backend& backend, const LayerTensors& tensors, LayerPlace place,
            std::span<const std::int32_t> eval_queries);

  int layer() const { return place_.layer; }
  int layers() const { return place_.layers; }
  int stored_layer() const { return place_.stored_layer; }
  int prompt() const { return place_.prompt; }
  int query_heads() const { return tensors_.q.heads; }
  int kv_heads() const { return tensors_.k.heads; }
  int group() const { return tensors_.group(); }
  int rows(Heads heads) const { return rows_of(heads, query_heads(), kv_heads()); }
  const LayerTensors& tensors() const { return tensors_; }
  std::span<const std::int32_t> eval_queries() const { return eval_queries_; }

  /// [Hq, P]: Σ over the last `window` prompt queries t of a(t,j), the window's own columns included; a window longer
  /// than the prompt is the prompt.
  const Matrix& window_attention(int window) const;
  /// [Hq, P]: Σ over all prompt queries t of a(t,j) (Zhang et al. 2023, arXiv:2306.14048, eq. 2).
  const Matrix& cumulative_attention() const;
  /// [Hq, P]: Σ over the eval queries t, t != j, of a(t,j). What oracles see and policies must not.
  const Matrix& eval_attention() const;
  /// [Hkv, P]: p-norms of keys and of values.
  const Matrix& key_norms(double p) const;
  const Matrix& value_norms(double p) const;

  /// Seconds spent on observables so far: shared by all policies, so reported apart from them.
  double observable_seconds() const { return observable_seconds_; }

 private:
  template <class Compute>
  const Matrix& remember(std::string_view observable, double argument, Compute compute) const;

  Backend& backend_;
  LayerTensors tensors_;
  LayerPlace place_;
  std::span<const std::int32_t> eval_queries_;
  mutable std::map<std::pair<std::string_view, double>, Matrix> memo_;
  mutable double observable_seconds_ = 0;
};

}  // namespace kvreplay
