"""A look at the layers with a single token, before the recorded pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from kvreplay.capture.model import cache_name, decoder, input_device
from kvreplay.capture.observe import LOCAL_KINDS, LayerCall, observed
from kvreplay.capture.refusals import INTERFACE, NO_INTERFACE, Layers, refuse_missing_layers, refused
from kvreplay.capture.rope import Rope, frequencies, identify, produced_deviation, rotary_modules
from kvreplay.capture.verify import unit_roundoff
from kvreplay.errors import Error
from kvreplay.trace import REAL_TYPES


def kv_sources(calls: Sequence[LayerCall]) -> list[int]:
    """For each layer the first that reads the same keys in memory, often itself. `calls`: of one pass."""
    places = [(*(x.data_ptr() for x in call.expanded), call.window) for call in calls]
    return [places.index(place) for place in places]


def other_states(model: Any, token: int) -> list[dict[str, Any]]:
    """Layers whose cache has states of convolutions or recurrences, by kind: their numbers, and the bytes of each."""
    base, kinds = decoder(model), getattr(model.config.get_text_config(), "layer_types", None) or ()
    if set(kinds) <= {"full_attention", *LOCAL_KINDS}:
        return []
    with torch.inference_mode():
        output = base(input_ids=torch.tensor([[token]], device=input_device(model)), use_cache=True)
    layers: dict[tuple[str, int], list[int]] = {}
    for number, cached in enumerate(getattr(getattr(output, cache_name(base), None), "layers", ())):
        states = [*getattr(cached, "conv_states", {}).values(), *getattr(cached, "recurrent_states", {}).values()]
        if size := sum(state.nbytes for state in states if state is not None):
            layers.setdefault((kinds[number], size), []).append(number)
    return [{"kind": kind, "layers": numbers, "bytes": size} for (kind, size), numbers in layers.items()]


def refuse_gates(model: Any, token: int, calls: Sequence[LayerCall], name: str) -> None:
    """Rejects layers that change the output of attention before they project it: a stored projection would not say so.
    `calls`: of this token alone."""
    projected: dict[int, torch.Tensor] = {}
    again: list[LayerCall] = []

    def keep(module: Any, inputs: tuple[Any, ...]) -> None:
        if again:  # a module that is called for several layers projects after the attention of each
            projected.setdefault(again[-1].layer, inputs[0].reshape(-1))

    with ExitStack() as hooks:
        for projection in {call.projection() for call in calls}:
            hooks.enter_context(projection.register_forward_pre_hook(keep))
        with torch.inference_mode():
            with observed(model, name, again.append, frozenset(call.layer for call in calls)):
                decoder(model)(input_ids=torch.tensor([[token]], device=input_device(model)), use_cache=False)
    for call in again:
        if not torch.equal(call.output.reshape(-1), projected[call.layer]):
            raise Error("--with-wo", f"layer {call.layer} changes the output of attention before its projection",
                        "a model without gates, or a trace without --with-wo", "a gate")  # fmt: skip


def probe(
    model: Any, name: str, token: int, position: int, layers: Layers = None
) -> tuple[list[LayerCall], Rope | None]:
    """One call of each chosen layer with a single token, and the RoPE that its keys show when it moves to `position`.

    Properties that a trace stores once are equal in these layers.
    """
    base = decoder(model)
    calls: list[LayerCall] = []
    produced: list[tuple[np.ndarray, np.ndarray]] = []

    def watch(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 2 and all(isinstance(x, torch.Tensor) for x in output):
            produced.append(tuple(x.cpu().double().numpy() for x in output))

    def keys_at(place: int) -> list[np.ndarray]:
        calls.clear()
        produced.clear()
        with torch.inference_mode(), observed(model, name, calls.append, layers):
            ids, positions = (torch.tensor([[number]], device=input_device(model)) for number in (token, place))
            base(input_ids=ids, position_ids=positions, use_cache=False)
        if not calls and layers is None:
            raise refused(name, NO_INTERFACE, INTERFACE)
        return [call.k[:, 0, call.rope_offset :].cpu().double().numpy() for call in calls]

    _refuse_selected_blocks(base, name, position + 1)
    with ExitStack() as hooks:
        for module in rotary_modules(base):
            hooks.enter_context(module.register_forward_hook(watch))
        keys_at(0)
        values = [call.v for call in calls]
        keys_at(position)  # length-dependent frequencies are set now
        refuse_missing_layers(layers, {call.layer for call in calls})
        _refuse_differences(calls, name)
        candidates = frequencies(base)
        rounding = unit_roundoff(REAL_TYPES[str(calls[0].k.dtype).removeprefix("torch.")])
        start = 0 if all(_same_values(v, call.v, rounding) for v, call in zip(values, calls, strict=True)) else 1
        position = max(position, start + 1)
        exact = all(call.sinks is None for call in calls)
        rope = identify(name, candidates, keys_at, position, rounding, exact, start)
    off = produced_deviation(candidates, produced, position) if rope else 0.0
    if off > 4 * rounding + 1e-6 * position:
        raise refused(name, f"cosines and sines {off:.3g} from those of its frequencies", "RoPE as its inv_freq says")
    return list(calls), rope


def _same_values(at_start: torch.Tensor, moved: torch.Tensor, rounding: float) -> bool:
    """Whether the values of a layer, which RoPE leaves unchanged, are equal at two positions within rounding."""
    return float((at_start - moved).abs().max()) <= (16 * rounding + 1e-4) * float(moved.abs().max())


def _refuse_selected_blocks(base: Any, name: str, tokens: int) -> None:
    """Each head of MiniMax-M3 selects blocks of keys, which a text of one block has no choice of."""
    sizes = [module.block_size for module in base.modules() if hasattr(module, "topk_blocks")]
    if sizes and tokens > min(sizes):
        expected = f"a text of at most {min(sizes)} tokens (--max-tokens)"
        raise refused(name, "blocks of keys that each head selects", expected)


def _refuse_differences(calls: Sequence[LayerCall], name: str) -> None:
    first = calls[0]
    for call in calls:
        latent, found = ((one.rope_offset, one.rope_offset and one.k.shape[2]) for one in (first, call))
        if found != latent:
            text = f"latent vectors that differ in layer {call.layer}"
            raise refused(name, text, "layers of one kind; choose them with --layers")
        if (call.scale, call.softcap) != (first.scale, first.softcap):
            found_text = f"softmax scale or softcap that differs in layer {call.layer}"
            raise refused(name, found_text, f"scale {first.scale}, softcap {first.softcap} everywhere")
