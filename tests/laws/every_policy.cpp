// Laws that hold for every registered policy and for many put together from parts: a new file in core/policies/papers
// joins by itself.

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
#include <optional>

#include "all_policies.h"
#include "naive_attention.h"
#include "recorded_run.h"
#include "replay/sample.h"
#include "trace/writer.h"

namespace kvreplay {
namespace {

SynthOptions shape(const std::string& kind, int layers, int query_heads, int kv_heads, int head_dim, int prompt,
                   int continuation) {
  SynthOptions options = synth_defaults(kind);
  options.layers = layers;
  options.query_heads = query_heads;
  options.kv_heads = kv_heads;
  options.head_dim = head_dim;
  options.prefill = prompt;
  options.continuation = continuation;
  options.rope_base = 100.0;
  options.repeated = 37;
  return options;
}

struct TraceCase {
  TraceCase(std::string title, const SynthOptions& options)
      : name(std::move(title)), file(options), trace(file.open()) {}
  std::string name;
  TemporaryTrace file;
  Trace trace;
};

std::deque<TraceCase> cases() {
  SynthOptions grouped = shape("gaussian", 3, 6, 2, 32, 97, 9);
  grouped.logit_softcap = 5.0;
  SynthOptions sliding = shape("gaussian", 4, 4, 2, 16, 60, 6);
  sliding.sliding_window = {7, 0};
  std::deque<TraceCase> all;
  all.emplace_back("grouped", grouped);
  all.emplace_back("multi_query", shape("sinks", 2, 4, 1, 24, 64, 5));
  all.emplace_back("one_layer", shape("integer", 1, 2, 2, 8, 50, 3));
  all.emplace_back("shorter_than_window", shape("gaussian", 2, 4, 2, 16, 5, 2));
  all.emplace_back("repeated_tokens", shape("repeat", 2, 4, 2, 16, 80, 4));
  all.emplace_back("one_token", shape("gaussian", 2, 2, 1, 8, 1, 1));
  all.emplace_back("sliding", sliding);
  SynthOptions sink_logits = shape("gaussian", 3, 8, 2, 16, 70, 5);
  sink_logits.sinks = true;
  sink_logits.value_dim = 12;
  sink_logits.chunk = {0, 11, 0};
  all.emplace_back("sink_logits", sink_logits);
  SynthOptions latent = shape("gaussian", 2, 4, 1, 24, 64, 5);
  latent.value_is_key = true;
  latent.value_dim = 16;
  all.emplace_back("keys_as_values", latent);
  SynthOptions shapes = shape("gaussian", 3, 4, 2, 16, 70, 5);
  shapes.query_heads = {4, 6, 3};
  shapes.kv_heads = {2, 3, 1};
  shapes.head_dim = {16, 24, 10};
  shapes.value_dim = {16, 8, 20};
  all.emplace_back("layers_of_different_shape", shapes);
  SynthOptions shared = shape("gaussian", 4, 4, 2, 16, 70, 5);
  shared.query_heads = {4, 4, 6, 4};
  shared.kv_source = {0, 1, 1, 0};
  all.emplace_back("shared_keys", shared);
  return all;
}

/// Written once: that takes longer than most laws.
const std::deque<TraceCase>& traces() {
  static const std::deque<TraceCase> all = cases();
  return all;
}

/// Policies that may keep fewer tokens than B a layer and head on average: heavy hitters may lie in the recent part
/// too; chunks leave slots empty; FINCH's code rounds down block by block.
bool may_underspend(const std::string& policy) {
  return policy.find("overlap=true") != std::string::npos || policy.find("gap=true") != std::string::npos ||
         policy.find("fill=none") != std::string::npos || policy.find("window_mode=replace") != std::string::npos ||
         policy.find("rate=code") != std::string::npos;
}

bool all_layers_have_a_budget(const ConfiguredPolicy& policy, int layers) {
  return std::ranges::all_of(policy.plans(layers), [](const LayerPlan& part) { return has_budget(part.plan); });
}

/// A rolling window names what the last prompt query sees; other schedules, what is held after it.
bool is_rolling(const std::string& policy) { return policy.find("rolling") != std::string::npos; }

KeptSet whole(KeptSet set) {
  for (int row = 0; row < set.rows(); ++row)
    for (int j = 0; j < set.tokens(); ++j) set.keep(row, j);
  return set;
}

std::size_t at(int head, int query, std::size_t queries) {
  return static_cast<std::size_t>(head) * queries + static_cast<std::size_t>(query);
}

class EveryPolicy : public testing::TestWithParam<std::string> {
 protected:
  /// Calls `check(trace, budget)` for all traces and some budgets that the policy can be replayed with.
  template <class Check>
  static void on_all(Check check) {
    const ConfiguredPolicy policy = ConfiguredPolicy::parse(GetParam());
    int served = 0;
    for (const TraceCase& one : traces()) {
      SCOPED_TRACE(one.name);
      for (const int budget : {1, 3, 12, 40, 1000}) {
        SCOPED_TRACE("budget " + std::to_string(budget));
        if (!fits(one.trace, policy, budget)) continue;
        ++served;
        check(one.trace, budget);
      }
    }
    EXPECT_GE(served, 3) << "some trace has room for it";
  }

