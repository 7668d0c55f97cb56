// Observables of queries, pages and projected values against plain loops, and what policies make of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention_reference.h"
#include "fake_backend.h"
#include "observables/page_bounds.h"
#include "observables/principal_direction.h"
#include "observables/projected_norms.h"
#include "observables/query_products.h"
#include "policies/text/configured.h"

namespace kvreplay::testing {
namespace {

using Numbers = std::vector<double>;

double product(const Numbers& a, const Numbers& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

class QueryObservables : public ::testing::Test {
 protected:
  static constexpr int prompt = 29;
  RandomLayer layer{{.query_heads = 6, .kv_heads = 2, .tokens = 33, .dim = 10, .dtype = DType::float16}};
  FakeBackend backend;
  LayerTensors tensors = layer.tensors();
  LayerView view{backend, tensors, {.layer = 2, .layers = 4, .stored_layer = 2, .prompt = prompt}, {}};
};

TEST_F(QueryObservables, BoundsOfPages) {
  const Matrix bounds = page_bounds(tensors.k, prompt, 8, 2);  // 8, 8, 8 and 5 tokens
  ASSERT_EQ(bounds.rows(), 2);
  ASSERT_EQ(bounds.columns(), 4 * 2 * 10);
  for (int head = 0; head < 2; ++head)
    for (int page = 0; page < 4; ++page)
      for (int c = 0; c < 10; ++c) {
        double least = 1e9, most = -1e9;
        for (int j = 8 * page; j < std::min(8 * page + 8, prompt); ++j) {
          least = std::min(least, layer.k.at(head, j, c));
          most = std::max(most, layer.k.at(head, j, c));
        }
        EXPECT_EQ(bounds(head, page * 20 + c), least);
        EXPECT_EQ(bounds(head, page * 20 + 10 + c), most);
      }
}

TEST_F(QueryObservables, MeansOfPages) {
  const Matrix means = page_means(view.stored_keys(), 8, 2);  // 8, 8, 8 and 5 tokens
  ASSERT_EQ(means.rows(), 2);
  ASSERT_EQ(means.columns(), 4 * 10);
  for (int head = 0; head < 2; ++head)
    for (int page = 0; page < 4; ++page)
      for (int c = 0; c < 10; ++c) {
        double sum = 0;
        for (int j = 8 * page; j < std::min(8 * page + 8, prompt); ++j) sum += layer.k.at(head, j, c);
        EXPECT_NEAR(means(head, page * 10 + c), sum / (page < 3 ? 8 : 5), 1e-12);
      }
}

TEST_F(QueryObservables, ProductsOfAQueryWithTheKeysOfItsGroup) {
  const Matrix products = query_products(tensors, 30, 3, 29, 2);
  ASSERT_EQ(products.rows(), 6);
  ASSERT_EQ(products.columns(), 26);
  for (int h = 0; h < 6; ++h)
    for (int j = 3; j < 29; ++j)
      EXPECT_NEAR(products(h, j - 3), product(layer.q.row(h, 30), layer.k.row(h / 3, j)), 1e-12);
}

TEST_F(QueryObservables, ScoresOfPagesBoundTheirProducts) {
  const Numbers query = layer.q.row(3, 30);
  const Numbers scores = page_scores(query, page_bounds(tensors.k, prompt, 8, 1).row(1));
  ASSERT_EQ(scores.size(), 4U);
  for (int page = 0; page < 4; ++page) {
    double expected = 0, best = -1e9;
    for (int c = 0; c < 10; ++c) {
      double most = -1e9;
      for (int j = 8 * page; j < std::min(8 * page + 8, prompt); ++j)
        most = std::max(most, query[static_cast<std::size_t>(c)] * layer.k.at(1, j, c));
      expected += most;
    }
    for (int j = 8 * page; j < std::min(8 * page + 8, prompt); ++j)
      best = std::max(best, product(query, layer.k.row(1, j)));
    EXPECT_NEAR(scores[static_cast<std::size_t>(page)], expected, 1e-12);
    EXPECT_GE(scores[static_cast<std::size_t>(page)], best);
  }
}

TEST_F(QueryObservables, QuestReadsTheBestPagesOfEachQueryAndHead) {
  const std::vector<LayerPlan> plans = ConfiguredPolicy::parse("quest:page=4,least_pages=2,dense_layers=3").plans(4);
  ASSERT_EQ(plans.size(), 2U);
  EXPECT_EQ(plans[0].count, 3);
  EXPECT_EQ(plans[0].plan.schedule->name(), "schedule=once");
  const Schedule& schedule = *plans[1].plan.schedule;
  EXPECT_EQ(schedule.decided(), Decision::never);
  for (const auto& [budget, pages] : std::vector<std::pair<int, int>>{{1, 2}, {11, 2}, {12, 3}, {19, 4}, {28, 7}}) {
    const LayerReads of_layer = schedule.reads(view);
    EXPECT_EQ(of_layer.bytes, 2 * 8 * 2 * 10 * 2.0) << "two heads, eight pages, two bounds of ten float16";
    for (const int t : {5, 28, 32}) {
      const KeptSet read = of_layer.at(t, {&budget, 1}).front();
      EXPECT_EQ(read.heads(), Heads::query);
      EXPECT_EQ(read.tokens(), prompt);
      for (int h = 0; h < 6; ++h) {
        std::vector<std::pair<double, int>> order;  // of the pages that begin at or before the query
        for (int page = 0; page < 8 && 4 * page <= t; ++page) {
          double score = 0;
          for (int c = 0; c < 10; ++c) {
            double most = -1e9;
            for (int j = 4 * page; j < std::min(4 * page + 4, prompt); ++j)
              most = std::max(most, layer.q.at(h, t, c) * layer.k.at(h / 3, j, c));
            score += most;
          }
          order.emplace_back(-score, page);
        }
        std::ranges::sort(order);
        order.resize(std::min(order.size(), static_cast<std::size_t>(pages)));
        for (int j = 0; j < prompt; ++j) {
          const bool best = std::ranges::find(order, j / 4, &std::pair<double, int>::second) != order.end();
          ASSERT_EQ(read.keeps(h, j), best) << "budget " << budget << ", query " << t << ", head " << h << ", " << j;
        }
      }
    }
  }
}

TEST_F(QueryObservables, DirectionsMaximiseWhatQueriesHaveOfThem) {
  const Matrix directions = principal_directions(tensors, position_range(0, prompt), 2);
  for (int h = 0; h < 6; ++h) {
    const Numbers u(directions.row(h).begin(), directions.row(h).end());
    EXPECT_NEAR(product(u, u), 1, 1e-12);
    Numbers mean(10), image(10);  // of Q'Q u
    double size = 0;
    for (int t = 0; t < prompt; ++t) {
      const Numbers q = layer.q.row(h, t);
      for (std::size_t c = 0; c < 10; ++c) {
        mean[c] += q[c];
        image[c] += product(q, u) * q[c];
      }
    }
    for (int t = 0; t < prompt; ++t) size += std::pow(product(layer.q.row(h, t), u), 2);
    for (std::size_t c = 0; c < 10; ++c) EXPECT_NEAR(image[c], size * u[c], 1e-9 * size) << "an eigenvector";
    EXPECT_GE(product(mean, u), 0);
    // No other direction has more: those of the axes, of the queries, and some at random.
    for (int i = 0; i < 200; ++i) {
      Numbers other(10);
      for (std::size_t c = 0; c < 10; ++c) other[c] = gaussian(chain(5, i, c, 0), chain(5, i, c, 1));
      if (i < prompt) other = layer.q.row(h, i);
      double of_other = 0;
      for (int t = 0; t < prompt; ++t) of_other += std::pow(product(layer.q.row(h, t), other), 2);
      EXPECT_LE(of_other / product(other, other), size * (1 + 1e-12));
    }
  }
}

TEST(FirstEigenvector, OfMatricesWorkedByHand) {
  const auto of_any_sign = [](Numbers vector) {
    for (double& number : vector) number = std::abs(number);
    return vector;
  };
  EXPECT_EQ(of_any_sign(first_eigenvector(Numbers{4.0}, 1)), Numbers{1.0});
  const Numbers of_two = first_eigenvector(Numbers{2, 1, 1, 2}, 2);
  EXPECT_NEAR(std::abs(of_two[0]), std::sqrt(0.5), 1e-15);
  EXPECT_NEAR(of_two[0], of_two[1], 1e-15);
  EXPECT_EQ(of_any_sign(first_eigenvector(Numbers{1, 0, 0, 0, 5, 0, 0, 0, 3}, 3)), (Numbers{0, 1, 0}));
  EXPECT_EQ(of_any_sign(first_eigenvector(Numbers(9), 3)), (Numbers{1, 0, 0})) << "all are alike";
}

TEST_F(QueryObservables, QFilterScoresKeysByTheGroupsMeanDirection) {
  const Plan plan = ConfiguredPolicy::parse("q-filter").plans(4).front().plan;
  EXPECT_TRUE(plan.score.needs.all_queries);
  const Matrix scores = plan.score.score(view, {});
  const Matrix directions = principal_directions(tensors, position_range(0, prompt), 1);
  ASSERT_EQ(scores.rows(), 2);
  ASSERT_EQ(scores.columns(), prompt);
  for (int head = 0; head < 2; ++head)
    for (int j = 0; j < prompt; ++j) {
      double expected = 0;
      for (int h = 3 * head; h < 3 * head + 3; ++h)
        for (int c = 0; c < 10; ++c) expected += directions(h, c) / 3 * layer.k.at(head, j, c);
      EXPECT_NEAR(scores(head, j), expected, 1e-12);
    }
  const LayerView some(view, {.positions = {1, 4, 5, 20}, .seen = 21, .added = 1});
  const Matrix of_some = plan.score.score(some, {});
  const Matrix directions_so_far = principal_directions(tensors, position_range(0, 21), 1);
  for (int i = 0; i < 4; ++i) {
    double expected = 0;
    for (int h = 0; h < 3; ++h)
      for (int c = 0; c < 10; ++c)
        expected += directions_so_far(h, c) / 3 * layer.k.at(0, some.positions(0)[i].number, c);
    EXPECT_NEAR(of_some(0, i), expected, 1e-12) << "directions of the queries that have come";
  }
}

TEST_F(QueryObservables, NormsOfProjectedValues) {
  const RandomTensor projection(1, 13, 60, DType::float16, 1.0, 8);  // hidden 13, six heads of ten
  const Matrix norms = projected_norms(tensors.v, projection.view(), 3, prompt, 2);
  ASSERT_EQ(norms.rows(), 6);
  ASSERT_EQ(norms.columns(), prompt);
  for (int h = 0; h < 6; ++h)
    for (int j = 0; j < prompt; ++j) {
      double norm = 0;
      for (int row = 0; row < 13; ++row) {
        double projected = 0;
        for (int c = 0; c < 10; ++c) projected += projection.at(0, row, 10 * h + c) * layer.v.at(h / 3, j, c);
        norm += std::abs(projected);
      }
      EXPECT_NEAR(norms(h, j), norm, 1e-5 * norm);
    }
}

}  // namespace
}  // namespace kvreplay::testing
