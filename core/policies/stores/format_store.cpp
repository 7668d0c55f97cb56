#include "policies/stores/format_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "error.h"
#include "float_types.h"
#include "policies/plan_part.h"
#include "policies/stores/hadamard.h"
#include "policies/stores/stores.h"

namespace kvreplay {
namespace {

enum class Side { keys, values };

/// A format of one name as a store for keys and values alike.
class FormatPart final : public PlanPart {
 public:
  explicit FormatPart(const FormatCard& card) : name_(card.name), format_(card.make()) {}

  Parameters parameters() override {
    Parameters declared{name_};
    declared.adopt_all("", format_->parameters());
    store_.parameters(declared);
    return declared;
  }
  void fill(Plan& plan) const override {
    FormatStore store = store_;
    store.keys = store.values = format_->format();
    plan.store = store.store("store=" + name_);
  }

 private:
  std::string name_;
  std::unique_ptr<ConfiguredFormat> format_;
  FormatStore store_;
};

struct KeysAndValuesPart : FormatStore {
  static constexpr PartKind kind = PartKind::store;
  static constexpr const char* name = "kv";
  static constexpr const char* summary = "keys and values in separate number formats, such as kv(q8_0,q4_0)";

  std::string keys = "exact", values = "exact";
  std::uint64_t seed = 0;

  void parameters(Parameters& p) {
    const auto read = p.of_part("store");
    constexpr const char* range = "exact, or the name of a store that is a number format";
    const auto normal = [this](std::string_view text) { return normal_format(text, seed); };
    p.add("keys", keys, range, normal, "format of keys");
    p.add("values", values, range, normal, "format of values");
    FormatStore::parameters(p);
  }
  void set_seed(std::uint64_t given) { seed = given; }
  void fill(Plan& plan) const {
    FormatStore formats = *this;
    formats.keys = parse_format(keys)->format();
    formats.values = parse_format(values)->format();
    plan.store = formats.store("store=kv");
  }
};

const RegisteredPart<KeysAndValuesPart> registered;

/// The size of the rotated blocks; 0: no rotation.
int rotation_of(const FormatStore& part, Side side, int dim) {
  constexpr int most_of_values = 64;
  if (part.hadamard == "false") return 0;
  if (part.hadamard != "true") return parse_int("hadamard", part.hadamard);
  const int block = 1 << std::countr_zero(static_cast<unsigned>(dim));
  return side == Side::values ? std::min(block, most_of_values) : block;
}

/// One tensor of a layer on its way through a format.
class Encoding {
 public:
  Encoding(const FormatStore& part, Side side, const LayerView& view, const TensorView& shape,
           std::vector<float>& numbers)
      : format_(side == Side::keys ? part.keys : part.values),
        rotation_(rotation_of(part, side, shape.dim)),
        view_(view),
        shape_(shape),
        numbers_(numbers) {}

  /// Encodes these tokens of each head.
  void encode(const std::vector<std::vector<std::int32_t>>& tokens) const {
    if (!format_.coder) return;
    const std::vector<float> largest = largest_of_heads();
    const Coder code = format_.coder(shape_.dim);
    view_.on_threads(tokens.size(), [&](std::size_t head) {
      for (const std::int32_t token : tokens[head]) encode(code, static_cast<int>(head), token, largest[head]);
    });
  }

 private:
  void rotate(std::span<float> vector) const {
    if (rotation_ > 0) rotate_by_hadamard(vector, rotation_);
  }

  void encode(const Coder& code, int head, std::int32_t token, float largest) const {
    const std::span<float> vector = row_of(numbers_, shape_, head, token);
    rotate(vector);
    code(vector, format_.range == NumberFormat::Range::vector ? largest_of(vector) : largest);
    rotate(vector);
    if (!std::ranges::all_of(vector, [](float x) { return std::isfinite(x); }))
      throw Error{Refusal::input, fmt::format("/layers/{:03}", view_.stored_layer()), "quantised keys or values",
                  "scales and minima within float16", fmt::format("a larger value in KV head {}", head)};
  }

  /// Of the vectors of the prompt that share a scale with those of each head; 0 where vectors share none.
  std::vector<float> largest_of_heads() const {
    std::vector<float> largest(static_cast<std::size_t>(shape_.heads));
    if (format_.range == NumberFormat::Range::vector) return largest;
    view_.on_threads(largest.size(), [&](std::size_t head) {
      for (int token = 0; token < view_.prompt(); ++token) {
        const std::span<float> row = row_of(numbers_, shape_, static_cast<int>(head), token);
        std::vector<float> vector(row.begin(), row.end());
        rotate(vector);
        largest[head] = std::max(largest[head], largest_of(vector));
      }
    });
    if (format_.range == NumberFormat::Range::tensor) std::ranges::fill(largest, std::ranges::max(largest));
    return largest;
  }

