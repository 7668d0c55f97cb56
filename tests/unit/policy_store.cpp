// What stores do to keys and values: quantised groups worked by hand, their error, and what stays as it was.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "error.h"
#include "fake_backend.h"
#include "float_types.h"
#include "policies/plan_part.h"
#include "policies/stores/quantised.h"
#include "positions.h"
#include "random.h"

namespace kvreplay::testing {
namespace {

using Numbers = std::vector<float>;

/// Keys and values of one layer, [heads, tokens, dim], tokens [0, prompt) under compression.
struct Captured {
  int heads = 1;
  int tokens = 1;
  int prompt = 1;
  int dim = 1;
  Numbers keys;
  Numbers values;

  std::size_t at(int head, int token, int channel) const {
    return static_cast<std::size_t>((head * tokens + token) * dim + channel);
  }
};

/// Multiples of 1/256, exact in float16, about -4 ... 4.
Captured random_layer(int heads, int tokens, int prompt, int dim) {
  Captured layer{heads, tokens, prompt, dim, {}, {}};
  for (int i = 0; i < heads * tokens * dim; ++i) {
    layer.keys.push_back(static_cast<float>(chain(2, i) % 2049) / 256 - 4);
    layer.values.push_back(static_cast<float>(chain(3, i) % 2049) / 256 - 4);
  }
  return layer;
}

KeptSet all_kept(const Captured& layer) {
  KeptSet kept(Heads::kv, layer.heads, layer.prompt);
  for (int head = 0; head < layer.heads; ++head)
    for (int j = 0; j < layer.prompt; ++j) kept.keep(head, j);
  return kept;
}

TensorView view_of(const std::vector<std::byte>& bytes, DType type, const Captured& layer) {
  return {bytes.data(), type, layer.heads, layer.tokens, layer.dim};
}

std::vector<std::byte> bytes_of(const Numbers& numbers, DType type) {
  std::vector<std::byte> bytes(numbers.size() * size_of(type));
  for (std::size_t i = 0; i < numbers.size(); ++i) store(bytes.data(), type, i, numbers[i]);
  return bytes;
}

struct Result {
  Numbers keys;
  Numbers values;
  double bytes = 0;
};

Result stored(const Quantised& part, const Captured& layer, const KeptSet& kept, DType type = DType::float32) {
  const std::vector<std::byte> keys = bytes_of(layer.keys, type), values = bytes_of(layer.values, type);
  LayerTensors tensors;
  tensors.q = tensors.k = view_of(keys, type, layer);
  tensors.v = view_of(values, type, layer);
  FakeBackend backend;
  const LayerView view(backend, tensors, {.prompt = layer.prompt}, {});
  const std::unique_ptr<StoredLayer> result = part.store()->apply(view, kept, {});

  EXPECT_EQ(result->tensors.k.dtype, DType::float32);
  EXPECT_EQ(result->tensors.k.data, reinterpret_cast<const std::byte*>(result->keys.data()));
  EXPECT_EQ(result->tensors.v.data, reinterpret_cast<const std::byte*>(result->values.data()));
  EXPECT_EQ(result->tensors.v.tokens, layer.tokens);
  EXPECT_EQ(result->tensors.q.data, tensors.q.data);
  return {result->keys, result->values, result->bytes};
}

Result stored(const Quantised& part, const Captured& layer) { return stored(part, layer, all_kept(layer)); }

float in_float16(float number) { return from_float16(to_float16(number)); }

/// 0.1, -0.3, 0.5, 0.2 in two bits are 2, 0, 3, 2 steps of 0.2666 above -0.3000.
const Numbers example{0.1F, -0.3F, 0.5F, 0.2F};
const Numbers example_stored{0.233154296875F, -0.300048828125F, 0.499755859375F, 0.233154296875F};

TEST(Quantised, ValuesByToken) {
  const Captured layer{1, 1, 1, 4, example, example};
  EXPECT_EQ(stored({.bits = 2, .group = 4, .residual = 0}, layer).values, example_stored);
}

TEST(Quantised, KeysByChannel) {
  Captured layer{1, 4, 4, 2, {}, {}};
  for (const float number : example) {
    layer.keys.insert(layer.keys.end(), {number, 0.5F});
    layer.values.insert(layer.values.end(), {1.0F, 4.0F});
  }
  const Result result = stored({.bits = 2, .group = 4, .residual = 0}, layer);
  for (int j = 0; j < 4; ++j) {
    EXPECT_EQ(result.keys[layer.at(0, j, 0)], example_stored[static_cast<std::size_t>(j)]);
    EXPECT_EQ(result.keys[layer.at(0, j, 1)], 0.5F) << "a constant group has no scale";
  }
  EXPECT_EQ(result.values, layer.values) << "two numbers are the ends of their group";
}

TEST(Quantised, TheFixture) {
  Captured layer{2, 16, 12, 4, {}, {}};
  for (const int tag : {2, 3})
    for (int head = 0; head < 2; ++head)
      for (int j = 0; j < 16; ++j)
        for (int c = 0; c < 4; ++c)
          (tag == 2 ? layer.keys : layer.values)
              .push_back((static_cast<float>(chain(static_cast<std::uint64_t>(tag), 0, head, j, c) % 33) - 16) / 8);
  const Result result = stored({.bits = 2, .group = 4, .residual = 4}, layer);
  const Numbers key{-1.75F, 0.874512F, 0.583984F, 0.5F}, value{-1.875F, -0.291992F, -1.875F, 0.499512F};
  for (std::size_t c = 0; c < 4; ++c) {
    EXPECT_NEAR(result.keys[c], key[c], 1e-6);
    EXPECT_NEAR(result.values[c], value[c], 1e-6);
  }
  const auto l1_loss = [&](const Numbers& before, const Numbers& after) {
    double lost = 0, all = 0;
    for (const int head : {0, 1})
      for (std::size_t i = layer.at(head, 0, 0); i < layer.at(head, 12, 0); ++i) {
        lost += std::abs(after[i] - before[i]);
        all += std::abs(before[i]);
      }
    return lost / all;
  };
  EXPECT_NEAR(l1_loss(layer.keys, result.keys), 0.095953, 1e-6);
  EXPECT_NEAR(l1_loss(layer.values, result.values), 0.071708, 1e-6);
}

TEST(Quantised, ErrorIsAtMostHalfAStepAndWhatHalfPrecisionAdds) {
  const Captured layer = random_layer(2, 64, 64, 32);
  for (const int bits : {1, 2, 3, 4, 8}) {
    const Result result = stored({.bits = bits, .group = 16, .residual = 0}, layer);
    const int levels = (1 << bits) - 1;
    double largest = 0;
    for (int head = 0; head < 2; ++head)
      for (int begin = 0; begin < 64; begin += 16)
        for (int c = 0; c < 32; ++c) {
          float least = 1e9F, most = -1e9F;
          for (int j = begin; j < begin + 16; ++j) {
            least = std::min(least, layer.keys[layer.at(head, j, c)]);
            most = std::max(most, layer.keys[layer.at(head, j, c)]);
          }
          const double step = (most - least) / static_cast<double>(levels);
          for (int j = begin; j < begin + 16; ++j) {
            const double error =
                std::abs(double{result.keys[layer.at(head, j, c)]} - double{layer.keys[layer.at(head, j, c)]});
            // The step is rounded to 11 significant bits, and counted up to `levels` times.
            ASSERT_LE(error, step / 2 + levels * step * 0x1p-11) << bits;
            largest = std::max(largest, error / step);
          }
        }
    EXPECT_GT(largest, 0.4) << bits;
  }
}

TEST(Quantised, ANumberMidwayBetweenLevelsGoesToTheEvenOne) {
  const Captured layer{1, 1, 1, 4, Numbers(4, 1.0F), {0.0F, 3.0F, 0.5F, 1.5F}};
  EXPECT_EQ(stored({.bits = 2, .group = 4, .residual = 0}, layer).values, (Numbers{0.0F, 3.0F, 0.0F, 2.0F}));
}

TEST(Quantised, ANumberOutsideTheRoundedRangeGoesToItsEnd) {
  // Of 1000.375 and 1000.4375 the zero point is 1000.5 in float16, the step -0.0625: levels 2 and 1 of 0 and 1.
  const Captured layer{1, 1, 1, 2, Numbers(2, 1.0F), {1000.375F, 1000.4375F}};
  EXPECT_EQ(stored({.bits = 1, .group = 2, .residual = 0}, layer).values, Numbers(2, 1000.4375F));
}

/// Which tokens of [0, T) changed at all.
std::vector<int> changed(const Numbers& before, const Numbers& after, const Captured& layer) {
  std::vector<int> tokens;
  for (int j = 0; j < layer.tokens; ++j)
    if (!std::equal(before.begin() + j * layer.dim, before.begin() + (j + 1) * layer.dim,
                    after.begin() + j * layer.dim))
      tokens.push_back(j);
  return tokens;
}

TEST(Quantised, ResidualTokensAndThoseAfterThePromptStayExact) {
  const Captured layer = random_layer(1, 13, 10, 32);
  const auto keys = [&](int residual) {
    return changed(layer.keys, stored({.bits = 2, .group = 4, .residual = residual}, layer).keys, layer);
  };
  const auto values = [&](int residual) {
    return changed(layer.values, stored({.bits = 2, .group = 4, .residual = residual}, layer).values, layer);
  };
  EXPECT_EQ(keys(4), position_range(0, 8));
  EXPECT_EQ(values(4), position_range(0, 6));
  EXPECT_EQ(keys(5), position_range(0, 10)) << "nothing is left where the residual divides n";
  EXPECT_EQ(values(5), position_range(0, 5));
  EXPECT_EQ(keys(0), position_range(0, 10));
  EXPECT_EQ(values(0), position_range(0, 10));
  EXPECT_EQ(keys(11), position_range(0, 0));
  EXPECT_EQ(values(11), position_range(0, 0));
}

TEST(Quantised, AShortLastGroupIsAGroupOfItsOwn) {
  const Captured layer = random_layer(1, 6, 6, 6);
  const Result result = stored({.bits = 2, .group = 4, .residual = 0}, layer);
  for (int c = 0; c < 6; ++c)  // two tokens: its ends
    for (const int j : {4, 5})
      EXPECT_NEAR(result.keys[layer.at(0, j, c)], layer.keys[layer.at(0, j, c)], 0.01) << j << " " << c;
  for (int j = 0; j < 6; ++j)  // two channels
    for (const int c : {4, 5})
      EXPECT_NEAR(result.values[layer.at(0, j, c)], layer.values[layer.at(0, j, c)], 0.01) << j << " " << c;
  EXPECT_NE(result.keys[layer.at(0, 0, 0)], layer.keys[layer.at(0, 0, 0)]);
}

TEST(Quantised, AConstantGroupIsItsValueInHalfPrecision) {
  const Captured layer{1, 4, 4, 4, Numbers(16, 0.25F), Numbers(16, 100.0F)};
  const Result result = stored({.bits = 2, .group = 4, .residual = 0}, layer);
  EXPECT_EQ(result.keys, layer.keys);
  EXPECT_EQ(result.values, layer.values);
  const Captured odd{1, 1, 1, 4, Numbers(4, 0.25F), Numbers(4, 1000.1F)};
  const float near = in_float16(1000.1F);
  const float step = in_float16((1000.1F - near) / 3);
  for (const float value : stored({.bits = 2, .group = 4, .residual = 0}, odd).values)
    EXPECT_NEAR(value, 1000.1F, std::abs(step));
}

TEST(Quantised, KeptTokensAreQuantisedAsIfTheyWereAlone) {
  const Captured layer = random_layer(2, 20, 18, 8);
  const std::vector<std::vector<std::int32_t>> of_heads{{0, 3, 4, 8, 9, 11, 16}, {1, 2, 5, 13, 14, 15, 17}};
  Captured alone{2, 7, 7, 8, {}, {}};
  KeptSet kept(Heads::kv, 2, 20);
  for (int head = 0; head < 2; ++head)
    for (const int j : of_heads[static_cast<std::size_t>(head)]) {
      kept.keep(head, j);
      for (int c = 0; c < 8; ++c) {
        alone.keys.push_back(layer.keys[layer.at(head, j, c)]);
        alone.values.push_back(layer.values[layer.at(head, j, c)]);
      }
    }
  const Quantised part{.bits = 2, .group = 4, .residual = 3};
  const Result expected = stored(part, alone);
  for (const bool all_after_the_prompt : {false, true}) {
    for (int head = 0; head < 2 && all_after_the_prompt; ++head)
      for (const int j : {18, 19}) kept.keep(head, j);
    const Result result = stored(part, layer, kept);
    Numbers keys = layer.keys, values = layer.values;
    for (int head = 0; head < 2; ++head)
      for (int i = 0; i < 7; ++i)
        for (int c = 0; c < 8; ++c) {
          const int j = of_heads[static_cast<std::size_t>(head)][static_cast<std::size_t>(i)];
          keys[layer.at(head, j, c)] = expected.keys[alone.at(head, i, c)];
          values[layer.at(head, j, c)] = expected.values[alone.at(head, i, c)];
        }
    EXPECT_EQ(result.keys, keys);
    EXPECT_EQ(result.values, values);
    EXPECT_EQ(result.bytes, expected.bytes);
    EXPECT_NE(result.keys, layer.keys);
  }
}

TEST(Quantised, OneSetForTheLayerIsOneForEachHead) {
  const Captured layer = random_layer(2, 9, 9, 8);
  KeptSet shared(Heads::layer, 1, 9), own(Heads::kv, 2, 9);
  for (const int j : {0, 2, 3, 7, 8}) {
    shared.keep(0, j);
    for (const int head : {0, 1}) own.keep(head, j);
  }
  const Quantised part{.bits = 2, .group = 4, .residual = 0};
  const Result result = stored(part, layer, shared);
  EXPECT_EQ(result.keys, stored(part, layer, own).keys);
  EXPECT_EQ(result.bytes, stored(part, layer, own).bytes);
}

TEST(Quantised, BytesOfTheKeptTokens) {
  const Captured layer = random_layer(2, 12, 10, 64);
  const double exact = 2.0 * 2 * 10 * 64 * 2;  // keys and values of two heads, 16 bits a number
  EXPECT_DOUBLE_EQ(stored({.bits = 2, .group = 64, .residual = 0}, layer).bytes, exact * 0.15625);
  EXPECT_DOUBLE_EQ(stored({.bits = 4, .group = 64, .residual = 0}, layer).bytes, exact * 0.28125);
  EXPECT_DOUBLE_EQ(stored({.bits = 2, .group = 64, .residual = 99}, layer).bytes, exact);
  // Keys of 8 and values of 6 tokens at 2 + 32/16 bits a number, the others at 16.
  EXPECT_DOUBLE_EQ(stored({.bits = 2, .group = 16, .residual = 4}, layer).bytes,
                   2 * 64 * (8 * 4 + 2 * 16 + 6 * 4 + 4 * 16) / 8.0);
}

TEST(Quantised, StoredTypeDoesNotMatterWhereItIsExact) {
  const Captured layer = random_layer(2, 12, 10, 16);
  const Quantised part{.bits = 3, .group = 8, .residual = 4};
  const Result wide = stored(part, layer), narrow = stored(part, layer, all_kept(layer), DType::float16);
  EXPECT_EQ(wide.keys, narrow.keys);
  EXPECT_EQ(wide.values, narrow.values);
}

TEST(Quantised, RefusesWhatHalfPrecisionCannotHold) {
  const Quantised part{.bits = 2, .group = 2, .residual = 0};
  EXPECT_NO_THROW(stored(part, {1, 1, 1, 2, {0.0F, 0.0F}, {-65504.0F, 0.0F}}));
  EXPECT_THROW(stored(part, {1, 1, 1, 2, {0.0F, 0.0F}, {-70000.0F, 0.0F}}), Error);
  EXPECT_THROW(stored(part, {1, 1, 1, 2, {0.0F, 0.0F}, {0.0F, 1e6F}}), Error) << "the scale";
  EXPECT_THROW(stored(part, {1, 1, 1, 2, {0.0F, 70000.0F}, {0.0F, 0.0F}}), Error) << "a key alone in its group";
}

TEST(Quantised, FillsAnyPlanByName) {
  const Captured layer{1, 1, 1, 4, example, example};
  const LayerTensors tensors = [&] {
    LayerTensors own;
    own.q = own.k = own.v = {reinterpret_cast<const std::byte*>(example.data()), DType::float32, 1, 1, 4};
    return own;
  }();
  FakeBackend backend;
  const LayerView view(backend, tensors, {.prompt = 1}, {});
  Plan plan;
  make_part(PartKind::store, "quantised(2,4,0)")->fill(plan);
  EXPECT_EQ(plan.store->apply(view, all_kept(layer), {})->values, example_stored);
  for (const char* outside : {"quantised(0)", "quantised(9)", "quantised(2,0)", "quantised(2,32,-1)"})
    EXPECT_THROW(make_part(PartKind::store, outside), Error) << outside;
}

}  // namespace
}  // namespace kvreplay::testing
