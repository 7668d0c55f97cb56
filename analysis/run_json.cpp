#include "analysis/run_json.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "analysis/self_check.h"
#include "open_file.h"

namespace kvreplay {
namespace {

using Json = nlohmann::ordered_json;

std::string utc(std::chrono::system_clock::time_point time) {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::chrono::system_clock::to_time_t(time)));
}

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

const char* word(ObservableUse use) {
  return use == ObservableUse::use ? "use" : use == ObservableUse::keep ? "keep" : "ignore";
}

const char* word(Controls controls) {
  return controls == Controls::none ? "none" : controls == Controls::random ? "random" : "twins";
}

Json policy_json(const ConfiguredPolicy& policy) {
  Json parameters = Json::object();
  const Parameters declared = policy.parameters();
  for (const Parameter& parameter : declared.all()) parameters[parameter.name] = parameter.value();
  Json result = {
      {"label", policy.label()}, {"name", policy.name()}, {"parameters", parameters}, {"paper", policy.card().paper}};
  for (const Source& source : policy.sources())
    result["source"].push_back({{"path", source.path}, {"hash", source.hash}});
  return result;
}

/// Those that a replay can measure.
Json metrics_json() {
  Json all = Json::array();
  for (const std::string& name : metrics().names()) {
    const MetricCard& card = metrics().get(name);
    if (is_live(card)) continue;
    Json variants = Json::array();
    for (const MetricVariant& variant : card.variants)
      variants.push_back({{"name", MetricName{name, variant.name}.text()},
                          {"unit", unit_of(card, variant)},
                          {"better", word(better_of(card, variant))}});
    all.push_back({{"name", name}, {"unit", card.unit}, {"better", word(card.better)}, {"variants", variants}});
  }
  return all;
}

/// Deeper than any run.json; what is nested without end would overflow the stack.
constexpr int most_levels = 64;

template <class Items, class Convert>
Json list(const Items& items, Convert convert) {
  Json result = Json::array();
  for (const auto& item : items) result.push_back(convert(item));
  return result;
}

/// Of this call, and of other traces that an earlier call replayed into the same folder.
Json inputs_json(const RunRequest& request, const RunSummary& summary) {
  Json inputs = list(summary.traces, input_json);
  if (request.output.empty()) return inputs;
  try {
    const Json earlier = read_run_json(request.output / "run.json");
    for (const Json& input : earlier.at("inputs")) {
      const auto name = input.at("trace").get<std::string>();
      if (std::ranges::find(summary.traces, name, &TraceRecord::name) == summary.traces.end()) inputs.push_back(input);
    }
  } catch (const Error&) {            // no earlier call, or one of another schema
  } catch (const Json::exception&) {  // a damaged file is replaced
  }
  return inputs;
}

}  // namespace

Json input_json(const TraceRecord& trace) {
  Json input = {{"path", trace.path.string()}, {"trace", trace.name}};
  if (trace.error.empty())
    input.update({{"trace_hash", trace.hash},
                  {"prompt_hash", trace.prompt_hash},
                  {"model", trace.model},
                  {"synthetic", trace.synthetic},
                  {"prompt", trace.boundary},
                  {"continuation", trace.continuation()},
                  {"layers", trace.layers},
                  {"treated_layers", trace.treated.size()},
                  {"eval_queries", trace.n_queries},
                  {"read_observables", trace.read_observables}});
  else
    input["error"] = trace.error;
  if (trace.is_sampled())
    input["sample"] = {{"text", trace.sample},
                       {"all_eval_queries", trace.all_queries},
                       {"sampled_heads", trace.samples_heads() ? trace.sampled_heads : trace.kv_heads},
                       {"all_treated_layers", trace.samples_layers() ? trace.all_layers.size() : trace.treated.size()}};
  return input;
}

