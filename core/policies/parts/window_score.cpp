#include "policies/parts/window_score.h"

#include <algorithm>

namespace kvreplay {
namespace {

const RegisteredPart registered{{"window", PartKind::scorer, "attention of the last prompt queries, pooled"}};

constexpr Choice<PoolOrder> order_words[] = {{"group-first", PoolOrder::group_first},
                                             {"pool-first", PoolOrder::pool_first}};

}  // namespace

void WindowScore::parameters(Parameters& p) {
  p.add("window", window, IntRange{.least = 1}, "last prompt queries: they vote, and they stay");
  add_pooling(p, pool, kernel);
  grouping.parameters(p);
  p.add<PoolOrder>("pool_order", order, order_words, "whether heads are reduced before pooling, or after");
  // The window family's settings in published code and papers; factory is what the tables of ChunkKV and DynamicKV rest
  // on in all likelihood, which do not state theirs.
  p.preset(
      {"factory", "the LongBench harness of the PyramidKV code", {{"window", "8"}, {"kernel", "7"}, {"pool", "max"}}});
  p.preset({"snapkv-paper", "SnapKV's LongBench configurations", {{"window", "32"}, {"kernel", "7"}, {"pool", "max"}}});
  p.preset({"snapkv-code",
            "SnapKV's code when nothing is configured",
            {{"window", "32"}, {"kernel", "5"}, {"pool", "avg"}}});
  p.preset({"kvpress", "kvpress", {{"window", "64"}, {"kernel", "5"}, {"pool", "avg"}}});
}

Matrix WindowScore::operator()(const LayerView& view) const {
  const Matrix& attention = view.window_attention(window);
  const int before_window = view.prompt() - std::min(window, view.prompt());
  if (order == PoolOrder::pool_first) return grouping(pooled(attention, pool, kernel, before_window), view.group());
  return pooled(grouping(attention, view.group()), pool, kernel, before_window);
}

}  // namespace kvreplay
