#include "analysis/run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "analysis/compare_runs.h"
#include "analysis/csv.h"
#include "analysis/run_json.h"
#include "analysis/table.h"
#include "edited_file.h"
#include "hdf5/hdf5.h"
#include "trace/synth.h"
#include "trace_files.h"
#include "wrapped_backend.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;

std::vector<std::map<std::string, std::string>> rows(const fs::path& path) {
  const auto lines = parse_csv(path.string(), content(path));
  std::vector<std::map<std::string, std::string>> all;
  for (std::size_t i = 1; i < lines.size(); ++i) {
    all.emplace_back();
    for (std::size_t c = 0; c < lines[0].size(); ++c) all.back()[lines[0][c]] = lines[i].at(c);
  }
  return all;
}

std::string refusal(const RunRequest& request) {
  try {
    run(request);
  } catch (const Error& error) {
    return std::to_string(error.exit_code()) + " " + error.what();
  }
  return "no refusal";
}

/// The CPU's numbers, but for half of the mass of the last set's keys.
class ForgetfulBackend final : public testing::WrappedBackend {
 public:
  using WrappedBackend::WrappedBackend;

  KeptMoments kept_moments(const LayerTensors& layer, std::span<const std::int32_t> queries, int boundary,
                           std::span<const KeptSets> sets, MomentParts parts) override {
    KeptMoments moments = WrappedBackend::kept_moments(layer, queries, boundary, sets, parts);
    for (std::size_t i = moments.kept.size() - moments.full.size(); i < moments.kept.size(); ++i)
      moments.kept[i].mass /= 2;
    return moments;
  }
};

const RegisteredBackend forgetful{{.name = "forgetful",
                                   .summary = "wrong about one set",
                                   .make = [](int threads, DeviceChoice) -> std::unique_ptr<Backend> {
                                     return std::make_unique<ForgetfulBackend>(threads);
                                   }}};

class Run : public TraceFiles {
 protected:
  fs::path synth(const std::string& kind, const std::string& name) {
    const fs::path path = file(name + ".h5");
    SynthOptions options = synth_defaults(kind);
    options.existing = Existing::replace;
    if (kind != "fixture") {
      options.layers = 2;
      options.query_heads = 4;
      options.kv_heads = 2;
      options.head_dim = 8;
      options.prefill = 40;
      options.continuation = 6;
    }
    synthesise(options, path);
    return path;
  }

  RunRequest request(std::vector<fs::path> traces, const std::string& policies = "snapkv:window=2,kernel=3",
                     const std::string& metrics = "") {
    RunRequest made;
    made.traces = std::move(traces);
    for (const std::string& text : split_policies(policies)) made.policies.push_back(ConfiguredPolicy::parse(text));
    made.budgets = {Budget::parse("6")};
    made.metrics = parse_metrics(metrics);
    made.output = folder() / "out";
    made.threads = 1;
    return made;
  }
};

const CellRecord& cell(const RunSummary& summary, const std::string& policy) {
  for (const CellRecord& one : summary.cells)
    if (one.policy == policy) return one;
  throw std::runtime_error("no cell of " + policy);
}

TEST_F(Run, ControlsStandBesideWhatWasAsked) {
  const RunSummary summary = run(request({synth("fixture", "f1")}));
  ASSERT_EQ(summary.cells.size(), 4U);
  EXPECT_EQ(cell(summary, "snapkv").role, "asked");
  for (const char* control : {"full", "random", "oracle"}) EXPECT_EQ(cell(summary, control).role, "control");
  for (const CellRecord& one : summary.cells) EXPECT_EQ(one.state, CellState::done) << one.policy << one.error;
  EXPECT_EQ(summary.failed(), 0);
  EXPECT_EQ(summary.self_check,
            (std::vector<std::string>{"full error 0", "budget ok", "identities ok", "oracle bound ok"}));
  const CellRecord& full = cell(summary, "full");
  EXPECT_EQ(full.value({"attention_recall", ""}), 1);
  EXPECT_EQ(full.value({"attention_l1", ""}), 0);
  EXPECT_EQ(full.value({"output_error", ""}), 0);
  EXPECT_EQ(full.value({"kv_l1_loss", ""}), 0);
  // B = 6 of 12, continuation 4: eval query t holds 6 + 1 ... 6 + 4.
  EXPECT_EQ(cell(summary, "snapkv").value({"held_tokens", ""}), 8.5);
  EXPECT_NEAR(cell(summary, "snapkv").value({"attention_recall", ""}), 0.588619, 1e-6);
}

