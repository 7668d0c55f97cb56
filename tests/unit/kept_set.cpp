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

TEST(KeptSet, DropsARangeAcrossWords) {
  for (const int begin : {0, 1, 63, 64, 65, 130, 199})
    for (const int end : {0, 1, 64, 128, 129, 199, 200}) {
      KeptSet set(Heads::kv, 2, 200);
      for (int row = 0; row < 2; ++row)
        for (int position = 0; position < 200; ++position) set.keep(row, position);
      set.drop(1, begin, end);
      EXPECT_EQ(set.count(0), 200);
      for (int position = 0; position < 200; ++position)
        EXPECT_EQ(set.keeps(1, position), position < begin || position >= end) << begin << " " << end;
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
