"""A cache of transformers that evicts by a policy of kvreplay.

The model fills the cache with the prompt in its first pass. After this pass the engine replays the policy over the
model's queries, keys and values, and the cache keeps the tokens that the policy keeps. Positions remain the original
ones: the length of the cache is the number of tokens that the model has read.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvreplay.capture.masks import ROW_BLOCK, causal
from kvreplay.capture.model import cache_name, decoder
from kvreplay.capture.observe import DIFFERENTIAL, LayerCall, observed
from kvreplay.capture.probe import kv_sources, probe
from kvreplay.errors import Error, Refusal
from kvreplay.live.applied import AppliedPolicy, trace_of
from kvreplay.live.attention import NEVER, Held, Layer, attended, kept_tokens, masked
from kvreplay.trace import Trace

NAME = "ReplayCache"


class ReplayLayer(DynamicLayer):
    """Keys and values [1,H,n,d] of one layer, of which some were evicted."""

    is_croppable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.read = 0  # tokens that the model has read
        self.positions = torch.empty(0, dtype=torch.int64)  # [H,n]; NEVER fills up shorter rows

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
        heads, count = key_states.shape[1:3]
        new = torch.arange(self.read, self.read + count, device=key_states.device).expand(heads, -1)
        self.positions = torch.cat([self.positions, new], -1) if self.read else new
        self.read += count
        return super().update(key_states, value_states, *rest, **named)

    def get_seq_length(self) -> int:
        return self.read

    def reset(self) -> None:
        super().reset()
        self.read = 0

    def replace(self, held: Held) -> None:
        """Keeps these tokens only."""
        self.keys, self.values, self.positions = held.k[None], held.v[None], held.positions

    def evict(self, leaves: torch.Tensor) -> None:
        """Evicts the tokens that are evicted after a query that the model has read. `leaves`: int64 [1 | H,T]."""
        layer = Layer(0.0, 0.0, 0, self.keys[0], self.values[0])
        leaves = leaves.to(self.keys.device).expand(len(self.positions), -1)
        is_padding = self.positions == NEVER
        is_kept = leaves.gather(-1, self.positions.masked_fill(is_padding, 0)) >= self.read
        held = kept_tokens(layer, is_kept & ~is_padding)  # `tokens` are slots
        slots = held.tokens.masked_fill(held.tokens == NEVER, 0)
        positions = self.positions.gather(-1, slots).masked_fill(held.tokens == NEVER, NEVER)
        self.replace(Held(held.k, held.v, positions, positions))


class ReplayCache(Cache):
    """The cache of one sequence, for `model.generate(…, past_key_values=cache)` or passes of `model`.

    `policy`: a text as on the command line, the result of `kv.policy.NAME(…)`, or a policy in Python. `budget`: a
    fraction of the prompt (0.1) or tokens for each layer and head on average (512). The prompt is the model's first
    pass. A policy with a schedule evicts again after each later pass. Layers with a sliding window keep all tokens.
    """

    def __init__(self, model: Any, policy: Any, budget: float | str) -> None:
        super().__init__(layer_class_to_replicate=ReplayLayer)
        self._policy = AppliedPolicy(policy)
        self._policy.check(model.config.get_text_config().num_hidden_layers)
        self._budget = str(budget)
        self._model = model
        self._pass = ExitStack()
        self._calls: list[LayerCall] = []
        self._ids: list[int] = []
        self._prompt = 0  # tokens; 0: the model has not read it
        self._rules: dict[int, Layer] = {}  # by layer, without keys and values
        # Of a policy with a schedule, by layer: queries, keys and values of all tokens.
        self._history: dict[int, tuple[torch.Tensor, ...]] | None = None
        self._rope: Any = None
        self._projections: list[torch.Tensor] | None = None
        self._watch()

    def _watch(self) -> None:
        """Follows the passes of the model that use this cache, as long as the cache exists."""
        base, cache = decoder(self._model), weakref.ref(self)
        name = cache_name(base)

        def begin(module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            if (used := cache()) is not None and named.get(name) is used:
                used._begin(named.get("input_ids", inputs[0] if inputs else None), named.get("attention_mask"))

        def end(module: Any, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            if (used := cache()) is not None and named.get(name) is used:
                used._end(failed=output is None)

        for hook in (base.register_forward_pre_hook(begin, with_kwargs=True),
                     base.register_forward_hook(end, with_kwargs=True, always_call=True)):  # fmt: skip
            weakref.finalize(self, hook.remove)

    def reset(self) -> None:
        super().reset()
        self._ids, self._prompt, self._history = [], 0, None

    def _begin(self, ids: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        if ids is None or len(ids) != 1:
            found = "embeddings" if ids is None else f"{len(ids)} sequences"
            raise Error(NAME, "batch", "token ids of one sequence", found, Refusal.USAGE)
        if isinstance(mask, torch.Tensor) and not mask.bool().all():
            raise Error(NAME, "attention mask", "a sequence without padding", "padding", Refusal.USAGE)
        self._ids += ids[0].tolist()
        if not self._prompt:
            self._pass.enter_context(observed(self._model, NAME, self._calls.append))
            return
        cache = weakref.proxy(self)  # transformers never forgets a registered function
        self._pass.enter_context(masked(self._model, lambda *inputs, **named: cache._attend(*inputs, **named)))

    def _end(self, failed: bool) -> None:
        self._pass.close()
        if failed:
            self._calls.clear()
            return
        if not self._prompt:
            self._evict_prompt()
        elif self._history is not None:
            queries = {number: q for number, (q, _, _) in self._history.items()}
            layers = {number: replace(self._rules[number], k=k, v=v) for number, (_, k, v) in self._history.items()}
            trace = self._trace(layers, queries)
            for number, leaves in self._policy.leaves(trace, self._budget).items():
                self.layers[number].evict(leaves)

    def _evict_prompt(self) -> None:
        calls = self._calls.copy()
        self._calls.clear()
        for call in calls:
            if hasattr(call.module, DIFFERENTIAL) or call.selected is not None or call.expansion is not None:
                raise Error(NAME, f"layer {call.layer}", "attention to the keys of all tokens", "another kind")
        if kv_sources(calls) != list(range(len(calls))) or len(calls) != len(self.layers):
            raise Error(NAME, "layers", "a layer of the cache for each attention", "layers that share keys and values")
        self._prompt = len(self._ids)
        _, self._rope = probe(self._model, NAME, self._ids[0], max(1, self._prompt - 1))
        layers = {
            call.layer: Layer(call.scale, call.softcap, call.window, call.k, call.v, call.chunk, call.sinks)
            for call in calls
        }
        nothing = torch.empty(0)
        self._rules = {number: replace(layer, k=nothing, v=nothing) for number, layer in layers.items()}
        with suppress(Error):  # the engine rejects policies that read them
            self._projections = [call.output_projection() for call in calls]
        trace = self._trace(layers, {call.layer: call.q for call in calls})
        held, is_repeated = self._policy.held(trace, self._budget, layers)
        if is_repeated:
            self._history = {call.layer: (call.q, call.k, call.v) for call in calls}
        for number, one in held.items():
            self.layers[number].replace(one)

    def _trace(self, layers: dict[int, Layer], queries: dict[int, torch.Tensor]) -> Trace:
        """The trace of all tokens that the model has read."""
        return trace_of(layers, queries, self._prompt, self._rope, self._ids, self._projections)

    def _attend(
        self, number: int, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """The attention after the prompt, by the positions of the resident tokens."""
        layer, rule = self.layers[number], self._rules[number]
        count = query.shape[2]
        output = query.new_empty((1, count, query.shape[1], value.shape[3]))
        for begin in range(0, count, ROW_BLOCK):
            rows = slice(begin, min(begin + ROW_BLOCK, count))
            positions = torch.arange(rows.start, rows.stop, device=query.device) + layer.read - count
            seen = causal(positions, layer.positions, rule.window, rule.chunk)[None]
            output[:, rows] = attended(rule, query[:, :, rows], key, value, seen)
        if self._history is not None:
            new = (query[0], key[0, :, -count:], value[0, :, -count:])
            before = self._history[number]
            self._history[number] = tuple(torch.cat(pair, 1) for pair in zip(before, new, strict=True))
        return output, None
