#include "policies/stores/merged_values.h"

#include <algorithm>
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

// Limits of the queries whose attention is computed at once: their distance, since each also sees the tokens between
// the first of them and itself, and the bytes of the result.
constexpr std::int32_t steps_at_once = 64;
constexpr std::size_t attention_bytes = std::size_t{32} << 20;

/// Removes the elements of these numbers, ascending.
template <class T>
void erase_numbers(std::vector<T>& elements, std::span<const std::size_t> numbers) {
  if (numbers.empty()) return;
  const auto at = [&](std::size_t number) { return elements.begin() + static_cast<std::ptrdiff_t>(number); };
  auto end = at(numbers.front());
  for (std::size_t i = 0; i < numbers.size(); ++i)
    end = std::move(at(numbers[i] + 1), i + 1 < numbers.size() ? at(numbers[i + 1]) : elements.end(), end);
  elements.erase(end, elements.end());
}

/// The first `most` numbers behind each of several, which are asked for from the last to the first and are not among
/// them; all are less than `end`.
class FirstBehind {
 public:
  FirstBehind(std::size_t most, std::int32_t end) : most_(most), end_(end) {}

  /// Ascending, of the numbers that `counts`.
  std::span<const std::int32_t> of(std::int32_t number, const auto& counts) {
    std::vector<std::int32_t> nearest;
    for (std::int32_t j = number + 1; j < end_ && nearest.size() < most_; ++j)
      if (counts(j)) nearest.push_back(j);
    const std::size_t farther = std::min(most_ - nearest.size(), behind_.size());
    nearest.insert(nearest.end(), behind_.begin(), behind_.begin() + static_cast<std::ptrdiff_t>(farther));
    behind_ = std::move(nearest);
    end_ = number;
    return behind_;
  }

 private:
  std::size_t most_;
  std::int32_t end_;
  std::vector<std::int32_t> behind_;
};

/// The tokens of a KV head that are resident as its queries come, and the attention to them.
class ResidentTokens {
 public:
  ResidentTokens(Attention attention, int group) : attention_(attention), rows_(static_cast<std::size_t>(group)) {
    if (attention == Attention::cumulative) sums_.resize(rows_.size());
  }

  const std::vector<std::int32_t>& numbers() const { return numbers_; }
  void append(std::int32_t first, std::int32_t last) {
    for (std::int32_t token = first; token <= last; ++token) numbers_.push_back(token);
  }
  /// Attention of the query heads from `first_head` on, of queries that have come since the last eviction. It must
  /// outlive the calls of attention().
  void attend(const Matrix& attention, int first_head) {
    for (std::size_t head = 0; head < rows_.size(); ++head) {
      const std::span<const double> row = attention.row(first_head + static_cast<int>(head));
      rows_[head] = attention_ == Attention::current ? row : added(row, sums_[head]);
    }
  }
  /// Mean over the query heads.
  double attention(std::size_t number) const {
    double sum = rows_.front()[number];
    for (std::size_t head = 1; head < rows_.size(); ++head) sum += rows_[head][number];
    return sum / static_cast<double>(rows_.size());
  }
  void evict(std::span<const std::size_t> numbers) {
    erase_numbers(numbers_, numbers);
    for (std::vector<double>& sums : sums_) erase_numbers(sums, numbers);
  }

 private:
  /// Adds a row to sums over its first tokens.
  static std::span<const double> added(std::span<const double> row, std::vector<double>& sums) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += row[i];
    sums.insert(sums.end(), row.begin() + static_cast<std::ptrdiff_t>(sums.size()), row.end());
    return sums;
  }

  Attention attention_;
  std::vector<std::int32_t> numbers_;          // ascending
  std::vector<std::vector<double>> sums_;      // [group, tokens] of cumulative attention
  std::vector<std::span<const double>> rows_;  // [group] what the query, or all queries, have paid
};

