#include "policies/stores/merged_values.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "observables/vector_products.h"
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

// Limits of the queries whose attention is computed at once: their distance, since each also sees the tokens between
// the first of them and itself, and the bytes of the result.
constexpr std::int32_t steps_at_once = 128;
constexpr std::size_t attention_bytes = std::size_t{64} << 20;

/// The first `most` numbers behind each of several, which are asked for from the last to the first and are not among
/// them.
class FirstBehind {
 public:
  explicit FirstBehind(std::size_t most) : most_(most) {}

  /// Begins again, with numbers below `end`.
  void begin(std::int32_t end) {
    end_ = end;
    behind_.clear();
  }
  /// Ascending, of the numbers that `counts`.
  std::span<const std::int32_t> of(std::int32_t number, const auto& counts) {
    nearest_.clear();
    for (std::int32_t j = number + 1; j < end_ && nearest_.size() < most_; ++j)
      if (counts(j)) nearest_.push_back(j);
    const std::size_t farther = std::min(most_ - nearest_.size(), behind_.size());
    nearest_.insert(nearest_.end(), behind_.begin(), behind_.begin() + static_cast<std::ptrdiff_t>(farther));
    std::swap(behind_, nearest_);
    end_ = number;
    return behind_;
  }

 private:
  std::size_t most_;
  std::int32_t end_ = 0;
  std::vector<std::int32_t> behind_, nearest_;
};

/// A token and its number among those that are resident to a query.
struct Evicted {
  std::size_t number = 0;
  std::int32_t token = 0;
};

/// Removes the elements of these numbers, ascending.
template <class T>
void erase_numbers(std::vector<T>& elements, std::span<const Evicted> evicted) {
  if (evicted.empty()) return;
  const auto at = [&](std::size_t number) { return elements.begin() + static_cast<std::ptrdiff_t>(number); };
  auto end = at(evicted.front().number);
  for (std::size_t i = 0; i < evicted.size(); ++i)
    end =
        std::move(at(evicted[i].number + 1), i + 1 < evicted.size() ? at(evicted[i + 1].number) : elements.end(), end);
  elements.erase(end, elements.end());
}

/// What some query heads of a KV head have paid to the tokens that are resident to a query.
class PaidAttention {
 public:
  PaidAttention(Attention attention, int group) : attention_(attention), rows_(static_cast<std::size_t>(group)) {
    if (attention == Attention::cumulative) sums_.resize(rows_.size());
  }

  /// Attention of the query heads from `first_head` on, of queries that have come since the last eviction, to the
  /// resident tokens from number `first` on: all of them where it accumulates. It must outlive the calls of of().
  void attend(const Matrix& attention, int first_head, int first) {
    first_ = static_cast<std::size_t>(first);
    for (std::size_t head = 0; head < rows_.size(); ++head) {
      const std::span<const double> row = attention.row(first_head + static_cast<int>(head));
      rows_[head] = attention_ == Attention::current ? row : added(row, sums_[head]);
    }
  }
  /// Mean over the query heads.
  double of(std::size_t number) const {
    double sum = rows_.front()[number - first_];
    for (std::size_t head = 1; head < rows_.size(); ++head) sum += rows_[head][number - first_];
    return sum / static_cast<double>(rows_.size());
  }
  void evict(std::span<const Evicted> evicted) {
    for (std::vector<double>& sums : sums_) erase_numbers(sums, evicted);
  }

 private:
  /// Adds a row to sums over its first tokens.
  static std::span<const double> added(std::span<const double> row, std::vector<double>& sums) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += row[i];
    sums.insert(sums.end(), row.begin() + static_cast<std::ptrdiff_t>(sums.size()), row.end());
    return sums;
  }

  Attention attention_;
  std::size_t first_ = 0;
  std::vector<std::vector<double>> sums_;      // [group, tokens] of cumulative attention
  std::vector<std::span<const double>> rows_;  // [group] what the query, or all queries, have paid
};

/// What a row evicts after a query.
struct Eviction {
  std::size_t resident = 0;      // tokens to the query
  std::vector<Evicted> evicted;  // ascending
};

class MergedLayer final : public MergingLayer {
 public:
  MergedLayer(const MergedValues& part, const LayerView& view, const LayerSelection& selection, Positions positions)
      : MergingLayer(view, selection),
        part_(part),
        positions_(positions),
        resident_(static_cast<std::size_t>(rows())),
        paid_(static_cast<std::size_t>(view.kv_heads()), PaidAttention(part.attention, view.group())),
        merges_(static_cast<std::size_t>(view.kv_heads())) {
    for (int row = 0; row < rows(); ++row) evictions_.push_back(evictions_of(row));
    find_merges();
    resident_.clear();
    paid_.clear();
    evictions_.clear();
  }

