"""The Pareto front of memory and cost."""

from __future__ import annotations

import numpy as np
import pandas as pd


def on_front(memory: pd.Series, cost: pd.Series, counts: pd.Series) -> pd.Series:
    """Whether no other point that counts has at most as much memory and at most as much cost, and less of one."""
    front = pd.Series(False, index=memory.index)
    least = np.inf
    points = pd.DataFrame({"memory": memory, "cost": cost})[counts]
    for _, equal in points.groupby(["memory", "cost"]):  # in ascending order
        value = equal["cost"].iloc[0]
        front[equal.index] = value < least
        least = min(least, value)
    return front
