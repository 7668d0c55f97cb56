#include "replay/stored_observables.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <limits>

#include "analysis/compare_runs.h"
#include "analysis/run.h"
#include "edited_file.h"
#include "hdf5/hdf5.h"
#include "hdf5/partial_file.h"
#include "trace/synth.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;

constexpr const char* cumulative = "cumulative_attention";

fs::path fixture(const fs::path& path) {
  synthesise(synth_defaults("fixture"), path);
  return path;
}

/// The fixture: 4 layers, 4 query heads, 12 tokens of prompt.
class StoredObservablesOf : public TraceFiles {
 protected:
  static Matrix numbers(double first) {
    Matrix values(4, 12);
    for (double& value : values.values()) value = first += 0.125;
    return values;
  }
  static bool same(const std::optional<Matrix>& a, const Matrix& b) {
    return a && std::ranges::equal(a->values(), b.values());
  }

  void keep(const ObservableKey& of, int layer, const Matrix& values) const {
    StoredObservables store(trace, of, true);
    store.keep(cumulative, layer, values);
    store.finish();
    EXPECT_TRUE(store.warnings().empty()) << store.warnings().front();
  }
  std::optional<Matrix> found(const ObservableKey& of, int layer) const {
    StoredObservables store(trace, of, false);
    std::optional<Matrix> values = store.find(cumulative, layer, 4, 12);
    EXPECT_TRUE(store.warnings().empty()) << store.warnings().front();
    return values;
  }
  /// What a read that finds nothing says.
  std::string refusal(int rows = 4) const {
    StoredObservables store(trace, key, false);
    EXPECT_FALSE(store.find(cumulative, 2, rows, 12));
    EXPECT_FALSE(store.find(cumulative, 2, rows, 12));
    EXPECT_TRUE(store.read().empty());
    return store.warnings().size() == 1 ? store.warnings().front() : "not one warning";
  }
  void change(const std::function<void(hdf5::Group&)>& how) const {
    hdf5::Group opened = open_writable(path);
    how(opened);
  }

  Trace trace = Trace::open(fixture(file("a.h5")));
  ObservableKey key{trace.hash(), 1, "cpu avx2", 12};
  fs::path path = file("a.obs.h5");
};

TEST_F(StoredObservablesOf, WhatWasKeptIsReadBitForBit) {
  EXPECT_EQ(observables_path(trace), path);
  keep(key, 2, numbers(1.0 / 3));
  EXPECT_TRUE(same(found(key, 2), numbers(1.0 / 3)));
  EXPECT_FALSE(found(key, 1));
  StoredObservables store(trace, key, false);
  EXPECT_TRUE(store.holds(cumulative, 2));
  EXPECT_FALSE(store.holds("key_similarity", 2));
  store.find(cumulative, 2, 4, 12);
  EXPECT_EQ(store.read(), (LayersOf{{cumulative, {2}}}));
}

TEST_F(StoredObservablesOf, AnEntryOfAnotherKeyIsNeverUsed) {
  keep(key, 2, numbers(1));
  const std::vector<ObservableKey> others{{std::string(32, '0'), 1, "cpu avx2", 12},
                                          {trace.hash(), 2, "cpu avx2", 12},
                                          {trace.hash(), 1, "cpu avx512", 12},
                                          {trace.hash(), 1, "cpu avx2", 11}};
  for (const ObservableKey& other : others) EXPECT_FALSE(found(other, 2)) << other.backend << other.boundary;
  EXPECT_TRUE(found(key, 2));
}

TEST_F(StoredObservablesOf, WhatIsStillOfUseStaysBesideWhatIsKept) {
  ObservableKey avx512 = key, old = key;
  avx512.backend = "cpu avx512";
  old.numerics = 0;
  keep(old, 2, numbers(9));
  keep(key, 2, numbers(1));
  keep(key, 3, numbers(2));
  keep(avx512, 0, numbers(3));
  EXPECT_TRUE(same(found(key, 2), numbers(1)));
  EXPECT_TRUE(same(found(key, 3), numbers(2)));
  EXPECT_TRUE(same(found(avx512, 0), numbers(3)));
  EXPECT_FALSE(found(old, 2)) << "numbers that no run can use go";
  const std::vector<StoredEntry> entries = list_observables(path);
  ASSERT_EQ(entries.size(), 2U);
  EXPECT_EQ(entries[0].key, key);
  EXPECT_EQ(entries[0].layers, (LayersOf{{cumulative, {2, 3}}}));
}

