#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <iterator>

#include "analysis/compare_runs.h"
#include "analysis/run.h"
#include "hdf5/hdf5.h"
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

/// Selections beside which `edit` leaves something of its own in the group of the trace.
std::filesystem::path edited(const std::filesystem::path& run, const std::function<void(hdf5::Group&)>& edit) {
  const hdf5::File file = hdf5::File::open_writable(run / "selections.h5");
  const hdf5::Group traces = file.group("traces");
  hdf5::Group trace = traces.group(traces.names().front());
  edit(trace);
  return run / "selections.h5";
}

/// A chunked dataset of which nothing is stored.
void create_empty(const hdf5::Group& group, const hdf5::Type& type, const hdf5::Shape& shape) {
  const hdf5::Shape chunk(shape.size(), 4);
  const hdf5::Handle creation{H5Pcreate(H5P_DATASET_CREATE), H5Pclose};
  H5Pset_chunk(creation.id(), static_cast<int>(chunk.size()), chunk.data());
  const hdf5::Space space = hdf5::Space::of(shape);
  const hdf5::Handle made{
      H5Dcreate2(group.id(), "more", type.id(), space.id(), H5P_DEFAULT, creation.id(), H5P_DEFAULT), H5Dclose};
  ASSERT_GE(made.id(), 0);
}

TEST_F(CompareRuns, GroupsThatLeadBackToThemselvesAreComparedOnce) {
  const auto path = edited(results("first", "local"), [](hdf5::Group& trace) {
    H5Olink(trace.id(), trace.id(), "again", H5P_DEFAULT, H5P_DEFAULT);
    H5Olink(trace.id(), trace.id(), "and_again", H5P_DEFAULT, H5P_DEFAULT);
  });
  EXPECT_TRUE(compare_runs(path, path).equal());
}

TEST_F(CompareRuns, MoreElementsThanAFileCanHoldAreRefused) {
  constexpr hsize_t many = hsize_t{1} << 61;
  for (const hdf5::Shape& shape : {hdf5::Shape{many}, hdf5::Shape{many, 8}, hdf5::Shape{1 << 20, 1 << 16}}) {
    const auto path = edited(results("first", "local"), [&](hdf5::Group& trace) {
      if (trace.member("more") != hdf5::Group::Member::none) trace.remove("more");
      create_empty(trace, hdf5::Type::float32(), shape);
    });
    EXPECT_THROW(compare_runs(path, path), Error) << hdf5::to_string(shape);
  }
}

TEST_F(CompareRuns, ObjectsOfOtherKindsDifferAndOfAnyLengthAreRefused) {
  const auto with_group = edited(results("first", "local"), [](hdf5::Group& trace) { trace.create_group("more"); });
  const auto with_dataset =
      edited(results("second", "local"), [](hdf5::Group& trace) { create_empty(trace, hdf5::Type::int32(), {4}); });
  EXPECT_EQ(compare_runs(with_group, with_dataset).values.size(), 1U);
  const auto with_text = edited(results("third", "local"), [](hdf5::Group& trace) {
    const hdf5::Type any_length{H5Tcopy(H5T_C_S1), H5Tclose};
    H5Tset_size(any_length.id(), H5T_VARIABLE);
    create_empty(trace, any_length, {4});
  });
  EXPECT_THROW(compare_runs(with_text, with_text), Error);
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