TEST_F(Run, TheControlsThatJoinAreAskedFor) {
  const auto controls = [](const RunSummary& summary) {
    std::vector<std::string> labels;
    for (const CellRecord& one : summary.cells)
      if (one.role == "control") labels.push_back(one.label);
    return labels;
  };
  using Labels = std::vector<std::string>;
  RunRequest asked = request({synth("fixture", "f1")}, "snapkv:window=2,kernel=3,h2o:recent=3,h2o-online");
  asked.controls = Controls::none;
  const RunSummary none = run(asked);
  EXPECT_EQ(controls(none), Labels{});
  EXPECT_EQ(none.self_check.front(), "full not replayed");
  asked.controls = Controls::random;
  EXPECT_EQ(controls(run(asked)), (Labels{"full", "random", "oracle"}));
  asked.controls = Controls::twins;
  asked.excluded = {{1, 0}};
  EXPECT_EQ(controls(run(asked)), (Labels{"full", "random", "oracle", "random-twin:of=(snapkv:window=2,kernel=3)"}));
  asked.excluded.clear();
  const RunSummary all = run(asked);
  EXPECT_EQ(controls(all), (Labels{"full", "random", "oracle", "random-twin:of=(snapkv:window=2,kernel=3)",
                                   "random-twin:of=(h2o:recent=3)"}));
  EXPECT_EQ(all.self_check.front(), "full error 0");
  for (const CellRecord& one : all.cells) {
    const bool is_twin = one.policy == "random-twin";
    const std::string of = one.label.find("snapkv") != std::string::npos ? "snapkv" : "h2o";
    EXPECT_EQ(one.twin_of, is_twin ? cell(all, of).id : "") << one.label;
    if (is_twin) {
      EXPECT_EQ(one.kept_tokens, cell(all, of).kept_tokens);
    }
  }
  const MetricName best{"attention_recall", "oracle"};
  EXPECT_NEAR(cell(all, "h2o").value(best), cell(all, "oracle").value({"attention_recall", ""}), 1e-6);
  EXPECT_TRUE(std::isnan(cell(all, "h2o-online").value(best))) << "a dynamic set";
}

TEST_F(Run, ASecondRunComputesNothingAndSaysTheSame) {
  const RunRequest asked = request({synth("gaussian", "a"), synth("sinks", "b")}, "h2o,local");
  run(asked);
  const std::string results = content(asked.output / "results.csv"), seconds = content(asked.output / "seconds.csv");
  const auto written = fs::last_write_time(asked.output / "cells" / "a.h5");
  const RunSummary again = run(asked);
  for (const CellRecord& one : again.cells) EXPECT_EQ(one.state, CellState::skipped);
  EXPECT_EQ(content(asked.output / "results.csv"), results);
  EXPECT_EQ(content(asked.output / "seconds.csv"), seconds);
  EXPECT_EQ(fs::last_write_time(asked.output / "cells" / "a.h5"), written);
}

TEST_F(Run, AFreshRunEqualsAnotherFreshRun) {
  RunRequest asked = request({synth("needle", "a")}, "h2o,chunkkv");
  run(asked);
  const fs::path first = asked.output;
  asked.output = folder() / "again";
  asked.threads = 2;
  run(asked);
  EXPECT_EQ(content(first / "results.csv"), content(asked.output / "results.csv"));
  EXPECT_TRUE(compare_runs(first, asked.output).empty());
}

