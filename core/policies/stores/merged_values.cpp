#include "policies/stores/merged_values.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "float_types.h"
#include "policies/plan_part.h"
#include "policies/stores/stores.h"
#include "random.h"

namespace kvreplay {
namespace {

using Mode = MergedValues::Mode;

constexpr Choice<Mode> mode_words[] = {{"expected", Mode::expected}, {"sampled", Mode::sampled}};

struct MergedValuesPart : MergedValues {
  static constexpr PartKind kind = PartKind::store;
  static constexpr const char* name = "merged-values";
  static constexpr const char* summary = "merges the values of evicted tokens into the next kept tokens";

  void fill(Plan& plan) const { plan.store = store(); }
};

const RegisteredPart<MergedValuesPart> registered;

/// The share of v_i, 0 to 1, that the receiving tokens take together.
double taken(double own, std::span<const double> of_takers, Mode mode, std::uint64_t draw) {
  const double sum = std::accumulate(of_takers.begin(), of_takers.end(), 0.0);
  const double mean = sum / static_cast<double>(of_takers.size());
  const double probability = own <= 0 ? 0.0 : own >= mean ? 1.0 : own / mean;
  if (mode == Mode::expected) return probability;
  return uniform(draw) < probability ? 1.0 : 0.0;
}

std::unique_ptr<StoredLayer> stored(const MergedValues& part, const LayerView& view, const KeptSet& kept) {
  std::unique_ptr<StoredLayer> layer = exact_copy(view);
  const TensorView& v = view.tensors().v;
  const Matrix attention = Grouping{}(view.cumulative_attention(), view.group());
  const auto dim = static_cast<std::size_t>(v.dim);
  std::vector<double> bytes(static_cast<std::size_t>(v.heads));
  view.on_threads(bytes.size(), [&](std::size_t number) {
    const auto head = static_cast<int>(number);
    const std::vector<std::int32_t> held = held_of_prompt(view, kept, head);
    bytes[number] = static_cast<double>(held.size() * view.tensors().token_bytes());
    std::vector<double> of_held;  // attention
    for (const std::int32_t token : held) of_held.push_back(attention(head, token));
    std::vector<double> added(held.size() * dim);
    std::size_t behind = held.size();  // the first held token behind token i
    for (std::int32_t i = view.prompt() - 1; i >= 0; --i) {
      if (behind > 0 && held[behind - 1] == i) {
        --behind;
        continue;
      }
      const std::size_t takers = std::min(held.size() - behind, static_cast<std::size_t>(part.merge));
      if (takers == 0) continue;
      const double share = taken(attention(head, i), std::span(of_held).subspan(behind, takers), part.mode,
                                 chain(part.seed, view.stored_layer(), head, i)) /
                           static_cast<double>(takers);
      if (share == 0) continue;
      const std::byte* value = v.row(head, i);
      for (std::size_t c = 0; c < dim; ++c) {
        const double part_of_value = share * load(value, v.dtype, c);
        for (std::size_t taker = behind; taker < behind + takers; ++taker) added[taker * dim + c] += part_of_value;
      }
    }
    for (std::size_t j = 0; j < held.size(); ++j) {
      const std::span<float> value = row_of(layer->values, v, head, held[j]);
      for (std::size_t c = 0; c < dim; ++c) value[c] = static_cast<float>(value[c] + added[j * dim + c]);
    }
  });
  layer->bytes = std::accumulate(bytes.begin(), bytes.end(), 0.0);
  return layer;
}

}  // namespace

void MergedValues::parameters(Parameters& p) {
  const auto read = p.of_part("store");
  p.add("merge", merge, IntRange{.least = 1}, "number of kept tokens that receive the value of an evicted one");
  p.add<Mode>("mode", mode, mode_words, "uses the probability of a merge as its weight, or samples merges");
  p.add_seed("seed", seed, "random seed of mode=sampled");
}

StorePtr MergedValues::store() const {
  Store store = changing_store(
      "store=merged-values",
      [part = *this](const LayerView& view, const KeptSet& kept, const Partner&) { return stored(part, view, kept); });
  store.needs = all_queries();
  store.has_exact_size = true;
  return std::make_shared<const Store>(std::move(store));
}

}  // namespace kvreplay
