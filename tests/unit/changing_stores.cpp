// Stores of the papers that change keys or values: each held against its definition, written out with plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>

#include "attention_reference.h"
#include "fake_backend.h"
#include "float_types.h"
#include "policies/selection.h"
#include "policies/stores/fewer_channels.h"
#include "policies/stores/merged_similar.h"
#include "policies/stores/merged_values.h"
#include "policies/text/configured.h"

namespace kvreplay::testing {
namespace {

constexpr int prompt = 25;

class ChangingStore : public ::testing::Test {
 protected:
  std::unique_ptr<StoredLayer> stored(const StorePtr& store, const KeptSet& kept) {
    return store->apply(view, kept, {.layer = view.layer(), .tensors = tensors});
  }

  static StorePtr store_of(const std::string& policy) {
    return ConfiguredPolicy::parse(policy).plans(4).front().plan.store;
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
  EXPECT_EQ(stored(FewerChannels{.window = 1000}.store(), all())->keys,
            stored(FewerChannels{.window = prompt}.store(), all())->keys);
}

/// What cam-one-shot makes of the values of one KV head, token by token as its definition reads.
std::vector<std::vector<double>> merged(const RandomLayer& layer, const Matrix& attention, int head,
                                        const std::vector<int>& held, int merge,
                                        const std::function<double(int, double)>& weight) {
  std::vector<std::vector<double>> values;
  for (int j = 0; j < prompt; ++j) values.push_back(layer.v.row(head, j));
  const auto received = [&](int j) {
    return (attention(3 * head, j) + attention(3 * head + 1, j) + attention(3 * head + 2, j)) / 3;
  };
  for (int i = prompt - 1; i >= 0; --i) {
    if (std::ranges::binary_search(held, i)) continue;
    std::vector<int> takers;
    for (const int j : held)
      if (j > i && static_cast<int>(takers.size()) < merge) takers.push_back(j);
    double mean = 0;
    for (const int j : takers) mean += received(j) / static_cast<double>(takers.size());
    for (const int j : takers)
      for (int c = 0; c < 8; ++c)
        values[static_cast<std::size_t>(j)][static_cast<std::size_t>(c)] +=
            weight(i, std::clamp(received(i) / mean, 0.0, 1.0)) * layer.v.at(head, i, c) /
            static_cast<double>(takers.size());
  }
  return values;
}

class Merged : public ChangingStore {
 protected:
  Merged() {
    backend.sums = Matrix(6, prompt);
    for (int h = 0; h < 6; ++h)
      for (int j = 0; j < prompt; ++j) backend.sums(h, j) = uniform(chain(7, h, j)) * (j % 5 == 0 ? 4 : 1);
  }

  void expect_merged(const StoredLayer& result, const std::function<double(int, int, double)>& weight) const {
    for (const int head : {0, 1}) {
      const std::vector<int>& of_head = held[static_cast<std::size_t>(head)];
      const auto values =
          merged(layer, backend.sums, head, of_head, 4, [&](int i, double p) { return weight(head, i, p); });
      for (int j = 0; j < 33; ++j)
        for (int c = 0; c < 8; ++c) {
          const bool stays = std::ranges::binary_search(of_head, j);
          const double expected =
              stays ? values[static_cast<std::size_t>(j)][static_cast<std::size_t>(c)] : layer.v.at(head, j, c);
          EXPECT_NEAR(value(result, head, j, c), expected, stays ? 1e-6 : 0) << head << ", " << j;
          EXPECT_EQ(key(result, head, j, c), layer.k.at(head, j, c));
        }
    }
    EXPECT_EQ(result.bytes, (8 + 7) * 16 * 2.0);
  }

  KeptSet kept() const {
    KeptSet set(Heads::kv, 2, prompt);
    for (const int head : {0, 1})
      for (const int j : held[static_cast<std::size_t>(head)]) set.keep(head, j);
    return set;
  }

