#include "attention/backend.h"

#include <utility>

namespace kvreplay {

std::vector<Comparison> Backend::compare_attention(const LayerTensors& layer, const LayerTensors& stored,
                                                   Positions positions, std::span<const std::int32_t> queries,
                                                   int boundary, KeptSets kept, OutputVectors* outputs) {
  const ChangedSet set{stored, positions, kept};
  std::vector<ComparedSet> compared = compare_sets(layer, std::span(&set, 1), queries, boundary, outputs != nullptr);
  if (outputs != nullptr) *outputs = std::move(compared.front().outputs);
  return std::move(compared.front().comparisons);
}

std::vector<Matrix> Backend::attention_rows(const LayerTensors& layer, const AttentionRows& what) {
  std::vector<Matrix> all;
  for (std::size_t number = 0; number < what.queries.size(); ++number) {
    const std::int32_t query = what.queries[number];
    std::vector<std::int32_t> resident;
    for (std::size_t i = 0; i < what.tokens.size(); ++i)
      if (what.tokens[i] <= query && (what.evicted_at[i] < 0 || what.evicted_at[i] >= query))
        resident.push_back(what.tokens[i]);
    const Matrix attention = attention_sums(layer, {.queries = std::span(&query, 1),
                                                    .resident = resident,
                                                    .resident_rows = what.rows,
                                                    .positions = what.positions});
    const auto [first, end] = what.wanted_of(number, attention.columns());
    Matrix& wanted = all.emplace_back(attention.rows(), end - first);
    for (int head = 0; head < wanted.rows(); ++head)
      std::ranges::copy(attention.row(head).subspan(static_cast<std::size_t>(first), wanted.row(head).size()),
                        wanted.row(head).begin());
  }
  return all;
}

std::vector<std::vector<std::int32_t>> Backend::online_evictions(const LayerTensors& layer,
                                                                 std::span<const OnlineEviction> all) {
  std::vector<std::vector<std::int32_t>> evicted;
  for (const OnlineEviction& what : all) evicted.push_back(online_eviction(layer, what));
  return evicted;
}

Registry<BackendCard>& backends() {
  static Registry<BackendCard> registry("backend");
  return registry;
}

std::unique_ptr<Backend> make_backend(const std::string& name, int threads, DeviceChoice device) {
  return backends().get(name).make(threads, device);
}

}  // namespace kvreplay
