#include "analysis/merge.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <system_error>
#include <tuple>
#include <utility>

#include "analysis/compare_runs.h"
#include "analysis/folder_lock.h"
#include "analysis/format_1.h"
#include "analysis/live_rows.h"
#include "analysis/merged_json.h"
#include "analysis/replaced_file.h"
#include "analysis/results.h"
#include "analysis/results_folder.h"
#include "analysis/trace_cells.h"
#include "open_file.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;

bool is_same(const fs::path& a, const fs::path& b) {
  std::error_code ignored;
  return fs::equivalent(a, b, ignored);
}

/// A link is there at once and whole. Nothing writes into a file of cells: it is replaced. Of a symbolic link, the file
/// counts.
void link_or_copy(const fs::path& from, const fs::path& to) {
  std::error_code problem;
  const fs::path file = fs::canonical(from, problem);
  if (!problem) fs::create_hard_link(file, to, problem);
  if (!problem) return;
  std::ifstream stream(from, std::ios::binary);
  ReplacedFile copy(to);
  std::vector<char> piece(std::size_t{1} << 20);
  while (stream.read(piece.data(), static_cast<std::streamsize>(piece.size())) || stream.gcount() > 0)
    copy.write({piece.data(), static_cast<std::size_t>(stream.gcount())});
  if (!stream.eof()) throw Error{Refusal::input, from.string(), "cannot be read"};
  copy.finish();
}

/// What the files of one trace hold together.
struct JoinedCells {
  TraceCells whole;
  std::map<std::string, fs::path> holders;  // by cell, the file that it was first read from
};

/// Adds the metrics of another file of cells. Throws where both have different numbers.
void add_values(const ValuesByMetric& from, const fs::path& path, ValuesByMetric& to, const fs::path& first,
                const TraceRecord& trace, const std::string& what) {
  std::vector<RunDifference> differences;
  compare_values(what, trace, to, from, 0, differences);
  for (const auto& [where, ours, theirs] : differences)
    if (ours && theirs)
      throw Error{Refusal::input, path.string(), where + " differs from " + first.string(), *ours, *theirs};
  to.insert(from.begin(), from.end());
}

JoinedCells join(const std::vector<fs::path>& paths) {
  JoinedCells joined{read_trace_cells(paths.front()), {}};
  TraceRecord& trace = joined.whole.trace;
  std::vector<CellRecord>& cells = joined.whole.cells;
  for (const CellRecord& cell : cells) joined.holders[cell.id] = paths.front();
  for (const fs::path& path : std::span(paths).subspan(1)) {
    const TraceCells more = read_trace_cells(path);
    if (const auto other = differing_condition(trace, more.trace))
      throw Error{Refusal::usage, path.string(), other->what + " of the same trace in " + paths.front().string(),
                  other->expected, other->found};
    add_values(more.trace.values, path, trace.values, paths.front(), trace, "the trace");
    for (const CellRecord& cell : more.cells) {
      const auto [holder, is_new] = joined.holders.emplace(cell.id, path);
      if (is_new) {
        cells.push_back(cell);
        continue;
      }
      CellRecord& known = *std::ranges::find(cells, cell.id, &CellRecord::id);
      add_values(cell.values, path, known.values, holder->second, trace, known.label + " at " + known.budget);
      known.has_scores = known.has_scores || cell.has_scores;
      // A budget is called as it was when it was asked for first.
      if (known.role != "asked" && cell.role == "asked") {
        known.role = cell.role;
        known.budget = cell.budget;
      }
    }
  }
  return joined;
}

/// The version of a policy's files, and a file of cells that has it. By policy and parameters.
using Sources = std::map<std::string, std::pair<std::string, fs::path>>;

/// A policy stands for one version of the files that it comes from.
void check_source(const CellRecord& cell, const fs::path& path, Sources& sources) {
  const auto [known, is_new] = sources.try_emplace(cell.policy + ":" + cell.params, cell.source, path);
  if (known->second.first != cell.source)
    throw Error{Refusal::usage, path.string(),
                cell.policy + " comes from another version of its file than in " + known->second.second.string()};
}

/// Whether run.json of the merged folders lists the cells of a file, and no others.
bool are_listed(const TraceCells& ids, const std::vector<const CellRecord*>& listed) {
  return ids.cells.size() == listed.size() &&
         std::ranges::all_of(listed, [&](const CellRecord* cell) { return ids.find(cell->id) != nullptr; });
}

/// Files on their way into a folder of results: all of them get there, once each has been checked, or none.
class StagedFiles {
 public:
  /// What a killed merge has left is removed.
  explicit StagedFiles(const fs::path& output) : cells_(output / "cells"), staging_(output / "cells.partial") {
    std::error_code problem;
    fs::remove_all(staging_, problem);
    if (!problem) fs::create_directory(staging_, problem);
    require(problem, staging_);
  }
  StagedFiles(const StagedFiles&) = delete;
  StagedFiles& operator=(const StagedFiles&) = delete;
  ~StagedFiles() {
    std::error_code ignored;
    fs::remove_all(staging_, ignored);
  }

