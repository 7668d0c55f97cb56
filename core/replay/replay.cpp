#include "replay/replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>

#include "attention/participants.h"
#include "attention/rope.h"
#include "float_types.h"
#include "parallel.h"
#include "positions.h"
#include "replay/schedules.h"
#include "trace/validate.h"

namespace kvreplay {
namespace {

/// Whatever happens, the backend lets go of the layer before the trace does.
class HeldLayer {
 public:
  HeldLayer(Backend& backend, const LayerTensors& layer) : backend_(backend), layer_(layer) {}
  ~HeldLayer() { backend_.let_go(layer_); }
  HeldLayer(const HeldLayer&) = delete;
  HeldLayer& operator=(const HeldLayer&) = delete;

  void hold(bool queries) { backend_.hold(layer_, queries); }

 private:
  Backend& backend_;
  LayerTensors layer_;
};

/// Eval queries measured at once. Fixed, because the shape of a product can decide its last bits.
constexpr int query_block = 64;

constexpr int no_cell = -1;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// [H, P] of one layer, shared by the jobs whose scores they are; null: none.
using Scores = std::shared_ptr<const Matrix>;

/// Scores with what they cost, which every job that uses them is charged.
struct CostedScores {
  Scores scores;
  double seconds = 0;
};

/// The plan of a range of treated layers, and the counts that follow from its number of layers.
struct Stretch {
  LayerPlan of;
  Protection::Clamped by_rule = {};            // at the cell's budget
  std::vector<int> by_layer = {};              // [count]
  std::vector<std::vector<int>> by_head = {};  // [count][H]

  const Plan& plan() const { return of.plan; }
  int source_of(int layer) const { return of.first + of.plan.share(layer - of.first, of.count); }
  bool is_source(int layer) const { return kvreplay::is_source(of.plan.share, layer - of.first, of.count); }
  bool shares_later_layer() const {
    for (int l = of.first; l < of.first + of.count; ++l)
      if (source_of(l) > l) return true;
    return false;
  }
};

/// A cell of the caller, or a policy that runs unseen because a cell takes its counts or sets.
struct Job {
  const Cell* cell;
  int number;        // of the cell, or no_cell
  std::string name;  // for messages
  int budget;
  double of_seen;  // as in Cell
  std::vector<Stretch> stretches = {};
  int counted = no_cell;                        // the job whose counts or sets this one takes
  int same = no_cell;                           // an earlier one that no budget parts from this: its sets are these
  bool two_walks = false;                       // some set is final only when all layers have been seen
  std::vector<LayerSelection> selections = {};  // [L]
  std::vector<CellSeconds> seconds = {};        // [L]
  std::vector<Scores> scores = {};              // [L] of layers that select after the first walk
  std::optional<Error> failure = {};
  std::vector<std::int32_t> nested = {};  // what the layer before leaves to the next one, of nested policies

  bool takes_counts() const { return counted != no_cell; }
  bool known() const { return cell != nullptr && !cell->known.empty(); }
  const Stretch& stretch(int layer) const {
    return *std::ranges::find_if(stretches, [&](const Stretch& s) { return layer < s.of.first + s.of.count; });
  }
};

/// Every row keeps all: what a budget of P or more means.
LayerSelection whole_prompt(const LayerView& view, const Plan& plan) {
  const int prompt = view.prompt();
  LayerSelection selection = empty_selection(view, plan.grouping.heads);
  const auto [sinks, recent] = plan.protect.within(prompt, prompt, view.question());
  Kept all{position_range(0, prompt), sinks, recent};
  const auto* blocks = std::get_if<Blocks>(&plan.schedule);
  if (const int spared = blocks != nullptr ? blocks->spared_tokens(prompt, view.question().begin) : 0; spared > 0)
    all.recent = spared;
  if (plan.select.of_prompt) all = plan.select({{}, prompt, prompt, sinks, recent, &view});
  for (int row = 0; row < selection.set.rows(); ++row) enter_row(selection, row, all, prompt);
  return selection;
}

/// The selection of a stored layer with each row changed.
LayerSelection with_changed_rows(const LayerSelection& taken, const SetsOf& sets, int stored_layer) {
  const int prompt = taken.set.tokens();
  LayerSelection selection = taken;
  selection.set = KeptSet(taken.set.heads(), taken.set.rows(), prompt);
  for (int row = 0; row < taken.set.rows(); ++row) {
    const auto r = static_cast<std::size_t>(row);
    Kept kept{taken.set.positions(row), taken.sinks[r], taken.recent[r]};
    kept.positions = sets.change(kept, prompt, stored_layer, row);
    enter_row(selection, row, kept, taken.granted[r]);
  }
  return selection;
}

bool keeps_all(const KeptSet& set) {
  for (int row = 0; row < set.rows(); ++row)
    if (set.count(row) < set.tokens()) return false;
  return true;
}

StoredLayer in_slot_order(const LayerView& view, const LayerSelection& selection) {
  StoredLayer stored;
  stored.tensors = view.tensors();
  stored.keys = keys_at_slots(view, selection);
  stored.tensors.k = view_of(stored.keys, stored.tensors.k);
  return stored;
}

/// A query head and the KV head that it reads.
LayerTensors one_head(LayerTensors tensors, int query_head) {
  const auto cut = [](TensorView& tensor, int head) {
    tensor.data = tensor.row(head, 0);
    tensor.heads = 1;
  };
  const int kv_head = query_head / tensors.group();
  cut(tensors.q, query_head);
  cut(tensors.k, kv_head);
  cut(tensors.v, kv_head);
  return tensors;
}

/// Keys and values of a layer that another one is stored with.
struct PairedLayer {
  Partner partner;
  std::vector<std::byte> keys = {}, values = {};  // copies of archived ones: a trace holds one such layer at a time

