// Replays policies over a small trace and keeps everything that the engine hands out.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "replay/replay.h"
#include "tests/tested_backend.h"
#include "trace/synth.h"
#include "trace/trace.h"

namespace kvreplay {

/// A file of this process alone, gone with the object.
class TemporaryTrace {
 public:
  explicit TemporaryTrace(SynthOptions options)
      : path_(std::filesystem::temp_directory_path() /
              ("kvreplay-" + std::to_string(::getpid()) + "-" + std::to_string(next_++) + ".h5")) {
    options.existing = Existing::replace;
    synthesise(options, path_);
  }
  TemporaryTrace(const TemporaryTrace&) = delete;
  TemporaryTrace& operator=(const TemporaryTrace&) = delete;
  ~TemporaryTrace() { std::filesystem::remove(path_); }
  Trace open() const { return Trace::open(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  static inline int next_ = 0;
  std::filesystem::path path_;
};

/// What a store that changes tokens gave back.
struct StoredNumbers {
  std::vector<float> keys;    // [Hkv, T, d]
  std::vector<float> values;  // [Hkv, T, d]
  double bytes = 0;
};

struct RecordedRun : Sink {
  using CellLayer = std::pair<int, int>;  // (cell, treated layer)
  std::map<CellLayer, LayerSelection> selections;
  std::map<CellLayer, StoredNumbers> stored;                 // of stores that change tokens
  std::map<CellLayer, std::vector<Moments>> moments;         // [Hq, queries]: one block of queries in these tests
  std::map<int, std::vector<Moments>> full;                  // layer
  std::map<int, Matrix> eval_attention;                      // layer
  std::map<CellLayer, std::vector<Comparison>> compared_at;  // [Hq, queries] of cells that move, change or weigh tokens
  std::map<CellLayer, std::vector<Comparison>> general;      // [1] at one query and head of the others
  std::map<CellLayer, std::pair<int, int>> general_at;       // (query, head)
  std::map<CellLayer, Matrix> scores;                        // [H, P]
  std::map<std::pair<int, int>, Matrix> observables;         // (layer, 0 window(2) | 1 cumulative)

  void failed(int, const Error& error) override { throw error; }
  void layer(const LayerView& view, Backend&) override {
    eval_attention[view.layer()] = view.eval_attention();
    observables[{view.layer(), 0}] = view.window_attention(2);
    observables[{view.layer(), 1}] = view.cumulative_attention();
  }
  void scored(const LayerView& view, int cell, const Matrix& of_layer) override {
    scores[{cell, view.layer()}] = of_layer;
  }
  void selected(const LayerView& view, int cell, const LayerSelection& selection, const StoredLayer* changed,
                const CellSeconds&) override {
    LayerSelection& kept = selections[{cell, view.layer()}] = selection;
    if (selection.reads.at) {  // while the layer is there
      std::map<int, KeptSet> sets;
      for (const std::int32_t t : view.eval_queries()) sets[t] = selection.reads.at(t);
      kept.reads.at = [sets](int query) { return sets.at(query); };
    }
    if (selection.reads.weights) {
      std::map<std::pair<int, int>, std::vector<double>> log_weights;  // (query head, query): [T]
      for (int h = 0; h < view.query_heads(); ++h)
        for (const std::int32_t t : view.eval_queries()) {
          std::vector<double>& of_query = log_weights[{h, t}];
          of_query.resize(static_cast<std::size_t>(view.tensors().k.tokens));
          selection.reads.weights(h, t, 0, of_query);
        }
      kept.reads.weights = [log_weights](int h, int t, int first, std::span<double> logits) {
        for (std::size_t i = 0; i < logits.size(); ++i)
          logits[i] += log_weights.at({h, t})[static_cast<std::size_t>(first) + i];
      };
    }
    if (changed != nullptr) stored[{cell, view.layer()}] = {changed->keys, changed->values, changed->bytes};
  }
  void compared(const LayerView& view, int cell, int, int, std::span<const Comparison> comparisons) override {
    compared_at[{cell, view.layer()}].assign(comparisons.begin(), comparisons.end());
  }
  void measured(const LayerView& view, std::span<const int> cells, int, int count, const KeptMoments& block) override {
    const std::size_t size = static_cast<std::size_t>(count) * static_cast<std::size_t>(view.query_heads());
    full[view.layer()] = block.full;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const auto begin = block.kept.begin() + static_cast<std::ptrdiff_t>(i * size);
      moments[{cells[i], view.layer()}].assign(begin, begin + static_cast<std::ptrdiff_t>(size));
    }
  }
  void cross_checked(const LayerView& view, int cell, int query, int head, const Comparison& comparison) override {
    general[{cell, view.layer()}] = {comparison};
    general_at[{cell, view.layer()}] = {query, head};
  }

  double recall(int cell, int layer) const {
    double sum = 0;
    const std::vector<Moments>& all = moments.at({cell, layer});
    for (std::size_t i = 0; i < all.size(); ++i) sum += all[i].mass / full.at(layer)[i].mass;
    return sum / static_cast<double>(all.size());
  }
};

inline Conditions default_conditions(const Trace& trace) {
  const int prompt = boundary(trace, "prompt");
  return {prompt, eval_queries(trace, "continuation"), treated_layers(trace, false)};
}

inline RecordedRun record_cells(Backend& backend, const Trace& trace, const std::vector<Cell>& cells,
                                const Conditions& conditions) {
  for (const Cell& cell : cells) check_policy(trace, conditions, cell.policy, cell.budget, cell.of_seen);
  RecordedRun run;
  replay(backend, trace, conditions, cells, run);
  return run;
}

inline RecordedRun record_cells(Backend& backend, const Trace& trace, const std::vector<Cell>& cells) {
  return record_cells(backend, trace, cells, default_conditions(trace));
}

inline RecordedRun record_cells(const Trace& trace, const std::vector<Cell>& cells, int threads) {
  return record_cells(*tested_backend(threads), trace, cells);
}

inline RecordedRun record(const Trace& trace, const std::vector<std::string>& policies, int budget, int threads = 1) {
  std::vector<Cell> cells;
  for (const std::string& policy : policies) cells.push_back({ConfiguredPolicy::parse(policy), budget});
  return record_cells(trace, cells, threads);
}

}  // namespace kvreplay
