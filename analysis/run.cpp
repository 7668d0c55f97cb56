#include "analysis/run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <limits>
#include <optional>
#include <set>
#include <system_error>

#include "analysis/folder_lock.h"
#include "analysis/measurement.h"
#include "analysis/replaced_file.h"
#include "analysis/results_folder.h"
#include "analysis/run_json.h"
#include "analysis/sampling_error.h"
#include "analysis/trace_cells.h"
#include "hash.h"
#include "nearest.h"
#include "parallel.h"
#include "policies/selection.h"
#include "policies/twin.h"
#include "profile.h"
#include "random.h"
#include "replay/trace_inputs.h"
#include "trace/trace_name.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;

/// What is to be done for one cell, and what an earlier run has left of it.
struct CellWork {
  CellRecord facts = {};  // id to budget; after the run: all of it, once it is done
  ConfiguredPolicy policy;
  std::vector<MetricName> wanted;
  std::vector<MetricName> missing = {};
  bool found = false;                     // in the file, and not to be made anew
  std::optional<CellResult> looked = {};  // at the sample before this one
  bool lacks_scores = false;

  /// Sets that are there are used again, unless scores are wanted, which only scoring makes.
  bool uses_known_sets() const { return found && !lacks_scores; }
  bool to_compute() const { return facts.error.empty() && (!found || lacks_scores || !missing.empty()); }
  void fail(std::string error) {
    facts.state = CellState::failed;
    facts.error = std::move(error);
  }
};

struct TraceWork {
  std::shared_ptr<const Trace> trace;  // null: it is not open any more, or cannot be opened
  FileIdentity file;                   // that was hashed
  Conditions conditions;
  std::vector<std::int32_t> eval_queries;  // all, of which `conditions` has a sample
  // Of a sampled trace: eval queries of `conditions`, replayed layers, and measured KV heads of each of these, by their
  // numbers, in pairs.
  std::vector<int> query_pairs, layer_pairs;
  std::vector<std::vector<int>> head_pairs;
  std::optional<Conditions> all_queries;  // for metrics that take every token as eval query
  TraceRecord facts;
  std::optional<FileIdentity> stored_file;  // of cells_path() when this was planned
  std::optional<TraceCells> stored;  // from an earlier run; its cells' numbers only while this trace is worked on
  WantedOfTrace of_trace;
  std::vector<CellWork> cells;
  std::vector<std::string> warnings;
  std::optional<TraceInMemory> in_memory;  // the results, of a run without a folder

  const CellRecord* earlier(const std::string& id) const { return stored ? stored->find(id) : nullptr; }
  fs::path cells_path(const fs::path& output) const { return output / "cells" / (facts.name + ".h5"); }
};

std::string numbers(const std::vector<int>& all) { return fmt::format("{}", fmt::join(all, ",")); }

double share_of_seen(const CellRecord& cell) { return Budget::parse(cell.budget).of_seen(); }

std::string cell_id(const TraceRecord& trace, const CellRecord& cell) {
  Hash hash;
  hash.update(
      fmt::format("kvreplay cell\nnumerics={}\ntrace={}\npolicy={}\nparams={}\nbudget={}\nboundary={}\neval={}\n"
                  "layers={}\nseed={}\nbackend={}\n",
                  trace.numerics, trace.hash, cell.policy, cell.params, cell.budget_tokens, trace.boundary, trace.eval,
                  numbers(trace.treated), cell.seed, trace.backend));
  if (!cell.source.empty()) hash.update(fmt::format("source={}\n", cell.source));
  if (const double of_seen = share_of_seen(cell); of_seen > 0) hash.update(fmt::format("of_seen={}\n", of_seen));
  if (trace.is_sampled()) hash.update(fmt::format("sample={}\n", trace.sample));
  return hash.digits().substr(0, 16);
}

/// The same policy with the same values, of another version of the files that it comes from.
bool of_another_version(const CellRecord& cell, const CellRecord& other) {
  return cell.policy == other.policy && cell.params == other.params && cell.source != other.source;
}

/// An edited policy's numbers take the place of those that its file gave before.
bool takes_place_of(const CellRecord& now, const CellRecord& earlier) {
  return of_another_version(now, earlier) && now.budget_tokens == earlier.budget_tokens && now.seed == earlier.seed &&
         share_of_seen(now) == share_of_seen(earlier);
}

/// Why the sample does not estimate the metrics of a policy; empty: it does.
std::string why_not_estimated(const RunRequest& request, const ConfiguredPolicy& policy, int layers) {
  std::string reason = request.samples_queries() ? why_no_sample_of_queries(policy, layers) : "";
  return reason.empty() && request.sample.layers > 0 ? why_no_sample_of_layers(policy, layers) : reason;
}

/// Throws Error{usage} where the sample estimates no metric that was asked for.
void check_sampled_metrics(const RunRequest& request) {
  const auto reason_of = [&](const MetricName& name) { return why_not_estimated(request, name); };
  if (std::ranges::none_of(request.metrics, [&](const MetricName& name) { return reason_of(name).empty(); }))
    throw Error{Refusal::usage, request.metrics.front().text(), reason_of(request.metrics.front()),
                "a replay without --sample"};
  if (request.precision.half_width > 0 &&
      std::ranges::find(request.metrics, request.precision.metric) == request.metrics.end())
    throw Error{Refusal::usage, "--precision", request.precision.metric.text() + " is not measured",
                "one of --metrics"};
}

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

