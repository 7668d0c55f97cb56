// Moments of many kept sets at once: what the attention and output metrics of a run need.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "float64.h"
#include "positions.h"
#include "subjects.h"

namespace kvreplay::bench {
namespace {

constexpr int eval_queries = 32;
// Float64 looks at every so many sets, at the first query head and at the last.
constexpr int checked_sets = 9;
// Of one query, which no average smooths: its weights carry the rounding of its logits.
constexpr double tolerance = 2e-5;

struct Question {
  std::vector<std::int32_t> queries;
  int boundary = 0;
  std::vector<KeptSet> sets;
};

Question question_of(const LayerSource& source) {
  const int boundary = source.tokens - std::min(eval_queries, source.tokens / 2);
  return {position_range(boundary, source.tokens), boundary, random_sets(source.kv_heads, boundary)};
}

/// What is asked for, and its name.
struct Parts {
  const char* name;
  MomentParts parts;
};
constexpr Parts asked_for[] = {{"attention", {}}, {"outputs", {.outputs = true}}, {"all", all_moments}};

/// The moments by their definitions, of a row of attention and of logits; keeps(key) below the boundary.
template <class Keeps>
Moments moments_of(std::span<const double> attention, std::span<const double> logits, const Matrix& values,
                   int boundary, Keeps keeps) {
  Moments m;
  const auto dim = static_cast<std::size_t>(values.columns());
  std::vector<double> output(dim), kept_output(dim);
  std::size_t number = 0;
  for (int key = 0; key < values.rows(); ++key) {
    const auto j = static_cast<std::size_t>(key);
    const double a = attention[j];
    const bool kept = key >= boundary || keeps(key);
    for (std::size_t c = 0; c < dim; ++c) {
      output[c] += a * values.row(key)[c];
      if (kept) kept_output[c] += a * values.row(key)[c];
    }
    if (!kept) continue;
    m.mass += a;
    m.square += a * a;
    if (key >= boundary) continue;
    m.prompt_mass += a;
    m.prompt_square += a * a;
    if (key >= sink_tokens) m.nosink_mass += a;
    if (key >= sink_tokens) m.nosink_square += a * a;
    m.logit_square += logits[j] * logits[j];
    m.unaligned_dot += attention[number++] * a;
  }
  for (std::size_t c = 0; c < dim; ++c) {
    const double kept = kept_output[c] / m.mass;
    m.output_square += kept * kept;
    m.output_dot += output[c] * kept;
    m.error_square += (output[c] - kept) * (output[c] - kept);
  }
  return m;
}

/// The largest error of any moment that was asked for: each against what the set that keeps everything has of it, and
/// against the unkept output's square for outputs, of which the error is a small part.
double error_of(const Moments& found, const Moments& expected, const Moments& full, MomentParts parts) {
  double largest = std::max({distance(found.mass, expected.mass), distance(found.prompt_mass, expected.prompt_mass),
                             distance(found.nosink_mass, expected.nosink_mass),
                             distance(found.square, expected.square) / full.square,
                             distance(found.prompt_square, expected.prompt_square) / full.square,
                             distance(found.nosink_square, expected.nosink_square) / full.square});
  if (parts.outputs) {
    const double length = std::max(full.output_square, expected.output_square);
    largest = std::max({largest, distance(found.output_square, expected.output_square) / length,
                        distance(found.output_dot, expected.output_dot) / length,
                        distance(std::sqrt(found.error_square), std::sqrt(expected.error_square)) / std::sqrt(length)});
  }
  if (parts.logits)
    largest = std::max(largest, distance(found.logit_square, expected.logit_square) / full.logit_square);
  if (parts.unaligned) largest = std::max(largest, distance(found.unaligned_dot, expected.unaligned_dot) / full.square);
  return largest;
}

/// Over the first query head and the last, some of the sets, and the set that keeps everything.
double largest_error(const LayerTensors& layer, const Question& question, const KeptMoments& found, MomentParts parts) {
  double largest = 0;
  const int boundary = question.boundary;
  const auto queries = static_cast<int>(question.queries.size());
  const std::vector<std::int32_t> all = position_range(0, layer.k.tokens);
  for (const int head : {0, layer.q.heads - 1}) {
    const int kv_head = head / layer.group();
    const Matrix logits = logits_of(layer, head, question.queries, all);
    const Matrix attention = attention_rows(layer, head, question.queries, all);
    const Matrix values = vectors_of(layer.v, kv_head, all);
#pragma omp parallel for schedule(dynamic) reduction(max : largest)
    for (int i = 0; i < queries; ++i) {
      const auto moments = [&](auto keeps) {
        return moments_of(attention.row(i), logits.row(i), values, boundary, keeps);
      };
      const auto cell = static_cast<std::size_t>(head * queries + i);
      const Moments full = moments([](int) { return true; });
      largest = std::max(largest, error_of(found.full[cell], full, full, parts));
      for (std::size_t number = 0; number < question.sets.size(); number += question.sets.size() / checked_sets) {
        const Moments expected = moments([&](int key) { return question.sets[number].keeps(kv_head, key); });
        largest = std::max(largest, error_of(found.kept[number * found.full.size() + cell], expected, full, parts));
      }
    }
  }
  return largest;
}

}  // namespace

void add_kept_moments(Cases& cases, const LayerSource& source) {
  const auto asked = std::make_shared<Latest<Question>>();
  for (const Parts& wanted : asked_for) {
    const std::string name = fmt::format("kept_moments/{}/sets:{}/{}", source.name, random_set_count, wanted.name);
    const MomentParts parts = wanted.parts;
    add_at_every_level(cases, name, Rate::operations, [=](const std::shared_ptr<Backend>& backend) {
      const std::shared_ptr<const LayerData> layer = source.load();
      const auto question = asked->get("", [&] { return question_of(source); });
      const auto found = std::make_shared<KeptMoments>();
      // Logits of every visible pair; with outputs the full one of these, and one of every pair that a set keeps.
      double pairs = 0, kept_pairs = 0;
      for (const std::int32_t query : question->queries) {
        pairs += query + 1.0;
        for (const KeptSet& set : question->sets)
          for (int head = 0; head < set.rows(); ++head)
            kept_pairs += (set.count(head) + query + 1.0 - question->boundary) / set.rows();
      }
      const double products = parts.outputs ? 2.0 * pairs + kept_pairs : pairs;
      return Prepared{
          .call =
              [=] {
                std::vector<KeptSets> kept;
                for (const KeptSet& set : question->sets) kept.push_back({&set, 1});
                *found = backend->kept_moments(layer->tensors, question->queries, question->boundary, kept, parts);
              },
          .check = [=] { return verdict_of(largest_error(layer->tensors, *question, *found, parts), tolerance); },
          .result =
              [=] {
                std::vector<double> masses;
                for (const Moments& moments : found->kept) masses.push_back(moments.mass);
                return masses;
              },
          .result_bytes = sizeof(Moments) * (question->sets.size() + 1) * question->queries.size() *
                          static_cast<std::size_t>(source.query_heads),
          .work = 2.0 * source.dim * source.query_heads * products};
    });
  }
}

}  // namespace kvreplay::bench
