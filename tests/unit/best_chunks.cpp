// The best sets of chunks, held against all sets there are.

#include "policies/arithmetic/best_chunks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "policies/selectors/chunks.h"
#include "random.h"

namespace kvreplay {
namespace {

using Positions32 = std::vector<std::int32_t>;
using Scores = std::vector<double>;

double sum_of(const Scores& scores, const Positions32& positions) {
  return std::accumulate(positions.begin(), positions.end(), 0.0,
                         [&](double sum, std::int32_t j) { return sum + scores[static_cast<std::size_t>(j)]; });
}

/// Of a set given by bits: how many of its chunks are whole, and how many hold some tokens alone.
struct Shape {
  int whole = 0;
  int parts = 0;
  bool parts_begin_their_chunks = true;
};

Shape shape_of(unsigned set, int tokens, int chunk) {
  Shape shape;
  for (int begin = 0; begin < tokens; begin += chunk) {
    const int size = std::min(chunk, tokens - begin);
    const unsigned inside = (set >> begin) & ((1u << size) - 1);
    const int held = std::popcount(inside);
    if (held == size) ++shape.whole;
    if (held == 0 || held == size) continue;
    ++shape.parts;
    if (inside != (1u << held) - 1) shape.parts_begin_their_chunks = false;
  }
  return shape;
}

template <class Allowed>
double best_of_all_sets(const Scores& scores, int slots, int chunk, Allowed allowed) {
  const int tokens = static_cast<int>(scores.size());
  double best = -1;
  for (unsigned set = 0; set < 1u << tokens; ++set) {
    if (std::popcount(set) != slots || !allowed(shape_of(set, tokens, chunk))) continue;
    double sum = 0;
    for (int j = 0; j < tokens; ++j) sum += (set >> j & 1u) != 0 ? scores[static_cast<std::size_t>(j)] : 0.0;
    best = std::max(best, sum);
  }
  return best;
}

unsigned bits_of(const Positions32& positions) {
  unsigned set = 0;
  for (const std::int32_t j : positions) set |= 1u << j;
  return set;
}

/// Calls check(scores, slots, chunk) for many small rows; whole scores, so that sums are exact and ties are common.
template <class Check>
void on_small_rows(Check check) {
  for (std::uint64_t round = 0; round < 240; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const int tokens = 1 + static_cast<int>(chain(round, 0) % 11), chunk = 1 + static_cast<int>(chain(round, 1) % 5);
    const std::uint64_t values = round % 2 == 0 ? 4 : 1000;
    Scores scores;
    for (int j = 0; j < tokens; ++j)
      scores.push_back(static_cast<double>(chain(round, 2, static_cast<std::uint64_t>(j)) % values));
    for (int slots = 0; slots <= tokens; ++slots) check(scores, slots, chunk);
  }
}

void expect_a_set(const Positions32& positions, int slots) {
  EXPECT_EQ(std::ssize(positions), slots);
  EXPECT_TRUE(std::ranges::adjacent_find(positions, std::greater_equal{}) == positions.end());
}

TEST(BestChunks, WithAPartAreTheBestOfAllSets) {
  on_small_rows([](const Scores& scores, int slots, int chunk) {
    const auto allowed = [](const Shape& shape) { return shape.parts <= 1 && shape.parts_begin_their_chunks; };
    const Positions32 found = best_chunks_and_a_part(scores, slots, chunk);
    expect_a_set(found, slots);
    ASSERT_TRUE(allowed(shape_of(bits_of(found), static_cast<int>(scores.size()), chunk)));
    ASSERT_EQ(sum_of(scores, found), best_of_all_sets(scores, slots, chunk, allowed));
  });
}

TEST(BestChunks, WithTokensAreTheBestOfAllSets) {
  on_small_rows([](const Scores& scores, int slots, int chunk) {
    const auto allowed = [=](const Shape& shape) { return shape.whole >= slots / chunk; };
    const Positions32 found = best_chunks_and_tokens(scores, slots, chunk);
    expect_a_set(found, slots);
    ASSERT_TRUE(allowed(shape_of(bits_of(found), static_cast<int>(scores.size()), chunk)));
    ASSERT_EQ(sum_of(scores, found), best_of_all_sets(scores, slots, chunk, allowed));
  });
}

/// Whatever the scores that a selector follows, the best of its sets is worth no less by others.
TEST(BestChunks, AreWorthNoLessThanWhatAnySelectorOfChunksChooses) {
  on_small_rows([](const Scores& scores, int, int chunk) {
    const int tokens = static_cast<int>(scores.size());
    for (std::uint64_t other = 0; other < 4; ++other) {
      Scores followed;
      for (int j = 0; j < tokens; ++j)
        followed.push_back(static_cast<double>(chain(other, static_cast<std::uint64_t>(j)) % 5));
      for (const Fill fill : {Fill::cut, Fill::none, Fill::tokens})
        for (const WindowMode mode : {WindowMode::reserve, WindowMode::replace})
          for (int budget = 1; budget < tokens; ++budget) {
            const int sinks = std::min(static_cast<int>(other % 3), budget), recent = std::min(2, budget - sinks);
            const Selector select = Chunks{.chunk = chunk, .fill = fill, .window_mode = mode}.selector();
            const Positions32 chosen = select({followed, tokens, budget, sinks, recent}).positions;
            const Kept best = select.best({scores, tokens, static_cast<int>(chosen.size()), sinks, recent});
            expect_a_set(best.positions, static_cast<int>(chosen.size()));
            EXPECT_EQ(best.sinks, sinks);
            EXPECT_EQ(best.recent, recent);
            for (int j = 0; j < tokens; ++j)
              if (j < sinks || j >= tokens - recent) {
                EXPECT_TRUE(std::ranges::binary_search(best.positions, j));
              }
            ASSERT_GE(sum_of(scores, best.positions), sum_of(scores, chosen));
          }
    }
  });
}

TEST(BestChunks, OfAPartTheFirstTokensStayAndOfSingleOnesAny) {
  const Scores scores{1, 9, 5, 4, 2};  // chunks of 2: sums 10, 9, 2
  EXPECT_EQ(best_chunks_and_a_part(scores, 3, 2), (Positions32{0, 1, 2}));
  EXPECT_EQ(best_chunks_and_tokens(scores, 3, 2), (Positions32{1, 2, 3}));
}

}  // namespace
}  // namespace kvreplay
