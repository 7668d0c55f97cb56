// Laws of single policies: what makes each of them itself, and where two of them are one.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "float_types.h"
#include "naive_attention.h"
#include "random.h"
#include "recorded_run.h"
#include "tests/table_file.h"

namespace kvreplay {
namespace {

/// 5 layers, 4/2 heads, 90 + 20 tokens.
class LawsOfPapers : public testing::Test {
 protected:
  static const Trace& trace() {
    static const TemporaryTrace file(options());
    static const Trace opened = file.open();
    return opened;
  }
  static constexpr int layers = 5, prompt = 90, tokens = 110;

  static SynthOptions options() {
    SynthOptions made = synth_defaults("sinks");
    made.layers = layers;
    made.query_heads = 4;
    made.kv_heads = 2;
    made.head_dim = 16;
    made.prefill = prompt;
    made.continuation = tokens - prompt;
    made.rope_base = 100.0;
    return made;
  }

  static void expect_same_sets(const std::string& one, const std::string& other, int budget) {
    const RecordedRun run = record(trace(), {one, other}, budget);
    for (int l = 0; l < layers; ++l)
      EXPECT_EQ(run.selections.at({0, l}).set, run.selections.at({1, l}).set)
          << one << " and " << other << " in layer " << l << " at " << budget;
  }

