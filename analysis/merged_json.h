// run.json of several runs whose results have become one folder.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "analysis/run.h"
#include "analysis/trace_cells.h"

namespace kvreplay {

/// What the run.json of each folder says, and the cells of the files, however many: of a cell some words are kept.
/// Folders are added first, then files.
class MergedRun {
 public:
  /// A folder without run.json is that of an interrupted run; a merged folder brings those that it was merged from.
  /// Throws Error{input} for a run.json that cannot be read.
  void add(const std::filesystem::path& folder);
  /// A trace as the merged folder has it.
  void add(const TraceCells& all);

  /// The coarsest of the folders': what all of them can show.
  Detail detail() const { return detail_.value_or(Detail::layer); }
  /// Of merging: those of the runs stand in the file alone.
  std::vector<std::string> warnings() const;
  /// By trace, then in the order of replay. Those that failed in one folder and are whole in another are whole.
  std::vector<CellSummary> failed_cells() const;
  std::size_t cells() const { return cells_.size(); }

  /// run.json, once all has been added; inputs and cells stand by the names of their traces.
  void write(ReplacedFile& file, const std::vector<std::string>& argv);

 private:
  using Json = nlohmann::ordered_json;

  /// Texts of one entry, each with the folder that first said it.
  using Texts = std::vector<std::pair<std::string, std::string>>;

  struct Cell {
    const std::string *trace, *policy, *params, *budget;
    std::string id;
    int budget_tokens = 0;
    bool own_memory = false;
    bool asked = false;
    std::string error = {};
  };

  void join(const Json& run, const std::string& folder);
  void join_cells(const Json& cells);
  void join_options(const Json& options);
  void join_self_check(const Json& theirs);
  /// Texts of an object, or one text: they may differ from folder to folder.
  void note(const std::string& entry, const Json& value, const std::string& folder);
  Json noted(const std::string& entry) const;
  const std::string* word(const std::string& text) { return &*words_.insert(text).first; }
  CellSummary summary_of(const Cell& cell) const;
  /// As replay lists them; of one that several folders have, one stays.
  void sort_cells();

  std::string start_, end_;
  Json policies_ = Json::array(), metrics_ = Json::array(), options_ = Json::object(), self_check_ = Json::object(),
       shards_ = Json::array(), numerics_, seed_;
  std::vector<std::string> told_warnings_, troubles_;                        // of the runs, and of merging them
  std::map<std::string, std::vector<std::pair<std::string, Texts>>> texts_;  // by entry, and by key in it
  std::optional<Detail> detail_;
  std::map<std::string, Json> inputs_;                                // by trace
  std::map<std::pair<std::string, std::string>, std::size_t> ranks_;  // of policy and parameters, as folders list them
  std::set<std::string> words_;
  std::vector<Cell> cells_;
};

}  // namespace kvreplay
