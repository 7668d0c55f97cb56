#include "analysis/merge.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "analysis/csv.h"
#include "analysis/folder_lock.h"
#include "analysis/live_rows.h"
#include "analysis/merged_json.h"
#include "analysis/part.h"
#include "analysis/replaced_file.h"
#include "analysis/results.h"
#include "analysis/results_folder.h"
#include "hdf5/partial_file.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;

bool is_same(const fs::path& a, const fs::path& b) {
  std::error_code ignored;
  return fs::equivalent(a, b, ignored);
}

/// Files and folders, each once, whatever it is called.
class Known {
 public:
  /// Whether it was not known. What cannot be asked about is new: reading it says more.
  bool add(const fs::path& path) {
    struct stat found{};
    return stat(path.c_str(), &found) != 0 || known_.emplace(found.st_dev, found.st_ino).second;
  }

 private:
  std::set<std::pair<dev_t, ino_t>> known_;
};

/// A link is there at once and whole. Nothing writes into a part: it is replaced. Of a symbolic link, the file counts.
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

/// Which file a name leads to. A part that is replaced is another one then.
class FileIdentity {
 public:
  explicit FileIdentity(const fs::path& path) { known_ = stat(path.c_str(), &file_) == 0; }
  /// A link to it is it.
  bool operator==(const FileIdentity& other) const {
    const auto facts = [](const struct stat& file) {
      return std::tuple{file.st_dev, file.st_ino, file.st_size, file.st_mtim.tv_sec, file.st_mtim.tv_nsec};
    };
    return known_ && other.known_ && facts(file_) == facts(other.file_);
  }

 private:
  struct stat file_{};
  bool known_;
};

/// Parts while they are read, once for their numbers and once for their sets: they must stay what they were.
class SameFiles {
 public:
  explicit SameFiles(const std::vector<fs::path>& paths) : paths_(paths) {
    for (const fs::path& path : paths) before_.emplace_back(path);
  }
  void require() const {
    for (std::size_t i = 0; i < paths_.size(); ++i) require(i, paths_[i]);
  }
  /// What was made of the first, be it a link.
  void require_of_link(const fs::path& made) const {
    if (fs::hard_link_count(made) > 1) require(0, made);
  }

 private:
  void require(std::size_t i, const fs::path& path) const {
    if (!(before_[i] == FileIdentity(path)))
      throw Error{Refusal::usage, paths_[i].string(), "another run has replaced it meanwhile: merge again"};
  }

  const std::vector<fs::path>& paths_;
  std::vector<FileIdentity> before_;
};

/// What the parts of one trace hold together.
class JoinedPart {
 public:
  explicit JoinedPart(const fs::path& path) : first_(path), whole_(read_part(path)) {
    for (const PartCell& cell : whole_.cells) holders_[cell.id] = path;
  }

  void add(const fs::path& path) {
    Part part = read_part(path);
    if (const auto other = differing_condition(whole_.trace, part.trace))
      throw Error{Refusal::usage, path.string(), other->what + " of the same trace in " + first_.string(),
                  other->expected, other->found};
    add_values(part.trace.values, whole_.trace.values, path, first_, "the trace");
    for (PartCell& cell : part.cells) {
      const auto known = std::ranges::find(whole_.cells, cell.id, &PartCell::id);
      if (known == whole_.cells.end()) {
        holders_[cell.id] = path;
        whole_.cells.push_back(std::move(cell));
      } else {
        add_cell(cell, *known, path);
      }
    }
  }

  const Part& whole() const { return whole_; }
  /// The part that a cell was first found in.
  const fs::path& holder(const PartCell& cell) const { return holders_.at(cell.id); }

 private:
  static void refuse(const fs::path& path, const fs::path& first, const std::string& what, const std::string& expected,
                     const std::string& found) {
    throw Error{Refusal::input, path.string(), what + " differs from " + first.string(), expected, found};
  }

  static void add_values(const ValuesByMetric& from, ValuesByMetric& to, const fs::path& path, const fs::path& first,
                         const std::string& what) {
    for (const auto& [name, values] : from) {
      const auto [known, is_new] = to.emplace(name, values);
      if (is_new) continue;
      const std::span<const double> ours = known->second.values(), theirs = values.values();
      if (ours.size() != theirs.size()) refuse(path, first, name.text() + " of " + what, "as many values", "others");
      for (std::size_t i = 0; i < ours.size(); ++i)
        if (std::memcmp(&ours[i], &theirs[i], sizeof ours[i]) != 0)
          refuse(path, first, name.text() + " of " + what, csv_number(ours[i]), csv_number(theirs[i]));
    }
  }

  void add_cell(const PartCell& from, PartCell& to, const fs::path& path) {
    const fs::path& first = holders_.at(from.id);
    const std::string what = to.label + " at " + to.budget;
    if (from.kept_tokens != to.kept_tokens)
      refuse(path, first, "kept tokens of " + what, csv_number(to.kept_tokens), csv_number(from.kept_tokens));
    add_values(from.values, to.values, path, first, what);
    to.has_scores = to.has_scores || from.has_scores;
    // A budget is called as it was when it was asked for first.
    if (to.role != "asked" && from.role == "asked") {
      to.role = from.role;
      to.budget = from.budget;
    }
  }

  const fs::path& first_;
  Part whole_;
  std::map<std::string, fs::path> holders_;  // the first, by cell
};

/// A policy stands for one version of the files that it comes from.
class Sources {
 public:
  void check(const JoinedPart& part) {
    for (const PartCell& cell : part.whole().cells) {
      const fs::path& path = part.holder(cell);
      const auto [known, is_new] = known_.try_emplace(cell.policy + ":" + cell.params, cell.source, path);
      if (!is_new && known->second.first != cell.source)
        throw Error{Refusal::usage, path.string(),
                    cell.policy + " is of another version of its file than in " + known->second.second.string()};
    }
  }

