#include "analysis/format_1.h"

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <iterator>

#include "analysis/compare_runs.h"
#include "analysis/merge.h"
#include "analysis/results.h"
#include "analysis/run.h"
#include "analysis/stored_cell.h"
#include "edited_file.h"
#include "trace/synth.h"
#include "trace_files.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;

std::string refusal(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::input);
    return error.what();
  }
  return "none";
}

/// The positions of a cell become bits: [treated layers, H, words of 64 tokens].
void store_bits(const hdf5::Group& cell, hdf5::Group& sets, const std::string& id, std::size_t tokens) {
  const auto offsets = cell.dataset("offsets").values<std::int64_t>();
  const auto positions = cell.dataset("positions").values<std::int32_t>();
  const auto sources = cell.dataset("layer_source").values<std::int32_t>();
  const std::size_t rows = (offsets.size() - 1) / sources.size(), words = (tokens + 63) / 64;
  std::vector<std::int64_t> bits;
  for (std::size_t r = 0; r + 1 < offsets.size(); ++r) {
    if (sources[r / rows] < 0) continue;
    std::vector<std::uint64_t> row(words);
    for (std::int64_t i = offsets[r]; i < offsets[r + 1]; ++i) {
      const auto position = static_cast<std::size_t>(positions[static_cast<std::size_t>(i)]);
      row[position / 64] |= std::uint64_t{1} << position % 64;
    }
    if (cell.has_attribute("sets"))
      for (std::size_t token = 0; token < tokens; ++token) row[token / 64] |= std::uint64_t{1} << token % 64;
    bits.insert(bits.end(), row.begin(), row.end());
  }
  sets.write(id, std::span<const std::int64_t>(bits), {bits.size() / rows / words, rows, words});
  remove(cell, "offsets");
  remove(cell, "positions");
}

class Format1 : public TraceFiles {
 protected:
  /// Three layers, of which the second is not treated; rows of two words.
  Format1() {
    SynthOptions options = synth_defaults("gaussian");
    options.layers = 3;
    options.head_dim = 8;
    options.prefill = 100;
    options.continuation = 4;
    options.sliding_window = {0, 16, 0};
    synthesise(options, file("a.h5"));
    run_into(now_, "h2o,kivi:bits=2,group=4,residual=4,sca:schedule=threshold(40,20)");
    fs::copy(now_, old_, fs::copy_options::recursive);
    fs::rename(old_ / "cells", old_ / "parts");
    hdf5::Group part = open_writable(part_);
    for (const char* name : {"format", "version"}) H5Adelete(part.id(), name);
    part.set_attribute("format", "kvpart");
    part.set_attribute("version", std::int64_t{4});
    hdf5::Group sets = part.create_group("sets");
    for (const std::string& id : part.group("cells").names()) {
      store_bits(part.group("cells").group(id), sets, id, 100);
      H5Adelete(part.group("values").group(id).id(), "own_memory");
    }
  }

  RunRequest run_into(const fs::path& output, const std::string& policies) {
    RunRequest request;
    request.traces = {file("a.h5")};
    for (const std::string& text : split_policies(policies)) request.policies.push_back(ConfiguredPolicy::parse(text));
    request.budgets = {Budget::parse("40")};
    request.metrics = parse_metrics("attention_recall,kv_l1_loss");
    request.save_scores = request.save_attention = true;
    request.output = output;
    request.threads = 1;
    run(request);
    return request;
  }
  MergeSummary merged(const std::vector<fs::path>& folders) {
    const auto next = [left = folders]() mutable { return std::exchange(left, {}); };
    return merge(file("merged"), next, Tables::write, {}, [](double, const std::string&) {}, [] { return false; });
  }

  fs::path now_ = file("now"), old_ = file("old"), part_ = old_ / "parts" / "a.h5";
};

TEST_F(Format1, MergeConvertsIt) {
  EXPECT_EQ(results_folders({old_}, file("merged")), std::vector{old_});
  EXPECT_EQ(merged({old_}).traces, 1U);
  EXPECT_TRUE(compare_runs(file("merged"), now_).empty());
  EXPECT_EQ(content(file("merged") / "results.csv"), content(now_ / "results.csv"));
  EXPECT_FALSE(fs::exists(file("merged") / "cells.partial"));
}

TEST_F(Format1, ItIsJoinedWithOthers) {
  run_into(file("more"), "h2o,knorm");
  merged({old_, file("more")});
  run_into(file("whole"), "h2o,kivi:bits=2,group=4,residual=4,sca:schedule=threshold(40,20),knorm");
  EXPECT_TRUE(compare_runs(file("merged"), file("whole")).empty());
}

TEST_F(Format1, OtherCommandsRefuseIt) {
  const std::string expected = old_.string() + ": results of format 1; convert them with kvreplay merge NEW OLD";
  EXPECT_EQ(refusal([&] { run_into(old_, "h2o"); }), expected);
  EXPECT_EQ(refusal([&] { is_run(old_); }), expected);
  EXPECT_EQ(refusal([&] { compare_runs(old_, now_); }), expected);
  EXPECT_EQ(refusal([&] { assemble(old_, Detail::layer); }), expected);
  EXPECT_EQ(refusal([&] { StoredCell(old_, "a", "0", std::make_shared<const Trace>(Trace::open(file("a.h5")))); }),
            expected);
  EXPECT_EQ(refusal([&] { merge(old_, nullptr, Tables::write, {}, nullptr, nullptr); }), expected);
}

TEST_F(Format1, DamagedPartsAreRefused) {
  {
    const hdf5::Group part = open_writable(part_);
    hdf5::Group sets = part.group("sets");
    const std::string id = sets.names().front();
    remove(sets, id);
    sets.write(id, std::vector<std::int64_t>(3 * 8 * 2));
  }
  EXPECT_NE(refusal([&] { merged({old_}); }).find(": shape: expected [2, heads, words], found [48]"),
            std::string::npos);
  std::ofstream(part_) << "no part";
  EXPECT_TRUE(refusal([&] { merged({old_}); }).starts_with(part_.string()));
  EXPECT_FALSE(fs::exists(file("merged")));
}

}  // namespace
}  // namespace kvreplay
