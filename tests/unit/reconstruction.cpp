// Passes that repeat the prompt: what a trace must have of them, and the attention of their queries, worked by hand.
#include "observables/reconstruction.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "attention_reference.h"
#include "fake_backend.h"
#include "trace/synth.h"
#include "trace/trace.h"
#include "trace/writer.h"
#include "trace_files.h"

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

class TracesWithPasses : public TraceFiles {
 protected:
  /// The rule that a changed header breaks.
  std::string broken(const std::function<void(TraceHeader&)>& change) {
    SynthOptions options = synth_defaults("fixture");
    options.repeated = 7;
    options.existing = Existing::replace;
    synthesise(options, file("trace.h5"));
    TraceHeader header = Trace::open(file("trace.h5")).header();
    change(header);
    try {
      const TraceWriter writer(file("other.h5"), header, Existing::replace);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
};

TEST_F(TracesWithPasses, ObeyTheRules) {
  EXPECT_EQ(broken([](TraceHeader&) {}), "");
  const auto of_passes = [this](std::size_t element, int number) {
    return broken([=](TraceHeader& header) { header.reconstruction_passes[element] = number; });
  };
  for (const auto& [element, number] : {std::pair{0, 0}, {0, 21}, {3, 19}, {1, 7}, {2, 0}, {5, 13}, {4, 2}, {2, 12}})
    EXPECT_NE(of_passes(static_cast<std::size_t>(element), number).find("/reconstruction/passes: value"),
              std::string::npos)
        << element << " " << number;
  EXPECT_NE(broken([](TraceHeader& header) { ++header.reconstruction_ids[5]; }).find("/reconstruction/ids: value"),
            std::string::npos);
  EXPECT_EQ(broken([](TraceHeader& header) { ++header.reconstruction_ids[1]; }), "") << "of the instruction";
  EXPECT_NE(broken([](TraceHeader& header) { header.reconstruction_boundary = 11; }), "") << "token 11 is repeated";
  EXPECT_NE(broken([](TraceHeader& header) { header.reconstruction_boundary = 13; }), "") << "the prompt has 12 tokens";
}

TEST_F(TracesWithPasses, HaveAnotherHashThanThoseWithout) {
  SynthOptions options = synth_defaults("fixture");
  options.repeated = 7;
  synthesise(options, file("trace.h5"));
  const Trace trace = Trace::open(file("trace.h5"));
  ASSERT_EQ(trace.header().passes().size(), 2U);
  EXPECT_EQ(trace.header().passes()[1].begin, 11);
  EXPECT_EQ(trace.header().passes()[1].tokens(), 9);
  options.repeated = 0;
  options.existing = Existing::replace;
  synthesise(options, file("plain.h5"));
  EXPECT_NE(Trace::open(file("plain.h5")).hash(), trace.hash());
}

}  // namespace
}  // namespace kvreplay::testing
