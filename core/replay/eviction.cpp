#include "replay/eviction.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <utility>

#include "policies/selection.h"
#include "positions.h"
#include "profile.h"

namespace kvreplay {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Seconds that `work` takes, those on shared observables apart.
template <class Work>
double seconds_of(const LayerView& view, Work work) {
  const double shared_before = view.observable_seconds();
  const auto start = std::chrono::steady_clock::now();
  work();
  return seconds_since(start) - (view.observable_seconds() - shared_before);
}

/// Every row keeps all: what a budget of P or more means.
LayerSelection whole_prompt(const LayerView& view, const Plan& plan) {
  const int prompt = view.prompt();
  LayerSelection selection = empty_selection(view, plan.grouping.heads);
  const auto [sinks, recent] = plan.protect.within(prompt, prompt, view.question());
  Kept all{position_range(0, prompt), sinks, recent};
  if (const int spared = plan.schedule->spared(prompt, view.question()); spared > 0) all.recent = spared;
  if (plan.select.of_prompt) all = plan.select({{}, prompt, prompt, sinks, recent, &view});
  for (int row = 0; row < selection.set.rows(); ++row) enter_row(selection, row, all, prompt);
  return selection;
}

/// The selection of a stored layer with each row changed.
LayerSelection with_changed_rows(const LayerSelection& taken, const Allocator& allocate, int stored_layer) {
  const int prompt = taken.set.tokens();
  LayerSelection selection = taken;
  selection.set = KeptSet(taken.set.heads(), taken.set.rows(), prompt);
  for (int row = 0; row < taken.set.rows(); ++row) {
    const auto r = static_cast<std::size_t>(row);
    Kept kept{taken.set.positions(row), taken.sinks[r], taken.recent[r]};
    kept.positions = allocate.changed(kept, prompt, stored_layer, row);
    enter_row(selection, row, kept, taken.granted[r]);
  }
  return selection;
}

}  // namespace

void Eviction::decide(const LayerView& view) {
  const auto l = static_cast<std::size_t>(view.layer());
  std::vector<Job*> to_choose;
  for (Job& job : jobs_.all())
    if (job.same < 0)
      jobs_.guarded(job, [&] {
        if (score(job, view)) to_choose.push_back(&job);
      });
  evict_online(view);
  // Observables are made by one thread: what does not read the layer does not see it.
  const auto reads_layer = [&](const Job& job) { return job.range(view.layer()).plan.select.reads_layer; };
  jobs_.for_all(
      to_choose, [&](const Job& job) { return job.takes_counts() || reads_layer(job); },
      [&](Job& job) { choose(job, job.range(view.layer()), view.layer(), reads_layer(job) ? &view : nullptr); });
  for (Job& job : jobs_.all())
    if (job.same >= 0)
      jobs_.guarded(job, [&] {
        const Job& source = jobs_.same(job);
        job.selections[l] = source.selections[l];
        job.seconds[l] = source.seconds[l];
      });
  scores_.clear();
}

void Eviction::decide_after_walk() {
  std::vector<Job*> left;
  for (Job& job : jobs_.all())
    if (job.two_walks) jobs_.guarded(job, [&] { left.push_back(&job); });
  jobs_.for_all(left, &Job::takes_counts, [&](Job& job) { select_after_walk(job); });
}

/// Whether a layer's counts are known only when all layers have been seen.
bool Eviction::counts_come_later(const Job& job, const PlannedRange& range) const {
  return range.plan.allocate->from == CountsFrom::all_layers || (job.takes_counts() && jobs_.counted(job).two_walks);
}

/// Selects, or scores alone: true where the rows are to be chosen now.
bool Eviction::score(Job& job, const LayerView& view) {
  of_.poll();
  const Timed timed(Work::score, job.policy());
  const auto l = static_cast<std::size_t>(view.layer());
  const PlannedRange& range = job.range(view.layer());
  if (job.is_known()) {
    job.selections[l] = job.cell->known[l];
    return false;
  }
  if (keeps_everything(range.plan, job.budget, of_.prompt())) {
    job.selections[l] = whole_prompt(view, range.plan);
    return false;
  }
  if (!range.is_source(view.layer())) {
    if (range.plan.share.pools()) job.scores[l] = scores_of_prompt(job, range, view);
    if (const int source = range.source_of(view.layer()); source < view.layer())
      job.selections[l] = job.selections[static_cast<std::size_t>(source)];
    return false;
  }
  if (const Schedule& schedule = *range.plan.schedule; schedule.decided() == Decision::during_prefill) {
    std::unique_ptr<OnlineCall> call;
    job.seconds[l].select = seconds_of(view, [&] {
      call = schedule.call(scheduled(job, view));
      if (call == nullptr) job.selections[l] = schedule.run(scheduled(job, view));
    });
    if (call != nullptr) online_.push_back({&job, std::move(call)});
  } else if (range.plan.nesting != Nesting::none) {
    select_nested(job, range, view);
  } else {
    job.selections[l] = empty_selection(view, range.plan.grouping.heads);
    job.scores[l] = scores_of_prompt(job, range, view);
    if (range.plan.share.pools()) pool_scores(job, range);
    return !counts_come_later(job, range);
  }
  return false;
}

