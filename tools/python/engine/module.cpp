// kvreplay._engine: what kvreplay/engine.py and kvreplay/python_policies.py are made of.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "analysis/mean_interval.h"
#include "analysis/metrics/metric.h"
#include "analysis/read_run.h"
#include "analysis/results.h"
#include "analysis/table.h"
#include "arrays.h"
#include "commands.h"
#include "errors.h"
#include "interpreter_lock.h"
#include "machine.h"
#include "policies/text/configured.h"
#include "policies/text/layer_ranges.h"
#include "policies/text/plugin.h"
#include "policies/text/policy_source.h"
#include "program.h"
#include "python_policy.h"
#include "replay_traces.h"
#include "run_output.h"
#include "stored_cell.h"
#include "trace.h"
#include "trace_list.h"
#include "user_defaults.h"
#include "view.h"

namespace kvreplay::python {
namespace {

namespace nb = nanobind;

/// Ctrl-C, as Python hears it, or Python's own end. What a handler raises is KeyboardInterrupt, or is reported as if it
/// were.
bool asked_to_stop() {
  if (is_ending()) return true;
  const Locked locked;
  if (PyErr_CheckSignals() == 0) return false;
  PyErr_Clear();
  return true;
}

std::vector<std::shared_ptr<const Trace>> opened_traces(const nb::list& traces) {
  std::vector<std::shared_ptr<const Trace>> opened;
  for (const nb::handle trace : traces) opened.push_back(opened_trace(trace));
  return opened;
}

/// run.json, detail, the bytes of the files of cells by trace, and ResultColumns as (owners, metrics, [owner, layer,
/// head, metric], value, half_width).
nb::tuple in_memory_results(const RunSummary& summary) {
  nb::dict files;
  ResultColumns columns;
  for (const auto& [name, trace] : summary.in_memory) {
    columns.add(trace.all.trace, trace.all.cells, summary.detail);
    files[name.c_str()] = nb::bytes(trace.file.data(), trace.file.size());
  }
  nb::list metrics, numbers;
  for (const MetricName& name : columns.metrics)
    metrics.append(nb::make_tuple(name.metric, name.variant, unit_of(name)));
  const std::size_t rows = columns.value.size();
  for (auto* column : {&columns.owner, &columns.layer, &columns.head, &columns.metric})
    numbers.append(as_array(std::move(*column), {rows}));
  return nb::make_tuple(
      summary.about, word(summary.detail), files,
      nb::make_tuple(nb::cast(columns.owners), metrics, numbers, as_array(std::move(columns.value), {rows}),
                     as_array(std::move(columns.half_width), {rows})));
}

nb::dict replay(const std::vector<std::string>& words, const nb::list& in_memory, const nb::object& progress) {
  RunSummary summary;
  const auto traces = opened_traces(in_memory);
  std::optional<nb::python_error> raised;  // by `progress`: it ends the run
  const auto heard = [&](const Progress& now) {
    const Locked locked;
    try {
      if (!raised) progress(now.done, now.name);
    } catch (nb::python_error& error) {
      raised.emplace(std::move(error));
    }
  };
  try {
    const Unlocked unlocked;
    const Arguments arguments(replay_command, "kvreplay", words);
    summary = replay_traces(arguments, traces, heard, [&] { return raised || asked_to_stop(); });
  } catch (const Error&) {
    if (!raised) throw;
  }
  if (raised) throw *std::exchange(raised, std::nullopt);
  nb::list troubles;
  for (const CellRecord& cell : summary.cells)
    if (cell.state == CellState::failed)
      troubles.append(cell.trace + ", " + cell.label + " at " + cell.budget + ": " + cell.error);
  nb::dict found;
  found["output"] = summary.output.string();
  found["failed"] = troubles;
  found["warnings"] = nb::cast(summary.warnings);
  if (summary.output.empty()) found["in_memory"] = in_memory_results(summary);
  return found;
}

std::string plan(const std::vector<std::string>& words, const nb::list& in_memory) {
  const auto traces = opened_traces(in_memory);
  const Unlocked unlocked;
  return plan_json(Arguments(replay_command, "kvreplay", words), traces);
}

nb::list registered() {
  nb::list all;
  for (const std::string& name : policies().names()) {
    const ConfiguredPolicy policy = ConfiguredPolicy::with_defaults(name);
    const Card& card = policy.card();
    nb::list parameters;
    const Parameters declared = policy.parameters();
    for (const Parameter& parameter : declared.all())
      parameters.append(nb::make_tuple(parameter.name, parameter.default_text, parameter.range, parameter.help));
    all.append(nb::make_tuple(name, card.summary, card.paper, card.score, parameters));
  }
  return all;
}

nb::list policies_by_family() {
  nb::list all;
  for (const Choice<Family>& family : families) {
    nb::list members;
    for (const std::string& name : policies().names())
      if (ConfiguredPolicy::with_defaults(name).card().family == family.value) members.append(name);
    all.append(nb::make_tuple(family.word, members));
  }
  return all;
}

nb::list parameters_of(const std::string& text) {
  const ConfiguredPolicy policy = ConfiguredPolicy::parse(text);
  const Parameters declared = policy.parameters();
  nb::list all;
  for (const Parameter& one : declared.all()) all.append(nb::make_tuple(one.name, one.text(), one.range, one.is_seed));
  return all;
}

/// Of ranges of layers the decision that depends on most.
std::pair<std::string, std::string> decision_and_store(const std::string& text, int layers) {
  constexpr Decision by_dependence[] = {Decision::future, Decision::during_prefill, Decision::after_prefill,
                                        Decision::never};
  constexpr const char* words[] = {"future", "during-prefill", "after-prefill", "never"};
  constexpr const char* stores[] = {"exact", "cache-positions", "changed"};
  std::size_t decision = std::size(by_dependence) - 1, store = 0;
  for (const LayerPlan& of_range : ConfiguredPolicy::parse(text).plans(layers)) {
    const auto* const found = std::ranges::find(by_dependence, decision_of(of_range.plan));
    decision = std::min(decision, static_cast<std::size_t>(found - std::begin(by_dependence)));
    const Store& of_tokens = *of_range.plan.store;
    store = std::max<std::size_t>(store, of_tokens.changes_tokens() ? 2 : of_tokens.moves_tokens ? 1 : 0);
  }
  return {words[decision], stores[store]};
}

/// The text that `kvreplay show` prints; in_memory: without the lines that name the folder.
std::string run_table(const std::vector<std::string>& words, bool in_memory) {
  const Unlocked unlocked;
  const Arguments arguments(show_command, "kvreplay", words);
  RunSummary summary = read_run(arguments.operands().front());
  if (in_memory) summary.output.clear();
  TableOptions options = show_options_of(arguments);
  options.colour = false;
  return table(summary, options);
}

/// The metric that a title of a table stands for; another text is returned as it is.
std::string metric_of_title(const std::string& text) {
  const std::optional<MetricName> titled = find_title(text);
  return titled ? titled->text() : text;
}

std::string better_of_metric(const std::string& text) { return word(better_of(parse_metric("--metric", text))); }

/// (title, metric, variant) of each title, in the order of the columns of a table.
std::vector<std::tuple<std::string, std::string, std::string>> titles() {
  std::vector<std::tuple<std::string, std::string, std::string>> all;
  for (const std::string& title : metric_titles()) {
    const MetricName name = *find_title(title);
    all.emplace_back(title, name.metric, name.variant);
  }
  return all;
}

/// (name, unit, better, formula, variants, whether it is of generated text) of each metric of the live model.
std::vector<std::tuple<std::string, std::string, std::string, std::string, std::vector<std::string>, bool>>
live_metrics() {
  std::vector<std::tuple<std::string, std::string, std::string, std::string, std::vector<std::string>, bool>> all;
  for (const std::string& name : metrics().names()) {
    const MetricCard& card = metrics().get(name);
    const auto* const live = std::get_if<OfLiveModel>(&card.variants.front().measure);
    if (live == nullptr) continue;
    std::vector<std::string> variants;
    for (const MetricVariant& variant : card.variants) variants.push_back(variant.name);
    all.emplace_back(name, card.unit, word(card.better), card.formula, std::move(variants), live->of_text);
  }
  return all;
}

}  // namespace
}  // namespace kvreplay::python

