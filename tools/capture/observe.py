"""Inputs and outputs of a model's attention, layer by layer, while the model runs unchanged.

One function, registered with transformers' AttentionInterface, calls the attention that the model would use anyway
and hands queries, keys, values and output to an observer. The same name is registered with AttentionMaskInterface:
without it masks would be None and sliding windows would silently be ignored.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import align_module_device
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvreplay.capture.masks import MaskRule, OwnAttention, Visibility, attention_in_blocks, mask_rule
from kvreplay.capture.model import decoder
from kvreplay.capture.refusals import ATTENTION_SINKS, INTERFACE, NO_INTERFACE, Layers, is_sink, refused
from kvreplay.errors import Error

MODELS = Path(transformers.__file__).parent  # whose code runs the models
TOKENS_AT_ONCE = 4096  # whose hidden states are widened to float32

LOCAL_KINDS = ("sliding_attention", "chunked_attention")  # in transformers' layer_types

DIFFERENTIAL = "lambda_q1"  # a parameter of differential attention (arXiv:2410.05258)
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo")


@dataclass(frozen=True)
class LayerCall:
    """One call of one layer's attention: the n tokens of a pass, or of one chunk of it."""

    layer: int  # as of LayerNumbers
    module: torch.nn.Module
    begin: int  # position of the first token
    q: torch.Tensor  # [Hq,n,d], after RoPE and QK norm; of MLA absorbed, in float32
    k: torch.Tensor  # [Hkv,n,d], not repeated to query heads; of MLA the latent vector and the rotated key
    v: torch.Tensor  # [Hkv,n,dv]; of MLA the latent vector
    output: torch.Tensor  # [n,Hq,dv], before the output projection
    scale: float
    softcap: float  # 0: none
    window: int  # 0: none
    chunk: int  # 0: none
    sinks: torch.Tensor | None  # [Hq] logits of the term of the softmax that has no key
    selected: torch.Tensor | None  # int [n,u]: the only tokens that a query of sparse attention reads; later ones not
    expansion: torch.Tensor | None  # of MLA [Hq,dV,r]: a query head's values are its products with the latent vectors
    expanded: tuple[torch.Tensor, torch.Tensor]  # keys and values [H,n,...] that the model reads; of MLA H is Hq
    input_norm: torch.Tensor | None  # float32 [n], of the layer's input; None: the model does not show it
    x: torch.Tensor | None  # [n,hidden], the layer's input; None likewise

    @property
    def rope_offset(self) -> int:
        """The number of the first component of keys that RoPE rotates."""
        return 0 if self.expansion is None else self.expansion.shape[2]

    def output_projection(self) -> torch.Tensor:
        """Wo [hidden, Hq*dv]; of MLA with the expansion of the values."""
        if self.expansion is None:
            return self._projection()[0]
        by_head = self._projection()[0].float().unflatten(1, self.expansion.shape[:2])
        return torch.einsum("ohv,hvr->ohr", by_head, self.expansion).flatten(1)

    def projection(self) -> torch.nn.Module:
        """The module of the output projection."""
        return self._projection()[1]

    def _projection(self) -> tuple[torch.Tensor, torch.nn.Module]:
        """The model's own output projection [hidden, Hq*dV], and its module."""
        width = self.output.shape[1] * self.output.shape[2]
        for name in OUTPUT_PROJECTIONS:
            projection = getattr(self.module, name, None)
            if getattr(projection, "weight", None) is None:
                continue
            transposed = type(projection).__name__ == "Conv1D"
            if projection.weight.shape[0 if transposed else 1] != width:
                continue
            with align_module_device(projection):  # accelerate may have it on disk
                weight = projection.weight.detach()
            return (weight.T if transposed else weight), projection
        expected = f"one of {', '.join(OUTPUT_PROJECTIONS)} with {width} inputs"
        raise Error("--with-wo", f"layer {self.layer}: output projection", expected, type(self.module).__name__)


