"""Which rotary embedding each layer applies: found in the model's modules, proved on its keys.

A single token attends to itself alone, so its hidden states do not depend on its position, and its key at position p
is its key at position 0 rotated by p: that tells for every layer which frequencies it uses, how components pair,
and whether it rotates at all. Recurrent blocks that treat position 0 as a beginning need position 1 in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvreplay.capture.refusals import refused

STYLES = ("halves", "interleaved")
SUFFIX = "inv_freq"
CLEAR = 2.0  # the next-best candidate's error must be larger than the best one's by this factor


@dataclass(frozen=True)
class Frequencies:
    """One rotary module's data: radians a position [r], and the factor on cosine and sine."""

    inv_freq: np.ndarray
    attention_scaling: float


@dataclass(frozen=True)
class Fit:
    """The candidate that explains a layer's keys best, its error, and the error of the next-best candidate."""

    layer: int  # counted from 0
    frequencies: Frequencies
    error: float
    next_best: float

    @property
    def margin(self) -> float:
        """The factor between the two errors; infinite for an exact fit."""
        return self.next_best / self.error if self.error else np.inf


@dataclass(frozen=True)
class Rope:
    """The rotary data of all observed layers; a row of zeros: the layer does not rotate."""

    style: str
    inv_freq: np.ndarray  # float64 [L,r]; behind the pairs of a layer zeros
    pairs: np.ndarray  # int32 [L]
    attention_scaling: np.ndarray  # float64 [L]
    closest: Fit  # of the layer with the smallest margin


