"""Means of an offline metric over the thirds of the layers, with the weights that order policies best."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvreplay.predict.agreement import spearman
from kvreplay.predict.prediction import FEWEST, PARTS, Prediction

# Weights of the lower, middle and upper third of the layers, in sixths: (1, 0, 0) ... (0, 0, 1).
LAYER_WEIGHTS = np.array([(a, b, 6 - a - b) for a in range(6, -1, -1) for b in range(6 - a, -1, -1)]) / 6
EQUAL = LAYER_WEIGHTS.tolist().index([2 / 6] * 3)


def with_weights(prediction: Prediction, metric: str, live: str = "kld") -> pd.DataFrame:
    """Spearman with `live` of a mean over the thirds of the layers with each of LAYER_WEIGHTS: one row a prompt, one
    column a weight, mean over budgets. `metric` is one whose thirds are measured."""
    thirds = [f"{metric}:{part}" for part in PARTS[2:]]
    rows: dict[str, list[np.ndarray]] = {}
    for (prompt, _), some in prediction.cells.groupby(["prompt", "budget"]):
        some = some.groupby("label")[[*thirds, live]].mean().dropna()
        if len(some) < FEWEST:
            continue
        weighted = LAYER_WEIGHTS @ some[thirds].to_numpy().T
        rows.setdefault(prompt, []).append(np.array([spearman(one, some[live].to_numpy()) for one in weighted]))
    return pd.DataFrame({prompt: np.mean(found, axis=0) for prompt, found in rows.items()}).T


def left_out_weights(prediction: Prediction, found: pd.DataFrame) -> pd.DataFrame:
    """For each kind of prompt the weights of the thirds of the layers that are best on all others, and how they do on
    this one: kind, prompts, weights (lower, middle, upper), spearman, with equal weights, with the best ones.
    `found`: of `with_weights`."""
    kinds = prediction.cells.drop_duplicates("prompt").set_index("prompt")["kind"].reindex(found.index)
    lines = []
    for kind in sorted(set(kinds)):
        mine, others = found[kinds == kind].mean(), found[kinds != kind].mean()
        if others.isna().all():
            continue
        chosen = int(others.idxmax())
        lines.append({"kind": kind, "prompts": int((kinds == kind).sum()), "weights": LAYER_WEIGHTS[chosen],
                      "spearman": mine[chosen], "equal": mine[EQUAL], "best": mine.max()})  # fmt: skip
    return pd.DataFrame(lines)