  fs::path path_of(const std::string& trace) const { return staging_ / (trace + ".h5"); }
  /// Where files of other formats are converted: a folder for each folder of results.
  fs::path converted() { return staging_ / "converted" / std::to_string(converted_++); }
  void arrive() const {
    fs::remove_all(staging_ / "converted");
    std::vector<fs::path> all;
    for (const auto& entry : fs::directory_iterator(staging_)) all.push_back(entry.path());
    for (const fs::path& file : all) {
      std::error_code problem;
      fs::rename(file, cells_ / file.filename(), problem);
      require(problem, cells_ / file.filename());
    }
  }

 private:
  static void require(const std::error_code& problem, const fs::path& path) {
    if (problem)
      throw Error{means_disk_full(problem.value()) ? Refusal::resources : Refusal::usage, path.string(),
                  "cannot be created", "a writable folder", problem.message()};
  }

  fs::path cells_, staging_;
  int converted_ = 0;
};

/// Folders that were not there before, removed again while they are empty.
class MadeFolders {
 public:
  explicit MadeFolders(const fs::path& output) {
    for (const fs::path& folder : {output / "cells", output})
      if (std::error_code ignored; !fs::exists(folder, ignored)) made_.push_back(folder);
  }
  MadeFolders(const MadeFolders&) = delete;
  MadeFolders& operator=(const MadeFolders&) = delete;
  ~MadeFolders() {
    for (const fs::path& folder : made_) ::rmdir(folder.c_str());
  }
  void keep() { made_.clear(); }

 private:
  std::vector<fs::path> made_;
};

void check_trace(const TraceRecord& trace, const fs::path& path, const std::string& name) {
  if (trace.name != name) throw Error{Refusal::input, path.string(), "trace name", name, trace.name};
  if (trace.numerics != numerics)
    throw Error{Refusal::usage, path.string(), "results of another numerics version", std::to_string(numerics),
                std::to_string(trace.numerics)};
}

/// All that becomes one folder, until it is there.
class Merge {
 public:
  /// Tables::leave: a file that alone has its trace is staged as soon as its folder has been added.
  Merge(const fs::path& output, Tables tables) : output_(output), tables_(tables), staged_(output) {
    if (tables_ == Tables::leave && fs::exists(output / "results.csv"))
      throw Error{Refusal::usage, "--no-tables", "the existing results.csv would not contain the merged cells",
                  "a folder without tables", output.string()};
    if (fs::exists(output / "run.json")) run_.add(output, tables_ == Tables::leave);
    add_files(output);
  }

  /// A folder that was added before is not read again.
  void add(const fs::path& folder) {
    if (!known_folders_.insert(identity_at(folder)).second) return;
    ++folders_;
    std::vector<std::string> traces;
    {
      // Not held longer: thousands of folders are more than a process may have open.
      const FolderLock reading = FolderLock::for_reading(folder);
      run_.add(folder, tables_ == Tables::leave);
      traces = add_files(folder);
    }
    if (tables_ == Tables::leave)
      for (const std::string& trace : traces) stage_single_file(trace);
  }

  /// The rest of all traces, and all into the folder.
  MergeSummary finish(const std::vector<std::string>& argv,
                      const std::function<void(double, const std::string&)>& heard,
                      const std::function<void()>& stop_if_interrupted) {
    if (traces_.empty())
      throw Error{Refusal::input, output_.string(), "no finished trace in any folder", "one trace or more"};
    std::optional<Results> results;
    if (tables_ == Tables::write) results.emplace(output_, run_.detail(), has_sampled_trace());
    double done = 0;
    for (auto& [name, trace] : traces_) {
      stop_if_interrupted();
      heard(done++ / static_cast<double>(traces_.size()), name);
      if (!is_staged(name, trace)) stage(name, trace, results ? &*results : nullptr);
    }
    if (results) results->complete();
    const std::vector<const CellRecord*> cells = run_.cells();
    MergeSummary summary{
        .folders = folders_, .traces = traces_.size(), .cells = cells.size(), .warnings = run_.warnings()};
    for (const CellRecord* cell : cells)
      if (cell->state == CellState::failed) summary.failed.push_back(*cell);
    ReplacedFile about(output_ / "run.json");
    run_.write(about, argv, cells, summary.warnings);
    about.complete();
    staged_.arrive();
    if (results) results->finish();
    about.finish();
    live_.write(output_);
    return summary;
  }

 private:
  struct MergedTrace {
    std::vector<fs::path> paths;  // what is in the output folder comes first
    // Of paths, and of the cells that run.json lists, when the trace was staged.
    std::size_t staged_paths = 0, staged_cells = 0;
  };

  /// Each file once. Returns the names of its traces.
  std::vector<std::string> add_files(const fs::path& folder) {
    std::vector<std::string> names;
    for (const fs::path& path :
         is_format_1(folder) ? convert_format_1(folder, staged_.converted()) : cell_files_of(folder))
      if (known_.insert(identity_at(path)).second)
        traces_[names.emplace_back(path.stem().string())].paths.push_back(path);
    live_.add(folder);
    return names;
  }

