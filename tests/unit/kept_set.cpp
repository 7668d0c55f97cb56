#include "attention/kept_set.h"

#include <gtest/gtest.h>

namespace kvreplay {
namespace {

TEST(KeptSet, KeepsAndDropsPositionsOfOneRow) {
  KeptSet set(Heads::kv, 2, 130);
  for (const int position : {0, 63, 64, 129}) set.keep(1, position);
  EXPECT_EQ(set.positions(1), (std::vector<std::int32_t>{0, 63, 64, 129}));
  EXPECT_EQ(set.count(1), 4);
  EXPECT_EQ(set.count(0), 0);
  EXPECT_TRUE(set.keeps(1, 129));
  EXPECT_FALSE(set.keeps(0, 129));
  set.drop(1, 63);
  EXPECT_FALSE(set.keeps(1, 63));
  EXPECT_EQ(set.positions(1), (std::vector<std::int32_t>{0, 64, 129}));
}

TEST(KeptSet, RowsFollowTheGranularity) {
  EXPECT_EQ(rows_of(Heads::kv, 9, 3), 3);
  EXPECT_EQ(rows_of(Heads::query, 9, 3), 9);
  EXPECT_EQ(rows_of(Heads::layer, 9, 3), 1);
  EXPECT_EQ(KeptSet(Heads::kv, 3, 1).row_of(7, 3), 2);
  EXPECT_EQ(KeptSet(Heads::query, 9, 1).row_of(7, 3), 7);
  EXPECT_EQ(KeptSet(Heads::layer, 1, 1).row_of(7, 3), 0);
}

TEST(KeptSet, EqualSetsAreEqual) {
  KeptSet a(Heads::kv, 1, 10);
  KeptSet b = a;
  a.keep(0, 3);
  EXPECT_NE(a, b);
  b.keep(0, 3);
  EXPECT_EQ(a, b);
  EXPECT_NE(KeptSet(Heads::layer, 1, 10), KeptSet(Heads::kv, 1, 10));
}

TEST(KeptSet, CountsWithinARangeAcrossWords) {
  KeptSet set(Heads::kv, 2, 200);
  for (const int position : {0, 63, 64, 127, 128, 199}) set.keep(1, position);
  EXPECT_EQ(set.count_within(1, 0, 200), 6);
  EXPECT_EQ(set.count_within(1, 1, 199), 4);
  EXPECT_EQ(set.count_within(1, 0, 64), 2);
  EXPECT_EQ(set.count_within(1, 64, 128), 2);
  EXPECT_EQ(set.count_within(1, 63, 65), 2);
  EXPECT_EQ(set.count_within(1, 65, 127), 0);
  EXPECT_EQ(set.count_within(1, 127, 128), 1);
  EXPECT_EQ(set.count_within(1, 5, 5), 0);
  EXPECT_EQ(set.count_within(0, 0, 200), 0);
}

TEST(KeptSet, KeepsAndDropsRangesAsOneByOne) {
  for (const int tokens : {1, 63, 64, 65, 200, 64 * 70})
    for (const auto& [begin, end] : {std::pair{0, 1}, {0, 64}, {5, 5}, {3, 61}, {63, 65}, {60, 4000}, {64, 128}}) {
      if (end > tokens) continue;
      KeptSet runs(Heads::kv, 2, tokens), singles(Heads::kv, 2, tokens);
      runs.keep(1, begin, end);
      for (int j = begin; j < end; ++j) singles.keep(1, j);
      EXPECT_EQ(runs, singles) << begin << ".." << end << " of " << tokens;
      EXPECT_EQ(runs.count(1), end - begin);
      runs.keep(1, 0, tokens);
      EXPECT_EQ(runs.count(1), tokens) << "more words than one sum of bytes holds";
      runs.drop(1, begin, end);
      for (int j = 0; j < tokens; ++j) EXPECT_EQ(runs.keeps(1, j), j < begin || j >= end);
      EXPECT_EQ(runs.count(0), 0);
    }
}

TEST(KeptSet, OneRowAndTheUnionOfAll) {
  KeptSet set(Heads::kv, 3, 130);
  set.keep(0, 2);
  set.keep(1, 2);
  set.keep(1, 129);
  set.keep(2, 64);
  EXPECT_EQ(set.only(1).heads(), Heads::layer);
  EXPECT_EQ(set.only(1).positions(0), (std::vector<std::int32_t>{2, 129}));
  EXPECT_EQ(set.union_of_rows().positions(0), (std::vector<std::int32_t>{2, 64, 129}));
  EXPECT_EQ(set.union_of_rows().rows(), 1);
}

TEST(KeptSet, RefinedItIsTheSameForEachFinerRow) {
  KeptSet layer(Heads::layer, 1, 70);
  layer.keep(0, 3);
  layer.keep(0, 69);
  const KeptSet kv = layer.refined(Heads::kv, 2);
  EXPECT_EQ(kv.heads(), Heads::kv);
  ASSERT_EQ(kv.rows(), 2);
  for (int row = 0; row < 2; ++row) EXPECT_EQ(kv.positions(row), (std::vector<std::int32_t>{3, 69}));
  KeptSet heads(Heads::kv, 2, 70);
  heads.keep(0, 1);
  heads.keep(1, 65);
  const KeptSet query = heads.refined(Heads::query, 6);
  for (int row = 0; row < 6; ++row)
    EXPECT_EQ(query.positions(row), (std::vector<std::int32_t>{row < 3 ? 1 : 65})) << "row " << row;
  EXPECT_EQ(heads.refined(Heads::kv, 2), heads);
}

}  // namespace
}  // namespace kvreplay
