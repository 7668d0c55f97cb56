// Which tokens a replay takes for the question, which it compresses, and which policies a trace without RoPE is refused
// for.

#include <gtest/gtest.h>

#include "replay/replay.h"
#include "trace/synth.h"
#include "trace/trace.h"
#include "trace/writer.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

class SpansOf : public TraceFiles {
 protected:
  SpansOf() {
    SynthOptions options = synth_defaults("gaussian");
    options.layers = 1;
    options.query_heads = options.kv_heads = 1;
    options.head_dim = 2;
    options.prefill = 36;
    options.continuation = 4;
    synthesise(options, file("plain.h5"));
    header_ = Trace::open(file("plain.h5")).header();
  }

  Trace with(std::vector<Span> spans) {
    header_.spans = std::move(spans);
    TraceWriter writer(file("spans.h5"), header_, Existing::replace);
    const std::vector<std::byte> zeros(static_cast<std::size_t>(header_.tokens()) * 2 * sizeof(float));
    writer.begin_layer(DType::float32);
    writer.append_q(zeros);
    writer.append_k(zeros);
    writer.append_v(zeros);
    writer.finish();
    return Trace::open(file("spans.h5"));
  }

  TraceHeader header_;
};

class QuestionBegin : public SpansOf {
 protected:
  int begin(std::vector<Span> spans, int boundary) { return marked_question(with(std::move(spans)), boundary).begin; }
};

using Boundary = SpansOf;

TEST_F(Boundary, IsTheEndOfASpan) {
  const Trace trace = with({{"context", "context", 0, 30}, {"asked", "question", 30, 36}, {"late", "answer", 34, 38}});
  EXPECT_EQ(boundary(trace, "span:context"), 30);
  EXPECT_EQ(boundary(trace, "span:asked"), 36) << "all of the prompt";
  EXPECT_EQ(boundary(trace, "prompt"), 36);
  EXPECT_EQ(boundary(trace, "7"), 7);
  try {
    boundary(trace, "span:late");
    FAIL() << "it ends after the prompt";
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::input);
    EXPECT_NE(
        std::string(error.what()).find("span late ends after the prompt: expected an end at 36 or earlier, found 38"),
        std::string::npos)
        << error.what();
  }
}

TEST_F(Boundary, OfEqualNamesTheFirstSpanCounts) {
  EXPECT_EQ(boundary(with({{"part", "context", 8, 20}, {"part", "context", 0, 8}, {"part", "x", 20, 30}}), "span:part"),
            20);
}

TEST_F(Boundary, LeavesTheEvalQueriesThatFollowThePrompt) {
  const Trace trace = with({{"context", "context", 2, 30}});
  EXPECT_EQ(boundary(trace, "span:context"), 30);
  EXPECT_EQ(eval_queries(trace, "continuation"), (std::vector<std::int32_t>{36, 37, 38, 39}));
}

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

class WindowAtQuestion : public SpansOf {
 protected:
  std::vector<std::int32_t> read(const Trace& trace, const char* policy, int budget = 20) {
    return queries_read(trace, conditions(trace), ConfiguredPolicy::parse(policy), budget);
  }
  std::string instead(const Trace& trace, const char* policy) {
    return without_question(trace, conditions(trace), ConfiguredPolicy::parse(policy));
  }
  static Conditions conditions(const Trace& trace) {
    return {.boundary = 36, .eval_queries = eval_queries(trace, "continuation"), .layers = {0}};
  }
};

TEST_F(WindowAtQuestion, ReadsTheQueriesBeforeItsEnd) {
  const Trace trace = with({{"asked", "question", 24, 30}});
  using Queries = std::vector<std::int32_t>;
  EXPECT_EQ(read(trace, "snapkv:window=3"), (Queries{33, 34, 35}));
  EXPECT_EQ(read(trace, "snapkv:window=3,window_at=question"), (Queries{27, 28, 29}));
  EXPECT_EQ(read(trace, "snapkv:window=99,window_at=question").size(), 30U);
  EXPECT_EQ(read(trace, "pyramid-infer:recent=2,window_at=question"), (Queries{28, 29}));
  EXPECT_EQ(read(trace, "snapkv:window=2,window_at=question,store=fewer-channels"), position_range(28, 36))
      << "the store reads the last two";
  EXPECT_EQ(read(trace, "hybrid:chunkkv.window=1,snapkv.window=2,window_at=question"), (Queries{28, 29}));
}