  PairedLayer(const Trace& trace, int layer, int stored_layer) : partner{layer, trace.layer(stored_layer)} {
    LayerTensors& tensors = partner.tensors;
    if (trace.archived_bytes(stored_layer) == 0) return;
    const auto copy = [](TensorView& tensor, std::vector<std::byte>& bytes) {
      bytes.assign(tensor.data, tensor.data + tensor.bytes());
      tensor.data = bytes.data();
    };
    copy(tensors.k, keys);
    copy(tensors.v, values);
    tensors.q = {};
  }
};

/// The policy whose counts or sets some layers take; null: none.
const std::string* policy_taken_from(const std::vector<LayerPlan>& plans) {
  for (const LayerPlan& of_range : plans)
    if (const std::string* other = kvreplay::policy_taken_from(of_range.plan.allocate)) return other;
  return nullptr;
}

/// The treated layer that this one is stored with, or this one itself.
int partner_of(const LayerPlan& of_range, int layer) {
  const auto* transformed = std::get_if<Transformed>(&of_range.plan.store);
  if (transformed == nullptr || !transformed->paired_with) return layer;
  return of_range.first + transformed->paired_with(layer - of_range.first, of_range.count);
}

/// How one cell is measured in one layer.
struct Measured {
  const Job* job;
  const LayerSelection* selection;
  std::unique_ptr<StoredLayer> stored = {};  // what the store made of the layer; null: it is as it was
  Positions positions = Positions::original;
  std::vector<KeptSet> by_query = {};  // of the block under way, where sets change with time

  bool general() const { return stored != nullptr || positions == Positions::cache; }
};

class Replay {
 public:
  Replay(Backend& backend, const Trace& trace, const Conditions& conditions, std::span<const Cell> cells, Sink& sink,
         const std::function<bool()>& interrupted, ObservableStore* store)
      : backend_(backend),
        trace_(trace),
        conditions_(conditions),
        sink_(sink),
        interrupted_(interrupted),
        store_(store),
        everything_(position_range(0, conditions.boundary)),
        question_(marked_question(trace, conditions.boundary)) {
    std::set<std::int32_t> read(conditions.eval_queries.begin(), conditions.eval_queries.end());
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const Cell& cell = cells[i];
      if (cell.known.empty()) {
        const std::vector<std::int32_t> by_policy = queries_read(trace, conditions, cell.policy, cell.budget);
        read.insert(by_policy.begin(), by_policy.end());
      }
      Job job{&cell, static_cast<int>(i), cell.policy.label(), cell.budget, cell.of_seen};
      const std::vector<LayerPlan> plans = cell.policy.plans(layers());
      if (const std::string* other = policy_taken_from(plans); other != nullptr && !job.known()) {
        const ConfiguredPolicy counted = ConfiguredPolicy::parse(*other);
        job.counted = known_job(counted.label(), cell.budget, cell.of_seen);
        if (job.counted == no_cell)
          job.counted = add({nullptr, no_cell, counted.label(), cell.budget, cell.of_seen}, counted.plans(layers()));
      }
      job.same = same_as(job, plans);
      add(std::move(job), plans);
    }
    queries_read_.assign(read.begin(), read.end());
  }

  void run() {
    const bool second_walk = std::ranges::any_of(jobs_, &Job::two_walks);
    walk(0, second_walk ? 2 : 1);
    if (!second_walk) return;
    std::vector<Job*> left;
    for (Job& job : jobs_)
      if (job.two_walks) guarded(job, [&] { left.push_back(&job); });
    for_all(left, &Job::takes_counts, [&](Job& job) { select_after_walk(job); });
    walk(1, 2);
  }

 private:
  /// What the job's own work throws fails that job alone.
  template <class Work>
  void guarded(Job& job, Work work) {
    for (const int other : {job.counted, job.same}) {
      if (other < 0 || job.failure) continue;
      const std::optional<Error>& of_other = jobs_[static_cast<std::size_t>(other)].failure;
      if (of_other) fail(job, *of_other);
    }
    if (job.failure) return;
    try {
      work();
    } catch (const Error& error) {
      if (error.refusal() != Refusal::usage && error.refusal() != Refusal::input &&
          error.refusal() != Refusal::internal)
        throw;
      fail(job, error);
    }
  }

  /// Guarded work(job) for all: several at a time, but one after the other, and after these, where `alone` says so.
  template <class Alone, class Work>
  void for_all(const std::vector<Job*>& jobs, const Alone& alone, const Work& work) {
    std::vector<Job*> together;
    std::ranges::copy_if(jobs, std::back_inserter(together), [&](const Job* job) { return !std::invoke(alone, *job); });
    const std::vector<std::exception_ptr> thrown =
        side_by_side(backend_.threads(), together.size(), [&](std::size_t i) { work(*together[i]); });
    for (std::size_t i = 0; i < together.size(); ++i)
      if (thrown[i]) guarded(*together[i], [&] { std::rethrow_exception(thrown[i]); });
    for (Job* job : jobs)
      if (std::invoke(alone, *job))
        guarded(*job, [&] {
          poll();
          work(*job);
        });
  }

