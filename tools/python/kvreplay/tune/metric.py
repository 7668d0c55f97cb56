"""The metric of a search: checked before the packages that measure it are imported."""

from __future__ import annotations

from kvreplay import _engine
from kvreplay.errors import Error, Refusal
from kvreplay.live_metrics import BY_NAME as LIVE


def is_live(metric: str) -> bool:
    """Whether a model must run for NAME[:VARIANT]."""
    return metric.partition(":")[0] in LIVE


def better_of(metric: str) -> str:
    """higher or lower: the better values of NAME[:VARIANT]. Raises Error for a metric that cannot be an objective."""
    name, _, variant = metric.partition(":")
    if is_live(metric) and LIVE[name].of_text:
        raise Error("--metric", f"{name} needs generated text",
                    "a number of the continuation, such as kld", "", Refusal.USAGE)  # fmt: skip
    if is_live(metric) and variant not in LIVE[name].variants:
        expected = " or ".join(f"{name}:{one}".rstrip(":") for one in LIVE[name].variants)
        raise Error("--metric", "unknown variant", expected, metric, Refusal.USAGE)
    better = _engine.better(metric)
    if better == "neither":
        raise Error("--metric", f"{metric} has no direction",
                    "a metric with a direction, as kvreplay metrics lists them", "", Refusal.USAGE)  # fmt: skip
    return better