TEST_F(StoredObservablesOf, NothingIsWrittenUnasked) {
  StoredObservables store(trace, key, false);
  store.keep(cumulative, 2, numbers(1));
  store.finish();
  EXPECT_FALSE(fs::exists(path));
  EXPECT_FALSE(fs::exists(path.string() + ".partial"));
}

TEST_F(StoredObservablesOf, WhatAnExceptionInterruptsIsKept) {
  {
    StoredObservables store(trace, key, true);
    store.keep(cumulative, 2, numbers(1));
    EXPECT_FALSE(fs::exists(path));
  }
  EXPECT_TRUE(found(key, 2));
}

TEST_F(StoredObservablesOf, OneRunWritesAtATime) {
  StoredObservables first(trace, key, true), second(trace, key, true);
  first.keep(cumulative, 2, numbers(1));
  second.keep(cumulative, 3, numbers(2));
  second.keep(cumulative, 1, numbers(2));
  ASSERT_EQ(second.warnings().size(), 1U);
  EXPECT_EQ(second.warnings().front(),
            path.string() + ".partial: another program is writing this file (observables are not kept)");
  first.finish();
  second.finish();
  EXPECT_TRUE(found(key, 2));
  EXPECT_FALSE(found(key, 3));
  keep(key, 3, numbers(2));
  EXPECT_TRUE(found(key, 3));
}

TEST_F(StoredObservablesOf, AFileThatCannotBeMadeIsOneWarning) {
  fs::create_directory(path.string() + ".partial");
  StoredObservables store(trace, key, true);
  for (int layer = 0; layer < 4; ++layer) store.keep(cumulative, layer, numbers(1));
  store.finish();
  ASSERT_EQ(store.warnings().size(), 1U);
  EXPECT_EQ(store.warnings().front(),
            path.string() + ".partial: cannot be made: Is a directory (observables are not kept)");
}

TEST_F(StoredObservablesOf, NumbersThatAreNoneAreNotKept) {
  Matrix values = numbers(1);
  values(1, 1) = std::numeric_limits<double>::quiet_NaN();
  keep(key, 2, values);
  EXPECT_FALSE(fs::exists(path));
}

TEST_F(StoredObservablesOf, ATruncatedFileIsRefused) {
  keep(key, 2, numbers(1));
  const auto length = fs::file_size(path);
  for (const auto left : {length - 1, length / 2, std::uintmax_t{100}, std::uintmax_t{20}, std::uintmax_t{0}}) {
    fs::resize_file(path, left);
    EXPECT_TRUE(refusal().starts_with(path.string() + ": length: expected ")) << left << refusal();
    EXPECT_TRUE(refusal().ends_with(" (stored observables are not used)")) << refusal();
  }
}

TEST_F(StoredObservablesOf, EveryChangedByteOfTheNumbersIsFound) {
  keep(key, 2, numbers(1));
  const std::uint64_t offset = *hdf5::File::open(path).group("000").group("002").dataset(cumulative).offset();
  const auto flip = [&](std::uint64_t at) {
    std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(offset + at));
    const auto changed = static_cast<char>(stream.get() ^ 1);
    stream.seekp(static_cast<std::streamoff>(offset + at));
    stream.put(changed);
  };
  for (const std::uint64_t at : {std::uint64_t{0}, std::uint64_t{100}, std::uint64_t{4 * 12 * 8 - 1}}) {
    flip(at);
    EXPECT_NE(refusal().find(": xxh3: expected the hash of its numbers"), std::string::npos) << refusal();
    flip(at);
  }
  EXPECT_TRUE(found(key, 2));
}

TEST_F(StoredObservablesOf, NumbersOfOtherConditionsAreFoundOut) {
  keep(key, 2, numbers(1));
  ObservableKey other = key;
  other.backend = "cpu avx512";
  change([](hdf5::Group& opened) { opened.group("000").set_attribute("backend", "cpu avx512"); });
  StoredObservables store(trace, other, false);
  EXPECT_TRUE(store.holds(cumulative, 2));
  EXPECT_FALSE(store.find(cumulative, 2, 4, 12));
  ASSERT_EQ(store.warnings().size(), 1U);
  EXPECT_NE(store.warnings().front().find("xxh3"), std::string::npos);
}

