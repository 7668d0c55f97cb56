// The sets and numbers that anybody can recompute on the fixture: 4 layers, 4/2 heads, 12 + 4 tokens of small exact
// numbers (`kvreplay synth fixture`).

#include <gtest/gtest.h>

#include <algorithm>

#include "recorded_run.h"

namespace kvreplay {
namespace {

using Sets = std::vector<std::vector<std::vector<std::int32_t>>>;  // [layer][row]

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

TEST_F(Fixture, Oracle) {
  EXPECT_EQ(sets("oracle"), (Sets{{{1, 4, 5, 6, 9, 10}, {1, 2, 8, 9, 10, 11}},
                                  {{0, 3, 5, 6, 9, 10}, {1, 2, 3, 6, 10, 11}},
                                  {{0, 1, 2, 7, 9, 11}, {1, 3, 4, 7, 10, 11}},
                                  {{0, 1, 4, 5, 6, 7}, {0, 4, 5, 6, 7, 9}}}));
}

}  // namespace
}  // namespace kvreplay
