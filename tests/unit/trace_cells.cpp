#include "analysis/trace_cells.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "analysis/compare_runs.h"
#include "analysis/run.h"
#include "edited_file.h"
#include "hdf5/hdf5.h"
#include "trace/synth.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

using hdf5::Dataset;
using hdf5::File;
using hdf5::Group;

class DamagedCells : public TraceFiles {
 protected:
  DamagedCells() {
    synthesise(synth_defaults("fixture"), file("f1.h5"));
    request_.traces = {file("f1.h5")};
    request_.policies = {ConfiguredPolicy::parse("h2o:recent=3")};
    request_.budgets = {Budget::parse("6")};
    request_.metrics = parse_metrics("kv_l1_loss");
    request_.output = folder() / "out";
    request_.threads = 1;
    id_ = run(request_).cells.at(0).id;
  }

  std::filesystem::path cells() const { return request_.output / "cells" / "f1.h5"; }

  /// What reading all of the file says after an edit, without its path.
  std::string refused(const std::function<void(Group&)>& edit) {
    std::filesystem::copy_file(cells(), file("edited.h5"), std::filesystem::copy_options::overwrite_existing);
    {
      Group opened = open_writable(file("edited.h5"));
      edit(opened);
    }
    try {
      const TraceCells read = read_trace_cells(file("edited.h5"));
      for (const CellRecord& cell : read.cells) read_selections(file("edited.h5"), cell.id, read.trace);
    } catch (const Error& error) {
      EXPECT_EQ(error.refusal(), Refusal::input);
      EXPECT_FALSE(error.expected().empty()) << error.what();
      EXPECT_FALSE(error.found().empty()) << error.what();
      return error.where().substr(error.where().find(".h5:") + 4) + ": " + error.problem();
    }
    return "read";
  }

  /// The same after one number of a set has become another.
  template <class Element>
  std::string refused_set(const std::string& name, std::size_t at, Element number) {
    const std::string message = refused([&](Group& opened) {
      Dataset dataset = opened.group("cells").group(id_).dataset(name);
      std::vector<Element> all = dataset.values<Element>();
      all.at(at) = number;
      dataset.write(hdf5::type_of<Element>(), all.data());
    });
    const std::string where = "/cells/" + id_ + "/" + name + ": ";
    return message.starts_with(where) ? message.substr(where.size()) : message;
  }

  /// The same after an attribute of the trace has become another.
  template <class Value>
  std::string refused_attribute(const std::string& group, const std::string& name, const Value& value) {
    return refused([&](Group& opened) {
      Group object = opened.group(group);
      H5Adelete(object.id(), name.c_str());
      object.set_attribute(name, value);
    });
  }

  RunRequest request_;
  std::string id_;
};

TEST_F(DamagedCells, UntouchedItIsRead) {
  EXPECT_EQ(refused([](Group&) {}), "read");
}

TEST_F(DamagedCells, Sets) {
  for (const auto& [row, offset] : {std::pair{0, 1}, {0, -1}, {1, -1}, {1, 100}, {8, 47}, {8, 49}})
    EXPECT_EQ((refused_set<std::int64_t>("offsets", static_cast<std::size_t>(row), offset)), "offsets") << offset;
  EXPECT_EQ((refused_set<std::int64_t>("offsets", 1, 5)), "/cells/" + id_ + "/positions: kept positions of row 1");
  EXPECT_EQ((refused_set<std::int32_t>("positions", 5, 11)), "read") << "the last of the 12 tokens";
  EXPECT_EQ((refused_set<std::int32_t>("positions", 5, 12)), "kept positions of row 0");
  EXPECT_EQ((refused_set<std::int32_t>("positions", 5, 10)), "kept positions of row 0") << "twice";
  EXPECT_EQ((refused_set<std::int32_t>("positions", 42, -1)), "kept positions of row 7");
  EXPECT_EQ((refused_set<std::int32_t>("sinks", 2, -1)), "sinks of layer 1");
  EXPECT_EQ((refused_set<std::int32_t>("sinks", 2, 13)), "sinks of layer 1");
  EXPECT_EQ((refused_set<std::int32_t>("recent", 0, 13)), "recent tokens of layer 0");
  EXPECT_EQ((refused_set<std::int32_t>("recent", 0, 2147483647)), "recent tokens of layer 0");
  EXPECT_EQ((refused_set<std::int32_t>("budget", 0, -1)), "budget of layer 0");
  EXPECT_EQ((refused_set<std::int32_t>("layer_source", 3, 4)), "source of layer 3");
  EXPECT_EQ((refused_set<std::int32_t>("layer_source", 3, -1)), "source of layer 3");
}

