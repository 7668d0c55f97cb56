"""Copies of a trace in memory with other queries, keys, layers or prompt.

Hq query heads, Hkv KV heads, T tokens, d components of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvreplay.memory import Rope, from_arrays
from kvreplay.trace import Trace


def altered(
    trace: Trace,
    queries: Callable[[int, np.ndarray], np.ndarray] = lambda layer, q: q,
    keys: Callable[[int, np.ndarray], np.ndarray] = lambda layer, k: k,
    layers: Sequence[int] = (),
    **others: Any,
) -> Trace:
    """The trace in float32 with the queries and keys [H,T,d] of each stored layer changed.

    `layers`: those to copy, each with keys and values (default: all). `others`: arguments of `kv.from_arrays`
    in place of the trace's.
    """
    sources = trace["/model/kv_source"] if "/model/kv_source" in trace and not layers else None
    chosen = list(layers) or list(range(trace.layers))
    owns = [sources is None or sources[layer] == layer for layer in chosen]
    positions = [trace.query_positions(layer) for layer in chosen]
    given = {
        "q": [queries(layer, trace.q(layer).astype(np.float32)) for layer in chosen],
        "k": [keys(layer, trace.k(layer).astype(np.float32)) if own else None
              for layer, own in zip(chosen, owns, strict=True)],
        "v": [trace.v(layer).astype(np.float32) if own else None for layer, own in zip(chosen, owns, strict=True)],
        "prompt": trace.prompt,
        "spans": trace.spans,
        "softmax_scale": trace.attribute("/model", "softmax_scale"),
        "softcap": trace.attribute("/model", "logit_softcap"),
        "kv_source": sources,
        "query_positions": [stored if len(stored) else None for stored in positions],
        "rope": rope_of(trace, chosen),
        "name": trace.name,
    }  # fmt: skip
    for name in ("layer_index", "sliding_window", "chunk", "sinks"):
        if (value := trace.value(f"/model/{name}")) is not None:
            given[name] = np.asarray(value)[chosen]
    if "/layers/000/wo" in trace:
        given["wo"] = [trace[f"/layers/{layer:03d}/wo"] for layer in chosen]
    return from_arrays(**given | others)


def rope_of(trace: Trace, layers: Sequence[int] = ()) -> Rope | None:
    """The RoPE of these stored layers, or of all; None: the model has none."""
    if "/model/rope/inv_freq" not in trace:
        return None
    chosen = list(layers) or list(range(trace.layers))
    offset = trace.value("/model/rope@offset")
    return Rope(
        np.asarray(trace["/model/rope/inv_freq"]).reshape(trace.layers, -1)[chosen],
        np.asarray(trace["/model/rope/attention_scaling"])[chosen],
        trace.attribute("/model/rope", "style"),
        0 if offset is None else int(offset),
    )
