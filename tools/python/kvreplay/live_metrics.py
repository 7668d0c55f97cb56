"""The metrics of `kvreplay live`. Names are those of llama.cpp's `perplexity --kl-divergence` where it has one.

p: the reference's probabilities of the next token, q: the cell's. Of the continuation's G tokens P ... T-1, token t is
read by the model, which then gives the distribution of token t+1. The distribution after the last prompt token comes
from the full cache and is left out. Text metrics are of `--generate N`, for prompts with known answers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LiveMetric:
    """The card of a metric."""

    name: str
    unit: str
    better: str  # higher, lower or neither
    formula: str
    variants: tuple[str, ...] = ("",)


CONTINUATION_METRICS = (
    LiveMetric("kld", "nats", "lower", "KL(p || q) of each of G tokens: mean, median, 99th percentile",
               ("", "median", "p99")),
    LiveMetric("same_top_p", "ratio", "higher", "share of G tokens at which p and q have the same most probable token"),
    LiveMetric("rms_dp", "ratio", "lower", "root mean square of q - p at the true next token, over G - 1 tokens"),
    LiveMetric("nll_increase", "nats", "lower", "mean of ln p - ln q at the true next token, over G - 1 tokens"),
    LiveMetric("perplexity_ratio", "ratio", "lower", "exp(nll_increase)"),
    LiveMetric("hidden_drift", "ratio", "lower", "mean of |h' - h| / |h| over G tokens, h the output of a layer"),
    LiveMetric("live_output_error", "ratio", "lower",
               "mean of |o' - o| / |o| over query heads and G tokens, o a layer's attention output; heads with o = 0 "
               "are left out"),
    LiveMetric("error_growth", "ratio", "neither",
               "least-squares slope of ln hidden_drift: over layers, per layer; over steps, per token at the last "
        "layer; "
               "none where a drift is 0", ("layers", "steps")),
)  # fmt: skip
TEXT_METRICS = (
    LiveMetric("exact_match", "ratio", "higher", "1 if the text is an answer, after LongBench's normalisation, else 0"),
    LiveMetric("contains", "ratio", "higher", "share of the answers that the text contains, as RULER's string match"),
    LiveMetric("f1", "ratio", "higher", "token F1 with the best of the answers, after LongBench's normalisation"),
    LiveMetric("rouge_l", "ratio", "higher", "ROUGE-L F-measure with the best of the answers"),
    LiveMetric("repetition", "ratio", "lower", "share of the text's 4-grams of tokens that have come before"),
    LiveMetric("same_tokens", "tokens", "higher", "tokens before the first that differs from the reference's text"),
)  # fmt: skip
METRICS = (*CONTINUATION_METRICS, *TEXT_METRICS)
BY_NAME = {metric.name: metric for metric in METRICS}
