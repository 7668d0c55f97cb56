"""Passes that repeat the prompt: [prompt][instruction][prompt]. KVzip and KVCompose score tokens by their attention.

The instruction and the size of a chunk are those of KVzip (Kim et al. 2025, arXiv:2505.23416; snu-mllab/KVzip at
5d84729, model/wrapper.py). KVCompose repeats everything in one pass without an instruction (NVIDIA/kvpress 0.5.5,
kvpress/presses/kvcompose_press.py).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvreplay.capture.observe import LayerCall
from kvreplay.capture.recorded_pass import run_pass
from kvreplay.capture.recorder import Recorder, to_numpy
from kvreplay.capture.refusals import Layers
from kvreplay.errors import Error, Refusal
from kvreplay.trace import Span, TraceWriter

Kind = Literal["chunks", "whole"]
KINDS = ("chunks", "whole")

CHUNK = 2000  # tokens that a pass repeats
INSTRUCTION = "\n\nRepeat the previous context exactly."
NEXT_INSTRUCTION = "\n\nRepeat the part of the previous context exactly, starting with "
QUOTED = 8  # last tokens of the chunk before, which follow the instruction of the next
NO_TEMPLATE = "\n"  # behind the instruction without a chat template, as in kvpress


@dataclass(frozen=True)
class Pass:
    """The tokens of one pass, the last of which repeat the prompt tokens [first, last)."""

    ids: list[int]
    first: int
    last: int


@dataclass(frozen=True)
class Passes:
    """Passes that follow the first `boundary` tokens of a prompt, each pass separately."""

    boundary: int
    passes: list[Pass]

    @property
    def tokens(self) -> int:
        return sum(len(one.ids) for one in self.passes)

    @property
    def longest(self) -> int:
        """Tokens of the longest pass and of the prompt before it."""
        return self.boundary + max(len(one.ids) for one in self.passes)

    def write(self, trace: TraceWriter) -> None:
        ends = np.cumsum([len(one.ids) for one in self.passes])
        rows = [(end, one.first, one.last) for end, one in zip(ends, self.passes, strict=True)]
        trace.attributes("/reconstruction", boundary=self.boundary)
        trace.dataset("/reconstruction/ids", np.concatenate([one.ids for one in self.passes]).astype(np.int32))
        trace.dataset("/reconstruction/passes", np.array(rows, np.int32))


def boundary_of(text: str, prompt_tokens: int, spans: Sequence[Span]) -> int:
    """The number of tokens that `--reconstruct-at` names, as `kvreplay replay --boundary` has it."""
    if text == "prompt":
        return prompt_tokens
    if text.startswith("span:"):
        ends = [span.end for span in spans if span.name == text.removeprefix("span:")]
        if not ends:
            known = ", ".join(span.name for span in spans) or "none"
            raise Error("--reconstruct-at", text, f"a span of the prompt: {known}", "no such span", Refusal.USAGE)
        tokens = ends[0]
    elif re.fullmatch(r"[1-9]\d*", text):
        tokens = int(text)
    else:
        raise Error("--reconstruct-at", "not a boundary", "prompt, N or span:NAME", text, Refusal.USAGE)
    if tokens > prompt_tokens:
        raise Error("--reconstruct-at", text, f"at most {prompt_tokens} tokens", f"{tokens}", Refusal.USAGE)
    return tokens


def passes_of(
    kind: Kind, ids: Sequence[int], boundary: int, frame: tuple[str, str], encode: Callable[[str], list[int]]
) -> Passes:
    """`ids`: the prompt; `frame`: texts of the chat template before and behind it; `encode`: without special tokens."""
    if kind == "whole":
        return Passes(boundary, [Pass(list(ids[:boundary]), 0, boundary)])
    first = len(encode(frame[0]))
    if first >= boundary:
        expected = f"more than the {first} tokens of the chat template before the prompt"
        raise Error("--reconstruct-at", "nothing to repeat", expected, str(boundary), Refusal.USAGE)
    answer = encode(frame[1] or NO_TEMPLATE)
    passes = []
    for begin in range(first, boundary, CHUNK):
        repeated = ids[begin : min(begin + CHUNK, boundary)]
        asked = encode(INSTRUCTION) if begin == first else [*encode(NEXT_INSTRUCTION), *ids[begin - QUOTED : begin]]
        passes.append(Pass([*asked, *answer, *repeated], begin, begin + len(repeated)))
    return Passes(boundary, passes)


class PassRecorder:
    """Writes queries and keys of the passes, as they are computed, beside those of the recorder of the prompt."""

    def __init__(self, recorder: Recorder, passes: Passes, calls: Sequence[LayerCall]) -> None:
        self._recorder = recorder
        self._boundary = passes.boundary
        self._begin = 0
        for number, call in enumerate(calls):
            for name in self._stored(number):
                heads, _, width = getattr(call, name).shape
                recorder.trace.begin_tensor(self._path(number, name), recorder.store, (heads, passes.tokens, width))

    def begin(self, tokens_before: int) -> None:
        """Before the next pass. `tokens_before`: those of the earlier passes."""
        self._begin = tokens_before

    def __call__(self, call: LayerCall) -> None:
        number = self._recorder.numbers[call.layer]
        begin = self._begin + call.begin - self._boundary
        for name in self._stored(number):
            self._recorder.write(self._path(number, name), begin, to_numpy(getattr(call, name), self._recorder.store))
        self._recorder.on_call()

    def _stored(self, number: int) -> str:
        """Keys are those of the layer that another reads."""
        return "qk" if self._recorder.sources[number] == number else "q"

    @staticmethod
    def _path(number: int, name: str) -> str:
        return f"/layers/{number:03d}/{name}_reconstruction"


def record(
    model: Any,
    name: str,
    ids: Sequence[int],
    passes: Passes,
    chunk: int,
    recorder: PassRecorder,
    layers: Layers,
) -> None:
    """Runs the prompt once, and each pass behind a copy of its cache, `chunk` tokens at once."""
    prompt = list(ids[: passes.boundary])
    cache = run_pass(model, name, prompt, lambda call: None, chunk, None, layers, use_cache=True)
    if cache is None:
        raise Error("--reconstruct", name, "a model with a cache", "none", Refusal.INPUT)
    before = 0
    for one in passes.passes:
        recorder.begin(before)
        run_pass(model, name, one.ids, recorder, chunk, None, layers, cache=copy.deepcopy(cache), use_cache=True)
        before += len(one.ids)