/// Units of a sample.
struct Drawn {
  std::vector<int> units;  // ascending
  std::vector<int> pairs;  // their numbers among these, in pairs
};

/// Samples of different traces, and of different sizes, are independent.
Drawn drawn(const RunRequest& request, const TraceRecord& trace, std::string_view kind, int all, int count) {
  const std::uint64_t of_trace = std::stoull(trace.hash.substr(0, 16), nullptr, 16);
  const std::uint64_t of_kind = std::stoull(hash_of(std::as_bytes(std::span(kind))).substr(0, 16), nullptr, 16);
  const std::vector<int> in_pairs = draw_pairs(all, count, chain(request.seed, of_trace, of_kind, count));
  Drawn found{in_pairs, {}};
  std::ranges::sort(found.units);
  for (const int unit : in_pairs)
    found.pairs.push_back(static_cast<int>(std::ranges::lower_bound(found.units, unit) - found.units.begin()));
  return found;
}

/// Names the sizes of the sample and what else determines it.
void name_sample(const RunRequest& request, TraceWork& work) {
  TraceRecord& facts = work.facts;
  facts.sample.clear();
  facts.looks = request.precision.half_width > 0 ? most_looks : 1;
  if (facts.samples_layers()) facts.sample = fmt::format("layers={},", facts.treated.size());
  if (facts.samples_heads()) facts.sample += fmt::format("heads={},", facts.sampled_heads);
  if (!work.query_pairs.empty()) facts.sample += fmt::format("queries={},", facts.n_queries);
  if (facts.sample.empty()) return;
  facts.sample += fmt::format("seed={}", request.seed);
  if (facts.looks > 1) facts.sample += fmt::format(",looks={}", facts.looks);
}

/// Replaces the treated layers by a sample, where that is fewer.
void sample_layers(const RunRequest& request, TraceWork& work) {
  const std::vector<int>& all = work.conditions.layers;
  const auto layers = static_cast<int>(all.size());
  if (request.sample.layers == 0 || request.sample.layers >= layers) return;
  const Drawn found = drawn(request, work.facts, "layers", layers, request.sample.layers);
  work.conditions.sampled_layers = found.units;
  work.layer_pairs = found.pairs;
  work.facts.all_layers = all;
  work.facts.treated.clear();
  for (const int layer : found.units) work.facts.treated.push_back(all[static_cast<std::size_t>(layer)]);
}

/// Measures a sample of the KV heads of each layer, where that is fewer. Throws Error{usage} where layers differ in
/// heads.
void sample_heads(const RunRequest& request, TraceWork& work) {
  if (request.sample.heads == 0) return;
  if (!work.facts.has_equal_heads())
    throw Error{Refusal::usage, "--sample: heads", "layers of " + work.facts.name + " differ in heads",
                "a sample without heads=", "heads=" + std::to_string(request.sample.heads)};
  if (request.sample.heads >= work.facts.kv_heads) return;
  work.facts.sampled_heads = request.sample.heads;
  work.conditions.sampled_heads.resize(work.conditions.layers.size());
  for (const int layer : work.conditions.replayed_layers()) {
    Drawn found =
        drawn(request, work.facts, fmt::format("heads of layer {}", layer), work.facts.kv_heads, request.sample.heads);
    work.conditions.sampled_heads[static_cast<std::size_t>(layer)] = std::move(found.units);
    work.head_pairs.push_back(std::move(found.pairs));
  }
}

/// Replaces the eval queries by a sample of `count`, where that is fewer; 0: all.
void sample_queries(const RunRequest& request, TraceWork& work, int count) {
  const auto all = static_cast<int>(work.eval_queries.size());
  work.conditions.eval_queries = work.eval_queries;
  work.query_pairs.clear();
  work.facts.all_queries = work.facts.n_queries = all;
  if (count > 0 && count < all) {
    const Drawn found = drawn(request, work.facts, "queries", all, count);
    work.query_pairs = found.pairs;
    work.conditions.eval_queries.clear();
    for (const int query : found.units)
      work.conditions.eval_queries.push_back(work.eval_queries[static_cast<std::size_t>(query)]);
    work.facts.n_queries = count;
  }
  name_sample(request, work);
}

/// Eval queries of the first sample: those of an earlier run where the size follows from its results.
int first_sample(const RunRequest& request, const TraceWork& work) {
  const bool grows = request.precision.half_width > 0;
  const int asked = grows && request.sample.queries == 0 ? pilot_queries : request.sample.queries;
  const fs::path earlier = request.output.empty() ? fs::path() : work.cells_path(request.output);
  if (!grows || request.force || !fs::exists(earlier)) return asked;
  return read_cell_ids(earlier).trace.n_queries;
}

/// What an earlier run has measured of the trace itself.
void take_measured(const TraceRecord& earlier, TraceRecord& trace) {
  trace.values = earlier.values;
  trace.observable_seconds = earlier.observable_seconds;
  trace.has_eval_attention = earlier.has_eval_attention;
  trace.has_eval_attention_by_head = earlier.has_eval_attention_by_head;
}

template <class Of>
bool is(const MetricName& name) {
  return std::holds_alternative<Of>(find_variant(name)->measure);
}

