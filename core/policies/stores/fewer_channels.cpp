#include "policies/stores/fewer_channels.h"

#include <algorithm>

#include "attention/softmax_keys.h"
#include "float_types.h"
#include "policies/arithmetic/ranking.h"
#include "policies/plan_part.h"
#include "policies/stores/stores.h"

namespace kvreplay {
namespace {

struct FewerChannelsPart : FewerChannels {
  static constexpr PartKind kind = PartKind::store;
  static constexpr const char* name = "fewer-channels";
  static constexpr const char* summary =
      "prunes the key channels that contribute least to the logits of the last queries";

  void fill(Plan& plan) const { plan.store = store(); }
};

const RegisteredPart<FewerChannelsPart> registered;

/// [Hq, d]: sum of the squares of each channel over the last `window` queries, or over all queries so far if there are
/// fewer. Host code: it reads a few rows of each head.
const Matrix& query_squares(const LayerView& view, int window) {
  const int seen = view.residents().seen, count = view.queries_before(window);
  return view.remember("query_squares", {static_cast<double>(count)}, [&] {
    const TensorView& q = view.tensors().q;
    Matrix squares(q.heads, q.dim);
    for (std::int32_t position = seen - count; position < seen; ++position) {
      const int stored = stored_query(view.tensors(), position);
      for (int head = 0; head < q.heads; ++head)
        for (int c = 0; c < q.dim; ++c) {
          const double x = load(q.row(head, stored), q.dtype, static_cast<std::size_t>(c));
          squares(head, c) += x * x;
        }
    }
    return squares;
  });
}

/// [d]: squared contribution of each channel of a KV head to the logits, up to a factor: sums instead of means, so that
/// equal scores of whole numbers have equal bits.
std::vector<double> channel_scores(const LayerView& view, const Matrix& queries, std::vector<float>& keys, int head,
                                   std::span<const std::int32_t> held) {
  const TensorView& shape = view.tensors().k;
  std::vector<double> of_keys(static_cast<std::size_t>(shape.dim)), of_queries = of_keys;
  for (const std::int32_t token : held) {
    const std::span<const float> key = row_of(keys, shape, head, token);
    for (std::size_t c = 0; c < key.size(); ++c)
      of_keys[c] += static_cast<double>(key[c]) * static_cast<double>(key[c]);
  }
  for (int query_head = head * view.group(); query_head < (head + 1) * view.group(); ++query_head)
    for (std::size_t c = 0; c < of_queries.size(); ++c) of_queries[c] += queries.row(query_head)[c];
  for (std::size_t c = 0; c < of_keys.size(); ++c) of_keys[c] *= of_queries[c];
  return of_keys;
}

int dropped_channels(const FewerChannels& part, const TensorView& keys) {
  return static_cast<int>(keys.dim * part.ratio);
}

/// Of a KV head with `held` tokens, of which the keys of `thinned` ones have fewer channels.
double bytes_of(const FewerChannels& part, const LayerTensors& layer, std::size_t held, std::size_t thinned) {
  return static_cast<double>(held * layer.token_bytes()) -
         static_cast<double>(thinned * size_of(layer.k.dtype)) * dropped_channels(part, layer.k);
}

std::size_t thinned_of(const FewerChannels& part, std::size_t held) {
  return held - std::min(held, static_cast<std::size_t>(part.recent));
}

std::unique_ptr<StoredLayer> stored(const FewerChannels& part, const LayerView& view, const KeptSet& kept) {
  std::unique_ptr<StoredLayer> layer = exact_copy(view);
  const Matrix& queries = query_squares(view, part.window);
  const TensorView& k = view.tensors().k;
  const int dropped = dropped_channels(part, k);
  for (int head = 0; head < k.heads; ++head) {
    const std::vector<std::int32_t> held = held_of_prompt(view, kept, head);
    if (held.empty()) continue;
    const std::vector<std::int32_t> order = ranked(channel_scores(view, queries, layer->keys, head, held));
    const std::size_t thinned = thinned_of(part, held.size());
    for (const std::int32_t token : std::span(held).first(thinned))
      for (const std::int32_t c : std::span(order).last(static_cast<std::size_t>(dropped)))
        row_of(layer->keys, k, head, token)[static_cast<std::size_t>(c)] = 0;
    layer->bytes += bytes_of(part, view.tensors(), held.size(), thinned);
  }
  return layer;
}

}  // namespace

void FewerChannels::parameters(Parameters& p) {
  const auto read = p.of_part("store");
  p.add("window", window, IntRange{.least = 1}, "number of last queries that score the channels");
  p.add("ratio", ratio, RealRange{}, "share of the key channels that is pruned");
  p.add("recent", recent, IntRange{.least = 0, .up_to = UpTo::prompt},
        "recent window: last tokens that keep all channels");
}

StorePtr FewerChannels::store() const {
  Store store = changing_store(
      "store=fewer-channels",
      [part = *this](const LayerView& view, const KeptSet& kept, const Partner&) { return stored(part, view, kept); });
  store.needs = last_queries(window);
  store.bytes = [part = *this](const LayerTensors& layer, int, int tokens) {
    const auto held = static_cast<std::size_t>(tokens);
    return layer.k.heads * bytes_of(part, layer, held, thinned_of(part, held));
  };
  return std::make_shared<const Store>(std::move(store));
}

}  // namespace kvreplay