ScheduledLayer Eviction::scheduled(const Job& job, const LayerView& view) const {
  return {view, job.range(view.layer()).plan, {job.budget, job.of_seen}, job.name, poll_};
}

/// The backend evicts for all jobs side by side, and each is charged the same share of the time. If a number of one
/// cannot be used, each finds out alone whether it is its own.
void Eviction::evict_online(const LayerView& view) {
  const auto l = static_cast<std::size_t>(view.layer());
  const std::vector<OnlineJob> online = std::exchange(online_, {});
  if (online.empty()) return;
  std::vector<OnlineEviction> all;
  for (const OnlineJob& one : online) all.push_back(one.call->what);
  std::vector<std::vector<std::int32_t>> gone;
  const double seconds = seconds_of(view, [&] {
    const Timed timed(Work::score, online.front().job->policy());
    try {
      gone = view.backend().online_evictions(view.tensors(), all);
    } catch (const Error& error) {
      if (error.refusal() != Refusal::input) throw;
    }
  });
  gone.resize(online.size());
  for (std::size_t i = 0; i < online.size(); ++i) {
    Job& job = *online[i].job;
    jobs_.guarded(job, [&] {
      const Timed timed(Work::score, job.policy());
      const double own = seconds_of(view, [&] {
        if (gone[i].empty()) gone[i] = view.backend().online_eviction(view.tensors(), all[i]);
        job.selections[l] =
            job.range(view.layer()).plan.schedule->after(scheduled(job, view), *online[i].call, gone[i]);
      });
      job.seconds[l].select += seconds / static_cast<double>(online.size()) + own;
    });
  }
}

Scoring Eviction::scoring(const Job& job, const PlannedRange& range) const {
  return scoring_of(range.plan, range.by_rule, job.budget, of_.prompt(), of_.question);
}

Matrix Eviction::scored(Job& job, const PlannedRange& range, const LayerView& view) const {
  Matrix scores;
  job.seconds[static_cast<std::size_t>(view.layer())].score =
      seconds_of(view, [&] { scores = score_tokens(view, range.plan, scoring(job, range), job.name); });
  return scores;
}

void Eviction::report_scores(const Job& job, const LayerView& view, const Matrix& scores) const {
  if (job.is_cell() && view.tokens() == of_.prompt()) of_.sink.scored(view, job.number, scores);
}

/// With all of the prompt resident. The first of the jobs that share scores computes them, and all are charged.
SharedScores Eviction::scores_of_prompt(Job& job, const PlannedRange& range, const LayerView& view) {
  const Scorer& score = range.plan.score;
  if (!score) return nullptr;
  const ScoreKey key = score_key(range.plan, scoring(job, range));
  double& seconds = job.seconds[static_cast<std::size_t>(view.layer())].score;
  SharedScores scores;
  if (const auto known = scores_.find(key); known != scores_.end()) {
    scores = known->second.scores;
    seconds = known->second.seconds;
  } else {
    scores = std::make_shared<const Matrix>(scored(job, range, view));
    if (!score.name.empty()) scores_.emplace(key, CostedScores{scores, seconds});
  }
  report_scores(job, view, *scores);
  return scores;
}

/// In the place of the last layer's scores those that combine all layers'.
void Eviction::pool_scores(Job& job, const PlannedRange& range) {
  const std::span<SharedScores> of_range =
      std::span(job.scores).subspan(static_cast<std::size_t>(range.first), static_cast<std::size_t>(range.count));
  std::vector<const Matrix*> scores;
  for (const SharedScores& of_layer : of_range) scores.push_back(of_layer.get());
  SharedScores pooled = std::make_shared<const Matrix>(range.plan.share.pool(scores));
  std::ranges::fill(of_range, nullptr);
  of_range.back() = std::move(pooled);
}

/// Counts of the policy whose counts the job takes.
std::vector<int> Eviction::counted(const Job& job, int layer) const {
  const KeptSet& set = jobs_.counted(job).selections[static_cast<std::size_t>(layer)].set;
  std::vector<int> of_rows;
  for (int row = 0; row < set.rows(); ++row) of_rows.push_back(set.count(row));
  return of_rows;
}

std::vector<int> Eviction::counts(const Job& job, const PlannedRange& range, int layer, const SharedScores& scores,
                                  int rows) const {
  const Allocator& allocate = *range.plan.allocate;
  if (allocate.from == CountsFrom::layer)
    return allocate.counts_of_layer(division_of(of_, range, layer, job.budget), scores.get(),
                                    job.takes_counts() ? counted(job, layer) : std::vector<int>{});
  if (!range.counts.empty()) return range.counts[static_cast<std::size_t>(layer - range.first)];
  return std::vector<int>(static_cast<std::size_t>(rows), job.budget);
}

