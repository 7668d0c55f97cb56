#include "analysis/run_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <climits>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "analysis/results_folder.h"
#include "analysis/run_sample.h"
#include "hash.h"
#include "policies/twin.h"
#include "replay/trace_inputs.h"
#include "trace/trace_name.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;

/// Traces, cells and their names must be able to mean something before anything is opened.
void check_request(const RunRequest& request) {
  if (request.traces.empty()) throw Error{Refusal::usage, "replay", "no trace", "at least one"};
  if (request.policies.empty()) throw Error{Refusal::usage, "replay", "no policy", "at least one"};
  if (request.budgets.empty()) throw Error{Refusal::usage, "replay", "no budget", "at least one"};
  std::map<std::string, std::string> sources;  // by policy with all its values
  for (const ConfiguredPolicy& policy : request.policies) {
    const std::string source = policy.source_hash();
    if (sources.emplace(policy.name() + ":" + policy.params(), source).first->second != source)
      throw Error{Refusal::usage, policy.name(), "two policies of this name, from different files", "different names"};
  }
  if (request.is_sampled()) check_sampled_metrics(request);
  if (request.precision.half_width > 0 && (request.sample.layers > 0 || request.sample.heads > 0))
    throw Error{Refusal::usage, "--precision", "samples the eval queries of all layers and heads",
                "--sample without layers= and heads="};
  check_names(request.traces);
  backends().get(request.backend);
  if (!request.output.empty()) check_results_folder(request.output);
}

/// A file of cells that an earlier run has left belongs to the same trace under the same conditions, or it is in the
/// way.
void check_earlier(const fs::path& path, const TraceRecord& found, const TraceRecord& expected) {
  if (expected.hash != found.hash)
    throw Error{Refusal::usage, path.string(),
                fmt::format("results of another trace named {}; use another folder, another file name of the trace, or "
                            "--force to overwrite",
                            expected.name),
                "trace hash " + expected.hash, found.hash};
  if (const auto other = differing_condition(expected, found))
    throw Error{Refusal::usage, path.string(),
                other->what + " of the earlier results (use another folder, or --force to overwrite)", other->expected,
                other->found};
}

/// What an earlier run has left of the trace; with `force`, nothing where it would be in the way.
std::optional<TraceCells> earlier_cells(const fs::path& path, const TraceRecord& expected, bool force) {
  if (!fs::exists(path)) return std::nullopt;
  try {
    TraceCells stored = read_trace_cells(path);
    check_earlier(path, stored.trace, expected);
    return stored;
  } catch (const Error&) {
    if (!force) throw;
    return std::nullopt;
  }
}

/// A trace names its file and its group in results.
void check_name(const Trace& trace) {
  const std::string& name = trace.name();
  const bool printable = std::ranges::none_of(name, [](unsigned char c) { return c == '/' || c < ' ' || c == 127; });
  if (name.empty() || name == "." || name == ".." || !printable)
    throw Error{Refusal::input, trace.path().string(), "name", "a valid file name",
                name.empty() ? "none"
                : printable  ? name
                             : "control characters"};
  constexpr std::size_t most = NAME_MAX - std::string_view(".h5.partial").size();
  if (name.size() > most)
    throw Error{Refusal::input, trace.path().string(), "name", fmt::format("at most {} bytes before .h5", most),
                fmt::format("{} bytes", name.size())};
}

