// Similarity of the tokens of a prompt, independent of the policy.
#include "analysis/metrics/metric.h"

namespace kvreplay {
namespace {

std::vector<double> tokens_of(const Matrix& maxima) { return {maxima.row(0).begin(), maxima.row(0).end()}; }

std::vector<double> of_keys(const LayerView& view, Backend&) { return tokens_of(view.key_similarity()); }

std::vector<double> of_values(const LayerView& view, Backend&) { return tokens_of(view.value_similarity()); }

MetricCard card(const char* name, const char* what, std::vector<double> (*measure)(const LayerView&, Backend&)) {
  return {
      .name = name,
      .summary = std::string("cosine similarity of each token's ") + what + " to that of the most similar other token",
      .unit = "cosine",
      .formula =
          "mean over i of the maximum over j != i of cos(w_i, w_j), w = the vectors of all KV heads, concatenated",
      .source = "SCA, Table 1, Figs. 2 and 7",
      .edges =
          "prompt tokens only, compared with earlier and later ones; a single token -> 0, a zero vector -> cosine 0",
      .variants = {{"", "mean over tokens, then over layers", OfTrace{measure}, true}},
  };
}

const RegisteredMetric redundancy_key_metric{card("redundancy_key", "key", of_keys)};
const RegisteredMetric redundancy_value_metric{card("redundancy_value", "value", of_values)};

}  // namespace
}  // namespace kvreplay
