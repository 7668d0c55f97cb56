// H2O's greedy algorithm: after every token the least attended one goes.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "float64.h"
#include "positions.h"
#include "subjects.h"

namespace kvreplay::bench {
namespace {

/// Of one KV head, computed in float64 along the decisions that were taken: by how much the score of a token that went
/// lay above the lowest one, relative to it, at most; infinity where one of the last `recent` went, or where more or
/// fewer than `budget` stayed.
double largest_excess(const LayerTensors& layer, int kv_head, std::span<const std::int32_t> evicted, int budget,
                      int recent) {
  const auto tokens = static_cast<int>(evicted.size());
  const std::vector<std::int32_t> all = position_range(0, tokens);
  const Matrix keys = vectors_of(layer.k, kv_head, all);
  std::vector<Matrix> queries;  // of the query heads that read it
  for (int head = kv_head * layer.group(); head < (kv_head + 1) * layer.group(); ++head)
    queries.push_back(vectors_of(layer.q, head, all));
  std::vector<int> held;
  std::vector<double> scores(static_cast<std::size_t>(tokens));
  std::vector<std::vector<int>> goes(static_cast<std::size_t>(tokens));
  for (int token = 0; token < tokens; ++token)
    if (const int after = evicted[static_cast<std::size_t>(token)]; after >= 0)
      goes[static_cast<std::size_t>(after)].push_back(token);
  double largest = 0;
  for (int token = 0; token < tokens; ++token) {
    held.push_back(token);
    for (const Matrix& of_head : queries) {
      const std::span<const double> query = of_head.row(token);
      std::vector<double> attention(held.size());
      double sum = 0;
#pragma omp parallel for schedule(static)
      for (std::size_t i = 0; i < held.size(); ++i) {
        const std::span<const double> key = keys.row(held[i]);
        double logit = 0;
#pragma omp simd reduction(+ : logit)
        for (std::size_t c = 0; c < key.size(); ++c) logit += query[c] * key[c];
        attention[i] = static_cast<double>(layer.softmax_scale) * logit;
      }
      const double highest = std::ranges::max(attention);
      for (double& z : attention) sum += z = std::exp(z - highest);
      for (std::size_t i = 0; i < held.size(); ++i)
        scores[static_cast<std::size_t>(held[i])] += attention[i] / sum / layer.group();
    }
    for (const int gone : goes[static_cast<std::size_t>(token)]) {
      double lowest = std::numeric_limits<double>::infinity();
      for (std::size_t i = 0; i + static_cast<std::size_t>(recent) < held.size(); ++i)
        lowest = std::min(lowest, scores[static_cast<std::size_t>(held[i])]);
      if (gone > token - recent) return std::numeric_limits<double>::infinity();
      largest = std::max(largest, scores[static_cast<std::size_t>(gone)] / lowest - 1.0);
      std::erase(held, gone);
    }
    if (static_cast<int>(held.size()) != std::min(token + 1, budget)) return std::numeric_limits<double>::infinity();
  }
  return largest;
}

}  // namespace

void add_online_eviction(Cases& cases, const LayerSource& source) {
  const int budget = source.tokens / 2, recent = budget / 2;
  const std::string name = fmt::format("online_eviction/{}/held:{}", source.name, budget);
  double pairs = 0;
  for (int token = 0; token < source.tokens; ++token) pairs += std::min(token + 1, budget + 1);
  add_at_every_level(cases, name, Rate::operations, [=](const std::shared_ptr<Backend>& backend) {
    const std::shared_ptr<const LayerData> layer = source.load();
    const auto evicted = std::make_shared<std::vector<std::int32_t>>();
    return Prepared{.call =
                        [=] {
                          *evicted = backend->online_eviction(
                              layer->tensors, {.tokens = source.tokens, .budget = budget, .recent = recent});
                        },
                    .check =
                        [=] {
                          const std::span<const std::int32_t> first_head =
                              std::span(*evicted).first(static_cast<std::size_t>(source.tokens));
                          const double excess = largest_excess(layer->tensors, 0, first_head, budget, recent);
                          return Verdict{.relative_error = excess,
                                         .problem = excess > 1e-5
                                                        ? fmt::format("a token went {:.2g} above the lowest", excess)
                                                        : ""};
                        },
                    .result = [=] { return std::vector<double>(evicted->begin(), evicted->end()); },
                    .result_bytes = sizeof(std::int32_t) * static_cast<std::size_t>(source.kv_heads * source.tokens),
                    .work = 2.0 * source.dim * source.query_heads * pairs};
  });
}

}  // namespace kvreplay::bench
