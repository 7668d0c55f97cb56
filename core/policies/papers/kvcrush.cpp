#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "policies/arithmetic/ranking.h"
#include "policies/arithmetic/wide_sum.h"
#include "policies/plan_part.h"
#include "policies/policy.h"
#include "policies/scores/window_score.h"
#include "random.h"

namespace kvreplay {
namespace {

enum class Anchor { mean, zeros, ones, alternating, random };

constexpr Choice<Anchor> anchor_words[] = {{"mean", Anchor::mean},
                                           {"zeros", Anchor::zeros},
                                           {"ones", Anchor::ones},
                                           {"alternating", Anchor::alternating},
                                           {"random", Anchor::random}};

constexpr Choice<Heads> heads_words[] = {{"kv", Heads::kv}, {"layer", Heads::layer}};

struct KvCrush {
  static constexpr Card card{
      .name = "kvcrush",
      .summary =
          "Pages by the attention of the observation window, and representatives of the other pages, taken at equal "
          "steps of their distance to an anchor",
      .paper = "KVCrush, arXiv:2503.00022, as in vLLM and OpenVINO",
      .score =
          "signature of a page: a bit for each token and KV head, 1 if the token is in the better half of the head; "
          "representatives: every (n/r)-th of the n pages left, by Hamming distance to the anchor",
      .family = Family::chunk,
  };

  int window = 8;
  int page = 16;
  double ratio = 0.25;
  Anchor anchor = Anchor::mean;
  std::uint64_t seed = 0;
  Heads heads = Heads::kv;

  void parameters(Parameters& p) {
    add_window(p, window);
    p.add<Heads>("heads", heads, heads_words, "granularity: a kept set per KV head, or per layer");
    const auto read = p.of_part("score");
    p.add("page", page, IntRange{.least = 1}, "tokens per page; the first page begins after the sinks");
    p.add("ratio", ratio, RealRange{}, "share of the unprotected budget for representatives");
    p.add<Anchor>("anchor", anchor, anchor_words,
                  "signature that pages are compared with: mean is the majority of each bit over all pages");
    p.add_seed("seed", seed, "random seed of anchor=random");
  }

  /// [pages][page * heads]: bits of the whole pages among `tokens` candidates, token by token.
  std::vector<std::vector<char>> signatures(const Matrix& scores, Candidates candidates) const {
    const auto bits = static_cast<std::size_t>(page * scores.rows());
    std::vector<std::vector<char>> all(static_cast<std::size_t>(candidates.count / page), std::vector<char>(bits));
    for (int head = 0; head < scores.rows(); ++head)
      for (const std::int32_t j : largest(candidates.of(scores.row(head)), candidates.count / 2))
        if (const auto of_page = static_cast<std::size_t>(j / page); of_page < all.size())
          all[of_page][static_cast<std::size_t>(j % page * scores.rows() + head)] = 1;
    return all;
  }

  /// Hamming distances of the pages to the anchor.
  std::vector<int> distances(const std::vector<std::vector<char>>& pages, int layer) const {
    std::vector<int> all(pages.size());
    for (std::size_t bit = 0; !pages.empty() && bit < pages.front().size(); ++bit) {
      const auto ones = std::ranges::count_if(pages, [bit](const std::vector<char>& one) { return one[bit] != 0; });
      const bool of_anchor = anchor == Anchor::mean          ? 2 * ones > std::ssize(pages)
                             : anchor == Anchor::alternating ? bit % 2 == 1
                             : anchor == Anchor::random      ? (chain(seed, layer, bit) & 1) != 0
                                                             : anchor == Anchor::ones;
      for (std::size_t i = 0; i < pages.size(); ++i) all[i] += (pages[i][bit] != 0) != of_anchor ? 1 : 0;
    }
    return all;
  }

  /// Marks the first unmarked tokens of the pages in this order, until `slots` are marked.
  void take(std::span<const std::int32_t> order, std::vector<char>& kept, int slots) const {
    for (const std::int32_t of_page : order)
      for (int j = of_page * page; j < std::min((of_page + 1) * page, static_cast<int>(kept.size())) && slots > 0; ++j)
        if (char& mark = kept[static_cast<std::size_t>(j)]; mark == 0) {
          mark = 1;
          --slots;
        }
  }

  /// [candidates]: 1 for the kept ones of a row, `distance` that of the whole pages. Where representatives leave slots,
  /// all tokens that remain are of the last page chosen by score and of a short page: top-k takes them in this order.
  std::vector<char> kept_of(std::span<const double> scores, int slots, std::span<const int> distance) const {
    std::vector<double> sums;
    for (std::size_t begin = 0; begin < scores.size(); begin += static_cast<std::size_t>(page))
      sums.push_back(wide_sum(scores.subspan(begin, std::min(static_cast<std::size_t>(page), scores.size() - begin))));
    const std::vector<std::int32_t> order = ranked(sums);
    const int representatives = Amount::fraction(ratio).of(slots) / page;
    std::vector<char> kept(scores.size());
    take(order, kept, slots - representatives * page);

    std::vector<std::int32_t> left;  // whole pages without a kept token, by distance
    for (std::size_t i = 0; i < distance.size(); ++i)
      if (kept[i * static_cast<std::size_t>(page)] == 0) left.push_back(static_cast<std::int32_t>(i));
    std::ranges::sort(left, {}, [&](std::int32_t i) { return std::pair(distance[static_cast<std::size_t>(i)], i); });
    const int step = std::max(1, static_cast<int>(left.size()) / std::max(1, representatives));
    std::vector<std::int32_t> chosen;
    for (int rank = 0; rank < std::ssize(left) && std::ssize(chosen) < representatives; rank += step)
      chosen.push_back(left[static_cast<std::size_t>(rank)]);
    take(chosen, kept, representatives * page);
    return kept;
  }

  /// 1 for kept tokens: the pages are chosen from the scores of all heads together.
  Matrix choice(const LayerView& view, const Scoring& how) const {
    const Matrix scores = how.grouping(view.window_attention(window, how.window_end), view.group());
    const Candidates candidates = candidates_of(view.tokens(), how);
    const std::vector<int> distance = distances(signatures(scores, candidates), view.stored_layer());
    const int slots = std::clamp(how.budget - how.sinks - how.recent, 0, candidates.count);
    Matrix kept(scores.rows(), scores.columns());
    for (int row = 0; row < scores.rows(); ++row)
      std::ranges::copy(kept_of(candidates.of(scores.row(row)), slots, distance), candidates.of(kept.row(row)).begin());
    return kept;
  }

  Plan plan() const {
    return {
        .grouping = {.heads = heads},
        .score = {.score = [*this](const LayerView& view, const Scoring& how) { return choice(view, how); },
                  .needs = last_queries(window),
                  .reads_recent = true,
                  .reads_budget = true,
                  .reads_sinks = true,
                  .places_window = true,
                  .name = name_with_values(card.name, *this)},
        .protect = {.recent = Amount::tokens(window)},
    };
  }
};

const Registered<KvCrush> registered;

}  // namespace
}  // namespace kvreplay
