#include <gtest/gtest.h>

#include <functional>

#include "analysis/part.h"
#include "analysis/run.h"
#include "trace/hdf5.h"
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
  EXPECT_EQ((refused_set<std::int64_t>("offsets", 0, -5)), "offsets");
  EXPECT_EQ((refused_set<std::int64_t>("offsets", 1, 1 << 30)), "offsets");
  EXPECT_EQ((refused_set<std::int64_t>("offsets", 8, 1 << 30)), "offsets");
  EXPECT_EQ((refused_set<std::int32_t>("positions", 0, -1)), "kept position of layer 0");
  EXPECT_EQ((refused_set<std::int32_t>("positions", 5, 12)), "kept position of layer 0");
  EXPECT_EQ((refused_set<std::int32_t>("positions", 1, 0)), "kept position of layer 0");
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
  EXPECT_EQ(replaced("traces/f1", "eval_attention", {4, 11}), "/traces/f1/eval_attention: shape");
  for (const hdf5::Shape& shape : {hdf5::Shape{2, 1}, {5, 0}, {5, 6}, {5}})
    EXPECT_EQ(refused([&](File& opened) {
                Group group = opened.group("values/" + id_);
                group.remove("000");
                const std::vector<double> zeros(hdf5::elements(shape));
                Dataset dataset = group.write("000", std::span<const double>(zeros), shape);
                dataset.set_attribute("metric", "kv_l1_loss");
                dataset.set_attribute("variant", "");
              }),
              "/values/" + id_ + "/000: shape");
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

TEST_F(DamagedPart, Metrics) {
  for (const auto& [name, value] : {std::pair{"metric", "beauty"}, {"variant", "of.nothing"}})
    EXPECT_EQ(refused([&](File& opened) {
                Dataset dataset = opened.group("values/" + id_).dataset("000");
                H5Adelete(dataset.id(), name);
                dataset.set_attribute(name, std::string_view(value));
              }),
              "/values/" + id_ + "/000: metric");
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

}  // namespace
}  // namespace kvreplay
