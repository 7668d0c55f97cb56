#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

#include "observables/softmax.h"
#include "observables/vector_products.h"
#include "policies/arithmetic/pooling.h"
#include "policies/plan_part.h"
#include "policies/policy.h"
#include "policies/scores/prefix_attention.h"
#include "policies/scores/window_score.h"

namespace kvreplay {
namespace {

double square_of(std::span<const double> vector) {
  return std::inner_product(vector.begin(), vector.end(), vector.begin(), 0.0);
}

struct Similar {
  int key = 0;
  double cosine = 0;
};

/// Of the keys i = first, first + 1, ...: the last key j != i with a cosine above the threshold. Where there is none,
/// key 0, as in the authors' code: with cosine 0 for i = 0.
void find_last_similar(const VectorProducts& directions, double threshold, int first, std::span<Similar> found) {
  constexpr int most = 512;
  const auto dim = static_cast<std::size_t>(directions.dim());
  std::vector<int> open(found.size());
  std::iota(open.begin(), open.end(), first);
  std::vector<double> vectors(open.size() * dim), cosines(open.size() * most);
  for (std::size_t at = 0; at < open.size(); ++at) directions.read(open[at], std::span(vectors).subspan(at * dim, dim));
  int width = 16;  // real keys are alike: most of them end early
  for (int end = directions.count(); end > 0 && !open.empty(); width = std::min(most, 2 * width)) {
    const int begin = std::max(0, end - width);
    const auto n = static_cast<std::size_t>(end - begin);
    directions.with_each(std::span(vectors).first(open.size() * dim), begin, std::span(cosines).first(open.size() * n));
    std::size_t kept = 0;
    for (std::size_t at = 0; at < open.size(); ++at) {
      const std::span row = std::span(cosines).subspan(at * n, n);
      const int i = open[at];
      int j = end - 1;
      while (j >= begin && (j == i || !(row[static_cast<std::size_t>(j - begin)] > threshold))) --j;
      Similar& similar = found[static_cast<std::size_t>(i - first)];
      if (j >= begin) {
        similar = {j, row[static_cast<std::size_t>(j - begin)]};
        continue;
      }
      similar = {0, i == 0 ? 0.0 : row[0]};
      open[kept] = i;
      std::copy_n(vectors.begin() + static_cast<std::ptrdiff_t>(at * dim), dim,
                  vectors.begin() + static_cast<std::ptrdiff_t>(kept++ * dim));
    }
    open.resize(kept);
    end = begin;
  }
}

struct RKv {
  static constexpr Card card{
      .name = "r-kv",
      .summary =
          "Redundancy-aware: attention of the observation window to the tokens before it, minus the similarity of a "
          "key to the other keys",
      .paper = "Cai et al. 2025, R-KV, arXiv:2505.24133",
      .score =
          "s[h,j] = mix_lambda pool_j(mean over the window's queries t of softmax_j(max over the group of q_t k_j)) - "
          "(1 - mix_lambda) softmax_j(mean over i of C_ij); C_ij = cos(k_i, k_j), 0 for i = j and for the last j of "
          "row i above `threshold`",
      .family = Family::attention,
  };

  int window = 8;
  int kernel = 7;
  double mix_lambda = 0.07;
  double threshold = 0.5;

  void parameters(Parameters& p) {
    add_window(p, window);
    const auto read = p.of_part("score");
    p.add("kernel", kernel, IntRange{.least = 1, .odd = true}, "width of the max pooling");
    p.add("mix_lambda", mix_lambda, RealRange{0.0, 1.0},
          "weight of the attention; 1 - mix_lambda is that of the similarity");
    p.add("threshold", threshold, RealRange{-1.0, 1.0},
          "in the row of each key, the last key that is more similar than this does not count as redundant");
  }

  /// Of a KV head, softmax over j of the mean over i of C_ij. The sum over i of all cosines with key j is the product
  /// of j with the sum of the directions, so only the entries that do not count are looked for.
  void redundancy(const LayerView& view, int kv_head, std::span<double> shares) const {
    const Vectors keys = view.keys();
    const auto read_direction = [&keys](int head, int j, std::span<double> key) {
      keys.read(head, j, key);
      const double length = std::sqrt(square_of(key)) + 1e-8;
      for (double& component : key) component /= length;
    };
    const VectorProducts directions({keys.heads, keys.count, keys.dim, read_direction}, kv_head);
    std::vector<double> key(static_cast<std::size_t>(keys.dim)), sum(key.size()), squares;
    for (int j = 0; j < view.tokens(); ++j) {
      directions.read(j, key);
      squares.push_back(square_of(key));
      std::ranges::transform(sum, key, sum.begin(), std::plus());
    }
    directions.with(sum, 0, shares);
    constexpr std::size_t block = 64;  // keys of a piece of work
    std::vector<Similar> found(shares.size());
    view.on_threads((found.size() + block - 1) / block, [&](std::size_t number) {
      const std::size_t first = number * block;
      find_last_similar(directions, threshold, static_cast<int>(first),
                        std::span(found).subspan(first, std::min(block, found.size() - first)));
    });
    for (std::size_t i = 0; i < found.size(); ++i) {
      shares[i] -= squares[i];
      shares[static_cast<std::size_t>(found[i].key)] -= found[i].cosine;
    }
    for (double& share : shares) share /= view.tokens();
    to_softmax(shares);
  }

  Matrix score(const LayerView& view, const Scoring& how) const {
    const Matrix& redundancies = view.remember("key_redundancy", {threshold}, [&] {
      Matrix rows(view.kv_heads(), view.tokens());
      for (int head = 0; head < rows.rows(); ++head) redundancy(view, head, rows.row(head));
      return rows;
    });
    Matrix scores = pooled(PrefixAttention{.window = window, .group_first = true}(view, how), Pool::max, kernel,
                           Candidates(view.tokens() - how.recent));
    for (std::size_t i = 0; i < scores.values().size(); ++i)
      scores.values()[i] = mix_lambda * scores.values()[i] - (1 - mix_lambda) * redundancies.values()[i];
    return scores;
  }

  Plan plan() const {
    return {
        .score = {.score = [*this](const LayerView& view, const Scoring& how) { return score(view, how); },
                  .needs = last_queries(window),
                  .reads_recent = true,
                  .places_window = true,
                  .quadratic = true,
                  .name = name_with_values(card.name, *this)},
        .protect = {.recent = Amount::tokens(window)},
    };
  }
};

const Registered<RKv> registered;

}  // namespace
}  // namespace kvreplay
