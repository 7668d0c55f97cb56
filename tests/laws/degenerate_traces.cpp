// Numbers at the edges: every policy on traces of equal, zero, denormal, huge, infinite and missing numbers, of one
// token and of one head, in every stored type. Such a trace is replayed as the rules say, or refused by name.

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <tuple>

#include "all_policies.h"
#include "float_types.h"
#include "naive_attention.h"
#include "random.h"
#include "recorded_run.h"
#include "trace/writer.h"

namespace kvreplay {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

enum class Tensor { q, k, v };

struct Shape {
  int layers = 2, query_heads = 2, kv_heads = 2, dim = 8, prompt = 22, continuation = 3;
};

/// One element, from a whole number in -8 ... 8 that depends on its place.
using Element = std::function<double(Tensor, double number, int token)>;

struct Kind {
  std::string name;
  Shape shape;
  DType dtype;
  Element element;
  double scale = 0.25;
  bool exact = true;  // products of these numbers are exact in float32: what is measured is what float64 says
};

/// A trace of its own file.
class KindOfTrace {
 public:
  explicit KindOfTrace(const Kind& kind) : kind_(kind), file_(synth_defaults("fixture")) {
    const Shape& shape = kind.shape;
    TraceHeader header = file_.open().header();
    header.layers = shape.layers;
    header.query_heads = shape.query_heads;
    header.kv_heads = shape.kv_heads;
    header.head_dim = shape.dim;
    header.dtype = kind.dtype;
    header.softmax_scale = kind.scale;
    const auto layers = static_cast<std::size_t>(shape.layers);
    header.sliding_window.assign(layers, 0);
    header.layer_index.clear();
    for (int l = 0; l < shape.layers; ++l) header.layer_index.push_back(l);
    header.rope_pairs = shape.dim / 2;
    header.inv_freq.assign(layers * static_cast<std::size_t>(header.rope_pairs), 0.0);  // turning would not be exact
    header.attention_scaling.assign(layers, 1.0);
    header.prefill = shape.prompt;
    header.ids.assign(static_cast<std::size_t>(shape.prompt + shape.continuation), 0);
    header.offsets.clear();
    header.text.clear();
    header.spans.clear();
    const int tokens = shape.prompt + shape.continuation, repeated = shape.prompt + 2;  // 2 ask for the repetition
    header.reconstruction_boundary = shape.prompt;
    header.reconstruction_ids.assign(static_cast<std::size_t>(repeated), 0);
    header.reconstruction_passes = {repeated, 0, shape.prompt};
    TraceWriter writer(file_.path(), header, Existing::replace);
    for (int l = 0; l < shape.layers; ++l) {
      writer.begin_layer(kind.dtype);
      writer.append_q(tensor(Tensor::q, l, shape.query_heads, 0, tokens));
      writer.append_k(tensor(Tensor::k, l, shape.kv_heads, 0, tokens));
      writer.append_v(tensor(Tensor::v, l, shape.kv_heads, 0, tokens));
      for (const auto& [name, of, heads] :
           {std::tuple{"q", Tensor::q, shape.query_heads}, std::tuple{"k", Tensor::k, shape.kv_heads}}) {
        const std::string object = "/layers/00" + std::to_string(l) + "/" + name + "_reconstruction";
        writer.begin_tensor(object, kind.dtype,
                            {static_cast<std::uint64_t>(heads), static_cast<std::uint64_t>(repeated),
                             static_cast<std::uint64_t>(shape.dim)});
        writer.write_tokens(object, 0, tensor(of, l, heads, tokens, tokens + repeated));
      }
    }
    writer.finish();
    trace_.emplace(file_.open());
  }

  const Kind& kind() const { return kind_; }
  const Trace& trace() const { return *trace_; }