  void fail(Job& job, const Error& error) {
    job.failure = error;
    job.scores.assign(job.scores.size(), nullptr);
    if (job.number != no_cell) sink_.failed(job.number, error);
  }

  int layers() const { return static_cast<int>(conditions_.layers.size()); }
  int prompt() const { return conditions_.boundary; }

  int add(Job job, const std::vector<LayerPlan>& plans) {
    const bool counted_later = job.takes_counts() && jobs_[static_cast<std::size_t>(job.counted)].two_walks;
    for (const LayerPlan& of_range : plans) {
      Stretch& stretch = job.stretches.emplace_back();
      stretch.of = of_range;
      stretch.by_rule = kept_by_rule(of_range.plan, job.budget, prompt(), question_);
      const bool whole = job.known() || keeps_everything(of_range.plan, job.budget, prompt());
      if (const auto* by_layer = std::get_if<ByLayer>(&of_range.plan.allocate); by_layer != nullptr && !whole) {
        guarded(job, [&] {
          stretch.by_layer = (*by_layer)(division(stretch, job.budget));
          const long slots = std::accumulate(stretch.by_layer.begin(), stretch.by_layer.end(), 0L);
          const long allowed = static_cast<long>(of_range.count) * job.budget;
          if (has_budget(of_range.plan) && slots > allowed) overspent(job, allowed, slots);
        });
      }
      if (const auto* by_head = std::get_if<ByHead>(&of_range.plan.allocate); by_head != nullptr && !whole)
        guarded(job, [&] {
          stretch.by_head = (*by_head)(division(stretch, job.budget));
          check_slots(job, of_range.plan, stretch.by_head);
        });
      job.two_walks =
          job.two_walks ||
          (!whole && (counted_later || stretch.shares_later_layer() || divides_over_layers(of_range.plan.allocate)));
    }
    const auto size = static_cast<std::size_t>(layers());
    job.selections.resize(size);
    job.seconds.resize(size);
    job.scores.resize(size);
    jobs_.push_back(std::move(job));
    return static_cast<int>(jobs_.size()) - 1;
  }

  /// The first job of a policy, by its label, at a budget, whose counts others can take; no_cell: there is none yet.
  int known_job(const std::string& label, int budget, double of_seen) const {
    const auto found = std::ranges::find_if(jobs_, [&](const Job& job) {
      return job.name == label && job.budget == budget && job.of_seen == of_seen && !job.takes_counts() &&
             job.same == no_cell;
    });
    return found == jobs_.end() ? no_cell : static_cast<int>(found - jobs_.begin());
  }

  /// The first job of the same policy, where no budget binds it, and its sets are known with their layer.
  int same_as(const Job& job, const std::vector<LayerPlan>& plans) const {
    const auto binds = [](const LayerPlan& of_range) {
      return has_budget(of_range.plan) || std::holds_alternative<Reads>(of_range.plan.schedule) ||
             std::holds_alternative<AcrossLayers>(of_range.plan.allocate);
    };
    if (job.known() || job.takes_counts() || std::ranges::any_of(plans, binds)) return no_cell;
    const auto policy = [](const Job& of) { return of.cell->policy.name() + ":" + of.cell->policy.params(); };
    const auto found = std::ranges::find_if(jobs_, [&](const Job& other) {
      return other.number != no_cell && !other.known() && policy(other) == policy(job);
    });
    return found == jobs_.end() ? no_cell : static_cast<int>(found - jobs_.begin());
  }

  Division division(const Stretch& stretch, int budget) const {
    return division_of(stretch.plan(), trace_.header(), stretch.of.count, prompt(), budget, question_);
  }

  void poll() const {
    if (interrupted_ && interrupted_())
      throw Error{Refusal::interrupted, trace_.path().string(), "interrupted; finished traces are kept"};
  }

  /// Whether most queries of a layer are read; of the others a few rows of each head.
  bool reads_all_queries() const {
    const bool measures = 2 * conditions_.eval_queries.size() > static_cast<std::size_t>(trace_.header().tokens());
    return measures || std::ranges::any_of(jobs_, [](const Job& job) {
             return std::ranges::any_of(job.stretches, [&job](const Stretch& stretch) {
               const Plan& plan = stretch.plan();
               return (job.known() ? needs_of(plan.store) : needs_of(plan)).all_queries;
             });
           });
  }

  bool measures_vectors() const {
    return std::ranges::any_of(
        jobs_, [](const Job& job) { return job.number != no_cell && job.cell->measure && job.cell->measure->vectors; });
  }

  bool reads_projection() const {
    return std::ranges::any_of(jobs_, [](const Job& job) {
      return !job.known() && std::ranges::any_of(job.stretches, [](const Stretch& stretch) {
        return needs_of(stretch.plan()).projection;
      });
    });
  }