TEST_F(StoredObservablesOf, OtherShapesAndTypesAreRefused) {
  keep(key, 2, numbers(1));
  EXPECT_NE(refusal(9).find("shape of cumulative_attention: expected [9, 12], found [4, 12]"), std::string::npos);
  const auto replace = [&](const hdf5::Type& type, const hdf5::Shape& shape) {
    change([&](hdf5::Group& opened) {
      hdf5::Group layer = opened.group("000").group("002");
      remove(layer, cumulative);
      layer.create_dataset(cumulative, type, shape);
    });
  };
  replace(hdf5::Type::float64(), {12, 4});
  EXPECT_NE(refusal().find("shape: expected [heads, 12], contiguous, found [12, 4]"), std::string::npos) << refusal();
  replace(hdf5::Type::float32(), {4, 12});
  EXPECT_NE(refusal().find("float64"), std::string::npos) << refusal();
  change([](hdf5::Group& opened) {
    hdf5::Group layer = opened.group("000").group("002");
    remove(layer, cumulative);
    layer.create_group(cumulative);
  });
  EXPECT_NE(refusal().find("kind of cumulative_attention: expected a dataset"), std::string::npos) << refusal();
}

TEST_F(StoredObservablesOf, AnotherVersionOrFormatIsRefused) {
  keep(key, 2, numbers(1));
  change([](hdf5::Group& opened) { opened.set_attribute("version", std::int64_t{2}); });
  EXPECT_EQ(refusal(), path.string() + ": version: expected 1, found 2 (stored observables are not used)");
  fs::remove(path);
  fs::copy_file(trace.path(), path);
  EXPECT_EQ(refusal(), path.string() +
                           ": format: expected kvobservables, found another file"
                           " (stored observables are not used)");
}

TEST_F(StoredObservablesOf, AnotherFileIsNeverReplaced) {
  const auto refused = [&](const char* what, const fs::path& there) {
    const bool file = fs::is_regular_file(there);
    const auto length = file ? fs::file_size(there) : 0;
    StoredObservables store(trace, key, true);
    store.keep(cumulative, 2, numbers(5));
    store.finish();
    ASSERT_EQ(store.warnings().size(), 1U) << what;
    EXPECT_EQ(store.warnings().front(), path.string() +
                                            ": not a file of stored observables, or damaged; remove it first"
                                            " (observables are not kept)");
    EXPECT_EQ(fs::is_regular_file(there), file) << what;
    EXPECT_EQ(file ? fs::file_size(there) : 0, length) << what;
    EXPECT_FALSE(fs::exists(path.string() + ".partial"));
    fs::remove(path);
  };
  std::ofstream(path) << "notes";
  refused("text", path);
  fs::copy_file(trace.path(), path);
  refused("a trace", path);
  fs::create_directory(path);
  refused("a folder", path);
  fs::create_symlink("nowhere", path);
  refused("a link that leads nowhere", path);
  keep(key, 2, numbers(1));
  fs::resize_file(path, 1000);
  refused("its own, truncated", path);
}

TEST_F(StoredObservablesOf, AFileThatCameMeanwhileStays) {
  StoredObservables store(trace, key, true);
  store.keep(cumulative, 2, numbers(1));
  std::ofstream(path) << "notes";
  store.finish();
  EXPECT_EQ(store.warnings().size(), 1U);
  EXPECT_EQ(fs::file_size(path), 5U);
  EXPECT_FALSE(fs::exists(path.string() + ".partial"));
}

TEST_F(StoredObservablesOf, AMistakeOfOursIsOneWarningToo) {
  StoredObservables store(trace, key, true);
  store.keep(cumulative, 2, Matrix(0, 12));
  store.keep(cumulative, 3, numbers(1));
  store.finish();
  ASSERT_EQ(store.warnings().size(), 1U);
  EXPECT_TRUE(store.warnings().front().ends_with(" has no place in the file (observables are not kept)"))
      << store.warnings().front();
}

