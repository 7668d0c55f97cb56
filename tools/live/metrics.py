"""Numbers of a cell in the live model, each against the reference: the same pass with nothing evicted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvreplay.live.passes import Trajectory


@dataclass(frozen=True)
class Value:
    """A number of a cell, of one layer or of all."""

    metric: str
    variant: str
    layer: int | None  # the model's own number; None: all
    value: float  # NaN: not defined


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats over the last axis, of log probabilities; what rounding leaves below 0 is 0."""
    return (p.exp() * (p - q)).sum(-1).clamp(min=0.0)


def predicted(reference: Trajectory, cell: Trajectory, row: int, following: torch.Tensor) -> Iterator[Value]:
    """Metrics of the model's predictions; `following` [G-1] are the true next tokens of all but the last."""
    p, q = (one.log_probabilities[row] for one in (reference, cell))
    kld = divergence(p, q).cpu().numpy()
    yield Value("kld", "", None, float(kld.mean()))
    yield Value("kld", "median", None, float(np.median(kld)))
    yield Value("kld", "p99", None, float(np.percentile(kld, 99)))
    yield Value("same_top_p", "", None, float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    true_p, true_q = (one[: len(following)].gather(-1, following[:, None].to(one.device))[:, 0] for one in (p, q))
    some = len(following) > 0
    increase = float((true_p - true_q).mean()) if some else math.nan
    yield Value("rms_dp", "", None, float((true_q.exp() - true_p.exp()).square().mean().sqrt()) if some else math.nan)
    yield Value("nll_increase", "", None, increase)
    yield Value("perplexity_ratio", "", None, math.exp(increase) if increase < 700 else math.inf)


def drifted(reference: Trajectory, cell: Trajectory, row: int) -> Iterator[Value]:
    """How far layers' outputs are from the reference's."""
    pairs = zip(cell.hidden, reference.hidden, strict=True)
    drift = np.stack([relative(there[row], here[row]).cpu().numpy() for there, here in pairs])  # [L,G]
    numbers = sorted(reference.attention)
    for number, one in zip(numbers, drift, strict=True):
        yield Value("hidden_drift", "", number, float(np.nanmean(one)))
    yield Value("hidden_drift", "", None, float(np.nanmean(drift)))
    errors = []
    for number in numbers:
        error = relative(cell.attention[number][row], reference.attention[number][row])  # [G,Hq]
        errors.append(float(error.nanmean()))
        yield Value("live_output_error", "", number, errors[-1])
    yield Value("live_output_error", "", None, float(np.mean(errors)))
    yield Value("error_growth", "layers", None, slope(drift.mean(1)))
    yield Value("error_growth", "steps", None, slope(drift[-1]))


def relative(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """|one - other| / |other| over the last axis, float64; NaN where other is 0."""
    one, other = one.double(), other.double()
    length = other.norm(dim=-1)
    return torch.where(length > 0, (one - other).norm(dim=-1) / length, torch.nan)


def slope(positive: np.ndarray) -> float:
    """Least-squares slope of the logarithms against 0, 1, 2 ...; NaN for fewer than two, or where one is 0."""
    if len(positive) < 2 or not (positive > 0).all():
        return math.nan
    return float(np.polyfit(np.arange(len(positive)), np.log(positive), 1)[0])
