"""The policy of the tutorial: what is looked at now, and was looked at by the queries of its lifetime."""

import numpy as np

import kvreplay as kv


@kv.policy(recent="window", queries="all")
def two_horizons(view, window: int = kv.parameter(8, 1, 4096, "last queries: the near horizon, and they stay")):
    """the geometric mean of the attention by the last queries and by all queries of a token's lifetime, each a mean"""
    positions = np.stack([view.positions(head) for head in range(view.kv_heads)]).repeat(view.group, axis=0)
    near = view.window_attention(window) / window
    far = view.cumulative_attention() / (view.seen - positions)  # by how many queries could see the token
    return np.sqrt(near * far)
