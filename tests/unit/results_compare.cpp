#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>

#include "analysis/compare_runs.h"
#include "analysis/run.h"
#include "edited_file.h"
#include "hdf5/hdf5.h"
#include "trace/synth.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

class CompareRuns : public TraceFiles {
 protected:
  CompareRuns() { synthesise(synth_defaults("fixture"), file("f1.h5")); }

  std::filesystem::path results(const std::string& name, const std::string& policies, const std::string& metrics = "",
                                const std::string& eval = "continuation") {
    RunRequest request;
    request.traces = {file("f1.h5")};
    for (const std::string& text : split_policies(policies)) request.policies.push_back(ConfiguredPolicy::parse(text));
    request.budgets = {Budget::parse("6")};
    request.metrics = parse_metrics(metrics);
    request.eval = eval;
    request.output = folder() / name;
    request.threads = 1;
    run(request);
    return request.output;
  }
};

/// The file of cells of a run.
std::filesystem::path cells(const std::filesystem::path& run) { return run / "cells" / "f1.h5"; }

/// The group of the run's only cell of this policy in /cells or /values.
hdf5::Group group_of(const hdf5::Group& file, const std::string& policy, const std::string& group) {
  for (const std::string& id : file.group("cells").names())
    if (file.group("cells").group(id).string_attribute("policy") == policy) return file.group(group).group(id);
  throw std::runtime_error("no cell of " + policy);
}

/// One number of a dataset becomes another.
template <class Element>
void change(const hdf5::Group& group, const std::string& name, std::size_t at, Element from, Element to) {
  hdf5::Dataset dataset = group.dataset(name);
  std::vector<Element> all = dataset.values<Element>();
  ASSERT_EQ(all.at(at), from);
  all[at] = to;
  dataset.write(hdf5::type_of<Element>(), all.data());
}

std::vector<std::string> lines(const std::vector<RunDifference>& differences) {
  std::vector<std::string> all;
  for (const auto& [where, first, second] : differences)
    all.push_back(where + ": " + first.value_or("none") + " | " + second.value_or("none"));
  return all;
}

using Lines = std::vector<std::string>;

TEST_F(CompareRuns, WhatOneSideLacks) {
  const auto first = results("first", "h2o"), second = results("second", "h2o,local");
  EXPECT_TRUE(compare_runs(first, first).empty());
  const Lines one_cell{"f1 local  6: none | there"};
  EXPECT_EQ(lines(compare_runs(first, second)), one_cell);
  EXPECT_EQ(lines(compare_runs(cells(first), cells(second))), one_cell);
  EXPECT_EQ(lines(compare_runs(second, first)), Lines{"f1 local  6: there | none"});
  std::filesystem::rename(cells(second), second / "cells" / "f2.h5");
  EXPECT_EQ(lines(compare_runs(first, second)), (Lines{"cells/f1.h5: there | none", "cells/f2.h5: none | there"}));
}

TEST_F(CompareRuns, MetricsThatOneSideLacks) {
  const auto few = results("few", "h2o", "held_tokens"), more = results("more", "h2o", "held_tokens,kv_l1_loss:key");
  for (const std::string& line : lines(compare_runs(few, more)))
    EXPECT_TRUE(line.ends_with(": kv_l1_loss:key: none | there")) << line;
  EXPECT_EQ(compare_runs(few, more).size(), 4U) << "a cell and its controls";
}

TEST_F(CompareRuns, ValuesBeyondTheTolerance) {
  const auto first = results("first", "h2o", "held_tokens"), second = results("second", "h2o", "held_tokens");
  {
    const hdf5::Group file = open_writable(cells(second));
    const hdf5::Group values = group_of(file, "h2o", "values");
    ASSERT_TRUE(values.dataset("metrics").text().starts_with("held_tokens,,5,1\n"));
    change<double>(values, "numbers", 1, 8.5, 8.75);
    change<double>(values, "numbers", 4, 8.5, 9);
  }
  const std::string cell = "f1 h2o " +
                           group_of(hdf5::File::open(cells(first)), "h2o", "values").string_attribute("params") +
                           " 6: held_tokens, ";
  EXPECT_EQ(lines(compare_runs(first, second)),
            (Lines{cell + "layer 1, head all: 8.5 | 8.75", cell + "layer all, head all: 8.5 | 9"}));
  EXPECT_EQ(lines(compare_runs(first, second, 0.25)), Lines{cell + "layer all, head all: 8.5 | 9"});
  EXPECT_TRUE(compare_runs(first, second, 0.5).empty());
}

