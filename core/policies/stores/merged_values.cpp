#include "policies/stores/merged_values.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "policies/plan_part.h"
#include "policies/stores/merging_layer.h"
#include "random.h"

namespace kvreplay {
namespace {

using Mode = MergedValues::Mode;
using Attention = MergedValues::Attention;
using Mean = MergedValues::Mean;

constexpr Choice<Mode> mode_words[] = {{"expected", Mode::expected}, {"sampled", Mode::sampled}};
constexpr Choice<Attention> attention_words[] = {{"cumulative", Attention::cumulative},
                                                 {"current", Attention::current}};
constexpr Choice<Mean> mean_words[] = {{"receivers", Mean::receivers}, {"later", Mean::later}};

struct MergedValuesPart : MergedValues {
  static constexpr PartKind kind = PartKind::store;
  static constexpr const char* name = "merged-values";
  static constexpr const char* summary = "merges the values of evicted tokens into the next kept tokens";

  void fill(Plan& plan) const { plan.store = store(); }
};

const RegisteredPart<MergedValuesPart> registered;

/// A token's value, evicted after query `step`, of which each receiving token takes a share.
struct Merge {
  std::int32_t step = 0;
  std::int32_t token = 0;
  double share = 0;
};

/// Attention over the resident tokens, from one eviction to the next.
class ResidentAttention {
 public:
  ResidentAttention(const LayerView& view, Attention attention, Positions positions)
      : view_(view), attention_(attention), positions_(positions) {}

  /// [Hkv, n] by the tokens that query `step` sees, [rows, n]; all rows see the same number of tokens.
  Matrix at(std::int32_t step, std::span<const std::vector<std::int32_t>> seen) {
    const bool is_whole_prompt = queries_ == 0 && step == view_.prompt() - 1;
    Residents residents{.positions = {},
                        .rows = static_cast<int>(seen.size()),
                        .seen = step + 1,
                        .added = step + 1 - queries_,
                        .place = positions_,
                        .attention_before = std::move(received_)};
    for (const std::vector<std::int32_t>& row : seen)
      residents.positions.insert(residents.positions.end(), row.begin(), row.end());
    const LayerView some(view_, std::move(residents));
    const LayerView& now = is_whole_prompt ? view_ : some;
    queries_ = step + 1;
    received_ = attention_ == Attention::current ? now.attention(std::span(&step, 1)) : now.cumulative_attention();
    return Grouping{}(received_, view_.group());
  }

  /// Drops the columns of evicted tokens: `remaining` are the numbers of the others, the same number in each row.
  void evict(std::span<const std::vector<int>> remaining) {
    Matrix kept(received_.rows(), static_cast<int>(remaining.front().size()));
    for (int head = 0; head < kept.rows(); ++head) {
      const std::vector<int>& columns =
          remaining[remaining.size() == 1 ? 0 : static_cast<std::size_t>(head / view_.group())];
      for (int i = 0; i < kept.columns(); ++i) kept(head, i) = received_(head, columns[static_cast<std::size_t>(i)]);
    }
    received_ = attention_ == Attention::current ? Matrix() : std::move(kept);
  }

 private:
  const LayerView& view_;
  Attention attention_;
  Positions positions_;
  int queries_ = 0;  // that have attended
  Matrix received_;  // [Hq, n]
};

class MergedLayer final : public MergingLayer {
 public:
  MergedLayer(const MergedValues& part, const LayerView& view, const LayerSelection& selection, Positions positions)
      : MergingLayer(view, selection), part_(part), merges_(static_cast<std::size_t>(view.kv_heads())) {
    find_merges(positions);
  }

 private:
  void find_merges(Positions positions) {
    ResidentAttention attention(view(), part_.attention, positions);
    std::vector<std::vector<std::int32_t>> resident(static_cast<std::size_t>(rows()));
    std::int32_t first = 0;
    for (const std::int32_t step : steps()) {
      for (std::vector<std::int32_t>& row : resident)
        for (std::int32_t j = first; j <= step; ++j) row.push_back(j);
      first = step + 1;
      const Matrix of_heads = attention.at(step, resident);
      for (int head = 0; head < view().kv_heads(); ++head)
        add_merges(step, head, resident[static_cast<std::size_t>(row_of(head))], of_heads.row(head));
      if (step != steps().back()) evict(step, resident, attention);
    }
  }

