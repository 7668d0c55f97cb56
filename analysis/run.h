// A run: traces x policies x budgets -> a folder of results. Finished work is never done twice.
//
// The folder contains one file cells/TRACE.h5 for each finished trace, and views of these files: results.csv,
// seconds.csv, run.json. Every file is written as NAME.partial and renamed; one run at a time writes into a folder.
// Without a folder, the run returns the same results in memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "analysis/metrics/metric.h"
#include "analysis/precision.h"
#include "analysis/results.h"
#include "analysis/trace_cells.h"
#include "policies/text/configured.h"
#include "replay/estimate.h"
#include "replay/replay.h"
#include "replay/sample.h"
#include "replay/stored_observables.h"

namespace kvreplay {

/// What becomes of NAME.obs.h5 beside a trace: read where it fits; also written; neither.
enum class ObservableUse { use, keep, ignore };

/// Cells beside those that are asked for, at the same budgets.
enum class Controls {
  none,
  random,  // of full, random and oracle
  twins    // these, and the random twin of each policy that has one
};

struct RunRequest {
  std::vector<std::filesystem::path> traces;
  std::map<std::filesystem::path, std::shared_ptr<const Trace>> in_memory;  // of `traces`: those that no file holds
  std::vector<ConfiguredPolicy> policies;                                   // what was asked
  Controls controls = Controls::random;
  std::vector<Budget> budgets;
  std::set<std::pair<std::size_t, std::size_t>> excluded;  // policies and budgets, by their places: not asked together
  std::vector<MetricName> metrics;                         // as parse_metrics makes them
  Detail detail = Detail::layer;
  std::string eval = "continuation";
  SampleSizes sample;
  Precision precision;
  std::string boundary = "prompt";
  bool treat_sliding = false;
  bool save_scores = false;
  bool save_attention = false;
  ObservableUse observables = ObservableUse::use;
  std::uint64_t seed = 0;
  std::string backend = "cpu";
  DeviceChoice device;
  int threads = 0;                // 0: all
  std::filesystem::path output;   // results folder; empty: results are returned in memory
  bool force = false;             // what is asked is computed again; a file of cells under other conditions is replaced
  bool no_text = false;           // tokens and spans are not copied into the results
  std::vector<std::string> argv;  // for run.json, as is `build`: version, compiler, libraries, SIMD level ...
  std::map<std::string, std::string> build;

  bool samples_queries() const { return sample.queries > 0 || precision.half_width > 0; }
  bool is_sampled() const { return samples_queries() || sample.layers > 0 || sample.heads > 0; }
  bool asks(std::size_t policy, std::size_t budget) const { return !excluded.contains({policy, budget}); }
};

/// How far a run is. `done` is the share of the whole run, 0 ... 1.
struct Progress {
  int trace = 0;  // from 0
  int traces = 1;
  std::string name;
  int layer = 0;  // treated layers finished in this walk
  int layers = 1;
  double done = 0;
};

/// The contents of cells/TRACE.h5, as records and as bytes.
struct TraceInMemory {
  TraceCells all;
  std::vector<std::byte> file;
};

struct RunSummary {
  std::filesystem::path output = {};
  std::vector<TraceRecord> traces = {};
  std::vector<CellRecord> cells = {};        // by trace, budget as asked, then policy as asked, controls last
  std::vector<std::string> self_check = {};  // "full 0", "budget ok", ...; what is violated says where
  std::vector<std::string> warnings = {};

  std::string about = {};  // run.json
  Detail detail = Detail::layer;
  std::map<std::string, TraceInMemory> in_memory = {};  // of a run without a folder, by the names of the traces

  int failed() const;  // cells; the program's exit code is 6 when there are any
};

/// What a run would do with one trace.
struct PlannedTrace {
  std::string name = {};
  std::filesystem::path path = {};
  std::string hash = {};
  std::shared_ptr<const Trace> trace = {};  // null: it is not open
  Conditions conditions = {};               // without layers: it cannot be replayed
  std::vector<Cell> cells =
      {};           // to be computed; `known` where only metrics are missing, `measure` where moments are needed
  int skipped = 0;  // cells that are already there, whole
  Demand demand = {};
};

/// Why the sample of a request does not estimate a metric; empty: it does.
std::string why_not_estimated(const RunRequest& request, const MetricName& name);

inline constexpr int numerics = 9;

/// Throws Error{usage} for two traces of one name: it names their files and groups in results.
void check_names(std::span<const std::filesystem::path> traces);

/// A run that was checked: each trace was opened, hashed and planned, and stays open until it has been replayed. A
/// process may not have any number of files open: of more than 256 traces, those behind are closed, and opened again.
class PlannedRun {
 public:
  /// Computes nothing and writes nothing. Throws Error{usage} for what cannot be meant, and Error{input} when no trace
  /// can serve any policy that was asked for.
  explicit PlannedRun(RunRequest request);
  PlannedRun(PlannedRun&&) noexcept;
  ~PlannedRun();

  /// One for each trace of the request. A trace that cannot be replayed after all fails alone; throws Error{input} when
  /// none can.
  std::vector<PlannedTrace> traces();
  /// What it may take; results depend on neither. 0 threads: all. `mapped_bytes` of a trace at a time.
  void limit(int threads, std::size_t mapped_bytes);
  /// Once. Throws Error{usage} for a folder that another run writes into, before anything is computed; Error{resources}
  /// for a full disk and Error{interrupted}, both with finished traces kept. What fails for some traces or policies
  /// only is a failed cell of the summary and the run goes on.
  RunSummary run(const std::function<void(const Progress&)>& progress = {},
                 const std::function<bool()>& interrupted = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Plans and runs. Throws as these do.
RunSummary run(const RunRequest& request, const std::function<void(const Progress&)>& progress = {},
               const std::function<bool()>& interrupted = {});

}  // namespace kvreplay