 private:
  std::vector<std::byte> tensor(Tensor of, int layer, int heads, int first, int end) const {
    std::vector<std::byte> bytes;
    for (int head = 0; head < heads; ++head)
      for (int token = first; token < end; ++token)
        for (int c = 0; c < kind_.shape.dim; ++c) {
          const std::uint64_t drawn = chain(static_cast<std::uint64_t>(of), layer, head, token, c);
          const double number = static_cast<double>(drawn % 17) - 8.0;
          bytes.resize(bytes.size() + size_of(kind_.dtype));
          store(bytes.data(), kind_.dtype, bytes.size() / size_of(kind_.dtype) - 1,
                static_cast<float>(kind_.element(of, number, token)));
        }
    return bytes;
  }

  Kind kind_;
  TemporaryTrace file_;
  std::optional<Trace> trace_;
};

double least_denormal(DType type) {
  return type == DType::float16 ? 0x1p-24 : type == DType::bfloat16 ? 0x1p-133 : 0x1p-149;
}

double largest(DType type) {
  return type == DType::float16 ? 65504.0 : type == DType::bfloat16 ? 0x1.FEp127 : 0x1.FFFFFEp127;
}

std::deque<KindOfTrace> finite_traces() {
  const Element plain = [](Tensor, double number, int) { return number; };
  const auto all_of = [](Tensor which, double value) -> Element {
    return [=](Tensor of, double number, int) { return of == which ? value : number; };
  };
  const Shape grouped{.query_heads = 6, .kv_heads = 2};
  const Shape one_kv_head{.layers = 3, .query_heads = 8, .kv_heads = 1, .dim = 4, .prompt = 19};
  const Shape one_token{.prompt = 1, .continuation = 1};
  std::deque<KindOfTrace> all;
  for (const DType type : {DType::float16, DType::bfloat16, DType::float32}) {
    const double tiny = least_denormal(type), huge = largest(type);
    const auto add = [&](const std::string& name, const Shape& shape, const Element& element, double scale = 0.25,
                         bool exact = true) {
      all.emplace_back(Kind{name + " " + name_of(type), shape, type, element, scale, exact});
    };
    add("equal keys", grouped, all_of(Tensor::k, 3));
    add("zero keys", one_kv_head, all_of(Tensor::k, 0));
    add("zero queries", {}, all_of(Tensor::q, 0));
    add("zero values", grouped, all_of(Tensor::v, 0));
    add("zeros", one_kv_head, [](Tensor, double, int) { return 0.0; });
    add("negative zeros", {}, [](Tensor, double number, int) { return number < 0 ? -0.0 : 0.0; });
    add("denormal", grouped, [=](Tensor, double number, int) { return number * tiny; });
    add("denormal keys", {}, [=](Tensor of, double number, int) { return of == Tensor::k ? number * tiny : number; });
    add("one token", one_token, plain);
    add(
        "one huge token", one_token, [=](Tensor, double number, int) { return number < 0 ? -huge : huge; }, 1,
        type == DType::float16);
    add(
        "huge logits", grouped, [](Tensor of, double number, int) { return of == Tensor::q ? 125 * number : number; },
        1);
    add("largest", grouped, [=](Tensor, double number, int) { return number < 0 ? -huge : huge; }, 1, false);
    add(
        "largest values", one_kv_head,
        [=](Tensor of, double number, int) { return of != Tensor::v ? number
                                                    : number < 0    ? -huge
                                                                    : huge; }, 0.25,
        type == DType::float16);
  }
  return all;
}

/// What a run hands out, with the failures of cells, and what is measured on each layer.
struct DegenerateRun : RecordedRun {
  std::map<int, Error> failures;

  void failed(int cell, const Error& error) override { failures.try_emplace(cell, error); }
  void layer(const LayerView& view, Backend& backend) override {
    RecordedRun::layer(view, backend);
    for (const Matrix* similarity : {&view.key_similarity(), &view.value_similarity()})
      for (const double cosine : similarity->values()) {
        ASSERT_GE(cosine, -1.0);
        ASSERT_LE(cosine, 1.0);
      }
    for (const Matrix* sums : {&view.window_attention(2), &view.cumulative_attention(), &view.eval_attention()})
      for (const double sum : sums->values()) ASSERT_TRUE(sum >= 0 && std::isfinite(sum));
  }
};

/// Reads nothing of a layer by itself.
struct QuietRun : Sink {
  std::map<RecordedRun::CellLayer, LayerSelection> selections;
  std::map<RecordedRun::CellLayer, std::vector<double>> lost;