TraceRecord facts_of(const Trace& trace, const RunRequest& request, const Conditions& conditions) {
  const TraceHeader& header = trace.header();
  TraceRecord facts;
  facts.name = trace.name();
  facts.path = trace.path();
  facts.prompt_hash = hash_of(std::as_bytes(std::span(header.ids).first(static_cast<std::size_t>(header.prefill))));
  facts.hash = trace.hash();
  facts.model = header.model;
  facts.dtype = name_of(header.dtype);
  facts.synthetic = header.synthetic;
  facts.prompt = header.prefill;
  facts.tokens = header.tokens();
  facts.layers = header.layers;
  for (int l = 0; l < header.layers; ++l) facts.reading_layers += header.has_keys(l) ? 0 : 1;
  const LayerShape largest = header.largest_shape(conditions.layers);
  facts.query_heads = largest.query_heads;
  facts.kv_heads = largest.kv_heads;
  facts.head_dim = largest.key_dim;
  const auto has_all_heads = [&](int layer) {
    const LayerShape shape = header.shape(layer);
    return shape.query_heads == largest.query_heads && shape.kv_heads == largest.kv_heads;
  };
  if (!std::ranges::all_of(conditions.layers, has_all_heads))
    for (int l = 0; l < header.layers; ++l) {
      facts.layer_query_heads.push_back(header.shape(l).query_heads);
      facts.layer_kv_heads.push_back(header.shape(l).kv_heads);
    }
  facts.eval = request.eval;
  facts.boundary = conditions.boundary;
  facts.n_queries = static_cast<int>(conditions.eval_queries.size());
  facts.backend = request.backend;
  facts.numerics = numerics;
  facts.treated = conditions.layers;
  facts.layer_index.assign(header.layer_index.begin(), header.layer_index.end());
  return facts;
}

/// What an earlier run has measured of the trace itself.
void take_measured(const TraceRecord& earlier, TraceRecord& trace) {
  trace.values = earlier.values;
  trace.observable_seconds = earlier.observable_seconds;
  trace.has_eval_attention = earlier.has_eval_attention;
  trace.has_eval_attention_by_head = earlier.has_eval_attention_by_head;
}

/// Metrics with values of a cell: those of the trace, of pairs of layers and of time are kept elsewhere.
bool is_of_cell(const MetricName& name) {
  return measure_as<OfTrace>(name) == nullptr && measure_as<OfLayerPairs>(name) == nullptr &&
         measure_as<OfSeconds>(name) == nullptr;
}

/// Throws Error{input} where a metric needs of the trace what capture stores when it is asked to.
void require_projections(const Trace& trace, std::span<const int> layers, std::span<const MetricName> wanted) {
  for (const MetricName& name : wanted) {
    const auto* of = measure_as<OfProjectedOutput>(name);
    if (of == nullptr) continue;
    check_projections(trace, layers, name.text());
    for (const int l : layers) {
      const auto require = [&](const char* object, const char* what, const char* remedy, const TensorView& tensor) {
        if (tensor.data == nullptr)
          throw Error{Refusal::input, fmt::format("{}:/layers/{:03}/{}", trace.path().string(), l, object),
                      fmt::format("no {} for {}", what, name.text()), remedy, "none"};
      };
      require("wo", "output projection", "one, as capture --with-wo stores it", output_projection(trace, l));
      if (of->reads_input)
        require("input_norm", "norms of the layer's input", "those that capture stores", input_norms(trace, l));
    }
  }
}

std::vector<MetricName> without(const std::vector<MetricName>& wanted, const ValuesByMetric& there) {
  std::vector<MetricName> missing = {};
  std::ranges::copy_if(wanted, std::back_inserter(missing),
                       [&](const MetricName& name) { return !there.contains(name); });
  return missing;
}

/// The finest granularity of all layers.
Heads finest(std::span<const LayerPlan> plans, const TraceRecord& trace) {
  const auto rows = [&](Heads heads) { return rows_of(heads, trace.query_heads, trace.kv_heads); };
  Heads found = Heads::layer;
  for (const LayerPlan& of_range : plans) {
    const Heads heads = of_range.plan.grouping.heads;
    if (rows(heads) > rows(found) || found == Heads::layer) found = heads;
  }
  return found;
}

/// Scores that a matrix [L, H, P] can hold: those of policies that score all of the prompt, in one granularity.
bool can_save_scores(std::span<const LayerPlan> plans) {
  return std::ranges::all_of(plans, [&](const LayerPlan& of_range) {
    const Plan& plan = of_range.plan;
    return plan.score && plan.schedule->decided() == Decision::after_prefill && plan.nesting == Nesting::none &&
           plan.grouping.heads == plans.front().plan.grouping.heads;
  });
}

