#include <algorithm>

#include "policies/plan_part.h"
#include "policies/policy.h"

namespace kvreplay {
namespace {

enum class Use { product, key, value, average };

constexpr Choice<Use> use_words[] = {
    {"product", Use::product}, {"key", Use::key}, {"value", Use::value}, {"avg", Use::average}};

/// [Hkv, n]: ‖k‖₂² and ‖v‖₂². Squares of stored norms would be rounded twice; these sums are exact for numbers with
/// few digits.
const Matrix& squared_key_norms(const LayerView& view) {
  return view.remember("squared_key_norms", {},
                       [&] { return squared_lengths(view.stored_keys(), view.backend().threads()); });
}
const Matrix& squared_value_norms(const LayerView& view) {
  return view.remember("squared_value_norms", {},
                       [&] { return squared_lengths(view.stored_values(), view.backend().threads()); });
}

/// [heads, n]: the sum of the squares in a token's block; 1 where it is 0.
Matrix sums_of_blocks(const Matrix& squares, int block) {
  Matrix sums(squares.rows(), squares.columns());
  for (int row = 0; row < sums.rows(); ++row)
    for (int first = 0; first < sums.columns(); first += block) {
      const int end = std::min(first + block, sums.columns());
      double sum = 0;
      for (int j = first; j < end; ++j) sum += squares(row, j);
      for (int j = first; j < end; ++j) sums(row, j) = sum > 0 ? sum : 1.0;
    }
  return sums;
}

Matrix shares_of_blocks(const Matrix& squares, int block) {
  Matrix shares = sums_of_blocks(squares, block);
  for (std::size_t i = 0; i < shares.values().size(); ++i)
    shares.values()[i] = squares.values()[i] / shares.values()[i];
  return shares;
}

struct Cur {
  static constexpr Card card{
      .name = "cur",
      .summary =
          "CUR decomposition: combined leverage scores of keys and values, approximated by squared norms relative to "
          "neighbouring tokens",
      .paper = "Sengupta et al. 2025, CurDKV, arXiv:2509.15038",
      .score = "s[h,j] = |k_j|^2 |v_j|^2 / (sum of |k|^2 * sum of |v|^2), sums over the block of j",
      .family = Family::geometry,
  };

  Use use = Use::product;
  int block = 16;
  int sinks = 4;

  void parameters(Parameters& p) {
    p.add<Use>("use", use, use_words, "combination of key and value scores: their product, one of them, or their mean");
    p.add("block", block, IntRange{.least = 1}, "tokens per block; a token is compared with its block");
    p.add("sinks", sinks, IntRange{.up_to = UpTo::prompt}, "attention sinks: first tokens, always kept");
  }

  /// A single quotient of sums, rounded once, so that mathematically equal scores have equal bits.
  Matrix scores(const LayerView& view) const {
    if (use == Use::key) return shares_of_blocks(squared_key_norms(view), block);
    if (use == Use::value) return shares_of_blocks(squared_value_norms(view), block);
    const Matrix &keys = squared_key_norms(view), &values = squared_value_norms(view);
    const Matrix of_keys = sums_of_blocks(keys, block), of_values = sums_of_blocks(values, block);
    Matrix scores(keys.rows(), keys.columns());
    for (int row = 0; row < scores.rows(); ++row)
      for (int j = 0; j < scores.columns(); ++j) {
        const double k = keys(row, j), v = values(row, j), all_k = of_keys(row, j), all_v = of_values(row, j);
        scores(row, j) = use == Use::product ? k * v / (all_k * all_v) : (k * all_v + v * all_k) / (2 * all_k * all_v);
      }
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