  /// Values that the variant gives, its layers or its question may be too large for a trace.
  static bool fits(const Trace& trace, const ConfiguredPolicy& policy, int budget) {
    try {
      check_policy(trace, default_conditions(trace), policy, budget);
    } catch (const Error& error) {
      const bool is_plain = policy.name() == GetParam();
      const bool changes_latents = !trace.header().stores_values() && error.where().ends_with("value_is_key");
      const bool combines_layers = error.where().ends_with("/model/heads");
      const bool reads_passes_of_readers = error.where().ends_with("/model/kv_source");
      EXPECT_TRUE(!is_plain || changes_latents || combines_layers || reads_passes_of_readers || GetParam() == "finch")
          << GetParam() << " has no values that could be too large";
      return false;
    }
    return true;
  }
};

TEST_P(EveryPolicy, SpendsItsBudgetSortedAndUnique) {
  on_all([](const Trace& trace, int budget) {
    const RecordedRun run = record(trace, {GetParam()}, budget);
    const Conditions conditions = default_conditions(trace);
    const auto layers = static_cast<int>(conditions.layers.size());
    const bool bound = all_layers_have_a_budget(ConfiguredPolicy::parse(GetParam()), layers);
    double slots = 0;  // a row, on average, summed over layers
    for (int l = 0; l < layers; ++l) {
      const LayerSelection& selection = run.selections.at({0, l});
      long of_layer = 0;
      for (int row = 0; row < selection.set.rows(); ++row) {
        const std::vector<std::int32_t> kept = selection.set.positions(row);
        EXPECT_TRUE(std::ranges::adjacent_find(kept, std::greater_equal{}) == kept.end());
        EXPECT_TRUE(kept.empty() || (kept.front() >= 0 && kept.back() < conditions.boundary));
        const auto r = static_cast<std::size_t>(row);
        if (bound) {
          EXPECT_LE(static_cast<int>(kept.size()), selection.granted[r]);
        }
        EXPECT_LE(selection.sinks[r] + selection.recent[r], static_cast<int>(kept.size()));
        of_layer += static_cast<long>(kept.size());
      }
      slots += static_cast<double>(of_layer) / selection.set.rows();
    }
    if (!bound) return;
    const double allowed = static_cast<double>(layers) * std::min(budget, conditions.boundary);
    if (may_underspend(GetParam())) {
      EXPECT_LE(slots, allowed + 1e-9);
    } else {
      EXPECT_NEAR(slots, allowed, 1e-9);
    }
    if (budget >= conditions.boundary) {
      EXPECT_NEAR(slots, allowed, 1e-9) << "a budget of P or more keeps everything";
      for (const auto& [key, all] : run.moments)
        for (std::size_t i = 0; i < all.size(); ++i) {
          const std::vector<Comparison>& moved =
              run.compared_at.contains(key) ? run.compared_at.at(key) : std::vector<Comparison>{};
          EXPECT_EQ(all[i].mass, run.full.at(key.second)[i].mass);
          EXPECT_TRUE(!trace.header().sinks.empty() || all[i].mass == 1.0);
          if (!run.stored.contains(key)) {
            EXPECT_EQ(all[i].error_square, 0.0);
            EXPECT_TRUE(moved.empty()) << "nothing moves";
          }
        }
    }
  });
}

TEST_P(EveryPolicy, GivesTheSameBitsForAnyNumberOfThreads) {
  on_all([](const Trace& trace, int budget) {
    if (budget != 3 && budget != 40) return;
    const RecordedRun one = record(trace, {GetParam()}, budget, 1);
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    for (const int threads : {2, 3}) {
      SCOPED_TRACE(std::to_string(threads) + " threads");
      const RecordedRun more = record(trace, {GetParam()}, budget, threads);
      for (const auto& [key, selection] : one.selections) {
        const LayerSelection& other = more.selections.at(key);
        EXPECT_EQ(selection.set, other.set);
        EXPECT_EQ(selection.evicted_at, other.evicted_at);
        EXPECT_EQ(selection.slots, other.slots);
        EXPECT_TRUE(same(one.moments.at(key), more.moments.at(key)));
      }
      ASSERT_EQ(one.compared_at.size(), more.compared_at.size());
      for (const auto& [key, comparisons] : one.compared_at) EXPECT_TRUE(same(comparisons, more.compared_at.at(key)));
      for (const auto& [key, comparisons] : one.general) EXPECT_TRUE(same(comparisons, more.general.at(key)));
    }
  });
}

TEST_P(EveryPolicy, IsMeasuredTheSameAtSampledQueries) {
  on_all([](const Trace& trace, int budget) {
    if (budget != 3 && budget != 40) return;
    Conditions conditions = default_conditions(trace);
    const ConfiguredPolicy policy = ConfiguredPolicy::parse(GetParam());
    if (!why_no_sample_of_queries(policy, static_cast<int>(conditions.layers.size())).empty()) return;
    const RecordedRun all = record(trace, {GetParam()}, budget);
    const std::vector<std::int32_t> queries = conditions.eval_queries;
    std::vector<std::size_t> places;
    conditions.eval_queries.clear();
    for (std::size_t q = 0; q < queries.size(); q += q % 3 + 1) {
      places.push_back(q);
      conditions.eval_queries.push_back(queries[q]);
    }
    const RecordedRun some = record_cells(*tested_backend(1), trace, {{policy, budget}}, conditions);
    const auto expect_same = [&](const auto& of_all, const auto& of_some) {
      const std::size_t heads = of_all.size() / queries.size();
      ASSERT_EQ(of_some.size(), heads * places.size());
      for (std::size_t head = 0; head < heads; ++head)
        for (std::size_t i = 0; i < places.size(); ++i)
          EXPECT_EQ(std::memcmp(&of_all[head * queries.size() + places[i]], &of_some[head * places.size() + i],
                                sizeof(of_all[0])),
                    0);
    };
    for (const auto& [key, selection] : all.selections) {
      EXPECT_EQ(selection.set, some.selections.at(key).set);
      EXPECT_EQ(selection.evicted_at, some.selections.at(key).evicted_at);
      expect_same(all.moments.at(key), some.moments.at(key));
      expect_same(all.full.at(key.second), some.full.at(key.second));
    }
    for (const auto& [key, comparisons] : all.compared_at) expect_same(comparisons, some.compared_at.at(key));
  });
}

TEST_P(EveryPolicy, IsReplayedTheSameInSampledLayers) {
  on_all([](const Trace& trace, int budget) {
    if (budget != 3 && budget != 40) return;
    Conditions conditions = default_conditions(trace);
    const auto layers = static_cast<int>(conditions.layers.size());
    const ConfiguredPolicy policy = ConfiguredPolicy::parse(GetParam());
    if (layers < 2 || !why_no_sample_of_layers(policy, layers).empty()) return;
    const RecordedRun all = record(trace, {GetParam()}, budget);
    for (conditions.sampled_layers = {layers - 1}; conditions.sampled_layers.front() >= 0;
         --conditions.sampled_layers.front()) {
      const int layer = conditions.sampled_layers.front();
      SCOPED_TRACE("layer " + std::to_string(layer));
      const RecordedRun one = record_cells(*tested_backend(1), trace, {{policy, budget}}, conditions);
      ASSERT_EQ(one.selections.size(), 1U);
      const auto same = [](const auto& a, const auto& b) {
        return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
      };
      const RecordedRun::CellLayer key{0, layer};
      EXPECT_EQ(one.selections.at(key).set, all.selections.at(key).set);
      EXPECT_EQ(one.selections.at(key).evicted_at, all.selections.at(key).evicted_at);
      EXPECT_EQ(one.selections.at(key).granted, all.selections.at(key).granted);
      EXPECT_TRUE(same(one.moments.at(key), all.moments.at(key)));
      if (all.compared_at.contains(key)) {
        EXPECT_TRUE(same(one.compared_at.at(key), all.compared_at.at(key)));
      }
    }
  });
}

TEST_P(EveryPolicy, IsMeasuredTheSameInSampledHeads) {
  on_all([](const Trace& trace, int budget) {
    if (budget != 3 && budget != 40) return;
    Conditions conditions = default_conditions(trace);
    for (std::size_t l = 0; l < conditions.layers.size(); ++l) {
      std::vector<int>& heads = conditions.sampled_heads.emplace_back();
      for (int head = static_cast<int>(l) % 2; head < trace.header().shape(conditions.layers[l]).kv_heads; head += 2)
        heads.push_back(head);
    }
    const RecordedRun all = record(trace, {GetParam()}, budget);
    const std::vector<Cell> cells{{ConfiguredPolicy::parse(GetParam()), budget}};
    const RecordedRun some = record_cells(*tested_backend(1), trace, cells, conditions);
    const std::size_t queries = conditions.eval_queries.size();
    for (const auto& [key, selection] : all.selections) {
      EXPECT_EQ(selection.set, some.selections.at(key).set);
      const auto l = static_cast<std::size_t>(key.second);
      const LayerShape shape = trace.header().shape(conditions.layers[l]);
      const std::size_t of_head = static_cast<std::size_t>(shape.query_heads / shape.kv_heads) * queries;
      for (const int head : conditions.sampled_heads[l]) {
        const std::size_t begin = static_cast<std::size_t>(head) * of_head;
        const auto same = [&](const auto& a, const auto& b) {
          return std::memcmp(&a[begin], &b[begin], of_head * sizeof(a[0])) == 0;
        };
        EXPECT_TRUE(same(all.moments.at(key), some.moments.at(key)));
        EXPECT_TRUE(same(all.full.at(key.second), some.full.at(key.second)));
      }
      if (all.compared_at.contains(key)) {
        const std::vector<Comparison>&one = all.compared_at.at(key), &other = some.compared_at.at(key);
        EXPECT_EQ(std::memcmp(one.data(), other.data(), one.size() * sizeof(one[0])), 0);
      }
    }
  });
}

TEST_P(EveryPolicy, SelectsTheSameInAnyCompany) {
  on_all([](const Trace& trace, int budget) {
    if (budget != 3 && budget != 40) return;
    // Cells whose scores are the same share them, and so do those that no budget parts.
    std::vector<Cell> cells;
    for (const char* other :
         {"random", "random:heads=layer", "h2o:recent=0.25", "h2o:agg=max", "snapkv:window=2,kernel=3",
          "snapkv:window=2,pool=avg", "chunkkv:window=2", "pyramid-kv:window=2", "oracle"})
      if (const ConfiguredPolicy policy = ConfiguredPolicy::parse(other); fits(trace, policy, budget))
        cells.push_back({policy, budget});
    for (const int of_same : {40, 2, budget}) {
      const ConfiguredPolicy policy = ConfiguredPolicy::parse(GetParam());
      if (fits(trace, policy, of_same)) cells.push_back({policy, of_same});
    }
    const RecordedRun alone = record(trace, {GetParam()}, budget);
    const RecordedRun run = record_cells(trace, cells, 2);
    const auto last = static_cast<int>(cells.size()) - 1;
    for (const auto& [key, selection] : alone.selections) {
      const LayerSelection& other = run.selections.at({last, key.second});
      EXPECT_EQ(selection.set, other.set);
      EXPECT_EQ(selection.sinks, other.sinks);
      EXPECT_EQ(selection.recent, other.recent);
      EXPECT_EQ(selection.granted, other.granted);
      EXPECT_EQ(selection.source, other.source);
      EXPECT_EQ(selection.evicted_at, other.evicted_at);
      EXPECT_EQ(selection.slots, other.slots);
    }
    for (const auto& [key, scores] : run.scores) {
      if (key.first != last) continue;
      EXPECT_TRUE(std::ranges::equal(scores.values(), alone.scores.at({0, key.second}).values()));
    }
  });
}

/// The same trace with what comes from token `first` on repeated from its begin.
class RetoldTrace {
 public:
  RetoldTrace(const Trace& trace, int first) : file_(synth_defaults("fixture")) {
    TraceHeader header = trace.header();  // without passes, whose tokens would be others
    header.reconstruction_ids.clear();
    header.reconstruction_passes.clear();
    header.reconstruction_boundary = 0;
    TraceWriter writer(file_.path(), header, Existing::replace);
    for (int l = 0; l < trace.header().layers; ++l) {
      const std::vector<StoredTensor> tensors = trace.tensors(l);
      const auto retold = [first](const TensorView& tensor) {
        std::vector<std::byte> all;
        for (int head = 0; head < tensor.heads; ++head)
          for (int t = 0; t < tensor.tokens; ++t) {
            const std::byte* row = tensor.row(head, t < first ? t : (t - first) % first);
            all.insert(all.end(), row, row + tensor.row_bytes());
          }
        return all;
      };
      writer.begin_layer(tensors.front().view.dtype);
      for (const StoredTensor& tensor : tensors) {
        if (tensor.path.ends_with("/q")) writer.append_q(retold(tensor.view));
        if (tensor.path.ends_with("/k")) writer.append_k(retold(tensor.view));
        if (tensor.path.ends_with("/v")) writer.append_v(retold(tensor.view));
      }
    }
    writer.finish();
  }
  Trace open() const { return file_.open(); }

