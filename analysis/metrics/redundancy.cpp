// How alike the tokens of a prompt are, whatever is kept.
#include "analysis/metrics/metric.h"

namespace kvreplay {
namespace {

std::vector<double> tokens_of(const Matrix& maxima) { return {maxima.row(0).begin(), maxima.row(0).end()}; }

std::vector<double> of_keys(const LayerView& view, Backend&) { return tokens_of(view.key_similarity()); }

std::vector<double> of_values(const LayerView& view, Backend&) { return tokens_of(view.value_similarity()); }

MetricCard card(const char* name, const char* what, std::vector<double> (*measure)(const LayerView&, Backend&)) {
  return {
      .name = name,
      .summary = std::string("how near each token's ") + what + " is to another token's",
      .unit = "cosine",
      .formula =
          "mean over i of the maximum over j != i of cos(w_i, w_j), w = the vectors of all KV heads, concatenated",
      .source = "SCA, Table 1, Figs. 2 and 7",
      .edges = "prompt tokens only, both directions in time; one token alone -> 0, a zero vector -> cosine 0",
      .variants = {{"", "mean over tokens, then over layers", OfTrace{measure}, true}},
  };
}

const RegisteredMetric redundancy_key_metric{card("redundancy_key", "key", of_keys)};
const RegisteredMetric redundancy_value_metric{card("redundancy_value", "value", of_values)};

}  // namespace
}  // namespace kvreplay