def blocks(base: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model: members of its outermost lists of modules."""
    lists = [(name, module) for name, module in base.named_modules() if isinstance(module, torch.nn.ModuleList)]
    outermost = [m for name, m in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    return [block for blocks in outermost for block in blocks]


def _of_one_sequence(hidden: Any) -> torch.Tensor | None:
    """[n,hidden]; None: no hidden states of one sequence."""
    return hidden[0] if isinstance(hidden, torch.Tensor) and hidden.ndim == 3 and hidden.shape[0] == 1 else None


def _token_norms(hidden: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm of each token's hidden state, float32 [n]."""
    pieces = hidden.split(TOKENS_AT_ONCE)
    return torch.cat([torch.linalg.vector_norm(piece, dim=-1, dtype=torch.float32) for piece in pieces])


class LayerNumbers:
    """The number of each attention in a pass: the model's own, as long as these ascend. A module that a model calls
    several times in a pass has separate keys and values for each call, and so has several numbers."""

    def __init__(self) -> None:
        self._latest, self._module = -1, None

    def begin(self, *_: Any) -> None:
        """Before a pass."""
        self._latest, self._module = -1, None

    def of_call(self, module: Any) -> int:
        own = getattr(module, "layer_idx", None)
        if module is not self._module or not hasattr(module, DIFFERENTIAL):  # which calls twice with the same keys
            self._latest = max(self._latest + 1, -1 if own is None else int(own))
        self._module = module
        return self._latest


class _Attention:
    """The registered function, for one observer."""

    def __init__(self, model: Any, name: str, observer: Callable[[LayerCall], None], layers: Layers) -> None:
        self._config = model.config.get_text_config()
        self._name = name
        self._observer = observer
        self._layers = layers
        self._mask: Any = None  # layers share masks: each is looked at once
        self._mask_rule: tuple[int, int] | None = (0, 0)
        self._half: tuple[torch.Tensor, torch.Tensor] | None = None  # values and output of differential attention
        self._block: torch.nn.Module | None = None  # the layer under way, and its input
        self._input_norm: torch.Tensor | None = None
        self._input: torch.Tensor | None = None
        self._latents: torch.Tensor | None = None  # of MLA [m,r]: what the layer under way expands to keys and values

    def enter(self, block: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Before a layer is computed."""
        self._block = block
        self._input = _of_one_sequence(inputs[0] if inputs else named.get("hidden_states"))
        self._input_norm = None if self._input is None else _token_norms(self._input)

    def expand(self, projection: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        """Before the latent vectors of a layer are expanded to keys and values."""
        self._latents = inputs[0].reshape(-1, inputs[0].shape[-1])

    def __call__(
        self,
        layer: int,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: MaskRule | torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        declared = rest.get("sliding_window") or getattr(module, "sliding_window", None) or 0
        wanted = self._wants(layer, module, declared)
        self._refuse_unknown_terms(layer, module, query.shape[1], rest)
        if wanted:
            self._refuse_shapes(layer, query, key, value)
        is_causal = rest.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if isinstance(attention_mask, MaskRule) and attention_mask.keys != key.shape[2]:
            found = f"layer {layer}: {key.shape[2]} keys of {attention_mask.keys} tokens"
            raise refused(self._name, found, "a key of each token, none compressed or added")
        queries = query.shape[2]
        visibility = Visibility.of(attention_mask, queries, key.shape[2])
        rule = self._rule(visibility, is_causal, declared, query.device)
        selected = rest.get("indices")
        selected = None if selected is None else selected[0]
        if rule is None and wanted and (selected := visibility.selection()) is not None:
            rule = 0, 0
        if rule is None and wanted:
            raise refused(self._name, f"layer {layer}: a mask of another kind",
                          "causal attention, full, in a sliding window or in chunks")  # fmt: skip
        window, chunk = rule or (0, 0)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        sinks = rest.get("s_aux")
        if softcap or sinks is not None or selected is not None or attention_mask is not None:
            output = attention_in_blocks(
                query, key, value, visibility, window, scale, float(softcap or 0), sinks, selected
            )
        else:
            output, _ = sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **rest)
        if not wanted:
            return output, None
        observed_value, observed_output = value, output
        if hasattr(module, DIFFERENTIAL):
            if self._half is None:
                self._half = value, output
                return output, None
            halves, self._half = self._half, None
            observed_value, observed_output = (
                torch.cat(pair, -1) for pair in zip(halves, (value, output), strict=True)
            )
        # A block that is its own attention has no input of a layer.
        x, norm = (self._input, self._input_norm) if self._block is not module else (None, None)
        q, k, v, expansion = query[0], key[0, :, -queries:], observed_value[0, :, -queries:], None
        expanded = k, v
        if hasattr(module, "kv_b_proj"):
            q, k, v, expansion = self._absorbed(layer, module, q, k, v.shape[2])
        begin = visibility.tokens - queries
        self._observer(LayerCall(layer, module, begin, q, k, v, observed_output[0], scale, float(softcap or 0), window,
                                 chunk, sinks, selected, expansion, expanded, norm, x))  # fmt: skip
        return output, None

    def _absorbed(
        self, layer: int, module: Any, query: torch.Tensor, key: torch.Tensor, value_width: int
    ) -> tuple[torch.Tensor, ...]:
        """Multi-head latent attention as attention over latent vectors (DeepSeek-V2, arXiv:2405.04434, section 2.1):
        queries [Hq,n,r+dR], keys [1,n,r+dR], latent vectors [1,n,r] and the expansion [Hq,dV,r] of the values."""
        assert self._latents is not None
        latents = self._latents[-key.shape[1] :]
        with align_module_device(module.kv_b_proj):
            weight = module.kv_b_proj.weight.detach()
        heads, plain = len(query), weight.shape[0] // len(query) - value_width  # dN
        if weight.shape != (heads * (plain + value_width), latents.shape[1]) or not weight.is_floating_point():
            raise refused(self._name, f"layer {layer}: latent attention with {tuple(weight.shape)} weights",
                          "an expansion to keys and values of each query head, without --load")  # fmt: skip
        rotated = key[:, :, plain:]
        if not torch.equal(rotated[:1].expand_as(rotated), rotated):
            raise refused(self._name, f"layer {layer}: rotated keys that differ between heads", "one for all heads")
        to_key, to_value = weight.float().unflatten(0, (heads, -1)).split([plain, value_width], 1)
        absorbed = torch.einsum("hnd,hdr->hnr", query[:, :, :plain].float(), to_key)
        keys = torch.cat([latents, rotated[0]], -1)[None]
        return torch.cat([absorbed, query[:, :, plain:].float()], -1), keys, latents[None], to_value

    def _wants(self, layer: int, module: torch.nn.Module, declared_window: int) -> bool:
        if self._layers != "full":
            return self._layers is None or layer in self._layers
        kinds = getattr(self._config, "layer_types", None) or ()
        own = getattr(module, "layer_idx", None)
        own = layer if own is None else int(own)
        return not declared_window and (own >= len(kinds) or kinds[own] not in LOCAL_KINDS)

    def _rule(
        self, visibility: Visibility, is_causal: bool, declared: int, device: torch.device
    ) -> tuple[int, int] | None:
        """The layer's sliding window and chunk: from the mask where the mask cuts, else the window that the layer
        declares. None: the mask is of another kind."""
        mask, tokens = visibility.mask, visibility.tokens
        if mask is not None and mask is not self._mask:
            chunk = getattr(self._config, "attention_chunk_size", None) or 0
            self._mask, self._mask_rule = mask, visibility.rule(device, chunk)
        rule = ((0, 0) if is_causal or tokens == 1 else None) if mask is None else self._mask_rule
        # A window no shorter than the text cuts nothing; a shorter one that the mask does not show is not in force.
        return (int(declared), 0) if rule == (0, 0) and declared >= tokens > 1 else rule

    def _refuse_unknown_terms(self, layer: int, module: Any, query_heads: int, rest: dict[str, Any]) -> None:
        """Terms of the softmax that the observed attention would leave out."""
        sinks = rest.get("s_aux")
        if sinks is None and any(is_sink(name) for name, _ in module.named_parameters()):
            raise refused(self._name, f"{ATTENTION_SINKS} (layer {layer})", "sink logits in the call of the attention")
        if sinks is not None and sinks.shape != (query_heads,):
            found = f"{ATTENTION_SINKS} of shape {tuple(sinks.shape)} (layer {layer})"
            raise refused(self._name, found, "one logit for each query head")
        if rest.get("position_bias") is not None:
            raise refused(
                self._name, f"ALiBi or other additive bias (layer {layer})", "logits of queries and keys alone"
            )

    def _refuse_shapes(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.shape[-1] != key.shape[-1]:
            found = f"layer {layer}: query {query.shape[-1]}, key {key.shape[-1]} wide"
            raise refused(self._name, found, "one head dimension for queries and keys")
        if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
            found = f"layer {layer}: {query.shape[1]} query, {key.shape[1]} key, {value.shape[1]} value heads"
            raise refused(self._name, found, "query heads in equal groups over key/value heads")


@contextmanager
def replaced_attention(
    model: Any, name: str, attention: Callable[..., Any], mask: Callable[..., Any]
) -> Iterator[None]:
    """Inside, these make the attention and the masks of `model`; transformers knows them by `name`. The first argument
    of the attention is the layer's number."""
    before = model.config._attn_implementation
    numbers = LayerNumbers()

    def attend(module: torch.nn.Module, *inputs: Any, **named: Any) -> Any:
        return attention(numbers.of_call(module), module, *inputs, **named)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)
    try:
        with decoder(model).register_forward_pre_hook(numbers.begin):
            yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def observed(model: Any, name: str, observer: Callable[[LayerCall], None], layers: Layers = None) -> Iterator[None]:
    """Inside, the attention of the chosen layers of `model` is shown to `observer`. Outputs have the same bits as
    outside, but with a mask and more than ROW_BLOCK queries: these are computed in blocks, and are within rounding.
    """
    attention = _Attention(model, name, observer, layers)
    with ExitStack() as hooks:
        for block in blocks(decoder(model)):
            hooks.enter_context(block.register_forward_pre_hook(attention.enter, with_kwargs=True))
        for module in decoder(model).modules():
            if hasattr(module, "kv_b_proj"):
                hooks.enter_context(module.kv_b_proj.register_forward_pre_hook(attention.expand))
        with replaced_attention(model, "kvreplay", attention, mask_rule):
            try:
                yield
            except OwnAttention as error:
                raise refused(name, NO_INTERFACE, INTERFACE) from error
            except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
                place = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1]
                if isinstance(error, torch.OutOfMemoryError) or not place.startswith(str(MODELS)):
                    raise
                found = f"{type(error).__name__}: {error}".splitlines()[0]
                raise refused(name, found, "a model that runs with another attention function") from error