 private:
  TemporaryTrace file_;
};

const Trace& retold_from(const Trace& trace, int first) {
  struct Opened {
    Opened(const Trace& trace, int first) : file(trace, first), retold(file.open()) {}
    RetoldTrace file;
    Trace retold;
  };
  static std::map<std::string, Opened> all;  // by what is told
  return all.try_emplace(trace.hash(), trace, first).first->second.retold;
}

bool reads_the_reconstruction(const ConfiguredPolicy& policy, int layers) {
  return std::ranges::any_of(policy.plans(layers),
                             [](const LayerPlan& part) { return needs_of(part.plan).reconstruction; });
}

bool knows_the_future(const ConfiguredPolicy& policy, int layers) {
  return std::ranges::any_of(policy.plans(layers), [](const LayerPlan& part) {
    return part.plan.score.needs.future_queries ||
           (part.plan.allocate->other != nullptr && !part.plan.allocate->changes_sets());
  });
}

TEST_P(EveryPolicy, ChoosesByWhatComesBeforeTheBoundary) {
  const ConfiguredPolicy policy = ConfiguredPolicy::parse(GetParam());
  bool differs = false, foresees = false, reconstructs = false;
  on_all([&](const Trace& trace, int budget) {
    if (budget != 3 && budget != 40) return;
    Conditions conditions = default_conditions(trace);
    conditions.boundary = trace.header().prefill / 2 + 1;
    const int layers = static_cast<int>(conditions.layers.size());
    reconstructs = reads_the_reconstruction(policy, layers);
    foresees = knows_the_future(policy, layers);
    try {
      check_policy(trace, conditions, policy, budget);
    } catch (const Error&) {
      return;  // too large for so few tokens
    }
    if (foresees || reconstructs) return;
    const Trace& retold = retold_from(trace, conditions.boundary);
    const std::vector<Cell> cells{{policy, budget}};
    RecordedRun told, told_anew;
    replay(*tested_backend(1), trace, conditions, cells, told);
    replay(*tested_backend(1), retold, conditions, cells, told_anew);
    differs |= !std::ranges::equal(told.eval_attention.at(0).values(), told_anew.eval_attention.at(0).values());
    for (const auto& [key, selection] : told.selections) EXPECT_EQ(selection.set, told_anew.selections.at(key).set);
  });
  if (reconstructs) GTEST_SKIP() << "its passes follow the whole prompt";
  EXPECT_NE(differs, foresees) << "what comes later is not the same";
}

/// Null where the layer does not change with time.
std::unique_ptr<EvolvingLayer> evolving_layer(const Plan& plan, const LayerView& view,
                                              const LayerSelection& selection) {
  if (!plan.store->evolve || !selection.changes_with_time()) return nullptr;
  return plan.store->evolve(view, selection);
}

TEST_P(EveryPolicy, NoQuerySeesAnEvictedTokenAndEachSeesItself) {
  on_all([](const Trace& trace, int budget) {
    const RecordedRun run = record(trace, {GetParam()}, budget);
    const int prompt = default_conditions(trace).boundary, tokens = trace.header().tokens();
    for (const auto& [key, selection] : run.selections) {
      if (!selection.changes_with_time()) continue;
      const auto rows = static_cast<std::size_t>(selection.set.rows());
      ASSERT_EQ(selection.evicted_at.size(), rows * static_cast<std::size_t>(tokens));
      for (int row = 0; row < selection.set.rows(); ++row) {
        const auto gone = [&](int j) { return selection.evicted_at[at(row, j, static_cast<std::size_t>(tokens))]; };
        for (int j = 0; j < tokens; ++j) {
          EXPECT_TRUE(gone(j) == -1 || (gone(j) >= j && gone(j) < tokens)) << "token " << j << " goes at " << gone(j);
          if (j >= prompt) continue;
          const int last = is_rolling(GetParam()) ? prompt - 1 : prompt;
          if (j == last && selection.recent[static_cast<std::size_t>(row)] == 0) continue;  // seen by itself alone
          EXPECT_EQ(selection.set.keeps(row, j), gone(j) < 0 || gone(j) >= last) << "end of the prompt, token " << j;
        }
        for (int t = 0; t < tokens; ++t) {
          const KeptSet seen = selection.seen_by(t);
          EXPECT_TRUE(seen.keeps(row, t)) << "query " << t;
          for (int j = 0; j < tokens; ++j)
            ASSERT_EQ(seen.keeps(row, j), j <= t && (gone(j) < 0 || gone(j) >= t)) << "query " << t << ", token " << j;
        }
      }
    }
  });
}

/// The measured numbers, recomputed naively from the trace, what each query sees and where tokens stand.
TEST_P(EveryPolicy, IsMeasuredWithWhatEachQuerySees) {
  on_all([](const Trace& trace, int budget) {
    if (budget == 1000) return;  // everything is kept, exactly: the first law
    const RecordedRun run = record(trace, {GetParam()}, budget);
    const Conditions conditions = default_conditions(trace);
    const ConfiguredPolicy policy = ConfiguredPolicy::parse(GetParam());
    const auto layers = static_cast<int>(conditions.layers.size());
    for (const LayerPlan& part : policy.plans(layers))
      for (int l = part.first; l < part.first + part.count; ++l) {
        const LayerSelection& selection = run.selections.at({0, l});
        const LayerTensors tensors = trace.layer(conditions.layers[static_cast<std::size_t>(l)]);
        const bool everything = !selection.differs_by_query() && selection.set == whole(selection.set);
        const bool moves = part.plan.store->moves_tokens && !everything;
        const StoredNumbers* stored = run.stored.contains({0, l}) ? &run.stored.at({0, l}) : nullptr;
        EXPECT_EQ(run.compared_at.contains({0, l}), moves || stored != nullptr || selection.reads.weights);
        const auto queries = conditions.eval_queries.size();
        const auto backend = tested_backend(1);
        const LayerView view(*backend, tensors,
                             {l, layers, conditions.layers[static_cast<std::size_t>(l)], conditions.boundary},
                             conditions.eval_queries);
        const std::unique_ptr<EvolvingLayer> evolving = evolving_layer(part.plan, view, selection);
        std::optional<NaiveLayer> layer(std::in_place, tensors, stored);
        for (int i = 0; i < static_cast<int>(queries); ++i) {
          const int t = conditions.eval_queries[static_cast<std::size_t>(i)];
          if (evolving) {
            const std::unique_ptr<StoredLayer> now = evolving->before(t);
            const StoredNumbers of_query{now->keys, now->values, now->bytes};
            layer.emplace(tensors, &of_query);
          }
          for (int h = 0; h < tensors.q.heads; ++h) {
            const Naive expected = layer->lost(h, t, seen_in_slot_order(selection, tensors, h, t),
                                               moves ? Positions::cache : Positions::original, selection.reads.weights);
            const Moments& moments = run.moments.at({0, l})[at(h, i, queries)];
            ASSERT_NEAR(moments.mass, expected.mass, 2e-6) << "layer " << l << ", head " << h << ", query " << t;
            if (run.compared_at.contains({0, l})) {
              const Comparison& compared = run.compared_at.at({0, l})[at(h, i, queries)];
              ASSERT_NEAR(compared.mass, expected.mass, 2e-6);
              ASSERT_NEAR(compared.l1, expected.l1, 2e-5) << "layer " << l << ", head " << h << ", query " << t;
              ASSERT_NEAR(std::sqrt(compared.error_square), expected.error, 2e-5 * (1 + expected.error));
            } else {
              ASSERT_NEAR(std::sqrt(moments.error_square), expected.error, 2e-5 * (1 + expected.error));
            }
          }
        }
      }
  });
}

TEST_P(EveryPolicy, ChangesTokensByWhatComesBeforeTheQuery) {
  on_all([](const Trace& trace, int budget) {
    if (budget != 3 && budget != 12) return;
    const int first = trace.header().prefill / 2 + 1;
    const Conditions conditions = default_conditions(trace);
    const auto layers = static_cast<int>(conditions.layers.size());
    const std::vector<LayerPlan> plans = ConfiguredPolicy::parse(GetParam()).plans(layers);
    if (std::ranges::none_of(plans, [](const LayerPlan& part) { return bool(part.plan.store->evolve); })) return;
    const Trace& retold = retold_from(trace, first);
    const RecordedRun run = record(trace, {GetParam()}, budget), anew = record(retold, {GetParam()}, budget);
    const auto backend = tested_backend(1);
    for (const LayerPlan& part : plans)
      for (int l = part.first; l < part.end(); ++l) {
        const int stored = conditions.layers[static_cast<std::size_t>(l)];
        const LayerPlace place{l, layers, stored, conditions.boundary};
        const LayerView told(*backend, trace.layer(stored), place, conditions.eval_queries);
        const LayerView told_anew(*backend, retold.layer(stored), place, conditions.eval_queries);
        const auto one = evolving_layer(part.plan, told, run.selections.at({0, l}));
        const auto other = evolving_layer(part.plan, told_anew, anew.selections.at({0, l}));
        if (!one) continue;
        for (const int t : {first / 2, first, first - 1}) {
          const auto at_query = one->before(t), at_query_anew = other->before(t);
          const std::span<const float> values = at_query->values, values_anew = at_query_anew->values;
          const TensorView& v = told.tensors().v;
          const std::size_t of_head = values.size() / static_cast<std::size_t>(v.heads);
          const std::size_t told_alike = static_cast<std::size_t>(first) * static_cast<std::size_t>(v.dim);
          for (std::size_t begin = 0; begin < values.size(); begin += of_head)
            EXPECT_TRUE(std::ranges::equal(values.subspan(begin, told_alike), values_anew.subspan(begin, told_alike)))
                << "query " << t;
        }
      }
  });
}

/// The best recall with these counts, row by row, that any fixed set can have.
double best_recall(const RecordedRun& run, const LayerSelection& selection, int layer, int group, double pairs) {
  const Matrix& future = run.eval_attention.at(layer);
  Matrix read(selection.set.rows(), future.columns());
  for (int h = 0; h < future.rows(); ++h)
    for (int j = 0; j < future.columns(); ++j) read(selection.set.row_of(h, group), j) += future(h, j);
  double best = 0, all = 0;
  for (int row = 0; row < read.rows(); ++row) {
    const std::span<double> sums = read.row(row);
    all += std::accumulate(sums.begin(), sums.end(), 0.0);
    std::ranges::sort(sums, std::greater{});
    best += std::accumulate(sums.begin(), sums.begin() + selection.set.count(row), 0.0);
  }
  return best / pairs + 1.0 - all / pairs;
}

/// Not those of another policy, nor all of the prompt by its plan.
bool has_counts_of_its_own(const std::string& policy, const Trace& trace) {
  const auto layers = static_cast<int>(default_conditions(trace).layers.size());
  return std::ranges::none_of(ConfiguredPolicy::parse(policy).plans(layers), [](const LayerPlan& part) {
    return part.plan.allocate->keeps_everything || part.plan.allocate->other != nullptr;
  });
}

TEST_P(EveryPolicy, RecallsNoMoreThanTheOracleWithItsCounts) {
  const std::string oracle = "oracle:counts=(" + GetParam() + ")";
  on_all([&](const Trace& trace, int budget) {
    std::vector<std::string> asked{GetParam()};
    if (has_counts_of_its_own(GetParam(), trace)) {
      EXPECT_TRUE(fits(trace, ConfiguredPolicy::parse(oracle), budget)) << "the oracle takes anybody's counts";
      asked.push_back(oracle);
    }
    const RecordedRun run = record(trace, asked, budget);
    const Conditions conditions = default_conditions(trace);
    for (int l = 0; l < static_cast<int>(conditions.layers.size()); ++l) {
      const LayerSelection& selection = run.selections.at({0, l});
      if (asked.size() > 1)
        for (int row = 0; row < selection.set.rows(); ++row) {
          ASSERT_EQ(run.selections.at({1, l}).set.rows(), selection.set.rows());
          EXPECT_EQ(run.selections.at({1, l}).set.count(row), selection.set.count(row));
        }
      if (selection.differs_by_query()) continue;  // no fixed set: the oracle does not bind it
      const LayerShape shape = trace.header().shape(conditions.layers[static_cast<std::size_t>(l)]);
      const double pairs = static_cast<double>(conditions.eval_queries.size()) * shape.query_heads;
      const double best = best_recall(run, selection, l, shape.query_heads / shape.kv_heads, pairs);
      EXPECT_LE(run.recall(0, l), best + 1e-6);
      if (asked.size() > 1) {
        EXPECT_NEAR(run.recall(1, l), best, 1e-6) << "the oracle reaches its bound";
        EXPECT_LE(run.recall(0, l), run.recall(1, l) + 1e-6);
      }
    }
  });
}

/// The sum of the best `slots` entries: what sets can attend to whose counts are free.
double best_entries(std::vector<double> entries, long slots) {
  std::ranges::sort(entries, std::greater{});
  return std::accumulate(entries.begin(), entries.begin() + slots, 0.0);
}

/// R0 ... R4: the policy, and the oracles with its counts that may choose ever more. The last two are held against the
/// best entries of each layer, and of all.
TEST_P(EveryPolicy, RecallsNoMoreThanOraclesThatMayChooseEverMore) {
  const ConfiguredPolicy policy = ConfiguredPolicy::parse(GetParam());
  std::vector<std::string> asked{GetParam()};
  for (const char* free : {"chunks", "tokens", "heads", "layers"})
    asked.push_back("oracle:counts=(" + GetParam() + "),free=" + free);
  on_all([&](const Trace& trace, int budget) {
    const Conditions conditions = default_conditions(trace);
    const auto layers = static_cast<int>(conditions.layers.size());
    const std::vector<LayerPlan> plans = policy.plans(layers);
    const bool bounded = std::ranges::all_of(plans, [&](const LayerPlan& part) {
      return part.plan.schedule->decided() == Decision::after_prefill && has_budget(part.plan) &&
             part.plan.allocate->other == nullptr && part.plan.grouping.heads == plans.front().plan.grouping.heads;
    });
    if (!bounded) {
      EXPECT_THROW(static_cast<void>(ConfiguredPolicy::parse(asked.back()).plans(layers)), Error);
      return;
    }
    const LayerShape shape = trace.header().shape(conditions.layers.front());
    if (trace.header().largest_shape(conditions.layers) != shape) return;  // free=layers needs layers of one shape
    const RecordedRun run = record(trace, asked, budget);
    const int group = shape.query_heads / shape.kv_heads;
    const double pairs = static_cast<double>(conditions.eval_queries.size()) * shape.query_heads;
    double all = 0, recalled = 0;
    std::vector<double> of_model;
    long slots_of_model = 0;
    for (int l = 0; l < layers; ++l) {
      const LayerSelection& selection = run.selections.at({0, l});
      const Matrix& future = run.eval_attention.at(l);
      Matrix read(selection.set.rows(), future.columns());
      for (int h = 0; h < future.rows(); ++h)
        for (int j = 0; j < future.columns(); ++j) read(selection.set.row_of(h, group), j) += future(h, j);
      long slots = 0;
      for (int row = 0; row < selection.set.rows(); ++row) slots += selection.set.count(row);
      const std::vector<double> entries(read.values().begin(), read.values().end());
      const double of_layer = std::accumulate(entries.begin(), entries.end(), 0.0);
      EXPECT_NEAR(run.recall(3, l), 1.0 - (of_layer - best_entries(entries, slots)) / pairs, 1e-6);
      for (const int free : {1, 2, 3})
        EXPECT_LE(run.recall(free - 1, l), run.recall(free, l) + 1e-6) << asked[static_cast<std::size_t>(free)];
      of_model.insert(of_model.end(), entries.begin(), entries.end());
      slots_of_model += slots;
      all += of_layer;
      recalled += run.recall(4, l);
    }
    EXPECT_NEAR(recalled, layers - (all - best_entries(of_model, slots_of_model)) / pairs, 1e-6 * layers);
  });
}

TEST_P(EveryPolicy, ObeysTheIdentitiesOfEviction) {
  on_all([](const Trace& trace, int budget) {
    const RecordedRun run = record(trace, {GetParam()}, budget);
    for (const auto& [key, comparisons] : run.general) {
      const auto [query, head] = run.general_at.at(key);
      const auto queries = default_conditions(trace).eval_queries.size();
      const Comparison& general = comparisons.front();
      const Moments& kept = run.moments.at(key)[at(head, query, queries)];
      const Moments& full = run.full.at(key.second)[at(head, query, queries)];
      EXPECT_NEAR(kept.mass, general.mass, 1e-6);
      const double sink = 1.0 - general.full_mass, evicted = general.full_mass - general.mass;
      EXPECT_NEAR(full.mass, general.full_mass, 1e-6);
      EXPECT_NEAR(general.l1, evicted * (2.0 * general.mass + sink) / (general.mass + sink), 1e-6);
      EXPECT_NEAR(general.all.dot / std::sqrt(general.all.full_square * general.all.stored_square),
                  std::sqrt(kept.square / full.square), 1e-6);
      EXPECT_NEAR(std::sqrt(kept.error_square), std::sqrt(general.error_square),
                  1e-5 * std::sqrt(full.output_square) + 1e-9);
    }
    EXPECT_FALSE(run.general.empty() && run.compared_at.empty()) << "every cell takes the general path somewhere";
  });
}

std::string test_name(const testing::TestParamInfo<std::string>& parameter) {
  std::string name = parameter.param;
  std::ranges::replace_if(name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Registry, EveryPolicy, testing::ValuesIn(all_policies()), test_name);

}  // namespace
}  // namespace kvreplay