  bool has_sampled_trace() const {
    return std::ranges::any_of(traces_,
                               [](const auto& trace) { return std::ranges::any_of(trace.second.paths, is_sampled); });
  }

  bool is_staged(const std::string& name, const MergedTrace& trace) const {
    return trace.staged_paths == trace.paths.size() && trace.staged_cells == run_.cells_of(name).size();
  }

  /// The cells of the only file of a trace are those that run.json lists: its numbers need not be read.
  bool stage_single_file(const std::string& name) {
    MergedTrace& trace = traces_.at(name);
    if (trace.paths.size() != 1) return false;
    const fs::path& path = trace.paths.front();
    const std::optional<FileIdentity> before = identity_at(path);
    const TraceCells ids = read_cell_ids(path);
    const std::vector<const CellRecord*> listed = run_.cells_of(name);
    if (!are_listed(ids, listed)) return false;
    for (const CellRecord* cell : listed) check_source(*cell, path, sources_);
    TraceCells without_cells{ids.trace, {}};
    publish(name, trace, without_cells, {before});
    return true;
  }

  void stage(const std::string& name, MergedTrace& trace, Results* results) {
    if (results == nullptr && stage_single_file(name)) return;
    // A run may replace a file between the reading of its numbers and that of its sets.
    std::vector<std::optional<FileIdentity>> before;
    for (const fs::path& path : trace.paths) before.push_back(identity_at(path));
    const JoinedCells joined = join(trace.paths);
    for (const CellRecord& cell : joined.whole.cells) check_source(cell, joined.holders.at(cell.id), sources_);
    publish(name, trace, joined.whole, before);
    if (results != nullptr) results->add(joined.whole);
  }

  /// The files of a trace become one of the staged files, unless the only one is in the output folder already.
  void publish(const std::string& name, MergedTrace& trace, const TraceCells& whole,
               const std::vector<std::optional<FileIdentity>>& before) {
    check_trace(whole.trace, trace.paths.front(), name);
    const fs::path target = staged_.path_of(name);
    if (trace.paths.size() > 1)
      write_joined_cells(target, whole, trace.paths);
    else if (trace.paths.front() != output_ / "cells" / target.filename())
      link_or_copy(trace.paths.front(), target);
    for (std::size_t i = 0; i < before.size(); ++i)
      if (before[i] != identity_at(trace.paths[i]))
        throw Error{Refusal::usage, trace.paths[i].string(), "replaced by another run during the merge; merge again"};
    run_.add(whole);
    trace.staged_paths = trace.paths.size();
    trace.staged_cells = run_.cells_of(name).size();
  }

  fs::path output_;
  Tables tables_;
  StagedFiles staged_;
  MergedRun run_;
  LiveRows live_;
  Sources sources_;
  std::map<std::string, MergedTrace> traces_;
  std::set<std::optional<FileIdentity>> known_, known_folders_;
  std::size_t folders_ = 0;
};

}  // namespace

std::vector<fs::path> results_folders(const std::vector<fs::path>& given, const fs::path& output) {
  std::vector<fs::path> folders;
  for (const fs::path& path : given) {
    if (!fs::is_directory(path)) throw Error{Refusal::input, path.string(), "no such folder", "a folder of results"};
    if (is_same(path, output))
      throw Error{Refusal::usage, path.string(), "is the output folder", "other folders to merge"};
    if (is_results_folder(path)) {
      folders.push_back(path);
      continue;
    }
    std::vector<fs::path> inner;
    for (const auto& entry : fs::directory_iterator(path))
      if (entry.is_directory() && is_results_folder(entry.path()) && !is_same(entry.path(), output))
        inner.push_back(entry.path());
    if (inner.empty())
      throw Error{Refusal::input, path.string(), "no results", "a folder of results, or of such folders", "neither"};
    std::ranges::sort(inner);
    std::ranges::move(inner, std::back_inserter(folders));
  }
  return folders;
}

MergeSummary merge(const fs::path& output, const std::function<std::vector<fs::path>()>& next_folders, Tables tables,
                   const std::vector<std::string>& argv, const std::function<void(double, const std::string&)>& heard,
                   const std::function<bool()>& interrupted) {
  const auto stop_if_interrupted = [&] {
    if (interrupted()) throw Error{Refusal::interrupted, output.string(), "interrupted; nothing was merged"};
  };
  check_results_folder(output);
  std::optional<FolderLock> lock;
  MadeFolders made(output);
  make_results_folder(output);
  lock.emplace(output);
  Merge merge(output, tables);
  for (std::vector<fs::path> folders; !(folders = next_folders()).empty();)
    for (const fs::path& folder : folders) {
      stop_if_interrupted();
      merge.add(folder);
    }
  stop_if_interrupted();
  const MergeSummary summary = merge.finish(argv, heard, stop_if_interrupted);
  made.keep();
  return summary;
}

}  // namespace kvreplay
