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

}  // namespace
}  // namespace kvreplay
