#include "policies/policy.h"

namespace kvreplay {
namespace {

struct KeyDiff {
  static constexpr Card card{
      .name = "keydiff",
      .summary =
          "Keys with the lowest cosine similarity to the mean direction of the resident keys; one-shot, or in blocks "
          "with schedule=every(128)",
      .paper = "Park et al. 2025, KeyDiff, arXiv:2504.15364",
      .score = "s[h,j] = -cos(k_j, mean over resident i of k_i / |k_i|)",
      .family = Family::geometry,
  };

  void parameters(Parameters&) {}

  /// [Hkv, n]: cosine similarity of each key, at its position in the cache, and the mean of k / ‖k‖; 0 if either is
  /// zero.
  static const Matrix& anchor_cosines(const LayerView& view) {
    const int threads = view.backend().threads();
    const Matrix& anchor = view.remember("key_anchor", {}, [&] { return mean_direction(view.keys(), threads); });
    return view.remember("anchor_cosines", {}, [&] { return cosines(view.keys(), anchor, threads); });
  }

  Plan plan() const {
    const auto score = [](const LayerView& view, const Scoring&) {
      Matrix scores = anchor_cosines(view);
      for (double& number : scores.values()) number = -number;
      return scores;
    };
    return {.score = {.score = score, .name = "keydiff"}};
  }
};

const Registered<KeyDiff> registered;

}  // namespace
}  // namespace kvreplay
