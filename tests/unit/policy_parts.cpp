// The parts that policies are made of, on rows small enough to follow by hand.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "fake_backend.h"
#include "policies/allocators/allocation.h"
#include "policies/arithmetic/pooling.h"
#include "policies/arithmetic/ranking.h"
#include "policies/grouping.h"
#include "policies/plan_part.h"
#include "policies/selectors/chunks.h"
#include "policies/selectors/rules.h"
#include "policies/selectors/top_k.h"
#include "policies/sharing/sharing.h"

namespace kvreplay {
namespace {

using Positions32 = std::vector<std::int32_t>;
using Scores = std::vector<double>;

Matrix matrix(const std::vector<Scores>& rows) {
  Matrix m(static_cast<int>(rows.size()), static_cast<int>(rows.front().size()));
  for (int r = 0; r < m.rows(); ++r) std::ranges::copy(rows[static_cast<std::size_t>(r)], m.row(r).begin());
  return m;
}

Scores row(const Matrix& m, int r) { return {m.row(r).begin(), m.row(r).end()}; }

Positions32 chosen(const Selector& select, const Scores& scores, int budget, Protection::Clamped by_rule = {}) {
  const Kept kept = select({scores, static_cast<int>(scores.size()), budget, by_rule.sinks, by_rule.recent});
  EXPECT_EQ(kept.sinks, by_rule.sinks);
  EXPECT_EQ(kept.recent, by_rule.recent);
  return kept.positions;
}

TEST(Largest, TiesGoToTheLowerPosition) {
  const Scores scores{1, 5, 5, 2, 5, 0};
  EXPECT_EQ(largest(scores, 2), (Positions32{1, 2}));
  EXPECT_EQ(largest(scores, 4), (Positions32{1, 2, 3, 4}));
  EXPECT_EQ(largest(scores, 0), Positions32{});
  EXPECT_EQ(largest(scores, 9), (Positions32{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(largest(Scores(70, 1.0), 3), (Positions32{0, 1, 2}));
}

/// Rows that are hard to part: ties, both zeros, infinities, one magnitude, every magnitude, and one token.
std::vector<Scores> hard_rows() {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  std::vector<Scores> rows{{1.0},
                           {0.0, -0.0, 0.0, -0.0},
                           {infinity, 1, -infinity, infinity, -1, -infinity, 0},
                           Scores(1000, 0.25),
                           {5e-324, 0, -5e-324, 1e308, -1e308, 1e-308}};
  std::mt19937_64 random(7);
  const auto drawn = [&](std::size_t count, auto draw) {
    Scores& row = rows.emplace_back();
    for (std::size_t i = 0; i < count; ++i) row.push_back(draw());
  };
  drawn(131072, [&] { return std::exponential_distribution<>(3.0)(random); });
  drawn(131072, [&] { return std::bit_cast<double>(random() & ~(std::uint64_t{1} << 62)); });
  drawn(5000, [&] { return static_cast<double>(random() % 7) - 3.0; });
  drawn(5000, [&] { return 1.0 + static_cast<double>(random() % 3000) * 0x1p-52; });
  for (std::size_t count = 2; count < 40; ++count) drawn(count, [&] { return static_cast<double>(random() % 5); });
  return rows;
}

Positions32 by_score_then_position(const Scores& scores) {
  Positions32 order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, [&](std::int32_t a, std::int32_t b) {
    const double of_a = scores[static_cast<std::size_t>(a)], of_b = scores[static_cast<std::size_t>(b)];
    return of_a != of_b ? of_a > of_b : a < b;
  });
  return order;
}

TEST(Ranking, OrderCutAndBestAreThoseOfAStableSort) {
  for (const Scores& scores : hard_rows()) {
    const Positions32 order = by_score_then_position(scores);
    EXPECT_EQ(ranked(scores), order);
    const std::ptrdiff_t all = std::ssize(scores);
    const std::vector<int> counts{static_cast<int>(all / 3), static_cast<int>(all), 0, static_cast<int>(all / 2), 1};
    const std::vector<Positions32> of_each = largest_of_each(scores, counts);
    ASSERT_EQ(of_each.size(), counts.size());
    for (std::size_t i = 0; i < counts.size(); ++i) EXPECT_EQ(of_each[i], largest(scores, counts[i])) << counts[i];
    for (const std::ptrdiff_t count : {std::ptrdiff_t{0}, std::ptrdiff_t{1}, all / 3, all / 2, all - 1, all}) {
      Positions32 best(order.begin(), order.begin() + count);
      std::ranges::sort(best);
      EXPECT_EQ(largest(scores, count), best) << count << " of " << all;
      const Cut cut = cut_after(scores, count);
      if (count > 0) {
        EXPECT_EQ(cut.score, scores[static_cast<std::size_t>(order[static_cast<std::size_t>(count - 1)])]);
      }
      const auto equal =
          std::ranges::count_if(best, [&](std::int32_t i) { return scores[static_cast<std::size_t>(i)] == cut.score; });
      EXPECT_EQ(cut.equal, equal) << count << " of " << all;
    }
  }
}

TEST(Ranking, KeysInAscendingOrder) {
  EXPECT_EQ(ordered({}), Positions32{});
  const std::vector<std::uint64_t> keys{9, ~std::uint64_t{0}, 0, 9, std::uint64_t{1} << 63, 0};
  EXPECT_EQ(ordered(keys), (Positions32{2, 5, 0, 3, 4, 1}));
}

TEST(Pooling, IsThatOfTheDefinitionForAnyKernel) {
  std::mt19937_64 random(3);
  for (const int columns : {1, 2, 7, 64, 301})
    for (const int kernel : {3, 5, 7, 9, 15, 33, 63, 129, 999}) {
      Matrix scores(2, columns + 3);
      for (double& score : scores.values()) score = std::exponential_distribution<>()(random);
      const Matrix highest = pooled(scores, Pool::max, kernel, columns);
      const Matrix average = pooled(scores, Pool::average, kernel, columns);
      for (int r = 0; r < 2; ++r)
        for (int j = 0; j < columns + 3; ++j) {
          double most = scores(r, j);
          long double sum = 0;
          for (int i = std::max(0, j - kernel / 2); i <= std::min(columns - 1, j + kernel / 2); ++i) {
            most = std::max(most, scores(r, i));
            sum += scores(r, i);
          }
          const bool is_pooled = j < columns;
          EXPECT_EQ(highest(r, j), is_pooled ? most : scores(r, j)) << columns << " " << kernel << " " << j;
          if (is_pooled)
            EXPECT_DOUBLE_EQ(average(r, j), static_cast<double>(sum / kernel)) << columns << " " << kernel << " " << j;
          else
            EXPECT_EQ(average(r, j), scores(r, j)) << columns << " " << kernel << " " << j;
        }
    }
}

TEST(Pooling, MaxAndAverageOfTheExample) {
  const Matrix scores = matrix({{1, 5, 2, 2, 0}});
  EXPECT_EQ(row(pooled(scores, Pool::max, 3, 5), 0), (Scores{5, 5, 5, 2, 2}));
  const Scores average = row(pooled(scores, Pool::average, 3, 5), 0);
  const Scores expected{2, 8.0 / 3, 3, 4.0 / 3, 2.0 / 3};
  for (std::size_t i = 0; i < 5; ++i) EXPECT_DOUBLE_EQ(average[i], expected[i]);
  EXPECT_EQ(row(pooled(scores, Pool::none, 3, 5), 0), row(scores, 0));
  EXPECT_EQ(row(pooled(scores, Pool::max, 3, 2), 0), (Scores{5, 5, 2, 2, 0})) << "columns of the window are left alone";
}

TEST(Pooling, NeighboursInAnyOrderHaveOneAverage) {
  std::mt19937_64 random(4);
  std::vector<double> numbers(7);
  for (double& number : numbers) number = std::exponential_distribution<>()(random);
  double first = 0;
  for (int turn = 0; turn < 100; ++turn) {
    Matrix scores(1, 7);
    std::ranges::copy(numbers, scores.row(0).begin());
    const double average = pooled(scores, Pool::average, 7, 7)(0, 3);
    if (turn == 0) first = average;
    EXPECT_EQ(average, first);
    std::ranges::shuffle(numbers, random);
  }
}

TEST(Pooling, KernelWiderThanTheRow) {
  EXPECT_EQ(row(pooled(matrix({{1, 3, 2}}), Pool::max, 99, 3), 0), (Scores{3, 3, 3}));
}

TEST(Grouping, MeanSumMaxOfAGroupAndSumOfTheLayer) {
  const Matrix heads = matrix({{1, 4}, {3, 2}, {5, 0}, {7, 8}});
  const auto kv = [&](Aggregate how) { return Grouping{Heads::kv, how}(heads, 2); };
  EXPECT_EQ(row(kv(Aggregate::mean), 0), (Scores{2, 3}));
  EXPECT_EQ(row(kv(Aggregate::sum), 1), (Scores{12, 8}));
  EXPECT_EQ(row(kv(Aggregate::max), 1), (Scores{7, 8}));
  const Matrix layer = Grouping{Heads::layer, Aggregate::mean}(heads, 2);
  EXPECT_EQ(layer.rows(), 1);
  EXPECT_EQ(row(layer, 0), (Scores{16, 14}));
  EXPECT_EQ(Grouping({Heads::query, Aggregate::mean})(heads, 2).rows(), 4);
}

TEST(TopK, KeepsWhatStaysByRuleAndTheBestOfTheRest) {
  const Scores scores{0, 1, 9, 3, 8, 0, 0, 0};
  EXPECT_EQ(chosen(top_k(), scores, 5, {1, 2}), (Positions32{0, 2, 4, 6, 7}));
  EXPECT_EQ(chosen(top_k(), scores, 5, {4, 1}), (Positions32{0, 1, 2, 3, 7}));
  EXPECT_EQ(chosen(top_k(), scores, 3, {3, 0}), (Positions32{0, 1, 2}));
  EXPECT_EQ(chosen(top_k(), scores, 3, {0, 3}), (Positions32{5, 6, 7}));
}

TEST(Protection, ClampsSinksThenRecentToTheBudget) {
  const auto within = [](const Protection& protect, int budget) {
    const auto [sinks, recent] = protect.within(budget, 40, MarkedQuestion{31, 36});
    return std::pair(sinks, recent);
  };
  const EndQuestion marked{4, true}, last{4, false};
  EXPECT_EQ(within({.sinks = 2, .question = marked}, 20), std::pair(2, 9));
  EXPECT_EQ(within({.sinks = 2, .question = marked}, 6), std::pair(2, 4));
  EXPECT_EQ(within({.recent = Amount::tokens(7), .question = last}, 20), std::pair(0, 4));
  EXPECT_EQ(marked.tokens(40, -1), 4);
  EXPECT_EQ(marked.tokens(3, -1), 3);
  EXPECT_EQ(within({.sinks = 4, .recent = Amount::tokens(3)}, 5), std::pair(4, 1));
  EXPECT_EQ(within({.sinks = 4}, 3), std::pair(3, 0));
  EXPECT_EQ(within({.recent = Amount::tokens(8)}, 3), std::pair(0, 3));
  EXPECT_EQ(within({.recent = Amount::fraction(0.5)}, 5), std::pair(0, 2));
  EXPECT_EQ(within({.recent = Amount::fraction(0.2), .least_recent = 1}, 3), std::pair(0, 1));
  EXPECT_EQ(within({.sinks = 1, .recent = Amount::fraction(1.0)}, 6), std::pair(1, 5));
}

TEST(Protection, KeepsTheTokensBehindTheQuestionToo) {
  const Protection protect{.sinks = 2, .recent = Amount::tokens(8), .behind_question = true};
  const auto within = [&](int budget, MarkedQuestion question) {
    const auto [sinks, recent] = protect.within(budget, 40, question);
    return std::pair(sinks, recent);
  };
  EXPECT_EQ(within(20, {31, 36}), std::pair(2, 12)) << "the window and four tokens of a template";
  EXPECT_EQ(within(20, {31, 40}), std::pair(2, 8)) << "the question ends the prompt";
  EXPECT_EQ(within(20, {}), std::pair(2, 8)) << "none is marked";
  EXPECT_EQ(within(11, {31, 36}), std::pair(2, 9)) << "window and template exceed the budget";
  EXPECT_EQ(within(1, {31, 36}), std::pair(1, 0));
}

TEST(TopKAnywhere, KeepsFewerWhereHeavyTokensAreRecent) {
  const Scores scores{1, 2, 0, 0, 9, 8};
  EXPECT_EQ(chosen(top_k_anywhere(), scores, 4, {0, 2}), (Positions32{4, 5}));
  EXPECT_EQ(chosen(top_k(), scores, 4, {0, 2}), (Positions32{0, 1, 4, 5}));
}

TEST(Chunks, CutsTheLastChunkToTheBudget) {
  const Scores scores{1, 0, 2, 0, 5, 0, 3, 1, 1, 2, 0, 0};  // chunks of 3: sums 3, 5, 5, 2; a window of 2
  Chunks chunks{.chunk = 3};
  EXPECT_EQ(chosen(chunks.selector(), scores, 7, {0, 2}), (Positions32{3, 4, 5, 6, 7, 10, 11}));
  chunks.fill = Fill::none;
  EXPECT_EQ(chosen(chunks.selector(), scores, 7, {0, 2}), (Positions32{3, 4, 5, 10, 11}));
  chunks.fill = Fill::tokens;
  EXPECT_EQ(chosen(chunks.selector(), scores, 7, {0, 2}), (Positions32{2, 3, 4, 5, 6, 10, 11}));
  chunks.fill = Fill::cut;
  chunks.score = ChunkScore::mean;
  EXPECT_EQ(chosen(chunks.selector(), scores, 7, {0, 2}), (Positions32{3, 4, 5, 6, 9, 10, 11}));
}

TEST(Chunks, BeginBehindTheSinks) {
  const Scores scores{9, 0, 1, 0, 5, 0, 4, 0};  // behind one sink: 0 1 0 | 5 0 4, then the window
  EXPECT_EQ(chosen(Chunks{.chunk = 3}.selector(), scores, 5, {1, 1}), (Positions32{0, 4, 5, 6, 7}));
}

TEST(Chunks, WindowReplacesTheLastChosenPositionsWhateverTheFill) {
  const Scores scores{1, 0, 2, 0, 5, 0, 3, 1, 1, 2, 0, 0};  // chunks of 3: sums 3, 5, 5, 2
  for (const Fill fill : {Fill::cut, Fill::none, Fill::tokens}) {
    const Chunks chunks{.chunk = 3, .fill = fill, .window_mode = WindowMode::replace};
    EXPECT_EQ(chosen(chunks.selector(), scores, 8, {0, 2}), (Positions32{3, 4, 5, 6, 7, 8, 10, 11}));
    EXPECT_EQ(chosen(chunks.selector(), scores, 7, {0, 2}), (Positions32{3, 4, 5, 6, 7, 10, 11}));
  }
}

TEST(Chunks, BudgetWithinTheWindowKeepsTheLastTokens) {
  EXPECT_EQ(chosen(Chunks{.chunk = 3}.selector(), Scores(10, 1.0), 3, {0, 3}), (Positions32{7, 8, 9}));
}

TEST(Chunks, WholeOnesHoldSinksAndWindow) {
  const Chunks pages{.chunk = 4, .window_mode = WindowMode::whole};  // 0-3, 4-7, 8-11, 12-13; the last 3 stay by rule
  const Scores scores{0, 0, 0, 0, 1, 1, 1, 1, 9, 0, 0, 0, 0, 0};
  EXPECT_EQ(chosen(pages.selector(), scores, 12, {4, 3}), (Positions32{0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13}));
  EXPECT_EQ(chosen(pages.selector(), scores, 10, {4, 3}), (Positions32{0, 1, 2, 3, 8, 9, 10, 11, 12, 13}));
  EXPECT_EQ(chosen(pages.selector(), scores, 9, {4, 3}), (Positions32{0, 1, 2, 3, 9, 10, 11, 12, 13}))
      << "what has no room is farthest from the window";
  EXPECT_EQ(chosen(pages.selector(), scores, 7, {4, 3}), (Positions32{0, 1, 2, 3, 11, 12, 13}));
  EXPECT_EQ(chosen(pages.selector(), scores, 6), (Positions32{4, 5, 8, 9, 10, 11})) << "without a rule the best stay";
}

TEST(Chunks, AtMostOneWholeOneIsCut) {
  std::mt19937_64 random(11);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int i = 0; i < 300; ++i) {
    const int page = 1 + below(7), tokens = 4 * page + below(40), sinks = below(2) * page, window = below(9);
    const auto page_of = [page](int token) { return static_cast<std::size_t>(token / page); };
    const int least = sinks + window + page;  // with the rest of the window's page
    if (least >= tokens) continue;
    const int budget = least + below(tokens - least);
    Scores scores(static_cast<std::size_t>(tokens));
    for (double& score : scores) score = below(50);
    const Positions32 kept =
        chosen(Chunks{.chunk = page, .window_mode = WindowMode::whole}.selector(), scores, budget, {sinks, window});
    ASSERT_EQ(std::ssize(kept), budget);
    std::vector<int> size(page_of(tokens - 1) + 1), held(size.size()), sum(size.size());
    for (int j = 0; j < tokens; ++j) {
      ++size[page_of(j)];
      sum[page_of(j)] += static_cast<int>(scores[static_cast<std::size_t>(j)]);
      const bool stays = j < sinks || j >= tokens - window;
      EXPECT_TRUE(!stays || std::ranges::binary_search(kept, j));
    }
    for (const std::int32_t j : kept) ++held[page_of(j)];
    int cut = 0, least_whole = std::numeric_limits<int>::max(), most_gone = -1;
    for (std::size_t p = 0; p < size.size(); ++p) {
      const bool by_rule = static_cast<int>(p) * page < sinks || static_cast<int>(p + 1) * page > tokens - window;
      if (by_rule && window > 0) {
        EXPECT_EQ(held[p], size[p]) << "page " << p;
        continue;
      }
      cut += held[p] > 0 && held[p] < size[p] ? 1 : 0;
      if (held[p] == size[p] && static_cast<int>(p) * page >= sinks) least_whole = std::min(least_whole, sum[p]);
      if (held[p] < size[p]) most_gone = std::max(most_gone, sum[p]);
    }
    EXPECT_LE(cut, 1);
    EXPECT_GE(least_whole, most_gone);
  }
}

TEST(LayerHeads, AddUpTheRowsOfAnyScore) {
  testing::FakeBackend backend;
  LayerTensors tensors;
  tensors.q = {nullptr, DType::float32, 4, 3, 4};
  tensors.k = tensors.v = {nullptr, DType::float32, 2, 3, 4};
  const LayerView view(backend, tensors, {.prompt = 3}, {});
  Plan plan;
  plan.score.score = [](const LayerView&, const Scoring& how) {
    EXPECT_EQ(how.grouping.heads, Heads::kv) << "it scores as it always does";
    EXPECT_EQ(how.recent, 2);
    return matrix({{1, 2, 3}, {10, 20, 40}});
  };
  plan.score.name = "mine";
  make_part(PartKind::heads, "layer")->fill(plan);
  EXPECT_EQ(plan.grouping.heads, Heads::layer);
  EXPECT_EQ(row(plan.score.score(view, {plan.grouping, 2}), 0), (Scores{11, 22, 43}));
  EXPECT_NE(plan.score.name, "mine") << "these are other scores";

  Plan by_rule{.grouping = {.heads = Heads::query}};
  make_part(PartKind::heads, "layer")->fill(by_rule);
  EXPECT_EQ(by_rule.grouping.heads, Heads::layer);
  EXPECT_FALSE(by_rule.score);
}

TEST(Stride, IsExactInWholeNumbers) {
  EXPECT_EQ(chosen(stride(), Scores(12), 5), (Positions32{0, 2, 4, 7, 9}));
  EXPECT_EQ(chosen(stride(), Scores(12), 6), (Positions32{0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(chosen(stride(), Scores(7), 6), (Positions32{0, 1, 2, 3, 4, 5}));
  EXPECT_FALSE(stride().reads_scores);
}

/// The first and the last tokens of 12, of which the last `question` ones are one.
Positions32 halves(int budget, int question, bool keep_question) {
  testing::FakeBackend backend;
  const LayerView view(backend, LayerTensors{},
                       {.prompt = 12, .question = question == 0 ? MarkedQuestion{} : MarkedQuestion{12 - question, 12}},
                       {});
  Row row{.tokens = 12, .budget = budget, .view = &view};
  return head_and_tail(keep_question).select(row).positions;
}

TEST(HeadAndTail, SparesTheQuestionAndHalvesTheRest) {
  EXPECT_EQ(halves(6, 0, true), (Positions32{0, 1, 2, 9, 10, 11}));
  EXPECT_EQ(halves(5, 0, false), (Positions32{0, 1, 2, 10, 11}));
  EXPECT_EQ(halves(6, 3, true), (Positions32{0, 1, 8, 9, 10, 11})) << "3 slots for the context, 2 of them at its head";
  EXPECT_EQ(halves(6, 3, false), (Positions32{0, 1, 2, 9, 10, 11}));
  EXPECT_EQ(halves(2, 3, true), (Positions32{10, 11})) << "no room for all of the question";
}

TEST(Sharing, FirstOfEveryN) {
  const Sharing share = every(3);
  EXPECT_EQ(share.source(0, 7), 0);
  EXPECT_EQ(share.source(2, 7), 0);
  EXPECT_EQ(share.source(6, 7), 6);
  EXPECT_EQ(Sharing{}.source(5, 7), 5);
  EXPECT_TRUE(share.shares());
  EXPECT_FALSE(every(1).shares());
}

TEST(Sharing, LastOfEveryNAndOneForAll) {
  const Sharing last = last_of(3);
  EXPECT_EQ(last.source(0, 7), 2);
  EXPECT_EQ(last.source(2, 7), 2);
  EXPECT_EQ(last.source(5, 7), 5);
  EXPECT_EQ(last.source(6, 7), 6) << "a short last group";
  EXPECT_EQ(one_layer(-1).source(0, 7), 6);
  EXPECT_EQ(one_layer(-7).source(3, 7), 0);
  EXPECT_EQ(one_layer(2).source(6, 7), 2);
}

TEST(Allocation, BestEntriesOfHeadsAndLayersTogether) {
  const Matrix first = matrix({{9, 8, 1}, {7, 0, 0}}), second = matrix({{0, 0, 0}, {2, 3, 4}});
  EXPECT_EQ(ranked_within_layer({.prompt = 3, .budget = 2}, first), (std::vector<int>{3, 1}));
  EXPECT_EQ(ranked_within_layer({.prompt = 3, .budget = 1}, matrix({{5, 5, 0}, {5, 5, 5}})), (std::vector<int>{2, 0}))
      << "ties go to the lower head";
  const std::vector<const Matrix*> all{&first, &second};
  EXPECT_EQ(ranked_across_layers({.layers = 2, .prompt = 3, .budget = 1}, all),
            (std::vector<std::vector<int>>{{2, 1}, {0, 1}}));
}

}  // namespace
}  // namespace kvreplay
