"""From one prompt to one trace: continuation first, then a look at the layers, then a single recorded pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvreplay.capture.model import generate
from kvreplay.capture.model_options import LATENT_QUERIES
from kvreplay.capture.observe import LayerCall, observed
from kvreplay.capture.probe import kv_sources, other_states, probe, refuse_gates
from kvreplay.capture.prompts import Prompt, fit, render
from kvreplay.capture.reconstruction import Kind, Passes, PassRecorder, boundary_of, passes_of, record
from kvreplay.capture.recorded_pass import Reference, run_pass
from kvreplay.capture.recorder import Recorder
from kvreplay.capture.refusals import Layers
from kvreplay.capture.rope import Rope
from kvreplay.capture.spans import SpanRequest, decode_with_offsets, find_spans, template_frames
from kvreplay.capture.verify import Deviation
from kvreplay.errors import Error, Refusal
from kvreplay.trace import PRODUCER, REAL_TYPES, Span, TraceWriter, expected_bytes

CHECKED_QUERIES = 64  # a layer, evenly spread, in every capture


@dataclass(frozen=True)
class Choices:
    """The user's choices apart from model and prompt; the fields are named after the options."""

    name: str
    chat: bool = False
    max_tokens: int | None = None
    generate: int = 0
    continuation: str = ""
    queries: int | None = None  # the last of the prompt, with all of the continuation; None: all, or LATENT_QUERIES
    layers: Layers = None
    spans: tuple[SpanRequest, ...] = ()
    with_wo: bool = False
    with_hidden: bool = False
    reconstruct: Kind | None = None  # passes that repeat the prompt; None: none
    reconstruct_at: str = "prompt"  # the boundary that they follow
    store_dtype: str | None = None
    chunk: int | None = None  # tokens of a pass; None: all in one
    save_reference: bool = False
    verify: bool = False  # all queries
    force: bool = False
    source_hash: str = ""
    synthetic: bool = False  # random weights
    load: str | None = None  # quantised weights: 8bit or 4bit
    producer: str = PRODUCER  # as the trace names it


@dataclass(frozen=True)
class Captured:
    """Facts about a finished capture."""

    prompt_tokens: int
    tokens: int
    layers: int
    query_heads: int
    kv_heads: int
    dtype: str
    rope: Rope | None  # of the stored layers
    checked_queries: int
    worst: Deviation


def sink_logits(call: LayerCall, query_heads: int) -> np.ndarray:
    """Of each query head, float64 [query_heads]; -infinity: none."""
    logits = np.full(query_heads, -np.inf)
    if call.sinks is not None:
        logits[: len(call.sinks)] = call.sinks.detach().double().cpu().numpy()
    return logits


def _tensors(
    calls: Sequence[LayerCall],
    sources: Sequence[int],
    queries: int,
    tokens: int,
    passes: Passes | None,
    store: str,
    choices: Choices,
) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and types of all tensors of a trace."""
    found: list[tuple[tuple[int, ...], str]] = []
    for number, call in enumerate(calls):
        found.append(((call.q.shape[0], queries, call.q.shape[2]), store))
        values = [call.v] if call.expansion is None else []  # of MLA they are components of the keys
        if sources[number] == number:
            found += [((x.shape[0], tokens, x.shape[2]), store) for x in (call.k, *values)]
        if passes:
            repeated = [call.q, call.k] if sources[number] == number else [call.q]
            found += [((x.shape[0], passes.tokens, x.shape[2]), store) for x in repeated]
        found.append(((tokens,), "float32"))  # norms of the layer's input
        if choices.with_wo:
            found.append((tuple(call.output_projection().shape), store))
        if choices.with_hidden:
            found.append(((tokens, call.x.shape[1]), store))
    return found


def _checked(queries: int, verify_all: bool) -> np.ndarray:
    """Indices of the stored queries that are recomputed: evenly spread, the last among them."""
    count = queries if verify_all else min(queries, CHECKED_QUERIES)
    return np.unique(np.linspace(queries - 1, 0, count).round().astype(np.int64))


def _refuse_full_disk(path: Path, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise Error(
            str(path), "too little disk space", f"{size / 1e6:.1f} MB", f"{free / 1e6:.1f} MB", Refusal.RESOURCES
        )


def _refuse_long_text(model: Any, tokens: int) -> None:
    """A model supports positions up to a limit; a trace with later positions would not represent it."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and tokens > most:
        raise Error("prompt", "too long for the model", f"at most {most} tokens (--max-tokens)", f"{tokens} tokens")


