// Cells as the engine works on them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "matrix.h"
#include "replay/replay.h"

namespace kvreplay {

/// What all work on one trace has in common.
struct ReplayedTrace {
  Backend& backend;
  const Trace& trace;
  const Conditions& conditions;
  Sink& sink;
  ObservableStore* store = nullptr;  // null: none
  MarkedQuestion question = {};

  int layers() const { return static_cast<int>(conditions.layers.size()); }
  int prompt() const { return conditions.boundary; }
  /// The stored number of a treated layer.
  int stored(int layer) const { return conditions.layers[static_cast<std::size_t>(layer)]; }
  /// Throws Error{interrupted} if the caller requests the end.
  void poll() const { backend.interruption().poll(); }
};

/// [H, P] of one layer, shared by the jobs whose scores they are; null: none.
using SharedScores = std::shared_ptr<const Matrix>;

/// The plan of a range of treated layers, and what follows from its size.
struct PlannedRange : LayerPlan {
  Protection::Clamped by_rule = {};  // at the cell's budget
  LayerCounts counts = {};           // [count][H], where they follow from sizes; empty: B each

  bool shares_later_layer() const;
};

inline constexpr int no_job = -1;

/// A cell of the caller, or a policy that runs unseen because a cell takes its counts or sets.
struct Job {
  const Cell* cell;
  int number;        // of the cell, or no_job
  std::string name;  // for messages
  int budget;
  double of_seen;  // as in Cell
  std::vector<PlannedRange> ranges = {};
  int counted = no_job;                         // the job whose counts or sets this one takes
  int same = no_job;                            // an earlier one that no budget parts from this: its sets are these
  bool two_walks = false;                       // some set is final only when all layers have been seen
  std::vector<LayerSelection> selections = {};  // [L]
  std::vector<CellSeconds> seconds = {};        // [L]
  std::vector<SharedScores> scores = {};        // [L] of layers that select after the first walk
  std::optional<Error> failure = {};
  std::vector<std::int32_t> nested = {};  // what the layer before leaves to the next one, of nested policies

  bool is_cell() const { return number != no_job; }
  /// The registered name of the policy.
  std::string policy() const { return cell != nullptr ? cell->policy.name() : name.substr(0, name.find(':')); }
  bool takes_counts() const { return counted != no_job; }
  /// Whether its sets come from an earlier run.
  bool is_known() const { return cell != nullptr && !cell->known.empty(); }
  const PlannedRange& range(int layer) const;
};

/// All jobs of a trace. What the work of one throws fails that job alone.
class Jobs {
 public:
  Jobs(const ReplayedTrace& of, std::span<const Cell> cells);

  std::vector<Job>& all() { return jobs_; }
  const std::vector<Job>& all() const { return jobs_; }
  /// The job whose counts or sets this one takes.
  const Job& counted(const Job& job) const { return jobs_[static_cast<std::size_t>(job.counted)]; }
  const Job& same(const Job& job) const { return jobs_[static_cast<std::size_t>(job.same)]; }
  bool need_two_walks() const;

  void guarded(Job& job, const std::function<void()>& work);
  /// Guarded work(job) for some: several at a time, but one after the other, and after these, where `alone` says so.
  void for_all(const std::vector<Job*>& some, const std::function<bool(const Job&)>& alone,
               const std::function<void(Job&)>& work);

 private:
  void fail(Job& job, const Error& error);
  int add(Job job, const std::vector<LayerPlan>& plans);
  int known_job(const std::string& label, int budget, double of_seen) const;
  int same_as(const Job& job, const std::vector<LayerPlan>& plans) const;

  const ReplayedTrace& of_;
  std::vector<Job> jobs_;
};

/// What the plan of a range divides at a budget; `layer`: one of the range, whose rows count where layers differ.
Division division_of(const ReplayedTrace& of, const PlannedRange& range, int layer, int budget);

/// Throws Error{internal} where the counts of several layers, [L][H], are more than the job's budget.
void check_slots(const Job& job, const Plan& plan, const LayerCounts& counts);
[[noreturn]] void throw_overspent(const Job& job, long allowed, long slots);

}  // namespace kvreplay
