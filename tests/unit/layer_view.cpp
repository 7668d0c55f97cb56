#include "attention/layer_view.h"

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

TEST_F(LayerViewOf, AWindowLongerThanThePromptIsThePrompt) {
  const Matrix& all = view.window_attention(1000);
  EXPECT_EQ(backend.asked_queries, range(0, 30));
  EXPECT_EQ(&view.window_attention(30), &all);
  EXPECT_EQ(backend.calls, 1);
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

TEST(LayerViewWith, TheCpuBackendAgreesWithBruteForce) {
  const RandomLayer layer({.tokens = 40});
  const auto backend = make_backend("cpu", 2);
  const auto eval = range(20, 40, 2);
  const LayerTensors tensors = layer.tensors();
  const LayerView view(*backend, tensors, {.prompt = 30}, eval);
  const Matrix expected = reference_sums(layer, {.queries = eval, .columns = 30, .own_key = false});
  for (int head = 0; head < 4; ++head)
    for (int key = 0; key < 30; ++key) EXPECT_NEAR(view.eval_attention()(head, key), expected(head, key), 1e-6);
}

}  // namespace
}  // namespace kvreplay::testing
