// The highest cosine of each token with any other: redundancy of what is kept.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "float64.h"
#include "positions.h"
#include "subjects.h"

namespace kvreplay::bench {
namespace {

constexpr int checked_rows = 128;
constexpr double tolerance = 1e-6;

struct Reference {
  std::vector<std::int32_t> rows;
  std::vector<double> maxima;
};

Reference reference(const TensorView& keys) {
  const int width = keys.heads * keys.dim;
  const std::vector<double> vectors = token_vectors(keys);
  Reference expected{.rows = position_range(0, keys.tokens, std::max(1, keys.tokens / checked_rows)), .maxima = {}};
  const std::vector<std::int32_t> all = position_range(0, keys.tokens);
  const std::vector<double> products = inner_products(vectors, width, expected.rows, all);
  std::vector<double> norms;
  for (const std::int32_t token : all) {
    double square = 0;
    for (int c = 0; c < width; ++c) {
      const double number =
          vectors[static_cast<std::size_t>(token) * static_cast<std::size_t>(width) + static_cast<std::size_t>(c)];
      square += number * number;
    }
    norms.push_back(std::sqrt(square));
  }
  for (std::size_t i = 0; i < expected.rows.size(); ++i) {
    double highest = -1;
    for (std::size_t j = 0; j < all.size(); ++j) {
      if (all[j] == expected.rows[i]) continue;
      highest = std::max(highest,
                         products[i * all.size() + j] / (norms[static_cast<std::size_t>(expected.rows[i])] * norms[j]));
    }
    expected.maxima.push_back(highest);
  }
  return expected;
}

}  // namespace

void add_similarity_row_maxima(Cases& cases, const LayerSource& source) {
  const std::string name = fmt::format("similarity_row_maxima/{}", source.name);
  add_at_every_level(cases, name, Rate::operations, [=](const std::shared_ptr<Backend>& backend) {
    static Latest<Reference> references;
    const std::shared_ptr<const LayerData> layer = source.load();
    const auto maxima = std::make_shared<std::vector<double>>();
    const double tokens = layer->tensors.k.tokens;
    return Prepared{
        .call = [=] { *maxima = backend->similarity_row_maxima(layer->tensors.k, layer->tensors.k.tokens); },
        .check =
            [=] {
              const auto expected = references.get(name, [&] { return reference(layer->tensors.k); });
              double error = 0;
              for (std::size_t i = 0; i < expected->rows.size(); ++i)
                error = std::max(error,
                                 distance((*maxima)[static_cast<std::size_t>(expected->rows[i])], expected->maxima[i]));
              return Verdict{.relative_error = error,
                             .problem = error > tolerance ? fmt::format("error {:.2g}", error) : ""};
            },
        .result = [=] { return *maxima; },
        .result_bytes = product_bytes(1, source.tokens),
        // One triangle of products.
        .work = tokens * tokens * source.kv_heads * source.dim};
  });
}

}  // namespace kvreplay::bench
