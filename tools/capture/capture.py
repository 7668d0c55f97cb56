"""From one prompt to one trace: continuation first, then a look at the layers, then a single recorded pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvreplay.capture.model import decoder, generate, input_device
from kvreplay.capture.observe import LayerCall, observed
from kvreplay.capture.prompts import Prompt, fit, render
from kvreplay.capture.recorder import Recorder
from kvreplay.capture.refusals import NO_INTERFACE, refused
from kvreplay.capture.rope import Rope, frequencies, identify, produced_deviation, rotary_modules, same
from kvreplay.capture.spans import SpanRequest, decode_with_offsets, find_spans
from kvreplay.capture.verify import Deviation, unit_roundoff
from kvreplay.errors import Error, Refusal
from kvreplay.schema import REAL_TYPES
from kvreplay.trace import PRODUCER, TraceWriter, expected_bytes

CHECKED_QUERIES = 64  # a layer, evenly spread, in every capture


@dataclass(frozen=True)
class Choices:
    """What the user asked for, beyond model and prompt."""

    name: str
    chat: bool = False
    max_tokens: int | None = None
    generate: int = 0
    continuation: str = ""
    last_queries: int | None = None  # of the prompt, with all of the continuation; None: all
    layers: frozenset[int] | None = None
    spans: tuple[SpanRequest, ...] = ()
    with_wo: bool = False
    store_dtype: str | None = None
    verify_all: bool = False
    force: bool = False
    source_hash: str = ""
    quantisation: str | None = None  # of the weights, by --load: 8bit or 4bit
    producer: str = PRODUCER  # as the trace names it


@dataclass(frozen=True)
class Captured:
    """What a capture says of itself."""

    path: Path
    prompt_tokens: int
    tokens: int
    layers: int
    query_heads: int
    kv_heads: int
    dtype: str
    rope: Rope | None  # of all layers of the model
    checked_queries: int
    worst: Deviation


def probe(model: Any, name: str, token: int, position: int) -> tuple[list[LayerCall], Rope | None]:
    """One call of every layer with a single token, and the RoPE that its keys show when it moves to `position`."""
    base = decoder(model)
    calls: list[LayerCall] = []
    produced: list[tuple[np.ndarray, np.ndarray]] = []

    def watch(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 2 and all(isinstance(x, torch.Tensor) for x in output):
            produced.append(tuple(x.cpu().double().numpy() for x in output))

    def keys_at(place: int) -> list[np.ndarray]:
        calls.clear()
        produced.clear()
        with torch.inference_mode(), observed(model, name, calls.append):
            ids, positions = (torch.tensor([[number]], device=input_device(model)) for number in (token, place))
            base(input_ids=ids, position_ids=positions, use_cache=False)
        if not calls:
            raise refused(name, NO_INTERFACE, "attention through transformers' AttentionInterface")
        return [call.k[:, 0].cpu().double().numpy() for call in calls]

    hooks = [module.register_forward_hook(watch) for module in rotary_modules(base)]
    keys_at(position)  # length-dependent frequencies are set now
    candidates = frequencies(base)
    rounding = unit_roundoff(REAL_TYPES[str(calls[0].k.dtype).removeprefix("torch.")])
    rope = identify(name, candidates, keys_at, position, rounding)
    for hook in hooks:
        hook.remove()
    off = produced_deviation(candidates, produced, position) if rope else 0.0
    if off > 4 * rounding + 1e-6 * position:
        raise refused(name, f"cosines and sines {off:.3g} from those of its frequencies", "RoPE as its inv_freq says")
    return list(calls), rope


def uniform(calls: Sequence[LayerCall], name: str) -> LayerCall:
    """A layer that stands for all; what a trace says once must hold in every layer."""
    first = calls[0]
    for call in calls:
        heads = (first.q.shape[0], first.k.shape[0], first.q.shape[2])
        found = (call.q.shape[0], call.k.shape[0], call.q.shape[2])
        if found != heads:
            text = "head counts that differ by layer: " + "/".join(map(str, found)) + f" in layer {call.layer}"
            raise refused(name, text, "/".join(map(str, heads)) + " (query heads/kv heads/dimension) everywhere")
        if (call.scale, call.softcap) != (first.scale, first.softcap):
            found_text = f"softmax scale or softcap that differs in layer {call.layer}"
            raise refused(name, found_text, f"scale {first.scale}, softcap {first.softcap} everywhere")
    if len({call.layer for call in calls}) != len(calls):
        raise refused(name, "layers that are called twice", "each layer once a pass")
    return first


def _checked(queries: int, verify_all: bool) -> np.ndarray:
    """Indices of the stored queries that are recomputed: evenly spread, the last among them."""
    count = queries if verify_all else min(queries, CHECKED_QUERIES)
    return np.unique(np.linspace(queries - 1, 0, count).round().astype(np.int64))


def _refuse_full_disk(path: Path, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise Error(str(path), "disk", f"{size / 1e6:.1f} MB free", f"{free / 1e6:.1f} MB", Refusal.RESOURCES)


def _refuse_long_text(model: Any, tokens: int) -> None:
    """A model knows positions up to some number; what it makes of later ones is no trace of it."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and tokens > most:
        raise Error("prompt", "too long for the model", f"at most {most} tokens (--max-tokens)", f"{tokens} tokens")


