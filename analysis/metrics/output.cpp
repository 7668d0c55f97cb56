// Effect of eviction on the attention output of an eval query: o = Σ a v compared with õ = Σ ã v.
#include <cmath>

#include "analysis/metrics/metric.h"
#include "analysis/metrics/quotients.h"

namespace kvreplay {
namespace {

double output_cosine(const Moments& kept, const Moments& full) {
  return cosine(kept.output_dot, kept.output_square, full.output_square, 1.0);
}
double output_cosine(const Comparison& compared) {
  return cosine(compared.output_dot, compared.output_square, compared.output_full_square, 1.0);
}

double output_error(const Moments& kept, const Moments& full) {
  return std::sqrt(quotient(kept.error_square, full.output_square, 0.0));
}
double output_error(const Comparison& compared) {
  return std::sqrt(quotient(compared.error_square, compared.output_full_square, 0.0));
}

double error_square(const Moments& kept, const Moments&) { return kept.error_square; }
double error_square(const Comparison& compared) { return compared.error_square; }
double full_square(const Moments&, const Moments& full) { return full.output_square; }
double full_square(const Comparison& compared) { return compared.output_full_square; }

double projected(const ProjectedOutput& of) { return quotient(of.error, of.output, 0.0); }
double beside_residual(const ProjectedOutput& of) { return quotient(of.error, of.input, 0.0); }

double greatest(std::span<double> values) { return percentile(values, 0.95); }

constexpr MomentParts outputs{.outputs = true};

const RegisteredMetric output_cosine_metric{{
    .name = "output_cosine",
    .summary = "cosine similarity of the attention outputs with the full and with the kept cache",
    .unit = "cosine",
    .better = Better::higher,
    .formula = "<o,õ> / (|o| |õ|), o = sum of a v, õ = sum over K' of a v / sum over K' of a",
    .source = "kvreplay",
    .edges = "exactly 1 when every token is kept; both outputs zero -> 1, one output zero -> 0",
    .variants = {{"", "per query head", OfMoments{{output_cosine, output_cosine, outputs}}, true}},
}};

const RegisteredMetric output_error_metric{{
    .name = "output_error",
    .summary =
        "L2 distance between the attention outputs with the full and with the kept cache, relative to the full output",
    .unit = "relative L2 norm",
    .better = Better::lower,
    .formula = "|o - õ|_2 / |o|_2",
    .source = "kvreplay",
    .edges = "exactly 0 when every token is kept; 0/0 -> 0; undefined when only o is zero; :worst of a single query is "
             "the value of that query",
    .variants =
        {{"", "per query head", OfMoments{{output_error, output_error, outputs}}, true},
         {"pooled", "sqrt(sum of |o - õ|² / sum of |o|²) over the eval queries and query heads of a layer",
          OfPooledMoments{{error_square, error_square, outputs}, {full_square, full_square, outputs}}, true},
         {"worst", "95th percentile over eval queries instead of their mean, per query head",
          OfMoments{{output_error, output_error, outputs, greatest}}},
         {"projected", "|W_o (õ - o)| / |W_o o|, all heads together; requires a trace captured with --with-wo",
          OfProjectedOutput{projected}},
         {"residual",
          "|W_o (õ - o)| / |x|, x the hidden state at the layer's input; requires a trace captured with --with-wo",
          OfProjectedOutput{beside_residual, true}}},
}};

}  // namespace
}  // namespace kvreplay
