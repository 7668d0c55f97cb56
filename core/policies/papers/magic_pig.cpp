#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numbers>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "observables/query_products.h"
#include "observables/vector_products.h"
#include "observables/vector_statistics.h"
#include "policies/policy.h"
#include "policies/schedules/sparse_reads.h"
#include "policies/schedules/token_reads.h"
#include "random.h"

namespace kvreplay {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

/// base^exponent by squaring, exponent >= 0.
double power(double base, int exponent) {
  double product = 1;
  for (; exponent > 0; exponent /= 2, base *= base)
    if (exponent % 2 == 1) product *= base;
  return product;
}

/// Keys of the prompt minus the mean key of their KV head. With one more component, sqrt(r² - ‖k‖²) for the longest
/// length r of all heads, all are equally long, and the angle to a query without it decreases as the product increases
/// (Neyshabur and Srebro 2015, arXiv:1410.5518).
class CentredKeys {
 public:
  explicit CentredKeys(const LayerView& view) : keys_(view.stored_keys()), means_(keys_.heads, keys_.dim) {
    view.on_threads(at(keys_.heads), [&](std::size_t number) {
      const auto head = static_cast<int>(number);
      const std::span<double> mean = means_.row(head);
      std::vector<double> key(mean.size());
      for (int j = 0; j < keys_.count; ++j) {
        keys_.read(head, j, key);
        for (std::size_t c = 0; c < mean.size(); ++c) mean[c] += key[c];
      }
      for (double& number_of_mean : mean) number_of_mean /= keys_.count;
    });
    longest_square_ = std::ranges::max(squared_lengths(vectors(), view.backend().threads()).values());
  }

  /// The keys without the mean; to be used while this object is there.
  Vectors vectors() const {
    return {keys_.heads, keys_.count, keys_.dim,
            [this](int head, int j, std::span<double> key) { read(head, j, key); }};
  }

  int heads() const { return keys_.heads; }
  int count() const { return keys_.count; }
  int dim() const { return keys_.dim; }
  double longest() const { return std::sqrt(longest_square_); }

  void read(int head, int token, std::span<double> key) const {
    keys_.read(head, token, key);
    centre(head, key);
  }
  /// [d + 1].
  void read_extended(int head, int token, std::span<double> key) const {
    const std::span<double> components = key.first(key.size() - 1);
    read(head, token, components);
    key.back() = std::sqrt(std::max(0.0, longest_square_ - products_with(components, components).front()));
  }
  /// A stored query, in place of it minus the mean of the keys that it reads.
  void read_query(const TensorView& queries, int head, int stored, std::span<double> query) const {
    read_row(queries, head, stored, query);
    centre(head * keys_.heads / queries.heads, query);
  }

 private:
  void centre(int head, std::span<double> vector) const {
    const std::span<const double> mean = means_.row(head);
    for (std::size_t c = 0; c < vector.size(); ++c) vector[c] -= mean[c];
  }

  Vectors keys_;
  Matrix means_;  // [Hkv, d]
  double longest_square_ = 0;
};

struct MagicPig {
  static constexpr Card card{
      .name = "magic-pig",
      .summary =
          "Sparse reads: all tokens are kept; each query of each head samples tokens through hash tables of random "
          "projections, and attention divides the weight of each sampled token by its sampling probability",
      .paper = "Chen et al. 2024, MagicPIG, arXiv:2410.16179",
      .score = "s[t,j] = number of tables in which k_j and q_t have the same code",
      .family = Family::reading,
  };

  int tables = 75;
  int bits = 8;
  int collisions = 1;
  std::uint64_t seed = 0;
  TokenReads tokens = {.sinks = 128, .local = 128};
  DenseLayers dense = {};

  void parameters(Parameters& p) {
    p.add("tables", tables, IntRange{.least = 1}, "hash tables");
    p.add("bits", bits, IntRange{.least = 1, .most = 32}, "bits of a code in each table: signs of random projections");
    p.add("collisions", collisions, IntRange{.least = 1},
          "tables, at least, in which a token that is read has the code of the query");
    tokens.parameters(p);
    p.add_seed("seed", seed, "random seed of the projections");
    dense.parameters(p);
  }

  void check() const {
    if (collisions > tables)
      throw Error{Refusal::usage, "magic-pig:collisions", "more collisions than tables", fmt::format("1..{}", tables),
                  std::to_string(collisions)};
  }

  /// [tables * bits, d + 1], standard normal.
  VectorProducts projections(int layer, int dim) const {
    const auto normal = [this, layer](int, int i, std::span<double> projection) {
      for (std::size_t c = 0; c < projection.size(); ++c)
        projection[c] = gaussian(chain(seed, layer, i, c, 0), chain(seed, layer, i, c, 1));
    };
    return {{.heads = 1, .count = tables * bits, .dim = dim + 1, .read = normal}, 0};
  }

  /// Of vectors [n, d + 1], the code in each table: [n, tables].
  void hash(std::span<const double> vectors, const VectorProducts& normals, std::span<double> codes) const {
    std::vector<double> products(codes.size() * at(bits));  // [n, tables, bits]
    normals.with_each(vectors, 0, products);
    const double* product = products.data();
    for (double& of_table : codes) {
      std::uint64_t code = 0;
      for (int bit = 0; bit < bits; ++bit) code |= static_cast<std::uint64_t>(*product++ > 0) << bit;
      of_table = static_cast<double>(code);
    }
  }

