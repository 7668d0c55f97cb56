"""A press of kvpress that evicts by a policy of kvreplay.

Policies may allocate budgets across layers, so the press evicts once for all layers, in the hook of the last one. The
attention of the prompt is not affected: presses of kvpress evict after the attention of a layer, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kvpress import BasePress
from kvpress.presses.base_press import is_prefilling
from kvpress.utils import compute_n_kept, extract_keys_and_values, get_prerope_query_states
from transformers import Gemma3ForConditionalGeneration
from transformers.models.llama.modeling_llama import rotate_half

from kvreplay.capture.model import decoder
from kvreplay.capture.probe import probe
from kvreplay.errors import Error, Refusal
from kvreplay.live.applied import AppliedPolicy, trace_of
from kvreplay.live.attention import NEVER, Held, Layer, kept_tokens

NAME = "ReplayPress"
PROBED_TOKEN = 0  # RoPE rotates the keys of every token alike


@dataclass
class ReplayPress(BasePress):
    """Any policy of kvreplay as a press: `ReplayPress("snapkv:window=32", compression_ratio=0.5)`.

    `policy`: a text as on the command line, the result of `kv.policy.NAME(…)`, or a policy in Python. A policy of a
    compiled plug-in needs `kv.load_plugin(FILE)` first.
    `compression_ratio`: the evicted share of each layer and head on average.
    """

    policy: Any
    compression_ratio: float = 0.0

    def __post_init__(self) -> None:
        self._applied = AppliedPolicy(self.policy)
        self._forget()

    def _forget(self) -> None:
        self._modules: dict[int, torch.nn.Module] = {}
        self._layers: dict[int, Layer] = {}
        self._queries: dict[int, torch.Tensor] = {}

    def post_init_from_model(self, model: Any) -> None:
        """Notes the last layer that kvpress treats."""
        self._model = model
        attentions = [layer.self_attn for layer in decoder(model).layers]
        if isinstance(model, Gemma3ForConditionalGeneration):  # whose sliding-window layers kvpress skips
            attentions = [one for one in attentions if not one.is_sliding]
        self._last = attentions[-1]
        self._applied.check(len(attentions))
        self._forget()

    def forward_hook(self, module: torch.nn.Module, input: list[torch.Tensor], kwargs: dict, output: list) -> list:
        hidden, cache = kwargs["hidden_states"], kwargs["past_key_values"]
        if cache is None or not is_prefilling(kwargs["cache_position"], hidden.shape[1]):
            return output
        if len(hidden) != 1:
            raise Error(NAME, "batch", "one sequence", f"{len(hidden)} sequences", Refusal.USAGE)
        keys, values = extract_keys_and_values(cache, module.layer_idx)
        softcap = getattr(module, "attn_logit_softcapping", None) or 0.0
        number, window = module.layer_idx, _window(module)
        self._modules[number] = module
        self._layers[number] = Layer(module.scaling, softcap, window, keys[0], values[0])
        self._queries[number] = _queries(module, hidden, kwargs["position_embeddings"]).cpu()
        if module is self._last:
            self._evict(kwargs, output)
        return output

    def _evict(self, kwargs: dict, output: list) -> None:
        modules, layers, queries = self._modules, self._layers, self._queries
        self._forget()
        tokens = layers[self._last.layer_idx].k.shape[1]
        _, rope = probe(self._model, NAME, PROBED_TOKEN, max(1, tokens - 1))
        projections = [modules[number].o_proj.weight for number in sorted(modules)]
        trace = trace_of(layers, queries, tokens, rope, projections=projections)
        kept, _ = self._applied.held(trace, str(compute_n_kept(tokens, self.compression_ratio)), layers)
        every = torch.ones(1, tokens, dtype=torch.bool)
        kept = {number: kept.get(number) or kept_tokens(layer, every) for number, layer in layers.items()}
        # transformers makes one mask for all layers, so all rows of all layers have the same length.
        slots = max(held.tokens.shape[1] for held in kept.values())
        padding = {number: _padding(held, slots) for number, held in kept.items()}
        is_padded = any(one.any() for one in padding.values())
        if is_padded and self._last.config._attn_implementation == "eager":
            raise Error(self._applied.text, "keeps different counts in layers or heads", "attn_implementation='sdpa', "
                        "because kvpress masks no keys of eager attention", "eager", Refusal.USAGE)  # fmt: skip
        for number, module in modules.items():
            rows = slots - kept[number].tokens.shape[1]
            self._pruned = tuple(
                torch.nn.functional.pad(x, (0, 0, 0, rows))[None] for x in (kept[number].k, kept[number].v)
            )
            super().forward_hook(module, [], kwargs, output)
            if is_padded:
                head, slot = torch.nonzero(padding[number], as_tuple=True)
                module.masked_key_indices = (torch.zeros_like(head), head, slot)

    def compress(self, module: torch.nn.Module, hidden_states: Any, keys: Any, values: Any, *rest: Any) -> Any:
        return self._pruned


def _window(module: torch.nn.Module) -> int:
    """The sliding window of a layer; 0: none."""
    owner = module if hasattr(module, "sliding_window") else module.config
    return getattr(owner, "sliding_window", None) or 0


def _padding(held: Held, slots: int) -> torch.Tensor:
    """Which of `slots` slots of each row have no token: bool [H,slots]."""
    return torch.nn.functional.pad(held.tokens == NEVER, (0, slots - held.tokens.shape[1]), value=True)


def _queries(module: torch.nn.Module, hidden: torch.Tensor, embedding: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The queries [Hq,T,d] of a layer after RoPE."""
    cosine, sine = (x.unsqueeze(1) for x in embedding)
    queries = get_prerope_query_states(module, hidden)
    return (queries * cosine + rotate_half(queries) * sine)[0]
