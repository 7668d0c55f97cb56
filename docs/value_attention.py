import kvreplay as kv


@kv.policy(recent="window", paper="after Guo et al. 2024, VATP, arXiv:2406.12335")
def value_attention(view, window: int = kv.parameter(8, 1, 4096, "observation window: last queries, always kept")):
    "attention of the observation window times the L1 norm of the value"
    return view.window_attention(window) * view.value_norms(1).repeat(view.group, axis=0)
