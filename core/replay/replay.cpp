#include "replay/replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <optional>

#include "positions.h"

namespace kvreplay {
namespace {

/// Eval queries measured at once. Fixed, because the shape of a product can decide its last bits.
constexpr int query_block = 64;

constexpr int no_cell = -1;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// A cell of the caller, or a policy that runs unseen because a cell takes its counts.
struct Job {
  const Cell* cell;
  int number;        // of the cell, or no_cell
  std::string name;  // for messages
  Plan plan;
  int budget;
  int counted = -1;  // the job whose counts this one takes
  bool across_layers = false;
  std::vector<LayerSelection> selections = {};  // [L]
  std::vector<CellSeconds> seconds = {};        // [L]
  std::vector<Matrix> scores = {};              // [L] of jobs that need all layers

  bool known() const { return cell != nullptr && !cell->known.empty(); }
  bool keeps_everything(int prompt) const {
    return std::holds_alternative<Everything>(plan.allocate) || budget >= prompt;
  }
};

bool shares_later_layer(const Sharing& share, int layers) {
  for (int l = 0; l < layers; ++l)
    if (share(l, layers) > l) return true;
  return false;
}

bool is_source(const Sharing& share, int layer, int layers) {
  for (int l = 0; l < layers; ++l)
    if (share(l, layers) == layer) return true;
  return false;
}

void keep_row(KeptSet& set, int row, std::span<const std::int32_t> kept, int allowed, const std::string& policy) {
  std::int32_t previous = -1;
  for (const std::int32_t position : kept) {
    if (position <= previous || position >= set.tokens())
      throw Error{Refusal::internal, policy, "selection not ascending below the boundary",
                  fmt::format("{}..{}", previous + 1, set.tokens() - 1), std::to_string(position)};
    set.keep(row, position);
    previous = position;
  }
  if (static_cast<int>(kept.size()) > allowed)
    throw Error{Refusal::internal, policy, "selection over its budget", fmt::format("at most {}", allowed),
                std::to_string(kept.size())};
}

LayerSelection empty_selection(const LayerView& view, Heads heads) {
  const int rows = view.rows(heads);
  const auto size = static_cast<std::size_t>(rows);
  return {KeptSet(heads, rows, view.prompt()), std::vector<int>(size), std::vector<int>(size), std::vector<int>(size),
          view.layer()};
}

/// A row that keeps all. Its scores do not matter; what stays by rule is what the selector says of a budget of P.
Kept whole_row(const Selector& select, int prompt) {
  const std::vector<double> no_scores(static_cast<std::size_t>(prompt));
  const Kept by_rule = select({no_scores, prompt, prompt});
  return {position_range(0, prompt), by_rule.sinks, by_rule.recent};
}

void keep_row(LayerSelection& selection, int row, const Kept& kept, int allowed, const std::string& policy) {
  keep_row(selection.set, row, kept.positions, allowed, policy);
  selection.sinks[static_cast<std::size_t>(row)] = kept.sinks;
  selection.recent[static_cast<std::size_t>(row)] = kept.recent;
}

/// Every row keeps all: what a budget of P or more means.
LayerSelection whole_prompt(const LayerView& view, const Plan& plan) {
  LayerSelection selection = empty_selection(view, plan.heads);
  const Kept all = whole_row(plan.select, view.prompt());
  for (int row = 0; row < selection.set.rows(); ++row) keep_row(selection, row, all, view.prompt(), "full");
  std::ranges::fill(selection.granted, view.prompt());
  return selection;
}

class Replay {
 public:
  Replay(Backend& backend, const Trace& trace, const Conditions& conditions, std::span<const Cell> cells, Sink& sink,
         const std::function<bool()>& interrupted)
      : backend_(backend), trace_(trace), conditions_(conditions), sink_(sink), interrupted_(interrupted) {
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const Cell& cell = cells[i];
      Job job{&cell, static_cast<int>(i), cell.policy.label(), cell.policy.plan(), cell.budget};
      if (const auto* counts = std::get_if<CountsOf>(&job.plan.allocate); counts != nullptr && !job.known()) {
        const ConfiguredPolicy counted = ConfiguredPolicy::parse(counts->policy);
        job.counted = add({nullptr, no_cell, counted.label(), counted.plan(), cell.budget});
      }
      add(std::move(job));
    }
  }

  void run() {
    const bool second_walk = std::ranges::any_of(jobs_, &Job::across_layers);
    walk(0, second_walk ? 2 : 1);
    if (!second_walk) return;
    for (Job& job : jobs_)
      if (job.across_layers) allocate_across_layers(job);
    walk(1, 2);
  }

 private:
  int layers() const { return static_cast<int>(conditions_.layers.size()); }

