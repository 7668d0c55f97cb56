#include "policies/stores/quantised.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "error.h"
#include "float_types.h"
#include "policies/plan_part.h"
#include "policies/stores/number_format.h"
#include "policies/stores/stores.h"

namespace kvreplay {
namespace {

struct QuantisedPart : Quantised {
  static constexpr PartKind kind = PartKind::store;
  static constexpr const char* name = "quantised";
  static constexpr const char* summary = "quantises keys per channel and values per token";

  void fill(Plan& plan) const { plan.store = store(); }
};

const RegisteredPart<QuantisedPart> registered;

using Rows = std::span<float* const>;  // tokens of one head, [d] each

/// Rounds numbers in [0, 2^22] to integers, halves to even: their fraction has no place in the sum. Unlike std::rint,
/// it needs no call where the instruction is missing.
float rounded(float number) {
  constexpr float beyond_fractions = 0x1.8p23F;
  return number + beyond_fractions - beyond_fractions;
}

/// Groups of some tokens by `group_channels` channels, of all channels at once. False where mn or s is beyond float16.
bool quantise_tokens(Rows tokens, int dim, int group_channels, int bits) {
  const auto channels = static_cast<std::size_t>(dim), step = static_cast<std::size_t>(group_channels);
  const auto levels = static_cast<float>((1 << bits) - 1);
  std::vector<float> least(channels, std::numeric_limits<float>::infinity()), most(channels, -least.front());
  for (const float* token : tokens)
    for (std::size_t c = 0; c < channels; ++c) {
      least[c] = std::min(least[c], token[c]);
      most[c] = std::max(most[c], token[c]);
    }
  // A group of equal numbers has the scale 0 and the level 0: finite numbers divided by infinity.
  std::vector<float> zero_points(channels), scales(channels), divisors(channels);
  for (std::size_t first = 0; first < channels; first += step) {
    const std::size_t count = std::min(step, channels - first);
    const float zero_point = rounded_to_float16(std::ranges::min(std::span(least).subspan(first, count)));
    const float scale =
        rounded_to_float16((std::ranges::max(std::span(most).subspan(first, count)) - zero_point) / levels);
    if (!std::isfinite(scale)) return false;  // an infinite zero point makes it infinite too
    std::fill_n(zero_points.begin() + static_cast<std::ptrdiff_t>(first), count, zero_point);
    std::fill_n(scales.begin() + static_cast<std::ptrdiff_t>(first), count, scale);
    std::fill_n(divisors.begin() + static_cast<std::ptrdiff_t>(first), count,
                scale == 0 ? std::numeric_limits<float>::infinity() : scale);
  }
  for (float* token : tokens)
    for (std::size_t c = 0; c < channels; ++c) {
      const float level = std::min(std::max((token[c] - zero_points[c]) / divisors[c], 0.0F), levels);
      token[c] = rounded(level) * scales[c] + zero_points[c];
    }
  return true;
}

/// All groups of `group_tokens` x `group_channels` numbers of these tokens; the last ones may be short.
bool quantise(Rows tokens, int dim, int group_tokens, int group_channels, int bits) {
  const auto step = static_cast<std::size_t>(group_tokens);
  for (std::size_t begin = 0; begin < tokens.size(); begin += step)
    if (!quantise_tokens(tokens.subspan(begin, std::min(step, tokens.size() - begin)), dim, group_channels, bits))
      return false;
  return true;
}

/// Tokens of one head in `numbers`, [heads, T, d].
std::vector<float*> rows_of_head(std::vector<float>& numbers, const TensorView& shape, int head,
                                 std::span<const std::int32_t> positions) {
  std::vector<float*> rows;
  for (const std::int32_t position : positions) rows.push_back(row_of(numbers, shape, head, position).data());
  return rows;
}

double bits_of_number(const Quantised& part) { return part.bits + 32.0 / part.group; }

std::unique_ptr<StoredLayer> stored(const Quantised& part, const LayerView& view, const KeptSet& kept) {
  const LayerTensors& exact = view.tensors();
  std::unique_ptr<StoredLayer> layer = exact_copy(view);

  double bits = 0;
  for (int head = 0; head < exact.k.heads; ++head) {
    const std::vector<std::int32_t> positions = held_of_prompt(view, kept, head);
    const int held = static_cast<int>(positions.size());
    const int quantised_keys = part.residual == 0 ? held : held - held % part.residual;
    const int quantised_values = std::max(0, held - part.residual);

    const std::vector<float*> keys = rows_of_head(layer->keys, exact.k, head, positions);
    const std::vector<float*> values = rows_of_head(layer->values, exact.v, head, positions);
    if (!quantise(Rows(keys).first(static_cast<std::size_t>(quantised_keys)), exact.k.dim, part.group, 1, part.bits) ||
        !quantise(Rows(values).first(static_cast<std::size_t>(quantised_values)), exact.v.dim, 1, part.group,
                  part.bits))
      throw Error{Refusal::input, fmt::format("/layers/{:03}", view.stored_layer()), "quantised keys or values",
                  "zero points and scales within float16", "a larger value in KV head " + std::to_string(head)};

    const auto bits_of = [&](int quantised, int dim) {
      return (quantised * bits_of_number(part) + (held - quantised) * 16.0) * dim;
    };
    bits += bits_of(quantised_keys, exact.k.dim) + bits_of(quantised_values, exact.v.dim);
  }
  layer->bytes = bits / 8;
  return layer;
}

}  // namespace

void Quantised::parameters(Parameters& p) {
  const auto read = p.of_part("store");
  p.add("bits", bits, IntRange{.least = 1, .most = 8}, "bits per quantised number");
  p.add("group", group, IntRange{.least = 1}, "numbers that share a scale and a zero point");
  p.add("residual", residual, IntRange{.least = 0}, "maximum number of last tokens in full precision");
}

StorePtr Quantised::store() const {
  Store store = changing_store("store=quantised", [part = *this](const LayerView& view, const KeptSet& kept,
                                                                 const Partner&) { return stored(part, view, kept); });
  // With a residual, the number of quantised keys is a multiple of it: one more token may take fewer bytes.
  if (residual == 0)
    store.bytes = [bits = bits_of_number(*this)](const LayerTensors& layer, int, int tokens) {
      return bits / 8 * layer.k.heads * (layer.k.dim + layer.v.dim) * tokens;
    };
  return std::make_shared<const Store>(std::move(store));
}

}  // namespace kvreplay