TEST_F(StoredObservablesOf, AFileIsKnownByItsRootNotByItsName) {
  keep(key, 2, numbers(1));
  const fs::path renamed = file("b.h5");
  fs::rename(path, renamed);
  fs::copy_file(trace.path(), path);
  EXPECT_TRUE(is_observables_file(renamed));
  for (const fs::path& other : {path, file("none.h5"), file("")}) EXPECT_FALSE(is_observables_file(other)) << other;
  const std::string own = trace.path().string();
  const std::vector<std::string> all{own, renamed.string(), path.string()};
  EXPECT_EQ(without_observables(all), all) << "one that is not named so, and a trace that is";
  fs::rename(renamed, path);
  EXPECT_EQ(without_observables({own, path.string()}), std::vector{own});
  EXPECT_EQ(without_observables({path.string()}), std::vector{path.string()});
}

TEST_F(StoredObservablesOf, WhatIsOutdatedIsReplacedByWhatIsKept) {
  keep(key, 2, numbers(1));
  change([](hdf5::Group& opened) { opened.set_attribute("version", std::int64_t{2}); });
  StoredObservables store(trace, key, true);
  store.keep(cumulative, 2, numbers(5));
  store.finish();
  EXPECT_EQ(store.warnings().size(), 1U);
  EXPECT_TRUE(same(found(key, 2), numbers(5)));
}

/// A run with stored observables has the bytes of one without.
class RunWithStoredObservables : public TraceFiles {
 protected:
  RunRequest request_of(const std::string& output, ObservableUse use, const std::string& boundary = "prompt") const {
    RunRequest request;
    request.traces = {file("a.h5")};
    request.policies = {ConfiguredPolicy::parse("h2o"), ConfiguredPolicy::parse("h2o:schedule=threshold(20,10)")};
    request.budgets = {Budget::parse("6")};
    request.metrics = parse_metrics("");
    request.boundary = boundary;
    request.observables = use;
    request.output = file(output);
    request.threads = 1;
    return request;
  }
  RunSummary replayed(const std::string& output, ObservableUse use, const std::string& boundary = "prompt") const {
    return run(request_of(output, use, boundary));
  }
  std::string results(const std::string& output) const {
    std::ifstream stream(file(output) / "results.csv", std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
};

TEST_F(RunWithStoredObservables, HasTheSameBytesAndSaysWhatItRead) {
  SynthOptions options = synth_defaults("gaussian");
  options.layers = 3;
  options.prefill = 40;
  options.head_dim = 8;
  synthesise(options, file("a.h5"));
  EXPECT_TRUE(replayed("without", ObservableUse::ignore).traces[0].read_observables.empty());
  EXPECT_FALSE(fs::exists(file("a.obs.h5")));
  EXPECT_TRUE(replayed("first", ObservableUse::keep).traces[0].read_observables.empty());
  const std::map<std::string, int> all{{cumulative, 3}, {"key_similarity", 3}, {"value_similarity", 3}};
  EXPECT_EQ(replayed("second", ObservableUse::use).traces[0].read_observables, all);
  EXPECT_TRUE(replayed("ignored", ObservableUse::ignore).traces[0].read_observables.empty());
  EXPECT_TRUE(replayed("shorter", ObservableUse::use, "30").traces[0].read_observables.empty());
  for (const char* output : {"first", "second", "ignored"}) {
    EXPECT_EQ(results(output), results("without")) << output;
    EXPECT_TRUE(compare_runs(file(output), file("without")).empty()) << output;
  }
}

TEST_F(RunWithStoredObservables, IsPlannedWithoutThePassesOfStoredMetrics) {
  synthesise(synth_defaults("fixture"), file("a.h5"));
  RunRequest request = request_of("first", ObservableUse::keep);
  request.metrics = parse_metrics("redundancy_key");
  EXPECT_EQ(PlannedRun(request).traces().at(0).demand.similarity_passes, 1.0);
  run(request);
  request.output = file("second");
  EXPECT_EQ(PlannedRun(request).traces().at(0).demand.similarity_passes, 0.0);
  request.metrics = parse_metrics("redundancy_key,redundancy_value");
  EXPECT_EQ(PlannedRun(request).traces().at(0).demand.similarity_passes, 1.0);
}

}  // namespace
}  // namespace kvreplay
