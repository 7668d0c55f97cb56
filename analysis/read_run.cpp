#include "analysis/read_run.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "analysis/live_rows.h"
#include "analysis/results_folder.h"
#include "analysis/run_json.h"
#include "parameters.h"
#include "policies/text/configured.h"
#include "policies/twin.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

Json list_of(const Json& run, const char* key) { return run.value(key, Json::array()); }

/// Of a policy in a file that this process has not read: user-defined.
std::string family_of(const std::string& policy) {
  const PolicyEntry* const entry = policies().find(policy);
  return word_of(entry == nullptr ? Family::own : entry->make()->card().family);
}

/// The cell as a run's summary has it: values over all layers and heads, seconds of all layers together.
CellRecord overall(CellRecord cell, const std::string& trace) {
  cell.trace = trace;
  cell.state = CellState::done;
  cell.family = family_of(cell.policy);
  for (auto& [name, values] : cell.values) values = Values(1, 1, values.values().back());
  cell.by_query.clear();
  cell.by_layer.clear();
  cell.by_head.clear();
  cell.seconds = {{0, cell.select_seconds()}};
  return cell;
}

/// The labels of the policies of the last call, by name and parameters.
std::map<std::string, std::string> labels_of(const Json& run) {
  std::map<std::string, std::string> labels;
  for (const Json& policy : list_of(run, "policies")) {
    std::string params;
    for (const auto& [name, value] : policy.at("parameters").items())
      params += (params.empty() ? "" : ",") + name + "=" + value.get<std::string>();
    labels[policy.at("name").get<std::string>() + ":" + params] = policy.at("label").get<std::string>();
  }
  return labels;
}

/// As the parameter `of` of its random twin has it.
std::string name_for_twin(const CellRecord& cell) {
  try {
    return ConfiguredPolicy::parse(cell.label, cell.seed).label_with_seeds();
  } catch (const Error&) {
    return cell.label;  // of a file that this process has not read
  }
}

/// Enters which cell each random twin belongs to.
void find_twins(std::vector<CellRecord>& cells) {
  const auto place = [](const CellRecord& cell, const std::string& name) {
    return std::tuple{cell.trace, cell.budget_tokens, Budget::parse(cell.budget).of_seen(), name};
  };
  if (std::ranges::find(cells, random_twin_name, &CellRecord::policy) == cells.end()) return;
  std::map<std::tuple<std::string, int, double, std::string>, std::string> ids;
  for (const CellRecord& cell : cells) ids.emplace(place(cell, name_for_twin(cell)), cell.id);
  for (CellRecord& cell : cells) {
    if (cell.policy != random_twin_name) continue;
    for (const std::string_view parameter : split_list(cell.policy, cell.params)) {
      if (!parameter.starts_with("of=")) continue;
      std::string of(parameter.substr(3));
      if (of.starts_with('(')) of = of.substr(1, of.size() - 2);
      if (const auto found = ids.find(place(cell, of)); found != ids.end()) cell.twin_of = found->second;
    }
  }
}

/// The finished cells of all files, by trace and id; the traces.
struct Finished {
  std::map<std::string, TraceRecord> traces;
  std::map<std::pair<std::string, std::string>, CellRecord> cells;
};

Finished finished_cells(const fs::path& folder) {
  Finished all;
  for (const fs::path& path : cell_files_of(folder)) {
    TraceCells of_trace = read_trace_cells(path);
    const std::string name = of_trace.trace.name;
    const auto live = live_numbers(folder, name);
    for (CellRecord& cell : of_trace.cells) {
      CellRecord& known = all.cells[{name, cell.id}] = overall(cell, name);
      if (const auto numbers = live.find(cell.id); numbers != live.end())
        for (const auto& [metric, value] : numbers->second) known.values[metric] = Values(1, 1, value);
    }
    of_trace.trace.values.clear();
    all.traces.emplace(name, std::move(of_trace.trace));
  }
  return all;
}

/// The traces of the last call in its order, then those of earlier ones.
void add_traces(const Json& run, std::map<std::string, TraceRecord> finished, RunSummary& summary) {
  for (const Json& input : list_of(run, "inputs")) {
    const auto name = input.at("trace").get<std::string>();
    const auto found = finished.find(name);
    TraceRecord& trace = summary.traces.emplace_back();
    if (found != finished.end()) trace = std::move(found->second);
    finished.erase(name);
    trace.name = name;
    trace.path = input.value("path", "");
    trace.prompt_hash = input.value("prompt_hash", "");
    trace.read_observables = input.value("read_observables", std::map<std::string, int>());
    trace.error = input.value("error", "");
  }
  for (auto& [name, trace] : finished) summary.traces.push_back(std::move(trace));
}

/// The cells of the last call in its order, the failed ones too, then those of earlier ones.
void add_cells(const Json& run, Finished& finished, RunSummary& summary) {
  const std::map<std::string, std::string> labels = labels_of(run);
  for (const Json& entry : list_of(run, "cells")) {
    CellRecord cell = cell_of(entry);
    const auto found = finished.cells.find({cell.trace, cell.id});
    if (cell.state == CellState::failed) {
      const auto label = labels.find(cell.policy + ":" + cell.params);
      cell.label = label == labels.end() ? cell.policy : label->second;
      cell.family = family_of(cell.policy);
      summary.cells.push_back(std::move(cell));
    } else if (found != finished.cells.end()) {
      found->second.role = cell.role;
      found->second.budget = cell.budget;
      summary.cells.push_back(std::move(found->second));
    }
    if (found != finished.cells.end()) finished.cells.erase(found);
  }
  for (auto& [place, cell] : finished.cells) summary.cells.push_back(std::move(cell));
}

}  // namespace

RunSummary read_run(const fs::path& folder) {
  const fs::path path = folder / "run.json";
  if (std::error_code ignored; !fs::exists(path, ignored)) {
    if (fs::is_regular_file(folder, ignored))
      throw Error{Refusal::input, folder.string(), "not a run",
                  fmt::format("kvreplay replay {} -o RUN, then RUN", folder.string()), "a file"};
    cell_files_of(folder);  // answers results of format 1
    throw Error{Refusal::input, folder.string(), "not a finished run", "a folder of kvreplay replay with run.json",
                fs::exists(folder, ignored) ? "no run.json" : "no such folder"};
  }
  try {
    const Json run = read_run_json(path);
    Finished finished = finished_cells(folder);
    RunSummary summary{.output = folder};
    add_traces(run, std::move(finished.traces), summary);
    add_cells(run, finished, summary);
    find_twins(summary.cells);
    summary.self_check = run.value("self_check", Json::object()).value("result", std::vector<std::string>());
    summary.warnings = run.value("warnings", std::vector<std::string>());
    return summary;
  } catch (const Json::exception& problem) {
    throw invalid_run_json(path, problem);
  }
}

}  // namespace kvreplay