def _refuse_media(model: Any, ids: list[int]) -> None:
    """A pass over the text alone would compute nothing from the placeholders of images, videos and sound."""
    media = getattr(model, "kvreplay_media_tokens", {})
    if found := next((media[token] for token in ids if token in media), None):
        raise Error("prompt", "images, videos or sound", "text only", f"a token {found}")


def _continuation(model: Any, tokenizer: Any, ids: list[int], prompt: Prompt, choices: Choices) -> list[int]:
    """Token ids after the prompt's `ids`: the given text, or `choices.generate` tokens (G).

    A prompt's own continuation is cut after G tokens, and greedy text follows a shorter one up to G. With G = 0 it is
    taken as it is. `choices.continuation` replaces it and is never cut.
    """
    text = choices.continuation or prompt.continuation
    forced = list(tokenizer(text, add_special_tokens=False).input_ids) if text else []
    if choices.continuation or (forced and not choices.generate):
        return forced
    forced = forced[: choices.generate]
    with observed(model, choices.name, lambda call: None, choices.layers):  # without whole masks
        return forced + generate(model, ids + forced, choices.generate - len(forced), choices.chunk)


def _passes(
    tokenizer: Any, ids: Sequence[int], prompt_tokens: int, marked: str, spans: Sequence[Span], choices: Choices
) -> Passes | None:
    """The passes of --reconstruct. `marked` has a mark in place of each text of the prompt, so that the other text is
    the chat template's."""
    if choices.reconstruct is None:
        return None
    boundary = boundary_of(choices.reconstruct_at, prompt_tokens, spans)
    frames = template_frames(marked)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    return passes_of(choices.reconstruct, ids, boundary, (frames[0], frames[-1]), encode)


