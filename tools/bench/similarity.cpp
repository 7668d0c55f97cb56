// The highest cosine of each token with any other: redundancy of what is kept.
#include <fmt/format.h>

#include <algorithm>

#include "float64.h"
#include "subjects.h"

namespace kvreplay::bench {
namespace {

constexpr int checked_rows = 128;
constexpr double tolerance = 1e-6;

struct Reference {
  int step = 1;  // between the tokens that are checked
  std::vector<double> maxima;
};

Reference reference(const TensorView& keys) {
  Reference expected{.step = std::max(1, keys.tokens / checked_rows), .maxima = {}};
  Matrix similarity = cosines(keys, expected.step);
  for (int i = 0; i < similarity.rows(); ++i) {
    similarity(i, i * expected.step) = -1.0;
    expected.maxima.push_back(std::ranges::max(similarity.row(i)));
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
              for (std::size_t i = 0; i < expected->maxima.size(); ++i)
                error = std::max(
                    error, distance((*maxima)[i * static_cast<std::size_t>(expected->step)], expected->maxima[i]));
              return verdict_of(error, tolerance);
            },
        .result = [=] { return *maxima; },
        .result_bytes = product_bytes(1, source.tokens),
        // One triangle of products.
        .work = tokens * tokens * source.kv_heads * source.dim};
  });
}

}  // namespace kvreplay::bench
