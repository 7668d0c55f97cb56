// Column sums of attention: of all queries (H2O), of the last ones (SnapKV and its family), over a part of the tokens.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <numeric>

#include "float64.h"
#include "positions.h"
#include "random.h"
#include "subjects.h"

namespace kvreplay::bench {
namespace {

constexpr double tolerance = 1e-5;
// Longer than this, float64 looks at the last columns, which the last queries alone make, and at the sum of all.
constexpr std::size_t longest_whole_check = 33000;
constexpr int last_columns = 512;

/// A query of the backend and the part of its answer that float64 has.
struct Question {
  std::vector<std::int32_t> queries;
  std::vector<std::int32_t> resident;  // [rows, n], or empty
  int resident_rows = 1;
  int columns = 0;

  AttentionSums sums() const {
    return {.queries = queries, .resident = resident, .resident_rows = resident_rows, .columns = columns};
  }
  std::vector<std::int32_t> keys(int kv_head) const {
    if (resident.empty()) return position_range(0, columns);
    const auto count = static_cast<std::ptrdiff_t>(resident.size()) / resident_rows;
    return {resident.begin() + kv_head * count, resident.begin() + (kv_head + 1) * count};
  }
  int answer_columns() const { return resident.empty() ? columns : static_cast<int>(resident.size()) / resident_rows; }
  /// Pairs of a query and a key that it sees, over all query heads.
  double pairs(int query_heads, int kv_heads) const {
    double seen = 0;
    for (int row = 0; row < resident_rows; ++row) {
      const std::vector<std::int32_t> all = keys(row);
      for (const std::int32_t query : queries)
        seen += static_cast<double>(std::ranges::upper_bound(all, query) - all.begin());
    }
    return seen * (resident_rows == 1 ? query_heads : query_heads / kv_heads);
  }
};

/// What float64 says: by query head the last columns.
using Reference = std::map<int, std::vector<double>>;

Reference reference(const LayerTensors& layer, const Question& question) {
  Reference expected;
  const std::span<const std::int32_t> queries = question.queries;
  const bool whole = queries.size() <= longest_whole_check;
  for (const int head : {0, layer.q.heads / 2, layer.q.heads - 1}) {
    const std::vector<std::int32_t> keys = question.keys(head / layer.group());
    std::vector<double> sums = attention_column_sums(layer, head, whole ? queries : queries.last(last_columns), keys);
    if (!whole) sums.erase(sums.begin(), sums.end() - last_columns);
    expected.emplace(head, std::move(sums));
  }
  return expected;
}

/// Tokens that are among the tenth of highest sums in one and not in the other, leaving aside those whose sum lies
/// within 1e-5 of the lowest sum that is in.
int tenth_differs(std::span<const double> expected, std::span<const double> found) {
  const std::size_t kept = expected.size() / 10;
  if (kept == 0) return 0;
  const auto cut = [&](std::span<const double> sums) {
    std::vector<double> sorted(sums.begin(), sums.end());
    std::ranges::nth_element(sorted, sorted.begin() + static_cast<std::ptrdiff_t>(kept) - 1, std::greater<>());
    return sorted[kept - 1];
  };
  const double expected_cut = cut(expected), found_cut = cut(found);
  int differing = 0;
  for (std::size_t j = 0; j < expected.size(); ++j) {
    if (std::abs(expected[j] - expected_cut) <= 1e-5 * expected_cut) continue;
    differing += (expected[j] > expected_cut) != (found[j] >= found_cut);
  }
  return differing;
}

Verdict compare(const Matrix& found, const Reference& expected, std::size_t queries) {
  Verdict verdict;
  int differing = 0;
  for (const auto& [head, columns] : expected) {
    const std::span<const double> answer = found.row(head).last(columns.size());
    for (std::size_t j = 0; j < columns.size(); ++j) {
      const double error = distance(answer[j], columns[j]);
      verdict.relative_error = std::max(verdict.relative_error, error / std::max(columns[j], 1e-30));
    }
    differing += tenth_differs(columns, answer);
  }
  double total_error = 0;
  for (int head = 0; head < found.rows(); ++head) {
    const double total = std::accumulate(found.row(head).begin(), found.row(head).end(), 0.0);
    total_error = std::max(total_error, distance(total / static_cast<double>(queries), 1.0));
  }
  verdict.counters = {{"top_tenth_differs", static_cast<double>(differing)}};
  if (verdict.relative_error > tolerance) verdict.problem = fmt::format("error {:.2g}", verdict.relative_error);
  if (differing > 0) verdict.problem = fmt::format("{} tokens of the top tenth differ", differing);
  if (total_error > 1e-6) verdict.problem = fmt::format("rows sum to 1 within {:.2g} only", total_error);
  return verdict;
}

void add(Cases& cases, const std::string& name, const LayerSource& source, const Question& question) {
  add_at_every_level(cases, name, Rate::operations, [=](const std::shared_ptr<Backend>& backend) {
    static Latest<Reference> references;
    const std::shared_ptr<const LayerData> layer = source.load();
    const auto asked = std::make_shared<const Question>(question);
    const auto sums = std::make_shared<Matrix>();
    return Prepared{.call = [=] { *sums = backend->attention_sums(layer->tensors, asked->sums()); },
                    .check =
                        [=] {
                          const auto expected = references.get(name, [&] { return reference(layer->tensors, *asked); });
                          return compare(*sums, *expected, asked->queries.size());
                        },
                    .result = [=] { return std::vector<double>(sums->values().begin(), sums->values().end()); },
                    .result_bytes = product_bytes(source.query_heads, asked->answer_columns()),
                    .work = 2.0 * source.dim * asked->pairs(source.query_heads, source.kv_heads)};
  });
}

}  // namespace

void add_cumulative_attention(Cases& cases, const LayerSource& source) {
  add(cases, "cumulative_attention/" + source.name, source,
      {.queries = position_range(0, source.tokens), .resident = {}, .columns = source.tokens});
}

void add_window_attention(Cases& cases, const LayerSource& source, int window) {
  add(cases, fmt::format("window_attention/{}/w:{}", source.name, window), source,
      {.queries = position_range(source.tokens - window, source.tokens), .resident = {}, .columns = source.tokens});
}

void add_resident_attention(Cases& cases, const LayerSource& source) {
  const int window = std::min(32, source.tokens);
  Question question{.queries = position_range(source.tokens - window, source.tokens),
                    .resident = {},
                    .resident_rows = source.kv_heads};
  for (int head = 0; head < source.kv_heads; ++head) {
    // One of each pair of neighbours, and of the last queries' own keys one too.
    for (int token = 0; token + 1 < source.tokens; token += 2)
      question.resident.push_back(token + static_cast<int>(chain(5, head, token) % 2));
  }
  add(cases, fmt::format("resident_attention/{}/w:{}", source.name, window), source, question);
}

}  // namespace kvreplay::bench