def rotary_modules(decoder: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that hold frequencies."""
    return [m for m in decoder.modules() if any(name.endswith(SUFFIX) for name, _ in m.named_buffers(recurse=False))]


def frequencies(decoder: torch.nn.Module) -> list[Frequencies]:
    """The distinct rotary data among a model's modules, as they stand after its latest pass."""
    found: list[Frequencies] = []

    def add(candidate: Frequencies) -> None:
        if not any(same(candidate, other) for other in found):
            found.append(candidate)

    for module in rotary_modules(decoder):
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith(SUFFIX) or name.endswith("original_" + SUFFIX):
                continue
            prefix = name.removesuffix(SUFFIX)
            scaling = float(getattr(module, f"{prefix}attention_scaling", 1.0))
            add(Frequencies(buffer.detach().cpu().double().numpy().reshape(-1), scaling))
    for module in (m for m in decoder.modules() if "Rotary" in type(m).__name__):
        for table in module.buffers(recurse=False):
            if (frequency := _of_table(table)) is not None:
                add(Frequencies(frequency, 1.0))
    return found


def _of_table(table: torch.Tensor) -> np.ndarray | None:
    """The frequencies [r] behind sines and cosines [positions,2r], as GPT-J has them; None: not such a table."""
    if table.ndim != 2 or len(table) < 2 or table.shape[1] % 2:
        return None
    (sine_0, cosine_0), (sine, cosine) = table[:2].detach().cpu().double().unflatten(1, (2, -1)).numpy()
    if np.any(sine_0 != 0) or np.any(cosine_0 != 1) or np.max(np.abs(np.hypot(sine, cosine) - 1)) > 2.0**-7:
        return None
    return np.arctan2(sine, cosine)


def same(one: Frequencies, other: Frequencies) -> bool:
    return np.array_equal(one.inv_freq, other.inv_freq) and one.attention_scaling == other.attention_scaling


def rotate(x: np.ndarray, angles: np.ndarray, style: str) -> np.ndarray:
    """Rotates component pairs of x [..., d] by angles [r]; components from 2r on are unchanged."""
    r = len(angles)
    first, second = (slice(0, r), slice(r, 2 * r)) if style == "halves" else (slice(0, 2 * r, 2), slice(1, 2 * r, 2))
    turned = x.copy()
    turned[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
    turned[..., second] = x[..., first] * np.sin(angles) + x[..., second] * np.cos(angles)
    return turned


def _deviation(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, relative to the largest component; 0 without components."""
    if not expected.size:
        return 0.0
    return float(np.max(np.abs(found - expected)) / max(np.max(np.abs(expected)), 1e-30))


def _best_fit(
    layer: int, before: np.ndarray, after: np.ndarray, distance: int, candidates: list[Frequencies], style: str
) -> Fit:
    candidates = [one for one in candidates if 2 * len(one.inv_freq) <= before.shape[-1]]
    errors = [_deviation(after, rotate(before, distance * c.inv_freq, style)) for c in candidates]
    best, *others = np.argsort(errors, kind="stable")
    return Fit(layer, candidates[best], errors[best], min((errors[other] for other in others), default=np.inf))


def identify(
    name: str,
    candidates: list[Frequencies],
    keys_at: Callable[[int], list[np.ndarray]],
    position: int,
    rounding: float,
    exact: bool = True,
    start: int = 0,
) -> Rope | None:
    """The RoPE of every layer; None if no layer has any.

    `keys_at(p)` are all layers' keys [Hkv,d] of one token at position p: `start` and `position`. `rounding` is the unit
    of the type they were computed in. The last call is for `position`, so that length-dependent frequencies stand as
    they will in the pass.

    "No rotation" is a candidate beside the frequencies, and the candidate with the smallest error is chosen. The
    error of a correct rotation is rounding; a layer that does not rotate gives the same bits at both positions, if the
    layers before are `exact`: their outputs for one token do not depend on rounded logits. Some models rotate by the
    negative angle (nanochat): so the negative frequencies are candidates.
    """
    tolerance = 16 * rounding + 1e-6 * position + 1e-5  # rounding of products; angles are float32 in the model
    at_start, moved = keys_at(start), keys_at(position)
    still = Frequencies(np.zeros(0), 1.0)
    both_senses = [*candidates, *(Frequencies(-one.inv_freq, one.attention_scaling) for one in candidates)]

    def fits(style: str) -> list[Fit]:
        layers = enumerate(zip(at_start, moved, strict=True))
        return [
            _best_fit(layer, before, after, position - start, [still, *both_senses], style)
            for layer, (before, after) in layers
        ]

    by_style = {style: fits(style) for style in STYLES}
    style = min(STYLES, key=lambda style: max(fit.error for fit in by_style[style]))
    chosen = by_style[style]
    unexplained = [fit for fit in chosen if fit.error > (rounding if fit.frequencies is still and exact else tolerance)]
    if not candidates:
        lengths = [
            _deviation(np.linalg.norm(after, axis=-1), np.linalg.norm(before, axis=-1)) <= tolerance
            for before, after in zip(at_start, moved, strict=True)
        ]
        if all(lengths) and unexplained:
            raise refused(name, "keys rotated by unknown frequencies", "RoPE with its inv_freq in a module")
        return None
    for fit in unexplained:
        raise refused(name, f"layer {fit.layer}: keys that its RoPE does not explain", "keys rotated by position alone")
    closest = min(chosen, key=lambda fit: fit.margin)
    if closest.margin <= CLEAR:
        errors = f"errors {closest.error:.2g} and {closest.next_best:.2g}"
        text = f"layer {closest.layer}: keys that fit two rotations about as well ({errors})"
        raise refused(name, text, "one rotation that fits clearly best (try --dtype float32 or a longer prompt)")
    if all(fit.frequencies is still for fit in chosen):
        return None
    pairs = [len(fit.frequencies.inv_freq) for fit in chosen]
    most = max(pairs)
    # A layer that does not rotate has a row of zeros, in any number of pairs that its keys have.
    pairs = [count or min(most, keys.shape[-1] // 2) for count, keys in zip(pairs, moved, strict=True)]
    padded = [np.pad(fit.frequencies.inv_freq, (0, most - len(fit.frequencies.inv_freq))) for fit in chosen]
    scaling = np.array([fit.frequencies.attention_scaling for fit in chosen])
    return Rope(style, np.stack(padded), np.array(pairs, np.int32), scaling, closest)


def produced_deviation(
    candidates: list[Frequencies], produced: list[tuple[np.ndarray, np.ndarray]], position: int
) -> float:
    """How far the cosines and sines that rotary modules produced are from those of the nearest candidate."""
    return max((min(_table_deviation(c, table, position) for c in candidates) for table in produced), default=0.0)


def _table_deviation(candidate: Frequencies, table: tuple[np.ndarray, np.ndarray], position: int) -> float:
    """A module gives cosines and sines of the angles once, or twice: one after the other, or in pairs. Multimodal
    modules give a row for each axis (time, height, width); the rows of a text are equal."""
    angles = position * candidate.inv_freq
    layouts = (angles, np.tile(angles, 2), np.repeat(angles, 2))
    deviations = [np.inf]
    for layout in (layout for layout in layouts if layout.size == table[0].shape[-1]):
        expected = candidate.attention_scaling * np.stack([np.cos(layout), np.sin(layout)])[:, None]
        found = np.stack([x.reshape(-1, layout.size) for x in table])
        deviations.append(float(np.max(np.abs(found - expected))))
    return min(deviations)
