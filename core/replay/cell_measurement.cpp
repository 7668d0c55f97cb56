#include "replay/cell_measurement.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "attention/softmax_keys.h"
#include "float_types.h"
#include "profile.h"
#include "replay/stored_cells.h"

namespace kvreplay {
namespace {

/// Eval queries measured at once. Fixed, because the shape of a product can decide its last bits.
constexpr int query_block = 64;

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

/// `count` query heads of a group from `first` on, and the KV head that they read.
LayerTensors heads_of_layer(LayerTensors tensors, int first, int count) {
  const int kv_head = first / tensors.group();
  if (!tensors.sinks.empty())
    tensors.sinks = tensors.sinks.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
  tensors.q = tensors.q.heads_from(first, count);
  tensors.k = tensors.k.heads_from(kv_head);
  tensors.v = tensors.v.heads_from(kv_head);
  return tensors;
}

/// The sets that the query heads of one KV head read.
std::vector<KeptSet> of_kv_head(KeptSets sets, int kv_head, int group) {
  std::vector<KeptSet> all;
  for (const KeptSet& set : sets) {
    const int rows = set.heads() == Heads::query ? group : 1, first = set.heads() == Heads::layer ? 0 : kv_head * rows;
    KeptSet& own = all.emplace_back(set.heads(), rows, set.tokens());
    for (int row = 0; row < rows; ++row) own.keep(row, set.row_bits(first + row));
  }
  return all;
}

}  // namespace

void CellMeasurement::measure(const LayerView& view, bool second_walk, const std::map<int, PairedLayer>& paired) {
  const auto l = static_cast<std::size_t>(view.layer());
  find_reads(view, second_walk);
  std::vector<Measured> to_measure;
  for (Job& job : jobs_.all()) {
    if (!job.is_cell() || job.two_walks != second_walk) continue;
    Measured cell{};
    jobs_.guarded(job, [&] {
      const auto same =
          job.same >= 0 ? std::ranges::find(to_measure, &jobs_.same(job), &Measured::job) : to_measure.end();
      if (same != to_measure.end()) {
        cell = *same;
        cell.job = &job;
        job.selections[l].reads = same->selection->reads;
        cell.selection = &job.selections[l];
        return;
      }
      cell = prepared(job, view, paired);
    });
    if (job.failure) continue;
    const bool changes = job.range(view.layer()).plan.store->changes_tokens();
    const std::unique_ptr<StoredLayer> at_end = cell.evolving ? cell.evolving->before(of_.prompt()) : nullptr;
    const StoredLayer* const changed = at_end ? at_end.get() : changes ? cell.stored.get() : nullptr;
    of_.sink.selected(view, job.number, *cell.selection, changed, job.seconds[l]);
    if (job.cell->measure) to_measure.push_back(std::move(cell));
  }
  if (!to_measure.empty()) measure_in_blocks(view, to_measure);
}

void CellMeasurement::find_reads(const LayerView& view, bool second_walk) {
  std::map<std::pair<std::string, std::string>, std::vector<Job*>> of_policies;  // by name and parameters
  for (Job& job : jobs_.all()) {
    if (!job.is_cell() || job.two_walks != second_walk || job.same >= 0) continue;
    if (job.range(view.layer()).plan.schedule->decided() == Decision::never)
      of_policies[{job.cell->policy.name(), job.cell->policy.params()}].push_back(&job);
  }
  for (const auto& [policy, jobs] : of_policies) {
    const Timed timed(Work::select, policy.first);
    std::vector<int> budgets;
    for (const Job* job : jobs) budgets.push_back(job->budget);
    std::vector<QueryReads> reads;
    for (std::size_t i = 0; i < jobs.size(); ++i)
      jobs_.guarded(*jobs[i], [&] {
        if (reads.empty()) reads = reads_of(jobs[i]->range(view.layer()).plan, view, budgets);
        jobs[i]->selections[static_cast<std::size_t>(view.layer())].reads = reads[i];
      });
  }
}

/// What the store of the layer's plan makes of a selection.
CellMeasurement::Measured CellMeasurement::prepared(const Job& job, const LayerView& view,
                                                    const std::map<int, PairedLayer>& paired) const {
  const Timed timed(Work::store, job.policy());
  const LayerSelection& selection = job.selections[static_cast<std::size_t>(view.layer())];
  const PlannedRange& range = job.range(view.layer());
  const Store& store = *range.plan.store;
  Measured measured{&job, &selection};
  const bool moves = store.moves_tokens && (selection.differs_by_query() || !keeps_all(selection.set));
  if (moves && selection.slots.empty()) measured.positions = Positions::cache;
  if (store.evolve && selection.changes_with_time())
    measured.evolving = store.evolve(view, selection);
  else if (store.changes_tokens())
    measured.stored = store.apply(view, selection.set,
                                  store.pairs_layers() ? paired.at(range.partner_of(view.layer())).partner
                                                       : Partner{view.layer(), view.tensors(), range.first});
  else if (moves && !selection.slots.empty())
    measured.stored = std::make_unique<StoredLayer>(in_slot_order(view, selection));
  return measured;
}

void CellMeasurement::measure_in_blocks(const LayerView& view, std::vector<Measured>& to_measure) {
  std::vector<int> cells;
  MomentParts parts;
  for (const Measured& cell : to_measure) {
    cells.push_back(cell.job->number);
    parts.add(*cell.job->cell->measure);
  }
  const std::span<const std::int32_t> queries = of_.conditions.eval_queries;
  for (std::size_t first = 0; first < queries.size(); first += query_block) {
    of_.poll();
    const std::size_t count = std::min<std::size_t>(query_block, queries.size() - first);
    const std::span<const std::int32_t> block = queries.subspan(first, count);
    std::vector<KeptSets> sets;
    for (Measured& cell : to_measure) {
      cell.by_query.clear();
      if (cell.selection->differs_by_query())
        for (const std::int32_t query : block) cell.by_query.push_back(cell.selection->seen_by(query));
      sets.push_back(cell.by_query.empty() ? KeptSets(&cell.selection->set, 1) : KeptSets(cell.by_query));
    }
    of_.poll();
    const std::map<std::size_t, ComparedSet> compared = compare(view, to_measure, sets, block, parts.vectors);
    for (const auto& [i, one] : compared)
      of_.sink.compared(view, cells[i], static_cast<int>(first), static_cast<int>(count), one.comparisons);
    std::optional<Timed> timed(std::in_place, Work::moments);
    timed->counts([&] {
      const int dims = view.tensors().q.dim + (parts.outputs ? view.tensors().v.dim : 0);
      return visible_pairs(view.tensors(), block, view.tensors().k.tokens) * dims;
    });
    KeptMoments moments = kept_moments(view, block, sets, parts);
    timed.reset();
    for (const auto& [i, one] : compared)
      std::ranges::copy(one.outputs.errors, moments.outputs.errors.data() + i * one.outputs.errors.size());
    of_.sink.measured(view, cells, static_cast<int>(first), static_cast<int>(count), moments);
    for (std::size_t i = 0; i < to_measure.size(); ++i)
      if (!to_measure[i].is_general()) cross_check(view, to_measure[i], sets[i], first, block);
  }
}

/// Of sampled KV heads one after the other.
KeptMoments CellMeasurement::kept_moments(const LayerView& view, std::span<const std::int32_t> queries,
                                          std::span<const KeptSets> sets, MomentParts parts) const {
  const std::vector<std::vector<int>>& sampled = of_.conditions.sampled_heads;
  if (sampled.empty()) return of_.backend.kept_moments(view.tensors(), queries, of_.prompt(), sets, parts);
  const std::size_t of_head = static_cast<std::size_t>(view.group()) * queries.size();
  const std::size_t of_layer = static_cast<std::size_t>(view.kv_heads()) * of_head;
  KeptMoments all{.parts = parts, .full = std::vector<Moments>(of_layer), .kept = {}, .outputs = {}};
  all.kept.resize(sets.size() * of_layer);
  for (const int head : sampled[static_cast<std::size_t>(view.layer())]) {
    std::vector<std::vector<KeptSet>> own;
    for (const KeptSets of_cell : sets) own.push_back(of_kv_head(of_cell, head, view.group()));
    const KeptMoments some =
        of_.backend.kept_moments(heads_of_layer(view.tensors(), head * view.group(), view.group()), queries,
                                 of_.prompt(), std::vector<KeptSets>(own.begin(), own.end()), parts);
    const std::size_t place = static_cast<std::size_t>(head) * of_head;
    std::ranges::copy(some.full, all.full.begin() + static_cast<std::ptrdiff_t>(place));
    for (std::size_t cell = 0; cell < sets.size(); ++cell)
      std::copy_n(some.kept.begin() + static_cast<std::ptrdiff_t>(cell * of_head), of_head,
                  all.kept.begin() + static_cast<std::ptrdiff_t>(cell * of_layer + place));
  }
  return all;
}

bool CellMeasurement::is_measured(const LayerView& view, int query_head) const {
  const std::vector<std::vector<int>>& sampled = of_.conditions.sampled_heads;
  return sampled.empty() ||
         std::ranges::binary_search(sampled[static_cast<std::size_t>(view.layer())], query_head / view.group());
}

std::map<std::size_t, ComparedSet> CellMeasurement::compare(const LayerView& view, std::span<const Measured> cells,
                                                            std::span<const KeptSets> sets,
                                                            std::span<const std::int32_t> queries, bool vectors) const {
  std::vector<ChangedSet> changed;
  std::map<std::size_t, std::size_t> number;  // of a general cell's set among them
  std::map<const Job*, std::size_t> of_job;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const Measured& cell = cells[i];
    if (!cell.is_general()) continue;
    const Job& job = *cell.job;
    const auto same = job.same >= 0 ? of_job.find(&jobs_.same(job)) : of_job.end();
    number[i] = of_job[&job] = same != of_job.end() ? same->second : changed.size();
    if (number[i] == changed.size())
      changed.push_back({cell.stored ? cell.stored->tensors : view.tensors(), cell.positions, sets[i],
                         cell.evolving.get(),
                         cell.selection->reads.weights ? &cell.selection->reads.weights : nullptr});
  }
  if (changed.empty()) return {};
  Timed timed(Work::comparison);
  timed.counts([&] {  // attention and outputs, of the tokens as they were and as they are stored
    const LayerTensors& layer = view.tensors();
    return static_cast<double>(changed.size() + 1) * visible_pairs(layer, queries, layer.k.tokens) *
           (layer.q.dim + layer.v.dim);
  });
  const std::vector<ComparedSet> found =
      of_.backend.compare_sets(view.tensors(), changed, queries, of_.prompt(), vectors);
  std::map<std::size_t, ComparedSet> compared;
  for (const auto& [cell, set] : number) compared[cell] = found[set];
  return compared;
}

/// One query of each cell in one query head of one layer takes the general path too, where it lies in the block just
/// measured.
void CellMeasurement::cross_check(const LayerView& view, const Measured& cell, KeptSets sets, std::size_t first,
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
  const std::size_t query = next(of_.conditions.eval_queries.size());
  if (query < first || query >= first + block.size() || !is_measured(view, head)) return;
  const std::size_t in_block = query - first;
  const LayerTensors of_head = heads_of_layer(view.tensors(), head, 1);
  const KeptSet& set = sets[sets.size() == 1 ? 0 : in_block];
  const KeptSet held = set.only(set.row_of(head, view.group()));
  const std::vector<Comparison> compared = of_.backend.compare_attention(
      of_head, of_head, Positions::original, block.subspan(in_block, 1), of_.prompt(), KeptSets(&held, 1));
  of_.sink.cross_checked(view, cell.job->number, static_cast<int>(query), head, compared.front());
}

}  // namespace kvreplay
