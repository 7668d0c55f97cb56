#include "policies/scores/window_score.h"

#include <algorithm>

#include "policies/plan_part.h"

namespace kvreplay {
namespace {

constexpr Choice<PoolOrder> order_words[] = {{"group-first", PoolOrder::group_first},
                                             {"pool-first", PoolOrder::pool_first}};

struct WindowPart : WindowScore {
  static constexpr PartKind kind = PartKind::score;
  static constexpr const char* name = "window";
  static constexpr const char* summary = "attention of the observation window, pooled over neighbouring tokens";

  void fill(Plan& plan) const { plan.score = scorer(); }
};

const RegisteredPart<WindowPart> registered;

}  // namespace

void add_window(Parameters& p, int& window) {
  p.add("window", window, IntRange{.least = 1},
        "observation window: its queries score the prompt, its tokens are always kept");
}

void WindowScore::parameters(Parameters& p) {
  add_window(p, window);
  const auto read = p.of_part("score");
  add_pooling(p, pool, kernel);
  p.add<PoolOrder>("pool_order", order, order_words, "combines the heads of a group before pooling, or after");
  // Settings of the window family in published code and papers. The tables of ChunkKV and DynamicKV do not state
  // theirs; factory is the likely one.
  p.preset({"factory",
            "the LongBench harness of KVCache-Factory (PyramidKV's code)",
            {{"window", "8"}, {"kernel", "7"}, {"pool", "max"}}});
  p.preset({"snapkv-paper", "SnapKV's LongBench configurations", {{"window", "32"}, {"kernel", "7"}, {"pool", "max"}}});
  p.preset({"snapkv-code", "defaults of SnapKV's code", {{"window", "32"}, {"kernel", "5"}, {"pool", "avg"}}});
  p.preset({"kvpress", "defaults of kvpress", {{"window", "64"}, {"kernel", "5"}, {"pool", "avg"}}});
}

Scorer WindowScore::scorer() const {
  const auto score = [*this](const LayerView& view, const Scoring& how) {
    const Matrix& attention = view.window_attention(window, how.window_end);
    const Candidates candidates = candidates_of(view.tokens(), how);
    if (order == PoolOrder::pool_first) return how.grouping(pooled(attention, pool, kernel, candidates), view.group());
    return pooled(how.grouping(attention, view.group()), pool, kernel, candidates);
  };
  return {.score = score,
          .needs = last_queries(window),
          .reads_recent = pool != Pool::none,
          .reads_sinks = pool != Pool::none,
          .places_window = true,
          .queries = [window = window](const LayerView& view,
                                       const Scoring& how) { return view.queries_before(window, how.window_end); },
          .name = name_with_values("window", *this)};
}

void WindowFamily::parameters(Parameters& p) {
  score.parameters(p);
  grouping.parameters(p);
}

Plan WindowFamily::plan() const {
  return {
      .grouping = grouping,
      .score = score.scorer(),
      .protect = {.recent = Amount::tokens(score.window)},
  };
}

}  // namespace kvreplay
