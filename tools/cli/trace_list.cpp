#include "trace_list.h"

#include <fmt/format.h>
#include <glob.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <numeric>
#include <set>
#include <system_error>
#include <tuple>

#include "analysis/csv.h"
#include "error.h"
#include "parameters.h"
#include "policies/text/configured.h"
#include "policies/text/policy_source.h"
#include "replay/stored_observables.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view ending = ".h5";
constexpr std::string_view observables_ending = ".obs.h5";

std::vector<std::string> traces_in(const fs::path& folder) {
  std::vector<std::string> found;
  std::error_code problem;
  for (fs::directory_iterator entry(folder, problem), end; !problem && entry != end; entry.increment(problem)) {
    const std::string name = entry->path().filename().string();
    if (name.ends_with(ending) && !name.ends_with(observables_ending)) found.push_back(entry->path().string());
  }
  if (problem) throw Error{Refusal::input, folder.string(), "cannot be read", "a folder of traces", problem.message()};
  std::ranges::sort(found);
  return found;
}

/// Traces, and those in folders. Only `pattern` is one: the folder's own name may hold anything.
std::vector<std::string> matches(const fs::path& folder, const std::string& pattern) {
  std::string escaped;
  for (const char c : (folder / "").string()) {
    if (std::string_view("*?[]\\").find(c) != std::string_view::npos) escaped += '\\';
    escaped += c;
  }
  const bool absolute = fs::path(pattern).is_absolute();
  glob_t matched{};
  std::vector<std::string> found;
  if (glob((absolute ? pattern : escaped + pattern).c_str(), GLOB_NOSORT, nullptr, &matched) == 0)
    for (const std::string match : std::span(matched.gl_pathv, matched.gl_pathc)) {
      std::error_code ignored;
      if (fs::is_directory(match, ignored))
        std::ranges::move(traces_in(match), std::back_inserter(found));
      else if (match.ends_with(ending))
        found.push_back(match);
    }
  globfree(&matched);
  std::ranges::sort(found);
  return found;
}

std::vector<ListedTrace> traces_of_manifest(const fs::path& path) {
  const std::string place = path.string();
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw Error{Refusal::input, place, "cannot be read", "a manifest (.csv)"};
  std::string text{std::istreambuf_iterator<char>(stream), {}};
  constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";  // as Excel begins its files
  if (text.starts_with(byte_order_mark)) text.erase(0, byte_order_mark.size());
  const auto lines = parse_csv(place, text);
  const std::vector<std::string> columns = lines.empty() ? std::vector<std::string>() : lines.front();
  const auto column = [&](std::string_view name) {
    return static_cast<std::size_t>(std::ranges::find(columns, name) - columns.begin());
  };
  const std::size_t file = column("file"), name = column("name"), hash = column("trace_hash");
  if (hash == columns.size() || (file == columns.size() && name == columns.size()))
    throw Error{Refusal::input, place, "not a manifest", "columns trace_hash, and file or name",
                columns.empty() ? "nothing" : csv_fields(columns)};
  std::vector<ListedTrace> found;
  std::ptrdiff_t line = 1;
  for (const std::vector<std::string>& fields : lines) {
    const std::string where = fmt::format("{}:{}", place, line++);
    for (const std::string& field : fields) line += std::ranges::count(field, '\n');
    const bool blank = fields.size() == 1 && fields.front().empty();
    if (blank || &fields == &lines.front()) continue;
    if (fields.size() != columns.size())
      throw Error{Refusal::input, where, "number of fields", std::to_string(columns.size()),
                  std::to_string(fields.size())};
    std::string trace = file < columns.size() ? fields[file] : "";
    if (trace.empty() && name < columns.size() && !fields[name].empty()) trace = fields[name] + std::string(ending);
    if (trace.empty()) throw Error{Refusal::input, where, "no trace", "a value in column file or name"};
    if (fields[hash].size() != 32 || fields[hash].find_first_not_of("0123456789abcdef") != std::string::npos)
      throw Error{Refusal::input, where, "trace_hash", "32 hexadecimal digits", "\"" + fields[hash] + "\""};
    found.push_back({(path.parent_path() / trace).string(), fields[hash], where});
  }
  if (found.empty()) throw Error{Refusal::input, place, "no trace", "one row for each trace"};
  return found;
}