  const NumberFormat& format_;
  int rotation_;
  const LayerView& view_;
  const TensorView& shape_;
  std::vector<float>& numbers_;
};

/// As the part stores a treated layer.
FormatStore in_layer(const FormatStore& part, int layer) {
  FormatStore of_layer = part;
  if (std::ranges::binary_search(part.skip_layers.layers(), layer))
    of_layer.keys = of_layer.values = parse_format("exact")->format();
  return of_layer;
}

/// Of a head's `held` tokens, those that are encoded.
std::size_t encoded_of(const FormatStore& part, std::size_t held) {
  return held - std::min(held, static_cast<std::size_t>(part.residual));
}

/// Of encoded and exact tokens of all heads.
double bytes_of(const NumberFormat& format, const TensorView& shape, double encoded, double exact) {
  const double ranges = format.range == NumberFormat::Range::head ? shape.heads : 1;
  return encoded * format.bytes(shape.dim) + ranges * format.range_bytes + 2.0 * shape.dim * exact;
}

double bytes_of(const FormatStore& of_layer, const LayerTensors& layer, double encoded, double exact) {
  const double of_keys = bytes_of(of_layer.keys, layer.k, encoded, exact);
  return layer.value_is_key ? of_keys : of_keys + bytes_of(of_layer.values, layer.v, encoded, exact);
}

std::unique_ptr<StoredLayer> stored(const FormatStore& part, const LayerView& view, const KeptSet& kept,
                                    int layer_number) {
  const LayerTensors& exact = view.tensors();
  std::unique_ptr<StoredLayer> layer = exact_copy(view);
  const FormatStore of_layer = in_layer(part, layer_number);
  std::vector<std::vector<std::int32_t>> encoded;
  std::size_t held = 0, of_encoded = 0;
  for (int head = 0; head < exact.k.heads; ++head) {
    std::vector<std::int32_t>& tokens = encoded.emplace_back(held_of_prompt(view, kept, head));
    held += tokens.size();
    tokens.resize(encoded_of(part, tokens.size()));
    of_encoded += tokens.size();
  }
  layer->bytes = bytes_of(of_layer, exact, static_cast<double>(of_encoded), static_cast<double>(held - of_encoded));
  Encoding(of_layer, Side::keys, view, exact.k, layer->keys).encode(encoded);
  if (!exact.value_is_key) {
    Encoding(of_layer, Side::values, view, exact.v, layer->values).encode(encoded);
    return layer;
  }
  for (int head = 0; head < exact.k.heads; ++head)
    for (int token = 0; token < view.prompt(); ++token) {
      const std::span<float> value = row_of(layer->values, exact.v, head, token);
      std::ranges::copy(row_of(layer->keys, exact.k, head, token).first(value.size()), value.begin());
    }
  return layer;
}

void check_side(const FormatStore& part, Side side, const std::string& who, int dim) {
  const NumberFormat& format = side == Side::keys ? part.keys : part.values;
  const char* const of = side == Side::keys ? "keys" : "values";
  if (dim % format.block != 0)
    throw Error{Refusal::usage, who, fmt::format("the format of {} has blocks of {} numbers", of, format.block),
                fmt::format("a head dimension that is a multiple of {}", format.block), std::to_string(dim)};
  if (const int block = rotation_of(part, side, dim); format.coder && block > 0 && dim % block != 0)
    throw Error{Refusal::usage, who + ":hadamard", fmt::format("does not divide the head dimension of {}", of),
                fmt::format("a divisor of {}, or true", dim), std::to_string(block)};
}

}  // namespace

void register_format(FormatCard card) {
  parts(PartKind::store).add({card.name, card.summary, [card] { return std::make_unique<FormatPart>(card); }});
  number_formats().add(std::move(card));
}

void FormatStore::parameters(Parameters& p) {
  const auto read = p.of_part("store");
  p.add("residual", residual, IntRange{.least = 0}, "maximum number of last tokens in full precision");
  skip_layers.add_to(p, "treated layers, numbered from 0, that remain exact");
  p.add(
      "hadamard", hadamard, "false | true | power of two",
      [](std::string_view text) {
        const bool is_word = text == "false" || text == "true";
        if (!is_word && !std::has_single_bit(static_cast<unsigned>(parse_int("hadamard", text, 1))))
          throw Error{Refusal::usage, "hadamard", "not a power of two", "false, true, or a block size such as 64",
                      std::string(text)};
        return std::string(text);
      },
      "rotation before encoding: true takes the largest power of two that divides the head dimension, of values at "
      "most 64");
}

StorePtr FormatStore::store(const std::string& name) const {
  Store store = changing_store(name, [part = *this](const LayerView& view, const KeptSet& kept, const Partner& own) {
    return stored(part, view, kept, view.layer() - own.first);
  });
  store.stores_latents = true;
  store.exempts_layers = !skip_layers.layers().empty();
  store.bytes = [part = *this](const LayerTensors& layer, int number, int tokens) {
    const std::size_t encoded = encoded_of(part, static_cast<std::size_t>(tokens));
    const double heads = layer.k.heads, of_head = static_cast<double>(encoded);
    return bytes_of(in_layer(part, number), layer, heads * of_head, heads * (tokens - of_head));
  };
  store.check = [part = *this](const std::string& who, int layers, int key_dim, int value_dim) {
    part.skip_layers.check(layers);
    check_side(part, Side::keys, who, key_dim);
    if (value_dim > 0) check_side(part, Side::values, who, value_dim);
  };
  return std::make_shared<const Store>(std::move(store));
}

}  // namespace kvreplay