/// Fills a layer's selection from its scores, which are then let go. `view` is null when it is no longer resident.
void Eviction::choose(Job& job, const PlannedRange& range, int layer, const LayerView* view,
                      const std::vector<int>& given_counts) {
  const Timed timed(Work::select, job.policy());
  const auto l = static_cast<std::size_t>(layer);
  const auto start = std::chrono::steady_clock::now();
  const Allocator& allocate = *range.plan.allocate;
  LayerSelection& selection = job.selections[l];
  if (allocate.changes_sets()) {
    const LayerSelection& taken = jobs_.counted(job).selections[l];
    selection = with_changed_rows(taken, allocate, of_.stored(layer));
    job.seconds[l].select += seconds_since(start);
    return;
  }
  const SharedScores scores = std::move(job.scores[l]);
  const std::vector<int> of_rows =
      given_counts.empty() ? counts(job, range, layer, scores, selection.set.rows()) : given_counts;
  for (int row = 0; row < selection.set.rows(); ++row) {
    const int count = std::min(of_rows[static_cast<std::size_t>(row)], of_.prompt());
    const std::span<const double> of_row = scores ? scores->row(row) : std::span<const double>();
    enter_row(selection, row,
              choose_row(range.plan.select, of_.prompt(), of_row, {count, range.by_rule, row}, view, job.name), count);
  }
  job.seconds[l].select += seconds_since(start);
  // Counts of several layers are held against their budget where they are made.
  const bool of_one_layer = has_budget(range.plan) && allocate.other == nullptr &&
                            (allocate.is_uniform || allocate.from == CountsFrom::layer);
  const long slots = std::accumulate(selection.granted.begin(), selection.granted.end(), 0L);
  const long allowed = static_cast<long>(selection.set.rows()) * job.budget;
  if (of_one_layer && slots > allowed) throw_overspent(job, allowed, slots);
}

/// One set for the layer, within what the layer before leaves.
void Eviction::select_nested(Job& job, const PlannedRange& range, const LayerView& view) {
  const auto l = static_cast<std::size_t>(view.layer());
  const std::size_t number = static_cast<std::size_t>(view.layer() - range.first);
  const int count = range.counts[number].front();
  const std::vector<std::int32_t> before = number == 0 ? position_range(0, of_.prompt()) : job.nested;
  LayerSelection& selection = job.selections[l] = empty_selection(view, Heads::layer);
  const auto cut = [&](int to) {
    if (to >= static_cast<int>(before.size()))
      return choose_row(range.plan.select, before, {}, {to, range.by_rule}, nullptr, job.name);
    Residents residents{.positions = before, .seen = of_.prompt()};
    const LayerView within(view, std::move(residents));
    const LayerView& seen = number == 0 ? view : within;
    const Matrix scores = scored(job, range, seen);
    report_scores(job, seen, scores);
    const auto start = std::chrono::steady_clock::now();
    Kept kept = choose_row(range.plan.select, before, scores.row(0), {to, range.by_rule}, &within, job.name);
    job.seconds[l].select = seconds_since(start);
    return kept;
  };
  if (range.plan.nesting == Nesting::prunes_next) {
    enter_row(selection, 0, {before, range.by_rule.sinks, range.by_rule.recent}, count);
    if (number + 1 < range.counts.size()) job.nested = cut(range.counts[number + 1].front()).positions;
  } else {
    const Kept kept = cut(count);
    enter_row(selection, 0, kept, count);
    job.nested = kept.positions;
  }
}

void Eviction::select_after_walk(Job& job) {
  for (const PlannedRange& range : job.ranges) {
    if (keeps_everything(range.plan, job.budget, of_.prompt())) continue;
    const int end = range.end();
    if (counts_come_later(job, range)) allocate_across(job, range);
    for (int l = range.first; l < end; ++l)
      if (const int source = range.source_of(l); source != l)
        job.selections[static_cast<std::size_t>(l)] = job.selections[static_cast<std::size_t>(source)];
  }
}

void Eviction::allocate_across(Job& job, const PlannedRange& range) {
  const Timed timed(Work::select, job.policy());
  const auto first = static_cast<std::size_t>(range.first);
  const auto start = std::chrono::steady_clock::now();
  const Allocator& allocate = *range.plan.allocate;
  LayerCounts counts_of_layers;
  if (allocate.from == CountsFrom::all_layers) {
    std::vector<const Matrix*> scores;
    for (const SharedScores& of_layer : std::span(job.scores).subspan(first, static_cast<std::size_t>(range.count)))
      scores.push_back(of_layer.get());
    std::int64_t slots = 0;  // of the policy whose counts it takes
    for (int l = range.first; job.takes_counts() && l < range.end(); ++l) {
      const std::vector<int> of_layer = counted(job, l);
      slots += std::accumulate(of_layer.begin(), of_layer.end(), std::int64_t{0});
    }
    counts_of_layers = allocate.counts_of_layers(division_of(of_, range, range.first, job.budget), scores, slots);
    if (!job.takes_counts()) check_slots(job, range.plan, counts_of_layers);
  }
  job.seconds[first].select += seconds_since(start);
  for (int l = range.first; l < range.end(); ++l)
    if (range.is_source(l))
      choose(
          job, range, l, nullptr,
          counts_of_layers.empty() ? std::vector<int>{} : counts_of_layers[static_cast<std::size_t>(l - range.first)]);
}

}  // namespace kvreplay
