// The results of several machines as one folder, which equals that of one run of everything.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "analysis/run.h"

namespace kvreplay {

/// Whether merge writes results.csv and seconds.csv.
enum class Tables { write, leave };

struct MergeSummary {
  std::size_t folders = 0;
  std::size_t traces = 0;
  std::size_t cells = 0;
  std::vector<CellRecord> failed = {};
  std::vector<std::string> warnings = {};
};

/// The folders of results that `given` are, or that lie in them; `output` is none of the latter. Throws Error{input}
/// for one that neither is one nor holds any, Error{usage} where `output` itself is given.
std::vector<std::filesystem::path> results_folders(const std::vector<std::filesystem::path>& given,
                                                   const std::filesystem::path& output);

/// Files become files of `output`, which may hold some already; cells of one trace are joined by their ids. The tables
/// are assembled on the way, with the coarsest detail of all. A file of cells that alone has its trace is linked, or
/// copied where it cannot be; results of format 1 are converted. Live numbers are joined row by row.
/// Tables::leave: `output` must have no tables. For a file that is not joined, the cells are then read from run.json
/// if it lists exactly these.
/// `next_folders` returns some of the folders, and none after the last; it may wait for runs that have not ended. Each
/// folder is read and checked as soon as it is returned. `output` changes after the last folder only.
/// Throws Error{usage} for one trace under different conditions, a policy of one name from different files and a folder
/// that another run writes into; Error{input} for a file of cells that is damaged and for a cell of which two folders
/// have different numbers; Error{resources} for a full disk; Error{interrupted}. `output` is then as it was, unless it
/// was a rename of complete files that failed.
MergeSummary merge(const std::filesystem::path& output,
                   const std::function<std::vector<std::filesystem::path>()>& next_folders, Tables tables,
                   const std::vector<std::string>& argv, const std::function<void(double, const std::string&)>& heard,
                   const std::function<bool()>& interrupted);

}  // namespace kvreplay