  /// Numbers that are none would not stop every policy: a capped logit of infinity is the cap, and a maximum passes NaN
  /// by. Throws Error{input} that names the first in what is read of a layer.
  void require_finite(int stored, bool projection) const {
    const bool vectors = measures_vectors();
    const std::string file = trace_.path().string();
    const LayerTensors layer = trace_.layer(stored);
    for (const StoredTensor& tensor : trace_.tensors(stored)) {
      const bool queries = tensor.path.ends_with("/q");
      if (tensor.path.ends_with("/wo") && !projection && !vectors) continue;
      if (tensor.path.ends_with("/input_norm") && !vectors) continue;
      const std::span<const std::int32_t> positions =
          queries ? trace_.query_positions(stored) : std::span<const std::int32_t>{};
      std::optional<std::span<const std::int32_t>> rows;
      std::vector<std::int32_t> stored_rows;
      if (queries) {
        for (const std::int32_t query : queries_read_) stored_rows.push_back(stored_query(layer, query));
        rows = stored_rows;
      }
      std::vector<std::optional<Error>> of_heads(static_cast<std::size_t>(tensor.view.heads));
      all_side_by_side(backend_.threads(), of_heads.size(), [&](std::size_t head) {
        of_heads[head] = first_not_finite(file, tensor, static_cast<int>(head), positions, rows);
      });
      for (const std::optional<Error>& found : of_heads)
        if (found) throw *found;
    }
  }

  void walk(int number, int walks) {
    const bool queries = reads_all_queries();
    std::deque<HeldLayer> held;  // the layer in use, and the next
    for (int l = 0; l < layers(); ++l) {
      poll();
      const int stored = conditions_.layers[static_cast<std::size_t>(l)];
      const std::map<int, PairedLayer> paired = paired_layers(l, number == 1);
      for (const auto& [partner, of_partner] : paired)  // those before it have been seen
        if (number == 0 && partner > l) require_finite(conditions_.layers[static_cast<std::size_t>(partner)], false);
      const LayerTensors tensors = trace_.layer(stored);
      if (held.empty()) held.emplace_back(backend_, tensors);
      held.front().hold(queries);  // again, where it did not fit beside the one before it
      if (l + 1 < layers()) {
        const int following = conditions_.layers[static_cast<std::size_t>(l) + 1];
        const bool fits = trace_.prefetch(following, queries);
        // An archived layer is put together in place of the one before it.
        if (fits && trace_.archived_bytes(following) == 0)
          held.emplace_back(backend_, trace_.layer(following)).hold(queries);
      }
      const TensorView projection = reads_projection() ? output_projection(trace_, stored) : TensorView{};
      if (number == 0) require_finite(stored, projection.data != nullptr);
      const LayerView view(backend_, tensors, {l, layers(), stored, prompt(), question_, projection},
                           conditions_.eval_queries, store_);
      if (number == 0) {
        sink_.layer(view, backend_);
        select(view);
      }
      report_and_measure(view, number == 1, paired);
      trace_.require_unchanged();
      sink_.layer_done(view, number, walks);
      forget(l, number == 1);
      held.pop_front();
      trace_.release(stored);
      for (const auto& [partner, of_partner] : paired)
        if (partner < l) trace_.release(conditions_.layers[static_cast<std::size_t>(partner)]);
    }
  }

  /// The layers that layer l is stored with, itself among them where a store that pairs layers leaves it alone.
  std::map<int, PairedLayer> paired_layers(int l, bool second_walk) const {
    std::map<int, PairedLayer> paired;
    for (const Job& job : jobs_) {
      const auto* transformed = std::get_if<Transformed>(&job.stretch(l).plan().store);
      if (transformed == nullptr || !transformed->paired_with || job.number == no_cell ||
          job.two_walks != second_walk || job.failure)
        continue;
      const int partner = partner_of(job.stretch(l).of, l),
                stored = conditions_.layers[static_cast<std::size_t>(partner)];
      if (!paired.contains(partner)) paired.try_emplace(partner, trace_, partner, stored);
    }
    return paired;
  }

  /// Whether a layer's counts are known only when all layers have been seen.
  bool counts_come_later(const Job& job, const Stretch& stretch) const {
    return divides_over_layers(stretch.plan().allocate) ||
           (job.takes_counts() && jobs_[static_cast<std::size_t>(job.counted)].two_walks);
  }

  void select(const LayerView& view) {
    const auto l = static_cast<std::size_t>(view.layer());
    std::vector<Job*> to_choose;
    for (Job& job : jobs_)
      if (job.same < 0)
        guarded(job, [&] {
          if (score(job, view)) to_choose.push_back(&job);
        });
    // Observables are made by one thread: what does not read the layer does not see it.
    const auto reads_layer = [&](const Job& job) { return job.stretch(view.layer()).plan().select.reads_layer; };
    for_all(
        to_choose, [&](const Job& job) { return job.takes_counts() || reads_layer(job); },
        [&](Job& job) { choose(job, job.stretch(view.layer()), view.layer(), reads_layer(job) ? &view : nullptr); });
    for (Job& job : jobs_)
      if (job.same >= 0)
        guarded(job, [&] {
          const Job& source = jobs_[static_cast<std::size_t>(job.same)];
          job.selections[l] = source.selections[l];
          job.seconds[l] = source.seconds[l];
        });
    scores_.clear();
  }