Json cell_json(const CellRecord& cell) {
  Json result = {{"cell", cell.id},
                 {"trace", cell.trace},
                 {"role", cell.role},
                 {"policy", cell.policy},
                 {"params", cell.params},
                 {"budget", cell.budget},
                 {"budget_tokens", cell.budget_tokens},
                 {"own_memory", cell.own_memory},
                 {"state", word(cell.state)}};
  if (cell.protected_fill_budget) result["protected_fill_budget"] = true;
  if (!cell.source.empty()) result["source"] = cell.source;
  if (!cell.error.empty()) result["error"] = cell.error;
  return result;
}

CellRecord cell_of(const Json& cell) {
  const auto text = [&cell](const char* key) { return cell.value(key, std::string()); };
  CellRecord record{.id = text("cell"), .role = text("role"), .policy = text("policy"), .params = text("params")};
  record.trace = text("trace");
  record.budget = text("budget");
  record.budget_tokens = cell.value("budget_tokens", 0);
  record.own_memory = cell.value("own_memory", false);
  record.protected_fill_budget = cell.value("protected_fill_budget", false);
  record.state = text("state") == word(CellState::failed) ? CellState::failed : CellState::done;
  record.source = text("source");
  record.error = text("error");
  return record;
}

Json read_run_json(const std::filesystem::path& path) {
  Json run = Json::parse(read_file(path.string()), [&path](int depth, Json::parse_event_t, const Json&) {
    if (depth > most_levels)
      throw Error{Refusal::input, path.string(), "too deeply nested", fmt::format("at most {} levels", most_levels),
                  "more"};
    return true;
  });
  if (const std::string schema = run.value("schema", "none"); schema != "kvreplay-run/1")
    throw Error{Refusal::input, path.string(), "schema", "kvreplay-run/1", schema};
  return run;
}

Error invalid_run_json(const std::filesystem::path& path, const std::exception& problem) {
  return {Refusal::input, path.string(), "invalid run.json", "JSON written by kvreplay replay", problem.what()};
}

const char* word(CellState state) {
  return state == CellState::done ? "done" : state == CellState::skipped ? "skipped" : "failed";
}

std::string run_json(const RunRequest& request, const RunSummary& summary, const std::string& backend,
                     std::chrono::system_clock::time_point start, std::chrono::system_clock::time_point end) {
  Json result = {
      {"schema", "kvreplay-run/1"},
      {"argv", request.argv},
      {"start", utc(start)},
      {"end", utc(end)},
      {"host", host_name()},
      {"build", request.build},
      {"backend", {{"name", request.backend}, {"description", backend}}},
      {"inputs", inputs_json(request, summary)},
      {"policies", list(request.policies, policy_json)},
      {"metrics", metrics_json()},
      {"options",
       {{"budgets", list(request.budgets, [](const Budget& budget) { return Json(budget.literal); })},
        {"controls", word(request.controls)},
        {"metrics", list(request.metrics, [](const MetricName& name) { return Json(name.text()); })},
        {"detail", word(request.detail)},
        {"eval", request.eval},
        {"boundary", request.boundary},
        {"sliding", request.treat_sliding ? "treat" : "skip"},
        {"threads", request.threads},
        {"save_scores", request.save_scores},
        {"save_attention", request.save_attention},
        {"observables", word(request.observables)},
        {"text", !request.no_text}}},
      {"numerics", numerics},
      {"seed", request.seed},
      {"open_loop", true},
      {"self_check",
       {{"result", summary.self_check}, {"path_tolerance", path_tolerance}, {"oracle_tolerance", oracle_tolerance}}},
      {"warnings", summary.warnings},
      {"cells", list(summary.cells, cell_json)},
  };
  if (request.is_sampled())
    result["options"]["sample"] = {
        {"layers", request.sample.layers}, {"heads", request.sample.heads}, {"queries", request.sample.queries}};
  if (request.precision.half_width > 0) result["options"]["precision"] = request.precision.text();
  return result.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace kvreplay
