// What is the CUDA backend's own: layers that are held, its limit of device memory, devices that fail, orders in which
// a device may do its work.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "emulated_device.h"
#include "tests/unit/attention_reference.h"

namespace kvreplay::testing {
namespace {

class CudaBackendOf : public ::testing::Test {
 protected:
  void SetUp() override { emulated::reset(); }
  void TearDown() override {
    EXPECT_EQ(emulated::allocated(), 0u);
    EXPECT_EQ(emulated::host_allocated(), 0u);
    EXPECT_EQ(emulated::handles(), 0);
    emulated::reset();
    emulated::set_memory(std::size_t{1} << 30);
    emulated::set_capability(9, 0);
    emulated::set_order(emulated::forward);
  }
};

/// 16-bit and moved ones, so that rows are gathered, widened and turned too.
std::vector<Matrix> sums_of(Backend& backend, const RandomLayer& layer) {
  const LayerTensors tensors = layer.tensors();
  const int tokens = layer.shape().tokens;
  const auto queries = range(0, tokens);
  const auto last = range(tokens - 5, tokens);
  const auto residents = range(1, tokens, 2);
  const auto resident_last = range(tokens % 2 == 0 ? tokens - 7 : tokens - 6, tokens, 2);
  return {backend.attention_sums(tensors, {.queries = queries, .columns = tokens}),
          backend.attention_sums(tensors, {.queries = last, .columns = tokens}),
          backend.attention_sums(tensors, {.queries = last, .resident = residents}),
          backend.attention_sums(tensors,
                                 {.queries = resident_last, .resident = residents, .positions = Positions::cache})};
}

void expect_same(const std::vector<Matrix>& found, const std::vector<Matrix>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i)
    EXPECT_TRUE(std::ranges::equal(found[i].values(), expected[i].values())) << i;
}

const LayerShape shape{
    .query_heads = 6, .kv_heads = 3, .tokens = 210, .dim = 24, .dtype = DType::bfloat16, .rope_pairs = 12};

std::unique_ptr<Backend> limited(std::size_t bytes) { return make_backend("cuda", 2, {.memory = bytes}); }

TEST_F(CudaBackendOf, HeldLayersHaveTheBitsOfOthers) {
  RandomLayer first(shape);
  LayerShape other = shape;
  other.seed = 2;
  RandomLayer second(other);
  const auto backend = make_backend("cuda", 2);
  const std::vector<Matrix> expected = sums_of(*backend, first);
  const std::vector<Matrix> expected_second = sums_of(*backend, second);
  for (const bool queries : {true, false}) {
    backend->hold(first.tensors(), queries);
    backend->hold(second.tensors(), queries);
    expect_same(sums_of(*backend, first), expected);
    backend->let_go(first.tensors());
    expect_same(sums_of(*backend, second), expected_second);
    backend->let_go(second.tensors());
  }
}

TEST_F(CudaBackendOf, WhatWasLetGoIsReadAgain) {
  RandomLayer layer(shape);
  const auto backend = make_backend("cuda", 2);
  backend->hold(layer.tensors(), true);
  sums_of(*backend, layer);
  backend->let_go(layer.tensors());
  for (int token = 0; token < shape.tokens; ++token) layer.k.set(1, token, 3, 2.0F);
  backend->hold(layer.tensors(), true);
  const std::vector<Matrix> found = sums_of(*backend, layer);
  backend->let_go(layer.tensors());
  expect_same(found, sums_of(*make_backend("cuda", 2), layer));
}

TEST_F(CudaBackendOf, ALayerThatIsLetGoAtOnceIsNotReadAfterwards) {
  const auto backend = make_backend("cuda", 2);
  for (int i = 0; i < 20; ++i) {
    const auto layer = std::make_unique<RandomLayer>(shape);
    backend->hold(layer->tensors(), true);
    backend->let_go(layer->tensors());
  }
}

TEST_F(CudaBackendOf, LaterLayersNeedNoNewMemory) {
  const RandomLayer layer(shape);
  const auto backend = make_backend("cuda", 2);
  std::size_t after_first = 0;
  for (int i = 0; i < 4; ++i) {
    backend->hold(layer.tensors(), true);
    sums_of(*backend, layer);
    backend->let_go(layer.tensors());
    if (i == 0) after_first = emulated::allocated();
  }
  EXPECT_EQ(emulated::allocated(), after_first);
  EXPECT_GT(after_first, 0u);
}

TEST_F(CudaBackendOf, LessMemoryHasTheSameBits) {
  const RandomLayer layer(shape);
  const std::vector<Matrix> expected = sums_of(*make_backend("cuda", 2), layer);
  for (const std::size_t limit : {std::size_t{1} << 20, std::size_t{1} << 22}) {
    emulated::reset();
    const auto backend = limited(limit);
    backend->hold(layer.tensors(), true);
    expect_same(sums_of(*backend, layer), expected);
    backend->let_go(layer.tensors());
    EXPECT_LE(emulated::peak_allocated(), limit);
  }
}

TEST_F(CudaBackendOf, TooLittleMemoryIsAnErrorWithSizes) {
  const RandomLayer layer(shape);
  const auto backend = limited(std::size_t{64} << 10);
  try {
    sums_of(*backend, layer);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::resources);
    EXPECT_NE(std::string(error.what()).find("MiB"), std::string::npos) << error.what();
  }
  LayerShape small = shape;
  small.tokens = 9;
  const RandomLayer fits(small);
  expect_same(sums_of(*backend, fits), sums_of(*make_backend("cuda", 1), fits));
}

