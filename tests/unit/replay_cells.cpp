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
    const Trace trace = Trace::open(file("a.h5"));
    const Conditions conditions{boundary(trace, "prompt"), eval_queries(trace, "continuation"),
                                treated_layers(trace, false)};
    std::vector<Cell> cells;
    for (const std::string& policy : policies) cells.push_back({ConfiguredPolicy::parse(policy), 20});
    const std::unique_ptr<Backend> backend = make_backend("cpu", threads);
    Heard heard;
    replay(*backend, trace, conditions, cells, heard);
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
