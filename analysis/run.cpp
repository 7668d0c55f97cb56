#include "analysis/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <set>

#include "analysis/folder_lock.h"
#include "analysis/measurement.h"
#include "analysis/replaced_file.h"
#include "analysis/results_folder.h"
#include "analysis/run_json.h"
#include "analysis/run_plan.h"
#include "analysis/run_sample.h"
#include "analysis/sampling_error.h"
#include "analysis/trace_cells.h"
#include "parallel.h"
#include "policies/twin.h"
#include "profile.h"

namespace kvreplay {
namespace {

namespace fs = std::filesystem;

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
    const bool scores = request.save_scores || (earlier != nullptr && earlier->has_scores);
    const Wanted wanted{cell.missing,
                        cell.facts.own_memory || work.facts.samples_layers() ? 0 : cell.facts.budget_tokens,
                        scores && cell.can_save_scores, work.facts.samples_queries(), cell.heads};
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
  cell.protected_fill_budget = now.protected_fill_budget;
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
  const auto* of = measure_as<OfLayer>(name);
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
      if (std::ranges::any_of(work.cells, [&](const CellWork& cell) { return replaces(cell.facts, found); })) {
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
    draw_queries(request, work, std::max(needed, work.facts.n_queries + 2));
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
  work.warn(fmt::format("{}: precision {} not reached with {}", work.facts.name, request.precision.text(),
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
    return cell.to_compute() && std::ranges::any_of(cell.missing, measure_as<OfAllQueries>);
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
      CellRecord& cell = cells.emplace_back(cell_of_policy(request.policies[p], "asked", request.seed));
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

int RunSummary::failed() const {
  return static_cast<int>(std::ranges::count(cells, CellState::failed, &CellRecord::state));
}

struct PlannedRun::State {
  RunRequest request;
  std::vector<TraceWork> works;
  std::size_t mapped_bytes = std::numeric_limits<std::size_t>::max();
};

PlannedRun::PlannedRun(RunRequest request) : state_(std::make_unique<State>(State{std::move(request), {}})) {
  state_->works = planned_work(state_->request);
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
  std::ranges::move(budgets_of_protected_tokens(request, works), std::back_inserter(summary.warnings));
  std::ranges::move(budgets_below_reads(works), std::back_inserter(summary.warnings));
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