/// Metrics with values of a cell: those of the trace, of pairs of layers and of time are kept elsewhere.
bool is_of_cell(const MetricName& name) {
  return !is<OfTrace>(name) && !is<OfLayerPairs>(name) && !is<OfSeconds>(name);
}

/// Throws Error{input} where a metric needs of the trace what capture stores when it is asked to.
void require_projections(const Trace& trace, std::span<const int> layers, std::span<const MetricName> wanted) {
  for (const MetricName& name : wanted) {
    const auto* of = std::get_if<OfProjectedOutput>(&find_variant(name)->measure);
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
bool saves_scores(std::span<const LayerPlan> plans) {
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
  Candidate(const ConfiguredPolicy& configured, const char* role, std::uint64_t seed) : policy(configured) {
    const Parameters parameters = policy.parameters();
    facts.role = role;
    facts.policy = policy.name();
    facts.params = policy.params();
    facts.label = policy.label();
    facts.paper = policy.card().paper;
    facts.agg = parameters.find("agg") != nullptr ? parameters.find("agg")->text() : "";
    facts.seed = seed;
    facts.source = policy.source_hash();
  }

  ConfiguredPolicy policy;
  CellRecord facts = {};
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
  facts.heads = word(finest(plans, work.facts));
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
    cell.lacks_scores = request.save_scores && !found->has_scores && saves_scores(plans) &&
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

void warn_once(TraceWork& work, const std::string& warning) {
  if (std::ranges::find(work.warnings, warning) == work.warnings.end()) work.warnings.push_back(warning);
}

/// Throws Error{usage} for a policy whose metrics the sample does not estimate.
void check_sampled_policies(const RunRequest& request, int layers) {
  for (const ConfiguredPolicy& policy : request.policies)
    if (const std::string reason = why_not_estimated(request, policy, layers); !reason.empty())
      throw Error{Refusal::usage, policy.label(), reason, "a replay without --sample"};
}

void check_cells(TraceWork& work, const Trace& trace) {
  for (CellWork& cell : work.cells) {
    try {
      for (const Conditions* conditions : {&work.conditions, work.all_queries ? &*work.all_queries : nullptr})
        if (conditions != nullptr)
          check_policy(trace, *conditions, cell.policy, cell.facts.budget_tokens, share_of_seen(cell.facts));
      if (cell.facts.role == "asked" &&
          protected_tokens_fill_budget(trace, work.conditions, cell.policy, cell.facts.budget_tokens))
        warn_once(work, fmt::format(
                            "{}: {} at budget {}: protected tokens fill the budget, the policy selects no other token",
                            work.facts.name, cell.facts.label, cell.facts.budget));
      if (const std::string instead = without_question(trace, work.conditions, cell.policy);
          cell.facts.role == "asked" && !instead.empty())
        warn_once(work, fmt::format("{}: the prompt does not end with a question span: {} {}", work.facts.name,
                                    cell.facts.label, instead));
    } catch (const Error& error) {
      if (error.refusal() == Refusal::usage) throw;
      cell.fail(error.what());
    }
  }
}

/// One line for each budget, in tokens or bytes, that holds whole prompts.
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

/// Results of an earlier version of an edited policy remain at budgets that are not part of this run. The warning tells
/// them from results of the present version.
void warn_of_versions(TraceWork& work) {
  if (!work.stored) return;
  for (const CellRecord& found : work.stored->cells) {
    const auto some_cell = [&](bool (*is)(const CellRecord&, const CellRecord&)) {
      return std::ranges::any_of(work.cells, [&](const CellWork& cell) { return is(cell.facts, found); });
    };
    if (some_cell(of_another_version) && !some_cell(takes_place_of))
      warn_once(work, fmt::format("{}: {} at budget {} has results of an earlier version of its policy file",
                                  work.facts.name, found.label, found.budget));
  }
}

/// A process may not have any number of files open.
constexpr std::size_t most_open = 256;

/// The trace in memory, or the file.
std::shared_ptr<const Trace> open(const RunRequest& request, const fs::path& path) {
  if (const auto found = request.in_memory.find(path); found != request.in_memory.end()) return found->second;
  return std::make_shared<const Trace>(Trace::open(path));
}

/// The trace that was opened when the run was planned, or a file of the same hash in its place.
std::shared_ptr<const Trace> opened(const RunRequest& request, const TraceWork& work) {
  if (work.trace) return work.trace;
  std::shared_ptr<const Trace> trace = open(request, work.facts.path);
  if (trace->identity() != work.file && trace->hash() != work.facts.hash)
    throw Error{Refusal::input, work.facts.path.string(), "changed since the run began", work.facts.hash,
                trace->hash()};
  return trace;
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
  if (request.is_sampled()) {
    check_sampled_policies(request, static_cast<int>(work.conditions.layers.size()));
    work.eval_queries = work.conditions.eval_queries;
    sample_layers(request, work);
    sample_heads(request, work);
    sample_queries(request, work, first_sample(request, work));
  }

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
    if (is<OfTrace>(name) && lacks(work.facts.values.contains(name))) work.of_trace.metrics.push_back(name);
  }
  work.of_trace.eval_attention = lacks(work.facts.has_eval_attention);
  work.of_trace.eval_attention_by_head = request.save_attention && lacks(work.facts.has_eval_attention_by_head);
  if (std::ranges::any_of(of_cells, is<OfAllQueries>)) {
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
    if (!is_of_span(name) || dot == std::string::npos) continue;
    const auto has = [&](const TraceWork& work) {
      return std::ranges::any_of(
          work.cells, [&](const CellWork& cell) { return std::ranges::find(cell.wanted, name) != cell.wanted.end(); });
    };
    if (std::ranges::none_of(works, has))
      throw Error{Refusal::usage, name.text(), "no trace has this span before the boundary", "",
                  name.variant.substr(0, dot)};
  }
}

std::vector<TraceWork> prepare(const RunRequest& request) {
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

/// Cells to compute and what is wanted of each; `of` says whose work cell i is.
struct Batch {
  std::vector<Cell> cells;
  std::vector<Wanted> wanted;
  std::vector<CellWork*> of;
};

Batch batch(TraceWork& work, const RunRequest& request) {
  Batch result;
  for (CellWork& cell : work.cells) {
    if (!cell.to_compute()) continue;
    const CellRecord* earlier = work.earlier(cell.facts.id);
    const std::vector<LayerPlan> plans = cell.policy.plans(static_cast<int>(work.conditions.layers.size()));
    const bool scores = request.save_scores || (earlier != nullptr && earlier->has_scores);
    const Wanted wanted{cell.missing,
                        cell.facts.own_memory || work.facts.samples_layers() ? 0 : cell.facts.budget_tokens,
                        scores && saves_scores(plans), work.facts.samples_queries(), finest(plans, work.facts)};
    Cell made{.policy = cell.policy,
              .budget = cell.facts.budget_tokens,
              .of_seen = share_of_seen(cell.facts),
              .measure = wanted.moments(),
              .checked_at = std::stoull(cell.facts.id, nullptr, 16)};
    if (cell.looked)
      made.known = at_treated_layers(work.conditions, cell.looked->selections);
    else if (cell.uses_known_sets())
      made.known = at_treated_layers(work.conditions,
                                     read_selections(work.cells_path(request.output), cell.facts.id, work.facts));
    result.cells.push_back(std::move(made));
    result.wanted.push_back(wanted);
    result.of.push_back(&cell);
  }
  return result;
}

double mean_kept(const std::vector<LayerSelection>& selections) {
  double kept = 0, rows = 0;
  for (const LayerSelection& layer : selections)
    for (int row = 0; row < layer.set.rows(); ++row, ++rows) kept += layer.set.count(row);
  return kept / rows;
}

/// The second pass: the same sets, measured at every token.
void measure_all_queries(Backend& backend, const Trace& trace, const TraceWork& work, const Batch& first,
                         std::vector<CellResult>& results, const std::function<void(double, int)>& heard,
                         const std::function<bool()>& interrupted) {
  Batch second;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < first.cells.size(); ++i) {
    if (!results[i].error.empty() || !AllQueriesMeasurement::wanted_by(first.wanted[i])) continue;
    Cell cell = first.cells[i];
    cell.known = at_treated_layers(work.conditions, results[i].selections);
    cell.measure = first.wanted[i].moments_of_all_queries();
    second.cells.push_back(std::move(cell));
    second.wanted.push_back(first.wanted[i]);
    places.push_back(i);
  }
  if (places.empty()) return;
  AllQueriesMeasurement measurement(trace, *work.all_queries, second.wanted, heard);
  replay(backend, trace, *work.all_queries, second.cells, measurement, interrupted);
  for (std::size_t i = 0; i < places.size(); ++i)
    results[places[i]].values.merge(measurement.take_cell(static_cast<int>(i)));
}

/// An earlier cell as it is asked for now: its budget in the last words; what was once asked for stays so.
CellRecord asked_again(const CellRecord& earlier, const CellRecord& now) {
  CellRecord cell = earlier;
  cell.budget = now.budget;
  if (now.role == "asked") cell.role = now.role;
  return cell;
}

std::vector<double> in_pairs(std::span<const double> values, std::span<const int> pairs) {
  std::vector<double> ordered;
  for (const int unit : pairs) ordered.push_back(values[static_cast<std::size_t>(unit)]);
  return ordered;
}

/// One value for each replayed layer of all `layers`, whose mean is the value over all layers, at least to first order.
std::vector<double> values_by_layer(const MetricName& name, const Values& values, std::span<const int> replayed,
                                    double layers) {
  std::vector<double> of_layers;
  for (const int layer : replayed) of_layers.push_back(values(layer, values.columns() - 1));
  const auto* of = std::get_if<OfLayer>(&find_variant(name)->measure);
  if (of == nullptr || of->over_layers == mean) return of_layers;
  if (of->over_layers != sum) return pseudo_values(of_layers, of->over_layers);
  for (double& value : of_layers) value *= layers;  // a sum is as many times the mean
  return of_layers;
}

/// What the run knows of a cell after it was measured. Values that nobody has measured again stay.
void complete(const TraceWork& work, CellWork& cell, CellResult& result) {
  const CellRecord* const earlier = work.earlier(cell.facts.id);
  if (cell.uses_known_sets()) {
    cell.facts = asked_again(*earlier, cell.facts);
  } else {
    cell.facts.kept_tokens = mean_kept(result.selections);
    cell.facts.has_scores = !result.scores.empty();
    cell.facts.seconds = result.seconds;
    if (earlier != nullptr) {
      cell.facts.values = earlier->values;
      cell.facts.by_query = earlier->by_query;
      cell.facts.by_layer = earlier->by_layer;
      cell.facts.by_head = earlier->by_head;
      cell.facts.role = asked_again(*earlier, cell.facts).role;
    }
  }
  for (auto& [name, values] : result.values) {
    if (work.facts.samples_layers() && values.rows() > 1)
      cell.facts.by_layer[name] =
          in_pairs(values_by_layer(name, values, work.facts.treated, static_cast<double>(work.facts.all_layers.size())),
                   work.layer_pairs);
    cell.facts.values[name] = std::move(values);
  }
  for (const auto& [name, values] : result.by_head) {
    std::vector<double>& of_layers = cell.facts.by_head[name];
    of_layers.clear();
    for (std::size_t l = 0; l < work.head_pairs.size(); ++l) {
      const std::size_t heads = work.head_pairs[l].size();
      std::ranges::copy(in_pairs(std::span(values).subspan(l * heads, heads), work.head_pairs[l]),
                        std::back_inserter(of_layers));
    }
  }
  for (const auto& [name, values] : result.by_query) cell.facts.by_query[name] = in_pairs(values, work.query_pairs);
  cell.facts.find_half_widths(work.facts);
  cell.facts.state = CellState::done;
  result.values.clear();
  result.by_query.clear();
  result.by_head.clear();
}

/// Into the results folder, or into work.in_memory.
void write(const RunRequest& request, const Trace& of, TraceWork& work, const TraceResult& trace_result,
           const Batch& made, const std::vector<CellResult>& results) {
  std::vector<CellToWrite> cells;
  std::set<std::string> replaced;
  for (std::size_t i = 0; i < made.of.size(); ++i) {
    CellWork& cell = *made.of[i];
    if (cell.facts.state != CellState::done) continue;
    cells.push_back({cell.facts, cell.uses_known_sets() ? nullptr : &results[i]});
    replaced.insert(cell.facts.id);
  }
  bool changed = !cells.empty() || !trace_result.tokens.empty() || work.of_trace.eval_attention ||
                 work.of_trace.eval_attention_by_head;
  if (work.stored)
    for (const CellRecord& found : work.stored->cells) {
      if (replaced.contains(found.id)) continue;
      if (std::ranges::any_of(work.cells, [&](const CellWork& cell) { return takes_place_of(cell.facts, found); })) {
        changed = true;
        continue;
      }
      cells.push_back({found});
      const auto now = std::ranges::find(work.cells, found.id, [](const CellWork& cell) { return cell.facts.id; });
      if (now == work.cells.end()) continue;
      cells.back().cell = asked_again(found, now->facts);
      changed = changed || cells.back().cell.role != found.role || cells.back().cell.budget != found.budget;
    }
  if (!changed) return;
  const Timed timed(Work::results);
  const fs::path path = work.cells_path(request.output);
  make_trace_cells(work.facts, trace_result, cells, work.stored ? std::optional(path) : std::nullopt,
                   request.no_text ? nullptr : &of.header(), [&](std::span<const std::byte> file) {
                     if (!request.output.empty()) return replace_file(path, file);
                     TraceInMemory& kept = work.in_memory.emplace();
                     kept.file.assign(file.begin(), file.end());
                     kept.all.trace = work.facts;
                     for (const CellToWrite& cell : cells) kept.all.cells.push_back(cell.cell);
                   });
}

/// Violations by law, for the line that a run ends with.
using Tally = std::map<Law, int>;

ObservableKey observable_key(const TraceWork& work, const std::string& backend) {
  return {work.facts.hash, numerics, backend, work.conditions.boundary};
}

/// The cells that a replay has computed, and what it has measured of the trace.
struct Replayed {
  Batch made = {};
  std::vector<CellResult> results = {};
  TraceResult of_trace = {};
};

/// Replays the cells to compute at the eval queries of the conditions.
Replayed replayed(const RunRequest& request, Backend& backend, const Trace& trace, TraceWork& work,
                  const std::function<void(double, int)>& heard, const std::function<bool()>& interrupted) {
  Replayed all{.made = batch(work, request)};
  Measurement measurement(trace, work.conditions, all.made.wanted, work.of_trace, heard);
  std::optional<StoredObservables> stored;
  if (request.observables != ObservableUse::ignore)
    stored.emplace(trace, observable_key(work, backend.description()), request.observables == ObservableUse::keep);
  replay(backend, trace, work.conditions, all.made.cells, measurement, interrupted, stored ? &*stored : nullptr);
  if (stored) {
    stored->finish();
    work.facts.observables = observables_path(trace);
    for (const auto& [name, layers] : stored->read())
      work.facts.read_observables[name] = static_cast<int>(layers.size());
    work.warnings.insert(work.warnings.end(), stored->warnings().begin(), stored->warnings().end());
  }
  all.results.resize(all.made.cells.size());
  all_side_by_side(backend.threads(), all.results.size(),
                   [&](std::size_t i) { all.results[i] = measurement.take_cell(static_cast<int>(i)); });
  all.of_trace = measurement.take_trace();
  for (std::size_t i = 0; i < all.results.size(); ++i) {
    if (!all.made.of[i]->looked) continue;  // scores and times are those of the decision
    all.results[i].seconds = all.made.of[i]->looked->seconds;
    all.results[i].scores = all.made.of[i]->looked->scores;
  }
  return all;
}

/// Enters the results into the cells, each once.
void enter(Replayed& all, TraceWork& work, Tally& tally) {
  for (std::size_t i = 0; i < all.results.size(); ++i) {
    CellWork& cell = *all.made.of[i];
    if (cell.facts.state == CellState::failed) continue;
    if (!all.results[i].error.empty()) {
      cell.fail(all.results[i].error);
    } else if (const std::optional<Violation>& violation = all.results[i].violation) {
      ++tally[violation->law];
      cell.fail(violation->text());
    } else {
      complete(work, cell, all.results[i]);
    }
  }
}

/// The cells that were asked for, with their values at the sampled eval queries.
std::vector<const CellRecord*> asked_cells(const TraceWork& work) {
  std::vector<const CellRecord*> cells;
  for (const CellWork& cell : work.cells) {
    if (cell.facts.role != "asked" || cell.facts.state == CellState::failed) continue;
    cells.push_back(cell.facts.state == CellState::done ? &cell.facts : work.earlier(cell.facts.id));
  }
  return cells;
}

/// Draws larger samples until one is precise enough. Kept sets are those of the first sample.
void grow_sample(const RunRequest& request, Backend& backend, const Trace& trace, TraceWork& work, Replayed& all,
                 Tally& tally, const std::function<void(double, int)>& heard,
                 const std::function<bool()>& interrupted) {
  for (int look = 1; look < most_looks && work.facts.samples_queries(); ++look) {
    enter(all, work, tally);
    const std::vector<const CellRecord*> cells = asked_cells(work);
    if (request.precision.suffices(cells, work.facts)) return;
    const int needed = request.precision.queries_needed(cells, work.facts);
    for (std::size_t i = 0; i < all.results.size(); ++i) all.made.of[i]->looked = std::move(all.results[i]);
    work.of_trace.metrics.clear();
    sample_queries(request, work, std::max(needed, work.facts.n_queries + 2));
    for (CellWork& cell : work.cells) {
      cell.facts.id = cell_id(work.facts, cell.facts);
      cell.facts.values.clear();
      cell.facts.by_query.clear();
      cell.facts.by_layer.clear();
      cell.facts.by_head.clear();
      cell.facts.half_widths.clear();
    }
    Replayed larger = replayed(request, backend, trace, work, heard, interrupted);
    larger.of_trace.values.merge(all.of_trace.values);
    larger.of_trace.tokens.merge(all.of_trace.tokens);
    larger.of_trace.observable_seconds = std::move(all.of_trace.observable_seconds);
    all = std::move(larger);
  }
}

void warn_of_precision(const RunRequest& request, TraceWork& work) {
  if (request.precision.half_width == 0 || !work.facts.samples_queries()) return;
  if (request.precision.suffices(asked_cells(work), work.facts)) return;
  warn_once(work, fmt::format("{}: precision {} not reached with {}", work.facts.name, request.precision.text(),
                              work.facts.sample_text()));
}

void compute(const RunRequest& request, Backend& backend, TraceWork& work, Tally& tally, std::size_t mapped_bytes,
             const std::function<void(double, int)>& heard, const std::function<bool()>& interrupted) {
  const std::shared_ptr<const Trace> of_work = opened(request, work);
  const Trace& trace = *of_work;
  if (!trace.is_in_memory()) trace.limit_mapped(mapped_bytes);
  const bool of_trace =
      !work.of_trace.metrics.empty() || work.of_trace.eval_attention || work.of_trace.eval_attention_by_head;
  if (!of_trace && std::ranges::none_of(work.cells, &CellWork::to_compute)) {
    warn_of_precision(request, work);
    return write(request, trace, work, {}, {}, {});
  }
  const bool second_pass = std::ranges::any_of(work.cells, [](const CellWork& cell) {
    return cell.to_compute() && std::ranges::any_of(cell.missing, is<OfAllQueries>);
  });
  const double first_share = second_pass ? 0.5 : 1.0;
  const auto in_first = [&](double share, int layers) { heard(share * first_share, layers); };
  const auto in_second = [&](double share, int layers) { heard(first_share + share * (1 - first_share), layers); };

  Replayed all = replayed(request, backend, trace, work, in_first, interrupted);
  if (request.precision.half_width > 0 && !work.stored)
    grow_sample(request, backend, trace, work, all, tally, in_first, interrupted);
  measure_all_queries(backend, trace, work, all.made, all.results, in_second, interrupted);
  for (const auto& [name, values] : all.of_trace.values) work.facts.values[name] = values;
  if (request.force || work.facts.observable_seconds.empty())
    work.facts.observable_seconds = all.of_trace.observable_seconds;
  enter(all, work, tally);
  warn_of_precision(request, work);
  write(request, trace, work, all.of_trace, all.made, all.results);
}

/// The cell whose random twin this one is, by its id; empty: that of none.
std::string twin_of(const TraceWork& work, const CellWork& twin) {
  if (twin.policy.name() != random_twin_name) return "";
  const std::string policy = twin.policy.parameters().find("of")->text();
  for (const CellWork& cell : work.cells)
    if (cell.facts.budget_tokens == twin.facts.budget_tokens &&
        share_of_seen(cell.facts) == share_of_seen(twin.facts) && cell.policy.label_with_seeds() == policy)
      return cell.facts.id;
  return "";
}

/// The cell as tables and run.json show it: values over all layers and heads, seconds of all layers together.
CellRecord summary_of(const TraceWork& work, const CellWork& cell) {
  const CellRecord* found = work.earlier(cell.facts.id);
  CellRecord summary =
      cell.facts.state == CellState::skipped && found != nullptr ? asked_again(*found, cell.facts) : cell.facts;
  summary.trace = work.facts.name;
  summary.role = cell.facts.role;
  summary.twin_of = twin_of(work, cell);
  summary.family = word_of(cell.policy.card().family);
  if (summary.state == CellState::failed) {
    summary.values.clear();
    summary.half_widths.clear();
  }
  summary.by_query.clear();
  summary.by_layer.clear();
  summary.by_head.clear();
  for (auto& [name, values] : summary.values) values = Values(1, 1, values.values().back());
  summary.seconds = {{0, summary.select_seconds()}};
  return summary;
}

/// A trace that could not be opened has no cells of its own: what was asked of it has failed.
std::vector<CellRecord> failed_cells(const RunRequest& request, const TraceRecord& trace) {
  std::vector<CellRecord> cells;
  for (std::size_t b = 0; b < request.budgets.size(); ++b)
    for (std::size_t p = 0; p < request.policies.size(); ++p) {
      if (!request.asks(p, b)) continue;
      CellRecord& cell = cells.emplace_back(Candidate(request.policies[p], "asked", request.seed).facts);
      cell.budget = request.budgets[b].literal;
      cell.trace = trace.name;
      cell.state = CellState::failed;
      cell.error = trace.error;
    }
  return cells;
}

std::string verdict(const Tally& tally, Law law, const std::string& good, const std::string& what) {
  const auto found = tally.find(law);
  return found == tally.end() ? good : fmt::format("{} VIOLATED in {} cells", what, found->second);
}

/// The layers whose observables are read from the file beside the trace cost nothing.
void leave_out_stored(Demand& demand, const Trace& trace, const TraceWork& work, const ObservableKey& key) {
  const StoredObservables stored(trace, key, false);
  const auto lacking = [&](std::string_view observable) {
    const auto held = std::ranges::count_if(work.conditions.layers, [&](int l) { return stored.holds(observable, l); });
    return 1.0 - static_cast<double>(held) / static_cast<double>(work.conditions.layers.size());
  };
  demand.cumulative_share = lacking("cumulative_attention");
  demand.similarity_passes = 0;
  for (const MetricName& name : work.of_trace.metrics)
    demand.similarity_passes += lacking(name.metric == "redundancy_key" ? "key_similarity" : "value_similarity");
}

PlannedTrace planned(const RunRequest& request, TraceWork& work, const std::string& backend) {
  PlannedTrace plan{.name = work.facts.name, .path = work.facts.path, .hash = work.facts.hash};
  if (!work.facts.error.empty()) return plan;
  const std::shared_ptr<const Trace> trace = opened(request, work);
  Batch made = batch(work, request);
  plan.trace = work.trace;
  plan.conditions = work.conditions;
  plan.demand = {.similarity_passes = static_cast<double>(work.of_trace.metrics.size()),
                 .every_query = std::ranges::any_of(made.wanted, AllQueriesMeasurement::wanted_by),
                 .save_scores = request.save_scores,
                 .save_attention = work.of_trace.eval_attention_by_head,
                 .earlier_bytes = work.stored_file ? work.stored_file->length : 0};
  if (request.observables != ObservableUse::ignore)
    leave_out_stored(plan.demand, *trace, work, observable_key(work, backend));
  plan.skipped = static_cast<int>(
      std::ranges::count_if(work.cells, [](const CellWork& cell) { return cell.found && !cell.to_compute(); }));
  plan.cells = std::move(made.cells);
  return plan;
}

/// Checks the format of files that this run keeps in its results, and that the others are unchanged since planning.
void check_files(const fs::path& output, const std::vector<TraceWork>& works) {
  for (const TraceWork& work : works)
    if (work.facts.error.empty() && work.stored_file != identity_at(work.cells_path(output)))
      throw Error{Refusal::usage, work.cells_path(output).string(),
                  "written by another run in the meantime; run the same command again"};
  for (const fs::path& file : cell_files_of(output))
    if (std::ranges::none_of(
            works, [&](const TraceWork& work) { return work.facts.error.empty() && work.cells_path(output) == file; }))
      check_cells_format(file);
}

}  // namespace

std::string why_not_estimated(const RunRequest& request, const MetricName& name) {
  const Measure& measure = find_variant(name)->measure;
  std::string reason = request.samples_queries() ? why_no_sample_of_queries(measure) : "";
  if (reason.empty() && request.sample.heads > 0) reason = why_no_sample_of_heads(measure);
  return reason.empty() && request.sample.layers > 0 ? why_no_sample_of_layers(measure) : reason;
}

void check_names(std::span<const fs::path> traces) {
  std::set<std::string> names;
  for (const fs::path& trace : traces)
    if (!names.insert(trace_name(trace)).second)
      throw Error{Refusal::usage, trace.string(), "another trace has the same name", "unique trace names",
                  trace_name(trace)};
}

int RunSummary::failed() const {
  return static_cast<int>(std::ranges::count(cells, CellState::failed, &CellRecord::state));
}

struct PlannedRun::State {
  RunRequest request;
  std::vector<TraceWork> works;
  std::size_t mapped_bytes = std::numeric_limits<std::size_t>::max();
};

PlannedRun::PlannedRun(RunRequest request) : state_(std::make_unique<State>(State{std::move(request), {}})) {
  state_->works = prepare(state_->request);
}
PlannedRun::PlannedRun(PlannedRun&&) noexcept = default;
PlannedRun::~PlannedRun() = default;

void PlannedRun::limit(int threads, std::size_t mapped_bytes) {
  state_->request.threads = threads;
  state_->mapped_bytes = mapped_bytes;
}

std::vector<PlannedTrace> PlannedRun::traces() {
  const RunRequest& request = state_->request;
  const std::string backend = make_backend(request.backend, request.threads, request.device)->description();
  std::vector<PlannedTrace> plans;
  std::optional<Error> first;
  bool some = false;
  for (TraceWork& work : state_->works) {
    try {
      plans.push_back(planned(request, work, backend));
      some = some || work.facts.error.empty();
    } catch (const Error& error) {
      if (error.refusal() != Refusal::input) throw;
      if (!first) first = error;
      work.facts.error = error.what();
      work.trace = nullptr;
      plans.push_back({.name = work.facts.name, .path = work.facts.path, .hash = work.facts.hash});
    }
  }
  if (!some && first) throw *first;
  return plans;
}

RunSummary run(const RunRequest& request, const std::function<void(const Progress&)>& progress,
               const std::function<bool()>& interrupted) {
  return PlannedRun(request).run(progress, interrupted);
}

RunSummary PlannedRun::run(const std::function<void(const Progress&)>& progress,
                           const std::function<bool()>& interrupted) {
  const auto start = std::chrono::system_clock::now();
  const RunRequest& request = state_->request;
  std::vector<TraceWork>& works = state_->works;
  const std::unique_ptr<Backend> backend = make_backend(request.backend, request.threads, request.device);
  std::optional<FolderLock> lock;
  if (!request.output.empty()) {
    make_results_folder(request.output);
    lock.emplace(request.output);
    check_files(request.output, works);
  }
  RunSummary summary{.output = request.output, .detail = request.detail};
  summary.warnings = budgets_above_prompt(request, works);
  Tally tally;
  std::optional<Error> refused;  // the first trace whose numbers are refused
  for (std::size_t i = 0; i < works.size(); ++i) {
    TraceWork work = std::move(works[i]);
    const auto heard = [&](double share, int layers) {
      if (progress)
        progress({static_cast<int>(i), static_cast<int>(works.size()), work.facts.name, layers,
                  static_cast<int>(work.facts.treated.size()),
                  (static_cast<double>(i) + share) / static_cast<double>(works.size())});
    };
    if (work.facts.error.empty()) {
      try {
        if (work.stored) work.stored = read_trace_cells(work.cells_path(request.output));
        compute(request, *backend, work, tally, state_->mapped_bytes, heard, interrupted);
      } catch (const Unwritable&) {
        throw;  // no fault of this trace: the results of the next could not be kept either
      } catch (const Error& error) {
        const Refusal refusal = error.refusal();
        if (refusal == Refusal::interrupted && !request.output.empty())
          throw Error{refusal, error.where(), "interrupted; finished traces are kept"};
        if (refusal != Refusal::input && refusal != Refusal::internal && refusal != Refusal::capability) throw;
        if (refusal == Refusal::input && !refused) refused = error;
        for (CellWork& cell : work.cells)
          if (cell.to_compute()) cell.fail(error.what());
      }
      summary.warnings.insert(summary.warnings.end(), work.warnings.begin(), work.warnings.end());
      for (const CellWork& cell : work.cells) summary.cells.push_back(summary_of(work, cell));
    } else {
      const std::vector<CellRecord> failed = failed_cells(request, work.facts);
      summary.cells.insert(summary.cells.end(), failed.begin(), failed.end());
    }
    if (work.in_memory) summary.in_memory.emplace(work.facts.name, std::move(*work.in_memory));
    summary.traces.push_back(std::move(work.facts));
    summary.traces.back().values.clear();
  }
  const auto failed = [](const CellRecord& cell) { return !cell.error.empty(); };
  if (refused && std::ranges::all_of(summary.cells, failed)) throw *refused;
  const bool has_full = std::ranges::any_of(summary.cells, [](const auto& cell) { return cell.policy == "full"; });
  summary.self_check = {verdict(tally, Law::full, has_full ? "full error 0" : full_not_replayed, "full"),
                        verdict(tally, Law::budget, "budget ok", "budget"),
                        verdict(tally, Law::identity, "identities ok", "identities"),
                        verdict(tally, Law::oracle, "oracle bound ok", "oracle bound")};
  summary.about = run_json(request, summary, backend->description(), start, std::chrono::system_clock::now());
  if (!request.output.empty()) {
    const Timed timed(Work::results);
    assemble(request.output, request.detail);
    replace_file(request.output / "run.json", summary.about);
  }
  return summary;
}

}  // namespace kvreplay