TEST_F(DamagedCells, Shapes) {
  const auto replaced = [&](const std::string& group, const std::string& name, const hdf5::Shape& shape) {
    return refused([&](Group& opened) {
      Group object = opened.group(group);
      remove(object, name);
      const std::vector<double> zeros(hdf5::elements(shape));
      object.write(name, std::span<const double>(zeros), shape);
    });
  };
  EXPECT_EQ(replaced("seconds", id_, {3, 2}), "/seconds/" + id_ + ": shape");
  EXPECT_EQ(replaced("seconds", "observables", {1}), "/seconds/observables: shape");
  EXPECT_EQ(replaced("cells/" + id_, "sinks", {2, 4}), "/cells/" + id_ + "/sinks: shape");
  EXPECT_EQ(replaced("cells/" + id_, "offsets", {8}), "/cells/" + id_ + "/offsets: shape");
  EXPECT_EQ(replaced("traces/f1", "eval_attention", {4, 11}), "/traces/f1/eval_attention: shape");
}

TEST_F(DamagedCells, FactsAndNames) {
  EXPECT_EQ(refused_attribute("traces/f1", "layers", std::int64_t{5}), "/traces/f1@layer_index: layers");
  EXPECT_EQ(refused_attribute("traces/f1", "layers", std::int64_t{1} << 40), "/traces/f1@layers: range");
  EXPECT_EQ(refused_attribute("traces/f1", "boundary", std::int64_t{1000}), "/traces/f1@boundary: range");
  EXPECT_EQ(refused_attribute("traces/f1", "kv_heads", std::int64_t{0}), "/traces/f1@kv_heads: range");
  EXPECT_EQ(refused_attribute("values/" + id_, "heads", std::string("both")), "/values/" + id_ + "@heads: heads");
  EXPECT_EQ(refused_attribute("cells/" + id_, "heads", std::string("both")), "/cells/" + id_ + "@heads: heads");
  EXPECT_EQ(refused_attribute("values/" + id_, "seed", std::string("1x")), "/values/" + id_ + "@seed: number");
  for (const std::vector<std::int32_t>& treated : {std::vector<std::int32_t>{0, 1, 2, 4}, {1, 1}, {-1}, {2, 0}})
    EXPECT_EQ(refused([&](Group& opened) {
                const Group group = opened.group("traces/f1");
                H5Adelete(group.id(), "treated");
                const hdf5::Space space = hdf5::Space::of({treated.size()});
                const hdf5::Handle attribute{
                    H5Acreate2(group.id(), "treated", H5T_STD_I32LE, space.id(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose};
                H5Awrite(attribute.id(), H5T_NATIVE_INT32, treated.data());
              }),
              "/traces/f1@treated: layers");
}

/// Cells that hold more than one fixed set a row.
class CellsOverTime : public DamagedCells {
 protected:
  void asked(const std::string& policy) {
    request_.policies = {ConfiguredPolicy::parse(policy)};
    request_.output = folder() / "over_time";
    for (const CellRecord& cell : run(request_).cells)
      if (cell.role == "asked") id_ = cell.id;
    path_ = request_.output / "cells" / "f1.h5";
  }
  std::vector<LayerSelection> read() const { return read_selections(path_, id_, read_trace_cells(path_).trace); }

  /// What reading says after an edit of a dataset of the cell.
  template <class Element>
  std::string refused_number(const std::string& name, std::size_t at, Element number) {
    std::filesystem::copy_file(path_, file("edited.h5"), std::filesystem::copy_options::overwrite_existing);
    {
      Group opened = open_writable(file("edited.h5"));
      Dataset dataset = opened.group("cells").group(id_).dataset(name);
      std::vector<Element> all = dataset.values<Element>();
      all.at(at) = number;
      dataset.write(hdf5::type_of<Element>(), all.data());
    }
    try {
      read_selections(file("edited.h5"), id_, read_trace_cells(file("edited.h5")).trace);
    } catch (const Error& error) {
      EXPECT_EQ(error.refusal(), Refusal::input);
      return error.what();
    }
    return "read";
  }

  std::filesystem::path path_;
};

TEST_F(CellsOverTime, EvictionsReadBack) {
  asked("sca:schedule=threshold(8,4),recent=1");
  const std::vector<LayerSelection> layers = read();
  ASSERT_EQ(layers.size(), 4U);
  for (const LayerSelection& layer : layers) {
    EXPECT_EQ(layer.evicted_at,
              (std::vector<std::int32_t>{7, -1, 11, 11, 7, 7, 7, 11, 11, -1, 15, -1, 15, 15, 15, -1}));
    EXPECT_EQ(layer.set.positions(0), (std::vector<std::int32_t>{1, 9, 10, 11}));
    EXPECT_EQ(layer.source, 3);
  }
  EXPECT_EQ(refused_number<std::int32_t>("evicted_at", 1, -1), "read");
  EXPECT_NE(refused_number<std::int32_t>("evicted_at", 0, -2), "read");
  EXPECT_NE(refused_number<std::int32_t>("evicted_at", 0, 16), "read");
  EXPECT_NE(refused_number<std::int32_t>("evicted_at", 9, 8), "read") << "before it came";
}

TEST_F(CellsOverTime, SlotsReadBack) {
  asked("finch:question=last,question_tokens=2,blocks=5,order=relevance");
  for (const LayerSelection& layer : read()) {
    std::vector<std::int32_t> ascending = layer.slots;
    std::ranges::sort(ascending);
    EXPECT_EQ(ascending, layer.set.positions(0));
    EXPECT_EQ((std::vector<std::int32_t>(layer.slots.end() - 2, layer.slots.end())),
              (std::vector<std::int32_t>{10, 11}));
  }
  EXPECT_NE(refused_number<std::int32_t>("slots", 0, 99), "read");
  EXPECT_NE(refused_number<std::int32_t>("slots", 5, 10), "read") << "twice";
}

TEST_F(CellsOverTime, GranularitiesThatDiffer) {
  asked("layers:0-1=(chunkkv:chunk=3,window=2),2=(h2o:recent=3),3=(h2o:recent=3,heads=query)");
  const std::vector<LayerSelection> layers = read();
  const Heads heads[] = {Heads::layer, Heads::layer, Heads::kv, Heads::query};
  const int rows[] = {1, 1, 2, 4};
  for (std::size_t l = 0; l < 4; ++l) {
    EXPECT_EQ(layers[l].set.heads(), heads[l]) << "layer " << l;
    EXPECT_EQ(layers[l].set.rows(), rows[l]) << "layer " << l;
    EXPECT_EQ(layers[l].granted.size(), static_cast<std::size_t>(rows[l])) << "layer " << l;
  }
  EXPECT_EQ(layers[0].set.positions(0), (std::vector<std::int32_t>{0, 1, 2, 3, 10, 11}));
  EXPECT_EQ(layers[2].set.positions(1), (std::vector<std::int32_t>{0, 1, 4, 9, 10, 11}));
}

TEST_F(CellsOverTime, WhatKeepsAllButChangesItHasNoRows) {
  asked("kivi:bits=2,group=4,residual=4");
  EXPECT_TRUE(read_trace_cells(path_).find(id_)->keeps_all_changed);
  {
    const Group group = File::open(path_).group("cells").group(id_);
    EXPECT_EQ(group.string_attribute("sets"), "all");
    EXPECT_EQ(group.dataset("positions").shape(), (hdf5::Shape{0}));
  }
  for (const LayerSelection& layer : read())
    for (int row = 0; row < layer.set.rows(); ++row) EXPECT_EQ(layer.set.count(row), 12);
}

TEST_F(CellsOverTime, AMetricThatIsAddedSeesTheStoredSets) {
  for (const char* policy : {"sca:schedule=threshold(8,4),recent=1", "kivi:bits=2,group=4,residual=4",
                             "finch:question=last,question_tokens=2,blocks=5,order=relevance",
                             "layers:0-2=(chunkkv:chunk=3,window=2),3=(h2o:heads=query)"}) {
    SCOPED_TRACE(policy);
    request_.policies = {ConfiguredPolicy::parse(policy)};
    request_.metrics = parse_metrics("kv_l1_loss");
    request_.output = folder() / "added";
    request_.force = false;
    run(request_);
    request_.metrics = parse_metrics("");
    const auto added = run(request_).cells.at(0).values;
    request_.output = folder() / "whole";
    const auto whole = run(request_).cells.at(0).values;
    ASSERT_EQ(added.size(), whole.size());
    for (const auto& [metric, values] : whole) {
      const double value = values.values().back(), other = added.at(metric).values().back();
      EXPECT_TRUE(value == other || (std::isnan(value) && std::isnan(other))) << metric.text();
    }
    std::filesystem::remove_all(folder() / "added");
    std::filesystem::remove_all(folder() / "whole");
  }
}

TEST_F(DamagedCells, Metrics) {
  const auto of_metrics = [&](std::string_view metrics, const hdf5::Shape& numbers) {
    return refused([&](Group& opened) {
      Group group = opened.group("values/" + id_);
      remove(group, "metrics");
      remove(group, "numbers");
      group.write_text("metrics", metrics);
      const std::vector<double> zeros(hdf5::elements(numbers));
      group.write("numbers", std::span<const double>(zeros), numbers);
    });
  };
  const std::string metrics = "/values/" + id_ + "/metrics: ", numbers = "/values/" + id_ + "/numbers: shape";
  for (const char* shape : {"2,1", "5,0", "5,6", "5,-1", "99999999999,1", "x,1", "5,1x"})
    EXPECT_EQ(of_metrics("kv_l1_loss,," + std::string(shape) + "\n", {5}), metrics + "shape") << shape;
  for (const char* name : {"beauty,", "kv_l1_loss,of.nothing"})
    EXPECT_EQ(of_metrics(std::string(name) + ",5,1\n", {5}), metrics + "metric") << name;
  EXPECT_EQ(of_metrics("kv_l1_loss,,5,1\nkv_l1_loss,,5,1\n", {10}), metrics + "metric");
  EXPECT_EQ(of_metrics("kv_l1_loss,,5\n", {5}), metrics + "line");
  EXPECT_EQ(of_metrics(std::string(70'000, ','), {5}), metrics + "length");
  for (const hdf5::Shape& shape : {hdf5::Shape{0}, {4}, {6}, {}, {5, 1}})
    EXPECT_EQ(of_metrics("kv_l1_loss,,5,1\n", shape), numbers);
}

/// Nothing is computed for results that could not be assembled.
TEST_F(DamagedCells, OfAnotherVersion) {
  {
    Group opened = open_writable(cells());
    H5Adelete(opened.id(), "version");
    opened.set_attribute("version", std::int64_t{3});
  }
  const auto refusal = [&] {
    try {
      run(request_);
    } catch (const Error& error) {
      return error.problem();
    }
    return std::string("none");
  };
  EXPECT_EQ(refusal(), "results of another format version");
  std::filesystem::rename(cells(), request_.output / "cells/other.h5");
  EXPECT_EQ(refusal(), "results of another format version");
  EXPECT_FALSE(std::filesystem::exists(cells()));
  request_.force = true;
  EXPECT_EQ(refusal(), "results of another format version");
  std::filesystem::rename(request_.output / "cells/other.h5", cells());
  EXPECT_EQ(refusal(), "none");
}

TEST_F(DamagedCells, ForceReplacesIt) {
  {
    Group opened = open_writable(cells());
    remove(opened, "traces/f1/eval_attention");
    remove(opened, "values/" + id_);
  }
  EXPECT_THROW(run(request_), Error);
  request_.force = true;
  EXPECT_EQ(run(request_).failed(), 0);
  EXPECT_EQ(read_trace_cells(cells()).cells.size(), 4U);
}

TEST_F(DamagedCells, JoinedFilesAreWhole) {
  const TraceCells all = read_trace_cells(cells());
  write_joined_cells(file("joined.h5"), all, {cells(), cells()});
  EXPECT_TRUE(compare_runs(file("joined.h5"), cells()).empty());
  remove(open_writable(cells()), "cells/" + id_);
  EXPECT_THROW(write_joined_cells(file("less.h5"), all, {cells()}), Error);
  EXPECT_FALSE(std::filesystem::exists(file("less.h5")));
}

}  // namespace
}  // namespace kvreplay