TEST_F(Run, AnAddedMetricIsComputedFromTheStoredSets) {
  RunRequest asked = request({synth("needle", "a")}, "snapkv:window=4", "attention_recall");
  run(asked);
  const std::string seconds = content(asked.output / "seconds.csv");
  asked.metrics = parse_metrics("attention_recall,kv_l1_loss:key,attention_cosine:rows,span_recall");
  const std::vector<PlannedTrace> plan = PlannedRun(asked).traces();
  ASSERT_EQ(plan.size(), 1U);
  ASSERT_EQ(plan[0].cells.size(), 4U);
  EXPECT_EQ(plan[0].cells[0].known.size(), 2U);
  EXPECT_FALSE(plan[0].cells[0].measure);
  EXPECT_TRUE(plan[0].demand.every_query);
  const RunSummary added = run(asked);
  EXPECT_EQ(cell(added, "snapkv").state, CellState::done);
  EXPECT_EQ(content(asked.output / "seconds.csv"), seconds);  // nothing was scored again

  RunRequest whole = asked;
  whole.output = folder() / "whole";
  const RunSummary at_once = run(whole);
  EXPECT_EQ(content(asked.output / "results.csv"), content(whole.output / "results.csv"));
  EXPECT_TRUE(compare_runs(asked.output, whole.output).empty());
  EXPECT_EQ(cell(at_once, "full").value({"attention_cosine", "rows"}), 1);
}

TEST_F(Run, RowsAreTheCosineOverEveryToken) {
  RunRequest asked = request({synth("gaussian", "a")}, "snapkv", "attention_cosine:rows");
  const RunSummary rows_of_continuation = run(asked);
  asked.output = folder() / "all";
  asked.eval = "all";
  asked.metrics = parse_metrics("attention_cosine");
  const RunSummary all = run(asked);
  EXPECT_EQ(cell(rows_of_continuation, "snapkv").value({"attention_cosine", "rows"}),
            cell(all, "snapkv").value({"attention_cosine", ""}));
}

TEST_F(Run, ResultsAreTidySortedAndComplete) {
  RunRequest asked = request({synth("fixture", "f1")}, "snapkv:window=2,kernel=3,h2o:recent=3");
  asked.detail = Detail::head;
  run(asked);
  const auto all = rows(asked.output / "results.csv");
  std::vector<std::vector<std::string>> order;
  int heads = 0, trace_rows = 0;
  for (const auto& row : all) {
    const auto number = [](const std::string& text) { return text == "all" ? "z" : text; };
    order.push_back({row.at("trace"), row.at("policy"), row.at("params"), row.at("budget"), number(row.at("layer")),
                     number(row.at("head")), row.at("metric"), row.at("variant")});
    EXPECT_NE(row.at("value"), "nan");
    if (row.at("policy") == "h2o" && row.at("metric") == "attention_recall" && row.at("variant").empty() &&
        row.at("layer") == "2")
      heads += row.at("head") == "all" ? 0 : 1;
    if (row.at("role") == "trace") {
      ++trace_rows;
      EXPECT_EQ(row.at("policy"), "");
    }
  }
  EXPECT_TRUE(std::ranges::is_sorted(order));
  EXPECT_EQ(std::ranges::adjacent_find(order), order.end());
  EXPECT_EQ(heads, 4);
  EXPECT_EQ(trace_rows, 2 * (4 + 1));  // keys and values, four layers and all
  EXPECT_EQ(content(asked.output / "results.csv").find("seconds"), std::string::npos);

  // Another detail is another view of the same cells.
  asked.detail = Detail::summary;
  run(asked);
  for (const auto& row : rows(asked.output / "results.csv")) {
    EXPECT_EQ(row.at("layer"), "all");
    EXPECT_EQ(row.at("head"), "all");
  }
}

TEST_F(Run, SelectionsHoldSetsMatricesAndTheTrace) {
  RunRequest asked = request({synth("fixture", "f1")});
  asked.save_scores = asked.save_attention = true;
  const RunSummary summary = run(asked);
  const hdf5::File made = hdf5::File::open(asked.output / "cells" / "f1.h5");
  const hdf5::Group group = made.group("cells").group(cell(summary, "snapkv").id);
  const auto offsets = group.dataset("offsets").values<std::int64_t>();
  ASSERT_EQ(offsets.size(), 4U * 2 + 1);
  const auto positions = group.dataset("positions").values<std::int32_t>();
  EXPECT_EQ((std::vector<std::int32_t>(positions.begin(), positions.begin() + offsets[1])),
            (std::vector<std::int32_t>{1, 2, 3, 4, 10, 11}));
  EXPECT_EQ(group.dataset("recent").values<std::int32_t>(), std::vector<std::int32_t>(8, 2));
  EXPECT_EQ(group.dataset("scores").shape(), (hdf5::Shape{4, 2, 12}));
  EXPECT_NEAR(group.dataset("jaccard_union").values<double>()[1], 0.5, 1e-12);
  const hdf5::Group trace = made.group("traces").group("f1");
  EXPECT_EQ(trace.dataset("redundancy_key").shape(), (hdf5::Shape{4, 12}));
  EXPECT_NEAR(trace.dataset("redundancy_key").values<float>()[0], 0.659, 1e-4);
  EXPECT_EQ(trace.dataset("eval_attention_heads").shape(), (hdf5::Shape{4, 4, 12}));
  EXPECT_EQ(trace.group("tokens").dataset("ids").shape(), (hdf5::Shape{16}));
}

