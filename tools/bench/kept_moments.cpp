// Moments of many kept sets at once: what the attention and output metrics of a run need.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "float64.h"
#include "positions.h"
#include "random.h"
#include "subjects.h"
#include "trace/float_types.h"

namespace kvreplay::bench {
namespace {

constexpr double shares[] = {0.05, 0.1, 0.2, 0.3, 0.5};
constexpr int sets_a_share = 13;
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
  Question question;
  const int count = std::min(eval_queries, source.tokens / 2);
  question.queries = position_range(source.tokens - count, source.tokens);
  question.boundary = source.tokens - count;
  for (const double share : shares) {
    for (int number = 0; number < sets_a_share; ++number) {
      KeptSet set(Heads::kv, source.kv_heads, question.boundary);
      for (int head = 0; head < source.kv_heads; ++head)
        for (int token = 0; token < question.boundary; ++token)
          if (uniform(chain(question.sets.size(), head, token)) < share) set.keep(head, token);
      question.sets.push_back(std::move(set));
    }
  }
  return question;
}

/// The largest error of mass, square and output error, each against 1, the full attention's square, the full output.
double largest_error(const LayerTensors& layer, const Question& question, const KeptMoments& found) {
  double largest = 0;
  const std::vector<std::int32_t> keys = position_range(0, layer.k.tokens);
  const auto dim = static_cast<std::size_t>(layer.v.dim);
  const std::size_t queries = question.queries.size();
  for (const int head : {0, layer.q.heads - 1}) {
    const int kv_head = head / layer.group();
    const std::vector<double> attention = attention_rows(layer, head, question.queries, keys);
    for (std::size_t query = 0; query < queries; ++query) {
      const std::span<const double> row = std::span(attention).subspan(query * keys.size(), keys.size());
      for (std::size_t number = 0; number < question.sets.size(); number += question.sets.size() / checked_sets) {
        double mass = 0, square = 0, full_square = 0;
        std::vector<double> output(dim), kept_output(dim);
        for (const std::int32_t key : keys) {
          const double a = row[static_cast<std::size_t>(key)];
          const bool kept = key >= question.boundary || question.sets[number].keeps(kv_head, key);
          full_square += a * a;
          if (kept) mass += a;
          if (kept) square += a * a;
          for (std::size_t c = 0; c < dim; ++c) {
            const double part = a * static_cast<double>(load(layer.v.row(kv_head, key), layer.v.dtype, c));
            output[c] += part;
            if (kept) kept_output[c] += part;
          }
        }
        double output_square = 0, error_square = 0;
        for (std::size_t c = 0; c < dim; ++c) {
          output_square += output[c] * output[c];
          error_square += (output[c] - kept_output[c] / mass) * (output[c] - kept_output[c] / mass);
        }
        const std::size_t cell = static_cast<std::size_t>(head) * queries + query;
        const Moments& moments = found.kept[number * found.full.size() + cell];
        largest =
            std::max({largest, std::abs(moments.mass - mass), std::abs(moments.square - square) / full_square,
                      std::abs(std::sqrt(moments.error_square) - std::sqrt(error_square)) / std::sqrt(output_square)});
      }
    }
  }
  return largest;
}

}  // namespace

void add_kept_moments(Cases& cases, const LayerSource& source) {
  const std::string name =
      fmt::format("kept_moments/{}/sets:{}", source.name, sets_a_share * static_cast<int>(std::size(shares)));
  const auto asked = std::make_shared<Latest<Question>>();
  add_at_every_level(cases, name, Rate::operations, [=](const std::shared_ptr<Backend>& backend) {
    const std::shared_ptr<const LayerData> layer = source.load();
    const auto question = asked->get(name, [&] { return question_of(source); });
    const auto found = std::make_shared<KeptMoments>();
    // Logits and the full output of every visible pair, and the output of every pair that a set keeps.
    double pairs = 0, kept_pairs = 0;
    for (const std::int32_t query : question->queries) {
      pairs += query + 1.0;
      for (const KeptSet& set : question->sets)
        for (int head = 0; head < set.rows(); ++head)
          kept_pairs += (set.count(head) + query + 1.0 - question->boundary) / set.rows();
    }
    return Prepared{.call =
                        [=] {
                          std::vector<KeptSets> kept;
                          for (const KeptSet& set : question->sets) kept.push_back({&set, 1});
                          *found = backend->kept_moments(layer->tensors, question->queries, question->boundary, kept);
                        },
                    .check =
                        [=] {
                          const double error = largest_error(layer->tensors, *question, *found);
                          return Verdict{.relative_error = error,
                                         .problem = error > tolerance ? fmt::format("error {:.2g}", error) : ""};
                        },
                    .result =
                        [=] {
                          std::vector<double> masses;
                          for (const Moments& moments : found->kept) masses.push_back(moments.mass);
                          return masses;
                        },
                    .result_bytes = sizeof(Moments) * (question->sets.size() + 1) * question->queries.size() *
                                    static_cast<std::size_t>(source.query_heads),
                    .work = 2.0 * source.dim * source.query_heads * (2.0 * pairs + kept_pairs)};
  });
}

}  // namespace kvreplay::bench
