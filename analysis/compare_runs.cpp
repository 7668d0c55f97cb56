#include "analysis/compare_runs.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "analysis/csv.h"
#include "analysis/results.h"
#include "hdf5/hdf5.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;
using hdf5::Dataset;
using hdf5::Group;

/// What a row is about; the other columns are what it says, but for those that only tell who computed it.
const std::string key_columns[] = {"trace", "policy", "params", "heads", "agg",    "budget", "boundary",
                                   "eval",  "seed",   "layer",  "head",  "metric", "variant"};
const std::string provenance_columns[] = {"backend", "cell"};

bool is_one_of(std::span<const std::string> names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

std::optional<double> number(std::string_view text) {
  double value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  return problem == std::errc{} && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

bool agree(double a, double b, double tolerance) {
  return a == b || (std::isnan(a) && std::isnan(b)) || std::abs(a - b) <= tolerance;
}

bool agree(const std::string& a, const std::string& b, double tolerance) {
  if (a == b) return true;
  const std::optional<double> x = number(a), y = number(b);
  return x && y && agree(*x, *y, tolerance);
}

using Row = std::map<std::string, std::string>;

std::string where(const Row& row) {
  const auto at = [&](const char* column) { return row.at(column); };
  const std::string variant = at("variant").empty() ? "" : ":" + at("variant");
  return fmt::format("{} {} {} {}: {}{}, layer {}, head {}", at("trace"), at("policy"), at("params"), at("budget"),
                     at("metric"), variant, at("layer"), at("head"));
}

std::map<std::vector<std::string>, Row> read_rows(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw Error{Refusal::input, path.string(), "cannot be read"};
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  const auto lines = parse_csv(path.string(), text);
  const std::span<const std::string> known = result_columns();
  if (lines.empty() || !std::ranges::equal(lines.front(), known))
    throw Error{Refusal::input, path.string(), "columns", "those of results.csv",
                lines.empty() ? "none" : csv_line(lines.front()).substr(0, 60)};
  std::map<std::vector<std::string>, Row> rows;
  for (std::size_t i = 1; i < lines.size(); ++i) {
    if (lines[i].size() != known.size())
      throw Error{Refusal::input, fmt::format("{}:{}", path.string(), i + 1), "columns", std::to_string(known.size()),
                  std::to_string(lines[i].size())};
    Row row;
    for (std::size_t c = 0; c < known.size(); ++c) row[known[c]] = lines[i][c];
    std::vector<std::string> key;
    for (const std::string& column : key_columns) key.push_back(row[column]);
    rows.emplace(std::move(key), std::move(row));
  }
  return rows;
}

void compare_rows(const fs::path& first, const fs::path& second, double tolerance, RunDifference& difference) {
  const auto ours = read_rows(first), theirs = read_rows(second);
  for (const auto& [key, row] : theirs)
    if (!ours.contains(key)) difference.only_second.push_back(where(row));
  for (const auto& [key, row] : ours) {
    const auto other = theirs.find(key);
    if (other == theirs.end()) {
      difference.only_first.push_back(where(row));
      continue;
    }
    for (const std::string& column : result_columns()) {
      if (is_one_of(key_columns, column) || is_one_of(provenance_columns, column)) continue;
      const std::string& a = row.at(column);
      const std::string& b = other->second.at(column);
      if (!agree(a, b, tolerance))
        difference.values.push_back({where(row) + (column == "value" ? "" : ": " + column), a, b});
    }
  }
}

/// Every element as double; strings and records are not numbers.
std::optional<std::vector<double>> numbers(const Dataset& dataset) {
  const hdf5::Lock lock;
  const hdf5::Type type = dataset.type();
  const H5T_class_t kind = H5Tget_class(type.id());
  if (kind != H5T_INTEGER && kind != H5T_FLOAT) return std::nullopt;
  std::vector<double> all(dataset.stored_elements());
  const hdf5::Type doubles{H5Tcopy(H5T_NATIVE_DOUBLE), H5Tclose};
  dataset.read(doubles, all.data());
  return all;
}

std::vector<char> bytes(const Dataset& dataset) {
  const hdf5::Type type = dataset.type();
  if (type.has_variable_length())
    throw Error{Refusal::input, dataset.where(), "type", "elements of one length", type.name()};
  std::vector<char> all(dataset.stored_elements() * type.bytes());
  dataset.read(type, all.data());
  return all;
}

std::string text_of(const std::vector<std::int32_t>& positions) {
  std::string text;
  for (const std::int32_t position : positions) text += (text.empty() ? "" : ",") + std::to_string(position);
  return text.empty() ? "nothing more" : text;
}

std::vector<std::int32_t> without(std::span<const std::int32_t> ours, std::span<const std::int32_t> theirs) {
  std::vector<std::int32_t> rest;
  std::ranges::set_difference(ours, theirs, std::back_inserter(rest));
  return rest;
}

/// Rows of a list lie one after another: row r is [offsets[r], offsets[r+1]) of `length`.
void check_offsets(const std::string& where, std::span<const std::int64_t> offsets, std::size_t length) {
  if (offsets.empty() || offsets.front() != 0 || !std::ranges::is_sorted(offsets) ||
      offsets.back() != static_cast<std::int64_t>(length))
    throw Error{Refusal::input, where, "offsets", fmt::format("ascending from 0 to {}", length),
                offsets.empty() ? "none" : fmt::format("from {} to {}", offsets.front(), offsets.back())};
}

void compare_sets(const std::string& where, const Group& first, const Group& second, RunDifference& difference) {
  const auto our_offsets = first.dataset("offsets").values<std::int64_t>();
  const auto their_offsets = second.dataset("offsets").values<std::int64_t>();
  const auto layers = first.dataset("layer_source").shape();
  if (our_offsets.size() != their_offsets.size()) {
    difference.sets.push_back(
        {where, fmt::format("{} rows", our_offsets.size() - 1), fmt::format("{} rows", their_offsets.size() - 1)});
    return;
  }
  const auto ours = first.dataset("positions").values<std::int32_t>();
  const auto theirs = second.dataset("positions").values<std::int32_t>();
  check_offsets(first.where() + "/offsets", our_offsets, ours.size());
  check_offsets(second.where() + "/offsets", their_offsets, theirs.size());
  const std::size_t rows_a_layer =
      std::max<std::size_t>(1, (our_offsets.size() - 1) / std::max<std::size_t>(1, layers.empty() ? 1 : layers[0]));
  const auto row = [](const auto& positions, const auto& offsets, std::size_t r) {
    return std::span(positions).subspan(static_cast<std::size_t>(offsets[r]),
                                        static_cast<std::size_t>(offsets[r + 1] - offsets[r]));
  };
  for (std::size_t r = 0; r + 1 < our_offsets.size(); ++r) {
    const auto a = row(ours, our_offsets, r), b = row(theirs, their_offsets, r);
    if (!std::ranges::equal(a, b))
      difference.sets.push_back({fmt::format("{}, layer {}, head {}", where, r / rows_a_layer, r % rows_a_layer),
                                 text_of(without(a, b)), text_of(without(b, a))});
  }
}

void compare_dataset(const std::string& where, const Dataset& first, const Dataset& second, double tolerance,
                     RunDifference& difference) {
  if (first.shape() != second.shape()) {
    difference.values.push_back({where + ": shape", hdf5::to_string(first.shape()), hdf5::to_string(second.shape())});
    return;
  }
  const auto ours = numbers(first), theirs = numbers(second);
  if (!ours || !theirs) {
    if (!(first.type() == second.type()) || bytes(first) != bytes(second))
      difference.values.push_back({where, "other text", "other text"});
    return;
  }
  std::size_t differing = 0, at = 0;
  for (std::size_t i = ours->size(); i-- > 0;)
    if (!agree((*ours)[i], (*theirs)[i], tolerance)) {
      ++differing;
      at = i;
    }
  if (differing > 0)
    difference.values.push_back(
        {fmt::format("{}: {} of {} numbers, the first at {}", where, differing, ours->size(), at),
         csv_number((*ours)[at]), csv_number((*theirs)[at])});
}

/// Two groups of the same name.
struct Groups {
  std::string where;
  Group first, second;
};

/// Datasets of two groups and of the groups in them, each pair once, wherever links lead; a cell's sets are compared as
/// sets.
void compare_groups(Groups all, double tolerance, RunDifference& difference) {
  std::set<std::pair<std::uint64_t, std::uint64_t>> compared;
  std::vector<Groups> pending;
  pending.push_back(std::move(all));
  while (!pending.empty()) {
    const auto [where, first, second] = std::move(pending.back());
    pending.pop_back();
    if (!compared.emplace(first.number(), second.number()).second) continue;
    const std::vector<std::string> ours = first.names(), theirs = second.names();
    for (const std::string& name : theirs)
      if (std::ranges::find(ours, name) == ours.end()) difference.only_second.push_back(where + "/" + name);
    for (const std::string& name : ours) {
      const std::string at = where + "/" + name;
      if (std::ranges::find(theirs, name) == theirs.end()) {
        difference.only_first.push_back(at);
      } else if (const Group::Member kind = first.member(name); second.member(name) != kind) {
        difference.values.push_back({at, "an object of one kind", "an object of another"});
      } else if (kind == Group::Member::group) {
        pending.push_back({at, first.group(name), second.group(name)});
      } else if (name != "offsets" && name != "positions") {
        compare_dataset(at, first.dataset(name), second.dataset(name), tolerance, difference);
      }
    }
  }
}

/// Cells by what they are, since the id also tells who computed them.
std::map<std::string, std::string> cells_by_name(const Group& cells) {
  std::map<std::string, std::string> ids;
  for (const std::string& id : cells.names()) {
    const Group cell = cells.group(id);
    const auto at = [&](const char* name) { return cell.string_attribute(name); };
    ids[fmt::format("{} {} {} {}", at("trace"), at("policy"), at("params"), at("budget"))] = id;
  }
  return ids;
}

void compare_selections(const fs::path& first, const fs::path& second, double tolerance, RunDifference& difference) {
  const hdf5::File ours = hdf5::File::open(first), theirs = hdf5::File::open(second);
  compare_groups({"/traces", ours.group("traces"), theirs.group("traces")}, tolerance, difference);
  const Group our_cells = ours.group("cells"), their_cells = theirs.group("cells");
  const auto our_ids = cells_by_name(our_cells), their_ids = cells_by_name(their_cells);
  for (const auto& [name, id] : their_ids)
    if (!our_ids.contains(name)) difference.only_second.push_back("sets of " + name);
  for (const auto& [name, id] : our_ids) {
    const auto other = their_ids.find(name);
    if (other == their_ids.end()) {
      difference.only_first.push_back("sets of " + name);
      continue;
    }
    Group a = our_cells.group(id), b = their_cells.group(other->second);
    compare_sets(name, a, b, difference);
    compare_groups({name, std::move(a), std::move(b)}, tolerance, difference);
  }
}

bool is_selections(const fs::path& path) {
  if (!fs::is_regular_file(path)) return false;
  try {
    const hdf5::File file = hdf5::File::open(path);
    return file.has_attribute("format") && file.string_attribute("format") == "kvselections";
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

bool is_run(const fs::path& path) { return fs::is_regular_file(path / "results.csv") || is_selections(path); }

RunDifference compare_runs(const fs::path& first, const fs::path& second, double tolerance) {
  for (const fs::path& path : {first, second})
    if (!is_run(path))
      throw Error{Refusal::input, path.string(), "not results", "a run's folder or a selections file",
                  fs::exists(path) ? "something else" : "nothing"};
  if (fs::is_directory(first) != fs::is_directory(second))
    throw Error{Refusal::input, second.string(), "another kind of results",
                fs::is_directory(first) ? "a run's folder" : "a selections file",
                fs::is_directory(second) ? "a run's folder" : "a selections file"};
  RunDifference difference;
  if (fs::is_directory(first)) {
    compare_rows(first / "results.csv", second / "results.csv", tolerance, difference);
    compare_selections(first / "selections.h5", second / "selections.h5", tolerance, difference);
  } else {
    compare_selections(first, second, tolerance, difference);
  }
  return difference;
}

}  // namespace kvreplay
