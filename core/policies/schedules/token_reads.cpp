#include "policies/schedules/token_reads.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "policies/arithmetic/ranking.h"
#include "policies/schedules/sparse_reads.h"

namespace kvreplay {
namespace {

class TokenReadSchedule final : public SparseReads {
 public:
  TokenReadSchedule(const TokenReads& always, MakeTokenIndex make_index, ReadTokens read)
      : always_(always), make_index_(std::move(make_index)), read_(std::move(read)) {}

  bool has_budget() const override { return !read_; }
  ScoredUnit scored_unit() const override { return ScoredUnit::token; }

  LayerReads reads(const LayerView& view, int budget) const override {
    TokenIndex index = make_index_(view);
    const double bytes = index.bytes;
    return {[always = always_, read = read_, index = std::move(index), &view, budget](int query) {
              return tokens_read(always, read, index, view, query, read ? view.prompt() : budget);
            },
            bytes};
  }

 private:
  static KeptSet tokens_read(const TokenReads& always, const ReadTokens& read, const TokenIndex& index,
                             const LayerView& view, int query, int budget) {
    const int heads = view.query_heads(), prompt = view.prompt();
    const int first = view.tensors().first_visible(query), end = std::min(query + 1, prompt);
    const int sinks = std::min({first + budget, std::max(first, always.sinks), end});
    const int local = std::max({sinks, end - (budget - (sinks - first)), std::min(query + 1 - always.local, end)});
    const int best = budget - (sinks - first) - (end - local), ranked = std::clamp(always.first_ranked, sinks, local);
    KeptSet all(Heads::query, heads, prompt);
    const Matrix scores = best > 0 && local > ranked ? index.scores(query, ranked, local) : Matrix(heads, 0);
    for (int head = 0; head < heads; ++head) {
      all.keep(head, first, sinks);
      all.keep(head, local, end);
      for (const std::int32_t token : read ? read(scores.row(head)) : largest(scores.row(head), best))
        all.keep(head, ranked + token);
    }
    return all;
  }

  TokenReads always_;
  MakeTokenIndex make_index_;
  ReadTokens read_;
};

}  // namespace

void TokenReads::parameters(Parameters& p) {
  p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens, read by every query");
  p.add("local", local, IntRange{.up_to = UpTo::prompt},
        "last tokens up to and including a query, which it reads without regard to scores");
}

SchedulePtr TokenReads::best_of(MakeTokenIndex index) const {
  return std::make_shared<TokenReadSchedule>(*this, std::move(index), ReadTokens{});
}

SchedulePtr TokenReads::selected_by(MakeTokenIndex index, ReadTokens read) const {
  return std::make_shared<TokenReadSchedule>(*this, std::move(index), std::move(read));
}

}  // namespace kvreplay
