// parts/TRACE.h5: all that a run knows of one trace, the unit that is finished or not.
//
//   /traces/NAME    as in selections.h5: sizes, conditions, redundancy, eval attention, tokens, spans
//   /cells/ID       as in selections.h5, its offsets and positions apart: matrices; evicted_at [L, H, T] where sets
//                   change with time, slots where kept tokens stand in another order, attribute layer_heads where
//                   granularities differ
//   /sets/ID        int64 [treated, H, ceil(P / 64)]: token j is kept where bit j % 64 of word j / 64 is 1. A position
//                   of selections.h5 takes 32 bits: sets are written in full once, not twice
//   /values/ID      who the cell is; `numbers`: all its values [L+1, H+1], one metric after the other; `metrics`: lines
//                   of metric,variant,rows,columns. /values/trace: values of the trace itself
//   /seconds/ID     float64 [treated, 2]: scoring, selection; /seconds/observables [treated]
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "analysis/measurement.h"
#include "trace/trace.h"

namespace kvreplay {

/// The trace of a part, and the conditions that all its cells share.
struct PartTrace {
  std::string name, hash, model, dtype;
  bool synthetic = false;
  int prompt = 0;  // as captured; `boundary` tokens of it are under compression
  int tokens = 0;
  int layers = 0;
  int query_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;

  std::string eval;  // as asked for
  int boundary = 0;
  int n_queries = 0;
  int numerics = 0;  // the version of our numbers
  std::string backend;
  std::vector<int> treated;      // stored layers
  std::vector<int> layer_index;  // the model's own number of each stored layer: what tables show

  ValuesByMetric values;
  std::vector<double> observable_seconds;  // [treated]
  bool has_eval_attention = false;
  bool has_eval_attention_by_head = false;
};

struct PartCell {
  std::string id, role, policy, params, label, paper, heads, agg, budget;
  int budget_tokens = 0;
  std::uint64_t seed = 0;
  std::string source = {};  // ConfiguredPolicy::source_hash
  double kept_tokens = 0;
  bool has_scores = false;
  bool keeps_all_changed = false;  // every token stays, none as it was: there are no sets to store
  ValuesByMetric values;
  std::vector<CellSeconds> seconds;  // [treated]
};

struct Part {
  PartTrace trace;
  std::vector<PartCell> cells;

  const PartCell* find(const std::string& id) const;
};

/// The first condition in which two parts of one trace differ: their cells cannot stand in one part then.
struct DifferingCondition {
  std::string what, expected, found;
};
std::optional<DifferingCondition> differing_condition(const PartTrace& expected, const PartTrace& found);

/// Throws Error{input} for a file that is no part, or that of another version of kvreplay.
void check_part_format(const std::filesystem::path& path);

/// Throws Error{input} for a file that is no part, or a damaged one.
Part read_part(const std::filesystem::path& path);

/// The sets of one cell of a part: [treated]. Throws Error{input} for sets that cannot be.
std::vector<LayerSelection> read_selections(const std::filesystem::path& path, const std::string& id,
                                            const PartTrace& trace);

/// A cell to be written: `made` holds its sets; null: they are those of the earlier part.
struct CellToWrite {
  PartCell cell;
  const CellResult* made = nullptr;
};

/// Writes the part at `path`, or replaces it. What is not made anew, sets and arrays of the trace, is taken from
/// `earlier`, which may be the part that is replaced; empty: there is nothing else.
/// `tokens_and_spans`: the part gets those of this header; null: it gets none. Throws Error{resources} when the disk is
/// full; the old part is then still there.
void write_part(const std::filesystem::path& path, const PartTrace& trace, const TraceResult& result,
                const std::vector<CellToWrite>& cells, const std::optional<std::filesystem::path>& earlier,
                const TraceHeader* tokens_and_spans);

/// Writes the part at `path`: what `joined` says of the trace and its cells, with the sets and arrays of `parts`, of
/// which one may be the part that is replaced. Of other cells in `parts`, nothing is taken. What several of them hold
/// must be equal: Error{input} names both; it is thrown also for a cell that none of them has.
void write_joined_part(const std::filesystem::path& path, const Part& joined,
                       const std::vector<std::filesystem::path>& parts);

/// selections.h5: the traces and cells of parts, one after the other, whatever their number.
class SelectionsFile {
 public:
  explicit SelectionsFile(const std::filesystem::path& path);
  ~SelectionsFile();
  /// A part that read_part has read, or that this process has written. Throws Error{resources} when the disk is full.
  void add(const std::filesystem::path& part);
  /// All of it is on the disk; nothing is added any more. Throws as `add`.
  void complete();
  /// The complete file gets its name.
  void finish();

 private:
  struct Content;
  std::unique_ptr<Content> content_;
};

}  // namespace kvreplay