/// B of the policy on this trace.
int tokens_of(const Budget& budget, const Trace& trace, const Conditions& conditions, const ConfiguredPolicy& policy) {
  if (budget.bytes == 0) return budget.tokens(conditions.boundary);
  const BytesOfTokens bytes_of = bytes_of_tokens(trace, conditions, policy);
  const int tokens = budget.tokens(conditions.boundary, bytes_of);
  if (tokens == 0)
    throw Error{
        Refusal::usage, "budget " + budget.literal,
        "too small for one token of " + policy.label() + " in " + trace.name(),
        fmt::format("at least {:g} KiB, one token in each head of each layer", std::ceil(bytes_of(1) / 1.024) / 1000),
        budget.literal};
  return tokens;
}

/// A policy, and what its cells say of it on any trace and at any budget.
struct Candidate {
  Candidate(const ConfiguredPolicy& configured, const char* role, std::uint64_t seed)
      : policy(configured), facts(cell_of_policy(configured, role, seed)) {}

  ConfiguredPolicy policy;
  CellRecord facts;
};

struct Candidates {
  std::vector<Candidate> asked, controls;
};

void add_cell(TraceWork& work, const Trace& trace, const RunRequest& request, const Candidate& candidate,
              const Budget& budget, const std::vector<MetricName>& wanted) {
  const ConfiguredPolicy& policy = candidate.policy;
  CellWork cell{.facts = candidate.facts, .policy = policy, .wanted = wanted};
  CellRecord& facts = cell.facts;
  const std::vector<LayerPlan> plans = policy.plans(static_cast<int>(work.conditions.layers.size()));
  cell.heads = finest(plans, work.facts);
  cell.can_save_scores = can_save_scores(plans);
  facts.heads = word(cell.heads);
  facts.own_memory = !have_budget(plans);
  facts.keeps_all_changed = std::ranges::all_of(plans, [](const LayerPlan& of_range) {
    return of_range.plan.allocate->keeps_everything && of_range.plan.store->changes_tokens();
  });
  facts.budget = budget.literal;
  facts.budget_tokens = tokens_of(budget, trace, work.conditions, policy);
  facts.id = cell_id(work.facts, facts);

  const auto same = std::ranges::find(work.cells, facts.id, [](const CellWork& other) { return other.facts.id; });
  if (same != work.cells.end()) {
    if (same->facts.budget != facts.budget && facts.role == "asked")
      work.warnings.push_back(fmt::format("{}: budgets {} and {} are both {} tokens; {} is replayed once",
                                          work.facts.name, same->facts.budget, facts.budget, facts.budget_tokens,
                                          facts.label));
    return;
  }
  if (const CellRecord* found = work.earlier(facts.id); found != nullptr && !request.force) {
    cell.found = true;
    cell.missing = without(wanted, found->values);
    cell.lacks_scores = request.save_scores && !found->has_scores && cell.can_save_scores &&
                        facts.budget_tokens < work.conditions.boundary;
  } else {
    cell.missing = wanted;
  }
  work.cells.push_back(std::move(cell));
}

/// Controls join what was asked; what was asked for comes first and gives a cell its role.
Candidates candidates(const RunRequest& request) {
  Candidates all;
  for (const ConfiguredPolicy& policy : request.policies) all.asked.emplace_back(policy, "asked", request.seed);
  if (request.controls == Controls::none) return all;
  for (const char* name : {"full", "random", "oracle"}) {
    ConfiguredPolicy control = ConfiguredPolicy::parse(name, request.seed);
    constexpr int some_layers = 2;
    if (why_not_estimated(request, control, some_layers).empty())
      all.controls.emplace_back(std::move(control), "control", request.seed);
  }
  return all;
}

/// By policy of the request, its random twin; nullopt without --controls twins, and for a policy that has no twin.
std::vector<std::optional<Candidate>> twins(const RunRequest& request, int layers) {
  std::vector<std::optional<Candidate>> all(request.policies.size());
  if (request.controls != Controls::twins) return all;
  for (std::size_t p = 0; p < all.size(); ++p)
    if (const ConfiguredPolicy& policy = request.policies[p]; policy.why_no_twin(layers).empty())
      all[p].emplace(
          ConfiguredPolicy::parse(fmt::format("{}:of=({})", random_twin_name, policy.label_with_seeds()), request.seed),
          "control", request.seed);
  return all;
}

