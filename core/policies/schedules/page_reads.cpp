#include "policies/schedules/page_reads.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "attention/softmax_keys.h"
#include "float_types.h"
#include "observables/page_bounds.h"
#include "observables/query_products.h"
#include "policies/arithmetic/ranking.h"
#include "policies/schedules/sparse_reads.h"

namespace kvreplay {
namespace {

/// What is stored of each page, [Hkv, pages * numbers].
const Matrix& page_index(const PageReads& part, const LayerView& view) {
  const int threads = view.backend().threads();
  const LayerView::Arguments page{static_cast<double>(part.page)};
  if (part.rank_by == PageRank::mean)
    return view.remember("page_means", page, [&] { return page_means(view.stored_keys(), part.page, threads); });
  return view.remember("page_bounds", page,
                       [&] { return page_bounds(view.tensors().k, view.prompt(), part.page, threads); });
}

/// Scores of the pages that a query of a head can read, from their rows of the index.
std::vector<double> scores_of_pages(const PageReads& part, std::span<const double> query,
                                    std::span<const double> index) {
  return part.rank_by == PageRank::mean ? products_with(query, index) : page_scores(query, index);
}

std::vector<KeptSet> pages_read(const PageReads& part, const LayerView& view, const Matrix& index, int query,
                                std::span<const int> budgets) {
  const TensorView& q = view.tensors().q;
  const int stored = stored_query(view.tensors(), query), prompt = view.prompt();
  const int pages = std::min(query, prompt - 1) / part.page + 1, all_pages = (prompt - 1) / part.page + 1;
  const auto numbers = static_cast<std::size_t>(index.columns() / all_pages) * static_cast<std::size_t>(pages);
  std::vector<int> pages_of_budgets;
  for (const int budget : budgets) pages_of_budgets.push_back(std::max(part.least_pages, budget / part.page));
  std::vector<KeptSet> read(budgets.size(), KeptSet(Heads::query, q.heads, prompt));
  view.on_threads(static_cast<std::size_t>(q.heads), [&](std::size_t number) {
    const auto head = static_cast<int>(number);
    std::vector<double> channels(static_cast<std::size_t>(q.dim));
    read_row(q, head, stored, channels);
    std::vector<double> scores = scores_of_pages(part, channels, index.row(head / view.group()).first(numbers));
    // The mean of the query's own page includes later keys, so this page is read whatever its score.
    if (part.rank_by == PageRank::mean && query < prompt) scores.back() = std::numeric_limits<double>::infinity();
    const std::vector<std::vector<std::int32_t>> selected = largest_of_each(scores, pages_of_budgets);
    for (std::size_t i = 0; i < budgets.size(); ++i)
      for (const std::int32_t best : selected[i])
        read[i].keep(head, best * part.page, std::min((best + 1) * part.page, prompt));
  });
  return read;
}

class PageReadSchedule final : public SparseReads {
 public:
  explicit PageReadSchedule(const PageReads& part) : part_(part) {}

  ScoredUnit scored_unit() const override { return ScoredUnit::page; }

  int least_read() const override { return part_.least_pages * part_.page; }

  LayerReads reads(const LayerView& view) const override {
    const Matrix& index = page_index(part_, view);
    return {[part = part_, &view, &index](int query, std::span<const int> budgets) {
              return pages_read(part, view, index, query, budgets);
            },
            static_cast<double>(index.values().size() * size_of(view.tensors().k.dtype))};
  }

 private:
  PageReads part_;
};

}  // namespace

void PageReads::parameters(Parameters& p) {
  p.add("page", page, IntRange{.least = 1}, "tokens per page");
  p.add("least_pages", least_pages, IntRange{.least = 1},
        "minimum number of pages that a query reads, whatever the budget");
}

SchedulePtr PageReads::schedule() const { return std::make_shared<PageReadSchedule>(*this); }

}  // namespace kvreplay
