// Stores of the papers that change keys or values: each held against its definition, written out with plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention_reference.h"
#include "fake_backend.h"
#include "policies/parts/fewer_channels.h"
#include "trace/float_types.h"

namespace kvreplay::testing {
namespace {

constexpr int prompt = 25;

class ChangingStore : public ::testing::Test {
 protected:
  std::unique_ptr<StoredLayer> stored(const Store& store, const KeptSet& kept) {
    return std::get<Transformed>(store).store(view, kept);
  }

  KeptSet all() const {
    KeptSet kept(Heads::layer, 1, prompt);
    kept.keep(0, 0, prompt);
    return kept;
  }

  double key(const StoredLayer& of, int head, int token, int c) const { return of.keys[index(head, token, c)]; }
  double value(const StoredLayer& of, int head, int token, int c) const { return of.values[index(head, token, c)]; }
  std::size_t index(int head, int token, int c) const { return static_cast<std::size_t>((head * 33 + token) * 8 + c); }

  RandomLayer layer{{.query_heads = 6, .kv_heads = 2, .tokens = 33, .dim = 8, .dtype = DType::float16}};
  FakeBackend backend;
  LayerTensors tensors = layer.tensors();
  LayerView view{backend, tensors, {.layer = 1, .layers = 4, .stored_layer = 1, .prompt = prompt}, {}};
};

/// Channels of a KV head by what they add to the logits of the last `window` queries, the least first.
std::vector<int> channels_by_size(const RandomLayer& layer, int head, int window, const std::vector<int>& held) {
  std::vector<double> sizes;
  for (int c = 0; c < 8; ++c) {
    double queries = 0, keys = 0;
    for (int h = 3 * head; h < 3 * head + 3; ++h)
      for (int t = prompt - window; t < prompt; ++t) queries += std::pow(layer.q.at(h, t, c), 2) / (3 * window);
    for (const int j : held) keys += std::pow(layer.k.at(head, j, c), 2) / static_cast<double>(held.size());
    sizes.push_back(queries * keys);
  }
  std::vector<int> order(8);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, {}, [&](int c) { return sizes[static_cast<std::size_t>(c)]; });
  return order;
}

TEST_F(ChangingStore, FewerChannelsDropsTheSmallestOfTheHeldKeys) {
  const FewerChannels part{.window = 5, .ratio = 0.4, .recent = 4};  // floor(8 * 0.4) = 3
  KeptSet some(Heads::kv, 2, prompt);
  std::vector<std::vector<int>> held(2);
  for (const int head : {0, 1})
    for (int j = head; j < prompt; j += 2 + head) {
      some.keep(head, j);
      held[static_cast<std::size_t>(head)].push_back(j);
    }
  const std::unique_ptr<StoredLayer> result = stored(part.store(), some);
  for (const int head : {0, 1}) {
    const std::vector<int>& of_head = held[static_cast<std::size_t>(head)];
    const std::vector<int> order = channels_by_size(layer, head, 5, of_head);
    for (int j = 0; j < 33; ++j) {
      const bool thinned = std::ranges::binary_search(std::span(of_head).first(of_head.size() - 4), j);
      for (int rank = 0; rank < 8; ++rank) {
        const int c = order[static_cast<std::size_t>(rank)];
        EXPECT_EQ(key(*result, head, j, c), thinned && rank < 3 ? 0.0 : layer.k.at(head, j, c)) << j << ", " << c;
        EXPECT_EQ(value(*result, head, j, c), layer.v.at(head, j, c));
      }
    }
  }
  // 13 and 8 tokens of 16 numbers, 9 and 4 of them without 3, of 2 bytes.
  EXPECT_EQ(result->bytes, ((13 + 8) * 16 - (9 + 4) * 3) * 2.0);
}

TEST_F(ChangingStore, FewerChannelsOfNothingAndOfEverything) {
  const auto bytes = [&](const FewerChannels& part) { return stored(part.store(), all())->bytes; };
  EXPECT_EQ(bytes({.ratio = 0}), 2 * 25 * 16 * 2.0);
  EXPECT_EQ(stored(FewerChannels{.ratio = 0}.store(), all())->keys, widened(tensors.k));
  EXPECT_EQ(stored(FewerChannels{.recent = 25}.store(), all())->keys, widened(tensors.k));
  EXPECT_EQ(bytes({.ratio = 1, .recent = 0}), 2 * 25 * 8 * 2.0);
  EXPECT_EQ(stored({FewerChannels{.window = 1000}.store()}, all())->keys,
            stored({FewerChannels{.window = prompt}.store()}, all())->keys);
}

}  // namespace
}  // namespace kvreplay::testing