TEST_F(CudaBackendOf, OthersUseOfTheDeviceIsAnErrorToo) {
  const RandomLayer layer(shape);
  const auto backend = make_backend("cuda", 2, {.memory = std::size_t{1} << 30});
  emulated::set_memory(std::size_t{256} << 10);
  try {
    sums_of(*backend, layer);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::resources);
  }
}

TEST_F(CudaBackendOf, EveryOrderOfWorkHasTheSameBits) {
  const RandomLayer layer(shape);
  const auto in_order = [&](emulated::Order order) {
    emulated::reset();
    emulated::set_order(order);
    const auto backend = make_backend("cuda", 2);
    backend->hold(layer.tensors(), true);
    std::vector<Matrix> found = sums_of(*backend, layer);
    backend->let_go(layer.tensors());
    return found;
  };
  const std::vector<Matrix> expected = in_order(emulated::forward);
  expect_same(in_order(emulated::backward), expected);
  for (const std::uint64_t seed : {1U, 2U, 3U}) expect_same(in_order(emulated::shuffled(seed)), expected);
}

TEST_F(CudaBackendOf, EveryCallThatFailsIsAnError) {
  LayerShape small = shape;
  small.tokens = 20;
  const RandomLayer layer(small);
  const auto work = [&] {
    const auto backend = make_backend("cuda", 1);
    backend->hold(layer.tensors(), true);
    sums_of(*backend, layer);
    backend->let_go(layer.tensors());
  };
  work();
  emulated::reset();
  work();
  const int calls = emulated::calls();
  ASSERT_GT(calls, 30);
  int thrown = 0;
  for (int n = 1; n <= calls; n += 5) {
    emulated::reset();
    emulated::fail_call(n, n % 2 == 0 ? cudaErrorIllegalAddress : cudaErrorMemoryAllocation);
    try {
      work();
    } catch (const Error& error) {
      ++thrown;
      EXPECT_NE(std::string(error.what()), "");
    }
  }
  // Calls that only give something back say nothing.
  EXPECT_GT(2 * thrown, calls / 5);
  emulated::reset();  // a call that would have given something back may have been the one that failed
}

TEST(CudaDevice, WithoutADriverItsReasonIsGiven) {
  emulated::reset();
  emulated::set_device_count_error(cudaErrorInsufficientDriver);
  try {
    make_backend("cuda", 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.refusal(), Refusal::capability);
    EXPECT_NE(std::string(error.what()).find("cudaErrorInsufficientDriver"), std::string::npos) << error.what();
  }
  emulated::set_device_count_error(cudaSuccess);
}

TEST(CudaDevice, AnotherNumberOrAnOldOneIsRefused) {
  emulated::reset();
  EXPECT_THROW(make_backend("cuda", 1, {.number = 1}), Error);
  emulated::set_capability(7, 5);
  EXPECT_THROW(make_backend("cuda", 1), Error);
  emulated::set_capability(8, 0);
  EXPECT_NE(make_backend("cuda", 1)->description().find(" warps"), std::string::npos);
  emulated::set_capability(9, 0);
  EXPECT_NE(make_backend("cuda", 1)->description().find(" warp-groups"), std::string::npos);
}

TEST_F(CudaBackendOf, TheLargestHeadsFitTheSharedMemoryOfEveryDevice) {
  LayerShape large = shape;
  large.dim = 256;
  large.tokens = 70;
  const RandomLayer layer(large);
  std::vector<Matrix> expected;
  for (const auto& [major, minor] : {std::pair{8, 0}, std::pair{8, 6}, std::pair{8, 9}, std::pair{12, 0}}) {
    emulated::set_capability(major, minor);
    const std::vector<Matrix> found = sums_of(*make_backend("cuda", 1), layer);
    if (expected.empty()) expected = found;
    expect_same(found, expected);
  }
}

TEST(CudaDevice, HeadsOfMoreThan256NumbersAreRejectedByName) {
  const RandomLayer layer({.query_heads = 2, .kv_heads = 1, .tokens = 9, .dim = 257});
  const LayerTensors tensors = layer.tensors();
  const auto queries = range(7, 9);
  const std::unique_ptr<Backend> backend = make_backend("cuda", 1);
  const KeptSet kept(Heads::kv, 1, 7);
  const std::vector<KeptSets> sets{KeptSets(&kept, 1)};
  const std::function<void()> calls[] = {
      [&] { backend->attention_sums(tensors, {.queries = queries, .columns = 9}); },
      [&] { backend->kept_moments(tensors, queries, 7, sets); },
      [&] { backend->compare_attention(tensors, tensors, Positions::original, queries, 7, sets.front()); },
      [&] { backend->online_eviction(tensors, {.tokens = 9, .budget = 4}); },
      [&] { backend->working_set(tensors, {}); }};
  for (const auto& call : calls) {
    try {
      call();
      ADD_FAILURE() << "257 numbers are accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.refusal(), Refusal::capability);
      EXPECT_EQ(error.where(), "head_dim");
      EXPECT_EQ(error.found(), "257");
    }
  }
}

TEST_F(CudaBackendOf, ComponentsOfLongerRowsHaveTheirOwnNorms) {
  LayerShape wide = shape;
  wide.dim = 128;
  const RandomLayer layer(wide);
  TensorView components = layer.tensors().k;
  components.stride = components.dim;
  components.dim = 64;
  const Matrix found = make_backend("cuda", 1)->norms(components, wide.tokens, 2);
  const Matrix expected = make_backend("cpu", 1)->norms(components, wide.tokens, 2);
  for (std::size_t i = 0; i < found.values().size(); ++i)
    EXPECT_NEAR(found.values()[i], expected.values()[i], 1e-6 * expected.values()[i]);
}

}  // namespace
}  // namespace kvreplay::testing
