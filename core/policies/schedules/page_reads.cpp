#include "policies/schedules/page_reads.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/softmax_keys.h"
#include "float_types.h"
#include "observables/page_bounds.h"
#include "policies/arithmetic/ranking.h"

namespace kvreplay {
namespace {

KeptSet read_by(const PageReads& part, const LayerView& view, const Matrix& bounds, int query, int budget) {
  const TensorView& q = view.tensors().q;
  const int stored = stored_query(view.tensors(), query), prompt = view.prompt();
  const int pages = std::min(query, prompt - 1) / part.page + 1;
  const auto numbers = static_cast<std::size_t>(pages) * 2 * static_cast<std::size_t>(q.dim);
  KeptSet read(Heads::query, q.heads, prompt);
  view.on_threads(static_cast<std::size_t>(q.heads), [&](std::size_t number) {
    const auto head = static_cast<int>(number);
    std::vector<double> channels(static_cast<std::size_t>(q.dim));
    read_row(q, head, stored, channels);
    const std::vector<double> scores = page_scores(channels, bounds.row(head / view.group()).first(numbers));
    for (const std::int32_t best : largest(scores, std::max(part.least_pages, budget / part.page)))
      read.keep(head, best * part.page, std::min((best + 1) * part.page, prompt));
  });
  return read;
}

class PageReadSchedule final : public Schedule {
 public:
  explicit PageReadSchedule(const PageReads& part) : part_(part) {}

  std::string name() const override { return "queries that each read some tokens"; }
  Decision decided() const override { return Decision::never; }

  Requirements required() const override {
    constexpr const char* reason = "each query reads some of the whole prompt, as it is";
    constexpr const char* remedy = "no other allocator and store";
    return {{Property::every_token, reason, remedy}, {Property::unchanged, reason, remedy}};
  }

  LayerReads reads(const LayerView& view, int budget) const override {
    const Matrix& bounds = view.remember("page_bounds", {static_cast<double>(part_.page)}, [&] {
      return page_bounds(view.tensors().k, view.prompt(), part_.page, view.backend().threads());
    });
    return {[part = part_, &view, &bounds, budget](int query) { return read_by(part, view, bounds, query, budget); },
            static_cast<double>(bounds.values().size() * size_of(view.tensors().k.dtype))};
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
