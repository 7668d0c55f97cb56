#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "observables/product_codes.h"
#include "observables/query_products.h"
#include "policies/policy.h"
#include "policies/schedules/sparse_reads.h"
#include "policies/schedules/token_reads.h"

namespace kvreplay {
namespace {

struct Pq {
  static constexpr Card card{
      .name = "pq",
      .summary =
          "Sparse reads: all tokens are kept; each query of each head reads the tokens with the largest logits of "
          "product-quantised keys",
      .paper = "Zhang et al. 2024, PQCache, arXiv:2407.12820",
      .score = "s[t,j] = sum over parts of <q_part, centre of k_j,part>",
      .family = Family::reading,
  };

  ProductQuantiser quantiser = {};
  int init_offset = 128;
  TokenReads tokens = {.sinks = 128, .local = 128};
  DenseLayers dense = {};

  void parameters(Parameters& p) {
    p.add("parts", quantiser.parts, IntRange{.least = 1}, "parts of a key, each with a separate code");
    p.add("bits", quantiser.bits, IntRange{.least = 1, .most = 16}, "bits of a code: 2^bits centres");
    p.add("iterations", quantiser.iterations, IntRange{.least = 1}, "largest number of iterations of k-means");
    p.add("init_offset", init_offset, IntRange{.up_to = UpTo::prompt},
          "first token with a code; earlier tokens are read as sinks or local tokens only");
    tokens.parameters(p);
    p.add_seed("seed", quantiser.seed, "random seed of the first centres");
    dense.parameters(p);
  }

  /// The keys from `init_offset` on.
  Vectors coded_keys(const LayerView& view) const {
    Vectors keys = view.stored_keys();
    const int first = std::min(init_offset, keys.count);
    return {keys.heads, keys.count - first, keys.dim,
            [read = keys.read, first](int head, int i, std::span<double> key) { read(head, first + i, key); }};
  }

  /// Of a query head: products of its parts with all centres, and their sums for the tokens first <= j < end.
  void score(std::span<const double> query, const Matrix& codes, int kv_head, int coded, std::span<double> scores,
             int first) const {
    const std::size_t dim = query.size() / static_cast<std::size_t>(quantiser.parts);
    for (int part = 0; part < quantiser.parts; ++part) {
      const std::span<const double> row = codes.row(kv_head * quantiser.parts + part);
      const std::size_t numbers = row.size() - static_cast<std::size_t>(coded);
      const std::vector<double> of_centres =
          products_with(query.subspan(static_cast<std::size_t>(part) * dim, dim), row.first(numbers));
      for (std::size_t j = 0; j < scores.size(); ++j)
        scores[j] += of_centres[static_cast<std::size_t>(row[numbers + static_cast<std::size_t>(first) + j])];
    }
  }

  TokenIndex index(const LayerView& view) const {
    const Vectors keys = coded_keys(view);
    if (quantiser.parts > keys.dim)
      throw Error{Refusal::usage, "pq:parts", "more parts than components of a key", fmt::format("1..{}", keys.dim),
                  std::to_string(quantiser.parts)};
    ProductQuantiser how = quantiser;
    how.layer = view.stored_layer();
    const LayerView::Arguments arguments{
        static_cast<double>(how.parts),      static_cast<double>(how.bits),
        static_cast<double>(how.iterations), static_cast<double>(init_offset),
        static_cast<double>(how.seed >> 32), static_cast<double>(how.seed & 0xFFFFFFFFU)};
    const Matrix& codes =
        view.remember("product_codes", arguments, [&] { return product_codes(keys, how, view.backend().threads()); });
    const auto scores = [*this, &view, &codes, coded = keys.count, offset = view.prompt() - keys.count](
                            int query, int first, int end) {
      const TensorView& q = view.tensors().q;
      const int stored = stored_query(view.tensors(), query);
      Matrix result(q.heads, end - first);
      view.on_threads(static_cast<std::size_t>(q.heads), [&](std::size_t number) {
        const auto head = static_cast<int>(number);
        std::vector<double> vector(static_cast<std::size_t>(q.dim));
        read_row(q, head, stored, vector);
        score(vector, codes, head / view.group(), coded, result.row(head), first - offset);
      });
      return result;
    };
    const double rows = codes.rows(), size = static_cast<double>(size_of(view.tensors().k.dtype));
    return {.scores = scores,
            .bytes = rows * (keys.count * how.bits / 8.0 + how.centres(keys.count) * (keys.dim / how.parts) * size)};
  }

  std::vector<LayerPlan> plans(int layers) const {
    TokenReads of_codes = tokens;
    of_codes.first_ranked = init_offset;
    return dense.plans(layers, of_codes.best_of([*this](const LayerView& view) { return index(view); }));
  }
};

const Registered<Pq> registered;

}  // namespace
}  // namespace kvreplay
