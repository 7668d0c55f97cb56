#include "replay/replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>

#include "attention/softmax_keys.h"
#include "parallel.h"
#include "policies/selection.h"
#include "positions.h"
#include "profile.h"
#include "replay/cell_measurement.h"
#include "replay/eviction.h"
#include "replay/jobs.h"
#include "replay/resident_layers.h"
#include "replay/trace_inputs.h"
#include "trace/validate.h"

namespace kvreplay {
namespace {

/// Queries that are read of a trace: positions, ascending.
std::vector<std::int32_t> queries_read(const ReplayedTrace& of, std::span<const Cell> cells) {
  std::set<std::int32_t> read(of.conditions.eval_queries.begin(), of.conditions.eval_queries.end());
  for (const Cell& cell : cells) {
    if (!cell.known.empty()) continue;
    const std::vector<std::int32_t> by_policy = queries_read(of.trace, of.conditions, cell.policy, cell.budget);
    read.insert(by_policy.begin(), by_policy.end());
  }
  return {read.begin(), read.end()};
}

class Replay {
 public:
  Replay(const ReplayedTrace& of, std::span<const Cell> cells)
      : of_(of),
        jobs_(of, cells),
        eviction_(of, jobs_),
        measurement_(of, jobs_),
        queries_read_(queries_read(of, cells)) {}

  void run() {
    const bool two_walks = jobs_.need_two_walks();
    walk(0, two_walks ? 2 : 1);
    if (!two_walks) return;
    eviction_.decide_after_walk();
    walk(1, 2);
  }

 private:
  /// Whether most queries of a layer are read; of the others a few rows of each head.
  bool reads_all_queries() const {
    const bool measures =
        2 * of_.conditions.eval_queries.size() > static_cast<std::size_t>(of_.trace.header().tokens());
    return measures || std::ranges::any_of(jobs_.all(), [](const Job& job) {
             return std::ranges::any_of(job.ranges, [&job](const PlannedRange& range) {
               const Plan& plan = range.plan;
               return (job.is_known() ? plan.store->needs : needs_of(plan)).all_queries;
             });
           });
  }

  bool measures_vectors() const {
    return std::ranges::any_of(
        jobs_.all(), [](const Job& job) { return job.is_cell() && job.cell->measure && job.cell->measure->vectors; });
  }

  /// Whether a policy that runs needs this.
  bool reads(bool Needs::* input) const {
    return std::ranges::any_of(jobs_.all(), [input](const Job& job) {
      return !job.is_known() && std::ranges::any_of(job.ranges, [input](const PlannedRange& range) {
        return needs_of(range.plan).*input;
      });
    });
  }

  /// Of a query head of a layer, named as it is stored.
  static std::optional<Error> first_not_finite(const std::string& file, const LayerTensors& layer,
                                               TraceHeader::QueryHead stored, int head,
                                               std::span<const std::int32_t> positions,
                                               std::optional<std::span<const std::int32_t>> rows) {
    StoredTensor queries;
    queries.path = fmt::format("/layers/{:03}/q", stored.layer);
    queries.view = layer.q;
    queries.view.data = layer.q.row(head - stored.head, 0);  // `stored.head` is the number in its own tensor
    return kvreplay::first_not_finite(file, queries, stored.head, positions, rows);
  }

  /// Numbers that are none would not stop every policy: a capped logit of infinity is the cap, and a maximum passes NaN
  /// by. Throws Error{input} that names the first in what is read of a layer.
  void require_finite(int stored, bool projection, bool passes) const {
    const bool vectors = measures_vectors();
    const std::string file = of_.trace.path().string();
    const LayerTensors layer = of_.trace.layer(stored);
    const std::vector<TraceHeader::QueryHead> query_heads = of_.trace.header().query_heads_of(stored);
    for (const StoredTensor& tensor : of_.trace.tensors(stored)) {
      const bool queries = tensor.path.ends_with("/q");
      if (tensor.path.ends_with("/wo") && !projection && !vectors) continue;
      if (tensor.path.ends_with("/input_norm") && !vectors) continue;
      if (tensor.path.ends_with("_reconstruction") && !passes) continue;
      if (tensor.path.ends_with("/x")) continue;  // no policy or metric reads it
      const std::span<const std::int32_t> positions =
          queries ? of_.trace.query_positions(stored) : std::span<const std::int32_t>{};
      std::optional<std::span<const std::int32_t>> rows;
      std::vector<std::int32_t> stored_rows;
      if (queries) {
        for (const std::int32_t query : queries_read_) stored_rows.push_back(stored_query(layer, query));
        rows = stored_rows;
      }
      std::vector<std::optional<Error>> of_heads(static_cast<std::size_t>(queries ? layer.q.heads : tensor.view.heads));
      all_side_by_side(of_.backend.threads(), of_heads.size(), [&](std::size_t h) {
        const int head = static_cast<int>(h);
        of_heads[h] = queries ? first_not_finite(file, layer, query_heads[h], head, positions, rows)
                              : kvreplay::first_not_finite(file, tensor, head, positions, rows);
      });
      for (const std::optional<Error>& found : of_heads)
        if (found) throw *found;
    }
  }

