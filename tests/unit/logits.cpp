#include "observables/logits.h"

#include <gtest/gtest.h>

#include "attention_reference.h"

namespace kvreplay::testing {
namespace {

TEST(LargestLogit, IsThatOfTheKeysThatTheQuerySees) {
  RandomLayer layer({.query_heads = 2, .kv_heads = 1, .tokens = 4, .dim = 1, .sliding_window = 2});
  for (int t = 0; t < 4; ++t) {
    layer.k.set(0, t, 0, static_cast<float>(t == 0 ? 100 : t == 3 ? -50 : t));
    for (int head = 0; head < 2; ++head) layer.q.set(head, t, 0, static_cast<float>(head + 2));
  }
  LayerTensors tensors = layer.tensors();
  tensors.softmax_scale = 0.5F;
  EXPECT_EQ(largest_logit(tensors, 1, 0), 100) << "2 * 100 / 2";
  EXPECT_EQ(largest_logit(tensors, 2, 0), 2) << "the window has slid past the first key";
  EXPECT_EQ(largest_logit(tensors, 3, 1), 75) << "of either sign";
  tensors.logit_softcap = 30;
  EXPECT_NEAR(largest_logit(tensors, 1, 0), 30 * std::tanh(100.0 / 30), 1e-12);
}

}  // namespace
}  // namespace kvreplay::testing