  /// Selects, or scores alone: true where the rows are to be chosen now.
  bool score(Job& job, const LayerView& view) {
    poll();
    const auto l = static_cast<std::size_t>(view.layer());
    const Stretch& stretch = job.stretch(view.layer());
    if (job.known()) {
      job.selections[l] = job.cell->known[l];
      return false;
    }
    if (keeps_everything(stretch.plan(), job.budget, prompt())) {
      job.selections[l] = whole_prompt(view, stretch.plan());
      return false;
    }
    if (!stretch.is_source(view.layer())) {
      if (const int source = stretch.source_of(view.layer()); source < view.layer())
        job.selections[l] = job.selections[static_cast<std::size_t>(source)];
      return false;
    }
    if (!std::holds_alternative<Once>(stretch.plan().schedule)) {
      job.seconds[l].select = seconds_of(view, [&] {
        job.selections[l] = run_schedule(view, stretch.plan(), {job.budget, job.of_seen}, job.name, [this] { poll(); });
      });
    } else if (stretch.plan().nesting != Nesting::none) {
      select_nested(job, stretch, view);
    } else {
      job.selections[l] = empty_selection(view, stretch.plan().grouping.heads);
      job.scores[l] = scores_of_prompt(job, stretch, view);
      return !counts_come_later(job, stretch);
    }
    return false;
  }

  /// Seconds that `work` takes, those on shared observables apart.
  template <class Work>
  static double seconds_of(const LayerView& view, Work work) {
    const double shared_before = view.observable_seconds();
    const auto start = std::chrono::steady_clock::now();
    work();
    return seconds_since(start) - (view.observable_seconds() - shared_before);
  }

  Scoring scoring(const Job& job, const Stretch& stretch) const {
    return scoring_of(stretch.plan(), stretch.by_rule, job.budget, prompt(), question_);
  }

  Matrix scored(Job& job, const Stretch& stretch, const LayerView& view) const {
    Matrix scores;
    job.seconds[static_cast<std::size_t>(view.layer())].score =
        seconds_of(view, [&] { scores = score_tokens(view, stretch.plan(), scoring(job, stretch), job.name); });
    return scores;
  }

  void report_scores(const Job& job, const LayerView& view, const Matrix& scores) {
    if (job.number != no_cell && view.tokens() == prompt()) sink_.scored(view, job.number, scores);
  }

  /// With all of the prompt resident. The first of the jobs that share scores computes them, and all are charged.
  Scores scores_of_prompt(Job& job, const Stretch& stretch, const LayerView& view) {
    const Scorer& score = stretch.plan().score;
    if (!score) return nullptr;
    const ScoreKey key = score_key(stretch.plan(), scoring(job, stretch));
    double& seconds = job.seconds[static_cast<std::size_t>(view.layer())].score;
    Scores scores;
    if (const auto known = scores_.find(key); known != scores_.end()) {
      scores = known->second.scores;
      seconds = known->second.seconds;
    } else {
      scores = std::make_shared<const Matrix>(scored(job, stretch, view));
      if (!score.name.empty()) scores_.emplace(key, CostedScores{scores, seconds});
    }
    report_scores(job, view, *scores);
    return scores;
  }

  /// Of the policy whose counts the job takes.
  std::vector<int> counted(const Job& job, int layer) const {
    const KeptSet& set = jobs_[static_cast<std::size_t>(job.counted)].selections[static_cast<std::size_t>(layer)].set;
    std::vector<int> of_rows;
    for (int row = 0; row < set.rows(); ++row) of_rows.push_back(set.count(row));
    return of_rows;
  }

  std::vector<int> counts(const Job& job, const Stretch& stretch, int layer, const Scores& scores, int rows) const {
    if (job.takes_counts()) {
      const std::vector<int> of_rows = counted(job, layer);
      const SlotDivision& divide = std::get<CountsOf>(stretch.plan().allocate).divide;
      const Matrix* const of_layer = scores.get();
      return divide ? divide(std::accumulate(of_rows.begin(), of_rows.end(), std::int64_t{0}), {&of_layer, 1}).front()
                    : of_rows;
    }
    if (const auto* within = std::get_if<WithinLayer>(&stretch.plan().allocate))
      return (*within)(division(stretch, job.budget), *scores);
    if (!stretch.by_head.empty()) return stretch.by_head[static_cast<std::size_t>(layer - stretch.of.first)];
    const int of_each =
        stretch.by_layer.empty() ? job.budget : stretch.by_layer[static_cast<std::size_t>(layer - stretch.of.first)];
    return std::vector<int>(static_cast<std::size_t>(rows), of_each);
  }

  /// Fills a layer's selection from its scores, which are then let go. `view` is null when it is no longer resident.
  void choose(Job& job, const Stretch& stretch, int layer, const LayerView* view,
              const std::vector<int>& given_counts = {}) {
    const auto l = static_cast<std::size_t>(layer);
    const auto start = std::chrono::steady_clock::now();
    LayerSelection& selection = job.selections[l];
    if (const auto* sets = std::get_if<SetsOf>(&stretch.plan().allocate)) {
      const LayerSelection& taken = jobs_[static_cast<std::size_t>(job.counted)].selections[l];
      selection = with_changed_rows(taken, *sets, conditions_.layers[l]);
      job.seconds[l].select += seconds_since(start);
      return;
    }
    const Scores scores = std::move(job.scores[l]);
    const std::vector<int> of_rows =
        given_counts.empty() ? counts(job, stretch, layer, scores, selection.set.rows()) : given_counts;
    for (int row = 0; row < selection.set.rows(); ++row) {
      const int count = std::min(of_rows[static_cast<std::size_t>(row)], prompt());
      const std::span<const double> of_row = scores ? scores->row(row) : std::span<const double>();
      enter_row(selection, row,
                choose_row(stretch.plan().select, prompt(), of_row, {count, stretch.by_rule, row}, view, job.name),
                count);
    }
    job.seconds[l].select += seconds_since(start);
    // Counts of several layers are held against their budget where they are made.
    const bool of_one_layer =
        has_budget(stretch.plan()) && (std::holds_alternative<Uniform>(stretch.plan().allocate) ||
                                       std::holds_alternative<WithinLayer>(stretch.plan().allocate));
    const long slots = std::accumulate(selection.granted.begin(), selection.granted.end(), 0L);
    const long allowed = static_cast<long>(selection.set.rows()) * job.budget;
    if (of_one_layer && slots > allowed) overspent(job, allowed, slots);
  }

