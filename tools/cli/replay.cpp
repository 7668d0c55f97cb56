#include "replay/replay.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <ranges>
#include <set>
#include <utility>

#include "analysis/replaced_file.h"
#include "analysis/results_folder.h"
#include "analysis/run.h"
#include "arguments.h"
#include "build.h"
#include "commands.h"
#include "exclusion.h"
#include "experiment.h"
#include "interruption.h"
#include "machine.h"
#include "output.h"
#include "policies/text/engine_rules.h"
#include "policies/text/plugin.h"
#include "policies/text/policy_source.h"
#include "policies/text/structure.h"
#include "profile.h"
#include "profile_report.h"
#include "progress_line.h"
#include "replay/estimate.h"
#include "replay/stored_observables.h"
#include "replay_traces.h"
#include "run_output.h"

namespace kvreplay {
namespace {

constexpr Option options[] = {
    in_group(
        "policies and budgets",
        with_plural(
            "policies",
            {"policy", 'p', "POLICY,...", "",
             "policies to replay: NAME[:KEY=VALUE,...]; KEY: a parameter or a part (score, select, allocate, share, "
             "schedule, store, "
             "protect); layers:0-14=(A),15-29=B: a policy per layer range; @FILE: policies of a YAML file; repeatable",
             true})),
    with_plural("budgets", {"budget", 'b', "BUDGET,...", "",
                            "tokens to keep per layer and head: 0.1 or 10% of the prompt, 512 tokens, 0.1@seen of the "
                            "tokens seen so far; or "
                            "memory: 64KiB, 1MiB, 1GiB; repeatable",
                            true}),
    another_form_of(
        "budget", Budget::of_compression_ratio,
        {"compression-ratio", 0, "RATIO,...", "",
         "shares of the prompt to evict, in place of budgets: 0.9 is -b 0.1, as in kvpress; repeatable", true}),
    {"structure", 0, "page=N,heads=layer|kv|query|own", "",
     "evict whole pages, as paged inference engines do, with every policy; omitted keys: page=16, heads=layer"},
    {"protect", 0, "sinks=N,recent=N|FRACTION", "",
     "protected tokens of every policy, in place of its default: attention sinks and recent window, in tokens or as a "
     "fraction of the budget; an omitted one is 0"},
    {"engine", 0, "openvino|sglang|trtllm|vllm", "",
     "pages, protected tokens and schedule of an inference engine for every policy, in place of --structure and "
     "--protect"},
    {"controls", 0, "none|random|twins", "random",
     "reference policies at the same budgets; random: full, random, oracle; twins: also the random twin of each policy "
     "with "
     "a static set"},
    {"exclude", 0, "[POLICY:]KEY=VALUE,...", "",
     "cells to omit: those that match all KEY=VALUE; KEY: a policy parameter, or budget; repeatable", true},
    plugin_option,
    in_group("measurement", boundary_option),
    {"eval", 0, "continuation|last:N|span:NAME|all|stride:K", "continuation",
     "queries at which metrics are measured; last:N: the last N of the prompt; stride:K: every K-th of the trace"},
    {"sample", 0, "layers=N,heads=N,queries=N", "",
     "estimate metrics from some layers, KV heads and eval queries, with 95 % intervals; omitted: all"},
    {"precision", 0, "P[:METRIC]", "",
     "sample more eval queries until the 95 % interval of each policy's METRIC (default: attention_recall) is at most "
     "±P, or their order is settled"},
    {"metrics", 0, "METRIC,...", "", "metrics: NAME or NAME:VARIANT (default: all, base variants)", true},
    {"sliding", 0, "skip|treat", "skip", "layers with a sliding window: skip them, or evict from them too"},
    {"seed", 0, "N", "0", "random seed of every policy that takes one"},
    in_group("results", with_user_default({"output", 'o', "DIR", "kvreplay-out",
                                           "folder of results; finished cells in it are reused"})),
    {"force", 0, "", "", "recompute cells that the folder already holds"},
    {"detail", 0, "summary|layer|head", "layer", "granularity of the rows of results.csv"},
    {"save", 0, "scores|attention,...", "", "extra data to store in cells/TRACE.h5"},
    {"no-text", 0, "", "", "omit the text of the trace from the results"},
    {"observables", 0, "use|keep|ignore", "use",
     "stored observables NAME.obs.h5 beside a trace: use them; keep: also write them, so that later runs skip the "
     "O(n²) "
     "work; or ignore them"},
    in_group("table", table_options[0]),
    table_options[1],
    table_options[2],
    table_options[3],
    table_options[4],
    json_option,
    in_group("execution", with_user_default({"device", 0, "auto|cpu|cuda[:N]", "auto", "device that computes"})),
    {"device-memory", 0, "SIZE", "", "limit on GPU memory, as 40G (default: nine tenths of the free memory)"},
    with_user_default({"threads", 0, "N", "0", "CPU threads; 0: all cores"}),
    {"memory", 0, "SIZE", "",
     "limit on memory, as 8G, mapped pages of the trace included; a plan that needs more is rejected (default: the "
     "free memory)"},
    {"shard", 0, "I/N", "", "replay only shard I of N: the traces are divided into N shards of similar size"},
    {"profile", 0, "FILE.json", "",
     "print the seconds of each observable, policy, metric and layer, and write a flame graph for speedscope"},
    {"dry-run", 0, "", "", "print the cells to compute and their estimated cost, then exit"},
    {"watch", 0, "", "", "replay again whenever a policy file is saved, until Ctrl-C"},
    {"figure", 0, "KIND=FILE", "", "with --watch: figure of kvreplay plot KIND to redraw after each replay; repeatable",
     true},
    progress_option,
};

constexpr const char* examples =
    "kvreplay replay TRACE.h5 -p snapkv,h2o,streaming-llm -b 0.1,0.25 -o out\n"
    "kvreplay replay traces/*.h5 -p snapkv:window=64 -b 512 --dry-run\n";

std::map<std::string, std::string> build_facts(const std::string& backend_description) {
  std::map<std::string, std::string> facts{{"version", build_version},
                                           {"git", build_commit},
                                           {"compiler", build_compiler},
                                           {"backend", backend_description},
                                           {"cuda", backends().find("cuda") == nullptr ? "no" : "yes"}};
  for (const auto& [name, version] : build_libraries) facts[name] = version;
  return facts;
}

std::vector<MetricName> asked_metrics(const Arguments& arguments) {
  for (const GivenValue& value : arguments.values("metrics"))
    at_place(value, [&] { parse_replayed_metrics("--metrics", value.text); });
  return parse_metrics(fmt::format("{}", fmt::join(arguments.all("metrics"), ",")));
}

/// Every policy that is asked for, as users write it, with its place.
std::vector<GivenValue> policy_texts(const Arguments& arguments) {
  std::vector<GivenValue> texts;
  for (const GivenValue& value : arguments.values("policy"))
    for (std::string& text : at_place(value, [&] { return split_policies(value.text); })) {
      if (text == "all")
        throw Error{Refusal::usage, "--policy", "all is not a policy",
                    "names, as -p snapkv,h2o (kvreplay info TRACE lists those that a trace supports)"};
      texts.push_back({std::move(text), value.where, value.place});
    }
  return texts;
}

/// The policies that `parse` reads from the texts. One error names all that are rejected.
template <class Parse>
std::vector<ConfiguredPolicy> parse_each(const std::vector<GivenValue>& texts, Parse parse) {
  std::vector<ConfiguredPolicy> policies;
  std::vector<Error> errors;
  for (const GivenValue& text : texts) {
    try {
      policies.push_back(at_place(text, [&] { return parse(text.text); }));
    } catch (const Error& error) {  // those of a grid of values may be equal
      if (std::ranges::none_of(errors, [&](const Error& one) { return one.what() == std::string_view(error.what()); }))
        errors.push_back(error);
    }
  }
  if (errors.size() == 1) throw errors.front();
  const auto lines = std::views::transform(errors, &Error::what);
  if (!errors.empty()) throw Error{errors.front().refusal(), "--policy", fmt::format("{}", fmt::join(lines, "; "))};
  return policies;
}

/// Throws Error{input} of the first trace where none can be opened.
void require_a_trace(const std::vector<std::string>& paths) {
  std::optional<Error> first;
  for (const std::string& path : paths) {
    try {
      Trace::open(path);
      return;
    } catch (const Error& error) {
      if (!first) first = error;
    }
  }
  if (first) throw *first;
}

/// Places those of `policies` that some budget is left for into the request, and what is left out of them. Returns the
/// exclusions that leave something out.
std::vector<std::string> leave_out(const Arguments& arguments, const std::vector<ConfiguredPolicy>& policies,
                                   RunRequest& request) {
  std::vector<Exclusion> exclusions;
  for (const GivenValue& value : arguments.values("exclude")) exclusions.emplace_back(value);
  std::vector<bool> covers_some(exclusions.size());
  for (const ConfiguredPolicy& policy : policies) {
    std::set<std::size_t> budgets;
    for (std::size_t e = 0; e < exclusions.size(); ++e) {
      const Exclusion& exclusion = exclusions[e];
      if (!exclusion.covers(policy)) continue;
      for (std::size_t b = 0; b < request.budgets.size(); ++b) {
        if (!exclusion.covers(request.budgets[b])) continue;
        budgets.insert(b);
        covers_some[e] = true;
      }
    }
    if (budgets.size() == request.budgets.size()) continue;
    for (const std::size_t b : budgets) request.excluded.emplace(request.policies.size(), b);
    request.policies.push_back(policy);
  }
  // What a file leaves out of its own policies and budgets need not be among others.
  const auto of_file = [&](const char* option) { return !arguments.values(option).front().place.empty(); };
  std::vector<std::string> effective;
  for (std::size_t e = 0; e < exclusions.size(); ++e) {
    const GivenValue& given = exclusions[e].given();
    if (covers_some[e])
      effective.push_back(given.text);
    else if (given.place.empty() || (of_file("policy") && of_file("budget")))
      throw exclusions[e].covers_nothing(policies);
  }
  if (request.policies.empty())
    throw Error{Refusal::usage, arguments.values("exclude").front().where, "every cell is excluded",
                "at least one cell"};
  return effective;
}

/// A request, the run that it becomes on this machine, and what that comes to.
struct Prepared {
  Device device = {};
  RunRequest request = {};
  std::vector<std::string> exclusions = {};  // as users write them
  std::optional<PlannedRun> run = {};        // none: there are no traces in this shard
  std::vector<PlannedTrace> traces = {};
  std::vector<Estimate> costs = {};  // of the traces
};

Prepared requested(const Arguments& arguments) {
  if (!arguments.given("policy")) throw Error{Refusal::usage, "replay", "no policy to replay", "-p POLICY,..."};
  if (!arguments.given("budget"))
    throw Error{Refusal::usage, "replay", "no budget", "-b BUDGET,... or --compression-ratio RATIO,..."};
  const GivenValue device = arguments.value("device");
  Prepared all{.device = at_place(device, [&] { return find_device(device.text); })};
  RunRequest& request = all.request;
  request.traces.assign(arguments.operands().begin(), arguments.operands().end());
  request.seed = arguments.seed("seed");
  std::optional<Structure> structure;
  for (const GivenValue& value : arguments.values("structure"))
    structure = at_place(value, [&] { return Structure::parse(value.text); });
  std::optional<ProtectedTokens> protect;
  for (const GivenValue& value : arguments.values("protect"))
    protect = at_place(value, [&] { return ProtectedTokens::parse("--protect", value.text); });
  const EngineRules* engine = nullptr;
  for (const GivenValue& value : arguments.values("engine")) {
    engine = at_place(value, [&] { return &EngineRules::named(value.text); });
    if (structure || protect)
      throw Error{Refusal::usage, value.where, "sets pages and protected tokens", "either --engine or these options",
                  structure ? "--structure" : "--protect"};
    protect = engine->protect;
  }
  const auto around = [&](const std::string& policy) {
    return engine != nullptr ? engine->around(policy) : structure ? structure->around(policy) : policy;
  };
  const std::vector<ConfiguredPolicy> policies = parse_each(policy_texts(arguments), [&](const std::string& text) {
    ConfiguredPolicy configured = ConfiguredPolicy::parse(around(text), request.seed);
    if (protect) configured.replace_protected(*protect);
    return configured;
  });
  for (const GivenValue& value : arguments.values("budget"))
    for (const std::string_view literal : split_list(value.where, value.text))
      request.budgets.push_back(at_place(value, [&] { return Budget::parse(literal); }));
  all.exclusions = leave_out(arguments, policies, request);
  request.metrics = asked_metrics(arguments);
  const std::string controls = arguments.text("controls");
  request.controls = controls == "none" ? Controls::none : controls == "twins" ? Controls::twins : Controls::random;
  request.detail = parse_detail(arguments.text("detail"));
  for (const GivenValue& value : arguments.values("eval")) at_place(value, [&] { check_eval(value.text); });
  for (const GivenValue& value : arguments.values("boundary")) at_place(value, [&] { check_boundary(value.text); });
  for (const GivenValue& value : arguments.values("sample"))
    request.sample = at_place(value, [&] { return SampleSizes::parse(value.text); });
  for (const GivenValue& value : arguments.values("precision"))
    request.precision = at_place(value, [&] { return Precision::parse(value.text); });
  request.eval = arguments.text("eval");
  request.boundary = arguments.text("boundary");
  request.treat_sliding = arguments.text("sliding") == "treat";
  for (const GivenValue& value : arguments.values("save")) {
    for (const std::string_view kind : split_list(value.where, value.text))
      (kind == "scores" ? request.save_scores : request.save_attention) = true;
  }
  const std::string observables = arguments.text("observables");
  request.observables = observables == "keep"     ? ObservableUse::keep
                        : observables == "ignore" ? ObservableUse::ignore
                                                  : ObservableUse::use;
  request.backend = all.device.backend;
  request.device.number = all.device.number;
  if (arguments.given("device-memory") && arguments.text("device") == "cpu")
    throw Error{Refusal::usage, "--device-memory", "limits GPU memory only", "--device cuda or auto", "--device cpu"};
  if (arguments.given("device-memory")) request.device.memory = arguments.bytes("device-memory");
  request.threads = arguments.whole_number("threads", 0, 4096);
  request.force = arguments.given("force");
  request.no_text = arguments.given("no-text");
  request.argv = arguments.command_line();
  return all;
}

/// The largest demand of a whole run. Without a folder its results stay in memory.
Estimate total(const RunRequest& request, std::span<const Estimate> costs) {
  Estimate all;
  for (const Estimate& cost : costs) {
    all.seconds += cost.seconds;
    all.disk_bytes += cost.disk_bytes;
    all.memory_bytes = std::max(all.memory_bytes, cost.memory_bytes);
    all.mapped_bytes = std::max(all.mapped_bytes, cost.mapped_bytes);
  }
  if (request.output.empty()) all.memory_bytes += std::exchange(all.disk_bytes, 0);
  return all;
}

/// What each trace costs so many threads; a dry run says also how long it takes.
std::vector<Estimate> costs_of(const Arguments& arguments, const Prepared& all, int threads) {
  const RunRequest& request = all.request;
  const std::unique_ptr<Backend> backend = make_backend(request.backend, threads, request.device);
  Estimator estimate(*backend);
  std::vector<Estimate> costs;
  for (const PlannedTrace& planned : all.traces) {
    costs.emplace_back();
    if (planned.conditions.layers.empty()) continue;
    try {
      const auto trace = planned.trace ? planned.trace : std::make_shared<const Trace>(Trace::open(planned.path));
      costs.back() = estimate(*trace, planned.conditions, planned.cells, planned.demand);
      if (arguments.given("dry-run"))
        costs.back().seconds = estimate.seconds(*trace, planned.conditions, planned.cells, planned.demand);
    } catch (const Error& error) {
      if (error.refusal() != Refusal::input) throw;  // the run says it of this trace
    }
  }
  return costs;
}

/// The least that a run can do with: of a layer that is larger, pages are let go while it is in use.
std::size_t least_memory(const Estimate& cost) {
  return cost.memory_bytes + std::min(cost.mapped_bytes, Trace::least_mapped);
}

/// Plans the run with as many threads as fit into memory: each has buffers of its own, and results do not depend on
/// their number. Throws Error{resources} when one thread does not fit.
void plan(const Arguments& arguments, Prepared& all) {
  const RunRequest& request = all.request;
  const bool limited = arguments.given("memory");
  const std::size_t memory = limited ? arguments.bytes("memory") : free_memory();
  all.run.emplace(request);
  all.traces = all.run->traces();
  int threads = request.threads, tried = threads > 0 ? threads : machine_threads();
  all.costs = costs_of(arguments, all, tried);
  while (least_memory(total(request, all.costs)) > memory && tried > 1) {
    threads = tried /= 2;
    all.costs = costs_of(arguments, all, tried);
  }
  const Estimate cost = total(request, all.costs);
  if (least_memory(cost) > memory)
    throw Error{Refusal::resources, limited ? "--memory" : "memory", "too little memory for the plan",
                "at least " + size_text(least_memory(cost)), size_text(memory)};
  all.run->limit(threads, memory - cost.memory_bytes);
  if (request.output.empty()) return;
  if (const std::size_t disk = free_disk(request.output); cost.disk_bytes > disk)
    throw Error{Refusal::resources, request.output.string(), "too little space on the disk for the results",
                "at least " + size_text(cost.disk_bytes), size_text(disk)};
}

/// A command line that computes the same cells of any trace that is added to it, wherever it is started.
std::vector<std::string> words_without_traces(const Arguments& arguments, const Prepared& all) {
  // Those that follow here, and those of one start.
  static constexpr std::string_view left_out[] = {"policy", "exclude", "plugin", "output",   "threads", "memory",
                                                  "shard",  "dry-run", "json",   "progress", "force",   "columns",
                                                  "wide",   "all",     "each",   "quiet",    "color",   "profile"};
  const std::filesystem::path here = std::filesystem::current_path();
  std::vector<std::string> words{arguments.command().name};
  const auto add = [&](const char* option, std::string value) {
    words.emplace_back(option);
    words.push_back(std::move(value));
  };
  for (const GivenValue& policy : policy_texts(arguments)) add("--policy", with_files_in(here, policy.text));
  for (const std::string& exclusion : all.exclusions) add("--exclude", with_files_in(here, exclusion));
  for (const GivenValue& file : arguments.values("plugin")) add("--plugin", (here / file.text).string());
  std::ranges::move(arguments.spelled_out(left_out), std::back_inserter(words));
  return words;
}

Json as_json(const Estimate& cost) {
  return {{"seconds", cost.seconds},
          {"memory_bytes", cost.memory_bytes},
          {"mapped_bytes", cost.mapped_bytes},
          {"disk_bytes", cost.disk_bytes}};
}

TableRow plan_row(const std::string& name, std::size_t to_compute, int done, const Estimate& cost) {
  return {name,
          fmt::format("{} cells", to_compute),
          fmt::format("{} cells", done),
          duration_text(cost.seconds),
          size_text(cost.memory_bytes),
          size_text(cost.mapped_bytes),
          size_text(cost.disk_bytes)};
}

Json as_json(const PlannedTrace& planned, const Estimate& cost) {
  Json cells = Json::array();
  for (const Cell& cell : planned.cells)
    cells.push_back({{"policy", cell.policy.label()}, {"budget_tokens", cell.budget}});
  Json document{{"name", planned.name},
                {"path", planned.path.string()},
                {"hash", planned.hash},
                {"boundary", planned.conditions.boundary},
                {"n_queries", planned.conditions.eval_queries.size()},
                {"layers", planned.conditions.layers},
                {"cells", cells},
                {"skipped", planned.skipped}};
  document.update(as_json(cost));
  return document;
}

Json plan_as_json(const Arguments& arguments, const Prepared& prepared) {
  const auto& [device, request, exclusions, run, traces, costs] = prepared;
  Json document = as_json(total(request, costs));
  document["policies"] = Json::array();
  document["budgets"] = Json::array();
  for (const ConfiguredPolicy& policy : request.policies) document["policies"].push_back(policy.label());
  for (const Budget& budget : request.budgets) document["budgets"].push_back(budget.literal);
  document["words"] = words_without_traces(arguments, prepared);
  document["output"] = arguments.text("output");
  document["traces"] = Json::array();
  for (std::size_t i = 0; i < traces.size(); ++i) document["traces"].push_back(as_json(traces[i], costs[i]));
  return document;
}

void print_plan(const Arguments& arguments, const Prepared& prepared) {
  if (arguments.given("json")) return print_json(plan_as_json(arguments, prepared));
  const auto& [device, request, exclusions, run, traces, costs] = prepared;
  std::vector<TableRow> rows{{"trace", "to compute", "finished", "time", "memory", "mapped", "results"}};
  std::size_t to_compute = 0;
  int done = 0;
  for (std::size_t i = 0; i < traces.size(); ++i) {
    to_compute += traces[i].cells.size();
    done += traces[i].skipped;
    rows.push_back(plan_row(traces[i].name, traces[i].cells.size(), traces[i].skipped, costs[i]));
  }
  rows.push_back(plan_row("total", to_compute, done, total(request, costs)));
  print_columns(rows);
}

std::string doing(const Progress& progress) {
  const std::string which =
      progress.traces > 1 ? fmt::format("trace {} of {}, ", progress.trace + 1, progress.traces) : "";
  return fmt::format("{}{}, layer {} of {}", which, progress.name, progress.layer, progress.layers);
}

/// Names the observables that were read, because their seconds are not those of the computation.
void report_read(const RunSummary& summary) {
  for (const TraceRecord& trace : summary.traces) {
    std::string what;
    for (const auto& [observable, layers] : trace.read_observables)
      what += fmt::format("{}{} of {} layers", what.empty() ? "" : ", ", observable, layers);
    if (!what.empty()) say("kvreplay: stored observables read from {}: {}\n", trace.observables.string(), what);
  }
}

/// Names kvreplay.yaml and the options that it has set: the command line does not show them.
void report_user_defaults(const Arguments& arguments) {
  std::string file, set;
  for (const auto& [name, value] : arguments.user_defaults()) {
    if (arguments.given(name)) continue;  // by an experiment
    file = value.place.substr(0, value.place.rfind(':'));
    set += fmt::format(" --{} {}", name, value.text);
  }
  if (!set.empty()) say("kvreplay: defaults from {}:{}\n", file, set);
}

/// Names the traces of earlier calls, which tables and figures of the folder include. Shards share a folder.
void report_earlier_traces(const Arguments& arguments, const RunSummary& summary) {
  if (arguments.given("shard")) return;
  std::set<std::string> names;
  for (const std::filesystem::path& file : cell_files_of(summary.output)) names.insert(file.stem().string());
  for (const TraceRecord& trace : summary.traces) names.erase(trace.name);
  if (names.empty()) return;
  say("kvreplay: {} also has results of {} from earlier calls, which show, plot, compare and report include; use "
      "another --output to separate them\n",
      summary.output.string(), names.size() == 1 ? "trace " + *names.begin() : fmt::format("{} traces", names.size()));
}

/// Names policies that were named as presses of kvpress.
void report_presses(const Arguments& arguments) {
  for (const GivenValue& text : policy_texts(arguments)) {
    const std::string name = text.text.substr(0, end_of_policy_name(text.text));
    if (!is_press(name)) continue;
    const ConfiguredPolicy policy = ConfiguredPolicy::parse(text.text);
    const std::string preset = policy.has_press_preset() ? fmt::format(":preset={}", press_preset) : "";
    say("kvreplay: {} is {}{}; docs/kvpress.md lists the differences to kvpress\n", name, policy.name(), preset);
  }
}

/// Names the metrics that the user asked for, and that a sample does not estimate.
void report_not_estimated(const Arguments& arguments, const RunRequest& request) {
  std::string names;
  for (const MetricName& name : request.metrics)
    if (arguments.given("metrics") && !why_not_estimated(request, name).empty())
      names += (names.empty() ? "" : ", ") + name.text();
  if (!names.empty()) say("kvreplay: not estimated from a sample: {}\n", names);
}

void report_troubles(const RunSummary& summary) {
  for (const std::string& warning : summary.warnings) say("kvreplay: warning: {}\n", warning);
  std::set<std::string> whole;  // traces of which no cell was measured, for one reason
  for (const TraceRecord& trace : summary.traces)
    if (!trace.error.empty() && whole.insert(trace.name).second)
      say("kvreplay: failed: {}, all cells: {}\n", trace.name, trace.error);
  for (const CellRecord& cell : summary.cells)
    if (cell.state == CellState::failed && !whole.contains(cell.trace))
      say("kvreplay: failed: {}, {} at budget {}: {}\n", cell.trace, cell.label, cell.budget, cell.error);
}

/// `output`: empty for results in memory.
Prepared prepared(const Asked& asked, const std::string& output,
                  const std::vector<std::shared_ptr<const Trace>>& in_memory = {}) {
  const Arguments& arguments = asked.arguments;
  if (arguments.text("output").empty()) throw Error{Refusal::usage, "--output", "empty", "a folder for results"};
  for (const std::string& file : arguments.all(plugin_option.name)) load_plugin(file);
  Prepared all = [&] {
    try {
      return requested(arguments);
    } catch (const Error& error) {  // a wrong file is the first thing to correct
      if (error.refusal() == Refusal::usage && in_memory.empty()) require_a_trace(arguments.operands());
      throw;
    }
  }();
  all.request.output = output;
  for (const std::shared_ptr<const Trace>& trace : in_memory) all.request.in_memory.emplace(trace->path(), trace);
  if (arguments.given("memory")) arguments.bytes("memory");
  const int wanted = all.request.threads > 0 ? all.request.threads : machine_threads();
  if (const int threads = affordable_threads(wanted); threads < wanted) all.request.threads = threads;
  all.request.build =
      build_facts(make_backend(all.request.backend, all.request.threads, all.request.device)->description());
  if (!all.device.reason.empty()) all.request.build["device"] = "auto: " + all.device.reason;
  if (all.request.traces.empty()) return all;
  plan(arguments, all);
  for (std::size_t i = 0; i < all.traces.size(); ++i) check_hash(asked.traces[i], all.traces[i].hash);
  return all;
}

/// Without --output results stay in memory.
Prepared prepared_in_memory(const Asked& asked, const std::vector<std::shared_ptr<const Trace>>& in_memory) {
  return prepared(asked, asked.arguments.given("output") ? asked.arguments.text("output") : "", in_memory);
}

[[noreturn]] void watch(const Arguments& arguments) {
  static constexpr std::string_view left_out[] = {"watch"};
  std::vector<std::string> words{"watch", (program_folder() / "kvreplay").string(), arguments.command().name};
  std::ranges::copy(arguments.operands(), std::back_inserter(words));
  std::ranges::move(arguments.spelled_out(left_out), std::back_inserter(words));
  if (std::ranges::find(words, "--output") == words.end())
    words.insert(words.end(), {"--output", arguments.text("output")});
  run_companion("python", words);
}

int run_replay(const Arguments& given) {
  if (given.given("figure") && !given.given("watch"))
    throw Error{Refusal::usage, "--figure", "needs --watch", "--watch, or kvreplay plot"};
  const Asked experiment = asked(given);
  const Arguments& arguments = experiment.arguments;
  const bool is_quiet = arguments.is_quiet();
  const TableOptions table = table_options_of(arguments);
  check_columns(table.columns, asked_metrics(arguments), arguments.text("controls") == "twins");
  if (!is_quiet) report_user_defaults(arguments);
  if (given.given("watch")) watch(arguments);
  heed_interruptions();
  Prepared all = prepared(experiment, arguments.text("output"));
  if (arguments.given("dry-run")) {
    print_plan(arguments, all);
    return 0;
  }
  if (!all.run) {
    if (!is_quiet) say("kvreplay: shard {} of the traces is empty\n", arguments.text("shard"));
    if (arguments.given("json")) print_run(arguments, table, {.output = all.request.output});
    return 0;
  }
  all.traces.clear();  // the run has its own, and closes them one by one

  std::optional<Profile> profile;
  double peak = 0;
  if (arguments.given("profile")) {
    peak = peak_rate(*make_backend(all.request.backend, all.request.threads, all.request.device));
    profile.emplace();
  }
  const RunSummary summary = [&] {
    ProgressLine line(arguments);
    return all.run->run([&line](const Progress& progress) { line.show(progress.done, doing(progress)); }, interrupted);
  }();
  if (!is_quiet) {
    report_read(summary);
    report_presses(arguments);
    report_not_estimated(arguments, all.request);
    report_earlier_traces(arguments, summary);
  }
  report_troubles(summary);
  print_run(arguments, table, summary);
  if (profile) {
    if (!arguments.given("json")) print_profile(*profile, peak);
    replace_file(arguments.text("profile"), speedscope_json(*profile));
  }
  return summary.failed() > 0 ? 6 : 0;
}

std::string details() { return trace_list_help() + "@EXPERIMENT.yaml is a file with traces and options.\n"; }

}  // namespace

RunSummary replay_traces(const Arguments& arguments, const std::vector<std::shared_ptr<const Trace>>& in_memory,
                         const std::function<void(const Progress&)>& progress,
                         const std::function<bool()>& asked_to_stop) {
  Prepared all = prepared_in_memory(asked(arguments), in_memory);
  if (!all.run) throw Error{Refusal::usage, "replay", "no trace", "at least one"};
  all.traces.clear();  // the run has its own, and closes them one by one
  return all.run->run(progress, asked_to_stop);
}

std::string plan_json(const Arguments& arguments, const std::vector<std::shared_ptr<const Trace>>& in_memory) {
  const Asked experiment = asked(arguments);
  return plan_as_json(experiment.arguments, prepared_in_memory(experiment, in_memory)).dump();
}

const Command replay_command{
    "replay",   "replays policies at budgets on traces; prints a table and writes a folder of results",
    "TRACE...", options,
    run_replay, details,
    examples,   true};

}  // namespace kvreplay
