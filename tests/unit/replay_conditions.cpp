// Which tokens a replay takes for the question, and which policies a trace without RoPE is refused for.

#include <gtest/gtest.h>

#include "replay/replay.h"
#include "trace/synth.h"
#include "trace/trace.h"
#include "trace/writer.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

class QuestionBegin : public TraceFiles {
 protected:
  QuestionBegin() {
    SynthOptions options = synth_defaults("gaussian");
    options.layers = options.query_heads = options.kv_heads = 1;
    options.head_dim = 2;
    options.prefill = 36;
    options.continuation = 4;
    synthesise(options, file("plain.h5"));
    header_ = Trace::open(file("plain.h5")).header();
  }

  int begin(std::vector<Span> spans, int boundary) {
    header_.spans = std::move(spans);
    TraceWriter writer(file("spans.h5"), header_, Existing::replace);
    const std::vector<std::byte> zeros(static_cast<std::size_t>(header_.tokens()) * 2 * sizeof(float));
    writer.begin_layer(DType::float32);
    writer.append_q(zeros);
    writer.append_k(zeros);
    writer.append_v(zeros);
    writer.finish();
    return question_begin(Trace::open(file("spans.h5")), boundary);
  }

  TraceHeader header_;
};

TEST_F(QuestionBegin, AtMostSixteenTokensLieBetweenItsEndAndTheBoundary) {
  const std::vector<Span> one{{"asked", "question", 4, 10}};
  EXPECT_EQ(begin(one, 9), -1) << "it has not ended";
  EXPECT_EQ(begin(one, 10), 4);
  EXPECT_EQ(begin(one, 26), 4);
  EXPECT_EQ(begin(one, 27), -1);
}

TEST_F(QuestionBegin, TheLastThatEndsBelowTheBoundaryCounts) {
  EXPECT_EQ(begin({{"a", "question", 2, 6}, {"b", "question", 8, 10}}, 12), 8);
  EXPECT_EQ(begin({{"b", "question", 8, 10}, {"a", "question", 2, 6}}, 12), 8);
  EXPECT_EQ(begin({{"a", "question", 2, 6}, {"b", "question", 8, 30}}, 12), 2);
  EXPECT_EQ(begin({{"a", "question", 2, 10}, {"b", "question", 6, 10}}, 12), 6) << "of equal ends the later span";
}

TEST_F(QuestionBegin, OtherKindsAndNoSpansHaveNone) {
  EXPECT_EQ(begin({{"c", "context", 4, 10}}, 10), -1);
  EXPECT_EQ(begin({}, 10), -1);
}

class WithoutRope : public TraceFiles {};

TEST_F(WithoutRope, WhatUnrotatesIsRefusedInFront) {
  SynthOptions options = synth_defaults("gaussian");
  options.rope_base = 0;
  options.prefill = 40;
  synthesise(options, file("norope.h5"));
  const Trace trace = Trace::open(file("norope.h5"));
  const Conditions conditions{
      .boundary = 40, .eval_queries = eval_queries(trace, "continuation"), .layers = treated_layers(trace, false)};
  const auto refusal_of = [&](const std::string& policy) -> std::string {
    try {
      check_policy(trace, conditions, ConfiguredPolicy::parse(policy), 10);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  for (const std::string policy : {"leverage", "compactor", "expected-attention"})
    EXPECT_EQ(refusal_of(policy), file("norope.h5").string() +
                                      ":/model/rope: keys and queries cannot be un-rotated for " + policy +
                                      ": expected the model's RoPE, found none");
  for (const char* policy : {"knorm", "value-norm", "keydiff", "cur", "lagkv"})
    EXPECT_EQ(refusal_of(policy), "accepted") << policy;
}

}  // namespace
}  // namespace kvreplay