  /// Tokens that a row holds after query t has attended, before its eviction.
  static int held_at(const LayerSelection& selection, int row, int t) { return selection.seen_by(t).count(row); }
  static int evictions_after(const LayerSelection& selection, int row, int t) {
    const auto begin = selection.evicted_at.begin() + static_cast<std::ptrdiff_t>(row) * tokens;
    return static_cast<int>(std::count(begin, begin + tokens, t));
  }
};

TEST_F(LawsOfPapers, FullIsExact) {
  const RecordedRun run = record(trace(), {"full"}, 1);
  for (const auto& [key, all] : run.moments)
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(all[i].mass, 1.0);
      EXPECT_EQ(all[i].square, run.full.at(key.second)[i].square);
      EXPECT_EQ(all[i].error_square, 0.0);
    }
}

TEST_F(LawsOfPapers, GlobalOracleBoundsEveryFixedSetOfItsGranularity) {
  const std::vector<std::string> asked{"oracle:scope=global",
                                       "oracle:scope=layer",
                                       "oracle",
                                       "snapkv",
                                       "h2o",
                                       "chunkkv",
                                       "pyramid-kv",
                                       "pyramid-infer",
                                       "dynamickv",
                                       "sca",
                                       "hybrid",
                                       "strided",
                                       "truncate",
                                       "random",
                                       "local",
                                       "streaming-llm"};
  const RecordedRun run = record(trace(), asked, 12);
  const auto mean = [&](int cell) {
    double sum = 0;
    for (int l = 0; l < layers; ++l) sum += run.recall(cell, l);
    return sum / layers;
  };
  for (int cell = 1; cell < static_cast<int>(asked.size()); ++cell)
    EXPECT_LE(mean(cell), mean(0) + 1e-9) << asked[static_cast<std::size_t>(cell)];
  EXPECT_LE(mean(2), mean(1) + 1e-9) << "a layer's heads may share their slots";
}

TEST_F(LawsOfPapers, ChunkKvReusesTheSetOfTheFirstOfEveryNLayers) {
  const RecordedRun run = record(trace(), {"chunkkv:heads=kv,reuse=2", "chunkkv:heads=kv"}, 20);
  for (int l = 0; l < layers; ++l) {
    EXPECT_EQ(run.selections.at({0, l}).set, run.selections.at({1, l / 2 * 2}).set);
    EXPECT_EQ(run.selections.at({0, l}).source, l / 2 * 2);
  }
}

TEST_F(LawsOfPapers, ChunksOfOneTokenAreSnapKvWithoutPooling) {
  for (const std::string heads : {"kv", "query", "layer"})
    for (const int budget : {5, 8, 20, 61})
      expect_same_sets("chunkkv:chunk=1,heads=" + heads, "snapkv:pool=none,heads=" + heads, budget);
}

TEST_F(LawsOfPapers, EqualCountsMakeDynamicKvAndPyramidKvSnapKv) {
  for (const int budget : {5, 8, 20, 61}) {
    expect_same_sets("dynamickv:r_max=1", "snapkv", budget);
    expect_same_sets("dynamickv:r_max=1,heads=query,update=1,norm=minmax", "snapkv:heads=query", budget);
    expect_same_sets("pyramid-kv:beta=1", "snapkv", budget);
    expect_same_sets("pyramid-kv:short_uniform=true", budget > 45 ? "snapkv" : "pyramid-kv", budget);
  }
  SynthOptions one_layer = options();
  one_layer.layers = 1;
  const TemporaryTrace file(one_layer);
  const RecordedRun run = record(file.open(), {"pyramid-kv", "dynamickv", "snapkv"}, 20);
  EXPECT_EQ(run.selections.at({0, 0}).set, run.selections.at({2, 0}).set);
  EXPECT_EQ(run.selections.at({1, 0}).set, run.selections.at({2, 0}).set);
}

TEST_F(LawsOfPapers, WithoutWhatSetsThemApartSomePoliciesAreOthers) {
  for (const int budget : {8, 12, 20, 61}) {
    expect_same_sets("ada-kv:alpha=1", "snapkv", budget);
    expect_same_sets("ada-kv:alpha=0", "snapkv:allocate=ranked-layer", budget);
    expect_same_sets("lava:window=8,floor=1", "snapkv:agg=max", budget);
    expect_same_sets("tova:protect_last=true", "snapkv:window=1,pool=none,heads=layer", budget);
    expect_same_sets("scissorhands:binary=false,history=8,recent=8", "snapkv:pool=none", budget);
    expect_same_sets("nacl:random=0,question=last,question_tokens=8", "snapkv:pool=none", budget);
    expect_same_sets("simlayerkv:threshold=0,sinks=4,recent=6", "random:heads=layer,sinks=4,window=6", 10);
  }
}

TEST_F(LawsOfPapers, DmsKeepsTheRecentWindowAndWhatScoresAtLeastTheThreshold) {
  constexpr int recent = 20;
  const std::vector<std::int32_t> eval{90};
  const std::unique_ptr<Backend> backend = tested_backend(1);
  const auto key_length = [&](int l, int head, int j) {
    const LayerTensors tensors = trace().layer(l);
    return LayerView(*backend, tensors, {.prompt = prompt}, eval).key_norms(2)(head, j);
  };
  const double least = -key_length(1, 0, 30);
  const RecordedRun run = record(trace(), {fmt::format("dms:base=(knorm),threshold={},recent=20", least)}, 12);
  for (int l = 0; l < layers; ++l) {
    const KeptSet& set = run.selections.at({0, l}).set;
    for (int head = 0; head < 2; ++head)
      for (int j = 0; j < prompt; ++j)
        EXPECT_EQ(set.keeps(head, j), j >= prompt - recent || -key_length(l, head, j) >= least) << l << ", " << j;
  }
  expect_same_sets("dms:base=(knorm),threshold=1000", "full", 12);  // 90 tokens are fewer than its window of 128
  expect_same_sets("dms:base=(knorm),threshold=1000,recent=9", "local", 9);
}

TEST_F(LawsOfPapers, DmsScoresBesideTheTokensThatItsBaseProtects) {
  // The observation window of 4 tokens is not pooled; the recent window of 9 is.
  const LayerTensors tensors = trace().layer(0);
  const std::vector<std::int32_t> eval{90};
  const std::unique_ptr<Backend> backend = tested_backend(1);
  const LayerView view(*backend, tensors, {.prompt = prompt}, eval);
  const Plan plan = ConfiguredPolicy::parse("snapkv:window=4,kernel=5,pool=avg").plans(1).front().plan;
  const Matrix scores = plan.score.score(view, {.recent = 4});
  const double least = scores(0, prompt - 10);
  const RecordedRun kept =
      record(trace(), {fmt::format("dms:base=(snapkv:window=4,kernel=5,pool=avg),threshold={},recent=9", least)}, 30);
  for (int j = 0; j < prompt; ++j)
    EXPECT_EQ(kept.selections.at({0, 0}).set.keeps(0, j), j >= prompt - 9 || scores(0, j) >= least) << j;
}

TEST_F(LawsOfPapers, DmsNeedsAThresholdAndScoresThatDoNotDependOnABudget) {
  const auto refusal = [](const std::string& policy) -> std::string {
    try {
      ConfiguredPolicy::parse(policy).plans(2);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(
      refusal("dms"),
      "dms:base: no policy: expected base=(POLICY),threshold=NUMBER, as in base=(knorm),threshold=-20, found none");
  EXPECT_EQ(refusal("dms:base=(knorm)").substr(0, 27), "dms:threshold: no threshold");
  for (const char* base : {"compactor", "vase", "chunkkv", "ada-kv", "h2o-online", "local", "full"})
    EXPECT_EQ(refusal(std::string("dms:threshold=0,base=(") + base + ")").substr(0, 59),
              "dms:base: the base policy has no scores apart from a budget")
        << base;
}

TEST_F(LawsOfPapers, SimLayerKvKeepsAllWhereFirstAndRecentTokensHaveLessThanTheThreshold) {
  constexpr int sinks = 2, recent = 5, rows = 3;
  const std::vector<std::int32_t> eval{90};
  const std::unique_ptr<Backend> backend = tested_backend(1);
  std::vector<double> masses;
  for (int l = 0; l < layers; ++l) {
    const LayerTensors tensors = trace().layer(l);
    const LayerView view(*backend, tensors, {.prompt = prompt}, eval);
    const Matrix& attention = view.window_attention(rows);
    double mass = 0;
    for (int head = 0; head < 4; ++head)
      for (int j = 0; j < prompt; ++j)
        if (j < sinks || j >= prompt - recent) mass += attention(head, j) / (4 * rows);
    masses.push_back(mass);
  }
  std::vector<double> sorted = masses;
  std::ranges::sort(sorted);
  const double threshold = (sorted[1] + sorted[2]) / 2;
  ASSERT_TRUE(sorted[1] < threshold && threshold < sorted[2]);
  const RecordedRun run =
      record(trace(), {"simlayerkv:rows=3,sinks=2,recent=5,threshold=" + std::to_string(threshold)}, 3);
  for (int l = 0; l < layers; ++l) {
    const LayerSelection& selection = run.selections.at({0, l});
    const bool lazy = masses[static_cast<std::size_t>(l)] > threshold;
    EXPECT_EQ(selection.set.count(0), lazy ? sinks + recent : prompt) << "layer " << l;
    if (lazy) {
      EXPECT_EQ(selection.set.positions(0), (std::vector<std::int32_t>{0, 1, 85, 86, 87, 88, 89})) << "layer " << l;
    }
  }
}

TEST_F(LawsOfPapers, NaclDrawsForEachLayerAndHeadByItsSeed) {
  const std::string nacl = "nacl:question=last,question_tokens=4,random=0.5";
  const RecordedRun run = record(trace(), {nacl, nacl + ",seed=1"}, 24);
  bool seeds_differ = false;
  for (int l = 0; l < layers; ++l) {
    const Matrix& scores = run.scores.at({0, l});
    for (int head = 0; head < 2; ++head) {
      std::vector<std::pair<double, std::int32_t>> ranked, drawn;  // minus the score, token
      for (int j = 0; j < prompt - 4; ++j) ranked.emplace_back(-scores(head, j), j);
      std::ranges::sort(ranked);
      std::vector<std::int32_t> expected{86, 87, 88, 89};
      for (int i = 0; i < prompt - 4; ++i) {
        const auto [minus_score, j] = ranked[static_cast<std::size_t>(i)];
        if (i < 10) expected.push_back(j);
        if (i >= 10) drawn.emplace_back(minus_score + std::log(-std::log(uniform(chain(0, l, head, j)))), j);
      }
      std::ranges::sort(drawn);
      for (std::size_t i = 0; i < 10; ++i) expected.push_back(drawn[i].second);
      std::ranges::sort(expected);
      EXPECT_EQ(run.selections.at({0, l}).set.positions(head), expected) << "layer " << l << ", head " << head;
      EXPECT_EQ(run.selections.at({0, l}).recent[static_cast<std::size_t>(head)], 4);
    }
    seeds_differ = seeds_differ || run.selections.at({0, l}).set != run.selections.at({1, l}).set;
  }
  EXPECT_TRUE(seeds_differ);
}

TEST_F(LawsOfPapers, TovaHoldsTheBudgetAndLetsTheNewestTokenGo) {
  const RecordedRun run = record(trace(), {"tova:schedule=online", "tova:schedule=online,protect_last=true"}, 12);
  int newest_gone = 0;
  for (int l = 0; l < layers; ++l)
    for (int t = 0; t < tokens; ++t) {
      for (const int cell : {0, 1}) EXPECT_EQ(evictions_after(run.selections.at({cell, l}), 0, t), t < 12 ? 0 : 1);
      const auto at = static_cast<std::size_t>(t);
      newest_gone += run.selections.at({0, l}).evicted_at[at] == t ? 1 : 0;
      EXPECT_NE(run.selections.at({1, l}).evicted_at[at], t);
    }
  EXPECT_GT(newest_gone, 0);
}

TEST_F(LawsOfPapers, PyramidKvShrinksFromLayerToLayer) {
  const RecordedRun run = record(trace(), {"pyramid-kv"}, 20);
  for (int l = 1; l < layers; ++l)
    EXPECT_LT(run.selections.at({0, l}).set.count(0), run.selections.at({0, l - 1}).set.count(0));
}

TEST_F(LawsOfPapers, PyramidInferIsNested) {
  for (const char* policy :
       {"pyramid-infer", "pyramid-infer:over=all,r=0.3", "pyramid-infer:decay=linear,r=0.2,sinks=0",
        "pyramid-infer:decay=constant,r=0.5,recent=1", "pyramid-infer:lengths=natural,r=0.9,decay=constant,recent=1"})
    for (const int budget : {3, 12, 40}) {
      SCOPED_TRACE(std::string(policy) + " at " + std::to_string(budget));
      const RecordedRun run = record(trace(), {policy}, budget);
      bool shrinks = false;
      for (int l = 1; l < layers; ++l) {
        const KeptSet &above = run.selections.at({0, l - 1}).set, &set = run.selections.at({0, l}).set;
        for (const std::int32_t j : set.positions(0))
          EXPECT_TRUE(above.keeps(0, j)) << "layer " << l << ", token " << j;
        shrinks = shrinks || set.count(0) < above.count(0);
      }
      EXPECT_TRUE(shrinks || budget < 40);
    }
}

TEST_F(LawsOfPapers, NaturalLengthsHoldTheWholePromptInTheFirstLayer) {
  const RecordedRun run = record(trace(), {"pyramid-infer:lengths=natural,r=0.3", "pyramid-infer"}, 12);
  EXPECT_EQ(run.selections.at({0, 0}).set.count(0), prompt);
  EXPECT_LT(run.selections.at({1, 0}).set.count(0), prompt);
}

TEST_F(LawsOfPapers, HybridIsChunkKvBelowAndSnapKvAbove) {
  const RecordedRun run = record(trace(), {"hybrid", "chunkkv", "snapkv"}, 20);
  for (int l = 0; l < layers; ++l)
    EXPECT_EQ(run.selections.at({0, l}).set, run.selections.at({l < 2 ? 1 : 2, l}).set) << "layer " << l;
}

TEST_F(LawsOfPapers, RangesOfLayersAreReplayedAsIfTheyWereAlone) {
  const RecordedRun run = record(
      trace(), {"layers:3-4=(pyramid-kv:window=2),0-2=(chunkkv:chunk=5,reuse=3)", "chunkkv:chunk=5,reuse=3"}, 20);
  for (int l = 0; l < 3; ++l) EXPECT_EQ(run.selections.at({0, l}).set, run.selections.at({1, l}).set);
  // b = 18, M = 88, two layers: 2b - b/20 and b/20 beside the window.
  EXPECT_EQ(run.selections.at({0, 3}).set.count(0), 2 + 35);
  EXPECT_EQ(run.selections.at({0, 4}).set.count(0), 2 + 1);
}

TEST_F(LawsOfPapers, ABudgetOfThePromptKeepsTheContinuationToo) {
  for (const char* policy : {"h2o-online", "streaming-llm:rolling=true", "finch", "snapkv:schedule=every(16)"})
    for (const int budget : {prompt, prompt + 5}) {
      const RecordedRun run = record(trace(), {policy}, budget);
      for (const auto& [key, all] : run.moments)
        for (const Moments& at_query : all) EXPECT_EQ(at_query.mass, 1.0) << policy;
    }
}

TEST_F(LawsOfPapers, OnlineEvictionHoldsNoMoreThanItsBudgetAndTheNewToken) {
  for (const char* policy : {"h2o-online", "h2o-online:heads=query,recent=3", "h2o-online:heads=layer,prefill=once"}) {
    const RecordedRun run = record(trace(), {policy}, 20);
    const bool once = std::string(policy).find("once") != std::string::npos;
    for (const auto& [key, selection] : run.selections)
      for (int row = 0; row < selection.set.rows(); ++row)
        for (int t = once ? prompt : 0; t < tokens; ++t) {
          EXPECT_EQ(held_at(selection, row, t), std::min(t + 1, 21)) << policy << ", query " << t;
          EXPECT_EQ(evictions_after(selection, row, t), t >= 20 ? 1 : 0) << policy << ", query " << t;
        }
  }
}

TEST_F(LawsOfPapers, AShareOfTheTokensSeenIsHeldAtEveryStep) {
  const auto most = [](int seen) { return std::max(1, static_cast<int>(std::floor(0.3 * seen + 0.5))); };
  for (const char* policy : {"h2o-online", "h2o:schedule=online(true)", "snapkv:window=2,schedule=every(1)",
                             "h2o:schedule=every(16)", "streaming-llm:schedule=every(16)"}) {
    const RecordedRun run = record_cells(trace(), {{ConfiguredPolicy::parse(policy), most(prompt), 0.3}}, 2);
    const std::string name = policy;
    const int block = name.find("every(16)") != std::string::npos ? 16 : 1;
    const bool later = name == "h2o-online";  // it evicts after the prompt, too
    for (const auto& [key, selection] : run.selections)
      for (int row = 0; row < selection.set.rows(); ++row) {
        for (int t = 0; t < (later ? tokens : prompt); ++t) {
          if ((t + 1) % block != 0) continue;
          EXPECT_EQ(held_at(selection, row, t) - evictions_after(selection, row, t), most(t + 1)) << name << ", " << t;
        }
        EXPECT_EQ(selection.set.count(row), most(prompt)) << name;
      }
  }
}

TEST_F(LawsOfPapers, ABudgetOfTheTokensSeenIsOneOfThePromptWhereItIsCutOnce) {
  for (const char* policy : {"snapkv", "h2o", "dynamickv", "pyramid-infer", "sca:schedule=threshold(0.5,0.25)"}) {
    const ConfiguredPolicy parsed = ConfiguredPolicy::parse(policy);
    const RecordedRun run = record_cells(trace(), {{parsed, 27}, {parsed, 27, 0.3}}, 2);
    for (int l = 0; l < layers; ++l) EXPECT_EQ(run.selections.at({0, l}).set, run.selections.at({1, l}).set) << policy;
  }
}

TEST_F(LawsOfPapers, ARollingWindowHasOneSize) {
  const std::vector<Cell> rolling{{ConfiguredPolicy::parse("streaming-llm:rolling=true"), 27, 0.3}};
  try {
    record_cells(trace(), rolling, 2);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              "streaming-llm: a rolling window cannot grow: evicted tokens are lost: expected a budget without "
              "@seen, or schedule=once, found 0.3@seen");
  }
}

TEST_F(LawsOfPapers, OnlineEvictionSparesRecentTokens) {
  const RecordedRun run = record(trace(), {"h2o-online:recent=7"}, 20);
  for (const auto& [key, selection] : run.selections)
    for (std::size_t i = 0; i < selection.evicted_at.size(); ++i) {
      const int token = static_cast<int>(i) % tokens;
      EXPECT_TRUE(selection.evicted_at[i] < 0 || selection.evicted_at[i] >= token + 7) << "token " << token;
    }
}

TEST_F(LawsOfPapers, OnlineAfterACutOfThePromptHasTheSetOfH2oAtItsEnd) {
  for (const std::string heads : {"kv", "query", "layer"})
    expect_same_sets("h2o-online:prefill=once,heads=" + heads, "h2o:heads=" + heads, 20);
}

TEST_F(LawsOfPapers, GrowingKeepsTheContinuation) {
  const RecordedRun run = record(trace(), {"h2o-online:grow=true", "h2o-online"}, 20);
  for (int l = 0; l < layers; ++l) {
    const LayerSelection &grown = run.selections.at({0, l}), &steady = run.selections.at({1, l});
    EXPECT_EQ(grown.set, steady.set) << "until the prompt ends both are one";
    for (int t = prompt; t < tokens; ++t) EXPECT_EQ(held_at(grown, 0, t), 20 + t - prompt + 1);
  }
}

TEST_F(LawsOfPapers, AThresholdCutsWhenThePeakIsHeld) {
  for (const char* policy :
       {"sca:schedule=threshold(45,22),recent=3", "h2o:schedule=threshold(45,22)", "snapkv:schedule=threshold(45,22)",
        "random:schedule=threshold(45,22)", "streaming-llm:schedule=threshold(45,22),positions=cache",
        "strided:schedule=threshold(45,22)"}) {
    SCOPED_TRACE(policy);
    const RecordedRun run = record(trace(), {policy}, 1);
    for (const auto& [key, selection] : run.selections)
      for (int row = 0; row < selection.set.rows(); ++row) {
        int held = 0;
        for (int t = 0; t < tokens; ++t) {
          ++held;
          ASSERT_EQ(held_at(selection, row, t), held) << "query " << t;
          ASSERT_EQ(evictions_after(selection, row, t), held == 45 ? 45 - 22 : 0) << "query " << t;
          if (held == 45) held = 22;
        }
      }
  }
}

TEST_F(LawsOfPapers, ScaHasOneSetForAllLayers) {
  const RecordedRun run = record(trace(), {"sca", "sca:schedule=threshold(0.5,0.25),recent=3", "sca:share=2"}, 20);
  for (int l = 0; l < layers; ++l) {
    EXPECT_EQ(run.selections.at({0, l}).set, run.selections.at({0, 4}).set);
    EXPECT_EQ(run.selections.at({0, l}).source, 4);
    EXPECT_EQ(run.selections.at({1, l}).evicted_at, run.selections.at({1, 4}).evicted_at);
    EXPECT_EQ(run.selections.at({2, l}).source, std::min(l / 2 * 2 + 1, 4));
  }
}

TEST_F(LawsOfPapers, RollingSeesTheSinksAndTheLastTokens) {
  const RecordedRun run = record(trace(), {"streaming-llm:rolling=true", "local:schedule=rolling"}, 20);
  for (int cell = 0; cell < 2; ++cell)
    for (int l = 0; l < layers; ++l)
      for (int t = 0; t < tokens; ++t) {
        const KeptSet seen = run.selections.at({cell, l}).seen_by(t);
        const int sinks = cell == 0 ? 4 : 0;
        for (int j = 0; j <= t; ++j)
          ASSERT_EQ(seen.keeps(0, j), j < sinks || j > t - (20 - sinks)) << "query " << t << ", token " << j;
      }
}

TEST_F(LawsOfPapers, AnOnlineWindowEvictsAfterEachQuery) {
  const RecordedRun run = record(trace(), {"streaming-llm:schedule=online", "local:schedule=online"}, 20);
  for (int cell = 0; cell < 2; ++cell)
    for (int l = 0; l < layers; ++l)
      for (int t = 0; t < tokens; ++t) {
        const KeptSet seen = run.selections.at({cell, l}).seen_by(t);
        const int sinks = cell == 0 ? 4 : 0;
        for (int j = 0; j <= t; ++j)
          ASSERT_EQ(seen.keeps(0, j), j < sinks || j >= t - (20 - sinks)) << "query " << t << ", token " << j;
      }
}

TEST_F(LawsOfPapers, FinchKeepsItsShareAfterEachBlock) {
  // n_q = 6, n = 84, k = 14: after each block of 10, floor(k seen / n) of the context.
  const std::string finch = "finch:question=last,question_tokens=6,blocks=10";
  for (const std::string more : {"", ",positions=original", ",order=relevance", ",condition=all", ",heads=kv"}) {
    SCOPED_TRACE(more);
    const RecordedRun run = record(trace(), {finch + more}, 20);
    for (const auto& [key, selection] : run.selections)
      for (int row = 0; row < selection.set.rows(); ++row) {
        EXPECT_EQ(selection.set.count(row), 20);
        for (int j = 84; j < 90; ++j) EXPECT_TRUE(selection.set.keeps(row, j)) << "the question stays";
        for (int seen = 10; seen <= 90; seen += 10) {
          const int end = std::min(seen, 84);
          int held = 0;
          for (int j = 0; j < end; ++j) {
            const int gone = selection.evicted_at[static_cast<std::size_t>(row * tokens + j)];
            held += gone < 0 || gone > end - 1 ? 1 : 0;
            EXPECT_TRUE(gone < 0 || gone % 10 == 9 || gone == 83) << "only at the end of a block";
          }
          EXPECT_EQ(held, 14 * end / 84) << "after " << end;
        }
      }
  }
  const RecordedRun code = record(trace(), {finch + ",rate=code"}, 20);
  // sigma = 6: 10/6 -> 1 for each of eight blocks, and nothing for the last one of 4 tokens.
  EXPECT_EQ(code.selections.at({0, 0}).set.count(0), 6 + 8);
}

TEST_F(LawsOfPapers, FinchTakesTheMarkedQuestionAndWithoutOneTheLastTokens) {
  const int begin = marked_question(trace(), prompt).begin;
  ASSERT_GE(begin, 0);
  const int asked = prompt - begin;
  const std::string last = "finch:blocks=10,question=last,question_tokens=" + std::to_string(asked);
  expect_same_sets("finch:blocks=10", last, asked + 20);
  EXPECT_EQ(marked_question(trace(), begin - 1).begin, -1);
}

TEST_F(LawsOfPapers, SlotsByRelevanceHoldTheSameTokensInAnotherOrder) {
  const RecordedRun run = record(trace(),
                                 {"finch:question=last,question_tokens=6,blocks=100,order=relevance",
                                  "finch:question=last,question_tokens=6,blocks=100"},
                                 20);
  bool another_order = false;
  for (int l = 0; l < layers; ++l) {
    const LayerSelection& by_relevance = run.selections.at({0, l});
    std::vector<std::int32_t> ascending = by_relevance.slots;
    std::ranges::sort(ascending);
    EXPECT_EQ(ascending, by_relevance.set.positions(0));
    EXPECT_EQ(by_relevance.set, run.selections.at({1, l}).set) << "one block: order changes no score";
    EXPECT_TRUE(run.selections.at({1, l}).slots.empty());
    another_order = another_order || ascending != by_relevance.slots;
  }
  EXPECT_TRUE(another_order);
}

TEST_F(LawsOfPapers, KiviIsWithinHalfAStepAndExactInItsResidual) {
  constexpr int bits = 3, group = 8, residual = 16;  // 80 of 90 keys, 74 of 90 values
  const RecordedRun run = record(trace(), {"kivi:bits=3,group=8,residual=16"}, 1);
  const double levels = (1 << bits) - 1;
  for (int l = 0; l < layers; ++l) {
    const LayerTensors exact = trace().layer(l);
    const StoredNumbers& stored = run.stored.at({0, l});
    const auto number = [](const TensorView& tensor, int head, int t, int c) {
      return static_cast<double>(load(tensor.row(head, t), tensor.dtype, static_cast<std::size_t>(c)));
    };
    const auto check = [&](const TensorView& tensor, const std::vector<float>& changed, int quantised,
                           bool by_channel) {
      for (int head = 0; head < 2; ++head)
        for (int t = 0; t < tokens; ++t)
          for (int c = 0; c < 16; ++c) {
            const double before = number(tensor, head, t, c);
            const auto after = static_cast<double>(changed[static_cast<std::size_t>((head * tokens + t) * 16 + c)]);
            if (t >= quantised) {
              ASSERT_EQ(after, before) << "token " << t;
              continue;
            }
            double least = before, most = before, size = 0;
            for (int i = 0; i < group; ++i) {
              const int other = by_channel ? t / group * group + i : c / group * group + i;
              if (by_channel && other >= quantised) break;
              const double member = by_channel ? number(tensor, head, other, c) : number(tensor, head, t, other);
              least = std::min(least, member);
              most = std::max(most, member);
              size = std::max(size, std::abs(member));
            }
            // Half precision rounds the zero point and the step, which counts up to `levels` times.
            const double rounding = (size + (most - least)) * std::ldexp(1.0, -10);
            ASSERT_LE(std::abs(after - before), (most - least) / levels / 2 + rounding) << "token " << t;
          }
    };
    check(exact.k, stored.keys, prompt - prompt % residual, true);
    check(exact.v, stored.values, prompt - residual, false);
    // 2 heads of 16 numbers: quantised ones take bits + 32/group bits, others 16.
    EXPECT_DOUBLE_EQ(stored.bytes, 2 * 16 * ((80 + 74) * (bits + 32.0 / group) + (10 + 16) * 16.0) / 8);
  }
}

TEST_F(LawsOfPapers, AQuantisedCacheOfSnapKvKeepsSnapKvsTokens) {
  expect_same_sets("snapkv:store=quantised,group=4,residual=0", "snapkv", 20);
  const RecordedRun run = record(trace(), {"snapkv:store=quantised,bits=2,group=4,residual=0"}, 20);
  EXPECT_DOUBLE_EQ(run.stored.at({0, 0}).bytes, 2 * 20 * 16 * 2 * (2 + 32.0 / 4) / 8);
}

/// The best of a row's tokens [first, end), ties to the lower position.
std::vector<int> best_of(std::span<const double> scores, int first, int end, int count) {
  std::vector<int> order;
  for (int j = first; j < end; ++j) order.push_back(j);
  std::ranges::sort(order, std::less{}, [&](int j) { return std::pair(-scores[static_cast<std::size_t>(j)], j); });
  order.resize(static_cast<std::size_t>(count));
  return order;
}

TEST_F(LawsOfPapers, ThinkAndMiniCacheKeepEveryToken) {
  const RecordedRun run = record(trace(), {"think:recent=10", "minicache"}, 20);
  for (const auto& [key, selection] : run.selections) EXPECT_EQ(selection.set.count(0), prompt);
  for (int l = 0; l < layers; ++l)  // floor(16 * 0.4) = 6 of 16 channels of 80 keys
    EXPECT_EQ(run.stored.at({0, l}).bytes, 2 * (prompt * 32 - 80 * 6) * 2.0);
}

TEST_F(LawsOfPapers, MiniCacheSharesDirectionsInTheLastTwoOfFiveLayers) {
  const RecordedRun run = record(trace(), {"minicache"}, 20);
  for (int l = 0; l < 3; ++l) {
    EXPECT_EQ(run.stored.at({0, l}).keys, widened(trace().layer(l).k));
    EXPECT_EQ(run.stored.at({0, l}).bytes, 2 * prompt * 32 * 2.0);
  }
  const std::vector<float>& lower = run.stored.at({0, 3}).values;
  const std::vector<float>& upper = run.stored.at({0, 4}).values;
  const std::vector<float> exact = widened(trace().layer(4).v);
  int shared = 0;
  for (std::size_t row = 0; row < 2 * tokens; ++row) {
    double dot = 0, a = 0, b = 0, own = 0;
    for (std::size_t i = 16 * row; i < 16 * row + 16; ++i) {
      dot += static_cast<double>(lower[i]) * static_cast<double>(upper[i]);
      a += static_cast<double>(lower[i]) * static_cast<double>(lower[i]);
      b += static_cast<double>(upper[i]) * static_cast<double>(upper[i]);
      own += static_cast<double>(exact[i]) * static_cast<double>(exact[i]);
    }
    if (dot > (1 - 1e-6) * std::sqrt(a * b)) {
      ++shared;
      EXPECT_LT(row % tokens, static_cast<std::size_t>(prompt)) << "tokens after the prompt are as they were";
    }
    EXPECT_NEAR(b, own, 1e-5 * own);
  }
  EXPECT_GT(shared, 0);
  EXPECT_EQ(run.stored.at({0, 3}).bytes, run.stored.at({0, 4}).bytes);
}

TEST_F(LawsOfPapers, CamOneShotKeepsTheTokensAndTheBytesOfH2o) {
  expect_same_sets("cam-one-shot", "h2o", 20);
  const RecordedRun run =
      record(trace(), {"cam-one-shot", "cam-one-shot:mode=sampled", "cam-one-shot:mode=sampled,seed=1"}, 20);
  for (int l = 0; l < layers; ++l) {
    EXPECT_EQ(run.stored.at({0, l}).bytes, 2 * 20 * 32 * 2.0);
    EXPECT_EQ(run.stored.at({0, l}).keys, widened(trace().layer(l).k));
    EXPECT_NE(run.stored.at({0, l}).values, run.stored.at({1, l}).values);
    EXPECT_NE(run.stored.at({1, l}).values, run.stored.at({2, l}).values);
  }
}

TEST_F(LawsOfPapers, CamKeepsTheTokensAndTheKeysOfStreamingLlm) {
  const RecordedRun run = record(
      trace(), {"streaming-llm:schedule=online", "cam", "cam:mode=sampled", "cam:mode=sampled,seed=1", "cam:merge=2"},
      20);
  for (int l = 0; l < layers; ++l) {
    for (int cell = 1; cell < 5; ++cell) {
      EXPECT_EQ(run.selections.at({cell, l}).set, run.selections.at({0, l}).set);
      EXPECT_EQ(run.selections.at({cell, l}).evicted_at, run.selections.at({0, l}).evicted_at);
      EXPECT_EQ(run.stored.at({cell, l}).keys, widened(trace().layer(l).k));
      EXPECT_EQ(run.stored.at({cell, l}).bytes, 2 * 20 * 32 * 2.0);
      for (std::size_t i = 0; i < run.moments.at({0, l}).size(); ++i)
        EXPECT_NEAR(run.compared_at.at({cell, l})[i].mass, run.moments.at({0, l})[i].mass, 1e-6);
      for (int other = 1; other < cell; ++other)
        EXPECT_NE(run.stored.at({cell, l}).values, run.stored.at({other, l}).values);
    }
  }
}

TEST_F(LawsOfPapers, WithoutAttentionToEvictedTokensCamIsStreamingLlm) {
  SynthOptions sliding = options();
  sliding.sliding_window = {7};
  const TemporaryTrace file(sliding);
  const Trace opened = file.open();
  const Conditions conditions{prompt, eval_queries(opened, "all"), treated_layers(opened, true)};
  std::vector<Cell> cells;
  for (const char* policy : {"streaming-llm:schedule=online,sinks=1", "cam:sinks=1", "cam:sinks=1,mode=sampled"})
    cells.push_back({.policy = ConfiguredPolicy::parse(policy), .budget = 20});
  RecordedRun run;
  replay(*tested_backend(2), opened, conditions, cells, run);
  for (int l = 0; l < layers; ++l)
    for (const int cell : {1, 2}) {
      EXPECT_EQ(run.stored.at({cell, l}).values, widened(opened.layer(l).v));
      for (std::size_t i = 0; i < run.compared_at.at({cell, l}).size(); ++i)
        EXPECT_NEAR(run.compared_at.at({cell, l})[i].error_square, run.moments.at({0, l})[i].error_square, 1e-6);
    }
}

TEST_F(LawsOfPapers, QuestHoldsAllAndReadsPages) {
  const RecordedRun run = record(trace(), {"quest:page=8,least_pages=1,dense_layers=2"}, 24);
  for (int l = 0; l < layers; ++l) {
    const LayerSelection& selection = run.selections.at({0, l});
    EXPECT_EQ(selection.set.heads(), Heads::kv);
    EXPECT_EQ(selection.set.count(0), prompt);
    EXPECT_EQ(selection.differs_by_query(), l >= 2);
    if (l < 2) {
      EXPECT_EQ(run.recall(0, l), 1.0);
      continue;
    }
    EXPECT_EQ(selection.reads.bytes, 2 * 12 * 2 * 16 * 2.0);
    EXPECT_LT(run.recall(0, l), 1.0);
    for (int t = prompt; t < tokens; ++t) {
      const KeptSet read = selection.seen_by(t);
      for (int h = 0; h < 4; ++h)
        EXPECT_EQ(read.count(h), read.keeps(h, prompt - 1) ? 2 * 8 + 2 : 24);  // 90 = 11 * 8 + 2
    }
  }
  EXPECT_FALSE(record(trace(), {"quest:dense_layers=0"}, prompt).selections.at({0, 4}).differs_by_query());
  // Other budgets of one run read other pages.
  const ConfiguredPolicy quest = ConfiguredPolicy::parse("quest:page=4,least_pages=1,dense_layers=0");
  const RecordedRun both = record_cells(trace(), {{quest, 8}, {quest, 40}}, 2);
  EXPECT_EQ(both.selections.at({0, 1}).seen_by(prompt).count(0) <= 8, true);
  EXPECT_GT(both.selections.at({1, 1}).seen_by(prompt).count(0), 30);
}

TEST_F(LawsOfPapers, SparseReadsOfPagesOfOneTokenAreThoseOfTheOracle) {
  const RecordedRun run = record(
      trace(), {"oracle-top-k", "quest:page=1,least_pages=1,dense_layers=0", "page-means:page=1,least_pages=1"}, 24);
  for (int l = 0; l < layers; ++l)
    for (int t = prompt; t < tokens; ++t) {
      const KeptSet best = run.selections.at({0, l}).seen_by(t);
      for (int h = 0; h < 4; ++h) EXPECT_EQ(best.count(h), 24);
      EXPECT_EQ(run.selections.at({1, l}).seen_by(t), best);
      EXPECT_EQ(run.selections.at({2, l}).seen_by(t), best);
    }
  EXPECT_EQ(run.selections.at({0, 0}).reads.bytes, 0);
}

TEST_F(LawsOfPapers, SparseReadsWithoutABudgetAreTheSameAtAnyBudget) {
  const ConfiguredPolicy policy = ConfiguredPolicy::parse("oracle-top-p:p=0.5");
  const RecordedRun run = record_cells(trace(), {{policy, 8}, {policy, prompt}}, 2);
  for (int l = 0; l < layers; ++l) {
    ASSERT_TRUE(run.selections.at({1, l}).differs_by_query());
    for (int t = prompt; t < tokens; ++t)
      EXPECT_EQ(run.selections.at({1, l}).seen_by(t), run.selections.at({0, l}).seen_by(t));
  }
  EXPECT_LT(run.selections.at({1, 0}).seen_by(prompt).count(0), prompt);
}

TEST_F(LawsOfPapers, NoSparseReadsOfAsManyTokensRecallMoreThanTheOracle) {
  const RecordedRun run = record(
      trace(), {"oracle-top-k", "quest:page=4,least_pages=1,dense_layers=0", "page-means:page=4,least_pages=1"}, 24);
  for (int l = 0; l < layers; ++l)
    for (int policy : {1, 2}) EXPECT_LT(run.recall(policy, l), run.recall(0, l));
}

TEST_F(LawsOfPapers, HeadKvKeepsSnapKvsBestOfEachHead) {
  std::vector<double> importance;
  for (int i = 0; i < layers * 4; ++i) importance.push_back(uniform(chain(3, i)));
  const TemporaryFile table(npy(dictionary("<f8", "(5, 4)"), numbers(importance)));
  const std::string policy = "head-kv:table=" + table.path() + ",window=4,beta=1.5";
  const RecordedRun run = record(trace(), {policy, "snapkv:window=4"}, 20);
  int slots = 0;
  bool differ = false;
  for (int l = 0; l < layers; ++l)
    for (int row = 0; row < 2; ++row) {
      const KeptSet& set = run.selections.at({0, l}).set;
      slots += set.count(row);
      differ = differ || set.count(row) != 20;
      std::vector<int> expected = best_of(run.scores.at({1, l}).row(row), 0, prompt - 4, set.count(row) - 4);
      for (int j = prompt - 4; j < prompt; ++j) expected.push_back(j);
      std::ranges::sort(expected);
      EXPECT_EQ(set.positions(row), expected);
    }
  EXPECT_EQ(slots, layers * 2 * 20);
  EXPECT_TRUE(differ);
  EXPECT_THROW(record(trace(), {"head-kv"}, 20), Error) << "no table";
}

TEST_F(LawsOfPapers, QFilterTakesDirectionsOfAFile) {
  std::vector<float> directions;
  for (int i = 0; i < layers * 2 * 16; ++i) directions.push_back(static_cast<float>(uniform(chain(4, i)) - 0.5));
  const TemporaryFile table(npy(dictionary("<f4", "(5, 2, 16)"), numbers(directions)));
  const RecordedRun run = record(trace(), {"q-filter:filters=" + table.path()}, 20);
  for (int l = 0; l < layers; ++l)
    for (int row = 0; row < 2; ++row) {
      const LayerTensors tensors = trace().layer(l);
      std::vector<double> scores;
      for (int j = 0; j < prompt; ++j) {
        double score = 0;
        for (int c = 0; c < 16; ++c)
          score += static_cast<double>(directions[static_cast<std::size_t>((l * 2 + row) * 16 + c)]) *
                   static_cast<double>(load(tensors.k.row(row, j), tensors.k.dtype, static_cast<std::size_t>(c)));
        scores.push_back(score);
      }
      std::vector<int> expected = best_of(scores, 0, prompt, 20);
      std::ranges::sort(expected);
      EXPECT_EQ(run.selections.at({0, l}).set.positions(row), expected);
    }
}

TEST_F(LawsOfPapers, DuoAttentionKeepsRetrievalHeadsWhole) {
  const TemporaryFile table(npy(dictionary("<f8", "(5, 2)"), numbers<double>({9, 1, 2, 8, 3, 3, 7, 0, 0, 6})));
  // The best round(0.5 * 10) = 5 of ten heads: 9, 8, 7, 6, and of the two 3 the first.
  const std::vector<int> whole{1, 0, 0, 1, 1, 0, 1, 0, 0, 1};
  for (const int budget : {1, 50}) {
    const RecordedRun run = record(trace(), {"duo-attention:sinks=3,recent=7,table=" + table.path()}, budget);
    for (int head = 0; head < 10; ++head) {
      const KeptSet& set = run.selections.at({0, head / 2}).set;
      for (int j = 0; j < prompt; ++j)
        EXPECT_EQ(set.keeps(head % 2, j), whole[static_cast<std::size_t>(head)] == 1 || j < 3 || j >= prompt - 7);
    }
  }
}

TEST_F(LawsOfPapers, DuoAttentionWithoutATableCumulatesTheAttentionOfMeans) {
  // As kvpress says it: the mean query and key at 500 positions, attention of the last, mean of its running sum.
  std::vector<double> areas;
  for (int l = 0; l < layers; ++l) {
    const LayerTensors tensors = trace().layer(l);
    const auto mean = [&](const TensorView& tensor, int head) {
      std::vector<double> sum(16);
      for (int j = 0; j < prompt; ++j) {
        const std::vector<double> back = turned(tensors.rope, -j, head_rows(tensor, head)[static_cast<std::size_t>(j)]);
        for (std::size_t c = 0; c < 16; ++c) sum[c] += back[c] / tensors.rope.attention_scaling / prompt;
      }
      return sum;
    };
    for (int kv = 0; kv < 2; ++kv) {
      areas.push_back(0);
      const std::vector<double> key = mean(tensors.k, kv);
      for (const int h : {2 * kv, 2 * kv + 1}) {
        const std::vector<double> query = turned(tensors.rope, 499, mean(tensors.q, h));
        std::vector<double> logits;
        for (int j = 0; j < 500; ++j)
          logits.push_back(static_cast<double>(tensors.softmax_scale) * product(query, turned(tensors.rope, j, key)));
        double cumulated = 0;
        for (const double weight : softmax(logits, 0, -HUGE_VAL)) areas.back() += (cumulated += weight) / 500 / 2;
      }
    }
  }
  const RecordedRun run = record(trace(), {"duo-attention:sinks=3,recent=7,full_heads=0.3"}, 20);
  const std::vector<int> best = best_of(areas, 0, 10, 3);
  for (int head = 0; head < 10; ++head) {
    EXPECT_NEAR(run.scores.at({0, head / 2})(head % 2, 5), areas[static_cast<std::size_t>(head)], 1e-6);
    EXPECT_EQ(run.selections.at({0, head / 2}).set.count(head % 2),
              std::ranges::find(best, head) != best.end() ? prompt : 10);
  }
}

TEST_F(LawsOfPapers, CriticalKvWeighsTheSecondHalfByValues) {
  const RecordedRun run = record(trace(), {"critical-kv:base=(snapkv:window=4),wo=none", "snapkv:window=4"}, 20);
  bool differ = false;
  for (int l = 0; l < layers; ++l) {
    const LayerTensors tensors = trace().layer(l);
    for (int row = 0; row < 2; ++row) {
      const std::span<const double> scores = run.scores.at({1, l}).row(row);
      // Ten by score, the window's four among them.
      std::vector<int> expected = best_of(scores, 0, prompt - 4, 6);
      std::vector<double> rest;
      const HeadRows values = head_rows(tensors.v, row);
      for (int j = 0; j < prompt; ++j) {
        double norm = 0;
        for (const double x : values[static_cast<std::size_t>(j)]) norm += std::abs(x);
        rest.push_back(std::ranges::find(expected, j) != expected.end()
                           ? -1.0
                           : (scores[static_cast<std::size_t>(j)] / 4 + 1e-4) * norm);  // mean of the window's rows
      }
      for (const int j : best_of(rest, 0, prompt - 4, 10)) expected.push_back(j);
      for (int j = prompt - 4; j < prompt; ++j) expected.push_back(j);
      std::ranges::sort(expected);
      EXPECT_EQ(run.selections.at({0, l}).set.positions(row), expected);
      differ = differ || run.selections.at({0, l}).set != run.selections.at({1, l}).set;
    }
  }
  EXPECT_TRUE(differ);
  expect_same_sets("critical-kv:base=snapkv,wo=none,first=1", "snapkv", 20);
}

TEST_F(LawsOfPapers, CriticalKvAsksForTheOutputProjection) {
  try {
    check_policy(trace(), default_conditions(trace()), ConfiguredPolicy::parse("critical-kv"), 20);
    FAIL() << "these traces have none";
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::input);
    EXPECT_EQ(error.expected(), "a trace captured with --with-wo, or wo=none");
  }
}

}  // namespace
}  // namespace kvreplay