  // Evicted tokens before all that stay, between them, and behind the last: these have nobody to go to.
  std::vector<std::vector<int>> held{{2, 3, 7, 10, 11, 12, 20, 23}, {0, 1, 9, 14, 15, 19, 24}};
};

TEST_F(Merged, ExpectedValuesByTheirProbability) {
  expect_merged(*stored(MergedValues{.merge = 4}.store(), kept()), [](int, int, double p) { return p; });
}

TEST_F(Merged, SampledValuesWhole) {
  const MergedValues part{.merge = 4, .mode = MergedValues::Mode::sampled, .seed = 9};
  int drawn = 0, left = 0;
  expect_merged(*stored(part.store(), kept()), [&](int head, int i, double p) {
    const bool takes = uniform(chain(9, 1, head, i)) < p;
    ++(takes ? drawn : left);
    return takes ? 1.0 : 0.0;
  });
  EXPECT_GT(drawn, 0);
  EXPECT_GT(left, 0);
}

TEST_F(Merged, NothingWhereNothingIsEvictedOrSeen) {
  EXPECT_EQ(stored(MergedValues{}.store(), all())->values, widened(tensors.v));
  backend.sums = Matrix(6, prompt);
  LayerView unseen{backend, tensors, {.prompt = prompt}, {}};
  EXPECT_EQ(MergedValues{}.store()->apply(unseen, kept(), {})->values, widened(tensors.v));
}

/// Four tokens of one head whose keys are 0, so that attention is even and each value is merged.
TEST(EvolvingValues, OfEvenAttentionByHand) {
  const std::vector<float> zeros(4), numbers{1, 10, 100, 1000};
  const auto view_of_numbers = [](const std::vector<float>& all) {
    return TensorView{
        .data = reinterpret_cast<const std::byte*>(all.data()), .heads = 1, .tokens = 4, .dim = 1, .stride = 0};
  };
  const LayerTensors tensors{.q = view_of_numbers(zeros),
                             .k = view_of_numbers(zeros),
                             .v = view_of_numbers(numbers),
                             .query_positions = {},
                             .rope = {}};
  const auto backend = make_backend("cpu", 1);
  const LayerView layer(*backend, tensors, {.prompt = 3}, {});
  LayerSelection two_resident = empty_selection(layer, Heads::kv);
  two_resident.evicted_at = {2, 3, -1, -1};
  for (const auto attention : {MergedValues::Attention::current, MergedValues::Attention::cumulative}) {
    const MergedValues part{.merge = 2, .attention = attention};
    const auto evolving = part.store()->evolve(layer, two_resident);
    using Values = std::vector<float>;
    EXPECT_EQ(evolving->before(2)->values, numbers);
    EXPECT_EQ(evolving->before(3)->values, (Values{1, 10.5, 100.5, 1000}));
    EXPECT_EQ(evolving->before(4)->values, (Values{1, 10.5, 105.75, 1005.25}));
    EXPECT_EQ(evolving->before(0)->values, numbers) << "queries may come in any order";
    EXPECT_EQ(evolving->before(3)->values, (Values{1, 10.5, 100.5, 1000}));
  }
}

/// Of each evicted token: its target and the cosine of their keys, token by token as the definition reads.
std::map<int, std::pair<int, double>> most_similar(const RandomLayer& layer, int head, const std::vector<int>& held) {
  const auto cosine = [&](int i, int j) {
    const std::vector<double> a = layer.k.row(head, i), b = layer.k.row(head, j);
    const auto product = [](const auto& x, const auto& y) {
      return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
    };
    return product(a, b) / std::sqrt(product(a, a) * product(b, b));
  };
  std::map<int, std::pair<int, double>> found;
  for (int i = 0; i < prompt; ++i) {
    if (std::ranges::binary_search(held, i)) continue;
    const int target = std::ranges::max(held, {}, [&](int j) { return cosine(i, j); });
    found[i] = {target, cosine(i, target)};
  }
  return found;
}

TEST_F(Merged, IntoTheMostSimilarKeys) {
  const std::pair<MergedSimilar, std::array<int, 2>> cases[] = {// the most of each head's 17 and 18 tokens that merge
                                                                {{}, {17, 18}},
                                                                {{.merge_fraction = 0.3}, {5, 6}},
                                                                {{.similarity_threshold = 0.4}, {17, 18}},
                                                                {{.similarity_threshold = 1}, {0, 0}}};
  for (const auto& [part, most] : cases) {
    const std::unique_ptr<StoredLayer> result = stored(part.store(), kept());
    for (const int head : {0, 1}) {
      const std::vector<int>& of_head = held[static_cast<std::size_t>(head)];
      const auto targets = most_similar(layer, head, of_head);
      std::vector<double> cosines;
      for (const auto& [_, target] : targets) cosines.push_back(target.second);
      std::ranges::sort(cosines, std::greater());
      const auto length = [&](int j) {
        const std::vector<double> v = layer.v.row(head, j);
        return std::sqrt(std::inner_product(v.begin(), v.end(), v.begin(), 0.0));
      };
      const int merging = most[static_cast<std::size_t>(head)];
      int merged = 0;
      for (int j = 0; j < 33; ++j) {
        std::vector<double> sum = layer.v.row(head, j);
        double weights = 1;
        for (const auto& [i, target] : targets) {
          const double cosine = target.second;
          if (target.first != j || cosine < part.similarity_threshold) continue;
          if (merging < static_cast<int>(cosines.size()) && cosine < cosines[static_cast<std::size_t>(merging) - 1])
            continue;
          const double weight = cosine * length(i) / (length(i) + length(j) + 1e-6);
          weights += weight;
          for (int c = 0; c < 8; ++c) sum[static_cast<std::size_t>(c)] += weight * layer.v.at(head, i, c);
          ++merged;
        }
        for (int c = 0; c < 8; ++c) {
          EXPECT_NEAR(value(*result, head, j, c), sum[static_cast<std::size_t>(c)] / weights, 1e-6)
              << head << ", " << j;
          EXPECT_EQ(key(*result, head, j, c), layer.k.at(head, j, c));
        }
      }
      EXPECT_LE(merged, merging);
      EXPECT_EQ(merged > 0, part.similarity_threshold < 1);
    }
    EXPECT_EQ(result->bytes, (8 + 7) * 16 * 2.0);
  }
}

/// Four tokens of one head with keys of one number: evicted values merge at the step at which they are evicted, and a
/// merged value merges on. The weights are 1 |v_e| / (|v_e| + |v_j|).
TEST(EvolvingValues, OfSimilarKeysByHand) {
  const std::vector<float> queries(4), keys{1, 2, 3, 4}, values{3, 1, 2, 8};
  const auto view_of_numbers = [](const std::vector<float>& all) {
    return TensorView{
        .data = reinterpret_cast<const std::byte*>(all.data()), .heads = 1, .tokens = 4, .dim = 1, .stride = 0};
  };
  const LayerTensors tensors{.q = view_of_numbers(queries),
                             .k = view_of_numbers(keys),
                             .v = view_of_numbers(values),
                             .query_positions = {},
                             .rope = {}};
  const auto backend = make_backend("cpu", 1);
  const LayerView layer(*backend, tensors, {.prompt = 3}, {});
  LayerSelection selection = empty_selection(layer, Heads::kv);
  selection.evicted_at = {2, 3, -1, -1};
  const auto evolving = MergedSimilar{}.store()->evolve(layer, selection);
  EXPECT_EQ(evolving->before(2)->values, values);
  // All cosines are 1, and the first of equal keys is the target: (1 + 3/4 3) / (1 + 3/4).
  EXPECT_NEAR(evolving->before(3)->values[1], 13.0 / 7, 1e-6);
  // Then 13/7 into 2, with the weight 13/27: (2 + 13/27 13/7) / (1 + 13/27).
  EXPECT_NEAR(evolving->before(4)->values[2], (2 + 169.0 / 189) / (40.0 / 27), 1e-6);
  EXPECT_EQ(evolving->before(4)->values[3], 8);
  EXPECT_EQ(evolving->before(0)->values, values) << "queries may come in any order";
}

class MiniCached : public ChangingStore {
 protected:
  /// The stored numbers of both layers of a pair: `layer` below `upper`.
  std::vector<std::unique_ptr<StoredLayer>> both(const std::string& policy) {
    const StorePtr store = store_of(policy);
    std::vector<std::unique_ptr<StoredLayer>> result;
    const LayerView below{backend, tensors, {.layer = 2, .layers = 4, .stored_layer = 2, .prompt = prompt}, {}};
    const LayerView above{backend, upper_tensors, {.layer = 3, .layers = 4, .stored_layer = 3, .prompt = prompt}, {}};
    result.push_back(store->apply(below, all(), {3, upper_tensors}));
    result.push_back(store->apply(above, all(), {2, tensors}));
    return result;
  }