void check_cells(TraceWork& work, const Trace& trace) {
  for (CellWork& cell : work.cells) {
    try {
      for (const Conditions* conditions : {&work.conditions, work.all_queries ? &*work.all_queries : nullptr})
        if (conditions != nullptr)
          check_policy(trace, *conditions, cell.policy, cell.facts.budget_tokens, share_of_seen(cell.facts));
      cell.facts.protected_fill_budget =
          protected_tokens_fill_budget(trace, work.conditions, cell.policy, cell.facts.budget_tokens);
      if (const std::string instead = without_question(trace, work.conditions, cell.policy);
          cell.facts.role == "asked" && !instead.empty())
        work.warn(fmt::format("{}: the prompt does not end with a question span: {} {}", work.facts.name,
                              cell.facts.label, instead));
    } catch (const Error& error) {
      if (error.refusal() == Refusal::usage) throw;
      cell.fail(error.what());
    }
  }
}

/// Results of an earlier version of an edited policy remain at budgets that are not part of this run. The warning tells
/// them from results of the present version.
void warn_of_versions(TraceWork& work) {
  if (!work.stored) return;
  for (const CellRecord& found : work.stored->cells) {
    const auto some_cell = [&](bool (*is)(const CellRecord&, const CellRecord&)) {
      return std::ranges::any_of(work.cells, [&](const CellWork& cell) { return is(cell.facts, found); });
    };
    if (some_cell(of_another_version) && !some_cell(replaces))
      work.warn(fmt::format("{}: {} at budget {} has results of an earlier version of its policy file", work.facts.name,
                            found.label, found.budget));
  }
}

/// A process may not have any number of files open.
constexpr std::size_t most_open = 256;

/// The trace in memory, or the file.
std::shared_ptr<const Trace> open(const RunRequest& request, const fs::path& path) {
  if (const auto found = request.in_memory.find(path); found != request.in_memory.end()) return found->second;
  return std::make_shared<const Trace>(Trace::open(path));
}

TraceWork prepare(const RunRequest& request, const Candidates& candidates, const fs::path& path) {
  TraceWork work;
  work.trace = open(request, path);
  const Trace& trace = *work.trace;
  work.file = trace.identity();
  check_name(trace);
  work.conditions.boundary = boundary(trace, request.boundary);
  work.conditions.eval_queries = eval_queries(trace, request.eval);
  work.conditions.layers = treated_layers(trace, request.treat_sliding);
  work.facts = facts_of(trace, request, work.conditions);
  if (request.is_sampled()) draw_sample(request, work);

  if (!request.output.empty()) {
    work.stored_file = identity_at(work.cells_path(request.output));
    work.stored = earlier_cells(work.cells_path(request.output), work.facts, request.force);
  }
  if (work.stored) take_measured(work.stored->trace, work.facts);
  const auto lacks = [&](bool there) { return request.force || !there; };
  std::vector<MetricName> wanted = metrics_of_trace(request.metrics, trace.header().spans, work.conditions.boundary);
  std::erase_if(wanted, [&](const MetricName& name) { return !why_not_estimated(request, name).empty(); });
  std::vector<MetricName> of_cells;
  for (const MetricName& name : wanted) {
    if (is_of_cell(name)) of_cells.push_back(name);
    if (measure_as<OfTrace>(name) != nullptr && lacks(work.facts.values.contains(name)))
      work.of_trace.metrics.push_back(name);
  }
  work.of_trace.eval_attention = lacks(work.facts.has_eval_attention);
  work.of_trace.eval_attention_by_head = request.save_attention && lacks(work.facts.has_eval_attention_by_head);
  if (std::ranges::any_of(of_cells, measure_as<OfAllQueries>)) {
    work.all_queries = work.conditions;
    work.all_queries->eval_queries = eval_queries(trace, "all");
  }
  require_projections(trace, work.conditions.layers, of_cells);
  const std::vector<std::optional<Candidate>> twins_asked =
      twins(request, static_cast<int>(work.conditions.layers.size()));
  for (std::size_t b = 0; b < request.budgets.size(); ++b) {
    const auto add = [&](const Candidate& candidate) {
      add_cell(work, trace, request, candidate, request.budgets[b], of_cells);
    };
    bool asked = false;
    for (std::size_t p = 0; p < request.policies.size(); ++p) {
      if (!request.asks(p, b)) continue;
      add(candidates.asked[p]);
      asked = true;
    }
    if (asked) std::ranges::for_each(candidates.controls, add);
    for (std::size_t p = 0; p < request.policies.size(); ++p)
      if (twins_asked[p] && request.asks(p, b)) add(*twins_asked[p]);
  }
  check_cells(work, trace);
  warn_of_versions(work);
  if (work.stored)
    for (CellRecord& cell : work.stored->cells) {
      cell.values.clear();
      cell.by_query.clear();
      cell.by_layer.clear();
      cell.by_head.clear();
      cell.seconds.clear();
    }
  return work;
}