def capture(
    model: Any, tokenizer: Any, prompt: Prompt, path: Path, choices: Choices, progress: Callable[[int], Any]
) -> Captured:
    """Writes the trace of one prompt; `progress(n)` gives a bar with `update()` and `close()`."""
    prompt, ids = fit(tokenizer, prompt, choices.chat, choices.max_tokens)
    prompt_tokens = len(ids)
    _refuse_long_text(model, prompt_tokens + choices.generate)
    if choices.continuation:
        ids += list(tokenizer(choices.continuation, add_special_tokens=False).input_ids)
    else:
        ids += generate(model, ids, choices.generate)
    tokens = len(ids)
    _refuse_long_text(model, tokens)

    def decode(some: Sequence[int]) -> str:
        return tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    text, offsets = decode_with_offsets(decode, ids)
    marked = render(tokenizer, prompt.marked(), choices.chat)
    spans = find_spans(prompt, marked, choices.spans, text, offsets, prompt_tokens)
    calls, rope = probe(model, choices.name, ids[0], max(1, tokens - 1))
    shape = uniform(calls, choices.name)
    wanted = [place for place, call in enumerate(calls) if choices.layers is None or call.layer in choices.layers]
    missing = sorted((choices.layers or frozenset()) - {call.layer for call in calls})
    if missing:
        have = f"layers of this model, {calls[0].layer} to {calls[-1].layer}"
        raise Error("--layers", "value", have, ", ".join(map(str, missing)), Refusal.USAGE)
    compute = str(shape.k.dtype).removeprefix("torch.")
    store = choices.store_dtype or compute
    first_query = 0 if choices.last_queries is None else max(0, prompt_tokens - choices.last_queries)
    positions = np.arange(first_query, tokens)
    query_heads, kv_heads, width = shape.q.shape[0], shape.k.shape[0], shape.q.shape[2]
    layer = [((query_heads, len(positions), width), store)] + 2 * [((kv_heads, tokens, width), store)]
    if choices.with_wo:
        layer.append((tuple(shape.output_projection().shape), store))
    _refuse_full_disk(path, expected_bytes(layer * len(wanted)))

    with TraceWriter(path, choices.force, choices.producer) as trace:
        trace.attributes("/", synthetic=0)
        trace.attributes(
            "/model",
            name=choices.name,
            architecture=type(model).__name__,
            n_layers=len(wanted),
            n_query_heads=query_heads,
            n_kv_heads=kv_heads,
            head_dim=width,
            dtype=compute,
            softmax_scale=shape.scale,
            logit_softcap=shape.softcap,
            **({"source_hash": choices.source_hash} if choices.source_hash else {}),
            **({"quantisation": choices.quantisation} if choices.quantisation else {}),
        )
        trace.dataset("/model/layer_index", np.array([calls[place].layer for place in wanted], np.int32))
        if rope:
            trace.attributes("/model/rope", style=rope.style)
            trace.dataset("/model/rope/inv_freq", rope.inv_freq[wanted])
            trace.dataset("/model/rope/attention_scaling", rope.attention_scaling[wanted])
        trace.attributes("/tokens", prefill=prompt_tokens)
        trace.dataset("/tokens/ids", np.array(ids, np.int32))
        trace.dataset("/tokens/offsets", np.array(offsets, np.int32))
        trace.dataset("/tokens/text", text)
        if spans:
            trace.dataset("/spans", spans)
        bar = progress(len(wanted))
        recorder = Recorder(
            trace=trace,
            numbers={calls[place].layer: number for number, place in enumerate(wanted)},
            query_positions=positions,
            checked=_checked(len(positions), choices.verify_all),
            store=REAL_TYPES[store],
            with_wo=choices.with_wo,
            on_layer=bar.update,
        )
        before = frequencies(decoder(model))
        try:
            with torch.inference_mode(), observed(model, choices.name, recorder):
                decoder(model)(input_ids=torch.tensor([ids], device=input_device(model)), use_cache=False)
        finally:
            bar.close()
        after = frequencies(decoder(model))
        if len(before) != len(after) or not all(map(same, before, after)):
            raise refused(choices.name, "RoPE whose frequencies changed in the pass", "those that the probe saw")
        windows = [recorder.windows[number] for number in range(len(wanted))]
        trace.dataset("/model/sliding_window", np.array(windows, np.int32))
    assert recorder.worst is not None
    return Captured(
        path,
        prompt_tokens,
        tokens,
        len(wanted),
        query_heads,
        kv_heads,
        store,
        rope,
        len(recorder.checked),
        recorder.worst,
    )
