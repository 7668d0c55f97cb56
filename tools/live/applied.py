"""One policy applied to the cache of a live model, which has one row of keys and values for each KV head.

The engine replays the policy over queries, keys and values that the model has just computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import kvreplay as kv
from kvreplay import _engine
from kvreplay.engine import decision_and_store, policy_texts
from kvreplay.errors import Error, Refusal
from kvreplay.live.attention import Held, Layer, kept_tokens
from kvreplay.live.cells import given_back, leaves_of
from kvreplay.one_cell import one_cell
from kvreplay.results import Selection, Stored
from kvreplay.trace import REAL_TYPES, Trace


def attention_rules(layers: Mapping[int, Layer]) -> dict[str, Any]:
    """The arguments of `kv.from_arrays` for the attention of these layers, in ascending order."""
    numbers = sorted(layers)
    ordered = [layers[number] for number in numbers]
    sinks = [layer.sinks.detach().double().cpu().numpy() for layer in ordered if layer.sinks is not None]
    return {
        "softmax_scale": ordered[0].scale, "softcap": ordered[0].softcap,
        "sliding_window": [layer.window for layer in ordered], "chunk": [layer.chunk for layer in ordered],
        "sinks": np.stack(sinks) if sinks else None, "layer_index": numbers,
    }  # fmt: skip


def trace_of(
    layers: Mapping[int, Layer],
    queries: Mapping[int, torch.Tensor],
    prompt: int,
    rope: Any = None,
    ids: Sequence[int] | None = None,
    projections: Sequence[torch.Tensor] | None = None,
) -> Trace:
    """The trace of a model's tensors. `queries`: by layer [Hq,T,d]; `rope`: of the capture's probe, with a row for each
    layer of the model; `projections`: the output projections of `layers`, in ascending order. A sliding window that
    hides none of these tokens is none: policies skip layers with one."""
    numbers = sorted(layers)
    rules = attention_rules(layers)
    tokens = layers[numbers[0]].k.shape[1]
    rules["sliding_window"] = [window if window < tokens else 0 for window in rules["sliding_window"]]
    if rope is not None:
        rows = [rope.inv_freq[number, : rope.pairs[number]] for number in numbers]
        rope = kv.Rope(rows, rope.attention_scaling[numbers], rope.style)
    if projections and any(str(one.dtype).removeprefix("torch.") not in REAL_TYPES for one in projections):
        projections = None  # quantised: the engine rejects policies that read them
    return kv.from_arrays(
        [queries[number].cpu() for number in numbers], [layers[number].k.cpu() for number in numbers],
        [layers[number].v.cpu() for number in numbers], prompt=prompt, ids=ids, rope=rope,
        wo=None if projections is None else [one.detach().cpu() for one in projections], name="live",
        **rules,
    )  # fmt: skip


class AppliedPolicy:
    """A policy whose kept set a cache with one row for each KV head can hold."""

    def __init__(self, policy: Any) -> None:
        """`policy`: a text, the result of `kv.policy.NAME(…)`, or a policy in Python."""
        [text] = policy_texts(policy)
        self.text = _engine.label(text)

    def check(self, layers: int) -> None:
        """Rejects policies that evict nothing, or that read later queries, in a model of `layers` layers."""
        decision, store = decision_and_store(self.text, layers)
        if decision == "future":
            raise Error(self.text, "reads queries of the continuation", "a policy without them", "", Refusal.USAGE)
        if decision == "never" and store == "exact" and self.text.partition(":")[0] != "full":
            expected = "a policy that evicts tokens or changes keys and values"
            raise Error(self.text, "each query reads a different set, and no token is evicted", expected, "",
                        Refusal.USAGE)  # fmt: skip

    def held(self, trace: Trace, budget: str, layers: Mapping[int, Layer]) -> tuple[dict[int, Held], bool]:
        """The tokens of each treated layer after the prompt; and whether the policy evicts repeatedly."""
        run, cell = one_cell(trace, self.text, budget)
        selection = run.selection_of(cell, trace.prompt)
        if selection is None:
            raise Error(self.text, "no kept set", "a policy with one set for all queries", "", Refusal.USAGE)
        _, store = decision_and_store(self.text, len(selection.layers))
        stored = Stored(run.folder, trace.name, cell, trace) if store != "exact" else None
        held = {}
        for place, (stored_layer, number) in enumerate(zip(selection.layers, selection.numbers, strict=True)):
            layer = layers[int(number)]
            kept = self._rows(selection, place, len(layer.k))
            held[int(number)] = kept_tokens(layer, kept) if stored is None else given_back(
                layer, stored.layer(int(stored_layer)))  # fmt: skip
        is_repeated = selection.evicted_at is not None
        if is_repeated and stored is not None:
            raise Error(self.text, "moves or changes tokens and evicts repeatedly", "schedule=once or store=exact", "",
                        Refusal.USAGE)  # fmt: skip
        return held, is_repeated

    def leaves(self, trace: Trace, budget: str) -> dict[int, torch.Tensor]:
        """By layer int64 [1 | Hkv, T]: the query after which a token is evicted, or NEVER."""
        run, cell = one_cell(trace, self.text, budget)
        return leaves_of(run.selection_of(cell, trace.prompt))

    def _rows(self, selection: Selection, place: int, kv_heads: int) -> torch.Tensor:
        """Whether tokens of a treated layer are kept: bool [1 | Hkv, P]."""
        rows = np.asarray(selection.mask()[place])
        rows = rows if selection.rows is None else rows[: selection.rows[place]]
        if len(rows) not in (1, kv_heads):
            expected = "heads=kv or heads=layer: a cache has one row for each KV head"
            raise Error(self.text, "keeps a set for each query head", expected, "heads=query", Refusal.USAGE)
        return torch.from_numpy(np.ascontiguousarray(rows))