def capture(
    model: Any, tokenizer: Any, prompt: Prompt, path: Path, choices: Choices, progress: Callable[[int], Any]
) -> Captured:
    """Writes the trace of one prompt; `progress(n)` gives a bar with `update()` and `close()`."""
    prompt, ids = fit(tokenizer, prompt, choices.chat, choices.max_tokens)
    prompt_tokens = len(ids)
    _refuse_long_text(model, prompt_tokens + choices.generate)
    _refuse_media(model, ids)
    ids += _continuation(model, tokenizer, ids, prompt, choices)
    tokens = len(ids)
    chunk = min(choices.chunk or tokens, tokens)
    if choices.save_reference and tokens == prompt_tokens:
        expected = "a continuation (--generate N or --continuation FILE)"
        raise Error("--save-reference", "no continuation", expected, "", Refusal.USAGE)
    _refuse_long_text(model, tokens)

    def decode(some: Sequence[int]) -> str:
        return tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    text, offsets = decode_with_offsets(decode, ids)
    marked = render(tokenizer, prompt.marked(), choices.chat)
    spans = find_spans(prompt, marked, choices.spans, text, offsets, prompt_tokens)
    passes = _passes(tokenizer, ids, prompt_tokens, marked, spans, choices)
    if passes:
        _refuse_long_text(model, passes.longest)
    calls, rope = probe(
        model, choices.name, ids[0], max(1, max(tokens, passes.longest if passes else 0) - 1), choices.layers
    )
    if choices.with_wo:
        refuse_gates(model, ids[0], calls, choices.name)
    if choices.with_hidden and (missing := [call.layer for call in calls if call.x is None]):
        expected = "a layer that takes the hidden states of one sequence"
        raise Error("--with-hidden", f"layer {missing[0]}", expected, "another input", Refusal.CAPABILITY)
    states = other_states(model, ids[0])
    shape = calls[0]
    compute = str(shape.k.dtype).removeprefix("torch.")
    store = choices.store_dtype or compute
    latent = shape.expansion is not None
    queries = choices.queries or (LATENT_QUERIES if latent else prompt_tokens)
    first_query = max(0, prompt_tokens - queries)
    positions = np.arange(first_query, tokens)
    sources = kv_sources(calls)
    heads = np.array([[call.q.shape[0], call.k.shape[0]] for call in calls], np.int32)
    dims = np.array([[call.k.shape[2], call.v.shape[2]] for call in calls], np.int32)
    (query_heads, kv_heads), (width, value_width) = heads.max(0).tolist(), dims.max(0).tolist()
    _refuse_full_disk(path, expected_bytes(_tensors(calls, sources, len(positions), tokens, passes, store, choices)))

    with TraceWriter(path, choices.force, choices.producer) as trace:
        trace.attributes("/", synthetic=int(choices.synthetic))
        trace.attributes(
            "/model",
            name=choices.name,
            architecture=type(model).__name__,
            n_layers=len(calls),
            n_query_heads=query_heads,
            n_kv_heads=kv_heads,
            head_dim=width,
            dtype=compute,
            softmax_scale=shape.scale,
            logit_softcap=shape.softcap,
            **({"value_is_key": value_width} if latent else {"value_dim": value_width} if value_width != width else {}),
            **({"source_hash": choices.source_hash} if choices.source_hash else {}),
            **({"quantisation": choices.load} if choices.load else {}),
            **({"other_state": json.dumps(states)} if states else {}),
        )
        for name, of_layers in (("heads", heads), ("head_dims", dims)):
            if (of_layers != of_layers[0]).any():
                trace.dataset(f"/model/{name}", of_layers)
        if sources != list(range(len(calls))):
            trace.dataset("/model/kv_source", np.array(sources, np.int32))
        trace.dataset("/model/layer_index", np.array([call.layer for call in calls], np.int32))
        if rope:
            trace.attributes("/model/rope", style=rope.style, **({"offset": shape.rope_offset} if latent else {}))
            trace.dataset("/model/rope/inv_freq", rope.inv_freq)
            trace.dataset("/model/rope/attention_scaling", rope.attention_scaling)
            if (rope.pairs != rope.inv_freq.shape[1]).any():
                trace.dataset("/model/rope/pairs", rope.pairs)
        if any(call.sinks is not None for call in calls):
            trace.dataset("/model/sinks", np.stack([sink_logits(call, query_heads) for call in calls]))
        trace.attributes("/tokens", prefill=prompt_tokens)
        trace.dataset("/tokens/ids", np.array(ids, np.int32))
        trace.dataset("/tokens/offsets", np.array(offsets, np.int32))
        trace.dataset("/tokens/text", text)
        if spans:
            trace.dataset("/spans", spans)
        if passes:
            passes.write(trace)
        lengths = [tokens, *(len(one.ids) for one in passes.passes)] if passes else [tokens]
        bar = progress(len(calls) * sum(-(-length // chunk) for length in lengths))
        recorder = Recorder(
            trace=trace,
            numbers={call.layer: number for number, call in enumerate(calls)},
            sources=sources,
            tokens=tokens,
            query_positions=positions,
            checked=_checked(len(positions), choices.verify),
            store=REAL_TYPES[store],
            with_wo=choices.with_wo,
            with_hidden=choices.with_hidden,
            on_call=bar.update,
        )
        reference = Reference(prompt_tokens, tokens) if choices.save_reference else None
        try:
            run_pass(model, choices.name, ids, recorder, chunk, reference, choices.layers)
            if passes:
                of_passes = PassRecorder(recorder, passes, calls)
                record(model, choices.name, ids, passes, chunk, of_passes, choices.layers)
        finally:
            bar.close()
        if reference:
            reference.write(trace)
        windows = [recorder.windows[number] for number in range(len(calls))]
        trace.dataset("/model/sliding_window", np.array(windows, np.int32))
        if recorder.selects:
            trace.attributes("/model", visible_block=1)
        if any(recorder.chunks.values()):
            chunks = [recorder.chunks[number] for number in range(len(calls))]
            trace.dataset("/model/chunk", np.array(chunks, np.int32))
    assert recorder.worst is not None
    return Captured(
        prompt_tokens,
        tokens,
        len(calls),
        query_heads,
        kv_heads,
        store,
        rope,
        len(recorder.checked),
        recorder.worst,
    )
