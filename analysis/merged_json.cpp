#include "analysis/merged_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <tuple>

#include "analysis/replaced_file.h"
#include "analysis/run_json.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

/// Entries that each hold the same, whatever the run.
constexpr const char* noted_entries[] = {"host", "build", "backend", "options"};

/// Deeper than any run.json; what is nested without end would overflow the stack.
constexpr int most_levels = 64;

void append_new(Json& list, const Json& more) {
  for (const Json& one : more)
    if (std::ranges::find(list, one) == list.end()) list.push_back(one);
}

void append_new(std::vector<std::string>& list, const std::string& text) {
  if (std::ranges::find(list, text) == list.end()) list.push_back(text);
}

Json shard_json(const std::string& folder, const Json& run) {
  Json shard = {{"path", folder}};
  for (const char* key : {"start", "end", "host"})
    if (run.contains(key)) shard[key] = run[key];
  if (run.contains("backend")) shard["backend"] = run["backend"].value("description", "");
  if (run.contains("build"))
    shard["build"] = fmt::format("{} {}", run["build"].value("version", ""), run["build"].value("git", ""));
  return shard;
}

Json input_of(const TraceRecord& trace) {
  TraceSummary summary{.name = trace.name, .hash = trace.hash, .model = trace.model, .synthetic = trace.synthetic};
  summary.prompt = trace.boundary;
  summary.continuation = trace.tokens - trace.boundary;
  summary.stored_layers = trace.layers;
  summary.layers = static_cast<int>(trace.treated.size());
  summary.n_queries = trace.n_queries;
  Json input = input_json(summary);
  for (const char* unknown : {"path", "prompt_hash", "read_observables"}) input.erase(unknown);
  return input;
}

