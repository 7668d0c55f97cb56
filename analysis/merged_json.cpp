#include "analysis/merged_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "analysis/run_json.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

/// The entries of a shard, and those that stand at the top where all shards agree.
constexpr const char* shard_keys[] = {"argv",    "start",   "end",  "host",      "build",
                                      "backend", "options", "seed", "self_check"};
constexpr const char* shared_keys[] = {"host", "build", "backend", "options", "seed"};

template <class List, class More>
void append_new(List& list, const More& more) {
  for (const auto& one : more)
    if (std::ranges::find(list, one) == list.end()) list.push_back(one);
}

/// Without a copy.
const Json& list_of(const Json& run, const char* key) {
  static const Json none = Json::array();
  const auto found = run.find(key);
  return found == run.end() ? none : *found;
}

/// The value if all are equal; of objects the entries that are equal in all. Null: none.
Json agreed(const std::vector<const Json*>& values) {
  if (values.empty()) return {};
  const Json& first = *values.front();
  if (std::ranges::all_of(values, [&](const Json* one) { return *one == first; })) return first;
  Json common;
  for (const auto& [key, entry] : first.items())
    if (std::ranges::all_of(values,
                            [&](const Json* one) { return one->is_object() && one->value(key, Json()) == entry; }))
      common[key] = entry;
  return common;
}

bool is_violation(const std::string& text) { return text.find("VIOLATED") != std::string::npos; }

Detail detail_of(const fs::path& path, const Json& text) {
  try {
    return parse_detail(text.get<std::string>());
  } catch (const Error& error) {
    throw Error{Refusal::input, path.string(), "unknown detail", error.expected(), error.found()};
  }
}

/// As `dump` has it inside a list of an object.
std::string indented(const Json& entry) {
  std::string text = "\n    ";
  for (const char c : entry.dump(2, ' ', false, Json::error_handler_t::replace)) {
    text += c;
    if (c == '\n') text += "    ";
  }
  return text;
}

}  // namespace

void MergedRun::add(const fs::path& folder, bool with_cells) {
  ++folders_;
  const fs::path path = folder / "run.json";
  if (std::error_code ignored; !fs::exists(path, ignored)) {
    append_new(merge_warnings_,
               std::vector{folder.string() + ": interrupted run; only its finished traces are merged"});
    shards_[fs::absolute(folder).lexically_normal().string()] = Json::object();
    return;
  }
  try {
    join(read_run_json(path), folder, with_cells);
  } catch (const Json::exception& problem) {
    throw invalid_run_json(path, problem);
  }
}

void MergedRun::join(const Json& run, const fs::path& folder, bool with_cells) {
  std::map<std::string, Json> shards;
  for (const Json& shard : list_of(run, "shards"))
    if (shard.value("build", Json::object()).is_object()) shards[shard.at("path").get<std::string>()] = shard;
  if (shards.empty()) {
    Json& own = shards[fs::absolute(folder).lexically_normal().string()] = Json::object();
    for (const char* key : shard_keys)
      if (run.contains(key)) own[key] = run[key];
  }
  for (auto& [path, shard] : shards) {
    if (shard.contains("self_check")) shard["self_check"].at("result").get<std::vector<std::string>>();
    if (const Json options = shard.value("options", Json::object()); options.contains("detail")) {
      const Detail detail = detail_of(folder / "run.json", options["detail"]);
      detail_ = std::min(detail_.value_or(detail), detail);
    }
    // The folder itself is newer than an entry of an earlier merge.
    if (!run.contains("shards") || !shards_.contains(path)) shards_[path] = shard;
  }
  for (const Json& input : list_of(run, "inputs")) {
    Json& known = inputs_[input.at("trace").get<std::string>()];
    if (known.is_null() || known.contains("error")) known = input;
  }
  append_new(policies_, list_of(run, "policies"));
  append_new(metrics_, list_of(run, "metrics"));
  append_new(run_warnings_, run.value("warnings", std::vector<std::string>()));
  if (numerics_.is_null()) numerics_ = run.value("numerics", Json());
  for (const Json& cell : list_of(run, "cells")) add(cell_of(cell), with_cells);
}

void MergedRun::add(CellRecord cell, bool with_cells) {
  for (const std::string& key : {cell.budget, cell.policy + ":" + cell.params}) ranks_.emplace(key, ranks_.size());
  if (!with_cells && cell.state != CellState::failed) return;
  if (cell.state != CellState::failed) cell.state = CellState::done;
  // Of a trace that could not be opened, cells have no id.
  const std::string key = cell.id.empty() ? fmt::format("{}:{} {}", cell.policy, cell.params, cell.budget) : cell.id;
  const auto [place, is_new] = cells_.try_emplace({cell.trace, key}, cell);
  CellRecord& known = place->second;
  if (is_new || cell.state == CellState::failed) return;
  if (known.state == CellState::failed) {
    // The file of a single folder may hold what an earlier run computed before the cell failed.
    if (folders_ != 1) known = std::move(cell);
    return;
  }
  if (cell.role == "asked" && known.role != "asked")
    std::tie(known.role, known.budget) = std::tie(cell.role, cell.budget);
}

void MergedRun::add(const TraceCells& all) {
  Json& input = inputs_[all.trace.name];
  if (input.is_null() || input.contains("error")) {
    input = input_json(all.trace);
    for (const char* unknown : {"path", "prompt_hash", "read_observables"}) input.erase(unknown);
  }
  for (CellRecord cell : all.cells) {
    cell.trace = all.trace.name;
    cell.values.clear();
    cell.seconds.clear();
    add(std::move(cell), true);
  }
}