 private:
  std::map<std::string, std::pair<std::string, fs::path>> known_;
};

/// Parts on their way into a folder of results: all of them get there, once each has been checked, or none.
class StagedParts {
 public:
  /// What a killed merge has left is removed.
  explicit StagedParts(const fs::path& output) : parts_(output / "parts"), staging_(output / "parts.partial") {
    std::error_code problem;
    fs::remove_all(staging_, problem);
    if (!problem) fs::create_directory(staging_, problem);
    require(problem, staging_);
  }
  StagedParts(const StagedParts&) = delete;
  StagedParts& operator=(const StagedParts&) = delete;
  ~StagedParts() {
    std::error_code ignored;
    fs::remove_all(staging_, ignored);
  }

  fs::path path_of(const std::string& trace) const { return staging_ / (trace + ".h5"); }
  void arrive() const {
    std::vector<fs::path> all;
    for (const auto& entry : fs::directory_iterator(staging_)) all.push_back(entry.path());
    for (const fs::path& part : all) {
      std::error_code problem;
      fs::rename(part, parts_ / part.filename(), problem);
      require(problem, parts_ / part.filename());
    }
  }

 private:
  static void require(const std::error_code& problem, const fs::path& path) {
    if (problem)
      throw Error{means_disk_full(problem.value()) ? Refusal::resources : Refusal::usage, path.string(),
                  "cannot be made", "room for results", problem.message()};
  }

  fs::path parts_, staging_;
};

/// Folders that were not there before, removed again while they are empty.
class MadeFolders {
 public:
  explicit MadeFolders(const fs::path& output) {
    for (const fs::path& folder : {output / "parts", output})
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

/// The parts of one trace, each file once, become the part `target`, unless the only one is `there` already.
void take(const std::vector<fs::path>& parts, const fs::path& there, const fs::path& target, Sources& sources,
          MergedRun& run, Results& results) {
  const SameFiles files(parts);
  JoinedPart joined(parts.front());
  const PartTrace& trace = joined.whole().trace;
  if (trace.name != target.stem().string())
    throw Error{Refusal::input, parts.front().string(), "trace name", target.stem().string(), trace.name};
  if (trace.numerics != numerics)
    throw Error{Refusal::usage, parts.front().string(), "numbers of another version of kvreplay",
                std::to_string(numerics), std::to_string(trace.numerics)};
  for (std::size_t i = 1; i < parts.size(); ++i) joined.add(parts[i]);
  sources.check(joined);
  files.require();
  if (parts.size() > 1) write_joined_part(target, joined.whole(), parts);
  results.add(joined.whole(), parts.size() > 1 ? target : parts.front());
  if (parts.size() == 1 && parts.front() != there) {
    link_or_copy(parts.front(), target);
    files.require_of_link(target);
  }
  files.require();
  run.add(joined.whole());
}

}  // namespace

std::vector<fs::path> results_folders(const std::vector<fs::path>& given, const fs::path& output) {
  std::vector<fs::path> folders;
  Known known;
  const auto add = [&](const fs::path& folder) {
    if (known.add(folder)) folders.push_back(folder);
  };
  for (const fs::path& path : given) {
    if (!fs::is_directory(path)) throw Error{Refusal::input, path.string(), "no such folder"};
    if (is_same(path, output))
      throw Error{Refusal::usage, path.string(), "is the merged folder itself", "folders to merge into it"};
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

MergeSummary merge(const fs::path& output, const std::vector<fs::path>& folders, const std::vector<std::string>& argv,
                   const std::function<void(double, const std::string&)>& heard,
                   const std::function<bool()>& interrupted) {
  check_results_folder(output);
  std::optional<FolderLock> lock;
  MadeFolders made(output);
  make_results_folder(output);
  lock.emplace(output);

  MergedRun run;
  std::map<std::string, std::vector<fs::path>> parts;  // by trace; what is in `output` comes first
  std::map<std::string, Known> known;
  const auto find_parts = [&](const fs::path& folder) {
    for (const fs::path& path : parts_of(folder))
      if (const std::string trace = path.stem().string(); known[trace].add(path)) parts[trace].push_back(path);
  };
  LiveRows live;
  if (fs::exists(output / "run.json")) run.add(output);
  find_parts(output);
  live.add(output);
  for (const fs::path& folder : folders) {
    // Not held longer: thousands of folders are more than a process may have open.
    const FolderLock reading = FolderLock::for_reading(folder);
    run.add(folder);
    find_parts(folder);
    live.add(folder);
  }
  if (parts.empty()) throw Error{Refusal::input, output.string(), "no finished trace in any folder"};

  const StagedParts staged(output);
  Results results(output, run.detail());
  Sources sources;
  double done = 0;
  for (const auto& [trace, of_trace] : parts) {
    if (interrupted()) throw Error{Refusal::interrupted, output.string(), "interrupted; nothing is merged"};
    heard(done++ / static_cast<double>(parts.size()), trace);
    take(of_trace, output / "parts" / (trace + ".h5"), staged.path_of(trace), sources, run, results);
  }
  results.complete();
  ReplacedFile about(output / "run.json");
  run.write(about, argv);
  about.complete();
  staged.arrive();
  results.finish();
  about.finish();
  live.write(output);
  made.keep();
  return {folders.size(), parts.size(), run.cells(), run.failed_cells(), run.warnings()};
}

}  // namespace kvreplay