 private:
  /// Tokens that a row evicts, by the step, ascending.
  std::vector<std::int32_t> evictions_of(int row) const {
    const std::span<const std::int32_t> steps = evicted_at(row);
    std::vector<std::int32_t> tokens;
    for (std::size_t j = 0; j < steps.size(); ++j)
      if (steps[j] >= 0) tokens.push_back(static_cast<std::int32_t>(j));
    std::ranges::sort(tokens, {},
                      [&](std::int32_t token) { return std::pair(steps[static_cast<std::size_t>(token)], token); });
    return tokens;
  }

  void find_merges() {
    std::int32_t first = 0;  // query since the last eviction
    for (std::span<const std::int32_t> left = steps(); !left.empty();) {
      const std::span<const std::int32_t> some = left.first(at_once(left, first));
      const bool of_one_query = reads_one_query(some.front(), first);
      const std::vector<std::int32_t> tokens = resident_and(first, some.back());
      std::vector<std::vector<Eviction>> evictions;  // [rows][steps]
      for (int row = 0; row < rows(); ++row) evictions.push_back(evict(row, some, first));
      std::vector<NumberRange> wanted;
      for (std::size_t i = 0; i < some.size(); ++i) wanted.push_back(compared(evictions, i));
      const std::vector<Matrix> attention =
          of_one_query ? of_queries(some, tokens, wanted) : std::vector{since(first, some.front(), tokens)};
      view().on_threads(static_cast<std::size_t>(view().kv_heads()), [&](std::size_t number) {
        const int head = static_cast<int>(number);
        PaidAttention& paid = paid_[number];
        FirstBehind behind(most_compared());
        for (std::size_t i = 0; i < some.size(); ++i) {
          const Eviction& eviction = evictions[static_cast<std::size_t>(row_of(head))][i];
          paid.attend(attention[i], head * view().group(), wanted[i].first);
          add_merges(some[i], head, paid, eviction, behind);
          paid.evict(eviction.evicted);
        }
      });
      first = some.back() + 1;
      left = left.subspan(some.size());
    }
  }

  /// Whether a step compares the attention of a single query, where `first` is the first since the last eviction.
  bool reads_one_query(std::int32_t step, std::int32_t first) const {
    return part_.attention == Attention::current || step == first;
  }

  /// Steps whose attention is computed at once: of one query each, or a single step of several queries.
  std::size_t at_once(std::span<const std::int32_t> left, std::int32_t first) const {
    const std::size_t tokens = resident_.front().size() + static_cast<std::size_t>(left.front() - first) + 1;
    const std::size_t row_bytes = static_cast<std::size_t>(view().query_heads()) * tokens * sizeof(double);
    const std::size_t most = std::max(std::size_t{1}, attention_bytes / row_bytes);
    std::size_t count = 1;
    while (reads_one_query(left.front(), first) && count < std::min(most, left.size()) &&
           left[count] - left.front() < steps_at_once && reads_one_query(left[count], left[count - 1] + 1))
      ++count;
    return count;
  }

  /// [rows, n] what is resident, and the tokens from `first` to `last`.
  std::vector<std::int32_t> resident_and(std::int32_t first, std::int32_t last) const {
    std::vector<std::int32_t> tokens;
    for (int row = 0; row < rows(); ++row) {
      const std::vector<std::int32_t>& resident = resident_[static_cast<std::size_t>(row)];
      tokens.insert(tokens.end(), resident.begin(), resident.end());
      for (std::int32_t j = first; j <= last; ++j) tokens.push_back(j);
    }
    return tokens;
  }

  /// What a row evicts at some steps, where tokens come from `first` on.
  std::vector<Eviction> evict(int row, std::span<const std::int32_t> some, std::int32_t first) {
    std::vector<std::int32_t>& tokens = resident_[static_cast<std::size_t>(row)];  // evicted ones are erased at the end
    const std::span<const std::int32_t> steps = evicted_at(row);
    std::vector<Eviction> evictions;
    std::vector<Evicted> erased;  // ascending, numbers among `tokens`
    for (const std::int32_t step : some) {
      for (; first <= step; ++first) tokens.push_back(first);
      Eviction& eviction = evictions.emplace_back(tokens.size() - erased.size());
      for (const std::int32_t token :
           std::ranges::equal_range(evictions_[static_cast<std::size_t>(row)], step, {},
                                    [&](std::int32_t one) { return steps[static_cast<std::size_t>(one)]; })) {
        const auto number = static_cast<std::size_t>(std::ranges::lower_bound(tokens, token) - tokens.begin());
        const auto place = std::ranges::lower_bound(erased, token, {}, &Evicted::token);
        // All that this step has evicted so far stand before the token.
        const std::size_t earlier = static_cast<std::size_t>(place - erased.begin()) - eviction.evicted.size();
        eviction.evicted.push_back({number - earlier, token});
        erased.insert(place, {number, token});
      }
    }
    erase_numbers(tokens, erased);
    return evictions;
  }

