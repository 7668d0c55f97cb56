"""The policy of the tutorial: attention of the last queries and of all queries of a token's lifetime."""

import numpy as np

import kvreplay as kv


@kv.policy(recent="window", queries="all")
def two_horizons(view, window: int = kv.parameter(8, 1, 4096, "observation window, in tokens; protected")):
    """Geometric mean of a token's mean attention from the last queries and from all queries of its lifetime"""
    positions = np.stack([view.positions(head) for head in range(view.kv_heads)]).repeat(view.group, axis=0)
    near = view.window_attention(window) / window
    far = view.cumulative_attention() / (view.seen - positions)  # number of queries that can see the token
    return np.sqrt(near * far)
