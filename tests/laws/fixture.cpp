// The sets and numbers that anybody can recompute on the fixture: 4 layers, 4/2 heads, 12 + 4 tokens of small exact
// numbers (`kvreplay synth fixture`).

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "float_types.h"
#include "policies/scores/question_score.h"
#include "recorded_run.h"
#include "tests/tested_backend.h"

namespace kvreplay {
namespace {

using Sets = std::vector<std::vector<std::vector<std::int32_t>>>;  // [layer][row]

/// "1-4 ; 0,2 | 3 ; -" as [layer][row]: layers apart by |, rows by ;.
Sets printed(const std::string& text) {
  Sets all{{{}}};
  std::istringstream pieces(text);
  for (std::string piece; pieces >> piece;) {
    if (piece == "|") {
      all.emplace_back(1);
    } else if (piece == ";") {
      all.back().emplace_back();
    } else if (piece != "-") {
      std::istringstream numbers(piece);
      for (std::string number; std::getline(numbers, number, ',');) {
        const int first = std::stoi(number);
        const std::size_t dash = number.find('-');
        const int last = dash == std::string::npos ? first : std::stoi(number.substr(dash + 1));
        for (int j = first; j <= last; ++j) all.back().back().push_back(j);
      }
    }
  }
  return all;
}

class Fixture : public testing::Test {
 protected:
  static const Trace& trace() {
    static const TemporaryTrace file(synth_defaults("fixture"));
    static const Trace opened = file.open();
    return opened;
  }

  static Sets sets(const std::string& policy, int budget = 6) {
    const RecordedRun run = record(trace(), {policy}, budget);
    Sets all;
    for (int l = 0; l < 4; ++l) {
      const KeptSet& set = run.selections.at({0, l}).set;
      std::vector<std::vector<std::int32_t>>& layer = all.emplace_back();
      for (int row = 0; row < set.rows(); ++row) layer.push_back(set.positions(row));
    }
    return all;
  }

  /// What is held after query t and its eviction, by a policy whose sets change with time.
  static Sets held_after(const std::string& policy, int t) {
    const RecordedRun run = record(trace(), {policy}, 6);
    Sets all;
    for (int l = 0; l < 4; ++l) {
      const LayerSelection& selection = run.selections.at({0, l});
      std::vector<std::vector<std::int32_t>>& layer = all.emplace_back();
      for (int row = 0; row < selection.set.rows(); ++row) {
        layer.emplace_back();
        for (int j = 0; j <= t; ++j)
          if (const int gone = selection.evicted_at.at(static_cast<std::size_t>(row * 16 + j)); gone < 0 || gone > t)
            layer.back().push_back(j);
      }
    }
    return all;
  }

  static Sets in_all_layers(const std::string& set) { return Sets(4, printed(set).front()); }

  /// Every row with the positions that all of them keep.
  static Sets each_with(Sets all, const std::vector<std::int32_t>& positions) {
    for (auto& layer : all)
      for (auto& row : layer) row.insert(row.end(), positions.begin(), positions.end());
    return all;
  }

