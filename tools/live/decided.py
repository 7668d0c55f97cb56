"""Sets that a live system chooses while it reads the prompt: by queries, keys and values of the evicted cache.

The text is read in blocks that end where the policy evicts. After each block the engine replays the policy over what
the model has computed so far, zeros behind it: a decision reads no later token, and those made before come out as they
were. Tokens that it evicts are hidden from the next block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import h5py
import numpy as np
import torch

import kvreplay as kv
from kvreplay import _engine
from kvreplay.capture.model import input_device
from kvreplay.errors import Error
from kvreplay.live.applied import attention_rules
from kvreplay.live.attention import NEVER, MaskedAttention, masked
from kvreplay.live.cells import DECISIONS, LiveCell, evicted, leaves_of
from kvreplay.live.passes import Text
from kvreplay.one_cell import one_cell
from kvreplay.results import DECIDED_LIVE, Run, TraceFacts, text

Leaves = dict[int, torch.Tensor]  # by layer: int64 [H,T], the query after which a token goes
Tensors = dict[int, tuple[np.ndarray, ...]]  # by layer: queries [Hq,T,d], keys and values [Hkv,T,d]


def decided_live(cells: Sequence[LiveCell]) -> tuple[list[LiveCell], list[str]]:
    """The cells whose sets change during the prefill; reasons why some of these cannot be decided live."""
    during = [cell for cell in cells if cell.decisions == DECISIONS["during-prefill"]]
    found, left_out = [], []
    for cell in during:
        policy = f"{cell.facts['policy']}:{cell.facts['params']}"
        if cell.facts["policy"] == "finch" or "question-blocks" in policy:
            left_out.append(f"{cell.label}: the policy recomputes the question after each block")
        elif cell.stored is not None:
            left_out.append(f"{cell.label}: its store moves or changes keys during prefill")
        elif cell.leaves is None:
            left_out.append(f"{cell.label}: its sets change within one pass over the layers")
        else:
            found.append(replace(cell, decisions=DECIDED_LIVE))
    if not during:
        left_out.append("no policy of the run evicts during prefill")
    return found, left_out


@dataclass
class _Recording(MaskedAttention):
    """Keeps the queries, keys and values of each layer. `tokens` is the length of the text."""

    tokens: int = 0
    tensors: Tensors = field(default_factory=dict)

    def __call__(self, number: int, module: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        begin = self.cached[number].all()[0].shape[2] if number in self.cached else 0
        if number not in self.tensors:
            self.tensors[number] = tuple(np.zeros((x.shape[1], self.tokens, x.shape[3]), np.float32)
                                         for x in (query, key, value))  # fmt: skip
        for into, x in zip(self.tensors[number], (query, key, value), strict=True):
            into[:, begin : begin + x.shape[2]] = x[0].float().cpu().numpy()
        return super().__call__(number, module, query, key, value, *rest, **named)


def decide(model: Any, whole: Text, cell: LiveCell, trace: TraceFacts, again: Callable[[Tensors], Leaves]) -> LiveCell:
    """The cell with the sets that its policy chooses live. `again` replays the policy over tensors of the text."""
    tokens = len(whole.ids)
    decisions = {int(end) + 1 for one in cell.leaves.values() for end in one[one != NEVER].unique()}
    decided = replace(cell, leaves={number: torch.full_like(one, NEVER) for number, one in cell.leaves.items()})
    attention = _Recording(whole.layers, 0, tokens=tokens)
    device = input_device(model)
    begin = 0
    with torch.inference_mode(), masked(model, attention):
        for end in sorted(decisions | {tokens}):
            attention.leaves = evicted(whole, [decided], trace).leaves
            positions = torch.arange(begin, end, device=device)[None]
            model(input_ids=whole.ids[None, begin:end].to(device), position_ids=positions, use_cache=False,
                  logits_to_keep=1)  # fmt: skip
            if end in decisions:
                leaves = {number: torch.where(gone < end, gone, NEVER)
                          for number, gone in again(attention.tensors).items()}  # fmt: skip
                for number, gone in leaves.items():
                    if not torch.equal(torch.where(gone < end - 1, gone, NEVER), decided.leaves[number]):
                        raise Error(
                            cell.label,
                            "eviction steps differ",
                            "those of the replay",
                            f"another step before token {end}",
                        )
                decided = replace(decided, leaves=leaves)
            begin = end
    return decided


class Replayed:
    """The policy of a cell, replayed over other tensors of its trace."""

    def __init__(self, run: Run, trace: TraceFacts, cell: LiveCell, whole: Text) -> None:
        self._trace = trace
        # Without defaults: one that is larger than the prompt is clamped, a value that was given is rejected.
        self._policy = _engine.label(f"{cell.facts['policy']}:{cell.facts['params']}".rstrip(":"))
        self._budget = f"{float(cell.facts['budget_tokens']):.0f}"
        self._numbers = [int(number) for number in trace.layer_numbers]
        layers = {number: whole.layers[number] for number in self._numbers}
        treated = {self._numbers[place] for place in trace.treated}
        self._sliding = "treat" if any(layers[number].window for number in treated) else "skip"
        self._about = {
            "prompt": trace.boundary, "ids": whole.ids.numpy().astype(np.int32), "name": trace.name,
            "spans": [(span.name, span.kind, span.begin, span.end) for span in trace.spans],
            "rope": _rope(run, trace), **attention_rules(layers),
        }  # fmt: skip

    def __call__(self, tensors: Tensors) -> Leaves:
        q, k, v = ([tensors[number][i] for number in self._numbers] for i in range(3))
        again, cell = one_cell(
            kv.from_arrays(q, k, v, **self._about), self._policy, self._budget, sliding=self._sliding
        )
        return leaves_of(again.selection_of(cell, self._trace.boundary))


def _rope(run: Run, trace: TraceFacts) -> kv.Rope | None:
    """The RoPE of the trace's file."""
    with h5py.File(run.captured(trace.name)) as file:
        if "model/rope" not in file:
            return None
        rope = file["model/rope"]
        return kv.Rope(rope["inv_freq"][()], rope["attention_scaling"][()], text(rope.attrs["style"]))