  static double length(const std::vector<double>& x) {
    return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
  }
  static double angle(const std::vector<double>& a, const std::vector<double>& b) {
    return std::acos(std::inner_product(a.begin(), a.end(), b.begin(), 0.0) / length(a) / length(b));
  }

  RandomLayer upper{{.query_heads = 6, .kv_heads = 2, .tokens = 33, .dim = 8, .dtype = DType::float16, .seed = 2}};
  LayerTensors upper_tensors = upper.tensors();
};

TEST_F(MiniCached, DirectionsBetweenThoseOfBothLayersAndOwnLengths) {
  for (const std::string distance : {"paper", "code"}) {
    const auto result = both("minicache:t=0.6,gap=0.3,distance=" + distance);
    double apart = 0;
    for (const bool keys : {true, false})
      for (const int head : {0, 1}) {
        const RandomTensor& lower_tensor = keys ? layer.k : layer.v;
        const RandomTensor& upper_tensor = keys ? upper.k : upper.v;
        std::vector<double> angles;
        for (int j = 0; j < prompt; ++j) angles.push_back(angle(lower_tensor.row(head, j), upper_tensor.row(head, j)));
        const auto [least, most] = std::ranges::minmax(angles);
        for (int j = 0; j < 33; ++j) {
          const std::vector<double> a = lower_tensor.row(head, j), b = upper_tensor.row(head, j);
          const double w = angle(a, b);
          // 25 tokens, of which floor(0.3 * 25) = 7.
          const bool stays =
              j >= prompt || (distance == "paper" ? w > least + 0.3 * (most - least)
                                                  : std::ranges::count_if(angles, [&](double x) { return x > w; }) < 7);
          apart += stays && j < prompt ? 1 : 0;
          for (int c = 0; c < 8; ++c) {
            const auto i = static_cast<std::size_t>(c);
            const double e =
                (std::sin(0.4 * w) * a[i] / length(a) + std::sin(0.6 * w) * b[i] / length(b)) / std::sin(w);
            const auto number = [&](const StoredLayer& of) {
              return keys ? key(of, head, j, c) : value(of, head, j, c);
            };
            EXPECT_NEAR(number(*result[0]), stays ? a[i] : length(a) * e, stays ? 0 : 1e-5) << distance << j;
            EXPECT_NEAR(number(*result[1]), stays ? b[i] : length(b) * e, stays ? 0 : 1e-5) << distance << j;
          }
        }
      }
    EXPECT_GT(apart, 10);
    EXPECT_LT(apart, 100);
    // Two vectors of 8 float16 where they stay apart, else one and two lengths.
    for (const auto& of : result) EXPECT_EQ(of->bytes, (apart * 16 + (100 - apart) * 10) * 2 / 2);
  }
}

TEST_F(MiniCached, LayersFromTheMiddleOnTwoByTwo) {
  const StorePtr store = store_of("minicache");
  const auto partner = [&](int l, int layers) { return store->partner(l, layers); };
  const auto partners = [&](int layers) {
    std::vector<int> all;
    for (int l = 0; l < layers; ++l) all.push_back(partner(l, layers));
    return all;
  };
  EXPECT_EQ(partners(1), (std::vector<int>{0}));
  EXPECT_EQ(partners(2), (std::vector<int>{0, 1}));
  EXPECT_EQ(partners(4), (std::vector<int>{0, 1, 3, 2}));
  EXPECT_EQ(partners(5), (std::vector<int>{0, 1, 2, 4, 3}));
  EXPECT_EQ(partners(6), (std::vector<int>{0, 1, 2, 4, 3, 5}));
  const std::unique_ptr<StoredLayer> alone = stored(store, all());
  EXPECT_EQ(alone->keys, widened(tensors.k));
  EXPECT_EQ(alone->values, widened(tensors.v));
  EXPECT_EQ(alone->bytes, 2 * 25 * 16 * 2.0);
}

TEST_F(MiniCached, WhatHasNoDirectionBetweenStaysAsItWas) {
  // Equal vectors merge to themselves, opposite and zero ones do not merge.
  for (int j = 0; j < prompt; ++j)
    for (int c = 0; c < 8; ++c)
      for (const int head : {0, 1}) {
        const auto x = static_cast<float>(layer.k.at(head, j, c));
        upper.k.set(head, j, c, j < 5 ? x : j < 10 ? -x : j < 15 ? 0.0F : 2 * x);
      }
  const auto result = both("minicache:gap=1");
  for (int j = 0; j < prompt; ++j)
    for (int c = 0; c < 8; ++c) {
      EXPECT_NEAR(key(*result[0], 0, j, c), layer.k.at(0, j, c), 1e-6) << j;
      EXPECT_NEAR(key(*result[1], 0, j, c), upper.k.at(0, j, c), 1e-6) << j;
    }
}

TEST_F(MiniCached, OfEqualAnglesTheFirstStayApart) {
  const int lower_direction[] = {1, 2, 2, 0, 0, 3, 0, 0}, upper_direction[] = {2, 1, 0, 1, 0, 1, 0, 3};
  for (int j = 0; j < prompt; ++j)
    for (int c = 0; c < 8; ++c) {
      layer.k.set(0, j, c, static_cast<float>((1 + j % 5) * lower_direction[c]));
      upper.k.set(0, j, c, static_cast<float>((1 + j % 7) * upper_direction[c]));
    }
  const auto result = both("minicache:gap=0.28,distance=code");  // 7 of 25
  for (int j = 0; j < prompt; ++j) EXPECT_EQ(key(*result[0], 0, j, 3) == 0, j < 7) << j;
}

TEST_F(MiniCached, AZeroVectorSaysNothingOfHowFarAnglesReach) {
  for (int c = 0; c < 8; ++c) upper.k.set(0, 3, c, 0.0F);
  const auto result = both("minicache:gap=0");  // of each head the keys of the least angle merge, and the values
  for (const auto& of : result) EXPECT_EQ(of->bytes, 4 * (24 * 16 + 10) * 2 / 2.0);
}

}  // namespace
}  // namespace kvreplay::testing
