#include "analysis/compare_runs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "analysis/format_1.h"
#include "analysis/results_folder.h"
#include "hdf5/hdf5.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;
using hdf5::Dataset;
using hdf5::Group;
using Differences = std::vector<RunDifference>;

bool agree(double a, double b, double tolerance) {
  return a == b || (std::isnan(a) && std::isnan(b)) || std::abs(a - b) <= tolerance;
}

std::string text_of(double number) { return fmt::format("{:.17g}", number); }

/// Adds the keys that one side lacks, and calls `compare(key, ours, theirs)` for the others.
template <class Map, class Where, class Compare>
void compare_maps(const Map& first, const Map& second, Where where, Differences& differences, Compare compare) {
  for (const auto& [key, ours] : first)
    if (const auto theirs = second.find(key); theirs != second.end())
      compare(key, ours, theirs->second);
    else
      differences.push_back({where(key), "there", std::nullopt});
  for (const auto& [key, theirs] : second)
    if (!first.contains(key)) differences.push_back({where(key), std::nullopt, "there"});
}

/// Every element as double; none: strings and records are not numbers.
std::optional<std::vector<double>> numbers(const Dataset& dataset) {
  const hdf5::Lock lock;
  const H5T_class_t kind = H5Tget_class(dataset.type().id());
  if (kind != H5T_INTEGER && kind != H5T_FLOAT) return std::nullopt;
  std::vector<double> all(dataset.stored_elements());
  dataset.read(hdf5::Type::float64(), all.data());
  return all;
}

void compare_datasets(const std::string& where, const Dataset& first, const Dataset& second, double tolerance,
                      Differences& differences) {
  if (first.shape() != second.shape()) {
    differences.push_back({where + ": shape", hdf5::to_string(first.shape()), hdf5::to_string(second.shape())});
    return;
  }
  const auto ours = numbers(first), theirs = numbers(second);
  if (!ours || !theirs) {
    if (!(first.type() == second.type()) || first.bytes() != second.bytes())
      differences.push_back({where, "other text", "other text"});
    return;
  }
  std::size_t differing = 0, at = 0;
  for (std::size_t i = ours->size(); i-- > 0;)
    if (!agree((*ours)[i], (*theirs)[i], tolerance)) {
      ++differing;
      at = i;
    }
  if (differing > 0)
    differences.push_back({fmt::format("{}: {} of {} numbers, the first at {}", where, differing, ours->size(), at),
                           text_of((*ours)[at]), text_of((*theirs)[at])});
}

std::map<std::string, Group::Member> members(const Group& group) {
  std::map<std::string, Group::Member> all;
  for (const std::string& name : group.names()) all[name] = group.member(name);
  return all;
}

/// Two groups of the same name.
struct Groups {
  std::string where;
  Group first, second;
};

/// Datasets of two groups and of the groups in them, each pair once, wherever links lead. Kept positions are compared
/// as sets.
void compare_groups(Groups all, double tolerance, Differences& differences) {
  std::set<std::pair<std::uint64_t, std::uint64_t>> compared;
  std::vector<Groups> pending;
  pending.push_back(std::move(all));
  while (!pending.empty()) {
    const Groups groups = std::move(pending.back());
    pending.pop_back();
    const Group &first = groups.first, &second = groups.second;
    if (!compared.emplace(first.number(), second.number()).second) continue;
    const auto where = [&](const std::string& name) { return groups.where + "/" + name; };
    compare_maps(members(first), members(second), where, differences,
                 [&](const std::string& name, auto ours, auto theirs) {
                   if (ours != theirs)
                     differences.push_back({where(name), "an object of one kind", "an object of another"});
                   else if (ours == Group::Member::group)
                     pending.push_back({where(name), first.group(name), second.group(name)});
                   else if (name != "offsets" && name != "positions")
                     compare_datasets(where(name), first.dataset(name), second.dataset(name), tolerance, differences);
                 });
  }
}

std::string only(const std::vector<std::int32_t>& ours, const std::vector<std::int32_t>& theirs) {
  std::vector<std::int32_t> rest;
  std::ranges::set_difference(ours, theirs, std::back_inserter(rest));
  return rest.empty() ? "nothing more" : fmt::format("{}", fmt::join(rest, ","));
}

void compare_sets(const std::string& where, const LayerSelection& first, const LayerSelection& second,
                  Differences& differences) {
  const KeptSet &ours = first.set, &theirs = second.set;
  if (ours.rows() != theirs.rows()) {
    differences.push_back({where, fmt::format("{} rows", ours.rows()), fmt::format("{} rows", theirs.rows())});
    return;
  }
  for (int row = 0; row < ours.rows(); ++row)
    if (const auto a = ours.positions(row), b = theirs.positions(row); a != b)
      differences.push_back({fmt::format("{}, head {}", where, row), only(a, b), only(b, a)});
}

/// A file of cells that is compared with another.
struct OneFile {
  explicit OneFile(const fs::path& at) : path(at), all(read_trace_cells(at)), file(hdf5::File::open(at)) {
    // Not by their ids, which tell also who computed them.
    for (const CellRecord& cell : all.cells)
      cells[fmt::format("{} {} {} {}{}", all.trace.name, cell.policy, cell.params, cell.budget,
                        cell.seed == 0 ? "" : fmt::format(" seed {}", cell.seed))] = &cell;
  }