  /// One set for the layer, within what the layer before leaves.
  void select_nested(Job& job, const Stretch& stretch, const LayerView& view) {
    const auto l = static_cast<std::size_t>(view.layer());
    const std::size_t number = static_cast<std::size_t>(view.layer() - stretch.of.first);
    const bool prunes_next = stretch.plan().nesting == Nesting::prunes_next;
    const std::vector<std::int32_t> before = number == 0 ? everything_ : job.nested;
    LayerSelection& selection = job.selections[l] = empty_selection(view, Heads::layer);
    const auto cut = [&](int count) {
      if (count >= static_cast<int>(before.size()))
        return choose_row(stretch.plan().select, before, {}, {count, stretch.by_rule}, nullptr, job.name);
      Residents residents{.positions = before, .seen = prompt()};
      const LayerView within(view, std::move(residents));
      const LayerView& seen = number == 0 ? view : within;
      const Matrix scores = scored(job, stretch, seen);
      report_scores(job, seen, scores);
      const auto start = std::chrono::steady_clock::now();
      Kept kept = choose_row(stretch.plan().select, before, scores.row(0), {count, stretch.by_rule}, &within, job.name);
      job.seconds[l].select = seconds_since(start);
      return kept;
    };
    if (prunes_next) {
      const int count = stretch.by_layer[number];
      enter_row(selection, 0, {before, stretch.by_rule.sinks, stretch.by_rule.recent}, count);
      if (number + 1 < stretch.by_layer.size()) job.nested = cut(stretch.by_layer[number + 1]).positions;
    } else {
      const Kept kept = cut(stretch.by_layer[number]);
      enter_row(selection, 0, kept, stretch.by_layer[number]);
      job.nested = kept.positions;
    }
  }

  /// Of several layers, [L][H].
  static void check_slots(const Job& job, const Plan& plan, const std::vector<std::vector<int>>& counts) {
    long slots = 0, allowed = 0;
    for (const std::vector<int>& of_layer : counts) {
      slots += std::accumulate(of_layer.begin(), of_layer.end(), 0L);
      allowed += static_cast<long>(of_layer.size()) * job.budget;
    }
    if (has_budget(plan) && slots > allowed) overspent(job, allowed, slots);
  }

  [[noreturn]] static void overspent(const Job& job, long allowed, long slots) {
    throw Error{Refusal::internal, job.name, "overspends its budget", fmt::format("at most {} slots", allowed),
                std::to_string(slots)};
  }

  void select_after_walk(Job& job) {
    for (const Stretch& stretch : job.stretches) {
      if (keeps_everything(stretch.plan(), job.budget, prompt())) continue;
      const int end = stretch.of.first + stretch.of.count;
      if (counts_come_later(job, stretch)) allocate_across(job, stretch);
      for (int l = stretch.of.first; l < end; ++l)
        if (const int source = stretch.source_of(l); source != l)
          job.selections[static_cast<std::size_t>(l)] = job.selections[static_cast<std::size_t>(source)];
    }
  }

  void allocate_across(Job& job, const Stretch& stretch) {
    const auto first = static_cast<std::size_t>(stretch.of.first);
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::vector<int>> counts_of_layers;
    std::vector<const Matrix*> scores;
    for (const Scores& of_layer : std::span(job.scores).subspan(first, static_cast<std::size_t>(stretch.of.count)))
      scores.push_back(of_layer.get());
    if (const auto* counts = std::get_if<CountsOf>(&stretch.plan().allocate);
        counts != nullptr && counts->over_layers) {
      std::int64_t slots = 0;
      for (int l = stretch.of.first; l < stretch.of.first + stretch.of.count; ++l) {
        const std::vector<int> of_layer = counted(job, l);
        slots += std::accumulate(of_layer.begin(), of_layer.end(), std::int64_t{0});
      }
      counts_of_layers = counts->divide(slots, scores);
    }
    if (const auto* across = std::get_if<AcrossLayers>(&stretch.plan().allocate)) {
      counts_of_layers = (*across)(division(stretch, job.budget), scores);
      check_slots(job, stretch.plan(), counts_of_layers);
    }
    job.seconds[first].select += seconds_since(start);
    for (int l = stretch.of.first; l < stretch.of.first + stretch.of.count; ++l)
      if (stretch.is_source(l))
        choose(job, stretch, l, nullptr,
               counts_of_layers.empty() ? std::vector<int>{}
                                        : counts_of_layers[static_cast<std::size_t>(l - stretch.of.first)]);
  }