std::vector<const CellRecord*> MergedRun::cells_of(const std::string& trace) const {
  std::vector<const CellRecord*> cells;
  for (auto at = cells_.lower_bound({trace, ""}); at != cells_.end() && at->first.first == trace; ++at)
    if (at->second.state != CellState::failed) cells.push_back(&at->second);
  return cells;
}

std::vector<const CellRecord*> MergedRun::cells() const {
  const auto as_asked = [](const CellRecord& cell) {
    return std::tie(cell.trace, cell.policy, cell.params, cell.budget);
  };
  const auto is_whole = [&](const CellRecord& failed) {
    return std::ranges::any_of(cells_of(failed.trace),
                               [&](const auto* cell) { return as_asked(*cell) == as_asked(failed); });
  };
  std::vector<std::tuple<std::string_view, std::size_t, bool, std::size_t, std::string_view, const CellRecord*>> places;
  for (const auto& [key, cell] : cells_)
    if (!cell.id.empty() || !is_whole(cell))
      places.emplace_back(cell.trace, ranks_.at(cell.budget), cell.role != "asked",
                          ranks_.at(cell.policy + ":" + cell.params), cell.id, &cell);
  std::ranges::sort(places);
  std::vector<const CellRecord*> cells;
  for (const auto& place : places) cells.push_back(std::get<const CellRecord*>(place));
  return cells;
}

std::vector<std::string> MergedRun::warnings() const {
  std::vector<std::string> all = merge_warnings_;
  std::map<std::string, std::map<std::string, std::string>> found;  // by entry and its text the first folder
  for (const auto& [path, shard] : shards_)
    for (const char* entry : {"build", "backend", "options", "seed"}) {
      Json value = shard.value(entry, Json::object());
      if (!value.is_object()) value = {{"", value.dump()}};
      for (const Json::object_t::value_type& one : value.get_ref<const Json::object_t&>())
        if (one.second.is_string() && one.first != "detail")
          found[fmt::format("{}{}{}", entry, one.first.empty() ? "" : " ", one.first)].emplace(one.second, path);
    }
  for (const auto& [entry, texts] : found) {
    if (texts.size() < 2) continue;
    std::string listed;
    for (const auto& [text, folder] : texts)
      listed += fmt::format("{}{} ({})", listed.empty() ? "" : ", ", text, fs::proximate(folder).string());
    all.push_back(fmt::format("runs of several kinds are merged: {}: {}", entry, listed));
  }
  return all;
}

/// By law a violation if there is one; "full not replayed" only where no run has replayed it.
Json MergedRun::self_check() const {
  Json together;
  for (const auto& [path, shard] : shards_) {
    if (!shard.contains("self_check")) continue;
    const Json& theirs = shard["self_check"];
    if (together.is_null()) {
      together = theirs;
      continue;
    }
    Json& ours = together.at("result");
    for (std::size_t law = 0; law < std::min(ours.size(), theirs.at("result").size()); ++law) {
      const auto our = ours[law].get<std::string>(), their = theirs["result"][law].get<std::string>();
      if (!is_violation(their) && (our == their || our != full_not_replayed)) continue;
      ours[law] = is_violation(our) ? our + ", " + their : their;
    }
  }
  return together;
}

void MergedRun::write(ReplacedFile& file, const std::vector<std::string>& argv,
                      const std::vector<const CellRecord*>& all_cells, const std::vector<std::string>& warned) const {
  Json head = {{"schema", "kvreplay-run/1"}, {"argv", argv}};
  std::map<std::string, std::vector<const Json*>> said;
  Json shards = Json::array();
  for (const auto& [path, shard] : shards_) {
    for (const char* key : shard_keys)
      if (const auto entry = shard.find(key); entry != shard.end()) said[key].push_back(&*entry);
    Json& entry = shards.emplace_back(Json{{"path", path}});
    entry.update(shard);
  }
  const auto value = [](const Json* entry) -> const Json& { return *entry; };
  if (!said["start"].empty()) head["start"] = *std::ranges::min(said["start"], {}, value);
  if (!said["end"].empty()) head["end"] = *std::ranges::max(said["end"], {}, value);
  for (const char* key : shared_keys)
    if (const Json common = agreed(said[key]); !common.is_null()) head[key] = common;
  if (detail_) head["options"]["detail"] = word(*detail_);
  if (const Json check = self_check(); !check.is_null()) head["self_check"] = check;
  std::vector<std::string> all_warnings = run_warnings_;
  append_new(all_warnings, warned);
  Json inputs = Json::array();
  for (const auto& [trace, input] : inputs_) inputs.push_back(input);
  head.update({{"inputs", inputs},
               {"policies", policies_},
               {"metrics", metrics_},
               {"numerics", numerics_},
               {"open_loop", true},
               {"warnings", all_warnings},
               {"shards", shards},
               {"cells", Json::array()}});
  std::string text = head.dump(2, ' ', false, Json::error_handler_t::replace);
  text.resize(text.rfind(']'));
  file.write(text);
  const char* separator = "";
  for (const CellRecord* cell : all_cells) {
    file.write(separator + indented(cell_json(*cell)));
    separator = ",";
  }
  file.write(*separator == '\0' ? "]\n}\n" : "\n  ]\n}\n");
}

}  // namespace kvreplay
