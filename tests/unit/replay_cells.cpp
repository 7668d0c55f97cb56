// Cells of one replay: what they share, what each is charged, and that one which fails does so alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "policies/plan_part.h"
#include "positions.h"
#include "replay/replay.h"
#include "trace/synth.h"
#include "trace_files.h"
#include "wrapped_backend.h"

namespace kvreplay {
namespace {

/// One token more than the row may hold.
Kept one_too_many(const Row& row) { return {position_range(0, row.budget + 1), 0, 0}; }

const RegisteredFixedPart registered{PartKind::select, "one-too-many", "for this test",
                                     [](Plan& plan) { plan.select = {.select = one_too_many, .reads_scores = false}; }};

struct Heard : Sink {
  std::map<int, std::vector<CellSeconds>> seconds;  // [treated] by cell
  std::map<int, std::string> failures;              // by cell

  void selected(const LayerView&, int cell, const LayerSelection&, const StoredLayer*,
                const CellSeconds& of_layer) override {
    seconds[cell].push_back(of_layer);
  }
  void failed(int cell, const Error& error) override { failures[cell] = error.what(); }
};

class ReplayCells : public TraceFiles {
 protected:
  ReplayCells() { synthesise(synth_defaults("gaussian"), file("a.h5")); }

  Heard replayed(const std::vector<std::string>& policies, int threads) {
    return replayed(policies, *make_backend("cpu", threads));
  }
  Heard replayed(const std::vector<std::string>& policies, Backend& backend) {
    const Trace trace = Trace::open(file("a.h5"));
    const Conditions conditions{boundary(trace, "prompt"), eval_queries(trace, "continuation"),
                                treated_layers(trace, false)};
    std::vector<Cell> cells;
    for (const std::string& policy : policies) cells.push_back({ConfiguredPolicy::parse(policy), 20});
    Heard heard;
    replay(backend, trace, conditions, cells, heard);
    return heard;
  }
};

TEST_F(ReplayCells, EachIsChargedTheScoresThatItUses) {
  // The first two have one score: whoever stands first computes it.
  std::vector<std::string> policies{"snapkv:window=4", "pyramid-kv:window=4", "snapkv:window=2"};
  for (int turn = 0; turn < 3; ++turn) {
    SCOPED_TRACE(policies.front() + " first");
    const Heard heard = replayed(policies, 2);
    std::map<std::string, std::vector<CellSeconds>> of;
    for (int cell = 0; cell < 3; ++cell) of[policies[static_cast<std::size_t>(cell)]] = heard.seconds.at(cell);
    for (std::size_t l = 0; l < 4; ++l) {
      const double score = of["snapkv:window=4"].at(l).score;
      EXPECT_GT(score, 0) << "layer " << l;
      EXPECT_EQ(of["pyramid-kv:window=4"].at(l).score, score) << "layer " << l;
      EXPECT_NE(of["snapkv:window=2"].at(l).score, score) << "layer " << l;
    }
    std::ranges::rotate(policies, policies.begin() + 1);
  }
}

TEST_F(ReplayCells, ObservablesThatOthersAreMadeOfAreNotTakenOffTwice) {
  const Heard heard = replayed({"expected-attention", "leverage", "compactor"}, 1);
  ASSERT_TRUE(heard.failures.empty());
  for (const auto& [cell, seconds] : heard.seconds)
    for (const CellSeconds& of_layer : seconds) EXPECT_GE(of_layer.score, 0) << "cell " << cell;
}

/// Refuses the numbers of those that protect one recent token, and so of all at once.
class RefusingBackend final : public testing::WrappedBackend {
 public:
  using WrappedBackend::WrappedBackend;

  std::vector<std::int32_t> online_eviction(const LayerTensors& layer, const OnlineEviction& what) override {
    if (what.recent == 1) throw Error{Refusal::input, "attention", "logits", "finite numbers", "NaN or Inf"};
    return WrappedBackend::online_eviction(layer, what);
  }
};

TEST_F(ReplayCells, OneThatCannotEvictFailsAlone) {
  RefusingBackend backend(2);
  const std::vector<std::string> policies{"h2o-online:recent=3", "h2o-online:recent=1", "h2o-online:recent=5"};
  const Heard heard = replayed(policies, backend);
  ASSERT_EQ(heard.failures.size(), 1U);
  EXPECT_NE(heard.failures.at(1).find("finite numbers"), std::string::npos) << heard.failures.at(1);
  const Heard alone = replayed({policies[0], policies[2]}, 2);
  EXPECT_EQ(heard.seconds.at(0).size(), alone.seconds.at(0).size());
  EXPECT_EQ(heard.seconds.at(2).size(), alone.seconds.at(1).size());
}

TEST_F(ReplayCells, OneThatCannotChooseFailsAlone) {
  for (const int threads : {1, 2}) {
    const Heard heard = replayed({"h2o", "h2o:select=one-too-many", "snapkv"}, threads);
    ASSERT_EQ(heard.failures.size(), 1U);
    EXPECT_EQ(heard.failures.at(1),
              "h2o:select=one-too-many: selection over its budget: expected at most 20, found 21");
    EXPECT_EQ(heard.seconds.at(0).size(), 4U);
    EXPECT_FALSE(heard.seconds.contains(1));
    EXPECT_EQ(heard.seconds.at(2).size(), 4U);
  }
}

}  // namespace
}  // namespace kvreplay
