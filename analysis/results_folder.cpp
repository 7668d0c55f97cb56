#include "analysis/results_folder.h"

#include <algorithm>
#include <string>
#include <system_error>

#include "analysis/format_1.h"
#include "error.h"
#include "open_file.h"

namespace kvreplay {

namespace fs = std::filesystem;

bool is_results_folder(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / "cells", ignored) || fs::exists(folder / "run.json", ignored) || is_format_1(folder);
}

void check_results_folder(const fs::path& folder) {
  if (folder.empty()) throw Error{Refusal::usage, "output", "empty", "a folder for results"};
  refuse_format_1(folder);
  std::error_code ignored;
  if (!fs::exists(folder, ignored)) return;
  if (!fs::is_directory(folder, ignored))
    throw Error{Refusal::usage, folder.string(), "not a folder", "a folder for results", "a file"};
  const bool of_shards = fs::is_directory(folder / "shards", ignored);  // nothing of which is merged yet
  if (!is_results_folder(folder) && !of_shards && !fs::is_empty(folder))
    throw Error{Refusal::usage, folder.string(), "contains other files", "an empty folder, or a folder of results",
                fs::directory_iterator(folder)->path().filename().string()};
}

void make_results_folder(const fs::path& folder) {
  std::error_code problem;
  fs::create_directories(folder / "cells", problem);
  if (problem)
    throw Error{means_disk_full(problem.value()) ? Refusal::resources : Refusal::usage, folder.string(),
                "cannot be created", "a folder for results", problem.message()};
}

std::vector<fs::path> cell_files_of(const fs::path& folder) {
  refuse_format_1(folder);
  std::vector<fs::path> files;
  if (!fs::is_directory(folder / "cells")) return files;
  for (const auto& entry : fs::directory_iterator(folder / "cells"))
    if (entry.path().extension() == ".h5") files.push_back(entry.path());
  std::ranges::sort(files, {}, [](const fs::path& file) { return file.stem().string(); });
  return files;
}

}  // namespace kvreplay