  void failed(int, const Error& error) override { throw error; }
  void selected(const LayerView& view, int cell, const LayerSelection& selection, const StoredLayer*,
                const CellSeconds&) override {
    selections[{cell, view.layer()}] = selection;
  }
  void measured(const LayerView& view, std::span<const int> cells, int, int, const KeptMoments& moments) override {
    for (const Moments& of : moments.kept) lost[{cells.front(), view.layer()}].push_back(of.error_square);
  }
};

void expect_located(const Error& error, const std::string& place = "/layers/") {
  EXPECT_EQ(error.refusal(), Refusal::input) << error.what();
  EXPECT_NE(error.where().find(place), std::string::npos) << error.what();
}

void expect_sets(const LayerSelection& selection, int prompt) {
  for (int row = 0; row < selection.set.rows(); ++row) {
    const std::vector<std::int32_t> kept = selection.set.positions(row);
    EXPECT_TRUE(std::ranges::adjacent_find(kept, std::greater_equal{}) == kept.end());
    EXPECT_TRUE(kept.empty() || (kept.front() >= 0 && kept.back() < prompt));
  }
}

/// Of what is stored as it was and where it was: mass and lost output of each eval query, as float64 has them.
void expect_measured(const DegenerateRun& run, int cell, int l, const Trace& trace, const Conditions& conditions) {
  const LayerSelection& selection = run.selections.at({cell, l});
  const LayerTensors tensors = trace.layer(conditions.layers[static_cast<std::size_t>(l)]);
  const std::size_t queries = conditions.eval_queries.size();
  const NaiveLayer layer(tensors, nullptr);
  const std::vector<float> values = widened(tensors.v);
  const auto longest =
      static_cast<double>(std::abs(*std::ranges::max_element(values, {}, [](float x) { return std::abs(x); })));
  for (int h = 0; h < tensors.q.heads; ++h)
    for (std::size_t i = 0; i < queries; ++i) {
      const int t = conditions.eval_queries[i];
      const Naive expected = layer.lost(h, t, seen_in_slot_order(selection, tensors, h, t), Positions::original);
      const Moments& found = run.moments.at({cell, l})[static_cast<std::size_t>(h) * queries + i];
      ASSERT_NEAR(found.mass, expected.mass, 2e-6) << "layer " << l << ", head " << h << ", query " << t;
      ASSERT_NEAR(std::sqrt(found.error_square), expected.error, 2e-5 * (1 + expected.error) + 1e-6 * longest);
    }
}

class EveryPolicyOnDegenerate : public testing::TestWithParam<std::string> {};

TEST_P(EveryPolicyOnDegenerate, FiniteNumbersAreReplayedOrRefusedByName) {
  static const std::deque<KindOfTrace> traces = finite_traces();
  const ConfiguredPolicy policy = ConfiguredPolicy::parse(GetParam());
  for (const KindOfTrace& one : traces) {
    SCOPED_TRACE(one.kind().name);
    const Trace& trace = one.trace();
    const Conditions conditions = default_conditions(trace);
    const int prompt = conditions.boundary, layers = static_cast<int>(conditions.layers.size());
    std::vector<Cell> cells;
    for (const int budget : std::set<int>{1, std::max(1, prompt - 1), prompt, prompt + 1}) {
      try {
        check_policy(trace, conditions, policy, budget);
        cells.push_back({policy, budget});
      } catch (const Error& error) {
        EXPECT_NE(error.refusal(), Refusal::internal) << error.what();
      }
    }
    DegenerateRun run;
    try {
      replay(*tested_backend(1), trace, conditions, cells, run);
    } catch (const Error& error) {
      EXPECT_FALSE(one.kind().exact) << error.what();
      expect_located(error);
      continue;
    }
    for (int cell = 0; cell < static_cast<int>(cells.size()); ++cell) {
      SCOPED_TRACE("budget " + std::to_string(cells[static_cast<std::size_t>(cell)].budget));
      if (const auto failure = run.failures.find(cell); failure != run.failures.end()) {
        EXPECT_FALSE(one.kind().exact) << failure->second.what();
        expect_located(failure->second);
        continue;
      }
      for (int l = 0; l < layers; ++l) {
        expect_sets(run.selections.at({cell, l}), prompt);
        for (const Moments& moments : run.moments.at({cell, l})) {
          ASSERT_TRUE(moments.mass >= 0 && moments.mass <= 1 + 1e-6) << moments.mass;
          ASSERT_TRUE(!one.kind().exact || std::isfinite(moments.error_square));
        }
        if (one.kind().exact && !run.compared_at.contains({cell, l})) expect_measured(run, cell, l, trace, conditions);
      }
      for (const auto& [key, scores] : run.scores)
        for (const double score : scores.values()) ASSERT_FALSE(std::isnan(score)) << "layer " << key.second;
    }
  }
}

TEST_P(EveryPolicyOnDegenerate, WhatIsNoNumberIsRefusedByPlaceOrNeverRead) {
  struct Hidden {
    Tensor tensor;
    int token;
    double number;
    std::string place;
  };
  static const std::vector<Hidden> places{
      {Tensor::k, 0, not_a_number, "/layers/000/k"}, {Tensor::k, 21, -infinity, "/layers/000/k"},
      {Tensor::v, 7, infinity, "/layers/000/v"},     {Tensor::v, 24, not_a_number, "/layers/000/v"},
      {Tensor::q, 23, -infinity, "/layers/000/q"},   {Tensor::q, 0, not_a_number, "/layers/000/q"}};
  static const std::deque<KindOfTrace> traces = [] {
    std::deque<KindOfTrace> all;
    for (const Hidden& hidden : places)
      all.emplace_back(Kind{"hidden", {}, DType::float16, [=](Tensor of, double number, int token) {
                              return of == hidden.tensor && token == hidden.token ? hidden.number : number;
                            }});
    return all;
  }();
  static const KindOfTrace clean(Kind{"clean", {}, DType::float16, [](Tensor, double number, int) { return number; }});
  const ConfiguredPolicy policy = ConfiguredPolicy::parse(GetParam());
  for (std::size_t i = 0; i < places.size(); ++i) {
    SCOPED_TRACE(places[i].place + " token " + std::to_string(places[i].token));
    const Conditions conditions = default_conditions(clean.trace());
    const std::vector<Cell> cells{{policy, 6}};
    try {
      check_policy(clean.trace(), conditions, policy, 6);
    } catch (const Error&) {
      return;  // too large for so few tokens
    }
    QuietRun run, expected;
    try {
      replay(*tested_backend(1), traces[i].trace(), conditions, cells, run);
    } catch (const Error& error) {
      expect_located(error, places[i].place);
      EXPECT_NE(error.found().find("position " + std::to_string(places[i].token) + ","), std::string::npos)
          << error.what();
      continue;
    }
    EXPECT_TRUE(places[i].tensor == Tensor::q && places[i].token == 0) << "read, and not refused";
    replay(*tested_backend(1), clean.trace(), conditions, cells, expected);
    for (const auto& [key, selection] : expected.selections) EXPECT_EQ(selection.set, run.selections.at(key).set);
    EXPECT_EQ(expected.lost, run.lost);
  }
}

std::string test_name(const testing::TestParamInfo<std::string>& parameter) {
  std::string name = parameter.param;
  std::ranges::replace_if(name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Registry, EveryPolicyOnDegenerate, testing::ValuesIn(all_policies()), test_name);

}  // namespace
}  // namespace kvreplay