  int add(Job job) {
    const bool counted_across = job.counted >= 0 && jobs_[static_cast<std::size_t>(job.counted)].across_layers;
    job.across_layers = !job.known() && !job.keeps_everything(conditions_.boundary) &&
                        (std::holds_alternative<AcrossLayers>(job.plan.allocate) ||
                         shares_later_layer(job.plan.share, layers()) || counted_across);
    const auto size = static_cast<std::size_t>(layers());
    job.selections.resize(size);
    job.seconds.resize(size);
    if (job.across_layers) job.scores.resize(size);
    jobs_.push_back(std::move(job));
    return static_cast<int>(jobs_.size()) - 1;
  }

  void poll() const {
    if (interrupted_ && interrupted_())
      throw Error{Refusal::interrupted, trace_.path().string(), "interrupted; finished traces are kept"};
  }

  void walk(int number, int walks) {
    for (int l = 0; l < layers(); ++l) {
      poll();
      const int stored = conditions_.layers[static_cast<std::size_t>(l)];
      const LayerTensors tensors = trace_.layer(stored);
      if (l + 1 < layers()) trace_.prefetch(conditions_.layers[static_cast<std::size_t>(l) + 1]);
      const LayerView view(backend_, tensors, {l, layers(), stored, conditions_.boundary}, conditions_.eval_queries);
      if (number == 0) {
        sink_.layer(view, backend_);
        for (Job& job : jobs_) job.across_layers ? score_for_later(job, view) : select(job, view);
      }
      report(view, number == 1);
      measure(view, number == 1);
      sink_.layer_done(view, number, walks);
      forget(l, number == 1);
      trace_.release(stored);
    }
  }

  /// Scores of one layer; only a layer whose set is used is scored. Shared observables are timed apart.
  Matrix scored(Job& job, const LayerView& view) {
    poll();
    const double shared_before = view.observable_seconds();
    const auto start = std::chrono::steady_clock::now();
    Matrix scores = job.plan.score ? job.plan.score(view) : Matrix();
    for (const double score : scores.values())
      if (score != score)
        throw Error{Refusal::input, fmt::format("{}:/layers/{:03}", trace_.path().string(), view.stored_layer()),
                    "score of " + job.name + " is not a number"};
    job.seconds[static_cast<std::size_t>(view.layer())].score =
        seconds_since(start) - (view.observable_seconds() - shared_before);
    if (job.number != no_cell) sink_.scored(view, job.number, scores);
    return scores;
  }

  void score_for_later(Job& job, const LayerView& view) {
    const auto l = static_cast<std::size_t>(view.layer());
    job.selections[l] = empty_selection(view, job.plan.heads);
    if (is_source(job.plan.share, view.layer(), layers())) job.scores[l] = scored(job, view);
  }

  void select(Job& job, const LayerView& view) {
    const auto l = static_cast<std::size_t>(view.layer());
    if (job.known()) {
      job.selections[l] = job.cell->known[l];
      return;
    }
    if (job.keeps_everything(conditions_.boundary)) {
      job.selections[l] = whole_prompt(view, job.plan);
      return;
    }
    const int source = job.plan.share(view.layer(), layers());
    Matrix scores;
    if (source == view.layer()) {
      job.selections[l] = empty_selection(view, job.plan.heads);
      scores = scored(job, view);
    }
    const auto start = std::chrono::steady_clock::now();
    if (source == view.layer()) {
      choose(job, view.layer(), scores, counts_within_layer(job, view.layer(), scores));
    } else {
      job.selections[l] = job.selections[static_cast<std::size_t>(source)];
    }
    job.seconds[l].select = seconds_since(start);
  }

  std::vector<int> counts_within_layer(const Job& job, int layer, const Matrix& scores) const {
    const auto l = static_cast<std::size_t>(layer);
    if (job.counted >= 0) return counts_of(jobs_[static_cast<std::size_t>(job.counted)].selections[l]);
    if (const auto* within = std::get_if<WithinLayer>(&job.plan.allocate)) return (*within)(scores, job.budget);
    return std::vector<int>(job.selections[l].granted.size(), job.budget);
  }

  static std::vector<int> counts_of(const LayerSelection& selection) {
    std::vector<int> counts;
    for (int row = 0; row < selection.set.rows(); ++row) counts.push_back(selection.set.count(row));
    return counts;
  }

  /// Fills the layer's selection with `counts` tokens a row.
  void choose(Job& job, int layer, const Matrix& scores, const std::vector<int>& counts) const {
    LayerSelection& selection = job.selections[static_cast<std::size_t>(layer)];
    const int prompt = conditions_.boundary;
    for (int row = 0; row < selection.set.rows(); ++row) {
      const auto r = static_cast<std::size_t>(row);
      const int count = std::min(counts[r], prompt);
      selection.granted[r] = count;
      if (count == 0) continue;
      const Row question{scores.empty() ? std::span<const double>() : scores.row(row), prompt, count};
      keep_row(selection, row, count == prompt ? whole_row(job.plan.select, prompt) : job.plan.select(question), count,
               job.name);
    }
    // A policy whose layers share one budget is held against it as a whole, where its counts are made.
    const long slots = std::accumulate(selection.granted.begin(), selection.granted.end(), 0L);
    const long allowed = static_cast<long>(selection.set.rows()) * std::min(job.budget, prompt);
    if (!job.across_layers && job.counted < 0 && slots > allowed) overspent(job, allowed, slots);
  }