void check_detail(const fs::path& path, const Json& options) {
  try {
    if (options.contains("detail")) parse_detail(options["detail"].get<std::string>());
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

void MergedRun::add(const fs::path& folder) {
  const fs::path path = folder / "run.json";
  if (std::error_code ignored; !fs::exists(path, ignored)) {
    append_new(troubles_, folder.string() + ": an interrupted run: its finished traces are taken");
    shards_.push_back({{"path", folder.string()}});
    return;
  }
  try {
    std::ifstream stream(path, std::ios::binary);
    if (!stream) throw Error{Refusal::input, path.string(), "cannot be read"};
    const Json run = Json::parse(stream, [&path](int depth, Json::parse_event_t, const Json&) {
      if (depth > most_levels)
        throw Error{Refusal::input, path.string(), "nested too deep", fmt::format("at most {} levels", most_levels),
                    "more"};
      return true;
    });
    if (const std::string schema = run.value("schema", "none"); schema != "kvreplay-run/1")
      throw Error{Refusal::input, path.string(), "schema", "kvreplay-run/1", schema};
    if (run.contains("options")) check_detail(path, run["options"]);
    join(run, folder.string());
  } catch (const Json::exception& problem) {
    throw Error{Refusal::input, path.string(), "unreadable", "JSON as replay writes it", problem.what()};
  }
}

void MergedRun::join(const Json& run, const std::string& folder) {
  for (const Json& shard : run.value("shards", Json::array({shard_json(folder, run)})))
    if (std::ranges::find(shards_, shard.at("path"), [](const Json& known) { return known.at("path"); }) ==
        shards_.end())
      shards_.push_back(shard);
  const std::string start = run.value("start", ""), end = run.value("end", "");
  if (start_.empty() || start < start_) start_ = start;
  end_ = std::max(end_, end);
  for (const char* entry : noted_entries)
    if (run.contains(entry)) note(entry, run[entry], folder);
  for (const Json& input : run.value("inputs", Json::array())) {
    Json& known = inputs_[input.at("trace").get<std::string>()];
    if (known.is_null() || known.contains("error")) known = input;
  }
  append_new(policies_, run.value("policies", Json::array()));
  append_new(metrics_, run.value("metrics", Json::array()));
  join_options(run.value("options", Json::object()));
  if (numerics_.is_null()) numerics_ = run.value("numerics", Json());
  if (run.contains("seed")) {
    const Json& seed = run["seed"];
    if (seed_.is_null()) seed_ = seed;
    note("seed", seed.is_string() ? seed : Json(seed.dump()), folder);
  }
  if (run.contains("self_check")) join_self_check(run["self_check"]);
  for (const Json& warning : run.value("warnings", Json::array()))
    append_new(told_warnings_, warning.get<std::string>());
  join_cells(run.value("cells", Json::array()));
}

void MergedRun::note(const std::string& entry, const Json& value, const std::string& folder) {
  const auto note_text = [&](const std::string& key, const std::string& text) {
    auto& keys = texts_[entry];
    auto of_key = std::ranges::find(keys, key, [](const auto& known) { return known.first; });
    if (of_key == keys.end()) of_key = keys.insert(keys.end(), {key, {}});
    Texts& texts = of_key->second;
    if (std::ranges::find(texts, text, [](const auto& known) { return known.first; }) == texts.end())
      texts.emplace_back(text, folder);
  };
  if (value.is_string()) return note_text("", value.get<std::string>());
  for (const auto& [key, text] : value.items())
    if (text.is_string() && key != "detail") note_text(key, text.get<std::string>());
}

Json MergedRun::noted(const std::string& entry) const {
  Json all = Json::object();
  const auto found = texts_.find(entry);
  if (found == texts_.end()) return all;
  for (const auto& [key, texts] : found->second) {
    std::string together;
    for (const auto& [text, folder] : texts) together += (together.empty() ? "" : "; ") + text;
    if (key.empty()) return together;
    all[key] = together;
  }
  return all;
}

void MergedRun::join_options(const Json& options) {
  if (options.contains("detail")) {
    const Detail detail = parse_detail(options["detail"].get<std::string>());
    detail_ = std::min(detail_.value_or(detail), detail);
  }
  for (const auto& [key, value] : options.items()) {
    Json& known = options_[key];
    if (known.is_null())
      known = value;
    else if (value.is_array())
      append_new(known, value);
    else if (value.is_boolean())
      known = known.get<bool>() || value.get<bool>();
  }
}

void MergedRun::join_self_check(const Json& theirs) {
  if (self_check_.empty()) {
    self_check_ = theirs;
    return;
  }
  const auto is_violation = [](const Json& text) {
    return text.get<std::string>().find("VIOLATED") != std::string::npos;
  };
  Json& ours = self_check_.at("result");
  for (std::size_t law = 0; law < std::min(ours.size(), theirs.at("result").size()); ++law) {
    const Json& their = theirs["result"][law];
    if (ours[law] != full_not_replayed && !is_violation(their)) continue;
    ours[law] = is_violation(ours[law]) ? Json(ours[law].get<std::string>() + ", " + their.get<std::string>()) : their;
  }
}

void MergedRun::join_cells(const Json& cells) {
  for (const Json& cell : cells) {
    const auto text = [&cell](const char* key) { return cell.value(key, std::string()); };
    const std::string policy = text("policy"), params = text("params");
    ranks_.emplace(std::pair(policy, params), ranks_.size());
    if (text("state") != "failed") continue;
    cells_.push_back({.trace = word(text("trace")),
                      .policy = word(policy),
                      .params = word(params),
                      .budget = word(text("budget")),
                      .id = text("cell"),
                      .budget_tokens = cell.value("budget_tokens", 0),
                      .own_memory = cell.value("own_memory", false),
                      .asked = text("role") == "asked",
                      .error = text("error")});
  }
}

void MergedRun::add(const TraceCells& all) {
  Json& input = inputs_[all.trace.name];
  if (input.is_null() || input.contains("error")) input = input_of(all.trace);
  for (const CellRecord& cell : all.cells) {
    ranks_.emplace(std::pair(cell.policy, cell.params), ranks_.size());
    cells_.push_back({.trace = word(all.trace.name),
                      .policy = word(cell.policy),
                      .params = word(cell.params),
                      .budget = word(cell.budget),
                      .id = cell.id,
                      .budget_tokens = cell.budget_tokens,
                      .own_memory = cell.own_memory,
                      .asked = cell.role == "asked"});
  }
}

void MergedRun::sort_cells() {
  const Json budgets = options_.value("budgets", Json::array());
  std::map<std::string, std::size_t> rank_of_budget;
  for (const Json& budget : budgets) rank_of_budget.emplace(budget.get<std::string>(), rank_of_budget.size());
  const auto place = [&](const Cell& cell) {
    const auto budget = rank_of_budget.find(*cell.budget);
    return std::tuple(std::string_view(*cell.trace), budget == rank_of_budget.end() ? budgets.size() : budget->second,
                      std::string_view(*cell.budget), !cell.asked, ranks_.at({*cell.policy, *cell.params}),
                      std::string_view(cell.id), !cell.error.empty());
  };
  std::ranges::sort(cells_, {}, place);
  std::set<std::tuple<std::string_view, std::string_view>> whole;
  std::set<std::tuple<std::string_view, std::string_view, std::string_view, std::string_view>> whole_as_asked;
  const auto as_asked = [](const Cell& cell) {
    return std::tuple<std::string_view, std::string_view, std::string_view, std::string_view>(
        *cell.trace, *cell.policy, *cell.params, *cell.budget);
  };
  for (const Cell& cell : cells_) {
    if (!cell.error.empty()) continue;
    whole.emplace(*cell.trace, cell.id);
    if (cell.asked) whole_as_asked.insert(as_asked(cell));
  }
  // Of a trace that could not be opened, cells have no id.
  const auto is_there = [&](const Cell& cell) {
    return cell.id.empty() ? whole_as_asked.contains(as_asked(cell)) : whole.contains({*cell.trace, cell.id});
  };
  const auto repeats = [&](const Cell& cell, const Cell& before) {
    return std::tie(cell.trace, cell.policy, cell.params, cell.budget, cell.id) ==
           std::tie(before.trace, before.policy, before.params, before.budget, before.id);
  };
  std::erase_if(cells_, [&](const Cell& cell) { return !cell.error.empty() && is_there(cell); });
  const auto rest = std::ranges::unique(cells_, repeats);
  cells_.erase(rest.begin(), rest.end());
}

CellSummary MergedRun::summary_of(const Cell& cell) const {
  CellSummary summary{.trace = *cell.trace,
                      .id = cell.id,
                      .role = cell.asked ? "asked" : "control",
                      .policy = *cell.policy,
                      .params = *cell.params,
                      .budget = *cell.budget,
                      .budget_tokens = cell.budget_tokens};
  summary.own_memory = cell.own_memory;
  summary.state = cell.error.empty() ? CellState::done : CellState::failed;
  summary.error = cell.error;
  return summary;
}

std::vector<CellSummary> MergedRun::failed_cells() const {
  std::vector<CellSummary> failed;
  for (const Cell& cell : cells_)
    if (!cell.error.empty()) failed.push_back(summary_of(cell));
  return failed;
}

std::vector<std::string> MergedRun::warnings() const {
  std::vector<std::string> all = troubles_;
  for (const auto& [entry, keys] : texts_)
    for (const auto& [key, texts] : keys) {
      if (texts.size() < 2 || entry == "host") continue;
      std::string found;
      for (const auto& [text, folder] : texts)
        found += fmt::format("{}{} ({})", found.empty() ? "" : ", ", text, folder);
      append_new(
          all, fmt::format("runs of several kinds are merged: {}{}{}: {}", entry, key.empty() ? "" : " ", key, found));
    }
  return all;
}

void MergedRun::write(ReplacedFile& file, const std::vector<std::string>& argv) {
  sort_cells();
  options_.update(noted("options"));
  if (const Json seed = noted("seed"); seed.is_string() && seed != seed_.dump()) seed_ = seed;
  if (detail_) options_["detail"] = kvreplay::word(*detail_);
  Json inputs = Json::array();
  for (const auto& [trace, input] : inputs_) inputs.push_back(input);
  for (const std::string& warning : warnings()) append_new(told_warnings_, warning);
  const Json head = {
      {"schema", "kvreplay-run/1"},
      {"argv", argv},
      {"start", start_},
      {"end", end_},
      {"host", noted("host")},
      {"build", noted("build")},
      {"backend", noted("backend")},
      {"inputs", inputs},
      {"policies", policies_},
      {"metrics", metrics_},
      {"options", options_},
      {"numerics", numerics_},
      {"seed", seed_},
      {"open_loop", true},
      {"self_check", self_check_},
      {"warnings", told_warnings_},
      {"shards", shards_},
      {"cells", Json::array()},
  };
  std::string text = head.dump(2, ' ', false, Json::error_handler_t::replace);
  text.resize(text.rfind(']'));
  file.write(text);
  for (const Cell& cell : cells_)
    file.write((&cell == cells_.data() ? "" : ",") + indented(cell_json(summary_of(cell))));
  file.write(cells_.empty() ? "]\n}\n" : "\n  ]\n}\n");
}

}  // namespace kvreplay
