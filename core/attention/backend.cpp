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

Registry<BackendCard>& backends() {
  static Registry<BackendCard> registry("backend");
  return registry;
}

std::unique_ptr<Backend> make_backend(const std::string& name, int threads, DeviceChoice device) {
  return backends().get(name).make(threads, device);
}

}  // namespace kvreplay