void check_hashes(const std::vector<TraceWork>& works) {
  std::set<std::string> hashes;
  for (const TraceWork& work : works)
    if (!work.facts.hash.empty() && !hashes.insert(work.facts.hash).second)
      throw Error{Refusal::usage, work.facts.path.string(), "trace listed more than once", "", work.facts.hash};
}

/// A span that was named with a metric must be in some trace.
void check_spans(const RunRequest& request, const std::vector<TraceWork>& works) {
  for (const MetricName& name : request.metrics) {
    const std::size_t dot = name.variant.rfind('.');
    if (!is_of_span(name) || dot == std::string::npos || !why_not_estimated(request, name).empty()) continue;
    const auto has = [&](const TraceWork& work) {
      return std::ranges::any_of(
          work.cells, [&](const CellWork& cell) { return std::ranges::find(cell.wanted, name) != cell.wanted.end(); });
    };
    if (std::ranges::none_of(works, has))
      throw Error{Refusal::usage, name.text(), "no trace has this span before the boundary", "",
                  name.variant.substr(0, dot)};
  }
}

void add_once(std::vector<std::string>& names, const std::string& name) {
  if (std::ranges::find(names, name) == names.end()) names.push_back(name);
}

/// "snapkv, which selects no other token", or the number of policies and the first names.
std::string filled_policies(const std::vector<std::string>& filled, std::size_t asked) {
  constexpr std::size_t most_names = 3;
  if (filled.size() == 1) return filled.front() + ", which selects no other token";
  const std::size_t named = std::min(filled.size(), most_names);
  return fmt::format("{} of {} policies, which select no other token: {}{}", filled.size(), asked,
                     fmt::join(std::span(filled).first(named), ", "),
                     named == filled.size() ? "" : fmt::format(" and {} more", filled.size() - named));
}

}  // namespace

void check_names(std::span<const fs::path> traces) {
  std::set<std::string> names;
  for (const fs::path& trace : traces)
    if (!names.insert(trace_name(trace)).second)
      throw Error{Refusal::usage, trace.string(), "another trace has the same name", "unique trace names",
                  trace_name(trace)};
}

std::shared_ptr<const Trace> opened(const RunRequest& request, const TraceWork& work) {
  if (work.trace) return work.trace;
  std::shared_ptr<const Trace> trace = open(request, work.facts.path);
  if (trace->identity() != work.file && trace->hash() != work.facts.hash)
    throw Error{Refusal::input, work.facts.path.string(), "changed since the run began", work.facts.hash,
                trace->hash()};
  return trace;
}

std::vector<std::string> budgets_above_prompt(const RunRequest& request, std::span<const TraceWork> works) {
  std::vector<std::string> warnings;
  for (const Budget& budget : request.budgets) {
    const auto is_above = [&](const TraceWork& work) {
      if (budget.fraction > 0 || !work.facts.error.empty()) return false;
      const int prompt = work.conditions.boundary;
      return budget.count > prompt ||
             (budget.bytes > 0 && std::ranges::any_of(work.cells, [&](const CellWork& cell) {
                return cell.facts.budget == budget.literal && cell.facts.budget_tokens == prompt;
              }));
    };
    const auto first = std::ranges::find_if(works, is_above);
    if (first == works.end()) continue;
    const auto count = std::ranges::count_if(works, is_above);
    warnings.push_back(fmt::format("budget {} holds all prompt tokens of {}: every token is kept", budget.literal,
                                   count == 1
                                       ? fmt::format("{} ({} tokens)", first->facts.name, first->conditions.boundary)
                                       : fmt::format("{} traces", count)));
  }
  return warnings;
}

