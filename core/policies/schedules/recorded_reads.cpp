#include "policies/schedules/recorded_reads.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/softmax_keys.h"
#include "policies/schedules/sparse_reads.h"

namespace kvreplay {
namespace {

KeptSet read_by(const LayerView& view, int query) {
  const LayerTensors& layer = view.tensors();
  const int stored = stored_query(layer, query), prompt = view.prompt();
  KeptSet read(Heads::kv, layer.k.heads, prompt);
  for (int head = 0; head < layer.k.heads; ++head)
    for (const std::int32_t unit : layer.visible.of(head, stored, layer.q, layer.k.heads))
      if (const int begin = unit * layer.visible.tokens; begin < prompt)
        read.keep(head, begin, std::min(begin + layer.visible.tokens, prompt));
  return read;
}

class RecordedReads final : public SparseReads {
 public:
  bool has_budget() const override { return false; }

  LayerReads reads(const LayerView& view) const override {
    if (view.tensors().visible.units.empty()) return {};
    return {[&view](int query, std::span<const int> budgets) {
      return std::vector<KeptSet>(budgets.size(), read_by(view, query));
    }};
  }
};

}  // namespace

SchedulePtr recorded_reads() { return std::make_shared<RecordedReads>(); }

}  // namespace kvreplay
