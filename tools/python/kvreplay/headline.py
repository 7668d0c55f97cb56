"""The offline metric that comes first where a user names none."""

from __future__ import annotations

from collections.abc import Iterable

# Orders policies most like the live model's KL divergence, of the metrics that every trace gives: docs/closed-loop.md.
HEADLINE = "output_error:pooled"
BEFORE = "attention_recall"  # of runs that do not have the headline: written by kvreplay 1, or with other --metrics


def default_metric(known: Iterable[str]) -> str:
    """The headline, or the attention recall of runs that lack it."""
    return HEADLINE if HEADLINE in set(known) else BEFORE
