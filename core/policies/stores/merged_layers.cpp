#include "policies/stores/merged_layers.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <numbers>
#include <numeric>
#include <span>
#include <vector>

#include "float_types.h"
#include "policies/arithmetic/ranking.h"
#include "policies/stores/stores.h"

namespace kvreplay {
namespace {

using Distance = MergedLayers::Distance;

constexpr Choice<Distance> distance_words[] = {{"paper", Distance::paper}, {"code", Distance::code}};

double product(std::span<const double> x, std::span<const double> y) {
  return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
}

/// Angle between two non-zero vectors, from |a|^2 and <a, b>. It uses the component of b orthogonal to a, times |a|^2,
/// because an arc cosine loses half of its digits near 0 and pi. A single quotient makes equal angles of whole numbers
/// have equal bits.
double angle_between(std::span<const double> a, std::span<const double> b, double square, double along) {
  double upright = 0;
  for (std::size_t c = 0; c < a.size(); ++c) {
    const double part = b[c] * square - a[c] * along;
    upright += part * part;
  }
  const double angle = std::atan(std::sqrt(upright / (square * along * along)));
  return along < 0 ? std::numbers::pi - angle : angle;
}

std::vector<double> numbers_of(const TensorView& tensor, int head, int token) {
  std::vector<double> numbers(static_cast<std::size_t>(tensor.dim));
  read_row(tensor, head, token, numbers);
  return numbers;
}

/// A token's vector in both layers of a pair: lengths, and the angle between them.
struct Pair {
  std::vector<double> lower, upper;
  double lower_length = 0, upper_length = 0, angle = 0;  // 0 beside a zero vector

  Pair(const TensorView& below, const TensorView& above, int head, int token)
      : lower(numbers_of(below, head, token)), upper(numbers_of(above, head, token)) {
    const double square = product(lower, lower);
    lower_length = std::sqrt(square);
    upper_length = std::sqrt(product(upper, upper));
    if (has_directions()) angle = angle_between(lower, upper, square, product(lower, upper));
  }

  bool has_directions() const { return lower_length > 0 && upper_length > 0; }
  /// False for opposite vectors, which have no interpolated direction, and for zero vectors.
  bool can_merge() const { return has_directions() && angle < std::numbers::pi - 1e-6; }
};

/// Pairs the layers from L/2 on; a layer without a partner is stored alone.
int partner_of(int layer, int layers) {
  const int first = (layers + 1) / 2;
  if (layer < first) return layer;
  const int other = first + ((layer - first) ^ 1);
  return other < layers ? other : layer;
}

/// The tokens that are not merged. `directed`: angles between non-zero vectors, which alone define the range of angles.
std::vector<bool> apart(const MergedLayers& part, const std::vector<double>& angles,
                        const std::vector<double>& directed) {
  std::vector<bool> result(angles.size());
  if (part.distance == Distance::code) {
    const auto count = static_cast<std::int64_t>(part.gap * static_cast<double>(angles.size()));
    for (const std::int32_t j : largest(angles, count)) result[static_cast<std::size_t>(j)] = true;
    return result;
  }
  if (directed.empty()) return result;
  const auto [least, most] = std::ranges::minmax(directed);
  for (std::size_t j = 0; j < angles.size(); ++j) result[j] = angles[j] > least + part.gap * (most - least);
  return result;
}

/// Merges one KV head of keys or values in one of two layers. Returns the count of numbers stored for both layers.
double merge(const MergedLayers& part, const TensorView& below, const TensorView& above, bool is_upper, int head,
             int prompt, std::vector<float>& out) {
  std::vector<double> angles, directed;
  for (int token = 0; token < prompt; ++token) {
    const Pair pair(below, above, head, token);
    angles.push_back(pair.angle);
    if (pair.has_directions()) directed.push_back(pair.angle);
  }
  const std::vector<bool> stays = apart(part, angles, directed);
  double numbers = 0;
  for (int token = 0; token < prompt; ++token) {
    const Pair pair(below, above, head, token);
    if (stays[static_cast<std::size_t>(token)] || !pair.can_merge()) {
      numbers += 2.0 * below.dim;
      continue;
    }
    numbers += below.dim + 2.0;
    const double unit = pair.angle > 0 ? std::sin(pair.angle) : 1.0;
    const double of_lower = pair.angle > 0 ? std::sin((1 - part.t) * pair.angle) / unit : 1 - part.t;
    const double of_upper = pair.angle > 0 ? std::sin(part.t * pair.angle) / unit : part.t;
    const double own_length = is_upper ? pair.upper_length : pair.lower_length;
    const std::span<float> row = row_of(out, below, head, token);
    for (std::size_t c = 0; c < row.size(); ++c)
      row[c] = static_cast<float>(
          own_length * (of_lower * pair.lower[c] / pair.lower_length + of_upper * pair.upper[c] / pair.upper_length));
  }
  return numbers;
}

std::unique_ptr<StoredLayer> stored(const MergedLayers& part, const LayerView& view, const Partner& partner) {
  std::unique_ptr<StoredLayer> layer = exact_copy(view);
  const LayerTensors& own = view.tensors();
  if (partner.layer == view.layer()) {
    layer->bytes = static_cast<double>(own.token_bytes()) * own.k.heads * view.prompt();
    return layer;
  }
  const bool is_upper = partner.layer < view.layer();
  const LayerTensors& below = is_upper ? partner.tensors : own;
  const LayerTensors& above = is_upper ? own : partner.tensors;
  std::vector<double> bytes(static_cast<std::size_t>(own.k.heads));
  view.on_threads(bytes.size(), [&](std::size_t i) {
    const auto head = static_cast<int>(i);
    const double keys = merge(part, below.k, above.k, is_upper, head, view.prompt(), layer->keys);
    const double values = merge(part, below.v, above.v, is_upper, head, view.prompt(), layer->values);
    bytes[i] =
        (keys * static_cast<double>(size_of(own.k.dtype)) + values * static_cast<double>(size_of(own.v.dtype))) / 2;
  });
  layer->bytes = std::accumulate(bytes.begin(), bytes.end(), 0.0);
  return layer;
}

}  // namespace

void MergedLayers::parameters(Parameters& p) {
  p.add("t", t, RealRange{},
        "interpolation parameter of the shared direction: 0 is that of the lower layer, 1 that of the upper layer");
  p.add<Distance>("distance", distance, distance_words,
                  "criterion for tokens that are not merged: their angle relative to the range of angles, or its rank");
  p.add("gap", gap, RealRange{},
        "tokens with angles above min + gap (max - min) are not merged; with distance=code, this share of the tokens");
}

StorePtr MergedLayers::store() const {
  Store store = changing_store("store=merged-layers",
                               [part = *this](const LayerView& view, const KeptSet&, const Partner& partner) {
                                 return stored(part, view, partner);
                               });
  store.required.push_back(
      {Property::every_token, "merged layers must hold the same tokens", "a policy that keeps every token"});
  store.partner = partner_of;
  return std::make_shared<const Store>(std::move(store));
}

}  // namespace kvreplay
