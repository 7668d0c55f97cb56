// run.json of several runs whose results have become one folder.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "analysis/replaced_file.h"
#include "analysis/results.h"
#include "analysis/trace_cells.h"

namespace kvreplay {

/// The run.json of each folder, and the cells of the files. Entries in which all runs agree stand at the top; `shards`
/// has those of each run. A folder is added before its files.
class MergedRun {
 public:
  /// A folder without run.json is that of an interrupted run; a merged folder brings those that it was merged from.
  /// Failed cells are always added; `with_cells` adds the finished ones too, in the place of those of files. Throws
  /// Error{input} for a run.json that cannot be read.
  void add(const std::filesystem::path& folder, bool with_cells);
  /// A trace as the merged folder has it.
  void add(const TraceCells& all);
  /// The finished cells of a trace.
  std::vector<const CellRecord*> cells_of(const std::string& trace) const;

  /// The coarsest detail of all folders.
  Detail detail() const { return detail_.value_or(Detail::layer); }
  /// Of merging: those of the runs stand in the file alone.
  std::vector<std::string> warnings() const;
  /// By trace, then in the order of replay. Those that failed in one folder and are whole in another are whole.
  std::vector<const CellRecord*> cells() const;

  /// run.json, once all has been added, with the values of cells() and warnings(); inputs and cells stand by the names
  /// of their traces.
  void write(ReplacedFile& file, const std::vector<std::string>& argv, const std::vector<const CellRecord*>& all_cells,
             const std::vector<std::string>& warned) const;

 private:
  using Json = nlohmann::ordered_json;

  void join(const Json& run, const std::filesystem::path& folder, bool with_cells);
  /// Without `with_cells`, a finished cell only takes its place in the order of cells().
  void add(CellRecord cell, bool with_cells);
  Json self_check() const;

  Json policies_ = Json::array(), metrics_ = Json::array(), numerics_;
  std::map<std::string, Json> shards_;                      // by the absolute path of their folders
  std::vector<std::string> run_warnings_, merge_warnings_;  // of the runs, and of merging them
  std::optional<Detail> detail_;
  int folders_ = 0;
  std::map<std::string, Json> inputs_;        // by trace
  std::map<std::string, std::size_t> ranks_;  // of budgets and of policies with parameters, as folders list them
  std::map<std::pair<std::string, std::string>, CellRecord> cells_;  // by trace and id, without their values
};

}  // namespace kvreplay