NB_MODULE(_engine, module) {
  using namespace nanobind::literals;
  namespace python = kvreplay::python;
  kvreplay::read_openmp_settings();    // of the environment as kvreplay/__init__.py has set it
  nanobind::set_leak_warnings(false);  // policies live in a registry that outlives the interpreter
  python::translate_errors();
  python::wait_at_exit();
  python::bind_view(module);
  python::bind_trace(module);
  python::bind_stored_cell(module);
  python::bind_python_policies(module);
  module.def("policies", python::registered, "(name, summary, paper, score, [(name, default, range, help)]) of each");
  module.def("families", python::policies_by_family,
             "(family, [name]) of the registered policies, in the order of `kvreplay policies`.");
  module.def(
      "label", [](const std::string& text) { return kvreplay::ConfiguredPolicy::parse(text).label(); }, "policy"_a,
      "The policy in its normal form: its name, and what differs from the defaults.");
  module.def(
      "canonical",
      [](const std::string& text) {
        const kvreplay::ConfiguredPolicy policy = kvreplay::ConfiguredPolicy::parse(text);
        return std::make_pair(policy.name(), policy.params());
      },
      "policy"_a, "Its name and the values of all its parameters, as results have them.");
  module.def("load_plugin", kvreplay::load_plugin, "path"_a,
             "Registers the policies and parts of a compiled plug-in; returns the hash of its content.");
  module.def("split_policies", kvreplay::split_policies, "text"_a,
             "The policies of a comma list; @FILE stands for those of that file.");
  module.def("end_of_policy_name", kvreplay::end_of_policy_name, "text"_a,
             "Where the name of a policy ends that the text begins with: behind that of its file, if it is in one.");
  module.def("parameters", python::parameters_of, "policy"_a,
             "(name, value, range, whether it is a seed) of each, those of the parts put into it too.");
  module.def(
      "check_layers_apart",
      [](const std::string& text) { kvreplay::ConfiguredPolicy::parse(text).check_layers_apart(); }, "policy"_a,
      "Refuses a policy unless each layer's sets depend on that layer and the budget alone.");
  module.def(
      "decision_and_store", python::decision_and_store, "policy"_a, "layers"_a,
      "When its sets are decided: after-prefill, during-prefill, future or never; and how kept tokens are stored: "
      "exact, cache-positions or changed.");
  module.def("list_value", kvreplay::list_value, "value"_a,
             "A value as it stands in a list of KEY=VALUE: in parentheses where it would not end at the next comma.");
  module.def(
      "budget",
      [](const std::string& text) {
        const kvreplay::Budget budget = kvreplay::Budget::parse(text);
        return std::make_pair(budget.fraction, budget.count);
      },
      "budget"_a, "(fraction of the prompt, tokens) of a budget's text: one of the two is 0.");
  module.def("budget_of_compression_ratio", kvreplay::Budget::of_compression_ratio, "ratio"_a,
             "The budget that evicts this share of the prompt, as replay writes it: 0.9 is 0.1.");
  module.def("without_preset", kvreplay::ConfiguredPolicy::without_preset, "policy"_a,
             "The policy with a preset, or a press of kvpress, spelt as the values that it stands for.");
  module.def(
      "policy_name", kvreplay::registered_policy, "name"_a,
      "The registered name of a policy in another spelling: SnapKVPress is snapkv. An unknown name is unchanged.");
  module.def(
      "user_defaults",
      [] {
        std::map<std::string, std::pair<std::string, std::string>> texts;
        for (const auto& [option, value] : kvreplay::read_user_defaults()) texts[option] = {value.text, value.place};
        return texts;
      },
      "The user's defaults for options: the values of kvreplay.yaml by option, each with its place, FILE:LINE.");
  nanobind::class_<kvreplay::ListedTrace>(module, "ListedTrace", "A trace of a list of files, folders and manifests.")
      .def_prop_ro("path", [](const kvreplay::ListedTrace& listed) { return std::filesystem::path(listed.path); })
      .def("check_hash", kvreplay::check_hash, "hash"_a, "Refuses the hash of the trace if its manifest has another.");
  module.def(
      "list_traces",
      [](const std::vector<std::filesystem::path>& names) {
        return kvreplay::list_traces(std::vector<std::string>(names.begin(), names.end()));
      },
      "names"_a, "The traces that files, folders, quoted patterns and manifests (.csv) name, in this order.");
  module.def(
      "half_width",
      [](const std::vector<double>& sums, const std::vector<double>& counts) {
        return kvreplay::half_width(sums, counts);
      },
      "sums"_a, "counts"_a,
      "Of the 95 % interval of a mean of clusters with these sums and numbers of values; NaN below two clusters.");
  module.def("better", python::better_of_metric, "metric"_a, "Of a metric NAME[:VARIANT]: higher, lower or neither.");
  module.def("metric_of_title", python::metric_of_title, "text"_a,
             "The metric NAME[:VARIANT] that a title of a table, such as recall, stands for; another text as it is.");
  module.def("titles", python::titles, "(title, metric, variant) of each title, in the order of a table's columns.");
  module.def("live_metrics", python::live_metrics,
             "(name, unit, better, formula, variants, is_of_text) of each metric of the live model.");
  module.def("table", python::run_table, "words"_a, "in_memory"_a,
             "The text that `kvreplay show WORDS` prints; in_memory: without the lines that name the folder.");
  module.def("replay", python::replay, "words"_a, "in_memory"_a, "progress"_a,
             "Runs the command line `kvreplay replay WORDS` without printing. Without --output results are in memory.\n"
             "in_memory: those of its traces that are in memory; progress(share, trace): a callback.");
  module.def("plan", python::plan, "words"_a, "in_memory"_a,
             "The output of `kvreplay replay WORDS --dry-run --json`; in_memory as in replay.");
  module.def(
      "assemble",
      [](const std::filesystem::path& folder, const std::string& detail) {
        kvreplay::assemble(folder, kvreplay::parse_detail(detail));
      },
      "folder"_a, "detail"_a, "Writes results.csv and seconds.csv of a folder that has cells.");
  module.def(
      "program",
      [](const std::vector<std::string>& words) {
        const python::Unlocked unlocked;
        return kvreplay::run_program("kvreplay", words);
      },
      "words"_a, "The program kvreplay; gives its exit code.");
}
