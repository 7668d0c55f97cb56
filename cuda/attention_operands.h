// Queries and keys of a layer on the device, as kernels of attention want them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "attention/softmax_keys.h"
#include "cuda/attention_task.h"
#include "cuda/device_call.h"
#include "tensor.h"

namespace kvreplay {

/// [Hq] the layer's sink logits on the device, in units of log 2; null where there are none.
const double* copy_sink_logits(DeviceCall& call, const LayerTensors& layer);

/// Some queries over the keys of their softmax: one list of them for all KV heads, or one for each.
class PlacedQueries {
 public:
  /// Throws as padded_depth() and query_places().
  PlacedQueries(DeviceCall& call, const LayerTensors& layer, std::span<const std::int32_t> queries,
                std::vector<SoftmaxKeys> softmax_keys);

  const ProductForm& form() const { return form_; }
  int query_count() const { return query_count_; }
  const std::vector<QueryPlace>& places(int list = 0) const { return places_[static_cast<std::size_t>(list)]; }
  int kv_heads_at_once() const { return heads_at_once_; }

  /// KV heads [first, first + heads) and the queries that read them, on the device for as long as this lives.
  class Heads {
   public:
    Heads(Heads&&) = default;
    Heads(const Heads&) = delete;
    Heads& operator=(const Heads&) = delete;
    /// Waits for what was queued.
    ~Heads() { cudaStreamSynchronize(stream_); }
    const AttentionTask& task() const { return task_; }

   private:
    friend class PlacedQueries;
    explicit Heads(cudaStream_t stream) : stream_(stream) {}
    cudaStream_t stream_;
    AttentionTask task_;
    DeviceTensors::Lease queries_, keys_;
    std::deque<DeviceBuffer<std::byte>> blocks_;
  };
  Heads heads(int first, int heads);

 private:
  DeviceCall& call_;
  const LayerTensors& layer_;
  std::vector<SoftmaxKeys> softmax_keys_;
  std::vector<std::vector<QueryPlace>> places_;
  int query_count_ = 0;
  int heads_at_once_ = 1;
  ProductForm form_;
  std::vector<std::int32_t> gathered_rows_;                     // of the queries' tensor that are brought; empty: all
  AttentionTask lists_;                                         // what is the same for all heads
  std::vector<const int*> key_rows_, key_moves_, query_moves_;  // on the device, of each list; null: as they lie
  const double* frequencies_ = nullptr;                         // of the layer's RoPE
};

}  // namespace kvreplay
