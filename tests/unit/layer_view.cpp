#include "observables/layer_view.h"

#include <gtest/gtest.h>

#include "attention_reference.h"
#include "fake_backend.h"

namespace kvreplay::testing {
namespace {

class LayerViewOf : public ::testing::Test {
 protected:
  LayerViewOf() { backend.sums = Matrix(4, 30, 0.5); }

  RandomLayer layer{{.tokens = 40}};
  FakeBackend backend;
  const std::vector<std::int32_t> eval = range(30, 40);
  LayerTensors tensors = layer.tensors();
  LayerView view{backend, tensors, {.layer = 1, .layers = 3, .stored_layer = 2, .prompt = 30}, eval};
};

TEST_F(LayerViewOf, ShapesAndPlace) {
  EXPECT_EQ(view.layer(), 1);
  EXPECT_EQ(view.layers(), 3);
  EXPECT_EQ(view.stored_layer(), 2);
  EXPECT_EQ(view.prompt(), 30);
  EXPECT_EQ(view.query_heads(), 4);
  EXPECT_EQ(view.kv_heads(), 2);
  EXPECT_EQ(view.group(), 2);
  EXPECT_EQ(view.rows(Heads::kv), 2);
  EXPECT_EQ(view.rows(Heads::query), 4);
  EXPECT_EQ(view.rows(Heads::layer), 1);
}

TEST_F(LayerViewOf, EveryObservableIsComputedOnce) {
  EXPECT_EQ(view.observable_seconds(), 0.0);
  const Matrix& first = view.window_attention(8);
  EXPECT_EQ(&view.window_attention(8), &first);
  EXPECT_EQ(backend.calls, 1);
  EXPECT_EQ(backend.asked_queries, range(22, 30));
  EXPECT_EQ(backend.asked.columns, 30);
  EXPECT_TRUE(backend.asked.own_key);
  EXPECT_GT(view.observable_seconds(), 0.0);
  view.window_attention(9);
  EXPECT_EQ(backend.calls, 2);
  view.key_norms(1.0);
  view.key_norms(2.0);
  view.key_norms(2.0);
  EXPECT_EQ(backend.calls, 4);
  view.value_norms(2.0);
  EXPECT_EQ(backend.calls, 5);
  EXPECT_EQ(first(0, 0), 0.5);
}

TEST_F(LayerViewOf, AttentionOfAnyQueriesIsAskedForAsItIs) {
  view.attention(std::vector<std::int32_t>{3, 7}, std::vector<double>{1, 2}, 1.5);
  EXPECT_EQ(backend.asked_queries, (std::vector<std::int32_t>{3, 7}));
  EXPECT_EQ(backend.asked.above_uniform, 1.5);
  EXPECT_EQ(backend.asked.columns, 30);
}

TEST_F(LayerViewOf, WhatIsRememberedIsComputedOnceForItsArguments) {
  int computed = 0;
  const auto ask = [&](double argument) -> const Matrix& {
    return view.remember("mine", {argument}, [&] { return Matrix(1, 1, ++computed + argument); });
  };
  EXPECT_EQ(ask(10)(0, 0), 11);
  EXPECT_EQ(&ask(10), &ask(10));
  EXPECT_EQ(ask(20)(0, 0), 22);
  EXPECT_EQ(computed, 2);
  const LayerView some(view, {.positions = {0, 2}, .seen = 3, .added = 1});
  some.remember("mine", {10}, [&] { return Matrix(1, 1, ++computed); });
  EXPECT_EQ(computed, 3) << "of other tokens";
}

TEST_F(LayerViewOf, AWindowLongerThanThePromptIsThePrompt) {
  const Matrix& all = view.window_attention(1000);
  EXPECT_EQ(backend.asked_queries, range(0, 30));
  EXPECT_EQ(&view.window_attention(30), &all);
  EXPECT_EQ(backend.calls, 1);
}

TEST_F(LayerViewOf, AWindowMayEndBeforeThePrompt) {
  const Matrix& whole = view.window_attention(8);
  EXPECT_NE(&view.window_attention(8, 25), &whole);
  EXPECT_EQ(backend.asked_queries, range(17, 25));
  EXPECT_EQ(backend.asked.columns, 30);
  EXPECT_EQ(&view.window_attention(8, 30), &whole);
  view.window_attention(1000, 25);
  EXPECT_EQ(backend.asked_queries, range(0, 25));
  EXPECT_EQ(view.last_queries(4, 25), range(21, 25));
  view.window_attention(std::vector<double>{1, 2, 3}, 25);
  EXPECT_EQ(backend.asked_queries, range(22, 25));
}

TEST_F(LayerViewOf, CumulativeAttentionAsksForThePrompt) {
  view.cumulative_attention();
  view.cumulative_attention();
  EXPECT_EQ(backend.asked_queries, range(0, 30));
  EXPECT_EQ(backend.calls, 1);
}

TEST_F(LayerViewOf, EvalAttentionLeavesOutTheOwnKey) {
  view.eval_attention();
  EXPECT_EQ(backend.asked_queries, eval);
  EXPECT_EQ(backend.asked.columns, 30);
  EXPECT_FALSE(backend.asked.own_key);
}

class PartlyResident : public LayerViewOf {
 protected:
  static std::vector<std::int32_t> copied(std::span<const std::int32_t> of) { return {of.begin(), of.end()}; }
};

TEST_F(PartlyResident, TheSoftmaxRunsOverWhatIsHeld) {
  const LayerView held(view, {.positions = {0, 4, 10, 11}, .seen = 12, .added = 2});
  EXPECT_EQ(held.tokens(), 4);
  EXPECT_EQ(held.prompt(), 30) << "the prompt is what it was";
  EXPECT_EQ(copied(held.positions(0).numbers()), (std::vector<std::int32_t>{0, 4, 10, 11}));
  EXPECT_EQ(copied(held.positions(1).numbers()), copied(held.positions(0).numbers())) << "one list for all rows";
  backend.sums = Matrix(4, 4, 0.25);
  held.window_attention(3);
  EXPECT_EQ(backend.asked_queries, range(9, 12)) << "the last that have come, held or not";
  EXPECT_EQ(backend.asked.resident_rows, 1);
  EXPECT_EQ(backend.asked.resident.size(), 4U);
  EXPECT_EQ(backend.asked.positions, Positions::original);
  held.window_attention(100);
  EXPECT_EQ(backend.asked_queries, range(0, 12));
}

TEST_F(PartlyResident, AtCachePositionsOnlyHeldQueriesTakePart) {
  const LayerView held(view, {.positions = {0, 4, 9, 11}, .seen = 12, .added = 1, .place = Positions::cache});
  held.window_attention(4);
  EXPECT_EQ(backend.asked_queries, (std::vector<std::int32_t>{9, 11}));
  EXPECT_EQ(backend.asked.positions, Positions::cache);
  held.window_attention(std::vector<double>{1, 2, 3});
  EXPECT_EQ(backend.asked_queries, (std::vector<std::int32_t>{9, 11})) << "weights of queries 9, 10, 11";
}

TEST_F(PartlyResident, RowsHaveListsOfTheirOwn) {
  const LayerView held(
      view, {.positions = {0, 4, 11, 1, 5, 11}, .rows = 2, .seen = 12, .added = 1, .place = Positions::cache});
  EXPECT_EQ(held.tokens(), 3);
  EXPECT_EQ(copied(held.positions(1).numbers()), (std::vector<std::int32_t>{1, 5, 11}));
  held.window_attention(12);
  EXPECT_EQ(backend.asked_queries, (std::vector<std::int32_t>{11})) << "4 is held by one row only";
  EXPECT_EQ(backend.asked.resident_rows, 2);
}

TEST_F(PartlyResident, CumulativeAttentionGoesOnFromWhatWasReceivedBefore) {
  Matrix before(4, 2, 3.0);
  before(1, 1) = 7.0;
  const LayerView held(view, {.positions = {0, 4, 10, 11}, .seen = 12, .added = 2, .attention_before = before});
  backend.sums = Matrix(4, 4, 0.25);
  const Matrix& sums = held.cumulative_attention();
  EXPECT_EQ(backend.asked_queries, range(10, 12)) << "the new ones";
  EXPECT_EQ(sums(0, 0), 3.25);
  EXPECT_EQ(sums(1, 1), 7.25);
  EXPECT_EQ(sums(1, 2), 0.25) << "new tokens begin with nothing";
}

TEST_F(PartlyResident, OfAQuestionBehindWhatIsHeld) {
  const LayerView held(view, {.positions = {0, 4, 10, 11}, .seen = 12, .added = 2});
  const std::vector<std::int32_t> question{28, 29};
  const std::vector<double> weights{0.5, 1.0};
  held.attention_of(question, weights);
  EXPECT_EQ(backend.asked_queries, question);
  EXPECT_EQ(backend.asked.resident.size(), 6U) << "the held ones, then the question itself";
}

TEST(LayerViewWith, TheCpuBackendAgreesWithBruteForce) {
  const RandomLayer layer({.tokens = 40});
  const auto backend = tested_backend(2);
  const auto eval = range(20, 40, 2);
  const LayerTensors tensors = layer.tensors();
  const LayerView view(*backend, tensors, {.prompt = 30}, eval);
  const Matrix expected = reference_sums(layer, {.queries = eval, .columns = 30, .own_key = false});
  for (int head = 0; head < 4; ++head)
    for (int key = 0; key < 30; ++key) EXPECT_NEAR(view.eval_attention()(head, key), expected(head, key), 1e-6);
}

}  // namespace
}  // namespace kvreplay::testing