  static Sets first_layers(Sets all, std::size_t layers) {
    all.resize(layers);
    return all;
  }
};

TEST_F(Fixture, WindowAttention) {
  const RecordedRun run = record(trace(), {"full"}, 6);
  const double expected[2][12] = {
      {.18462, .18637, .21759, .58411, .10947, .07977, .08842, .18324, .11215, .04395, .06936, .14094},
      {.06928, .48041, .30911, .13414, .16135, .08522, .27323, .18004, .03988, .15361, .08969, .02403}};
  for (int row = 0; row < 2; ++row)
    for (int j = 0; j < 12; ++j) {
      const Matrix& window = run.observables.at({0, 0});
      EXPECT_NEAR((window(2 * row, j) + window(2 * row + 1, j)) / 2, expected[row][j], 5.1e-6) << row << ", " << j;
    }
}

TEST_F(Fixture, CumulativeAttention) {
  const RecordedRun run = record(trace(), {"full"}, 6);
  const double expected[2][12] = {
      {2.52213, 2.23071, 1.659, 1.66404, 1.02091, .81745, .62258, .50735, .68243, .06309, .06936, .14094},
      {2.52929, 2.95605, 1.76544, .81999, .75711, 1.37593, .48477, .40594, .53907, .25268, .08969, .02403}};
  for (int row = 0; row < 2; ++row)
    for (int j = 0; j < 12; ++j) {
      const Matrix& sums = run.observables.at({0, 1});
      EXPECT_NEAR((sums(2 * row, j) + sums(2 * row + 1, j)) / 2, expected[row][j], 5.1e-6) << row << ", " << j;
    }
}

TEST_F(Fixture, Random) {
  EXPECT_EQ(sets("random"), (Sets{{{0, 1, 2, 4, 9, 11}, {1, 2, 5, 6, 9, 11}},
                                  {{1, 4, 5, 6, 10, 11}, {1, 4, 6, 9, 10, 11}},
                                  {{1, 2, 3, 5, 8, 10}, {1, 3, 5, 6, 7, 8}},
                                  {{0, 4, 5, 7, 8, 9}, {0, 3, 4, 7, 9, 10}}}));
}

TEST_F(Fixture, LocalAndStreamingLlm) {
  EXPECT_EQ(sets("local"), Sets(4, {{6, 7, 8, 9, 10, 11}, {6, 7, 8, 9, 10, 11}}));
  EXPECT_EQ(sets("streaming-llm"), Sets(4, {{0, 1, 2, 3, 10, 11}, {0, 1, 2, 3, 10, 11}}));
  EXPECT_EQ(sets("streaming-llm", 3), Sets(4, {{0, 1, 2}, {0, 1, 2}}));
}

TEST_F(Fixture, Strided) { EXPECT_EQ(sets("strided"), in_all_layers("0,2,4,6,8,10 ; 0,2,4,6,8,10")); }

TEST_F(Fixture, Truncate) {
  EXPECT_EQ(sets("truncate:keep_question=false"), in_all_layers("0-2,9-11 ; 0-2,9-11"));
  EXPECT_EQ(sets("truncate:keep_question=false", 5), in_all_layers("0-2,10,11 ; 0-2,10,11"));
}

TEST_F(Fixture, H2oOnline) {
  const std::string online = "h2o-online:recent=3", heavy = "0-2 ; 0-2 | 0-2 ; 0,2,4 | 0,1,4 ; 0-2 | 0-2 ; 0-2";
  EXPECT_EQ(sets(online), each_with(printed(heavy), {9, 10, 11}));
  EXPECT_EQ(held_after(online, 11), each_with(printed(heavy), {9, 10, 11}));
  EXPECT_EQ(held_after(online, 15), each_with(printed(heavy), {13, 14, 15}));
}

TEST_F(Fixture, H2o) {
  EXPECT_EQ(sets("h2o:recent=3"),
            each_with({{{0, 1, 3}, {0, 1, 2}}, {{0, 2, 3}, {0, 2, 4}}, {{0, 1, 2}, {0, 1, 4}}, {{0, 1, 2}, {0, 1, 4}}},
                      {9, 10, 11}));
  EXPECT_EQ(first_layers(sets("h2o:recent=3,heads=query"), 1),
            each_with({{{0, 2, 3}, {0, 1, 4}, {0, 1, 5}, {0, 1, 2}}}, {9, 10, 11}));
}

TEST_F(Fixture, SnapKv) {
  const std::string snapkv = "snapkv:window=2,kernel=3";
  EXPECT_EQ(sets(snapkv), each_with({{{1, 2, 3, 4}, {0, 1, 2, 3}},
                                     {{4, 5, 6, 7}, {0, 2, 3, 4}},
                                     {{0, 1, 2, 3}, {3, 5, 6, 7}},
                                     {{0, 1, 2, 3}, {3, 4, 5, 6}}},
                                    {10, 11}));
  EXPECT_EQ(sets(snapkv + ",pool=avg"), each_with({{{1, 2, 3, 4}, {0, 1, 2, 3}},
                                                   {{4, 5, 6, 7}, {1, 2, 3, 4}},
                                                   {{0, 1, 2, 3}, {3, 4, 5, 6}},
                                                   {{0, 1, 3, 6}, {4, 5, 6, 7}}},
                                                  {10, 11}));
  EXPECT_EQ(first_layers(sets(snapkv + ",heads=query"), 2),
            each_with({{{1, 2, 3, 4}, {0, 2, 3, 4}, {0, 1, 2, 3}, {0, 1, 2, 5}},
                       {{4, 5, 6, 7}, {4, 5, 6, 7}, {0, 2, 3, 4}, {0, 2, 3, 4}}},
                      {10, 11}));
  EXPECT_EQ(sets(snapkv + ",heads=layer"),
            each_with({{{0, 2, 3, 4}}, {{4, 5, 6, 7}}, {{0, 1, 2, 3}}, {{0, 1, 3, 4}}}, {10, 11}));
}

TEST_F(Fixture, ChunkKv) {
  const std::string chunkkv = "chunkkv:window=2,chunk=3";
  EXPECT_EQ(sets(chunkkv), each_with({{{0, 1, 2, 3}}, {{3, 4, 5, 6}}, {{0, 1, 2, 3}}, {{0, 6, 7, 8}}}, {10, 11}));
  EXPECT_EQ(sets(chunkkv + ",heads=kv"), each_with({{{0, 3, 4, 5}, {0, 1, 2, 6}},
                                                    {{3, 6, 7, 8}, {0, 3, 4, 5}},
                                                    {{0, 1, 2, 3}, {3, 4, 5, 6}},
                                                    {{0, 1, 2, 6}, {3, 6, 7, 8}}},
                                                   {10, 11}));
  const Sets all_first = each_with(Sets(4, {{0, 1, 2, 3}}), {10, 11});
  EXPECT_EQ(sets(chunkkv + ",reuse=4"), all_first);
  EXPECT_EQ(sets(chunkkv + ",reuse=2"), all_first);
  EXPECT_EQ(sets(chunkkv + ",fill=none"), each_with({{{0, 1, 2}}, {{3, 4, 5}}, {{0, 1, 2}}, {{6, 7, 8}}}, {10, 11}));
  EXPECT_EQ(sets(chunkkv + ",window_mode=replace"),
            (Sets{{{0, 1, 2, 3, 10, 11}}, {{3, 4, 5, 6, 10, 11}}, {{0, 1, 2, 3, 10, 11}}, {{0, 1, 2, 6, 10, 11}}}));
}

TEST_F(Fixture, PyramidKv) {
  EXPECT_EQ(sets("pyramid-kv:window=2,kernel=3"),
            each_with(printed("0-4,6-8 ; 0-3,5-8 | 4-8 ; 0-4 | 0-2 ; 5-7 | - ; -"), {10, 11}));
}

TEST_F(Fixture, PyramidInfer) {
  EXPECT_EQ(sets("pyramid-infer:sinks=1,recent=2,r=0.3"),
            printed("0-3,7,10,11 | 0,2,3,7,10,11 | 0,2,3,7,10,11 | 0,2,7,10,11"));
}

TEST_F(Fixture, Hybrid) {
  const std::string hybrid = "hybrid:chunkkv.window=2,chunkkv.chunk=3,snapkv.window=2,snapkv.kernel=3";
  EXPECT_EQ(sets(hybrid), each_with(printed("0-3 | 3-6 | 0-3 ; 3,5-7 | 0-3 ; 3-6"), {10, 11}));
}

/// How many of the `most` best entries of layers [0, layers) lie in each, ties to the lower layer, head and position.
std::vector<int> best_by_layer(const RecordedRun& run, int layers, int most) {
  std::vector<std::pair<double, int>> entries;  // (-score, layer), in flat order
  for (int l = 0; l < layers; ++l)
    for (const double score : run.scores.at({0, l}).values()) entries.emplace_back(-score, l);
  std::ranges::sort(entries);
  std::vector<int> counts(static_cast<std::size_t>(layers));
  for (int i = 0; i < most; ++i) ++counts[static_cast<std::size_t>(entries[static_cast<std::size_t>(i)].second)];
  return counts;
}

TEST_F(Fixture, DynamicKv) {
  const std::string dynamickv = "dynamickv:window=2,kernel=3";
  const RecordedRun by_query = record(trace(), {dynamickv + ",heads=query,r_max=2,update=2"}, 6);
  // Scores of the window's own columns are not candidates: they are above all others or nothing. b = 4, H = 4.
  RecordedRun candidates = by_query;
  for (auto& [where, scores] : candidates.scores) {
    Matrix cut(scores.rows(), 10);
    for (int h = 0; h < cut.rows(); ++h) std::ranges::copy(scores.row(h).first(10), cut.row(h).begin());
    scores = cut;
  }
  EXPECT_EQ(best_by_layer(candidates, 2, 4 * 4 * 2), (std::vector<int>{18, 14}));
  EXPECT_EQ(best_by_layer(candidates, 4, 4 * 4 * 4), (std::vector<int>{18, 15, 17, 14}));
  const int caps[] = {5, 4, 4, 3};
  for (int l = 0; l < 4; ++l)
    EXPECT_EQ(by_query.selections.at({0, l}).granted, std::vector<int>(4, 2 + caps[l])) << "layer " << l;
  const Sets of_queries = sets(dynamickv + ",heads=query,r_max=2,update=2");
  EXPECT_EQ((Sets{of_queries[0], of_queries[3]}),
            each_with(printed("0-4 ; 0-4 ; 0-3,5 ; 0-2,5,6 | 1-3 ; 0,1,5 ; 5-7 ; 3-5"), {10, 11}));

  EXPECT_EQ(sets(dynamickv + ",r_max=2.5,update=1"), sets("snapkv:window=2,kernel=3"));
  // r_max = 1 leaves no layer more than its share.
  EXPECT_EQ(sets(dynamickv + ",r_max=1"), sets("snapkv:window=2,kernel=3"));
}

TEST_F(Fixture, ScaOnce) {
  const auto kept = [](const std::string& parameters) { return sets("sca:recent=2" + parameters); };
  EXPECT_EQ(kept(""), in_all_layers("1,3,7,8,10,11"));
  EXPECT_EQ(kept(",use=key"), in_all_layers("3,4,7,9-11"));
  EXPECT_EQ(kept(",use=value"), in_all_layers("0,1,3,6,10,11"));
  EXPECT_EQ(kept(",objective=max,sinks=1"), in_all_layers("0,2,6,8,10,11"));
  EXPECT_EQ(kept(",layer=0"), in_all_layers("1,5,7,8,10,11"));
  // Each of the first three layers alone, and pairs of neighbours by their last one.
  const Sets alone = kept(",share=1"), pairs = kept(",share=2");
  EXPECT_EQ(alone[0], kept(",layer=0")[0]);
  EXPECT_EQ(alone[3], kept("")[0]);
  EXPECT_EQ(pairs, (Sets{alone[1], alone[1], alone[3], alone[3]}));
}

TEST_F(Fixture, ScaAtAThreshold) {
  const std::string sca = "sca:schedule=threshold(8,4),recent=1";
  EXPECT_EQ(held_after(sca, 7), in_all_layers("1-3,7"));
  EXPECT_EQ(held_after(sca, 11), in_all_layers("1,9-11"));
  EXPECT_EQ(held_after(sca, 15), in_all_layers("1,9,11,15"));
  EXPECT_EQ(sets(sca), in_all_layers("1,9-11")) << "at the end of the prompt";
  EXPECT_EQ(held_after(sca + ",positions=original", 11), in_all_layers("1,7,8,11"));

  // Tokens go after queries 7, 11 and 15, which saw them; what is held in the end never goes.
  const RecordedRun run = record(trace(), {sca}, 6);
  std::vector<std::int32_t> expected(16, 15);
  for (const int j : {0, 4, 5, 6}) expected[static_cast<std::size_t>(j)] = 7;
  for (const int j : {2, 3, 7, 8}) expected[static_cast<std::size_t>(j)] = 11;
  for (const int j : {1, 9, 11, 15}) expected[static_cast<std::size_t>(j)] = -1;
  for (int l = 0; l < 4; ++l) EXPECT_EQ(run.selections.at({0, l}).evicted_at, expected) << "layer " << l;
}

TEST_F(Fixture, Finch) {
  const std::string finch = "finch:question=last,question_tokens=2,blocks=5";
  const auto with_question = [](const std::string& text) { return each_with(printed(text), {10, 11}); };
  EXPECT_EQ(sets(finch), with_question("0,6,7,9 | 1,2,5,6 | 1,2,5,6 | 4-7"));
  EXPECT_EQ(sets(finch + ",positions=original"), with_question("1,3,6,7 | 3,5,6,7 | 0,2,5,6 | 0,4,6,7"));
  EXPECT_EQ(sets(finch + ",rate=code"), with_question("6,7 | 5,6 | 1,5 | 6,7"));
}

TEST_F(Fixture, ScoresOfFinchBlockByBlock) {
  const std::unique_ptr<Backend> backend = tested_backend(1);
  const LayerTensors tensors = trace().layer(0);
  const std::vector<std::int32_t> eval{12, 13, 14, 15};
  const LayerView whole(*backend, tensors, {.layers = 4, .prompt = 12}, eval);
  const QuestionScore question{.question = {.from = QuestionFrom::last, .last_tokens = 2}};
  const auto scores = [&](std::vector<std::int32_t> positions, int seen) {
    const auto held = static_cast<int>(positions.size());
    const LayerView view(whole,
                         {.positions = std::move(positions), .seen = seen, .added = 5, .place = Positions::cache});
    const Matrix of_layer = question.scorer().score(view, {.grouping = {.heads = Heads::layer}});
    std::vector<double> unscaled(of_layer.row(0).begin(), of_layer.row(0).end());
    for (double& score : unscaled) score *= held + 2;  // rows weighted by what they see, not by their share of it
    return unscaled;
  };
  const std::vector<double> first{13.2838, 4.6556, 5.0906, 14.8953, 8.5034};
  const std::vector<double> second{18.2043, 5.1746, 4.7845, 10.1287, 10.4311, 4.1891, 5.7242};
  const std::vector<double> found_first = scores({0, 1, 2, 3, 4}, 5);
  const std::vector<double> found_second = scores({0, 3, 5, 6, 7, 8, 9}, 10);
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_NEAR(found_first[i], first[i], 5.1e-5) << i;
  for (std::size_t i = 0; i < second.size(); ++i) EXPECT_NEAR(found_second[i], second[i], 5.1e-5) << i;
  EXPECT_EQ(held_after("finch:question=last,question_tokens=2,blocks=5", 4)[0], printed("0,3")[0]);
}

TEST_F(Fixture, Kivi) {
  const RecordedRun run = record(trace(), {"kivi:bits=2,group=4,residual=4"}, 6);
  const StoredNumbers& stored = run.stored.at({0, 0});
  const float key[] = {-1.75F, 0.874512F, 0.583984F, 0.5F}, value[] = {-1.875F, -0.291992F, -1.875F, 0.499512F};
  for (std::size_t c = 0; c < 4; ++c) {
    EXPECT_NEAR(stored.keys[c], key[c], 1e-6) << c;
    EXPECT_NEAR(stored.values[c], value[c], 1e-6) << c;
  }
  const LayerTensors exact = trace().layer(0);
  const auto l1_loss = [](const TensorView& before, const std::vector<float>& after) {
    double lost = 0, all = 0;
    for (int head = 0; head < 2; ++head)
      for (int t = 0; t < 12; ++t)
        for (int c = 0; c < 4; ++c) {
          const double number = load(before.row(head, t), before.dtype, static_cast<std::size_t>(c));
          lost += std::abs(number - after[static_cast<std::size_t>((head * 16 + t) * 4 + c)]);
          all += std::abs(number);
        }
    return lost / all;
  };
  EXPECT_NEAR(l1_loss(exact.k, stored.keys), .095953, 5.1e-7);
  EXPECT_NEAR(l1_loss(exact.v, stored.values), .071708, 5.1e-7);
}

TEST_F(Fixture, KnormAndKeyDiff) {
  EXPECT_EQ(first_layers(sets("knorm"), 2), printed("0,4,6,7,9,11 ; 2,3,6,7,10,11 | 1,4,5,7,8,11 ; 2,4,5,7,8,11"));
  EXPECT_EQ(first_layers(sets("keydiff"), 2), printed("1,4,6,9-11 ; 1,5,8-11 | 3-6,8,11 ; 2,3,6,7,10,11"));
  // One block is the whole prompt.
  EXPECT_EQ(sets("keydiff:schedule=every(12)"), sets("keydiff"));
}

TEST_F(Fixture, KnormWithLayersThatKeepEverything) {
  const Sets even = sets("knorm", 4), some = sets("knorm:skip_layers=(0,2)", 8);
  const std::string all = "0-11 ; 0-11";
  EXPECT_EQ((Sets{some[0], some[2]}), printed(all + " | " + all));
  EXPECT_EQ((Sets{some[1], some[3]}), (Sets{even[1], even[3]})) << "4 * 8 less 2 * 12 are 4 for each of the others";
}

TEST_F(Fixture, Cur) {
  EXPECT_EQ(first_layers(sets("cur:block=4,sinks=1"), 2),
            printed("0,1,3,5,8,10 ; 0,4,5,7,8,11 | 0,2,4,6,9,11 ; 0,1,6,7,9,10"));
}

// By tests/reference, from the papers' equations: no line of the rules has them.
TEST_F(Fixture, Caote) {
  EXPECT_EQ(first_layers(sets("caote:window=2"), 2), printed("0,2,3,8,10,11 ; 1,2,6,7,10,11 | 5-7,9-11 ; 1-3,6,10,11"));
  EXPECT_EQ(first_layers(sets("caote:base=cumulative"), 4),
            printed("0-2,9-11 ; 0-2,9-11 | 0-2,9-11 ; 0-2,9-11 | 0,2,3,9-11 ; 0,1,4,9-11 | 0,1,3,9-11 ; 0-2,9-11"));
}

TEST_F(Fixture, Lava) {
  EXPECT_EQ(sets("lava:window=2,kernel=3"),
            printed("2-4,10,11 ; 0-3,5,10,11 | 4-7,10,11 ; 0,2-4,10,11 | 0-3,10,11 ; 4-7,10,11 | 0-3,10,11 ; "
                    "3,5-7,10,11"));
  EXPECT_EQ(first_layers(sets("lava:window=2,kernel=3,floor=1"), 2),
            printed("1-4,10,11 ; 0-3,10,11 | 4-7,10,11 ; 0,2-4,10,11"));
}

TEST_F(Fixture, DefensiveKv) {
  EXPECT_EQ(sets("defensive-kv:window=2,kernel=3"),
            printed("1-4,10,11 ; 0-3,10,11 | 0,1,4-7,10,11 ; 2,4,10,11 | 0-2,10,11 ; 2-6,10,11 | 0,1,10,11 ; "
                    "0,3-7,10,11"));
}

TEST_F(Fixture, LagKv) {
  EXPECT_EQ(first_layers(sets("lagkv:sinks=2,lag=3", 9), 2),
            printed("0-2,4,5,8-11 ; 0-3,7-11 | 0-2,4,6,8-11 ; 0-3,6,8-11"));
  EXPECT_EQ(sets("lagkv:sinks=2,lag=6"), in_all_layers("0,1,8-11 ; 0,1,8-11")) << "one whole partition alone";
}

TEST_F(Fixture, ExpectedAttention) {
  EXPECT_EQ(first_layers(sets("expected-attention:sinks=1,future=4"), 2),
            printed("0,1,4,6,8,10 ; 0,3-5,8,11 | 0,2,4,6,9,10 ; 0,1,6,8,9,11"));
}

TEST_F(Fixture, ObservedAttention) {
  EXPECT_EQ(first_layers(sets("observed-attention"), 2), printed("0-3,8,11 ; 0-2,4,5,8 | 0,2-6 ; 0-4,11"));
}

TEST_F(Fixture, Tova) { EXPECT_EQ(first_layers(sets("tova"), 2), printed("1-3,6,7,11 | 2,3,5-7,11")); }

TEST_F(Fixture, Vatp) {
  EXPECT_EQ(first_layers(sets("vatp:recent=3,sinks=1"), 2), printed("0,1,3,9-11 ; 0,1,5,9-11 | 0,2,6,9-11 ; 0-2,9-11"));
}

TEST_F(Fixture, Scissorhands) {
  EXPECT_EQ(first_layers(sets("scissorhands:history=4,recent=2"), 2),
            each_with(printed("0,3,7,8 ; 1,2,6,7 | 0,3-5 ; 1-3,6"), {10, 11}));
}

TEST_F(Fixture, AdaKv) {
  EXPECT_EQ(first_layers(sets("ada-kv:window=2,kernel=3"), 2),
            each_with(printed("2-4 ; 0-3,5 | 4-7 ; 0,2-4"), {10, 11}));
}

TEST_F(Fixture, Oracle) {
  EXPECT_EQ(sets("oracle"), (Sets{{{1, 4, 5, 6, 9, 10}, {1, 2, 8, 9, 10, 11}},
                                  {{0, 3, 5, 6, 9, 10}, {1, 2, 3, 6, 10, 11}},
                                  {{0, 1, 2, 7, 9, 11}, {1, 3, 4, 7, 10, 11}},
                                  {{0, 1, 4, 5, 6, 7}, {0, 4, 5, 6, 7, 9}}}));
}

}  // namespace
}  // namespace kvreplay