  [[noreturn]] static void overspent(const Job& job, long allowed, long slots) {
    throw Error{Refusal::internal, job.name, "overspends its budget", fmt::format("at most {} slots", allowed),
                std::to_string(slots)};
  }

  void allocate_across_layers(Job& job) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::vector<int>> counts;
    if (const auto* across = std::get_if<AcrossLayers>(&job.plan.allocate)) counts = (*across)(job.scores, job.budget);
    long slots = 0, allowed = 0;
    for (int l = 0; l < layers(); ++l) {
      const auto i = static_cast<std::size_t>(l);
      if (job.plan.share(l, layers()) != l) continue;
      choose(job, l, job.scores[i], counts.empty() ? counts_within_layer(job, l, job.scores[i]) : counts[i]);
      allowed += static_cast<long>(job.selections[i].set.rows()) * job.budget;
      slots += std::accumulate(job.selections[i].granted.begin(), job.selections[i].granted.end(), 0L);
    }
    if (job.counted < 0 && slots > allowed) overspent(job, allowed, slots);
    for (int l = 0; l < layers(); ++l) {
      const int source = job.plan.share(l, layers());
      if (source != l) job.selections[static_cast<std::size_t>(l)] = job.selections[static_cast<std::size_t>(source)];
    }
    job.scores.clear();
    job.seconds.front().select = seconds_since(start);
  }

  void report(const LayerView& view, bool across_layers) {
    const auto l = static_cast<std::size_t>(view.layer());
    for (const Job& job : jobs_)
      if (job.number != no_cell && job.across_layers == across_layers)
        sink_.selected(view, job.number, job.selections[l], job.seconds[l]);
  }

  void measure(const LayerView& view, bool across_layers) {
    std::vector<int> cells;
    std::vector<const KeptSet*> sets;
    for (const Job& job : jobs_) {
      if (job.number == no_cell || !job.cell->measure || job.across_layers != across_layers) continue;
      cells.push_back(job.number);
      sets.push_back(&job.selections[static_cast<std::size_t>(view.layer())].set);
    }
    if (cells.empty()) return;
    const std::span<const std::int32_t> queries = conditions_.eval_queries;
    for (std::size_t first = 0; first < queries.size(); first += query_block) {
      poll();
      const std::size_t count = std::min<std::size_t>(query_block, queries.size() - first);
      const std::span<const std::int32_t> block = queries.subspan(first, count);
      const KeptMoments moments = backend_.kept_moments(view.tensors(), block, conditions_.boundary, sets);
      sink_.measured(view, cells, static_cast<int>(first), static_cast<int>(count), moments);
      compare(view, cells, sets, first, count);
    }
  }

  /// One query of each cell in one of its layers takes the general path too, where it lies in the block just measured.
  void compare(const LayerView& view, const std::vector<int>& cells, const std::vector<const KeptSet*>& sets,
               std::size_t first, std::size_t count) {
    const std::span<const std::int32_t> queries = conditions_.eval_queries;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      if (cells[i] % view.layers() != view.layer()) continue;
      const std::size_t query = (static_cast<std::size_t>(cells[i]) * 7) % queries.size();
      if (query < first || query >= first + count) continue;
      const std::vector<Comparison> compared =
          backend_.compare_attention(view.tensors(), view.tensors(), Positions::original, queries.subspan(query, 1),
                                     conditions_.boundary, *sets[i]);
      sink_.compared(view, cells[i], static_cast<int>(query), compared);
    }
  }

  /// Sets that no later layer reuses are let go.
  void forget(int layer, bool across_layers) {
    for (Job& job : jobs_) {
      if (job.across_layers != across_layers) continue;
      bool reused = false;
      for (int later = layer + 1; later < layers(); ++later) reused |= job.plan.share(later, layers()) == layer;
      const bool counted = std::ranges::any_of(jobs_, [&](const Job& other) {
        return other.across_layers && other.counted >= 0 && &jobs_[static_cast<std::size_t>(other.counted)] == &job;
      });
      if (!reused && !counted) job.selections[static_cast<std::size_t>(layer)] = {};
    }
  }

  Backend& backend_;
  const Trace& trace_;
  const Conditions& conditions_;
  Sink& sink_;
  const std::function<bool()>& interrupted_;
  std::vector<Job> jobs_;
};

}  // namespace

void replay(Backend& backend, const Trace& trace, const Conditions& conditions, std::span<const Cell> cells, Sink& sink,
            const std::function<bool()>& interrupted) {
  Replay(backend, trace, conditions, cells, sink, interrupted).run();
}

}  // namespace kvreplay
