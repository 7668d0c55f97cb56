// What each job keeps of a layer.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "observables/layer_view.h"
#include "replay/jobs.h"

namespace kvreplay {

/// Decides layer by layer; where counts depend on all layers, it scores them, and decides after the last one.
class Eviction {
 public:
  Eviction(const ReplayedTrace& of, Jobs& jobs) : of_(of), jobs_(jobs) {}

  /// Fills the selections of a layer, or its scores.
  void decide(const LayerView& view);
  /// Fills what is left when all layers have been scored.
  void decide_after_walk();

 private:
  bool counts_come_later(const Job& job, const PlannedRange& range) const;
  bool score(Job& job, const LayerView& view);
  ScheduledLayer scheduled(const Job& job, const LayerView& view) const;
  void evict_online(const LayerView& view);
  Scoring scoring(const Job& job, const PlannedRange& range) const;
  Matrix scored(Job& job, const PlannedRange& range, const LayerView& view) const;
  void report_scores(const Job& job, const LayerView& view, const Matrix& scores) const;
  SharedScores scores_of_prompt(Job& job, const PlannedRange& range, const LayerView& view);
  static void pool_scores(Job& job, const PlannedRange& range);
  std::vector<int> counted(const Job& job, int layer) const;
  std::vector<int> counts(const Job& job, const PlannedRange& range, int layer, const SharedScores& scores,
                          int rows) const;
  void choose(Job& job, const PlannedRange& range, int layer, const LayerView* view,
              const std::vector<int>& given_counts = {});
  void select_nested(Job& job, const PlannedRange& range, const LayerView& view);
  void select_after_walk(Job& job);
  void allocate_across(Job& job, const PlannedRange& range);

  /// Scores with what they cost, which every job that uses them is charged.
  struct CostedScores {
    SharedScores scores;
    double seconds = 0;
  };

  /// A job whose tokens go one by one.
  struct OnlineJob {
    Job* job;
    std::unique_ptr<OnlineCall> call;
  };

  const ReplayedTrace& of_;
  Jobs& jobs_;
  std::function<void()> poll_ = [this] { of_.poll(); };
  std::vector<OnlineJob> online_;            // of the layer under way
  std::map<ScoreKey, CostedScores> scores_;  // of the layer under way
};

}  // namespace kvreplay
