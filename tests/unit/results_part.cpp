#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "analysis/part.h"
#include "analysis/run.h"
#include "hdf5/hdf5.h"
#include "trace/synth.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

using hdf5::Dataset;
using hdf5::File;
using hdf5::Group;

class DamagedPart : public TraceFiles {
 protected:
  DamagedPart() {
    synthesise(synth_defaults("fixture"), file("f1.h5"));
    request_.traces = {file("f1.h5")};
    request_.policies = {ConfiguredPolicy::parse("h2o:recent=3")};
    request_.budgets = {Budget::parse("6")};
    request_.metrics = parse_metrics("kv_l1_loss");
    request_.output = folder() / "out";
    request_.threads = 1;
    id_ = run(request_).cells.at(0).id;
  }

  std::filesystem::path part() const { return request_.output / "parts" / "f1.h5"; }

  /// What reading all of the part says after an edit, without its path.
  std::string refused(const std::function<void(File&)>& edit) {
    std::filesystem::copy_file(part(), file("part.h5"), std::filesystem::copy_options::overwrite_existing);
    {
      File opened = File::open_writable(file("part.h5"));
      edit(opened);
    }
    try {
      const Part read = read_part(file("part.h5"));
      for (const PartCell& cell : read.cells) read_selections(file("part.h5"), cell.id, read.trace);
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
    const std::string message = refused([&](File& opened) {
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
    return refused([&](File& opened) {
      Group object = opened.group(group);
      H5Adelete(object.id(), name.c_str());
      object.set_attribute(name, value);
    });
  }

  RunRequest request_;
  std::string id_;
};

TEST_F(DamagedPart, UntouchedItIsRead) {
  EXPECT_EQ(refused([](File&) {}), "read");
}

TEST_F(DamagedPart, Sets) {
  const auto refused_bits = [&](std::size_t row, std::int64_t bits) {
    return refused([&](File& opened) {
      Dataset dataset = opened.group("sets").dataset(id_);
      std::vector<std::int64_t> all = dataset.values<std::int64_t>();
      all.at(row) = bits;
      dataset.write(hdf5::Type::int64(), all.data());
    });
  };
  EXPECT_EQ(refused_bits(0, 0xFFF), "read") << "all of the 12 tokens";
  EXPECT_EQ(refused_bits(0, 0x1000), "/sets/" + id_ + ": kept position of layer 0");
  EXPECT_EQ(refused_bits(7, -1), "/sets/" + id_ + ": kept position of layer 3");
  EXPECT_EQ((refused_set<std::int32_t>("sinks", 2, -1)), "sinks of layer 1");
  EXPECT_EQ((refused_set<std::int32_t>("sinks", 2, 13)), "sinks of layer 1");
  EXPECT_EQ((refused_set<std::int32_t>("recent", 0, 13)), "recent tokens of layer 0");
  EXPECT_EQ((refused_set<std::int32_t>("recent", 0, 2147483647)), "recent tokens of layer 0");
  EXPECT_EQ((refused_set<std::int32_t>("budget", 0, -1)), "budget of layer 0");
  EXPECT_EQ((refused_set<std::int32_t>("layer_source", 3, 4)), "source of layer 3");
  EXPECT_EQ((refused_set<std::int32_t>("layer_source", 3, -1)), "source of layer 3");
}

TEST_F(DamagedPart, Shapes) {
  const auto replaced = [&](const std::string& group, const std::string& name, const hdf5::Shape& shape) {
    return refused([&](File& opened) {
      Group object = opened.group(group);
      object.remove(name);
      const std::vector<double> zeros(hdf5::elements(shape));
      object.write(name, std::span<const double>(zeros), shape);
    });
  };
  EXPECT_EQ(replaced("seconds", id_, {3, 2}), "/seconds/" + id_ + ": shape");
  EXPECT_EQ(replaced("seconds", "observables", {1}), "/seconds/observables: shape");
  EXPECT_EQ(replaced("cells/" + id_, "sinks", {2, 4}), "/cells/" + id_ + "/sinks: shape");
  EXPECT_EQ(replaced("sets", id_, {4, 2, 2}), "/sets/" + id_ + ": shape");
  EXPECT_EQ(replaced("traces/f1", "eval_attention", {4, 11}), "/traces/f1/eval_attention: shape");
}

TEST_F(DamagedPart, FactsAndNames) {
  EXPECT_EQ(refused_attribute("traces/f1", "layers", std::int64_t{5}), "/traces/f1@layer_index: layers");
  EXPECT_EQ(refused_attribute("traces/f1", "layers", std::int64_t{1} << 40), "/traces/f1@layers: range");
  EXPECT_EQ(refused_attribute("traces/f1", "boundary", std::int64_t{1000}), "/traces/f1@boundary: range");
  EXPECT_EQ(refused_attribute("traces/f1", "kv_heads", std::int64_t{0}), "/traces/f1@kv_heads: range");
  EXPECT_EQ(refused_attribute("values/" + id_, "heads", std::string("both")), "/values/" + id_ + "@heads: heads");
  EXPECT_EQ(refused_attribute("cells/" + id_, "heads", std::string("both")), "/cells/" + id_ + "@heads: heads");
  EXPECT_EQ(refused_attribute("values/" + id_, "seed", std::string("1x")), "/values/" + id_ + "@seed: number");
  for (const std::vector<std::int32_t>& treated : {std::vector<std::int32_t>{0, 1, 2, 4}, {1, 1}, {-1}, {2, 0}})
    EXPECT_EQ(refused([&](File& opened) {
                const Group group = opened.group("traces/f1");
                H5Adelete(group.id(), "treated");
                const hdf5::Space space = hdf5::Space::of({treated.size()});
                const hdf5::Handle attribute{
                    H5Acreate2(group.id(), "treated", H5T_STD_I32LE, space.id(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose};
                H5Awrite(attribute.id(), H5T_NATIVE_INT32, treated.data());
              }),
              "/traces/f1@treated: layers");
}

/// Parts whose cells hold more than one fixed set a row.
class PartsOverTime : public DamagedPart {
 protected:
  void asked(const std::string& policy) {
    request_.policies = {ConfiguredPolicy::parse(policy)};
    request_.output = folder() / "over_time";
    for (const CellSummary& cell : run(request_).cells)
      if (cell.role == "asked") id_ = cell.id;
    path_ = request_.output / "parts" / "f1.h5";
  }
  std::vector<LayerSelection> read() const { return read_selections(path_, id_, read_part(path_).trace); }

  /// What reading says after an edit of a dataset of the cell.
  template <class Element>
  std::string refused_number(const std::string& name, std::size_t at, Element number) {
    std::filesystem::copy_file(path_, file("edited.h5"), std::filesystem::copy_options::overwrite_existing);
    {
      File opened = File::open_writable(file("edited.h5"));
      Dataset dataset = opened.group("cells").group(id_).dataset(name);
      std::vector<Element> all = dataset.values<Element>();
      all.at(at) = number;
      dataset.write(hdf5::type_of<Element>(), all.data());
    }
    try {
      read_selections(file("edited.h5"), id_, read_part(file("edited.h5")).trace);
    } catch (const Error& error) {
      EXPECT_EQ(error.refusal(), Refusal::input);
      return error.what();
    }
    return "read";
  }

  std::filesystem::path path_;
};

TEST_F(PartsOverTime, EvictionsReadBack) {
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

TEST_F(PartsOverTime, SlotsReadBack) {
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

TEST_F(PartsOverTime, GranularitiesThatDiffer) {
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

TEST_F(PartsOverTime, WhatKeepsAllButChangesItHasNoRows) {
  asked("kivi:bits=2,group=4,residual=4");
  const Part part = read_part(path_);
  EXPECT_TRUE(part.find(id_)->keeps_all_changed);
  {
    const File opened = File::open(request_.output / "selections.h5");
    const Group group = opened.group("cells").group(id_);
    EXPECT_EQ(group.string_attribute("sets"), "all");
    EXPECT_EQ(group.dataset("positions").shape(), (hdf5::Shape{0}));
  }
  for (const LayerSelection& layer : read())
    for (int row = 0; row < layer.set.rows(); ++row) EXPECT_EQ(layer.set.count(row), 12);
}

TEST_F(PartsOverTime, AMetricThatIsAddedSeesTheStoredSets) {
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
    for (const auto& [metric, value] : whole) {
      const double other = added.at(metric);
      EXPECT_TRUE(value == other || (std::isnan(value) && std::isnan(other))) << metric.text();
    }
    std::filesystem::remove_all(folder() / "added");
    std::filesystem::remove_all(folder() / "whole");
  }
}

TEST_F(DamagedPart, Metrics) {
  const auto of_metrics = [&](std::string_view metrics, const hdf5::Shape& numbers) {
    return refused([&](File& opened) {
      Group group = opened.group("values/" + id_);
      group.remove("metrics");
      group.remove("numbers");
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
TEST_F(DamagedPart, OfAnotherVersion) {
  {
    File opened = File::open_writable(part());
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
  EXPECT_EQ(refusal(), "part of another version of kvreplay");
  std::filesystem::rename(part(), request_.output / "parts/other.h5");
  EXPECT_EQ(refusal(), "part of another version of kvreplay");
  EXPECT_FALSE(std::filesystem::exists(part()));
  request_.force = true;
  EXPECT_EQ(refusal(), "part of another version of kvreplay");
  std::filesystem::rename(request_.output / "parts/other.h5", part());
  EXPECT_EQ(refusal(), "none");
}

TEST_F(DamagedPart, ForceReplacesIt) {
  {
    File opened = File::open_writable(part());
    opened.group("traces/f1").remove("eval_attention");
    opened.group("values").remove(id_);
  }
  EXPECT_THROW(run(request_), Error);
  request_.force = true;
  EXPECT_EQ(run(request_).failed(), 0);
  EXPECT_EQ(read_part(part()).cells.size(), 4U);
}

/// A run may replace a part between the reading of its numbers and the copying of its sets.
TEST_F(DamagedPart, JoinedPartsHoldTheCellsThatWereReadAndNoOthers) {
  Part joined = read_part(part());
  const Part all = joined;
  joined.cells.resize(1);
  write_joined_part(file("joined.h5"), joined, {part(), part()});
  const Part written = read_part(file("joined.h5"));
  ASSERT_GT(all.cells.size(), 1U);
  ASSERT_EQ(written.cells.size(), 1U);
  EXPECT_EQ(File::open(file("joined.h5")).group("cells").names(), std::vector{joined.cells.front().id});
  EXPECT_EQ(File::open(file("joined.h5")).group("sets").names(), std::vector{joined.cells.front().id});
  EXPECT_THROW(write_joined_part(file("all.h5"), all, {file("joined.h5")}), Error);
  EXPECT_FALSE(std::filesystem::exists(file("all.h5")));
}

}  // namespace
}  // namespace kvreplay