  /// Numbers of the tokens among which those lie that a step's merges compare, in any row.
  NumberRange compared(std::span<const std::vector<Eviction>> evictions, std::size_t step) const {
    const auto resident = static_cast<int>(evictions.front()[step].resident);
    if (part_.attention == Attention::cumulative) return {0, resident};
    NumberRange range{resident, 0};
    for (const std::vector<Eviction>& of_row : evictions) {
      if (of_row[step].evicted.empty()) continue;
      const std::size_t last = of_row[step].evicted.back().number + most_compared();
      range.first = std::min(range.first, static_cast<int>(of_row[step].evicted.front().number));
      range.end = std::max(range.end, static_cast<int>(std::min(last + 1, of_row[step].resident)));
    }
    return range;
  }

  /// Tokens behind an evicted one with which it is compared.
  std::size_t most_compared() const {
    return part_.mean == Mean::later ? evicted_at(0).size() : static_cast<std::size_t>(part_.merge);
  }

  std::vector<Matrix> of_queries(std::span<const std::int32_t> queries, std::span<const std::int32_t> tokens,
                                 std::span<const NumberRange> wanted) const {
    std::vector<std::int32_t> evicted;
    const std::size_t of_row = tokens.size() / static_cast<std::size_t>(rows());
    for (int row = 0; row < rows(); ++row)
      for (const std::int32_t token : tokens.subspan(static_cast<std::size_t>(row) * of_row, of_row))
        evicted.push_back(evicted_at(row)[static_cast<std::size_t>(token)]);
    return view().attention_rows({.queries = queries,
                                  .tokens = tokens,
                                  .evicted_at = evicted,
                                  .rows = rows(),
                                  .positions = positions_,
                                  .wanted = wanted});
  }

  Matrix since(std::int32_t first, std::int32_t step, std::vector<std::int32_t> tokens) const {
    if (first == 0 && step == view().prompt() - 1) return view().cumulative_attention();
    return LayerView(view(), {.positions = std::move(tokens),
                              .rows = rows(),
                              .seen = step + 1,
                              .added = step + 1 - first,
                              .place = positions_})
        .cumulative_attention();
  }

  /// Of what a KV head evicts after a query: from the last one to the first.
  void add_merges(std::int32_t step, int head, const PaidAttention& paid, const Eviction& eviction,
                  FirstBehind& behind) {
    behind.begin(static_cast<std::int32_t>(eviction.resident));
    for (std::size_t i = eviction.evicted.size(); i-- > 0;) {
      const auto [number, token] = eviction.evicted[i];
      const std::span<const std::int32_t> compared =
          behind.of(static_cast<std::int32_t>(number), [](std::int32_t) { return true; });
      if (compared.empty()) continue;
      double sum = 0.0;
      for (const std::int32_t j : compared) sum += paid.of(static_cast<std::size_t>(j));
      const std::size_t receivers = std::min(compared.size(), static_cast<std::size_t>(part_.merge));
      const double share = merged_share(paid.of(number), sum / static_cast<double>(compared.size()),
                                        chain(part_.seed, view().stored_layer(), head, token));
      if (share > 0)
        merges_[static_cast<std::size_t>(head)].push_back({step, token, share / static_cast<double>(receivers)});
    }
  }

  /// The share of the value, 0 to 1, that the receivers take together.
  double merged_share(double own, double mean, std::uint64_t draw) const {
    const double probability = own <= 0 ? 0.0 : own >= mean ? 1.0 : own / mean;
    if (part_.mode == Mode::expected) return probability;
    return uniform(draw) < probability ? 1.0 : 0.0;
  }

  void merge(int head, std::span<const std::int32_t> some, HeadValues& values) const override {
    const int row = row_of(head);
    FirstBehind behind(static_cast<std::size_t>(part_.merge));
    std::vector<double*> sums;
    std::int32_t latest = -1;
    for (const auto& [step, token, share] : merges_of(some, merges_[static_cast<std::size_t>(head)])) {
      if (step != std::exchange(latest, step)) behind.begin(step + 1);
      sums.clear();
      for (const std::int32_t j : behind.of(token, [&](std::int32_t one) { return remains(row, one, step); }))
        sums.push_back(values.sum_of(j).data());
      add_to_each(share, values.of(token), sums);
    }
  }

  const MergedValues part_;
  const Positions positions_;
  std::vector<std::vector<std::int32_t>> resident_;   // of each row, ascending, while merges are found
  std::vector<PaidAttention> paid_;                   // of each KV head, likewise
  std::vector<std::vector<std::int32_t>> evictions_;  // of each row, likewise
  std::vector<std::vector<Merge>> merges_;            // of each KV head, by the step
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
