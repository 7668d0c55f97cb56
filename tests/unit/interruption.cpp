#include "attention/interruption.h"

#include <gtest/gtest.h>

#include <functional>

#include "attention_reference.h"
#include "cpu/cpu_backend.h"
#include "policies/text/configured.h"

namespace kvreplay::testing {
namespace {

/// A call by its name, and what it gives as numbers.
struct LongCall {
  const char* name;
  std::function<std::vector<double>(Backend&)> call;
};

TEST(Interruption, LongCallsEndWhereTheyAreAskedToAndAreWholeAfterwards) {
  const RandomLayer layer({.query_heads = 4, .kv_heads = 2, .tokens = 1200, .dim = 16});
  const std::vector<std::int32_t> queries = range(0, 1200);
  std::vector<KeptSet> sets{KeptSet(Heads::kv, 2, 1200)};
  for (int row = 0; row < 2; ++row)
    for (int token = 0; token < 1200; token += 3) sets.front().keep(row, token);
  const std::vector<KeptSets> kept{sets};
  const auto numbers = [](const std::vector<std::int32_t>& positions) {
    return std::vector<double>(positions.begin(), positions.end());
  };
  const LongCall calls[] = {
      {"attention sums",
       [&](Backend& backend) {
         const Matrix sums = backend.attention_sums(layer.tensors(), {.queries = queries, .columns = 1200});
         return std::vector<double>(sums.values().begin(), sums.values().end());
       }},
      {"kept moments",
       [&](Backend& backend) {
         const KeptMoments found = backend.kept_moments(layer.tensors(), queries, 1200, kept);
         return std::vector<double>{found.kept.front().mass, found.kept.back().square};
       }},
      {"comparison",
       [&](Backend& backend) {
         const auto found = backend.compare_attention(layer.tensors(), layer.tensors(), Positions::original, queries,
                                                      1200, kept.front());
         return std::vector<double>{found.front().l1, found.back().l1};
       }},
      {"online eviction",
       [&](Backend& backend) {
         return numbers(backend.online_eviction(layer.tensors(), {.tokens = 1200, .budget = 400, .recent = 8}));
       }},
      {"least redundant",
       [&](Backend& backend) {
         return numbers(
             backend.least_redundant(layer.tensors(), {.resident = queries, .sinks = 2, .recent = 2, .keep = 50}));
       }},
      {"scores by query logits",
       [&](Backend& backend) {
         const LayerView view(backend, layer.tensors(), {.prompt = 1200}, {});
         const Plan plan = ConfiguredPolicy::parse("lru").plans(1).front().plan;
         const Matrix scores = plan.score.score(view, {});
         return std::vector<double>(scores.values().begin(), scores.values().end());
       }},
      {"similarity", [&](Backend& backend) { return backend.similarity_row_maxima(layer.tensors().k, 1200); }},
  };
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    CpuBackend backend(1);  // of several, the one that asks may find no work left
    const std::vector<double> whole = call(backend);
    {
      const Interruption::Asking asking(backend.interruption(), [] { return true; }, "here");
      try {
        call(backend);
        FAIL() << "not interrupted";
      } catch (const Error& error) {
        EXPECT_EQ(error.refusal(), Refusal::interrupted);
        EXPECT_STREQ(error.what(), "here: interrupted");
      }
    }
    const Interruption::Asking asking(backend.interruption(), [] { return false; }, "here");
    EXPECT_EQ(call(backend), whole);
  }
}

}  // namespace
}  // namespace kvreplay::testing
