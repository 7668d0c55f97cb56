#include "policies/schedules/token_reads.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "policies/arithmetic/ranking.h"
#include "policies/schedules/sparse_reads.h"

namespace kvreplay {
namespace {

/// What a query sees of the prompt: [first, sinks) and [local, end) are read without regard to scores, and tokens of
/// [ranked, local) are selected by them.
struct VisibleTokens {
  VisibleTokens(const TokenReads& always, const LayerView& view, int query, int budget)
      : first(view.tensors().first_visible(query)),
        end(std::min(query + 1, view.prompt())),
        sinks(std::min({first + budget, std::max(first, always.sinks), end})),
        local(std::max({sinks, end - (budget - (sinks - first)), std::min(query + 1 - always.local, end)})),
        ranked(std::clamp(always.first_ranked, sinks, local)),
        best(budget - (sinks - first) - (end - local)) {}

  bool selects() const { return best > 0 && local > ranked; }

  int first, end, sinks, local, ranked;
  int best;  // tokens to select
};

class TokenReadSchedule final : public SparseReads {
 public:
  TokenReadSchedule(const TokenReads& always, MakeTokenIndex make_index, ReadTokens read, MakeTokenWeights make_weights)
      : always_(always),
        make_index_(std::move(make_index)),
        read_(std::move(read)),
        make_weights_(std::move(make_weights)) {}

  bool has_budget() const override { return !read_; }
  ScoredUnit scored_unit() const override { return ScoredUnit::token; }
  bool weighs_tokens() const override { return static_cast<bool>(make_weights_); }

  LayerReads reads(const LayerView& view) const override {
    TokenIndex index = make_index_(view);
    const double bytes = index.bytes;
    return {[always = always_, read = read_, index = std::move(index), &view](int query, std::span<const int> budgets) {
              return tokens_read(always, read, index, view, query, budgets);
            },
            bytes, make_weights_ ? weights_of_selected(always_, make_weights_(view), view) : LogWeights{}};
  }

 private:
  static std::vector<KeptSet> tokens_read(const TokenReads& always, const ReadTokens& read, const TokenIndex& index,
                                          const LayerView& view, int query, std::span<const int> budgets) {
    std::vector<VisibleTokens> of_budgets;
    for (const int budget : budgets) of_budgets.emplace_back(always, view, query, read ? view.prompt() : budget);
    // A budget that has room beside sinks and local tokens ranks the tokens between them, whatever it is.
    Matrix scores;
    const auto selecting = std::ranges::find_if(of_budgets, &VisibleTokens::selects);
    if (selecting != of_budgets.end()) scores = index.scores(query, selecting->ranked, selecting->local);
    std::vector<int> best;
    for (const VisibleTokens& visible : of_budgets) best.push_back(visible.selects() ? visible.best : 0);
    std::vector<KeptSet> all(budgets.size(), KeptSet(Heads::query, view.query_heads(), view.prompt()));
    for (int head = 0; head < view.query_heads(); ++head) {
      std::vector<std::vector<std::int32_t>> selected(budgets.size());
      if (selecting != of_budgets.end())
        selected = read ? std::vector(budgets.size(), read(scores.row(head))) : largest_of_each(scores.row(head), best);
      for (std::size_t i = 0; i < budgets.size(); ++i) {
        const VisibleTokens& visible = of_budgets[i];
        all[i].keep(head, visible.first, visible.sinks);
        all[i].keep(head, visible.local, visible.end);
        for (const std::int32_t token : selected[i]) all[i].keep(head, visible.ranked + token);
      }
    }
    return all;
  }

  static LogWeights weights_of_selected(const TokenReads& always, LogWeights weights, const LayerView& view) {
    return [always, weights = std::move(weights), &view](int head, int query, int first, std::span<double> logits) {
      const VisibleTokens visible(always, view, query, view.prompt());
      const int begin = std::max(first, visible.ranked);
      const int end = std::min({first + static_cast<int>(logits.size()), visible.local, query});
      if (begin < end)
        weights(head, query, begin,
                logits.subspan(static_cast<std::size_t>(begin - first), static_cast<std::size_t>(end - begin)));
    };
  }

  TokenReads always_;
  MakeTokenIndex make_index_;
  ReadTokens read_;
  MakeTokenWeights make_weights_;
};

}  // namespace

void TokenReads::parameters(Parameters& p) {
  p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens, read by every query");
  p.add("local", local, IntRange{.up_to = UpTo::prompt},
        "last tokens up to and including a query, which it reads without regard to scores");
}

SchedulePtr TokenReads::best_of(MakeTokenIndex index) const {
  return std::make_shared<TokenReadSchedule>(*this, std::move(index), ReadTokens{}, MakeTokenWeights{});
}

SchedulePtr TokenReads::selected_by(MakeTokenIndex index, ReadTokens read, MakeTokenWeights weights) const {
  return std::make_shared<TokenReadSchedule>(*this, std::move(index), std::move(read), std::move(weights));
}

}  // namespace kvreplay
