#include "analysis/merge.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
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

/// The files of one trace, each file once, become the file `target`, unless the only one is `there` already.
/// `results`: null where no tables are written.
void take(const std::vector<fs::path>& paths, const fs::path& there, const fs::path& target, Sources& sources,
          MergedRun& run, Results* results) {
  // A run may replace a file between the reading of its numbers and that of its sets.
  std::vector<std::optional<FileIdentity>> before;
  for (const fs::path& path : paths) before.push_back(identity_at(path));
  const std::string name = target.stem().string();
  TraceCells whole;
  const std::vector<const CellRecord*> listed = run.cells_of(name);
  if (results == nullptr && paths.size() == 1 && are_listed(whole = read_cell_ids(paths.front()), listed)) {
    for (const CellRecord* cell : listed) check_source(*cell, paths.front(), sources);
    whole.cells.clear();
  } else {
    JoinedCells joined = join(paths);
    for (const CellRecord& cell : joined.whole.cells) check_source(cell, joined.holders.at(cell.id), sources);
    whole = std::move(joined.whole);
  }
  check_trace(whole.trace, paths.front(), name);
  if (paths.size() > 1)
    write_joined_cells(target, whole, paths);
  else if (paths.front() != there)
    link_or_copy(paths.front(), target);
  for (std::size_t i = 0; i < paths.size(); ++i)
    if (before[i] != identity_at(paths[i]))
      throw Error{Refusal::usage, paths[i].string(), "replaced by another run during the merge; merge again"};
  if (results != nullptr) results->add(whole);
  run.add(whole);
}

}  // namespace

std::vector<fs::path> results_folders(const std::vector<fs::path>& given, const fs::path& output) {
  std::vector<fs::path> folders;
  std::set<std::optional<FileIdentity>> known;
  const auto add = [&](const fs::path& folder) {
    if (known.insert(identity_at(folder)).second) folders.push_back(folder);
  };
  for (const fs::path& path : given) {
    if (!fs::is_directory(path)) throw Error{Refusal::input, path.string(), "no such folder", "a folder of results"};
    if (is_same(path, output))
      throw Error{Refusal::usage, path.string(), "is the output folder", "other folders to merge"};
    if (is_results_folder(path)) {
      add(path);
      continue;
    }
    std::vector<fs::path> inner;
    for (const auto& entry : fs::directory_iterator(path))
      if (entry.is_directory() && is_results_folder(entry.path()) && !is_same(entry.path(), output))
        inner.push_back(entry.path());
    if (inner.empty())
      throw Error{Refusal::input, path.string(), "no results", "a folder of results, or of such folders", "neither"};
    std::ranges::sort(inner);
    std::ranges::for_each(inner, add);
  }
  return folders;
}

MergeSummary merge(const fs::path& output, const std::vector<fs::path>& folders, Tables tables,
                   const std::vector<std::string>& argv, const std::function<void(double, const std::string&)>& heard,
                   const std::function<bool()>& interrupted) {
  check_results_folder(output);
  std::optional<FolderLock> lock;
  MadeFolders made(output);
  make_results_folder(output);
  lock.emplace(output);

  StagedFiles staged(output);
  MergedRun run;
  LiveRows live;
  std::map<std::string, std::vector<fs::path>> files;  // by trace; what is in `output` comes first
  std::set<std::optional<FileIdentity>> known;
  const auto add = [&](const fs::path& folder) {
    for (const fs::path& path :
         is_format_1(folder) ? convert_format_1(folder, staged.converted()) : cell_files_of(folder))
      if (known.insert(identity_at(path)).second) files[path.stem().string()].push_back(path);
    live.add(folder);
  };
  if (fs::exists(output / "run.json")) run.add(output, tables == Tables::leave);
  add(output);
  for (const fs::path& folder : folders) {
    // Not held longer: thousands of folders are more than a process may have open.
    const FolderLock reading = FolderLock::for_reading(folder);
    run.add(folder, tables == Tables::leave);
    add(folder);
  }
  if (tables == Tables::leave && fs::exists(output / "results.csv"))
    throw Error{Refusal::usage, "--no-tables", "the existing results.csv would not contain the merged cells",
                "a folder without tables", output.string()};
  if (files.empty())
    throw Error{Refusal::input, output.string(), "no finished trace in any folder", "one trace or more"};

  std::optional<Results> results;
  if (tables == Tables::write) results.emplace(output, run.detail());
  Sources sources;
  double done = 0;
  for (const auto& [trace, of_trace] : files) {
    if (interrupted()) throw Error{Refusal::interrupted, output.string(), "interrupted; nothing was merged"};
    heard(done++ / static_cast<double>(files.size()), trace);
    take(of_trace, output / "cells" / (trace + ".h5"), staged.path_of(trace), sources, run,
         results ? &*results : nullptr);
  }
  if (results) results->complete();
  ReplacedFile about(output / "run.json");
  run.write(about, argv);
  about.complete();
  staged.arrive();
  if (results) results->finish();
  about.finish();
  live.write(output);
  made.keep();
  MergeSummary summary{.folders = folders.size(), .traces = files.size(), .warnings = run.warnings()};
  for (const CellRecord* cell : run.cells()) {
    ++summary.cells;
    if (cell->state == CellState::failed) summary.failed.push_back(*cell);
  }
  return summary;
}

}  // namespace kvreplay
