// Outputs behind the projection, against the products written out.

#include "observables/projected_outputs.h"

#include <gtest/gtest.h>

#include "attention_reference.h"

namespace kvreplay::testing {
namespace {

constexpr int heads = 3, queries = 5, dim = 7, hidden = 19;

/// [sets, heads, queries, dim]
std::vector<float> outputs_of(int sets) {
  const RandomTensor numbers(1, sets * heads * queries, dim, DType::float32, 1.0, 8);
  std::vector<float> outputs;
  for (int i = 0; i < sets * heads * queries; ++i)
    for (int c = 0; c < dim; ++c) outputs.push_back(static_cast<float>(numbers.at(0, i, c)));
  return outputs;
}

std::span<const float> vector_of(const std::vector<float>& outputs, int set, int head, int query) {
  const int at = (set * heads + head) * queries + query;
  return std::span(outputs).subspan(static_cast<std::size_t>(at) * dim, dim);
}

class ProjectedOutputs : public ::testing::TestWithParam<DType> {};

TEST_P(ProjectedOutputs, AreTheProductsWrittenOut) {
  constexpr int sets = 60;  // more vectors than are taken at once
  const std::vector<float> outputs = outputs_of(sets);
  const RandomTensor projection(1, hidden, heads * dim, GetParam(), 1.0, 9);
  const std::vector<double> found = projected_squares(projection.view(), outputs, heads, queries, 2);
  ASSERT_EQ(found.size(), static_cast<std::size_t>(sets * queries));
  for (int set = 0; set < sets; ++set)
    for (int query = 0; query < queries; ++query) {
      double square = 0;
      for (int row = 0; row < hidden; ++row) {
        double component = 0;
        for (int head = 0; head < heads; ++head)
          for (int c = 0; c < dim; ++c)
            component += projection.at(0, row, head * dim + c) *
                         static_cast<double>(vector_of(outputs, set, head, query)[static_cast<std::size_t>(c)]);
        square += component * component;
      }
      EXPECT_NEAR(found[static_cast<std::size_t>(set * queries + query)], square, 1e-12 * square);
    }
}

TEST_P(ProjectedOutputs, HaveTheSameBitsAloneAndOnAnyThreads) {
  const std::vector<float> outputs = outputs_of(60);
  const RandomTensor projection(1, hidden, heads * dim, GetParam(), 1.0, 9);
  const std::vector<double> all = projected_squares(projection.view(), outputs, heads, queries, 1);
  EXPECT_EQ(projected_squares(projection.view(), outputs, heads, queries, 3), all);
  const std::size_t of_set = static_cast<std::size_t>(heads * queries * dim), last = 59;
  const std::vector<double> alone =
      projected_squares(projection.view(), std::span(outputs).subspan(last * of_set, of_set), heads, queries, 2);
  EXPECT_EQ(alone, std::vector<double>(all.end() - queries, all.end()));
  const std::vector<float> zeros(of_set);
  EXPECT_EQ(projected_squares(projection.view(), zeros, heads, queries, 1), std::vector<double>(queries));
}

INSTANTIATE_TEST_SUITE_P(Types, ProjectedOutputs, ::testing::Values(DType::float32, DType::float16, DType::bfloat16),
                         [](const auto& type) { return name_of(type.param); });

}  // namespace
}  // namespace kvreplay::testing