/// Throws Error{usage} for a word of a list of budgets or policies that has a blank in place of a comma.
void refuse_list_word(const GivenValue& name) {
  const auto refuse = [&](const char* what, const char* expected) {
    throw Error{Refusal::usage, name.where, what, expected, name.where == name.text ? "" : name.text};
  };
  if (policies().find(name.text) != nullptr)
    refuse("a policy and no trace", "policies without blanks, as -p h2o,snapkv");
  try {
    Budget::parse(name.text);
  } catch (const Error&) {
    return;
  }
  refuse("a budget and no trace", "budgets without blanks, as -b 0.1,0.2");
}

std::vector<ListedTrace> traces_of(const GivenValue& name, const fs::path& folder) {
  const fs::path path = folder / name.text;
  std::error_code ignored;
  const bool there = fs::exists(path, ignored);
  if (!there) refuse_list_word(name);
  if (there && path.extension() == ".csv") return traces_of_manifest(path);
  const bool in_folder = fs::is_directory(path, ignored);
  if (!in_folder && (there || name.text.find_first_of("*?[") == std::string::npos)) return {{path.string()}};
  std::vector<ListedTrace> found;
  for (std::string& one : in_folder ? traces_in(path) : matches(folder, name.text)) found.push_back({std::move(one)});
  if (found.empty())
    throw Error{Refusal::input, name.where, in_folder ? "no trace in this folder" : "no such trace", "files *.h5",
                name.where == name.text ? "" : name.text};
  return found;
}

}  // namespace

std::vector<ListedTrace> list_traces(std::span<const GivenValue> names, const fs::path& folder) {
  std::vector<ListedTrace> all;
  for (const GivenValue& name : names)
    for (ListedTrace& trace : traces_of(name, folder)) all.push_back(std::move(trace));
  std::vector<std::string> paths;
  for (const ListedTrace& trace : all) paths.push_back(trace.path);
  const std::vector<std::string> kept = without_observables(std::move(paths));
  const std::set<std::string> wanted(kept.begin(), kept.end());
  std::erase_if(all, [&](const ListedTrace& trace) { return !wanted.contains(trace.path); });
  return all;
}

std::vector<ListedTrace> list_traces(std::span<const std::string> operands) {
  std::vector<GivenValue> names;
  for (const std::string& operand : operands) names.push_back({operand, operand});
  return list_traces(names);
}

std::string trace_list_help() {
  return "TRACE is a trace (.h5), a folder of traces, a quoted pattern such as 'traces/*.h5', or a manifest (.csv).\n";
}

void check_hash(const ListedTrace& listed, const std::string& hash) {
  if (!listed.hash.empty() && !hash.empty() && listed.hash != hash)
    throw Error{Refusal::input, listed.where, "trace_hash of " + listed.path, listed.hash, hash};
}

Shard Shard::parse(const std::string& where, std::string_view text) {
  const std::size_t slash = text.find('/');
  if (slash == std::string_view::npos)
    throw Error{Refusal::usage, where, "not a shard", "I/N, as 1/8", "\"" + std::string(text) + "\""};
  constexpr int most = 1'000'000;
  const int count = parse_int(where, text.substr(slash + 1), 1, most);
  return {parse_int(where, text.substr(0, slash), 1, count), count};
}

std::vector<ListedTrace> Shard::of(const std::vector<ListedTrace>& all) const {
  std::vector<std::uintmax_t> sizes;
  for (const ListedTrace& trace : all) {
    std::error_code problem;
    const std::uintmax_t size = fs::file_size(trace.path, problem);
    sizes.push_back(problem ? 0 : size);
  }
  std::vector<std::size_t> by_size(all.size());
  std::iota(by_size.begin(), by_size.end(), std::size_t{0});
  std::ranges::sort(by_size,
                    [&](std::size_t a, std::size_t b) { return sizes[a] != sizes[b] ? sizes[a] > sizes[b] : a < b; });
  // Bytes, traces and number of each shard.
  std::set<std::tuple<std::uintmax_t, std::size_t, int>> shards;
  for (int i = 1; i <= count; ++i) shards.insert({0, 0, i});
  std::vector<bool> mine(all.size());
  for (const std::size_t i : by_size) {
    auto [bytes, traces, shard] = *shards.begin();
    shards.erase(shards.begin());
    shards.insert({bytes + sizes[i], traces + 1, shard});
    mine[i] = shard == number;
  }
  std::vector<ListedTrace> found;
  for (std::size_t i = 0; i < all.size(); ++i)
    if (mine[i]) found.push_back(all[i]);
  return found;
}

}  // namespace kvreplay
