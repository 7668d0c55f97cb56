import kvreplay as kv


@kv.policy(recent="window", paper="after Guo et al. 2024, VATP, arXiv:2406.12335")
def value_attention(view, window: int = kv.parameter(8, 1, 4096, "last queries: they vote, and they stay")):
    "what the last queries attend to, by the size of its values"
    return view.window_attention(window) * view.value_norms(1).repeat(view.group, axis=0)
