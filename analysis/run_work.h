// What a run does with its traces: planned first (run_plan.h), and completed while the traces are replayed (run.cpp).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "analysis/run.h"
#include "analysis/trace_cells.h"
#include "policies/text/configured.h"

namespace kvreplay {

/// What is to be done for one cell, and what an earlier run has left of it.
struct CellWork {
  CellRecord facts = {};  // id to budget; after the run: all of it, once it is done
  ConfiguredPolicy policy;
  std::vector<MetricName> wanted;
  std::vector<MetricName> missing = {};
  Heads heads = Heads::layer;             // the finest granularity of all layers
  bool can_save_scores = false;           // a matrix [L, H, P] can hold them
  bool found = false;                     // in the file, and not to be made anew
  std::optional<CellResult> looked = {};  // at the sample before this one
  bool lacks_scores = false;

  /// Sets that are there are used again, unless scores are wanted, which only scoring makes.
  bool uses_known_sets() const { return found && !lacks_scores; }
  bool to_compute() const { return facts.error.empty() && (!found || lacks_scores || !missing.empty()); }
  void fail(std::string error) {
    facts.state = CellState::failed;
    facts.error = std::move(error);
  }
};

struct TraceWork {
  std::shared_ptr<const Trace> trace;  // null: it is not open any more, or cannot be opened
  FileIdentity file;                   // that was hashed
  Conditions conditions;
  std::vector<std::int32_t> eval_queries;  // all, of which `conditions` has a sample
  // Of a sampled trace: eval queries of `conditions`, replayed layers, and measured KV heads of each of these, by their
  // numbers, in pairs.
  std::vector<int> query_pairs, layer_pairs;
  std::vector<std::vector<int>> head_pairs;
  std::optional<Conditions> all_queries;  // for metrics that take every token as eval query
  TraceRecord facts;
  std::optional<FileIdentity> stored_file;  // of cells_path() when this was planned
  std::optional<TraceCells> stored;  // from an earlier run; its cells' numbers only while this trace is worked on
  WantedOfTrace of_trace;
  std::vector<CellWork> cells;
  std::vector<std::string> warnings;
  std::optional<TraceInMemory> in_memory;  // the results, of a run without a folder

  const CellRecord* earlier(const std::string& id) const { return stored ? stored->find(id) : nullptr; }
  std::filesystem::path cells_path(const std::filesystem::path& output) const {
    return output / "cells" / (facts.name + ".h5");
  }
  /// Once.
  void warn(const std::string& warning);
};

/// What the cells of a policy say on any trace and at any budget.
CellRecord cell_of_policy(const ConfiguredPolicy& policy, const char* role, std::uint64_t seed);

/// The share of all seen tokens that a budget is; 0 for other budgets.
double share_of_seen(const CellRecord& cell);

/// 16 hexadecimal digits: of the trace, the conditions, the policy with its values and version, and the budget.
std::string cell_id(const TraceRecord& trace, const CellRecord& cell);

/// The same policy with the same values, of another version of the files that it comes from.
bool of_another_version(const CellRecord& cell, const CellRecord& other);

/// An edited policy's numbers replace those that its file gave before.
bool replaces(const CellRecord& now, const CellRecord& earlier);

}  // namespace kvreplay
