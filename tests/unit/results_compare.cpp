#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "analysis/compare_runs.h"
#include "analysis/run.h"
#include "trace/hdf5.h"
#include "trace/synth.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

class CompareRuns : public TraceFiles {
 protected:
  CompareRuns() { synthesise(synth_defaults("fixture"), file("f1.h5")); }

  std::filesystem::path results(const std::string& name, const std::string& policies) {
    RunRequest request;
    request.traces = {file("f1.h5")};
    for (const std::string& text : split_policies(policies)) request.policies.push_back(ConfiguredPolicy::parse(text));
    request.budgets = {Budget::parse("6")};
    request.metrics = parse_metrics("");
    request.output = folder() / name;
    request.threads = 1;
    run(request);
    return request.output;
  }
};

TEST_F(CompareRuns, WhatOneSideLacks) {
  const auto first = results("first", "h2o"), second = results("second", "h2o,local");
  EXPECT_TRUE(compare_runs(first, first).equal());
  const RunDifference difference = compare_runs(first, second);
  EXPECT_TRUE(difference.only_first.empty());
  EXPECT_FALSE(difference.only_second.empty());
  EXPECT_TRUE(difference.values.empty());
  EXPECT_FALSE(compare_runs(first / "selections.h5", second / "selections.h5").equal());
}

TEST_F(CompareRuns, ValuesBeyondTheTolerance) {
  const auto first = results("first", "h2o"), second = results("second", "h2o");
  const auto path = second / "results.csv";
  std::ifstream stream(path);
  std::string text{std::istreambuf_iterator<char>(stream), {}};
  stream.close();
  const std::string before = "held_tokens,,8.5,tokens", after = "held_tokens,,8.75,tokens";
  const std::size_t at = text.find(before);
  ASSERT_NE(at, std::string::npos);
  std::ofstream(path) << text.replace(at, before.size(), after);
  const RunDifference difference = compare_runs(first, second);
  ASSERT_EQ(difference.values.size(), 1U);
  EXPECT_EQ(difference.values[0].first, "8.5");
  EXPECT_EQ(difference.values[0].second, "8.75");
  EXPECT_NE(difference.values[0].where.find("held_tokens, layer 0, head all"), std::string::npos);
  EXPECT_TRUE(compare_runs(first, second, 0.25).equal());
}

TEST_F(CompareRuns, SetsThatDiffer) {
  const auto first = results("first", "h2o:recent=3"), second = results("second", "h2o:recent=3");
  {
    const hdf5::File file = hdf5::File::open_writable(second / "selections.h5");
    const hdf5::Group cells = file.group("cells");
    for (const std::string& id : cells.names()) {
      const hdf5::Group cell = cells.group(id);
      if (cell.string_attribute("policy") != "h2o") continue;
      hdf5::Dataset dataset = cell.dataset("positions");
      std::vector<std::int32_t> positions = dataset.values<std::int32_t>();
      ASSERT_EQ(positions[2], 3);  // 0, 1, 3, 9, 10, 11
      positions[2] = 4;
      dataset.write(hdf5::Type::int32(), positions.data());
    }
  }
  const RunDifference difference = compare_runs(first, second);
  ASSERT_EQ(difference.sets.size(), 1U);
  EXPECT_NE(difference.sets[0].where.find("layer 0, head 0"), std::string::npos);
  EXPECT_EQ(difference.sets[0].first, "3");
  EXPECT_EQ(difference.sets[0].second, "4");
}

TEST_F(CompareRuns, OtherThingsAreRefused) {
  const auto first = results("first", "h2o");
  EXPECT_TRUE(is_run(first));
  EXPECT_TRUE(is_run(first / "selections.h5"));
  EXPECT_FALSE(is_run(file("f1.h5")));
  EXPECT_FALSE(is_run(folder() / "missing"));
  EXPECT_THROW(compare_runs(first, file("f1.h5")), Error);
  EXPECT_THROW(compare_runs(first, first / "selections.h5"), Error);
}

}  // namespace
}  // namespace kvreplay