  fs::path path;
  TraceCells all;
  hdf5::File file;
  std::map<std::string, const CellRecord*> cells;
};

std::string facts_of(const CellRecord& cell) {
  return fmt::format("{}, heads {}, agg {}, {} tokens", cell.role, cell.heads, cell.agg, cell.budget_tokens);
}

void compare_files(const fs::path& first, const fs::path& second, double tolerance, Differences& differences) {
  const OneFile ours(first), theirs(second);
  const TraceRecord& trace = ours.all.trace;
  TraceRecord other = theirs.all.trace;
  other.backend = trace.backend;
  other.numerics = trace.numerics;
  if (const auto differing = differing_condition(trace, other)) {
    differences.push_back({trace.name + ": " + differing->what, differing->expected, differing->found});
    return;
  }
  compare_groups({"/traces", ours.file.group("traces"), theirs.file.group("traces")}, tolerance, differences);
  compare_values(trace.name, trace, trace.values, other.values, tolerance, differences);
  const auto compare_cells = [&](const std::string& name, const CellRecord* a, const CellRecord* b) {
    if (facts_of(*a) != facts_of(*b)) differences.push_back({name, facts_of(*a), facts_of(*b)});
    if (!agree(a->kept_tokens, b->kept_tokens, tolerance))
      differences.push_back({name + ": kept tokens", text_of(a->kept_tokens), text_of(b->kept_tokens)});
    compare_values(name, trace, a->values, b->values, tolerance, differences);
    const auto our_sets = read_selections(first, a->id, trace), their_sets = read_selections(second, b->id, other);
    for (std::size_t l = 0; l < our_sets.size(); ++l)
      compare_sets(fmt::format("{}, layer {}", name, trace.layer_index[static_cast<std::size_t>(trace.treated[l])]),
                   our_sets[l], their_sets[l], differences);
    compare_groups({name, ours.file.group("cells").group(a->id), theirs.file.group("cells").group(b->id)}, tolerance,
                   differences);
  };
  compare_maps(ours.cells, theirs.cells, [](const std::string& name) { return name; }, differences, compare_cells);
}

bool is_cells_file(const fs::path& path) {
  if (!fs::is_regular_file(path)) return false;
  try {
    check_cells_format(path);
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// By their names in the folder; of a single file, the name does not matter.
std::map<std::string, fs::path> files_of(const fs::path& run) {
  if (!fs::is_directory(run)) return {{"", run}};
  std::map<std::string, fs::path> files;
  for (const fs::path& file : cell_files_of(run)) files["cells/" + file.filename().string()] = file;
  return files;
}

}  // namespace

bool is_run(const fs::path& path) {
  refuse_format_1(path);
  return fs::is_directory(path / "cells") || is_cells_file(path);
}

void compare_values(const std::string& where, const TraceRecord& trace, const ValuesByMetric& first,
                    const ValuesByMetric& second, double tolerance, std::vector<RunDifference>& differences) {
  const auto of_metric = [&](const MetricName& name) { return where + ": " + name.text(); };
  compare_maps(first, second, of_metric, differences, [&](const MetricName& name, const Values& a, const Values& b) {
    if (a.rows() != b.rows() || a.columns() != b.columns()) {
      differences.push_back({of_metric(name), fmt::format("[{}, {}]", a.rows(), a.columns()),
                             fmt::format("[{}, {}]", b.rows(), b.columns())});
      return;
    }
    const auto place = [](int i, int all, int number) { return i + 1 == all ? "all" : std::to_string(number); };
    for (int row = 0; row < a.rows(); ++row)
      for (int column = 0; column < a.columns(); ++column) {
        if (agree(a(row, column), b(row, column), tolerance)) continue;
        const int layer = row + 1 < a.rows() ? trace.layer_index[static_cast<std::size_t>(row)] : -1;
        differences.push_back({fmt::format("{}, layer {}, head {}", of_metric(name), place(row, a.rows(), layer),
                                           place(column, a.columns(), column)),
                               text_of(a(row, column)), text_of(b(row, column))});
      }
  });
}

std::vector<RunDifference> compare_runs(const fs::path& first, const fs::path& second, double tolerance) {
  const auto kind = [](const fs::path& path) { return fs::is_directory(path) ? "a run's folder" : "a file of cells"; };
  for (const fs::path& path : {first, second})
    if (!is_run(path))
      throw Error{Refusal::input, path.string(), "not results of a run", "a folder of results or a file cells/TRACE.h5",
                  fs::exists(path) ? "something else" : "nothing"};
  if (fs::is_directory(first) != fs::is_directory(second))
    throw Error{Refusal::input, second.string(), "results of different kinds", kind(first), kind(second)};
  Differences differences;
  compare_maps(
      files_of(first), files_of(second), [](const std::string& name) { return name; }, differences,
      [&](const std::string&, const fs::path& ours, const fs::path& theirs) {
        compare_files(ours, theirs, tolerance, differences);
      });
  return differences;
}

}  // namespace kvreplay
