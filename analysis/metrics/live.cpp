// Metrics of the live model that decodes with the kept sets. Names are those of llama.cpp's `perplexity
// --kl-divergence` where it has one. `kvreplay live` measures them (tools/live/metrics.py, tools/live/texts.py).
//
// p: the probabilities of the next token with the full cache, q: those with the kept sets. Of the continuation's G
// tokens P ... T-1, token t is read by the model, which then gives the distribution of token t+1. The distribution
// after the last prompt token comes from the full cache and is left out.
#include "analysis/metrics/metric.h"

namespace kvreplay {
namespace {

/// The variants of a metric of the continuation, or of generated text.
std::vector<MetricVariant> live_variants(std::vector<std::pair<const char*, const char*>> named, bool of_text = false) {
  std::vector<MetricVariant> variants;
  for (const auto& [name, summary] : named) variants.push_back({name, summary, OfLiveModel{.of_text = of_text}});
  return variants;
}

std::vector<MetricVariant> over_tokens() { return live_variants({{"", "over the tokens of the continuation"}}); }
std::vector<MetricVariant> of_one_text() { return live_variants({{"", "of the generated text"}}, true); }

constexpr const char* llama_cpp = "llama.cpp, perplexity --kl-divergence";
constexpr const char* with_next_token = "undefined for a continuation of one token";
constexpr const char* with_answers = "measured with live --generate N, on prompts with answers";

const RegisteredMetric kld_metric{{
    .name = "kld",
    .summary = "live model: KL divergence of the next-token distribution from that of the full cache",
    .unit = "nats",
    .better = Better::lower,
    .formula = "KL(p || q) of each of G tokens: mean, median, 99th percentile",
    .source = llama_cpp,
    .edges = "0 for full; values that rounding makes negative are 0",
    .variants = live_variants(
        {{"", "mean over tokens"}, {"median", "median over tokens"}, {"p99", "99th percentile over tokens"}}),
}};

const RegisteredMetric same_top_p_metric{{
    .name = "same_top_p",
    .summary = "live model: share of tokens with the most probable next token of the full cache",
    .unit = "ratio",
    .better = Better::higher,
    .formula = "share of G tokens at which p and q have the same most probable token",
    .source = llama_cpp,
    .edges = "1 for full",
    .variants = over_tokens(),
}};

const RegisteredMetric rms_dp_metric{{
    .name = "rms_dp",
    .summary = "live model: change of the probability of the true next token",
    .unit = "ratio",
    .better = Better::lower,
    .formula = "root mean square of q - p at the true next token, over G - 1 tokens",
    .source = llama_cpp,
    .edges = with_next_token,
    .variants = over_tokens(),
}};

const RegisteredMetric nll_increase_metric{{
    .name = "nll_increase",
    .summary = "live model: increase of the negative log-likelihood of the true next token",
    .unit = "nats",
    .better = Better::lower,
    .formula = "mean of ln p - ln q at the true next token, over G - 1 tokens",
    .source = "kvreplay",
    .edges = with_next_token,
    .variants = over_tokens(),
}};

const RegisteredMetric perplexity_ratio_metric{{
    .name = "perplexity_ratio",
    .summary = "live model: perplexity of the continuation, relative to that with the full cache",
    .unit = "ratio",
    .better = Better::lower,
    .formula = "exp(nll_increase)",
    .source = llama_cpp,
    .edges = with_next_token,
    .variants = over_tokens(),
}};

const RegisteredMetric hidden_drift_metric{{
    .name = "hidden_drift",
    .summary = "live model: relative change of the outputs of layers",
    .unit = "ratio",
    .better = Better::lower,
    .formula = "mean of |h' - h| / |h| over G tokens, h the output of a layer",
    .source = "kvreplay",
    .edges = "outputs of norm 0 are left out",
    .variants = live_variants({{"", "mean over tokens, then over layers"}}),
}};

const RegisteredMetric live_output_error_metric{{
    .name = "live_output_error",
    .summary = "live model: relative error of the attention output, with the queries of the evicted cache",
    .unit = "ratio",
    .better = Better::lower,
    .formula = "mean of |o' - o| / |o| over query heads and G tokens, o a layer's attention output",
    .source = "kvreplay",
    .edges = "heads with o = 0 are left out",
    .variants = live_variants({{"", "mean over heads and tokens, then over layers"}}),
}};

const RegisteredMetric error_growth_metric{{
    .name = "error_growth",
    .summary = "live model: growth of hidden_drift",
    .unit = "ratio",
    .better = Better::neither,
    .formula =
        "least-squares slope of ln hidden_drift: over layers, per layer; over steps, per token at the last layer",
    .source = "kvreplay",
    .edges = "undefined where a drift is 0, and for a single layer or token",
    .variants = live_variants({{"layers", "over layers"}, {"steps", "over tokens, at the last layer"}}),
}};

const RegisteredMetric exact_match_metric{{
    .name = "exact_match",
    .summary = "live model: whether the generated text is an answer",
    .unit = "ratio",
    .better = Better::higher,
    .formula = "1 if the text is an answer, after LongBench's normalisation, else 0",
    .source = "SQuAD; normalisation: LongBench, metrics.py",
    .edges = with_answers,
    .variants = of_one_text(),
}};

const RegisteredMetric contains_metric{{
    .name = "contains",
    .summary = "live model: share of the answers that the generated text contains",
    .unit = "ratio",
    .better = Better::higher,
    .formula = "share of the answers that the text contains, in lower case",
    .source = "RULER, string match",
    .edges = with_answers,
    .variants = of_one_text(),
}};

const RegisteredMetric f1_metric{{
    .name = "f1",
    .summary = "live model: token F1 of the generated text",
    .unit = "ratio",
    .better = Better::higher,
    .formula = "token F1 with the best of the answers, after LongBench's normalisation",
    .source = "LongBench, metrics.py",
    .edges = with_answers,
    .variants = of_one_text(),
}};

const RegisteredMetric rouge_l_metric{{
    .name = "rouge_l",
    .summary = "live model: ROUGE-L of the generated text",
    .unit = "ratio",
    .better = Better::higher,
    .formula = "ROUGE-L F-measure with the best of the answers",
    .source = "Lin 2004, ROUGE",
    .edges = with_answers,
    .variants = of_one_text(),
}};

const RegisteredMetric repetition_metric{{
    .name = "repetition",
    .summary = "live model: repetition in the generated text",
    .unit = "ratio",
    .better = Better::lower,
    .formula = "share of the text's 4-grams of tokens that occurred before",
    .source = "kvreplay",
    .edges = "measured with live --generate N; undefined for fewer than 4 tokens",
    .variants = of_one_text(),
}};

const RegisteredMetric same_tokens_metric{{
    .name = "same_tokens",
    .summary = "live model: generated tokens before the first one that differs from the text of the full cache",
    .unit = "tokens",
    .better = Better::higher,
    .formula = "length of the longest common prefix of the two texts, in tokens",
    .source = "kvreplay",
    .edges = "measured with live --generate N; at most the length of the shorter text",
    .variants = of_one_text(),
}};

}  // namespace
}  // namespace kvreplay
