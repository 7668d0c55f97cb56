// cells/TRACE.h5: all that a run knows of one trace, and the only place that does: the unit that is finished or not.
// h5py, h5ls and pandas read it without this program.
//
//   /traces/NAME    sizes and conditions as attributes; redundancy_key, redundancy_value, eval_attention [L, P];
//                   eval_attention_heads [L, Hq, P]; tokens and spans
//   /cells/ID       attributes: what the cell is. offsets int64 [L*H + 1], positions int32: row layer*H + head holds
//                   its kept positions, ascending; layer_source int32 [L]: whose set a layer uses, -1 where it is not
//                   treated; budget, sinks, recent int32 [L, H]; evicted_at int32 [L, H, T] where sets change with
//                   time; slots where kept tokens stand in another order; scores float32 [L, H, P]; jaccard_* float64
//   /values/ID      `numbers`: all its values [L+1, H+1], one metric after the other; `metrics`: lines of
//                   metric,variant,rows,columns. /values/trace: values of the trace itself
//   /by_query/ID    of a sampled trace: `numbers` float64 [metrics, n_queries], values of the sampled eval queries in
//                   pairs of one stratum; `metrics`: lines of metric,variant. /by_layer/ID: the same of sampled layers;
//                   /by_head/ID: of the sampled KV heads of each layer
//   /seconds/ID     float64 [treated, 2]: scoring, selection; /seconds/observables [treated]
//
// H is the finest granularity of the cell's layers, as many rows as the layer with most has; other layers have empty
// rows behind their own. Attribute layer_heads where layers differ in granularity; attributes layer_query_heads and
// layer_kv_heads of the trace, [L], where they differ in heads. Attribute sets="all":
// every token is kept, and changed; there are no rows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "analysis/measurement.h"
#include "trace/trace.h"

namespace kvreplay {

/// The trace of a file of cells, and the conditions that all its cells share.
struct TraceRecord {
  std::string name = {}, hash = {}, model = {}, dtype = {};
  bool synthetic = false;
  int prompt = 0;  // as captured; `boundary` tokens of it are under compression
  int tokens = 0;
  int layers = 0;
  int query_heads = 0;  // these three: the largest of a treated layer
  int kv_heads = 0;
  int head_dim = 0;
  std::vector<int> layer_query_heads = {};  // [L], and [L]; both empty: all treated layers have the same heads
  std::vector<int> layer_kv_heads = {};
  int reading_layers = 0;  // that read keys and values of another layer, whose query heads include theirs

  std::string eval = {};  // as asked for
  int boundary = 0;
  int n_queries = 0;
  std::string sample = {};           // "layers=6,queries=256,seed=0": metrics are estimates; empty: they are exact
  int looks = 1;                     // of a sampled trace: samples whose size may depend on those before
  int all_queries = 0;               // of a sampled trace: eval queries, of which n_queries were measured
  std::vector<int> all_layers = {};  // of a trace with sampled layers: all treated ones
  int sampled_heads = 0;             // of a trace with sampled KV heads: how many of each layer were measured
  int numerics = 0;                  // the version of our numbers
  std::string backend = {};
  std::vector<int> treated = {};      // stored layers; of sampled ones those that were replayed
  std::vector<int> layer_index = {};  // the model's own number of each stored layer: what tables show

  ValuesByMetric values = {};
  std::vector<double> observable_seconds = {};  // [treated], shared by all policies
  bool has_eval_attention = false;
  bool has_eval_attention_by_head = false;

  // Facts of the run, not stored in the file.
  std::filesystem::path path = {};
  std::string prompt_hash = {};            // of the token ids of the prompt: traces of one model on one prompt share it
  std::filesystem::path observables = {};  // the file beside the trace
  std::map<std::string, int> read_observables = {};  // layers by observable that were read from it
  std::string error = {};                            // the whole trace failed