  void evict(std::int32_t step, std::vector<std::vector<std::int32_t>>& resident, ResidentAttention& attention) const {
    std::vector<std::vector<int>> columns;
    for (int row = 0; row < rows(); ++row) {
      std::vector<std::int32_t>& tokens = resident[static_cast<std::size_t>(row)];
      std::vector<int>& remaining = columns.emplace_back();
      for (std::size_t i = 0; i < tokens.size(); ++i)
        if (remains(row, tokens[i], step)) remaining.push_back(static_cast<int>(i));
      std::erase_if(tokens, [&](std::int32_t token) { return !remains(row, token, step); });
    }
    attention.evict(columns);
  }

  /// Of a KV head, which pays `attention` to its resident tokens: from the last evicted one to the first.
  void add_merges(std::int32_t step, int head, std::span<const std::int32_t> resident,
                  std::span<const double> attention) {
    std::vector<double> later;  // attention to the tokens that remain, the last one first
    for (std::size_t i = resident.size(); i-- > 0;) {
      if (remains(row_of(head), resident[i], step)) {
        later.push_back(attention[i]);
        continue;
      }
      const std::size_t receivers = std::min(later.size(), static_cast<std::size_t>(part_.merge));
      if (receivers == 0) continue;
      const std::span<const double> compared =
          part_.mean == Mean::later ? std::span(later) : std::span(later).last(receivers);
      const double share =
          merged_share(attention[i], compared, chain(part_.seed, view().stored_layer(), head, resident[i]));
      if (share > 0)
        merges_[static_cast<std::size_t>(head)].push_back({step, resident[i], share / static_cast<double>(receivers)});
    }
  }

  /// The share of the value, 0 to 1, that the receivers take together.
  double merged_share(double own, std::span<const double> compared, std::uint64_t draw) const {
    const double sum = std::accumulate(compared.rbegin(), compared.rend(), 0.0);
    const double mean = sum / static_cast<double>(compared.size());
    const double probability = own <= 0 ? 0.0 : own >= mean ? 1.0 : own / mean;
    if (part_.mode == Mode::expected) return probability;
    return uniform(draw) < probability ? 1.0 : 0.0;
  }

  void merge(int head, std::int32_t step, HeadValues& values) const override {
    for (const auto& [_, token, share] :
         std::ranges::equal_range(merges_[static_cast<std::size_t>(head)], step, {}, &Merge::step)) {
      const std::span<const double> evicted = values.of(token);
      int left = part_.merge;
      for (std::int32_t j = token + 1; j <= step && left > 0; ++j) {
        if (!remains(row_of(head), j, step)) continue;
        --left;
        const std::span<double> sum = values.of(j);
        for (std::size_t c = 0; c < sum.size(); ++c) sum[c] += share * evicted[c];
        values.round(j);
      }
    }
  }

  const MergedValues part_;
  std::vector<std::vector<Merge>> merges_;  // of each KV head, by the step
};

}  // namespace

void MergedValues::parameters(Parameters& p) {
  const auto read = p.of_part("store");
  p.add("merge", merge, IntRange{.least = 1}, "number of kept tokens that receive the value of an evicted one");
  p.add<Mode>("mode", mode, mode_words, "uses the probability of a merge as its weight, or samples merges");
  p.add<Attention>("attention", attention, attention_words,
                   "attention that the probability of a merge compares: of the current query, or accumulated");
  p.add<Mean>("mean", mean, mean_words,
              "tokens whose mean attention it is compared with: those that receive the value, or all later ones");
  p.add_seed("seed", seed, "random seed of mode=sampled");
}

StorePtr MergedValues::store(Positions positions) const {
  Store store = merging_store("store=merged-values",
                              [part = *this, positions](const LayerView& view, const LayerSelection& selection) {
                                return std::make_unique<MergedLayer>(part, view, selection, positions);
                              });
  store.needs = all_queries();
  store.moves_tokens = positions == Positions::cache;
  return std::make_shared<const Store>(std::move(store));
}

}  // namespace kvreplay