TEST_F(Run, SlidingLayersHaveNoRows) {
  const fs::path path = file("sliding.h5");
  SynthOptions options = synth_defaults("gaussian");
  options.layers = 3;
  options.head_dim = 8;
  options.prefill = 40;
  options.continuation = 4;
  options.sliding_window = {0, 16, 0};
  synthesise(options, path);
  const RunRequest asked = request({path}, "snapkv");
  const RunSummary summary = run(asked);
  EXPECT_EQ(summary.traces.at(0).treated.size(), 2U);
  for (const auto& row : rows(asked.output / "results.csv")) EXPECT_NE(row.at("layer"), "1");
  const hdf5::File made = hdf5::File::open(asked.output / "cells" / "sliding.h5");
  const hdf5::Group group = made.group("cells").group(cell(summary, "snapkv").id);
  EXPECT_EQ(group.dataset("layer_source").values<std::int32_t>(), (std::vector<std::int32_t>{0, -1, 2}));
  EXPECT_EQ(group.dataset("jaccard_mean").shape(), (hdf5::Shape{2, 2}));
  for (const CellRecord& one : run(asked).cells) EXPECT_EQ(one.state, CellState::skipped);
}

TEST_F(Run, EqualBudgetsAreOneCell) {
  RunRequest asked = request({synth("fixture", "f1")});
  asked.budgets = {Budget::parse("6"), Budget::parse("0.5")};
  const RunSummary summary = run(asked);
  EXPECT_EQ(summary.cells.size(), 4U);
  EXPECT_EQ(summary.warnings.size(), 1U);
}

TEST_F(Run, AControlThatIsAskedForIsAsked) {
  RunRequest asked = request({synth("fixture", "f1")});
  run(asked);
  asked.policies.push_back(ConfiguredPolicy::parse("random"));
  const RunSummary again = run(asked);
  EXPECT_EQ(cell(again, "random").role, "asked");
  EXPECT_EQ(cell(again, "random").state, CellState::skipped);
  for (const auto& row : rows(asked.output / "results.csv"))
    EXPECT_EQ(row.at("role") == "asked", row.at("policy") == "random" || row.at("policy") == "snapkv");
}

TEST_F(Run, OneBrokenTraceDoesNotStopTheOthers) {
  const fs::path broken = file("broken.h5");
  std::ofstream(broken) << "no trace";
  const RunRequest asked = request({broken, synth("fixture", "f1")});
  const RunSummary summary = run(asked);
  EXPECT_EQ(summary.failed(), 1);
  EXPECT_EQ(summary.cells.at(0).state, CellState::failed);
  EXPECT_EQ(cell(summary, "oracle").state, CellState::done);
  EXPECT_FALSE(rows(asked.output / "results.csv").empty());
  EXPECT_NE(table(summary).find("broken  failed"), std::string::npos);
}

