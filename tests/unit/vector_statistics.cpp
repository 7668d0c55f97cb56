// Means, covariances, forms and cosines of keys and queries, against their definitions written out.

#include "observables/vector_statistics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

#include "attention/rope.h"
#include "attention_reference.h"
#include "observables/cholesky.h"
#include "observables/layer_view.h"

namespace kvreplay::testing {
namespace {

using Numbers = std::vector<double>;

Numbers unit(Numbers x) {
  const double length = std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
  for (double& number : x) number = length > 0 ? number / length : 0.0;
  return x;
}

double dot(const Numbers& a, const Numbers& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

/// [d] mean and [d, d] covariance, divided by how many there are.
std::pair<Numbers, std::vector<Numbers>> naive_moments(const std::vector<Numbers>& vectors) {
  const std::size_t dim = vectors.front().size();
  const auto count = static_cast<double>(vectors.size());
  Numbers mean(dim);
  std::vector<Numbers> covariance(dim, Numbers(dim));
  for (const Numbers& x : vectors)
    for (std::size_t c = 0; c < dim; ++c) mean[c] += x[c] / count;
  for (const Numbers& x : vectors)
    for (std::size_t r = 0; r < dim; ++r)
      for (std::size_t c = 0; c < dim; ++c) covariance[r][c] += (x[r] - mean[r]) * (x[c] - mean[c]) / count;
  return {mean, covariance};
}

void expect_zeros(const Matrix& matrix, int rows, int columns) {
  EXPECT_EQ(matrix.rows(), rows);
  EXPECT_EQ(matrix.columns(), columns);
  for (const double number : matrix.values()) EXPECT_EQ(number, 0.0);
}

void expect_moments(const VectorMoments& found, int head, const std::vector<Numbers>& vectors) {
  const auto [mean, covariance] = naive_moments(vectors);
  const int dim = static_cast<int>(mean.size());
  for (int r = 0; r < dim; ++r) {
    const auto row = static_cast<std::size_t>(r);
    EXPECT_NEAR(found.mean(head, r), mean[row], 1e-12);
    for (int c = 0; c < dim; ++c)
      EXPECT_NEAR(found.covariance(head, r * dim + c), covariance[row][static_cast<std::size_t>(c)], 1e-11);
  }
}

/// A layer with RoPE on six of eight channels, of which a prompt is under compression.
class KeysAndQueries : public ::testing::TestWithParam<bool> {
 protected:
  static constexpr int prompt = 70;
  static constexpr double attention_scaling = 1.25;

  Numbers unrotated(Numbers x, int position) const {
    x = layer.rotated(std::move(x), -position);
    for (double& number : x) number /= attention_scaling;
    return x;
  }

  RandomLayer layer{{.tokens = 90, .rope_pairs = 3, .interleaved = GetParam()}};
  const std::vector<std::int32_t> eval = range(prompt, 90);
  LayerTensors tensors = [this] {
    LayerTensors made = layer.tensors();
    made.rope.attention_scaling = attention_scaling;
    made.softmax_scale = 0.01F;
    made.logit_softcap = 2.0F;
    return made;
  }();
  std::unique_ptr<Backend> backend = tested_backend(2);
  LayerView view{*backend, tensors, {.prompt = prompt}, eval};
  // Each KV head holds tokens of its own, at slots of the cache.
  const std::vector<std::int32_t> held_positions{0, 3, 9, 17, 39, 1, 2, 30, 38, 39};
  LayerView held{view, {.positions = held_positions, .rows = 2, .seen = 40, .added = 1, .place = Positions::cache}};

  Numbers held_key(int head, int i) const {
    const int position = held.positions(head)[i].number;
    return layer.rotated(layer.k.row(head, position), i - position);
  }
};

INSTANTIATE_TEST_SUITE_P(Pairs, KeysAndQueries, ::testing::Bool());

TEST_P(KeysAndQueries, MomentsAreThoseOfWhatIsUnrotated) {
  for (const int first : {0, 4, 69}) {
    const VectorMoments& found = view.query_moments(first);
    EXPECT_EQ(&view.query_moments(first), &found) << "computed once";
    for (int head = 0; head < 4; ++head) {
      std::vector<Numbers> queries;
      for (int t = first; t < prompt; ++t) queries.push_back(unrotated(layer.query(head, t), t));
      expect_moments(found, head, queries);
    }
  }
  expect_zeros(view.query_moments(prompt).mean, 4, 8);

  for (int head = 0; head < 2; ++head) {
    std::vector<Numbers> all, some;
    for (int j = 0; j < prompt; ++j) all.push_back(unrotated(layer.k.row(head, j), j));
    for (const std::int32_t j : held.positions(head).numbers()) some.push_back(unrotated(layer.k.row(head, j), j));
    expect_moments(view.key_moments(), head, all);
    expect_moments(held.key_moments(), head, some);
  }
}

TEST(ProductSums, WeighTheProductsOfDifferencesFromACentre) {
  for (const int dim : {1, 3, 8, 13, 21}) {
    const int count = 43;
    const auto number = [&](int head, int i, std::size_t c) {
      return gaussian(chain(3, dim, head, i, c), chain(5, c, i));
    };
    const Vectors vectors{2, count, dim, [&](int head, int i, std::span<double> x) {
                            for (std::size_t c = 0; c < x.size(); ++c) x[c] = number(head, i, c);
                          }};
    Matrix weights(2, count);
    for (std::size_t i = 0; i < weights.values().size(); ++i) weights.values()[i] = static_cast<double>(i % 7) - 2;
    Centre centre{.origin = Matrix(2, dim), .offset = Matrix(2, dim)};
    for (std::size_t c = 0; c < centre.origin.values().size(); ++c) {
      centre.origin.values()[c] = 0.25 * static_cast<double>(c);
      centre.offset.values()[c] = -0.125;
    }
    const Matrix weighted = product_sums(vectors, weights, centre, 2), plain = product_sums(vectors, {}, {}, 2);
    for (int head = 0; head < 2; ++head)
      for (int r = 0; r < dim; ++r)
        for (int c = 0; c < dim; ++c) {
          double of_weighted = 0, of_plain = 0;
          for (int i = 0; i < count; ++i) {
            const double x = number(head, i, static_cast<std::size_t>(r)),
                         y = number(head, i, static_cast<std::size_t>(c));
            const double from_x = 0.25 * (head * dim + r) - 0.125, from_y = 0.25 * (head * dim + c) - 0.125;
            of_weighted += weights(head, i) * (x - from_x) * (y - from_y);
            of_plain += x * y;
          }
          EXPECT_NEAR(weighted(head, r * dim + c), of_weighted, 1e-9);
          EXPECT_NEAR(plain(head, r * dim + c), of_plain, 1e-11);
        }
  }
}

TEST_P(KeysAndQueries, QueriesThatAreNotAllStoredAreFoundByTheirPositions) {
  const RandomLayer late({.tokens = 90, .first_stored_query = 20, .rope_pairs = 3, .interleaved = GetParam()});
  const LayerTensors stored = late.tensors();
  const LayerView of_late(*backend, stored, {.prompt = prompt}, eval);
  std::vector<Numbers> queries;
  for (int t = 60; t < prompt; ++t) queries.push_back(late.rotated(late.query(3, t), -t));
  expect_moments(of_late.query_moments(60), 3, queries);
}

TEST_P(KeysAndQueries, AnchorAndCosinesFollowTheKeysToTheirSlots) {
  const Matrix of_held = mean_direction(held.keys(), 2), of_all = mean_direction(view.keys(), 2);
  for (int head = 0; head < 2; ++head) {
    Numbers anchor(8);
    for (int i = 0; i < 5; ++i) {
      const Numbers direction = unit(held_key(head, i));
      for (std::size_t c = 0; c < 8; ++c) anchor[c] += direction[c] / 5;
    }
    for (int c = 0; c < 8; ++c) EXPECT_NEAR(of_held(head, c), anchor[static_cast<std::size_t>(c)], 1e-12);
    for (int i = 0; i < 5; ++i)
      EXPECT_NEAR(cosines(held.keys(), of_held, 1)(head, i), dot(unit(held_key(head, i)), unit(anchor)), 1e-12);
  }
  Numbers anchor(8);
  for (int j = 0; j < prompt; ++j)
    for (std::size_t c = 0; c < 8; ++c) anchor[c] += unit(layer.k.row(1, j))[c] / prompt;
  for (int c = 0; c < 8; ++c) EXPECT_NEAR(of_all(1, c), anchor[static_cast<std::size_t>(c)], 1e-12);
}

TEST_P(KeysAndQueries, NormsAreThoseOfTheTokensThatAreHeld) {
  const LayerView later(view, {.positions = {2, 80}, .seen = 81, .added = 1});
  for (int head = 0; head < 2; ++head) {
    for (int i = 0; i < 5; ++i) {
      const Numbers key = held_key(head, i);
      EXPECT_NEAR(held.key_norms(2.0)(head, i), std::sqrt(dot(key, key)), 1e-6);
    }
    const Numbers value = layer.v.row(head, 80);
    EXPECT_NEAR(later.value_norms(2.0)(head, 1), std::sqrt(dot(value, value)), 1e-6) << "a token after the prompt";
  }
}

TEST_P(KeysAndQueries, FormsReadEachKeyForEveryRowOfItsGroup) {
  QuadraticForms forms{.matrices = Matrix(4, 64), .linear = Matrix(4, 8)};
  for (std::size_t i = 0; i < forms.linear.values().size(); ++i)
    forms.linear.values()[i] = gaussian(chain(1, i), chain(2, i));
  for (int row = 0; row < 4; ++row)
    for (int r = 0; r < 8; ++r)
      for (int c = 0; c < 8; ++c) forms.matrices(row, r * 8 + c) = std::cos(row + r * c) + r + c;
  const Matrix standing = values_of(forms, held.keys(), 2);
  forms.centre = view.key_moments().centre;
  const Matrix before = values_of(forms, view.unrotated_keys(), 2);
  const auto expected = [&](int row, const Numbers& x) {
    double value = 0;
    for (int r = 0; r < 8; ++r) {
      const double number = x[static_cast<std::size_t>(r)];
      value += forms.linear(row, r) * number;
      for (int c = 0; c < 8; ++c) value += number * forms.matrices(row, r * 8 + c) * x[static_cast<std::size_t>(c)];
    }
    return value;
  };
  for (int row = 0; row < 4; ++row) {
    std::vector<Numbers> keys;
    for (int j = 0; j < prompt; ++j) keys.push_back(unrotated(layer.k.row(row / 2, j), j));
    const Numbers mean = naive_moments(keys).first;
    for (int i = 0; i < 5; ++i) EXPECT_NEAR(standing(row, i), expected(row, held_key(row / 2, i)), 1e-10);
    for (int j = 0; j < prompt; ++j) {
      Numbers& key = keys[static_cast<std::size_t>(j)];
      std::ranges::transform(key, mean, key.begin(), std::minus());
      EXPECT_NEAR(before(row, j), expected(row, key), 1e-10);
    }
  }
}

TEST_P(KeysAndQueries, TwoKeysLieOppositeAboutTheirMean) {
  QuadraticForms forms{.matrices = Matrix(2, 64)};
  for (int row = 0; row < 2; ++row)
    for (int r = 0; r < 8; ++r)
      for (int c = 0; c < 8; ++c) forms.matrices(row, r * 8 + c) = std::cos(row + r * c + r + c);
  for (int j = 1; j < prompt; ++j) {
    const LayerView two(view, {.positions = {0, j}, .seen = prompt, .added = 1});
    forms.centre = two.key_moments().centre;
    const Matrix found = values_of(forms, two.unrotated_keys(), 2);
    for (int head = 0; head < 2; ++head) EXPECT_EQ(found(head, 0), found(head, 1)) << j;
  }
}

TEST_P(KeysAndQueries, SquaresOfNormsHaveNoRoots) {
  const Matrix of_keys = squared_lengths(view.stored_keys(), 2), of_values = squared_lengths(view.stored_values(), 2);
  for (int head = 0; head < 2; ++head)
    for (int j = 0; j < prompt; ++j) {
      const Numbers key = layer.k.row(head, j), value = layer.v.row(head, j);
      EXPECT_EQ(of_keys(head, j), dot(key, key));
      EXPECT_EQ(of_values(head, j), dot(value, value));
    }
}

TEST_P(KeysAndQueries, APartOfThePromptIsViewedOnceAndItsSecondsCount) {
  const LayerView& part = view.tokens_between(5, 20);
  EXPECT_EQ(&view.tokens_between(5, 20), &part);
  EXPECT_NE(&view.tokens_between(5, 21), &part);
  EXPECT_TRUE(std::ranges::equal(part.positions(1).numbers(), range(5, 20)));
  const double before = view.observable_seconds();
  part.window_attention(4);
  EXPECT_GT(view.observable_seconds(), before);
}

TEST_P(KeysAndQueries, OnAverageVectorsAreTurnedByEachOfThePositions) {
  const MeanRotation mean(tensors.rope, 1000, 7);
  const Numbers x = layer.k.row(0, 5);
  Numbers expected(8), found = x;
  for (int i = 0; i < 7; ++i)
    for (std::size_t c = 0; c < 8; ++c) expected[c] += layer.rotated(x, 1000 + i)[c] / 7;
  mean.apply(found);
  for (std::size_t c = 0; c < 8; ++c) EXPECT_NEAR(found[c], expected[c], 1e-10);
}

TEST_P(KeysAndQueries, RotationBeginsAtTheOffset) {
  const Numbers x = layer.k.row(0, 5);
  Numbers longer{7, -3};
  longer.insert(longer.end(), x.begin(), x.end());
  Rope later = tensors.rope;
  later.offset = 2;
  const auto expect_rotated = [&](const auto& rotated) {
    Numbers expected = x, found = longer;
    rotated(tensors.rope, std::span<double>(expected));
    rotated(later, std::span<double>(found));
    expected.insert(expected.begin(), {7, -3});
    EXPECT_EQ(found, expected);
    EXPECT_NE(found, longer);
  };
  expect_rotated([](const Rope& rope, std::span<double> y) { rotate(rope, 3, y); });
  expect_rotated([](const Rope& rope, std::span<double> y) { BackwardRotation(rope, 4).apply(-3, y); });
  expect_rotated([](const Rope& rope, std::span<double> y) { MeanRotation(rope, 10, 3).apply(y); });
}

TEST_P(KeysAndQueries, ATableOfAnglesRotatesWithTheSameBits) {
  BackwardRotation table(tensors.rope, 3);
  const auto expect_same_bits = [&](const Rope& rope, int farthest) {
    for (int distance = -farthest; distance <= 0; ++distance) {
      Numbers expected = layer.k.row(0, 5), found = expected;
      rotate(rope, distance, expected);
      table.apply(distance, found);
      EXPECT_EQ(found, expected);
      std::vector<float> floats(found.begin(), found.end()), turned = floats;
      rotate(rope, distance, floats);
      table.apply(distance, turned);
      EXPECT_EQ(turned, floats);
    }
  };
  expect_same_bits(tensors.rope, 3);
  table = {tensors.rope, 2000};
  expect_same_bits(tensors.rope, 2000);
  const std::vector<double> slower(tensors.rope.inv_freq.size(), 0.01);
  Rope other = tensors.rope;
  other.inv_freq = slower;
  const BackwardRotation of_first = std::exchange(table, {other, 50});
  expect_same_bits(other, 50);
  table = of_first;  // after the angles of others
  expect_same_bits(tensors.rope, 2000);
}

TEST_P(KeysAndQueries, AreTheSameBitsForAnyNumberOfThreads) {
  const RandomLayer many({.tokens = 9000, .dtype = DType::float16, .rope_pairs = 4, .interleaved = GetParam()});
  const LayerTensors all = many.tensors();
  const auto bits = [&](int threads) {
    const std::unique_ptr<Backend> some = tested_backend(threads);
    const LayerView of_all(*some, all, {.prompt = 8999}, eval);
    Numbers numbers;
    const Matrix of_anchor = cosines(of_all.keys(), mean_direction(of_all.keys(), threads), threads);
    for (const Matrix* one : {&of_all.query_moments(3).mean, &of_all.query_moments(3).covariance,
                              &of_all.key_moments().covariance, &of_anchor})
      numbers.insert(numbers.end(), one->values().begin(), one->values().end());
    return numbers;
  };
  const Numbers alone = bits(1);
  EXPECT_EQ(bits(2), alone);
  EXPECT_EQ(bits(3), alone);
}

TEST(Directions, ZeroVectorsCountAsZero) {
  RandomTensor keys(1, 3, 2, DType::float32, 1.0, 1);
  const float numbers[3][2] = {{3, 4}, {0, 0}, {-3, -4}};
  for (int token = 0; token < 3; ++token)
    for (int c = 0; c < 2; ++c) keys.set(0, token, c, numbers[token][c]);
  const LayerTensors tensors{.q = keys.view(), .k = keys.view(), .v = keys.view(), .query_positions = {}, .rope = {}};
  const auto backend = tested_backend(1);
  const std::vector<std::int32_t> eval{2};
  const LayerView two(*backend, tensors, {.prompt = 2}, eval), three(*backend, tensors, {.prompt = 3}, eval);
  const Matrix anchor = mean_direction(two.keys(), 1);
  EXPECT_DOUBLE_EQ(anchor(0, 0), 0.3) << "0.6 / 2";
  EXPECT_DOUBLE_EQ(anchor(0, 1), 0.4);
  EXPECT_DOUBLE_EQ(cosines(two.keys(), anchor, 1)(0, 0), 1.0);
  EXPECT_EQ(cosines(two.keys(), anchor, 1)(0, 1), 0.0);
  expect_zeros(cosines(three.keys(), mean_direction(three.keys(), 1), 1), 1, 3);
}

TEST(LagDeviations, ScaleEachChannelByTheNextPartition) {
  // Partitions of two from the second token on: {1,2}, {3,4}, {5,6}; the last one and the eighth token are not scored.
  const float numbers[8][3] = {{9, 9, 9}, {1, 5, 2}, {4, 1, 2}, {0, 2, 7}, {2, 6, 7}, {1, 1, 3}, {3, 5, 4}, {8, 8, 8}};
  RandomTensor tokens(1, 8, 3, DType::float32, 1.0, 1);
  for (int token = 0; token < 8; ++token)
    for (int c = 0; c < 3; ++c) tokens.set(0, token, c, numbers[token][c]);
  const LayerTensors tensors{
      .q = tokens.view(), .k = tokens.view(), .v = tokens.view(), .query_positions = {}, .rope = {}};
  const auto backend = tested_backend(2);
  const std::vector<std::int32_t> eval{7};
  const LayerView view(*backend, tensors, {.prompt = 8}, eval);
  const auto deviation = [](double a, double b, double c) {
    const double mean = (a + b + c) / 3;
    return std::sqrt(((a - mean) * (a - mean) + (b - mean) * (b - mean) + (c - mean) * (c - mean)) / 2);
  };
  // Extremes 0..2, 2..6 and the empty 7..7; then 1..3, 1..5, 3..4.
  const double expected[8] = {
      0, deviation(0.5, 0.75, 0), deviation(2, -0.25, 0), deviation(-0.5, 0.25, 4), deviation(0.5, 1.25, 4), 0, 0, 0};
  for (int j = 0; j < 8; ++j) {
    EXPECT_NEAR(lag_deviations(view.keys(), 1, 2, 2)(0, j), expected[j], 1e-14) << j;
    EXPECT_NEAR(lag_deviations(view.stored_values(), 1, 2, 2)(0, j), expected[j], 1e-14) << j;
  }
  expect_zeros(lag_deviations(view.keys(), 1, 4, 2), 1, 8);
  expect_zeros(lag_deviations(view.keys(), 12, 4, 2), 1, 8);
}

TEST(Cholesky, InvertsWhatIsPositiveDefiniteAndNothingElse) {
  Matrix matrix(5, 5);
  for (int i = 0; i < 5; ++i)
    for (int j = 0; j < 5; ++j) matrix(i, j) = (i == j ? 6.0 : 0.0) + std::cos(i) * std::cos(j);
  const std::optional<Matrix> inverse = inverse_of_positive(matrix);
  ASSERT_TRUE(inverse);
  for (int i = 0; i < 5; ++i)
    for (int j = 0; j < 5; ++j) {
      double sum = 0;
      for (int k = 0; k < 5; ++k) sum += matrix(i, k) * (*inverse)(k, j);
      EXPECT_NEAR(sum, i == j ? 1.0 : 0.0, 1e-14);
    }
  EXPECT_FALSE(inverse_of_positive(Matrix(2, 2)));
  EXPECT_FALSE(inverse_of_positive(Matrix(2, 2, 1.0)));
  matrix(4, 4) = -1;
  EXPECT_FALSE(inverse_of_positive(matrix));
}

TEST(VectorStatistics, WhatIsNotFiniteIsRefused) {
  RandomLayer layer({.tokens = 20, .rope_pairs = 2});
  layer.k.set(1, 7, 3, std::numeric_limits<float>::infinity());
  layer.q.set(2, 7, 3, std::numeric_limits<float>::quiet_NaN());
  const LayerTensors tensors = layer.tensors();
  const auto backend = tested_backend(2);
  const std::vector<std::int32_t> eval{19};
  const LayerView view(*backend, tensors, {.stored_layer = 5, .prompt = 15}, eval);
  const auto refusal = [](auto ask) -> std::string {
    try {
      ask();
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const std::string words =
      "/layers/005: statistics: vectors (run kvreplay validate --deep for details): expected finite numbers, found NaN "
      "or Inf";
  EXPECT_EQ(refusal([&] { view.in_this_layer([&] { return mean_direction(view.keys(), 2); }); }), words);
  EXPECT_EQ(refusal([&] { view.key_moments(); }), words);
  EXPECT_EQ(refusal([&] { view.query_moments(0); }), words);
  EXPECT_EQ(refusal([&] { view.query_moments(8); }), "accepted");
}

TEST(VectorStatistics, WithoutRopeNothingCanBeUnrotated) {
  const RandomLayer layer({.tokens = 20});
  const LayerTensors tensors = layer.tensors();
  const auto backend = tested_backend(1);
  const std::vector<std::int32_t> eval{19};
  const LayerView view(*backend, tensors, {.prompt = 15}, eval);
  EXPECT_THROW(view.key_moments(), Error);
  EXPECT_THROW(view.query_moments(0), Error);
  EXPECT_NO_THROW(mean_direction(view.keys(), 1));
}

}  // namespace
}  // namespace kvreplay::testing