  void walk(int number, int walks) {
    const bool queries = reads_all_queries();
    std::deque<HeldLayer> held;  // the layer in use, and the next
    const std::vector<int> replayed = of_.conditions.replayed_layers();
    for (std::size_t i = 0; i < replayed.size(); ++i) {
      const int l = replayed[i];
      of_.poll();
      const Timed timed(Work::layer, std::to_string(l));
      const int stored = of_.stored(l);
      std::optional<Timed> reading(std::in_place, Work::read);
      const std::map<int, PairedLayer> paired = paired_layers(l, number == 1);
      for (const auto& [partner, of_partner] : paired)  // those before it have been seen
        if (number == 0 && partner > l) require_finite(of_.stored(partner), false, false);
      const LayerTensors tensors = of_.trace.layer(stored);
      if (held.empty()) held.emplace_back(of_.backend, tensors);
      held.front().hold(queries);  // again, where it did not fit beside the one before it
      if (i + 1 < replayed.size()) {
        const int following = of_.stored(replayed[i + 1]);
        const bool fits = of_.trace.prefetch(following, queries);
        // An archived layer is put together in place of the one before it.
        if (fits && of_.trace.archived_bytes(following) == 0)
          held.emplace_back(of_.backend, of_.trace.layer(following)).hold(queries);
      }
      const TensorView projection = reads(&Needs::projection) ? output_projection(of_.trace, stored) : TensorView{};
      const Reconstruction passes =
          reads(&Needs::reconstruction) ? reconstruction(of_.trace, stored) : Reconstruction{};
      if (number == 0) require_finite(stored, projection.data != nullptr, !passes.passes.empty());
      reading.reset();
      const LayerView view(of_.backend, tensors,
                           {l, of_.layers(), stored, of_.prompt(), of_.question, projection, passes},
                           of_.conditions.eval_queries, of_.store);
      if (number == 0) {
        of_.sink.layer(view, of_.backend);
        eviction_.decide(view);
      }
      measurement_.measure(view, number == 1, paired);
      of_.trace.require_unchanged();
      of_.sink.layer_done(view, number, walks);
      forget(l, number == 1);
      held.pop_front();
      of_.trace.release(stored);
      for (const auto& [partner, of_partner] : paired)
        if (partner < l) of_.trace.release(of_.stored(partner));
    }
  }

  /// The layers that layer l is stored with, itself among them where a store that pairs layers leaves it alone.
  std::map<int, PairedLayer> paired_layers(int l, bool second_walk) const {
    std::map<int, PairedLayer> paired;
    for (const Job& job : jobs_.all()) {
      if (!job.range(l).plan.store->pairs_layers() || !job.is_cell() || job.two_walks != second_walk || job.failure)
        continue;
      const int partner = job.range(l).partner_of(l), stored = of_.stored(partner);
      if (!paired.contains(partner)) paired.try_emplace(partner, of_.trace, partner, stored);
    }
    return paired;
  }

  /// Sets that no later layer and no other job reads are let go.
  void forget(int layer, bool second_walk) {
    for (std::size_t j = 0; j < jobs_.all().size(); ++j) {
      Job& job = jobs_.all()[j];
      if (job.two_walks != second_walk) continue;
      bool reused = false;
      const PlannedRange& range = job.range(layer);
      for (int later = layer + 1; later < range.end(); ++later) reused = reused || range.source_of(later) == layer;
      const bool counted = std::ranges::any_of(
          jobs_.all(), [&](const Job& other) { return other.two_walks && other.counted == static_cast<int>(j); });
      if (!reused && !counted) job.selections[static_cast<std::size_t>(layer)] = {};
    }
  }

  const ReplayedTrace& of_;
  Jobs jobs_;
  Eviction eviction_;
  CellMeasurement measurement_;
  std::vector<std::int32_t> queries_read_;  // positions
};

}  // namespace

std::vector<int> Conditions::replayed_layers() const {
  return sampled_layers.empty() ? position_range(0, static_cast<int>(layers.size())) : sampled_layers;
}

ScoreKey score_key(const Plan& plan, const Scoring& how) {
  const Scoring read = inputs_of_scorer(plan, how);
  return {plan.score.name, read.grouping.heads, read.grouping.aggregate, read.recent,
          read.budget,     read.sinks,          read.observing,          read.window_end};
}

void replay(Backend& backend, const Trace& trace, const Conditions& conditions, std::span<const Cell> cells, Sink& sink,
            const std::function<bool()>& interrupted, ObservableStore* store) {
  const ReplayedTrace of{backend, trace, conditions, sink, store, marked_question(trace, conditions.boundary)};
  const Interruption::Asking asking(backend.interruption(), interrupted, trace.path().string());
  Replay(of, cells).run();
}

}  // namespace kvreplay