TEST_F(Run, ATraceThatIsReplacedBeforeItsTurnIsReplayedAsPlanned) {
  const fs::path first = synth("fixture", "first"), replaced = synth("gaussian", "replaced");
  // The same shape with other numbers, more heads, more tokens.
  for (const auto& [heads, prompt] : {std::pair{4, 40}, {8, 40}, {4, 400}}) {
    RunRequest asked = request({first, replaced});
    asked.output = folder() / ("out" + std::to_string(heads) + "-" + std::to_string(prompt));
    synth("gaussian", "replaced");
    const std::string planned = Trace::open(replaced).hash();
    const fs::path other = file("other.h5");
    SynthOptions options = synth_defaults("gaussian");
    options.existing = Existing::replace;
    options.layers = 2;
    options.query_heads = heads;
    options.kv_heads = heads / 2;
    options.head_dim = 8;
    options.prefill = prompt;
    options.continuation = 6;
    options.seed = 7;
    synthesise(options, other);
    bool done = false;
    const RunSummary summary = run(asked, [&](const Progress& progress) {
      if (!done && progress.trace == 0) fs::rename(other, replaced);
      done = true;
    });
    EXPECT_EQ(summary.failed(), 0) << "the file that was planned is open";
    EXPECT_EQ(read_trace_cells(asked.output / "cells" / "replaced.h5").trace.hash, planned);
    asked.force = true;
    EXPECT_EQ(run(asked).failed(), 0) << "the new file, under its own hash";
  }
}

TEST_F(Run, ACopyOfATraceTakesItsPlaceUnnoticed) {
  const fs::path first = synth("fixture", "first"), copied = synth("gaussian", "copied"), copy = file("copy");
  fs::copy_file(copied, copy);
  bool done = false;
  const RunSummary summary = run(request({first, copied}), [&](const Progress&) {
    if (!done) fs::rename(copy, copied);
    done = true;
  });
  EXPECT_EQ(summary.failed(), 0);
}

TEST_F(Run, PoliciesInsidePoliciesReadTheSameInRunJsonAndResults) {
  const std::string nested = "critical-kv:base=(h2o:heads=query,recent=2),wo=none";
  const RunRequest asked = request({synth("gaussian", "g")}, nested);
  const auto start = std::chrono::system_clock::now();
  const auto json = nlohmann::json::parse(run_json(asked, run(asked), "", start, start));
  EXPECT_EQ(json.at("policies").at(0).at("parameters").at("base"), "(h2o:recent=2,heads=query)");
  bool found = false;
  for (const auto& row : rows(asked.output / "results.csv"))
    found |= row.at("params").find("base=(h2o:recent=2,heads=query)") != std::string::npos;
  EXPECT_TRUE(found);
}

TEST_F(Run, AViolatedLawFailsTheCellAndSaysWhere) {
  RunRequest asked = request({synth("fixture", "f1")});
  asked.backend = "forgetful";
  const RunSummary summary = run(asked);
  EXPECT_EQ(summary.failed(), 1);
  const CellRecord& failed = cell(summary, "oracle");
  EXPECT_EQ(failed.state, CellState::failed);
  // Which head and query are compared, and so which law fails first, follows from the cell's id and from `numerics`.
  EXPECT_TRUE(failed.error.starts_with("layer 0, head ")) << failed.error;
  EXPECT_NE(failed.error.find(": attention_recall by attention of evaluation queries and by moments: expected 0."),
            std::string::npos)
      << failed.error;
  EXPECT_EQ(summary.self_check.at(2), "identities VIOLATED in 1 cells");
  // Its numbers are shown nowhere, and the next run computes it again.
  for (const auto& row : rows(asked.output / "results.csv")) EXPECT_NE(row.at("policy"), "oracle");
  EXPECT_NE(table(summary).find("failed: layer 0"), std::string::npos);
  EXPECT_EQ(cell(run(asked), "oracle").state, CellState::failed);
}

TEST_F(Run, WhatCannotBeMeantStopsBeforeAnythingIsWritten) {
  const fs::path trace = synth("fixture", "f1");
  const fs::path broken = file("broken.h5");
  std::ofstream(broken) << "no trace";
  EXPECT_TRUE(refusal(request({broken})).starts_with("3 "));
  EXPECT_TRUE(
      refusal(request({trace}, "streaming-llm:sinks=4000")).starts_with("2 streaming-llm:sinks: exceeds the trace"));
  EXPECT_TRUE(refusal(request({trace}, "snapkv", "span_recall:needle.any"))
                  .starts_with("2 span_recall:needle.any: no trace has this span"));
  fs::create_directory(folder() / "other");
  fs::copy_file(trace, folder() / "other" / "f1.h5");
  EXPECT_NE(refusal(request({trace, folder() / "other" / "f1.h5"})).find("another trace has the same name"),
            std::string::npos);
  fs::copy_file(trace, file("copy.h5"));
  EXPECT_NE(refusal(request({trace, file("copy.h5")})).find("trace listed more than once"), std::string::npos);
  EXPECT_FALSE(fs::exists(folder() / "out"));
}