class MergedLayer final : public MergingLayer {
 public:
  MergedLayer(const MergedValues& part, const LayerView& view, const LayerSelection& selection, Positions positions)
      : MergingLayer(view, selection),
        part_(part),
        positions_(positions),
        resident_(static_cast<std::size_t>(view.kv_heads()), ResidentTokens(part.attention, view.group())),
        merges_(static_cast<std::size_t>(view.kv_heads())) {
    for (int row = 0; row < rows(); ++row) evictions_.push_back(evictions_of(row));
    find_merges();
    resident_.clear();
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
      const std::vector<Matrix> attention =
          reads_one_query(some.front(), first) ? of_queries(some, first) : std::vector{since(first, some.front())};
      view().on_threads(static_cast<std::size_t>(view().kv_heads()), [&](std::size_t head) {
        std::int32_t appended = first;
        for (std::size_t i = 0; i < some.size(); ++i) {
          take(some[i], static_cast<int>(head), appended, attention[i]);
          appended = some[i] + 1;
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
    const std::size_t tokens = resident_.front().numbers().size() + static_cast<std::size_t>(left.front() - first) + 1;
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
      const std::vector<std::int32_t>& resident = resident_[static_cast<std::size_t>(row)].numbers();
      tokens.insert(tokens.end(), resident.begin(), resident.end());
      for (std::int32_t j = first; j <= last; ++j) tokens.push_back(j);
    }
    return tokens;
  }

  std::vector<Matrix> of_queries(std::span<const std::int32_t> queries, std::int32_t first) const {
    const std::vector<std::int32_t> tokens = resident_and(first, queries.back());
    std::vector<std::int32_t> evicted;
    const std::size_t of_row = tokens.size() / static_cast<std::size_t>(rows());
    for (int row = 0; row < rows(); ++row)
      for (const std::int32_t token : std::span(tokens).subspan(static_cast<std::size_t>(row) * of_row, of_row))
        evicted.push_back(evicted_at(row)[static_cast<std::size_t>(token)]);
    return view().attention_rows(
        {.queries = queries, .tokens = tokens, .evicted_at = evicted, .rows = rows(), .positions = positions_});
  }

  Matrix since(std::int32_t first, std::int32_t step) const {
    if (first == 0 && step == view().prompt() - 1) return view().cumulative_attention();
    return LayerView(view(), {.positions = resident_and(first, step),
                              .rows = rows(),
                              .seen = step + 1,
                              .added = step + 1 - first,
                              .place = positions_})
        .cumulative_attention();
  }

  /// What happens to a KV head at a step: tokens come from `first` on, the query attends, and some are evicted.
  void take(std::int32_t step, int head, std::int32_t first, const Matrix& attention) {
    ResidentTokens& resident = resident_[static_cast<std::size_t>(head)];
    resident.append(first, step);
    resident.attend(attention, head * view().group());
    const auto at_step = std::ranges::equal_range(
        evictions_[static_cast<std::size_t>(row_of(head))], step, {},
        [&](std::int32_t token) { return evicted_at(row_of(head))[static_cast<std::size_t>(token)]; });
    std::vector<std::size_t> evicted;
    for (const std::int32_t token : at_step)
      evicted.push_back(
          static_cast<std::size_t>(std::ranges::lower_bound(resident.numbers(), token) - resident.numbers().begin()));
    add_merges(step, head, resident, evicted);
    resident.evict(evicted);
  }

  /// Of evicted tokens, by their numbers among the resident ones: from the last one to the first.
  void add_merges(std::int32_t step, int head, const ResidentTokens& resident, std::span<const std::size_t> evicted) {
    const std::size_t most =
        part_.mean == Mean::later ? resident.numbers().size() : static_cast<std::size_t>(part_.merge);
    FirstBehind behind(most, static_cast<std::int32_t>(resident.numbers().size()));
    for (std::size_t i = evicted.size(); i-- > 0;) {
      const std::size_t number = evicted[i];
      const std::span<const std::int32_t> compared =
          behind.of(static_cast<std::int32_t>(number), [](std::int32_t) { return true; });
      if (compared.empty()) continue;
      double sum = 0.0;
      for (const std::int32_t j : compared) sum += resident.attention(static_cast<std::size_t>(j));
      const std::size_t receivers = std::min(compared.size(), static_cast<std::size_t>(part_.merge));
      const std::int32_t token = resident.numbers()[number];
      const double share = merged_share(resident.attention(number), sum / static_cast<double>(compared.size()),
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

  void merge(int head, std::int32_t step, HeadValues& values) const override {
    FirstBehind behind(static_cast<std::size_t>(part_.merge), step + 1);
    for (const auto& [_, token, share] :
         std::ranges::equal_range(merges_[static_cast<std::size_t>(head)], step, {}, &Merge::step)) {
      const std::span<const double> evicted = values.of(token);
      for (const std::int32_t j :
           behind.of(token, [&](std::int32_t one) { return remains(row_of(head), one, step); })) {
        const std::span<double> sum = values.sum_of(j);
        for (std::size_t c = 0; c < sum.size(); ++c) sum[c] += share * evicted[c];
      }
    }
  }

  const MergedValues part_;
  const Positions positions_;
  std::vector<ResidentTokens> resident_;              // of each KV head, while merges are found
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
