"""The metric that comes first where a user names none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvreplay.errors import Error, Refusal

if TYPE_CHECKING:
    from kvreplay.results import Run

# Orders policies most like the live model's KL divergence, of the metrics that every trace gives: docs/closed-loop.md.
HEADLINE = "output_error:pooled"
BEFORE = "attention_recall"  # of runs that do not have the headline: written by kvreplay 1, or with other --metrics
DEFAULT = f"{HEADLINE}, or the first metric of the run that has a direction"  # for help texts


def default_metric(known: Sequence[str], runs: Sequence[Run]) -> str:
    """Of the metrics of these runs, NAME[:VARIANT]: the headline, else the attention recall, else the first one of
    which higher or lower values are better."""

    def has_direction(name: str) -> bool:
        return any(run.better_of(name) in ("higher", "lower") for run in runs)

    found = [*(name for name in (HEADLINE, BEFORE) if name in known), *filter(has_direction, known)]
    if not found:
        raise Error("--metric", "no default, because no metric of the run has a direction",
                    "one of " + ", ".join(known), "", Refusal.USAGE)  # fmt: skip
    return found[0]
