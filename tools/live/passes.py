"""Passes of a model over a text: its own, and those of batch rows that see the kept tokens of a cell alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvreplay.capture.model import decoder, input_device
from kvreplay.capture.observe import DIFFERENTIAL, LayerCall, blocks, observed
from kvreplay.errors import Error, Refusal
from kvreplay.live.attention import NEVER, Held, Layer, MaskedAttention, Reads, kept_tokens, masked, together


@dataclass
class Trajectory:
    """The recorded values of a pass over the continuation's G tokens, for B batch rows."""

    hidden: list[torch.Tensor] = field(default_factory=list)  # of each layer, in order: its output [B,G,D]
    attention: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer: before the projection [B,G,Hq,d]
    log_probabilities: torch.Tensor = field(
        default_factory=lambda: torch.empty(0)
    )  # float64 [B,G,V], of the next token


@dataclass
class Text:
    """A trace's tokens, as the model saw them when nothing was evicted."""

    ids: torch.Tensor  # int64 [T]
    prompt: int  # P
    layers: dict[int, Layer]  # by number in the model
    query_heads: int
    own: torch.Tensor  # float64 [G,V]: log probabilities by the model's own attention

    @property
    def continuation(self) -> int:
        """G."""
        return len(self.ids) - self.prompt


def read(model: Any, name: str, ids: Sequence[int], prompt: int) -> Text:
    """One pass over all tokens by the model's own attention, which keeps the prompt's keys and values."""
    layers: dict[int, Layer] = {}
    heads = 0

    def observe(call: LayerCall) -> None:
        nonlocal heads
        if hasattr(call.module, DIFFERENTIAL) or call.selected is not None:
            found = "differential attention" if call.selected is None else "queries that read selected tokens"
            raise Error(name, "kvreplay live", "attention to all kept tokens, once a layer", found, Refusal.INPUT)
        heads = call.q.shape[0]
        k, v = (x[:, :prompt].clone() for x in call.expanded)
        layers[call.layer] = Layer(call.scale, call.softcap, call.window, k, v, call.chunk, call.sinks)

    tokens = torch.tensor(list(ids), dtype=torch.long)
    with torch.inference_mode(), observed(model, name, observe):
        output = model(
            input_ids=tokens[None].to(input_device(model)), use_cache=False, logits_to_keep=len(tokens) - prompt
        )
    return Text(tokens, prompt, layers, heads, output.logits[0].double().log_softmax(-1))


Row = dict[int, Held]  # what a batch row holds of the prompt, by layer


@dataclass(frozen=True)
class Evicted:
    """The tokens that are evicted in the batch rows of a pass. Either the pass begins behind the prompt, and `held` has
    the prompt's resident tokens; or it begins at position 0, and tokens are evicted during the pass (`leaves`)."""

    rows: int
    begin: int
    held: dict[int, Held] = field(default_factory=dict)  # by layer, [B,H,n,...]
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer: int64 [B,H,T], as of MaskedAttention
    reads: dict[int, Reads] = field(default_factory=dict)  # by layer: what queries read of it, in all rows the same

    @classmethod
    def behind_prompt(cls, text: Text, rows: Sequence[Row], reads: dict[int, Reads] | None = None) -> Evicted:
        """A pass behind the prompt, with the resident tokens of each row."""
        held = {number: together([row[number] for row in rows]) for number in text.layers}
        return cls(len(rows), text.prompt, held, reads=reads or {})

    @classmethod
    def over_time(cls, text: Text, leaves: Sequence[dict[int, torch.Tensor]]) -> Evicted:
        """`leaves`: for each row and layer int64 [H,T], the query after which a token is evicted (NEVER: kept)."""
        stacked = {
            number: torch.stack([row[number] for row in leaves]).to(layer.k.device)
            for number, layer in text.layers.items()
        }
        return cls(len(leaves), 0, leaves=stacked)

    @classmethod
    def nothing(cls, like: Evicted, text: Text) -> Evicted:
        """As many rows in a pass of the same kind, which see every token: the reference."""
        if like.leaves:
            whole = {number: torch.full((1, len(text.ids)), NEVER) for number in text.layers}
            return cls.over_time(text, [whole] * like.rows)
        every_token = {number: reads.every(text.prompt) for number, reads in like.reads.items()}
        return cls.behind_prompt(text, [everything(text)] * like.rows, every_token)


def everything(text: Text) -> Row:
    """All tokens of the prompt."""
    kept = torch.ones(1, text.prompt, dtype=torch.bool)
    return {number: kept_tokens(layer, kept) for number, layer in text.layers.items()}


def run(model: Any, text: Text, evicted: Evicted) -> Trajectory:
    """The continuation under these masks, each batch row for itself."""
    found = Trajectory()
    attention = MaskedAttention(text.layers, evicted.begin, evicted.held, evicted.leaves, evicted.reads)
    count = text.continuation
    attention.seen = lambda number, output: found.attention.__setitem__(number, output[:, -count:])

    def leave(block: Any, inputs: Any, output: Any) -> None:
        found.hidden.append((output[0] if isinstance(output, tuple) else output)[:, -count:])

    ids = text.ids[evicted.begin :].expand(evicted.rows, -1).to(input_device(model))
    positions = torch.arange(evicted.begin, len(text.ids)).expand(evicted.rows, -1).to(ids.device)
    with ExitStack() as hooks, torch.inference_mode(), masked(model, attention):
        for block in blocks(decoder(model)):
            hooks.enter_context(block.register_forward_hook(leave))
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=count).logits
    found.log_probabilities = logits.double().log_softmax(-1)
    return found


def generate(
    model: Any, text: Text, rows: Sequence[Row], count: int, reads: dict[int, Reads] | None = None
) -> list[list[int]]:
    """Greedy text of `count` tokens, a list a row; `reads` as of Evicted.

    The last prompt token is run a second time and attends to the kept tokens, so that the first generated token depends
    on these as well. Its copy in the cache is hidden.
    """
    last = text.prompt - 1
    held = {number: together([_without(row[number], last) for row in rows]) for number in text.layers}
    attention = MaskedAttention(text.layers, last, held, reads=reads or {})
    ids = text.ids[last].expand(len(rows), 1).to(input_device(model))
    written = []
    with torch.inference_mode(), masked(model, attention):
        for step in range(count):
            positions = torch.full_like(ids, last + step)
            logits = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
            written.append(ids)
    return torch.cat(written, 1).tolist()


def _without(held: Held, position: int) -> Held:
    return replace(held, positions=torch.where(held.tokens == position, NEVER, held.positions))
