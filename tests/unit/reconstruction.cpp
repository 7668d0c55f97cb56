// Attention of the passes that repeat the prompt, worked by hand.
#include "observables/reconstruction.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "attention_reference.h"
#include "fake_backend.h"
#include "float_types.h"

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

/// In float64, term by term.
Matrix brute_force(const LayerTensors& tensors, int prompt, const Reconstruction& of,
                   const std::vector<PassTokens>& reads) {
  const int group = tensors.group(), dim = tensors.q.dim;
  Matrix largest(tensors.q.heads, prompt);
  std::vector<double> query(static_cast<std::size_t>(dim)), key(query.size());
  for (int head = 0; head < tensors.q.heads; ++head)
    for (std::size_t pass = 0; pass < of.passes.size(); ++pass)
      for (int number = 0; number < of.passes[pass].tokens(); ++number) {
        std::vector<std::pair<int, double>> weights;  // prompt token, or -1
        double sum = std::exp(tensors.sink(head));
        read_row(of.q, head, of.passes[pass].begin + number, query);
        const auto weigh = [&](const TensorView& keys, int i, int position, int token) {
          if (position < tensors.first_visible(prompt + number)) return;
          read_row(keys, head / group, i, key);
          double logit = tensors.softmax_scale * std::inner_product(key.begin(), key.end(), query.begin(), 0.0);
          if (tensors.logit_softcap > 0) logit = tensors.logit_softcap * std::tanh(logit / tensors.logit_softcap);
          weights.emplace_back(token, std::exp(logit));
          sum += weights.back().second;
        };
        for (int j = 0; j < prompt; ++j)
          if (j < reads[pass].sinks || (j >= reads[pass].first && j < reads[pass].end))
            weigh(tensors.k, j, j, j < reads[pass].first ? -1 : j);
        for (int i = 0; i <= number; ++i) weigh(of.k, of.passes[pass].begin + i, prompt + i, -1);
        for (const auto& [token, weight] : weights)
          if (token >= 0) largest(head, token) = std::max(largest(head, token), weight / sum);
      }
  return largest;
}

TEST(AttentionOfLongPasses, IsThatOfBruteForce) {
  constexpr int tokens_of_prompt = 300, heads = 6, kv_heads = 2;
  const std::vector<ReconstructionPass> passes{{0, 300, 0, 170}, {300, 570, 170, 300}};  // of more than one piece
  const std::vector<double> sinks(heads, 0.5);
  FakeBackend backend;
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const RandomTensor q(heads, tokens_of_prompt, 20, dtype, 1, 1), k(kv_heads, tokens_of_prompt, 20, dtype, 1, 2);
    const RandomTensor pass_q(heads, 570, 20, dtype, 1, 3), pass_k(kv_heads, 570, 20, dtype, 1, 4);
    const Reconstruction of{pass_q.view(), pass_k.view(), passes};
    for (const auto& [window, softcap, with_sinks] :
         {std::tuple(0, 0.0F, false), std::tuple(200, 0.0F, true), std::tuple(100, 3.0F, false)}) {
      LayerTensors tensors;
      tensors.q = q.view();
      tensors.k = tensors.v = k.view();
      tensors.sliding_window = window;
      tensors.logit_softcap = softcap;
      if (with_sinks) tensors.sinks = sinks;
      for (const std::vector<PassTokens>& reads :
           {std::vector<PassTokens>{{4, 4, 170}, {4, 170, 300}}, {{0, 0, 300}, {0, 0, 300}}, {{0, 5, 5}, {2, 9, 280}}})
        EXPECT_GE(at_every_simd_level([&](const char* level) {
                    const LayerView view(backend, tensors, {.prompt = tokens_of_prompt, .reconstruction = of}, {});
                    const Matrix& found = largest_attention_of_passes(view, reads);
                    const Matrix expected = brute_force(tensors, tokens_of_prompt, of, reads);
                    for (int head = 0; head < heads; ++head)
                      for (int j = 0; j < tokens_of_prompt; ++j)
                        ASSERT_NEAR(found(head, j), expected(head, j), 1e-5 * expected(head, j))
                            << level << ", window " << window << ", head " << head << ", token " << j;
                  }),
                  1);
    }
  }
}

}  // namespace
}  // namespace kvreplay::testing
