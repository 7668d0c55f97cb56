// Every policy by both backends: the same sets, and numbers that differ by less than any metric shows. Random scores
// stay clear of every cut; equal ones have the same bits on each backend, and so the same order.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/laws/all_policies.h"
#include "tests/laws/recorded_run.h"

namespace kvreplay {
namespace {

SynthOptions shape(const std::string& kind, DType dtype, int layers) {
  SynthOptions options = synth_defaults(kind);
  options.layers = layers;
  options.query_heads = 4;
  options.kv_heads = 2;
  options.head_dim = 24;
  options.prefill = 61;
  options.continuation = 5;
  options.rope_base = 100.0;
  options.dtype = dtype;
  options.repeated = 25;
  return options;
}

class EveryPolicyOnCuda : public testing::TestWithParam<std::string> {};

TEST_P(EveryPolicyOnCuda, KeepsTheTokensThatItKeepsOnTheCpu) {
  std::vector<SynthOptions> traces{shape("gaussian", DType::bfloat16, 2), shape("gaussian", DType::float32, 3),
                                   shape("repeat", DType::float16, 3), shape("gaussian", DType::float32, 3),
                                   shape("gaussian", DType::bfloat16, 2)};
  traces[3].sinks = true;
  traces[3].chunk = {0, 23, 0};
  traces[3].value_dim = 20;
  traces[4].value_is_key = true;
  traces[4].value_dim = 16;
  int compared = 0;
  for (const SynthOptions& options : traces) {
    SCOPED_TRACE(options.kind + " " + name_of(options.dtype));
    const TemporaryTrace file(options);
    const Trace trace = file.open();
    std::vector<Cell> cells;
    for (const int budget : {9, 24, options.prefill - 1}) {
      if (budget > 24 && !cells.empty()) continue;  // the largest is for what has no room in less
      const ConfiguredPolicy policy = ConfiguredPolicy::parse(GetParam());
      try {
        check_policy(trace, default_conditions(trace), policy, budget);
      } catch (const Error&) {
        continue;  // its values are too large for the trace
      }
      cells.push_back({policy, budget});
    }
    const RecordedRun expected = record_cells(*make_backend("cpu", 1), trace, cells);
    const RecordedRun found = record_cells(*make_backend("cuda", 1), trace, cells);
    for (const auto& [cell, selection] : expected.selections) {
      ++compared;
      EXPECT_EQ(found.selections.at(cell).set, selection.set) << "cell " << cell.first << ", layer " << cell.second;
      EXPECT_EQ(found.selections.at(cell).evicted_at, selection.evicted_at);
    }
    for (const auto& [cell, moments] : expected.moments) {
      const std::vector<Moments>& these = found.moments.at(cell);
      ASSERT_EQ(these.size(), moments.size());
      for (std::size_t i = 0; i < moments.size(); ++i) {
        EXPECT_NEAR(these[i].mass, moments[i].mass, 1e-5);
        EXPECT_NEAR(std::sqrt(these[i].square), std::sqrt(moments[i].square), 1e-5);
        EXPECT_NEAR(these[i].nosink_mass, moments[i].nosink_mass, 1e-5);
        EXPECT_NEAR(std::sqrt(these[i].error_square), std::sqrt(moments[i].error_square), 1e-5);
        EXPECT_NEAR(these[i].output_dot, moments[i].output_dot, 1e-5 * (1 + std::abs(moments[i].output_dot)));
        EXPECT_NEAR(these[i].logit_square, moments[i].logit_square, 1e-5 * (1 + moments[i].logit_square));
        EXPECT_NEAR(these[i].unaligned_dot, moments[i].unaligned_dot, 1e-5);
      }
    }
  }
  EXPECT_GT(compared, 0);
}

INSTANTIATE_TEST_SUITE_P(Policies, EveryPolicyOnCuda, testing::ValuesIn(all_policies()),
                         [](const testing::TestParamInfo<std::string>& param) {
                           std::string name;
                           for (const char letter : param.param) name += std::isalnum(letter) != 0 ? letter : '_';
                           return name;
                         });

}  // namespace
}  // namespace kvreplay
