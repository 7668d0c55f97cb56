// Greedy selection of the least redundant tokens (SCA), and the same computed anew at every step.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>

#include "float64.h"
#include "measurement.h"
#include "positions.h"
#include "subjects.h"

namespace kvreplay::bench {
namespace {

constexpr int recent_tokens = 128;

struct Question {
  std::vector<std::int32_t> resident;
  int recent = 0;
  int keep = 0;

  RedundancyElimination asked(int tokens_kept) const {
    return {.resident = resident, .recent = recent, .keep = tokens_kept};
  }
};

/// [n, n] cosines of token vectors in fixed point.
std::vector<std::int32_t> similarities(const TensorView& tensor) {
  const Matrix exact = cosines(tensor);
  std::vector<std::int32_t> similarity(exact.values().size());
  std::ranges::transform(exact.values(), similarity.begin(),
                         [](double cosine) { return static_cast<std::int32_t>(std::rint(0x1p30 * cosine)); });
  return similarity;
}

/// What the direct form chose, and how long its steps took, similarities not counted.
struct Direct {
  std::vector<std::int32_t> kept;
  double seconds = 0;
};

Direct direct_form(const LayerTensors& layer, const Question& question) {
  const auto n = static_cast<int>(question.resident.size());
  const std::vector<std::int32_t> of[] = {similarities(layer.k), similarities(layer.v)};
  const auto at = [n](std::int32_t i, std::int32_t j) {
    return static_cast<std::size_t>(i) * static_cast<std::size_t>(n) + static_cast<std::size_t>(j);
  };
  std::vector<std::int32_t> members;
  std::vector<bool> joined(static_cast<std::size_t>(n));
  // How near each member is to another one; a single member is near to nothing.
  std::vector<std::int32_t> floors[2];
  const auto join = [&](std::int32_t token) {
    for (std::size_t part = 0; part < 2; ++part) {
      std::int32_t highest = std::numeric_limits<std::int32_t>::min();
      for (std::size_t i = 0; i < members.size(); ++i) {
        const std::int32_t similarity = of[part][at(token, members[i])];
        floors[part][i] = members.size() == 1 ? similarity : std::max(floors[part][i], similarity);
        highest = std::max(highest, similarity);
      }
      floors[part].push_back(members.empty() ? 0 : highest);
    }
    members.push_back(token);
    joined[static_cast<std::size_t>(token)] = true;
  };
  for (std::int32_t token = n - question.recent; token < n; ++token) join(token);
  const auto begin = std::chrono::steady_clock::now();
  while (static_cast<int>(members.size()) < question.keep) {
    std::vector<std::int64_t> added(static_cast<std::size_t>(n));
    for (std::size_t part = 0; part < 2; ++part) {
      std::vector<std::int64_t> highest(static_cast<std::size_t>(n), std::numeric_limits<std::int64_t>::min());
      add_above_floors(of[part], n, members, floors[part], added, highest);
      for (std::size_t j = 0; j < added.size(); ++j) added[j] += highest[j];
    }
    std::int32_t best = -1;
    for (std::int32_t j = 0; j < n; ++j)
      if (!joined[static_cast<std::size_t>(j)] &&
          (best < 0 || added[static_cast<std::size_t>(j)] < added[static_cast<std::size_t>(best)]))
        best = j;
    join(best);
  }
  Direct direct{.kept = {}, .seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()};
  std::ranges::sort(members);
  direct.kept = std::move(members);
  return direct;
}

}  // namespace

void add_least_redundant(Cases& cases, const LayerSource& source) {
  const std::string name = fmt::format("least_redundant/{}/keep:{}", source.name, source.tokens / 2);
  const Question question{.resident = position_range(0, source.tokens),
                          .recent = std::min(recent_tokens, source.tokens / 4),
                          .keep = source.tokens / 2};
  add_at_every_level(cases, name, Rate::operations, [=](const std::shared_ptr<Backend>& backend) {
    static Latest<Direct> directs;
    const std::shared_ptr<const LayerData> layer = source.load();
    const auto asked = std::make_shared<const Question>(question);
    const auto kept = std::make_shared<std::vector<std::int32_t>>();
    const auto choose = [=](int keep) { return backend->least_redundant(layer->tensors, asked->asked(keep)); };
    const double tokens = source.tokens;
    return Prepared{.call = [=] { *kept = choose(asked->keep); },
                    .check =
                        [=] {
                          const auto direct = directs.get(name, [&] { return direct_form(layer->tensors, *asked); });
                          Verdict verdict;
                          if (*kept != direct->kept) verdict.problem = "not the set of the direct form";
                          // All but the first step is what the steps cost; both have been done once before.
                          const double whole = seconds_of([&] { choose(asked->keep); }, 3);
                          const double one_step = seconds_of([&] { choose(asked->recent + 1); }, 3);
                          verdict.counters = {{"direct_over_steps", direct->seconds / (whole - one_step)}};
                          return verdict;
                        },
                    .result = [=] { return std::vector<double>(kept->begin(), kept->end()); },
                    .result_bytes = sizeof(std::int32_t) * static_cast<std::size_t>(asked->keep),
                    // One triangle of products, of keys and of values.
                    .work = 2.0 * tokens * tokens * source.kv_heads * source.dim};
  });
}

}  // namespace kvreplay::bench