TEST_F(Run, FoldersOfOthersAreLeftAlone) {
  const RunRequest asked = request({synth("fixture", "f1")});
  fs::create_directory(asked.output);
  std::ofstream(asked.output / "thesis.tex") << "precious";
  EXPECT_NE(refusal(asked).find("contains other files"), std::string::npos);
  EXPECT_EQ(content(asked.output / "thesis.tex"), "precious");
  EXPECT_FALSE(fs::exists(asked.output / "cells"));
}

TEST_F(Run, OtherConditionsNeedAnotherFolderOrForce) {
  RunRequest asked = request({synth("fixture", "f1")});
  run(asked);
  asked.eval = "last:3";
  EXPECT_NE(refusal(asked).find("eval of the earlier results"), std::string::npos);
  asked.force = true;
  for (const CellRecord& one : run(asked).cells) EXPECT_EQ(one.state, CellState::done);
  for (const auto& row : rows(asked.output / "results.csv")) EXPECT_EQ(row.at("eval"), "last:3");
}

TEST_F(Run, AnInterruptedRunGoesOnWhereItStopped) {
  const RunRequest asked = request({synth("gaussian", "a"), synth("sinks", "b")}, "h2o");
  bool first_done = false;
  const auto progress = [&](const Progress& at) { first_done = first_done || at.trace == 1; };
  EXPECT_THROW(run(asked, progress, [&] { return first_done; }), Error);
  EXPECT_TRUE(fs::exists(asked.output / "cells" / "a.h5"));
  EXPECT_FALSE(fs::exists(asked.output / "cells" / "b.h5"));
  // What a killed run leaves behind is replaced.
  std::ofstream(asked.output / "cells" / "b.h5.partial") << "half a file";
  std::ofstream(asked.output / "results.csv.partial") << "half a table";
  const RunSummary resumed = run(asked);
  for (const CellRecord& one : resumed.cells)
    EXPECT_EQ(one.state, one.trace == "a" ? CellState::skipped : CellState::done);
  EXPECT_FALSE(fs::exists(asked.output / "cells" / "b.h5.partial"));
  EXPECT_FALSE(fs::exists(asked.output / "results.csv.partial"));

  RunRequest at_once = asked;
  at_once.output = folder() / "at_once";
  run(at_once);
  EXPECT_EQ(content(asked.output / "results.csv"), content(at_once.output / "results.csv"));
}

TEST_F(Run, ProgressGrowsToOne) {
  for (const char* metrics : {"kv_l1_loss", "attention_cosine:rows"}) {
    double last = 0;
    RunRequest asked = request({synth("gaussian", "a"), synth("sinks", "b")}, "h2o", metrics);
    asked.output = folder() / metrics;
    run(asked, [&](const Progress& at) {
      EXPECT_GE(at.done, last);
      last = at.done;
    });
    EXPECT_DOUBLE_EQ(last, 1) << metrics;
  }
}

TEST_F(Run, ForceMakesAnewWhatIsAskedAndKeepsTheRest) {
  RunRequest asked = request({synth("fixture", "f1")}, "h2o,local", "kv_l1_loss,redundancy_key");
  asked.save_scores = asked.save_attention = true;
  run(asked);
  const fs::path before = folder() / "before";
  fs::copy(asked.output, before, fs::copy_options::recursive);
  RunRequest forced = asked;
  forced.policies = {ConfiguredPolicy::parse("h2o")};
  forced.metrics = parse_metrics("kv_l1_loss");
  forced.save_scores = forced.save_attention = false;
  forced.force = true;
  const RunSummary again = run(forced);
  for (const CellRecord& one : again.cells) EXPECT_EQ(one.state, CellState::done);
  EXPECT_EQ(content(asked.output / "results.csv"), content(before / "results.csv"));
  EXPECT_TRUE(compare_runs(before, asked.output).empty());
  asked.force = false;
  for (const CellRecord& one : run(asked).cells) EXPECT_EQ(one.state, CellState::skipped) << one.policy;
}