  /// What the store of the layer's plan makes of a selection. `paired`: layers that this one is stored with.
  Measured prepared(const Job& job, const LayerView& view, const std::map<int, PairedLayer>& paired) const {
    const LayerSelection& selection = job.selections[static_cast<std::size_t>(view.layer())];
    const Store& store = job.stretch(view.layer()).plan().store;
    Measured measured{&job, &selection};
    const bool nothing_moves = !selection.differs_by_query() && keeps_all(selection.set);
    if (const auto* transformed = std::get_if<Transformed>(&store))
      measured.stored = transformed->store(
          view, selection.set,
          transformed->paired_with ? paired.at(partner_of(job.stretch(view.layer()).of, view.layer())).partner
                                   : Partner{view.layer(), view.tensors()});
    else if (std::holds_alternative<CachePositions>(store) && !nothing_moves && !selection.slots.empty())
      measured.stored = std::make_unique<StoredLayer>(in_slot_order(view, selection));
    else if (std::holds_alternative<CachePositions>(store) && !nothing_moves)
      measured.positions = Positions::cache;
    return measured;
  }

  void report_and_measure(const LayerView& view, bool second_walk, const std::map<int, PairedLayer>& paired) {
    const auto l = static_cast<std::size_t>(view.layer());
    std::vector<Measured> to_measure;
    for (Job& job : jobs_) {
      if (job.number == no_cell || job.two_walks != second_walk) continue;
      Measured cell{};
      guarded(job, [&] {
        if (const auto* reads = std::get_if<Reads>(&job.stretch(view.layer()).plan().schedule);
            reads != nullptr && job.budget < prompt())
          job.selections[l].reads = reads->of_layer(view, job.budget);
        cell = prepared(job, view, paired);
      });
      if (job.failure) continue;
      const bool changes = std::holds_alternative<Transformed>(job.stretch(view.layer()).plan().store);
      sink_.selected(view, job.number, *cell.selection, changes ? cell.stored.get() : nullptr, job.seconds[l]);
      if (job.cell->measure) to_measure.push_back(std::move(cell));
    }
    if (!to_measure.empty()) measure(view, to_measure);
  }

  void measure(const LayerView& view, std::vector<Measured>& to_measure) {
    std::vector<int> cells;
    MomentParts parts;
    for (const Measured& cell : to_measure) {
      cells.push_back(cell.job->number);
      parts.add(*cell.job->cell->measure);
    }
    const std::span<const std::int32_t> queries = conditions_.eval_queries;
    for (std::size_t first = 0; first < queries.size(); first += query_block) {
      poll();
      const std::size_t count = std::min<std::size_t>(query_block, queries.size() - first);
      const std::span<const std::int32_t> block = queries.subspan(first, count);
      std::vector<KeptSets> sets;
      for (Measured& cell : to_measure) {
        cell.by_query.clear();
        if (cell.selection->differs_by_query())
          for (const std::int32_t query : block) cell.by_query.push_back(cell.selection->seen_by(query));
        sets.push_back(cell.by_query.empty() ? KeptSets(&cell.selection->set, 1) : KeptSets(cell.by_query));
      }
      std::map<std::size_t, OutputVectors> of_general;
      for (std::size_t i = 0; i < to_measure.size(); ++i) {
        if (!to_measure[i].general()) continue;
        poll();
        OutputVectors* outputs = parts.vectors ? &of_general[i] : nullptr;
        sink_.compared(view, cells[i], static_cast<int>(first), static_cast<int>(count),
                       general_comparison(view, to_measure[i], block, sets[i], outputs));
      }
      KeptMoments moments = backend_.kept_moments(view.tensors(), block, prompt(), sets, parts);
      for (const auto& [i, outputs] : of_general)
        std::ranges::copy(outputs.errors, moments.outputs.errors.data() + i * outputs.errors.size());
      sink_.measured(view, cells, static_cast<int>(first), static_cast<int>(count), moments);
      for (std::size_t i = 0; i < to_measure.size(); ++i)
        if (!to_measure[i].general()) cross_check(view, to_measure[i], sets[i], first, block);
    }
  }

  std::vector<Comparison> general_comparison(const LayerView& view, const Measured& cell,
                                             std::span<const std::int32_t> queries, KeptSets sets,
                                             OutputVectors* outputs) const {
    return backend_.compare_attention(view.tensors(), cell.stored ? cell.stored->tensors : view.tensors(),
                                      cell.positions, queries, prompt(), sets, outputs);
  }

  /// One query of each cell in one query head of one layer takes the general path too, where it lies in the block just
  /// measured.
  void cross_check(const LayerView& view, const Measured& cell, KeptSets sets, std::size_t first,
                   std::span<const std::int32_t> block) {
    // By the cell's own number, so that another run, with other cells beside it, compares the same.
    std::uint64_t rest = cell.job->cell->checked_at;
    const auto next = [&rest](std::size_t count) {
      const std::size_t one = rest % count;
      rest /= count;
      return one;
    };
    if (static_cast<int>(next(static_cast<std::size_t>(view.layers()))) != view.layer()) return;
    const auto head = static_cast<int>(next(static_cast<std::size_t>(view.query_heads())));
    const std::size_t query = next(conditions_.eval_queries.size());
    if (query < first || query >= first + block.size()) return;
    const std::size_t in_block = query - first;
    const LayerTensors of_head = one_head(view.tensors(), head);
    const KeptSet& set = sets[sets.size() == 1 ? 0 : in_block];
    const KeptSet held = set.only(set.row_of(head, view.group()));
    const std::vector<Comparison> compared = backend_.compare_attention(
        of_head, of_head, Positions::original, block.subspan(in_block, 1), prompt(), KeptSets(&held, 1));
    sink_.cross_checked(view, cell.job->number, static_cast<int>(query), head, compared.front());
  }

