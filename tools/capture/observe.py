"""What a model's attention sees and gives, layer by layer, while the model runs as it always does.

One function, registered with transformers' AttentionInterface, calls the attention that the model would use anyway
and hands queries, keys, values and output to an observer. The same name is registered with AttentionMaskInterface:
without it masks would be None and sliding windows would vanish without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvreplay.capture.refusals import ATTENTION_SINKS, refused
from kvreplay.errors import Error

NAME = "kvreplay"
ROW_BLOCK = 256  # rows of a mask, or of logits, held at once

OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo")


@dataclass(frozen=True)
class LayerCall:
    """One call of one layer's attention over a whole sequence of T tokens."""

    layer: int  # the model's own number
    module: torch.nn.Module
    q: torch.Tensor  # [Hq,T,d], after RoPE and QK norm
    k: torch.Tensor  # [Hkv,T,d], not repeated to query heads
    v: torch.Tensor  # [Hkv,T,d]
    output: torch.Tensor  # [T,Hq,d], before the output projection
    scale: float
    softcap: float  # 0: none
    window: int  # 0: none

    def output_projection(self) -> torch.Tensor:
        """Wo [hidden, Hq*d]."""
        width = self.q.shape[0] * self.q.shape[2]
        for name in OUTPUT_PROJECTIONS:
            weight = getattr(getattr(self.module, name, None), "weight", None)
            if weight is None:
                continue
            transposed = type(getattr(self.module, name)).__name__ == "Conv1D"
            weight = weight.T if transposed else weight
            if weight.shape[1] == width:
                return weight.detach()
        expected = f"one of {', '.join(OUTPUT_PROJECTIONS)} with {width} inputs"
        raise Error("--with-wo", f"layer {self.layer}: output projection", expected, type(self.module).__name__)


def _visible(rows: range, tokens: int, window: int) -> torch.Tensor:
    """Causal visibility [rows, tokens] under a sliding window (0: none)."""
    t = torch.arange(rows.start, rows.stop)[:, None]
    j = torch.arange(tokens)[None, :]
    return (j <= t) & (j > t - window) if window else j <= t


def mask_window(mask: torch.Tensor) -> int | None:
    """The sliding window of a boolean mask [1,1,T,T]; 0: causal without a window; None: something else."""
    if mask.dtype != torch.bool or mask.shape[:2] != (1, 1) or mask.shape[2] != mask.shape[3]:
        return None
    tokens = mask.shape[-1]
    seen_by_last = int(mask[0, 0, -1].sum())
    window = 0 if seen_by_last == tokens else seen_by_last
    for begin in range(0, tokens, ROW_BLOCK):
        rows = range(begin, min(begin + ROW_BLOCK, tokens))
        if not torch.equal(mask[0, 0, rows.start : rows.stop].cpu(), _visible(rows, tokens, window)):
            return None
    return window


def softcapped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float
) -> torch.Tensor:
    """Causal attention with z -> c*tanh(z/c), in blocks of rows: [1,H,T,d] -> [1,T,Hq,d]. sdpa has none."""
    _, query_heads, tokens, width = query.shape
    grouped = query[0].reshape(key.shape[1], -1, tokens, width)
    output = torch.empty_like(grouped)
    for begin in range(0, tokens, ROW_BLOCK):
        rows = range(begin, min(begin + ROW_BLOCK, tokens))
        logits = grouped[:, :, rows.start : rows.stop].float() @ key[0, :, None].float().transpose(-1, -2) * scale
        logits = softcap * torch.tanh(logits / softcap)
        visible = _visible(rows, tokens, 0).to(logits.device) if mask is None else mask[0, 0, rows.start : rows.stop]
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1).to(value.dtype)
        output[:, :, rows.start : rows.stop] = weights @ value[0, :, None]
    return output.reshape(1, query_heads, tokens, -1).transpose(1, 2).contiguous()


class _Attention:
    """The registered function, for one observer."""

    def __init__(self, name: str, observer: Callable[[LayerCall], None]) -> None:
        self._name = name
        self._observer = observer
        self._mask: torch.Tensor | None = None  # layers share masks: each is looked at once
        self._mask_window: int | None = 0
        self._calls = 0

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = getattr(module, "layer_idx", None)
        layer = self._calls if layer is None else int(layer)
        self._calls += 1
        self._refuse(module, layer, query, key, value, rest)
        causal = rest.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        window = self._window(layer, query.shape[2], attention_mask, causal, rest.get("sliding_window"), module)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        if softcap:
            output = softcapped_attention(query, key, value, attention_mask, scale, float(softcap))
        else:
            output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)
        self._observer(
            LayerCall(layer, module, query[0], key[0], value[0], output[0], scale, float(softcap or 0), window)
        )
        return output, None

    def _window(
        self, layer: int, tokens: int, mask: torch.Tensor | None, causal: bool, declared: int | None, module: Any
    ) -> int:
        """The layer's sliding window: from the mask where the mask cuts, else as the layer declares it."""
        if mask is not None and mask is not self._mask:
            self._mask, self._mask_window = mask, mask_window(mask)
        window = (0 if causal or tokens == 1 else None) if mask is None else self._mask_window
        if window is None:
            raise refused(
                self._name, f"layer {layer}: a mask of another kind", "causal attention, full or in a sliding window"
            )
        declared = declared or getattr(module, "sliding_window", None) or 0
        # A window no shorter than the text cuts nothing; a shorter one that the mask does not show is not in force.
        return window or (int(declared) if declared >= tokens > 1 else 0)

    def _refuse(
        self, module: Any, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rest: dict[str, Any]
    ) -> None:
        if rest.get("s_aux") is not None or getattr(module, "sinks", None) is not None:
            raise refused(self._name, f"{ATTENTION_SINKS} (layer {layer})", "a softmax over tokens alone")
        if rest.get("position_bias") is not None:
            raise refused(
                self._name, f"ALiBi or other additive bias (layer {layer})", "logits of queries and keys alone"
            )
        if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
            found = f"layer {layer}: query and key {query.shape[-1]}, value {value.shape[-1]} wide"
            raise refused(self._name, found, "one head dimension for queries, keys and values")
        if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
            found = f"layer {layer}: {query.shape[1]} query, {key.shape[1]} key, {value.shape[1]} value heads"
            raise refused(self._name, found, "query heads in equal groups over key/value heads")


@contextmanager
def observed(model: Any, name: str, observer: Callable[[LayerCall], None]) -> Iterator[None]:
    """Inside, every attention of `model` is shown to `observer`; outputs are what they are without it."""
    before = model.config._attn_implementation
    AttentionInterface.register(NAME, _Attention(name, observer))
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