TEST_F(WindowAtQuestion, IsTheEndWhereNoQuestionIsMarked) {
  const Trace none = with({});
  EXPECT_EQ(read(none, "snapkv:window=2,window_at=question"), (std::vector<std::int32_t>{34, 35}));
  EXPECT_EQ(instead(none, "snapkv:window_at=question"), "uses window_at=end");
  EXPECT_EQ(instead(none, "snapkv"), "");
  EXPECT_EQ(instead(none, "nacl:protect=(sinks=1)"), "uses the last tokens of the prompt instead");
  EXPECT_EQ(instead(with({{"asked", "question", 24, 30}}), "snapkv:window_at=question"), "");
}

class LayersOfDifferentShape : public TraceFiles {
 protected:
  /// The reason why a policy rejects the trace, behind the file's name; layers 2 and 3 have one shape.
  std::string refusal(const std::string& policy, const std::vector<int>& layers) {
    const Trace trace = Trace::open(file("shapes.h5"));
    const Conditions conditions{.boundary = 40, .eval_queries = eval_queries(trace, "continuation"), .layers = layers};
    try {
      check_policy(trace, conditions, ConfiguredPolicy::parse(policy), 10);
    } catch (const Error& error) {
      return std::string(error.what()).substr(file("shapes.h5").string().size());
    }
    return "accepted";
  }

  LayersOfDifferentShape() {
    SynthOptions options = synth_defaults("gaussian");
    options.prefill = 40;
    options.query_heads = {4, 8, 8, 4};
    options.kv_heads = {1, 2, 2, 2};
    options.head_dim = {16, 16, 32, 32};
    synthesise(options, file("shapes.h5"));
  }
};

TEST_F(LayersOfDifferentShape, ServeThePoliciesThatTreatEachAlone) {
  for (const char* policy : {"snapkv:window=4", "ada-kv:window=4", "h2o-online", "simlayerkv", "think", "sca", "full",
                             "chunkkv:window=4,reuse=2", "random-twin:of=(snapkv:window=4)", "oracle:scope=layer"})
    EXPECT_EQ(refusal(policy, {0, 1, 2, 3}), "accepted") << policy;
}

TEST_F(LayersOfDifferentShape, AreRejectedWithTheFieldByPoliciesThatCombineThem) {
  const std::string expected = ": expected layers of one shape, or a policy that treats each layer alone, found ";
  EXPECT_EQ(refusal("pyramid-kv:window=4", {0, 1}),
            ":/model/heads: pyramid-kv allocates tokens among layers" + expected +
                "4 query / 1 KV heads in layer 0, 8 query / 2 KV heads in layer 1");
  EXPECT_EQ(refusal("dynamickv:window=4", {1, 2}), ":/model/head_dims: dynamickv allocates tokens among layers" +
                                                       expected +
                                                       "16 / 16 components in layer 1, 32 / 32 components in layer 2");
  EXPECT_TRUE(refusal("minicache", {0, 1}).starts_with(":/model/heads: minicache stores layers in pairs"));
  EXPECT_TRUE(refusal("snapkv:window=4,heads=query,share=every", {0, 1})
                  .starts_with(":/model/heads: snapkv uses the set of one layer in others"));
  EXPECT_TRUE(refusal("random-twin:of=(lava:window=4)", {0, 1}).starts_with(":/model/heads: lava"));
  for (const char* policy : {"pyramid-kv:window=4", "dynamickv:window=4", "minicache"})
    EXPECT_EQ(refusal(policy, {2, 3}), "accepted") << "keys and values of one shape: " << policy;
  EXPECT_TRUE(refusal("dynamickv:window=4,heads=query", {2, 3}).starts_with(":/model/heads: dynamickv allocates"));
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
  for (const std::string policy : {"leverage", "compactor", "expected-attention", "cap-kv"})
    EXPECT_EQ(refusal_of(policy), file("norope.h5").string() +
                                      ":/model/rope: RoPE of keys and queries cannot be undone for " + policy +
                                      ": expected the RoPE frequencies of the model, found none");
  for (const char* policy :
       {"knorm", "value-norm", "keydiff", "cur", "lagkv", "r-kv", "vase", "kvcrush", "keyformer", "lru", "lfu"})
    EXPECT_EQ(refusal_of(policy), "accepted") << policy;
}

}  // namespace
}  // namespace kvreplay
