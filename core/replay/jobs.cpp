#include "replay/jobs.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <numeric>

#include "parallel.h"
#include "replay/trace_inputs.h"

namespace kvreplay {
namespace {

/// The policy whose counts or sets some layers take; null: none.
const ConfiguredPolicy* policy_taken_from(const std::vector<LayerPlan>& plans) {
  for (const LayerPlan& of_range : plans)
    if (const auto& other = of_range.plan.allocate->other) return other.get();
  return nullptr;
}

}  // namespace

bool PlannedRange::shares_later_layer() const {
  for (int l = first; l < end(); ++l)
    if (source_of(l) > l) return true;
  return false;
}

const PlannedRange& Job::range(int layer) const {
  return *std::ranges::find_if(ranges, [&](const PlannedRange& r) { return layer < r.end(); });
}

Jobs::Jobs(const ReplayedTrace& of, std::span<const Cell> cells) : of_(of) {
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const Cell& cell = cells[i];
    Job job{&cell, static_cast<int>(i), cell.policy.label(), cell.budget, cell.of_seen};
    const std::vector<LayerPlan> plans = cell.policy.plans(of.layers());
    if (const ConfiguredPolicy* counted = policy_taken_from(plans); counted != nullptr && !job.is_known()) {
      job.counted = known_job(counted->label(), cell.budget, cell.of_seen);
      if (job.counted == no_job)
        job.counted = add({nullptr, no_job, counted->label(), cell.budget, cell.of_seen}, counted->plans(of.layers()));
    }
    job.same = same_as(job, plans);
    add(std::move(job), plans);
  }
}

bool Jobs::need_two_walks() const { return std::ranges::any_of(jobs_, &Job::two_walks); }

void Jobs::guarded(Job& job, const std::function<void()>& work) {
  for (const int other : {job.counted, job.same}) {
    if (other < 0 || job.failure) continue;
    const std::optional<Error>& of_other = jobs_[static_cast<std::size_t>(other)].failure;
    if (of_other) fail(job, *of_other);
  }
  if (job.failure) return;
  try {
    work();
  } catch (const Error& error) {
    if (error.refusal() != Refusal::usage && error.refusal() != Refusal::input && error.refusal() != Refusal::internal)
      throw;
    fail(job, error);
  }
}

void Jobs::for_all(const std::vector<Job*>& some, const std::function<bool(const Job&)>& alone,
                   const std::function<void(Job&)>& work) {
  std::vector<Job*> together;
  std::ranges::copy_if(some, std::back_inserter(together), [&](const Job* job) { return !alone(*job); });
  const std::vector<std::exception_ptr> thrown =
      side_by_side(of_.backend.threads(), together.size(), [&](std::size_t i) { work(*together[i]); });
  for (std::size_t i = 0; i < together.size(); ++i)
    if (thrown[i]) guarded(*together[i], [&] { std::rethrow_exception(thrown[i]); });
  for (Job* job : some)
    if (alone(*job))
      guarded(*job, [&] {
        of_.poll();
        work(*job);
      });
}

void Jobs::fail(Job& job, const Error& error) {
  job.failure = error;
  job.scores.assign(job.scores.size(), nullptr);
  if (job.number != no_job) of_.sink.failed(job.number, error);
}

int Jobs::add(Job job, const std::vector<LayerPlan>& plans) {
  const bool counted_later = job.takes_counts() && jobs_[static_cast<std::size_t>(job.counted)].two_walks;
  for (const LayerPlan& of_range : plans) {
    PlannedRange& range = job.ranges.emplace_back(PlannedRange{of_range});
    range.by_rule = kept_by_rule(of_range.plan, job.budget, of_.prompt(), of_.question);
    const bool whole = job.is_known() || keeps_everything(of_range.plan, job.budget, of_.prompt());
    if (!whole)
      guarded(job, [&] {
        range.counts = of_range.plan.allocate->counts(division_of(of_, range, range.first, job.budget));
        check_slots(job, of_range.plan, range.counts);
      });
    job.two_walks = job.two_walks || (!whole && (counted_later || range.shares_later_layer() ||
                                                 of_range.plan.allocate->from == CountsFrom::all_layers));
  }
  const auto size = static_cast<std::size_t>(of_.layers());
  job.selections.resize(size);
  job.seconds.resize(size);
  job.scores.resize(size);
  jobs_.push_back(std::move(job));
  return static_cast<int>(jobs_.size()) - 1;
}

/// The first job of a policy, by its label, at a budget, whose counts others can take; no_job: there is none yet.
int Jobs::known_job(const std::string& label, int budget, double of_seen) const {
  const auto found = std::ranges::find_if(jobs_, [&](const Job& job) {
    return job.name == label && job.budget == budget && job.of_seen == of_seen && !job.takes_counts() &&
           job.same == no_job;
  });
  return found == jobs_.end() ? no_job : static_cast<int>(found - jobs_.begin());
}

/// The first job of the same policy, where no budget binds it, and its sets are known with their layer.
int Jobs::same_as(const Job& job, const std::vector<LayerPlan>& plans) const {
  const auto binds = [](const LayerPlan& of_range) {
    const bool reads_by_budget =
        of_range.plan.schedule->decided() == Decision::never && of_range.plan.schedule->has_budget();
    return has_budget(of_range.plan) || reads_by_budget || of_range.plan.allocate->from == CountsFrom::all_layers;
  };
  if (job.is_known() || job.takes_counts() || std::ranges::any_of(plans, binds)) return no_job;
  const auto policy = [](const Job& of) { return of.cell->policy.name() + ":" + of.cell->policy.params(); };
  const auto found = std::ranges::find_if(jobs_, [&](const Job& other) {
    return other.number != no_job && !other.is_known() && policy(other) == policy(job);
  });
  return found == jobs_.end() ? no_job : static_cast<int>(found - jobs_.begin());
}

Division division_of(const ReplayedTrace& of, const PlannedRange& range, int layer, int budget) {
  return division_of(range.plan, of.trace.header().shape(of.stored(layer)), range.count, of.prompt(), budget,
                     of.question);
}

void check_slots(const Job& job, const Plan& plan, const LayerCounts& counts) {
  long slots = 0, allowed = 0;
  for (const std::vector<int>& of_layer : counts) {
    slots += std::accumulate(of_layer.begin(), of_layer.end(), 0L);
    allowed += static_cast<long>(of_layer.size()) * job.budget;
  }
  if (has_budget(plan) && slots > allowed) throw_overspent(job, allowed, slots);
}

void throw_overspent(const Job& job, long allowed, long slots) {
  throw Error{Refusal::internal, job.name, "overspends its budget", fmt::format("at most {} slots", allowed),
              std::to_string(slots)};
}

}  // namespace kvreplay