  /// Sets that no later layer and no other job reads are let go.
  void forget(int layer, bool second_walk) {
    for (std::size_t j = 0; j < jobs_.size(); ++j) {
      Job& job = jobs_[j];
      if (job.two_walks != second_walk) continue;
      bool reused = false;
      const Stretch& stretch = job.stretch(layer);
      for (int later = layer + 1; later < stretch.of.first + stretch.of.count; ++later)
        reused = reused || stretch.source_of(later) == layer;
      const bool counted = std::ranges::any_of(
          jobs_, [&](const Job& other) { return other.two_walks && other.counted == static_cast<int>(j); });
      if (!reused && !counted) job.selections[static_cast<std::size_t>(layer)] = {};
    }
  }

  Backend& backend_;
  const Trace& trace_;
  const Conditions& conditions_;
  Sink& sink_;
  const std::function<bool()>& interrupted_;
  ObservableStore* store_;
  std::vector<std::int32_t> everything_;    // positions of the prompt
  std::vector<std::int32_t> queries_read_;  // positions
  MarkedQuestion question_;
  std::vector<Job> jobs_;
  std::map<ScoreKey, CostedScores> scores_;  // of the layer under way
};

}  // namespace

bool divides_over_layers(const Allocator& allocate) {
  const auto* counts = std::get_if<CountsOf>(&allocate);
  return std::holds_alternative<AcrossLayers>(allocate) || (counts != nullptr && counts->over_layers);
}

ScoreKey score_key(const Plan& plan, const Scoring& how) {
  const Scoring read = told(plan, how);
  return {plan.score.name, read.grouping.heads, read.grouping.aggregate, read.recent,
          read.budget,     read.sinks,          read.observing,          read.window_end};
}

std::vector<float> keys_at_slots(const LayerView& view, const LayerSelection& selection) {
  const TensorView& keys = view.tensors().k;
  const KeptSet& set = selection.set;
  const int heads = set.heads() == Heads::query ? view.query_heads() : keys.heads;
  TensorView shape = keys;
  shape.heads = heads;
  std::vector<float> moved(static_cast<std::size_t>(heads) * static_cast<std::size_t>(keys.tokens) *
                           static_cast<std::size_t>(keys.dim));
  for (int head = 0; head < heads; ++head) {
    for (int token = 0; token < keys.tokens; ++token) {
      const std::span<float> key = row_of(moved, shape, head, token);
      const std::byte* const captured = keys.row(head * keys.heads / heads, token);
      for (std::size_t i = 0; i < key.size(); ++i) key[i] = load(captured, keys.dtype, i);
    }
    const std::vector<std::int32_t> slots =
        selection.in_slot_order(set.row_of(head * (view.query_heads() / heads), view.group()));
    const auto count = static_cast<int>(slots.size());
    for (int slot = 0; slot < count; ++slot) {
      const std::int32_t token = slots[static_cast<std::size_t>(slot)];
      rotate(view.tensors().rope, view.prompt() - count + slot - token, row_of(moved, shape, head, token));
    }
  }
  return moved;
}

void apply_store(Backend& backend, const Trace& trace, const Conditions& conditions, const Cell& cell, int layer,
                 const StoreApplied& heard) {
  const auto layers = static_cast<int>(conditions.layers.size());
  const int stored = conditions.layers.at(static_cast<std::size_t>(layer));
  const std::vector<LayerPlan> plans = cell.policy.plans(layers);
  const LayerPlan& of_range =
      *std::ranges::find_if(plans, [&](const LayerPlan& one) { return layer < one.first + one.count; });
  const Plan& plan = of_range.plan;
  const auto* transformed = std::get_if<Transformed>(&plan.store);
  // An archived layer is put together in place of the one before it.
  std::optional<PairedLayer> paired;
  if (transformed != nullptr && transformed->paired_with) {
    const int partner = partner_of(of_range, layer);
    paired.emplace(trace, partner, conditions.layers.at(static_cast<std::size_t>(partner)));
  }
  const LayerTensors tensors = trace.layer(stored);
  HeldLayer held(backend, tensors);
  held.hold(needs_of(plan.store).all_queries);
  const TensorView projection = needs_of(plan.store).projection ? output_projection(trace, stored) : TensorView{};
  const LayerView view(
      backend, tensors,
      {layer, layers, stored, conditions.boundary, marked_question(trace, conditions.boundary), projection},
      conditions.eval_queries);
  LayerSelection selection = cell.known.at(static_cast<std::size_t>(layer));
  if (const auto* reads = std::get_if<Reads>(&plan.schedule); reads != nullptr && cell.budget < conditions.boundary)
    selection.reads = reads->of_layer(view, cell.budget);
  std::unique_ptr<StoredLayer> changed;
  if (transformed != nullptr)
    changed = transformed->store(view, selection.set, paired ? paired->partner : Partner{view.layer(), view.tensors()});
  heard(view, selection, changed.get(), std::holds_alternative<CachePositions>(plan.store));
  trace.require_unchanged();
  trace.release(stored);
}

void replay(Backend& backend, const Trace& trace, const Conditions& conditions, std::span<const Cell> cells, Sink& sink,
            const std::function<bool()>& interrupted, ObservableStore* store) {
  Replay(backend, trace, conditions, cells, sink, interrupted, store).run();
}

}  // namespace kvreplay