std::vector<std::string> budgets_of_protected_tokens(const RunRequest& request, std::span<const TraceWork> works) {
  constexpr const char* remedy = "fewer protected tokens (parameters window, sinks, recent, or --protect)";
  std::vector<std::string> warnings, budget_free;
  for (const Budget& budget : request.budgets) {
    std::set<std::string> asked;
    std::vector<std::string> filled;
    std::set<std::string> traces, traces_filled;
    for (const TraceWork& work : works)
      for (const CellWork& cell : work.cells) {
        const CellRecord& facts = cell.facts;
        if (facts.role != "asked" || !facts.error.empty() || facts.budget != budget.literal) continue;
        if (facts.protected_fill_budget) add_once(facts.own_memory ? budget_free : filled, facts.label);
        if (facts.own_memory) continue;
        asked.insert(facts.label);
        traces.insert(work.facts.name);
        if (facts.protected_fill_budget) traces_filled.insert(work.facts.name);
      }
    if (filled.empty()) continue;
    warnings.push_back(fmt::format(
        "budget {}{}: protected tokens fill the budget of {}; use a larger budget or {}", budget.literal,
        traces_filled.size() == traces.size() ? ""
                                              : fmt::format(" in {} of {} traces", traces_filled.size(), traces.size()),
        filled_policies(filled, asked.size()), remedy));
  }
  for (const std::string& label : budget_free)
    warnings.push_back(fmt::format("{}: keeps only protected tokens at every budget; use {}", label, remedy));
  return warnings;
}

std::vector<std::string> budgets_below_reads(std::span<const TraceWork> works) {
  struct Below {
    int read, budget;
  };
  std::map<std::string, Below> by_policy;
  for (const TraceWork& work : works)
    for (const CellWork& cell : work.cells) {
      const int budget = cell.facts.budget_tokens;
      if (cell.facts.role != "asked" || !cell.facts.error.empty()) continue;
      for (const LayerPlan& of_range : cell.policy.plans(static_cast<int>(work.conditions.layers.size()))) {
        const int read = std::min(of_range.plan.schedule->least_read(), work.conditions.boundary);
        if (read <= budget) continue;
        const auto known = by_policy.try_emplace(cell.facts.label, Below{read, budget}).first;
        known->second.budget = std::min(known->second.budget, budget);
      }
    }
  std::vector<std::string> warnings;
  for (const auto& [label, below] : by_policy)
    warnings.push_back(
        fmt::format("{}: a query reads at least {} tokens, more than the budget of {}; use a larger "
                    "budget, or smaller page or least_pages",
                    label, below.read, below.budget));
  return warnings;
}

std::vector<TraceWork> planned_work(const RunRequest& request) {
  check_request(request);
  const Candidates all = candidates(request);
  std::vector<TraceWork> works;
  std::optional<Error> first;
  bool served = false;
  for (const fs::path& path : request.traces) {
    try {
      works.push_back(prepare(request, all, path));
      if (works.size() > most_open && !works.back().trace->is_in_memory()) works.back().trace = nullptr;
    } catch (const Error& error) {
      if (error.refusal() != Refusal::input) throw;
      if (!first) first = error;
      works.emplace_back().facts = {.name = trace_name(path), .path = path, .error = error.what()};
    }
    for (const CellWork& cell : works.back().cells)
      served = served || (cell.facts.role == "asked" && cell.facts.error.empty());
  }
  if (!served) {
    // Asked for something, and nothing of it can be had: that is a refusal, not a run with failures.
    if (first) throw *first;
    for (const TraceWork& work : works)
      for (const CellWork& cell : work.cells)
        if (!cell.facts.error.empty())
          check_policy(*opened(request, work), work.conditions, cell.policy, cell.facts.budget_tokens,
                       share_of_seen(cell.facts));
  }
  check_hashes(works);
  check_spans(request, works);
  return works;
}

}  // namespace kvreplay