  /// [Hkv, P * tables].
  const Matrix& key_codes(const LayerView& view, const CentredKeys& keys, const VectorProducts& normals) const {
    constexpr int piece = 16;  // tokens that are hashed together
    const LayerView::Arguments arguments{static_cast<double>(tables), static_cast<double>(bits),
                                         static_cast<double>(seed >> 32), static_cast<double>(seed & 0xFFFFFFFFU)};
    return view.remember("hash_codes", arguments, [&] {
      Matrix codes(keys.heads(), keys.count() * tables);
      const int pieces = (keys.count() + piece - 1) / piece;
      view.on_threads(at(keys.heads() * pieces), [&](std::size_t number) {
        const int head = static_cast<int>(number) / pieces, first = static_cast<int>(number) % pieces * piece;
        const std::size_t count = at(std::min(piece, keys.count() - first)), dim = at(keys.dim() + 1);
        std::vector<double> some(count * dim);
        for (std::size_t i = 0; i < count; ++i)
          keys.read_extended(head, first + static_cast<int>(i), std::span(some).subspan(i * dim, dim));
        hash(some, normals, codes.row(head).subspan(at(first) * at(tables), count * at(tables)));
      });
      return codes;
    });
  }

  TokenIndex index(const LayerView& view) const {
    const CentredKeys keys(view);
    const VectorProducts normals = projections(view.stored_layer(), keys.dim());
    const Matrix& codes = key_codes(view, keys, normals);
    const auto scores = [*this, &view, keys, normals, &codes](int query, int first, int end) {
      const TensorView& queries = view.tensors().q;
      const int stored = stored_query(view.tensors(), query);
      Matrix equal(queries.heads, end - first);
      view.on_threads(at(queries.heads), [&](std::size_t number) {
        const auto head = static_cast<int>(number);
        std::vector<double> vector(at(queries.dim + 1)), code(at(tables));
        keys.read_query(queries, head, stored, std::span(vector).first(at(queries.dim)));
        hash(vector, normals, code);
        count_equal(code, codes.row(head / view.group()).subspan(at(first) * code.size()), equal.row(head));
      });
      return equal;
    };
    return {.scores = scores, .bytes = static_cast<double>(codes.rows()) * codes.columns() * bits / 8};
  }

  std::vector<std::int32_t> sampled(std::span<const double> equal_tables) const {
    std::vector<std::int32_t> all;
    for (std::size_t j = 0; j < equal_tables.size(); ++j)
      if (equal_tables[j] >= collisions) all.push_back(static_cast<std::int32_t>(j));
    return all;
  }

  /// That a vector at this angle has an equal code in at least `collisions` tables: in each table with p =
  /// (1 - angle / π)^bits, independently.
  double probability(double angle) const {
    const double p = power(1 - angle / std::numbers::pi, bits);
    double fewer = 0, combinations = 1;
    for (int equal = 0; equal < collisions; ++equal) {
      fewer += combinations * power(p, equal) * power(1 - p, tables - equal);
      combinations *= static_cast<double>(tables - equal) / (equal + 1);
    }
    return 1 - fewer;
  }

  LogWeights weights(const LayerView& view) const {
    constexpr double least = 1e-6;  // added to probabilities, as the code does (docs/conventions.md, sparse reads)
    // Copies of what is returned share the keys.
    struct Keys {
      explicit Keys(const LayerView& view) : centred(view), of_heads(at(centred.heads())) {
        view.on_threads(of_heads.size(),
                        [&](std::size_t head) { of_heads[head].emplace(centred.vectors(), static_cast<int>(head)); });
      }
      CentredKeys centred;
      std::vector<std::optional<VectorProducts>> of_heads;
    };
    return [*this, &view, keys = std::make_shared<const Keys>(view)](int head, int position, int first,
                                                                     std::span<double> logits) {
      const CentredKeys& centred = keys->centred;
      std::vector<double> query(at(centred.dim())), products(logits.size());
      centred.read_query(view.tensors().q, head, stored_query(view.tensors(), position), query);
      const double lengths = std::sqrt(products_with(query, query).front()) * centred.longest();
      keys->of_heads[at(head / view.group())]->with(query, first, products);
      for (std::size_t i = 0; i < logits.size(); ++i) {
        if (logits[i] == -HUGE_VAL) continue;
        const double cosine = lengths > 0 ? products[i] / lengths : 0;
        logits[i] -= std::log(probability(std::acos(std::clamp(cosine, -1.0, 1.0))) + least);
      }
    };
  }

  std::vector<LayerPlan> plans(int layers) const {
    check();
    return dense.plans(layers, tokens.selected_by([*this](const LayerView& view) { return index(view); },
                                                  [*this](std::span<const double> equal) { return sampled(equal); },
                                                  [*this](const LayerView& view) { return weights(view); }));
  }
};

const Registered<MagicPig> registered;

}  // namespace
}  // namespace kvreplay