  int continuation() const { return tokens - boundary; }
  bool is_sampled() const { return !sample.empty(); }
  bool samples_queries() const { return is_sampled() && n_queries < all_queries; }
  bool samples_layers() const { return !all_layers.empty(); }
  bool samples_heads() const { return sampled_heads > 0; }
  /// "6 of 30 layers, 4 of 8 KV heads, 256 of 2048 eval queries"; empty: everything was measured.
  std::string sample_text() const;
  bool has_equal_heads() const { return layer_query_heads.empty(); }
  /// Rows of a granularity in a stored layer, and in the layer that has most.
  int rows(Heads heads, int layer) const;
  int most_rows(Heads heads) const { return rows_of(heads, query_heads, kv_heads); }
};

enum class CellState {
  done,     // computed, or completed by new metrics, in this run
  skipped,  // everything was there from an earlier run
  failed
};

/// A cell is a trace, a policy with all its values and a budget. Its id is the first 16 hexadecimal digits of the
/// XXH3-128 of these lines, each ended by a newline: "kvreplay cell", then numerics, trace (its hash), policy, params,
/// budget (tokens), boundary (tokens), eval, layers (stored numbers of the treated ones, with commas), seed and backend
/// as KEY=VALUE, then source where it is not empty, of_seen, the share of the tokens seen that a budget grows with,
/// where it does, and the sample of a sampled trace. `numerics` is raised whenever a number of ours changes: the same
/// id means the same numbers.
struct CellRecord {
  std::string id = {};
  std::string role = {};    // asked | control
  std::string policy = {};  // the name
  std::string params = {};  // every value
  std::string label = {};   // the name and what differs from the defaults
  std::string paper = {};
  std::string heads = {};  // kv | query | layer
  std::string agg = {};
  std::string budget = {};  // as asked
  int budget_tokens = 0;
  std::uint64_t seed = 0;
  std::string source = {};             // ConfiguredPolicy::source_hash
  double kept_tokens = 0;              // mean a layer and head
  bool own_memory = false;             // ignores the budget
  bool protected_fill_budget = false;  // the policy selects no other token
  bool has_scores = false;
  bool keeps_all_changed = false;  // every token is kept, and changed: there are no sets to store
  ValuesByMetric values = {};
  // Of sampled queries, layers, and KV heads [replayed, sampled_heads], in pairs (replay/sample.h).
  ValuesByUnit by_query = {}, by_layer = {}, by_head = {};
  std::vector<CellSeconds> seconds = {};  // [treated]

  // Facts of the run, not stored in the file.
  std::string trace = {};                         // the name
  std::string twin_of = {};                       // id of the cell whose random twin this is; empty: none in this run
  std::string family = {};                        // of the policy
  std::map<MetricName, double> half_widths = {};  // of 95 % intervals over all layers and heads
  CellState state = CellState::skipped;
  std::string error = {};

  /// Over all layers and heads. NaN: undefined, or not measured.
  double value(const MetricName& name) const;
  /// Of its 95 % interval. NaN: not an estimate.
  double half_width(const MetricName& name) const;
  /// Computes half_widths from by_query, by_layer and by_head.
  void find_half_widths(const TraceRecord& of);
  /// Scoring and selection, all layers, shared observables apart.
  double select_seconds() const;
};

struct TraceCells {
  TraceRecord trace;
  std::vector<CellRecord> cells;

  const CellRecord* find(const std::string& id) const;
};

/// The first condition in which two files of one trace differ: their cells cannot stand in one file then.
struct DifferingCondition {
  std::string what, expected, found;
};
std::optional<DifferingCondition> differing_condition(const TraceRecord& expected, const TraceRecord& found);

/// Throws Error{input} for a file that is no file of cells, or that of another version of kvreplay.
void check_cells_format(const std::filesystem::path& path);

/// Whether the cells of the file are estimates. Throws as read_trace_cells.
bool is_sampled(const std::filesystem::path& path);

/// The trace without its values, and the cells' ids alone. Throws as read_trace_cells.
TraceCells read_cell_ids(const std::filesystem::path& path);

/// Throws Error{input} for a file that is no file of cells, or a damaged one.
TraceCells read_trace_cells(const std::filesystem::path& path);

/// The sets of one cell of a file of cells: [treated]. Throws Error{input} for sets that cannot be.
std::vector<LayerSelection> read_selections(const std::filesystem::path& path, const std::string& id,
                                            const TraceRecord& trace);

/// A cell to be written: `made` holds its sets; null: they are those of the earlier file.
struct CellToWrite {
  CellRecord cell;
  const CellResult* made = nullptr;
};

/// Calls `keep` with the bytes of a file of cells. Sets and arrays of the trace that are not recomputed are copied from
/// the file `earlier`, which `keep` may replace; empty: no such file. `tokens_and_spans`: header whose tokens and spans
/// are written; null: neither is.
void make_trace_cells(const TraceRecord& trace, const TraceResult& result, const std::vector<CellToWrite>& cells,
                      const std::optional<std::filesystem::path>& earlier, const TraceHeader* tokens_and_spans,
                      const std::function<void(std::span<const std::byte>)>& keep);

/// Writes the file at `path`: what `joined` says of the trace and its cells, with the sets and arrays of `files`, of
/// which one may be the file that is replaced. What several of them hold must be equal: Error{input} names both; it is
/// thrown also for a cell that none of them has.
void write_joined_cells(const std::filesystem::path& path, const TraceCells& joined,
                        const std::vector<std::filesystem::path>& files);

}  // namespace kvreplay