TEST_F(Run, ForceLosesNothingWhenItCannotWrite) {
  RunRequest asked = request({synth("fixture", "f1")});
  run(asked);
  const fs::path cells = asked.output / "cells" / "f1.h5";
  const std::string before = content(cells);
  fs::create_directory(cells.string() + ".partial");  // where the new file would be written
  asked.force = true;
  EXPECT_NE(refusal(asked).find("f1.h5.partial: cannot be written"), std::string::npos) << refusal(asked);
  EXPECT_EQ(content(cells), before);
}

TEST_F(Run, OtherNumericsAreOtherConditions) {
  RunRequest asked = request({synth("fixture", "f1")});
  run(asked);
  {
    const hdf5::Group made = open_writable(asked.output / "cells" / "f1.h5");
    hdf5::Group trace = made.group("traces").group("f1");
    EXPECT_EQ(trace.integer_attribute("numerics"), numerics);
    H5Adelete(trace.id(), "numerics");
    trace.set_attribute("numerics", std::int64_t{numerics + 1});
  }
  EXPECT_NE(refusal(asked).find("numerics of the earlier results"), std::string::npos);
  asked.force = true;
  EXPECT_EQ(run(asked).failed(), 0);
}

TEST_F(Run, ABudgetIsShownAsItWasAskedLast) {
  RunRequest asked = request({synth("fixture", "f1")}, "h2o", "kv_l1_loss");
  asked.budgets = {Budget::parse("0.5")};
  run(asked);
  asked.budgets = {Budget::parse("6")};
  const auto all_say_six = [&] {
    return std::ranges::all_of(rows(asked.output / "results.csv"),
                               [](auto& row) { return row.at("role") == "trace" || row.at("budget") == "6"; });
  };
  for (const CellRecord& one : run(asked).cells) EXPECT_EQ(one.state, CellState::skipped);
  EXPECT_TRUE(all_say_six());
  asked.budgets = {Budget::parse("50%")};
  run(asked);
  asked.budgets = {Budget::parse("6")};
  asked.metrics = parse_metrics("kv_l1_loss,kv_bytes");
  for (const CellRecord& one : run(asked).cells) EXPECT_EQ(one.state, CellState::done);
  EXPECT_TRUE(all_say_six());
}

TEST_F(Run, TheSameLayersAreTheSameWork) {
  RunRequest asked = request({synth("fixture", "f1")});
  const std::string id = run(asked).cells.at(0).id;
  asked.treat_sliding = true;  // no layer of it slides
  const RunSummary again = run(asked);
  EXPECT_EQ(again.cells.at(0).id, id);
  EXPECT_EQ(again.cells.at(0).state, CellState::skipped);
}

TEST_F(Run, ValuesThatAreNotNumbersFailTheTrace) {
  const fs::path path = synth("fixture", "f1");
  {
    const hdf5::Group file = open_writable(path);
    hdf5::Dataset values = file.group("layers").group("002").dataset("v");
    std::vector<float> all(hdf5::elements(values.shape()));
    values.read(hdf5::Type::float32(), all.data());
    all[0] = std::numeric_limits<float>::quiet_NaN();
    values.write(hdf5::Type::float32(), all.data());
  }
  const std::string error =
      path.string() + ":/layers/002/v: number: expected finite numbers, found nan at head 0, position 0, component 0";
  EXPECT_EQ(refusal(request({path})), "3 " + error) << "there is nothing else";
  const RunSummary summary = run(request({path, synth("sinks", "f2")}));
  EXPECT_EQ(summary.failed(), 4);
  EXPECT_EQ(summary.cells.at(0).error, error);
}

TEST_F(Run, NamesThatResultsCannotBear) {
  const fs::path trace = synth("fixture", "f1");
  for (const char* name : {"...h5", "line\nbreak.h5", "..h5"}) {
    fs::copy_file(trace, file(name));
    EXPECT_TRUE(refusal(request({file(name)})).starts_with("3 ")) << name << refusal(request({file(name)}));
  }
  EXPECT_FALSE(fs::exists(folder() / "out"));
}

