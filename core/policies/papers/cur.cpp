#include <algorithm>

#include "policies/plan_part.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

enum class Use { product, key, value, average };

constexpr Choice<Use> use_words[] = {
    {"product", Use::product}, {"key", Use::key}, {"value", Use::value}, {"avg", Use::average}};

/// Squares of norms, each divided by the sum of those in its block; 0 where that is 0.
Matrix shares_of_blocks(Matrix norms, int block) {
  for (int row = 0; row < norms.rows(); ++row)
    for (int first = 0; first < norms.columns(); first += block) {
      const int end = std::min(first + block, norms.columns());
      double sum = 0;
      for (int j = first; j < end; ++j) sum += norms(row, j) *= norms(row, j);
      for (int j = first; j < end && sum > 0; ++j) norms(row, j) /= sum;
    }
  return norms;
}

struct Cur {
  static constexpr Card card{
      .name = "cur",
      .summary = "tokens whose keys and values are long among their neighbours, and the first ones",
      .paper = "Sengupta et al. 2025, CurDKV, arXiv:2509.15038",
      .score = "s[h,j] = |k_j|^2 |v_j|^2 / (sum of |k|^2 in j's block * sum of |v|^2 in it)",
      .family = Family::geometry,
  };

  Use use = Use::product;
  int block = 16;
  int sinks = 4;

  void parameters(Parameters& p) {
    p.add<Use>("use", use, use_words, "the product of the shares of key and value, one of them, or their mean");
    p.add("block", block, IntRange{.least = 1}, "neighbours that a token is held against");
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "first tokens that always stay");
  }

  Matrix scores(const LayerView& view) const {
    if (use == Use::value) return shares_of_blocks(view.value_norms(2.0), block);
    Matrix scores = shares_of_blocks(view.key_norms(2.0), block);
    if (use == Use::key) return scores;
    const Matrix values = shares_of_blocks(view.value_norms(2.0), block);
    for (int row = 0; row < scores.rows(); ++row)
      for (int j = 0; j < scores.columns(); ++j)
        scores(row, j) = use == Use::product ? scores(row, j) * values(row, j) : (scores(row, j) + values(row, j)) / 2;
    return scores;
  }

  Plan plan() const {
    const auto score = [*this](const LayerView& view, const Scoring&) { return scores(view); };
    return {.score = {.score = score, .name = name_with_values(card.name, *this)}, .protect = {.sinks = sinks}};
  }
};

const Registered<Cur> registered;

}  // namespace
}  // namespace kvreplay
