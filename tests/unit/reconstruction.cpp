// Attention of the passes that repeat the prompt, worked by hand.
#include "observables/reconstruction.h"

#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <vector>

#include "attention_reference.h"
#include "fake_backend.h"

namespace kvreplay::testing {
namespace {

/// One head of one component. The keys of the prompt are the logarithms of 4, 2, 1 and 1; a query of 1 gives these
/// weights, a query of 0 equal ones.
class AttentionOfPasses : public ::testing::Test {
 protected:
  AttentionOfPasses() {
    const float weights[] = {4, 2, 1, 1};
    for (int token = 0; token < prompt; ++token) k.set(0, token, 0, std::log(weights[token]));
    tensors.q = q.view();
    tensors.k = tensors.v = k.view();
  }

  /// `queries` and `weights` of the tokens of all passes.
  std::vector<double> largest(const std::vector<float>& queries, const std::vector<float>& weights,
                              const std::vector<ReconstructionPass>& passes, const std::vector<PassTokens>& read) {
    const auto tokens = static_cast<int>(queries.size());
    RandomTensor of_queries(1, tokens, 1, DType::float32, 1, 3), of_keys(1, tokens, 1, DType::float32, 1, 4);
    for (int i = 0; i < tokens; ++i) {
      of_queries.set(0, i, 0, queries[static_cast<std::size_t>(i)]);
      of_keys.set(0, i, 0, std::log(weights[static_cast<std::size_t>(i)]));
    }
    const LayerView view(backend, tensors,
                         {.prompt = prompt, .reconstruction = {of_queries.view(), of_keys.view(), passes}}, {});
    const std::span<const double> found = largest_attention_of_passes(view, read).row(0);
    return {found.begin(), found.end()};
  }

  static void expect_near(const std::vector<double>& found, const std::vector<double>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t j = 0; j < found.size(); ++j) EXPECT_NEAR(found[j], expected[j], 1e-7) << "token " << j;
  }

  static constexpr int prompt = 4;
  RandomTensor q{1, prompt, 1, DType::float32, 1, 1}, k{1, prompt, 1, DType::float32, 1, 2};
  LayerTensors tensors;
  FakeBackend backend;
};

TEST_F(AttentionOfPasses, RunsOverTheReadTokensAndThePassSoFar) {
  const std::vector<ReconstructionPass> passes{{0, 2, 1, 3}};
  // The first query gives equal weights to tokens 1 and 2 and to itself; the second 2 and 1, and 1 and 4 to the pass.
  expect_near(largest({0, 1}, {1, 4}, passes, {{0, 1, 3}}), {0, 1.0 / 3, 1.0 / 3, 0});
  expect_near(largest({0, 1}, {1, 4}, passes, {{0, 0, 4}}), {4.0 / 13, 1.0 / 5, 1.0 / 5, 1.0 / 5});
  expect_near(largest({0, 1}, {1, 4}, passes, {{1, 1, 3}}), {0, 1.0 / 4, 1.0 / 4, 0});
}

TEST_F(AttentionOfPasses, LeavesOutOtherPasses) {
  const std::vector<ReconstructionPass> passes{{0, 1, 1, 2}, {1, 2, 1, 3}};
  expect_near(largest({1, 1}, {1, 8}, passes, {{0, 1, 2}, {0, 1, 3}}), {0, 2.0 / 3, 1.0 / 11, 0});
}

TEST_F(AttentionOfPasses, FollowsWindowAndSinkLogit) {
  const std::vector<double> sinks{std::log(3.0)};
  tensors.sinks = sinks;
  tensors.sliding_window = 3;  // the queries at positions 4 and 5 see keys from 2 and from 3 on
  expect_near(largest({1, 1}, {1, 4}, {{0, 2, 0, 4}}, {{0, 0, 4}}), {0, 0, 1.0 / 6, 1.0 / 6});
}

}  // namespace
}  // namespace kvreplay::testing