TEST_F(Run, OneRunAtATimeWritesIntoAFolder) {
  const RunRequest asked = request({synth("fixture", "f1")});
  std::string second;
  run(asked, [&](const Progress&) { second = refusal(asked); });
  EXPECT_TRUE(second.starts_with("2 ")) << second;
  EXPECT_NE(second.find("another run is writing to this folder"), std::string::npos) << second;
  EXPECT_EQ(refusal(asked), "no refusal");
}

TEST_F(Run, OfTwoSpansOfOneNameTheFirstCounts) {
  const fs::path path = synth("needle", "a");
  const RunSummary before = run(request({path}, "random", "span_recall"));
  bool renamed = false;
  {
    const hdf5::Group file = open_writable(path);
    hdf5::Dataset spans = file.dataset("spans");
    const hdf5::Type type = spans.type();
    std::vector<char> bytes(type.bytes() * hdf5::elements(spans.shape()));
    spans.read(type, bytes.data());
    // The span after the needle takes its name.
    const std::size_t name = type.member_offset("name"), width = type.member("name")->bytes();
    const std::size_t spans_count = hdf5::elements(spans.shape());
    for (std::size_t s = 0; s + 1 < spans_count; ++s)
      if (std::string(&bytes[s * type.bytes() + name]).starts_with("needle")) {
        std::copy_n(&bytes[s * type.bytes() + name], width, &bytes[(s + 1) * type.bytes() + name]);
        renamed = true;
        break;
      }
    spans.write(type, bytes.data());
  }
  ASSERT_TRUE(renamed);
  RunRequest asked = request({path}, "random", "span_recall");
  asked.output = folder() / "twice";
  EXPECT_EQ(cell(run(asked), "random").value({"span_recall", "needle.mean"}),
            cell(before, "random").value({"span_recall", "needle.mean"}));
}

TEST(Table, WhatIsNotFiniteIsADash) {
  RunSummary summary;
  constexpr double infinite = std::numeric_limits<double>::infinity();
  summary.traces = {{.name = "t", .layers = 1, .treated = {0}}};
  for (const double error : {infinite, 0.5, 0.25})
    summary.cells.push_back(
        {.role = "asked",
         .label = "p",
         .budget = "0.5",
         .values = {{{"output_error", ""}, Values(1, 1, error)}, {{"output_cosine", ""}, Values(1, 1, -infinite)}},
         .trace = "t",
         .state = CellState::done});
  const std::string text = table(summary);
  EXPECT_EQ(text.find("inf"), std::string::npos) << text;
  EXPECT_EQ(text.find("out.cos"), std::string::npos) << text;
  EXPECT_NE(text.find("0.250*"), std::string::npos) << text;
}

TEST_F(Run, TheTableFitsATerminalAndSaysOpenLoop) {
  RunRequest asked =
      request({synth("needle", "a")},
              "snapkv,h2o:heads=query,oracle:counts=(chunkkv:chunk=3,window=4,fill=tokens,chunk_score=mean)");
  const RunSummary summary = run(asked);
  const auto widest = [](const std::string& text) {
    std::size_t most = 0;
    const std::size_t rows_end = text.find("self-check");  // later lines name the folder, which may be long
    for (std::size_t begin = 0; begin < rows_end;) {
      const std::size_t end = text.find('\n', begin);
      most = std::max(most, end - begin);
      begin = end + 1;
    }
    return most;
  };
  const std::string narrow = table(summary), wide = table(summary, {.wide = true});
  EXPECT_LE(widest(narrow), 80U) << narrow;
  const char* whole = "\noracle:counts=(chunkkv:chunk=3,fill=tokens,chunk_score=mean,window=4)  layer ";
  EXPECT_NE(wide.find(whole), std::string::npos) << wide;
  EXPECT_EQ(narrow.find(whole), std::string::npos) << narrow;
  for (const char* part : {"OPEN LOOP", "(full)", "(oracle)", "query 2x", "self-check full error 0 | budget ok",
                           "budget   6 tokens per layer and head on average"}) {
    EXPECT_NE(narrow.find(part), std::string::npos) << part << "\n" << narrow;
    EXPECT_NE(wide.find(part), std::string::npos) << part << "\n" << wide;
  }
  EXPECT_NE(wide.find("needle"), std::string::npos) << wide;
}

}  // namespace
}  // namespace kvreplay
