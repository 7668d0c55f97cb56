#include <algorithm>
#include <cmath>
#include <complex>
#include <span>
#include <vector>

#include "observables/query_pairs.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

/// mean over delta = 1, 2, 4, ..., 2^16 of e^{i (next + delta) omega} for each pair.
std::vector<std::complex<double>> mean_turns(const Rope& rope, int next) {
  constexpr int offsets = 17;
  std::vector<std::complex<double>> turns;
  for (const double omega : rope.inv_freq) {
    std::complex<double> sum;
    for (int i = 0; i < offsets; ++i) sum += std::polar(1.0, (next + std::ldexp(1.0, i)) * omega);
    turns.push_back(sum / static_cast<double>(offsets));
  }
  return turns;
}

/// [Hq, n]: s[h,j] of the card, with the un-rotated key kappa as a product with the key at its position:
///   Re(mu conj(kappa) e^{i (t - j + delta) omega}) = Re(mu e^{i (t + delta) omega} conj(k)) / attention_scaling.
Matrix distance_scores(const LayerView& view) {
  const LayerTensors& layer = view.tensors();
  const int seen = view.residents().seen;
  const int next = view.residents().place == Positions::cache ? view.tokens() : seen;
  const auto pairs = layer.rope.inv_freq.size();
  const Matrix& means =
      view.remember("query_pair_means", {}, [&] { return query_pair_means(layer, seen, view.backend().threads()); });
  const std::vector<std::complex<double>> turns = mean_turns(layer.rope, next);
  const Vectors keys = view.keys();
  Matrix scores(view.query_heads(), view.tokens());
  view.on_threads(static_cast<std::size_t>(view.query_heads()), [&](std::size_t number) {
    const auto head = static_cast<int>(number);
    const std::span<const double> of_head = means.row(head);
    std::vector<std::complex<double>> turned;
    std::vector<double> excess, key(static_cast<std::size_t>(keys.dim));
    for (std::size_t i = 0; i < pairs; ++i) {
      const std::complex<double> mean{of_head[i], of_head[pairs + i]};
      turned.push_back(mean * turns[i]);
      excess.push_back(of_head[2 * pairs + i] - std::abs(mean));
    }
    for (int j = 0; j < view.tokens(); ++j) {
      keys.read(head / view.group(), j, key);
      double sum = 0;
      for (std::size_t i = 0; i < pairs; ++i) {
        const auto [real, imaginary] = pair_place(layer.rope, i);
        sum += turned[i].real() * key[real] + turned[i].imag() * key[imaginary] +
               excess[i] * std::sqrt(key[real] * key[real] + key[imaginary] * key[imaginary]);
      }
      scores(head, j) = layer.rope.attention_scaling * sum;
    }
  });
  return scores;
}

/// Subtracts the mean and divides by the standard deviation.
void standardise(std::span<double> scores) {
  constexpr double least_deviation = 1e-6;
  const auto count = static_cast<double>(scores.size());
  double mean = 0, squares = 0;
  for (const double score : scores) mean += score / count;
  for (const double score : scores) squares += (score - mean) * (score - mean) / count;
  for (double& score : scores) score = (score - mean) / std::max(std::sqrt(squares), least_deviation);
}

struct TriAttention {
  static constexpr Card card{
      .name = "tri-attention",
      .summary =
          "Expected logits of future queries by distance, from means of the prompt's queries before RoPE; a recent "
          "window is protected",
      .paper = "TriAttention, arXiv:2604.04921",
      .score =
          "s[h,j] = mean over delta = 1, 2, 4, ..., 2^16 of sum over pairs f of |mu_f| |k_f| cos((P - j + delta) "
          "omega_f + phi_f) + (m_f - |mu_f|) |k_f|, mu_f mean and m_f mean modulus of the queries, phi_f the angle "
          "from k_f to mu_f, all before RoPE; standardised in each query head",
      .family = Family::geometry,
  };

  Amount recent = Amount::tokens(128);
  Grouping grouping = {.aggregate = Aggregate::max};

  void parameters(Parameters& p) {
    p.add("recent", recent, "recent window: last tokens, always kept");
    grouping.parameters(p);
  }

  static Matrix scores(const LayerView& view, const Scoring& how) {
    Matrix scores = distance_scores(view);
    const auto count = static_cast<std::size_t>(scores.columns());
    const auto sinks = std::min(static_cast<std::size_t>(how.sinks), count);
    const auto recent = std::min(static_cast<std::size_t>(how.recent), count - sinks);
    for (int head = 0; head < scores.rows(); ++head) {
      const std::span<double> row = scores.row(head);
      const std::span<double> candidates = row.subspan(sinks, count - sinks - recent);
      standardise(candidates);
      const double most = candidates.empty() ? 0 : std::ranges::max(candidates);
      std::ranges::fill(row.first(sinks), most);
      std::ranges::fill(row.last(recent), most);
    }
    return how.grouping(scores, view.group());
  }

  Plan plan() const {
    return {
        .grouping = grouping,
        .score = {.score = scores,
                  .needs = {.all_queries = true, .rope = true},
                  .reads_recent = true,
                  .reads_sinks = true,
                  .name = card.name},
        .protect = {.recent = recent},
    };
  }
};

const Registered<TriAttention> registered;

}  // namespace
}  // namespace kvreplay
