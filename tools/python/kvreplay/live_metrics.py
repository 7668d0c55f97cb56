"""The metrics of `kvreplay live`, as `kvreplay metrics NAME` defines them; without the engine, none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LiveMetric:
    """The card of a metric."""

    name: str
    unit: str
    better: str  # higher, lower or neither
    formula: str
    variants: tuple[str, ...]
    of_text: bool  # of the generated text


def _metrics() -> tuple[LiveMetric, ...]:
    try:
        from kvreplay import _engine
    except ImportError:  # figures work without the engine
        return ()
    return tuple(
        LiveMetric(*names, tuple(variants), of_text) for *names, variants, of_text in _engine.live_metrics()
    )  # fmt: skip


METRICS = _metrics()
BY_NAME = {metric.name: metric for metric in METRICS}
FEWEST = 5  # policies of a prompt at a budget that have an order worth a correlation
UNORDERED = ("none", "live", "future")  # decisions of cells that hold everything, or are no policies to choose from


def is_live(metric: str) -> bool:
    """Whether NAME[:VARIANT] is measured in the live model."""
    return metric.partition(":")[0] in BY_NAME


def shown_name(metric: str) -> str:
    """NAME[:VARIANT] as tables show it: metrics of the live model begin with live."""
    return f"live.{metric}" if is_live(metric) else metric