TEST_F(CompareRuns, FactsOfACell) {
  const auto first = results("first", "h2o"), second = results("second", "h2o");
  {
    const hdf5::Group file = open_writable(cells(second));
    hdf5::Group values = group_of(file, "h2o", "values");
    H5Adelete(values.id(), "role");
    H5Adelete(values.id(), "kept_tokens");
    values.set_attribute("role", "control");
    values.set_attribute("kept_tokens", 7.0);
  }
  const auto all = compare_runs(first, second);
  ASSERT_EQ(all.size(), 2U);
  EXPECT_TRUE(all[0].first->starts_with("asked, heads kv") && all[0].second->starts_with("control, heads kv"));
  EXPECT_TRUE(all[1].where.ends_with(": kept tokens") && all[1].second == "7");
}

TEST_F(CompareRuns, OtherConditionsAreOneDifference) {
  const auto first = results("first", "h2o"), second = results("second", "h2o", "", "last:2");
  EXPECT_EQ(lines(compare_runs(first, second)), Lines{"f1: eval: continuation | last:2"});
}

TEST_F(CompareRuns, SetsThatDiffer) {
  const auto first = results("first", "h2o:recent=3"), second = results("second", "h2o:recent=3");
  change<std::int32_t>(group_of(open_writable(cells(second)), "h2o", "cells"), "positions", 2, 3, 4);
  const auto all = compare_runs(first, second);
  ASSERT_EQ(all.size(), 1U);
  EXPECT_TRUE(all[0].where.ends_with(" 6, layer 0, head 0")) << all[0].where;
  EXPECT_EQ(all[0].first, "3");
  EXPECT_EQ(all[0].second, "4");
}

/// Cells beside which `edit` leaves something of its own in the group of the trace.
std::filesystem::path edited(const std::filesystem::path& run, const std::function<void(hdf5::Group&)>& edit) {
  hdf5::Group trace = open_writable(cells(run)).group("traces/f1");
  edit(trace);
  return cells(run);
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
  EXPECT_TRUE(compare_runs(path, path).empty());
}

TEST_F(CompareRuns, MoreElementsThanAFileCanHoldAreRefused) {
  constexpr hsize_t many = hsize_t{1} << 61;
  for (const hdf5::Shape& shape : {hdf5::Shape{many}, hdf5::Shape{many, 8}, hdf5::Shape{1 << 20, 1 << 16}}) {
    const auto path = edited(results("first", "local"), [&](hdf5::Group& trace) {
      if (trace.member("more") != hdf5::Group::Member::none) remove(trace, "more");
      create_empty(trace, hdf5::Type::float32(), shape);
    });
    EXPECT_THROW(compare_runs(path, path), Error) << hdf5::to_string(shape);
  }
}

TEST_F(CompareRuns, ObjectsOfOtherKindsDifferAndOddElementsAreRefused) {
  const auto with_group = edited(results("first", "local"), [](hdf5::Group& trace) { trace.create_group("more"); });
  const auto with_dataset =
      edited(results("second", "local"), [](hdf5::Group& trace) { create_empty(trace, hdf5::Type::int32(), {4}); });
  EXPECT_EQ(compare_runs(with_group, with_dataset).size(), 1U);
  const auto with_text = edited(results("third", "local"), [](hdf5::Group& trace) {
    const hdf5::Type any_length{H5Tcopy(H5T_C_S1), H5Tclose};
    H5Tset_size(any_length.id(), H5T_VARIABLE);
    create_empty(trace, any_length, {4});
  });
  EXPECT_THROW(compare_runs(with_text, with_text), Error);
  const auto with_odd_integers = edited(results("fourth", "local"), [](hdf5::Group& trace) {
    const hdf5::Type odd{H5Tcopy(H5T_STD_I32LE), H5Tclose};
    H5Tset_precision(odd.id(), 5);
    create_empty(trace, odd, {4});
  });
  EXPECT_THROW(compare_runs(with_odd_integers, with_odd_integers), Error);
}

TEST_F(CompareRuns, OtherThingsAreRefused) {
  const auto first = results("first", "h2o");
  EXPECT_TRUE(is_run(first));
  EXPECT_TRUE(is_run(cells(first)));
  EXPECT_FALSE(is_run(file("f1.h5")));
  EXPECT_FALSE(is_run(folder() / "missing"));
  EXPECT_THROW(compare_runs(first, file("f1.h5")), Error);
  EXPECT_THROW(compare_runs(first, cells(first)), Error);
}

}  // namespace
}  // namespace kvreplay
