#include "policies/sharing/sharing.h"

#include <algorithm>
#include <functional>

#include "policies/plan_part.h"

namespace kvreplay {
namespace {

struct Every {
  static constexpr PartKind kind = PartKind::share;
  static constexpr const char* name = "every";
  static constexpr const char* summary = "groups of `reuse` adjacent layers use the set of their first layer";

  int reuse = 2;

  void parameters(Parameters& p) {
    p.add("reuse", reuse, IntRange{.least = 1, .up_to = UpTo::layers}, "number of adjacent layers that share a set");
  }
  void fill(Plan& plan) const { plan.share = every(reuse); }
};

struct OneLayer {
  static constexpr PartKind kind = PartKind::share;
  static constexpr const char* name = "one";
  static constexpr const char* summary = "all layers use the set of one layer";

  int layer = -1;

  void parameters(Parameters& p) {
    p.add("layer", layer, any_layer, "layer whose set all layers use; -1 is the last layer");
  }
  void fill(Plan& plan) const { plan.share = one_layer(layer); }
};

constexpr Choice<LayerPool> pool_words[] = {
    {"mean", LayerPool::mean}, {"max", LayerPool::max}, {"all-rows", LayerPool::all_rows}};

struct Pooled {
  static constexpr PartKind kind = PartKind::share;
  static constexpr const char* name = "pooled";
  static constexpr const char* summary = "all layers use one set, by the mean or maximum of their scores";

  LayerPool over_layers = LayerPool::mean;

  void parameters(Parameters& p) {
    p.add<LayerPool>("over_layers", over_layers, pool_words,
                     "mean or maximum over layers; all-rows: maximum over layers and heads, one set for all heads");
  }
  void fill(Plan& plan) const { plan.share = pooled_over_layers(over_layers); }
};

void enter_maximum(const Matrix& scores, Matrix& pooled) {
  std::ranges::transform(pooled.values(), scores.values(), pooled.values().begin(),
                         [](double a, double b) { return std::max(a, b); });
}

/// In every row the maximum over rows.
void spread_maximum(Matrix& pooled) {
  for (int j = 0; j < pooled.columns(); ++j) {
    double most = pooled(0, j);
    for (int row = 1; row < pooled.rows(); ++row) most = std::max(most, pooled(row, j));
    for (int row = 0; row < pooled.rows(); ++row) pooled(row, j) = most;
  }
}

Matrix pool(LayerScores layers, LayerPool how) {
  Matrix pooled = *layers.front();
  for (const Matrix* scores : layers.subspan(1))
    if (how == LayerPool::mean)
      std::ranges::transform(pooled.values(), scores->values(), pooled.values().begin(), std::plus());
    else
      enter_maximum(*scores, pooled);
  if (how == LayerPool::mean)
    for (double& sum : pooled.values()) sum /= static_cast<double>(layers.size());
  if (how == LayerPool::all_rows) spread_maximum(pooled);
  return pooled;
}

const RegisteredFixedPart registered_none{PartKind::share, "none", "every layer has its own set",
                                          [](Plan& plan) { plan.share = {}; }};
const RegisteredPart<Every> registered_every;
const RegisteredPart<OneLayer> registered_one;
const RegisteredPart<Pooled> registered_pooled;

}  // namespace

Sharing every(int n) {
  if (n == 1) return {};
  return {.source_of = [n](int layer, int) { return layer / n * n; }};
}

Sharing last_of(int n) {
  if (n == 1) return {};
  return {.source_of = [n](int layer, int layers) { return std::min(layers, (layer / n + 1) * n) - 1; }};
}

Sharing pooled_over_layers(LayerPool how) {
  return {.source_of = [](int, int layers) { return layers - 1; },
          .pool = [how](LayerScores layers) { return pool(layers, how); }};
}

Sharing one_layer(int layer) {
  return {.source_of = [layer](int, int layers) { return layer < 0 ? layers + layer : layer; }};
}

}  // namespace kvreplay
