"""Streams each layer to the trace as it is computed, and checks it there: one layer in memory, never the trace."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import torch

from kvreplay.capture.observe import LayerCall
from kvreplay.capture.verify import Deviation, deviation
from kvreplay.errors import Error, Refusal
from kvreplay.trace import REAL_TYPES, TraceWriter


def to_numpy(tensor: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    """A contiguous host copy in a stored type."""
    tensor = tensor.detach().to("cpu", getattr(torch, dtype.name)).contiguous()
    return tensor.view(torch.uint16).numpy().view(dtype) if dtype == ml_dtypes.bfloat16 else tensor.numpy()


def _return_freed_memory() -> None:
    """Returns freed memory to the system. Otherwise glibc keeps the gaps between tensors: a layer's size per layer."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim:
        trim(0)


def _is_finite(tensor: np.ndarray) -> bool:
    """By heads: the largest magnitude is finite only if all are; there is no fast test for 16-bit types."""
    heads = tensor if tensor.ndim == 3 else tensor[None]
    return all(np.isfinite(np.max(np.abs(head.astype(np.float32, copy=False)))) for head in heads)


@dataclass
class Recorder:
    """The observer of a pass over T tokens, in one call of each layer or in chunks.

    `numbers` gives each observed layer of the model its place in the trace.
    """

    trace: TraceWriter
    numbers: dict[int, int]
    sources: list[int]  # of each stored layer the stored layer whose keys and values it reads
    tokens: int
    query_positions: np.ndarray  # [Tq], ascending
    checked: np.ndarray  # indices into query_positions, ascending: the queries that are recomputed
    store: np.dtype
    with_wo: bool
    with_hidden: bool
    on_call: Callable[[], None]
    windows: dict[int, int] = field(default_factory=dict)
    chunks: dict[int, int] = field(default_factory=dict)
    worst: Deviation | None = None
    selections: dict[int, np.ndarray] = field(default_factory=dict)  # by number, int32 [Tq,T]: ascending, then -1
    selects: bool = False  # whether a layer has such a dataset

    def __call__(self, call: LayerCall) -> None:
        number = self.numbers[call.layer]
        base = f"/layers/{number:03d}"
        end = call.begin + call.k.shape[1]
        if call.begin == 0:
            self._begin(base, call)
        first, last = np.searchsorted(self.query_positions, (call.begin, end))
        if first < last:
            stored = self.query_positions[first:last] - call.begin
            q = call.q if len(stored) == call.q.shape[1] else call.q[:, torch.from_numpy(stored)]
            self.write(f"{base}/q", first, to_numpy(q, self.store))
        for name in self._stored(call):
            self.write(f"{base}/{name}", call.begin, to_numpy(getattr(call, name), self.store))
        if call.input_norm is not None:
            self.write(f"{base}/input_norm", call.begin, to_numpy(call.input_norm, np.dtype(np.float32)))
        if self.with_hidden:
            self.write(f"{base}/x", call.begin, to_numpy(call.x, self.store))
        self.windows[number], self.chunks[number] = call.window, call.chunk
        if call.selected is not None and first < last:
            self._select(number, call, first, self.query_positions[first:last])
        self._verify(base, call, self.checked[(self.checked >= first) & (self.checked < last)])
        if end == self.tokens and number in self.selections:
            self._write_selection(base, self.selections.pop(number), call.k.shape[0])
        _return_freed_memory()
        self.on_call()

    def _stored(self, call: LayerCall) -> str:
        """Of MLA the keys alone, whose first components are the values; nothing of another layer's."""
        number = self.numbers[call.layer]
        return "" if self.sources[number] != number else "kv" if call.expansion is None else "k"

    def _begin(self, base: str, call: LayerCall) -> None:
        """Makes room for all tokens of a layer."""
        queries, width = len(self.query_positions), call.q.shape[2]
        if queries < self.tokens:
            self.trace.dataset(f"{base}/q_positions", self.query_positions.astype(np.int32))
        self.trace.begin_tensor(f"{base}/q", self.store, (call.q.shape[0], queries, width))
        for name in self._stored(call):
            heads, _, components = getattr(call, name).shape
            self.trace.begin_tensor(f"{base}/{name}", self.store, (heads, self.tokens, components))
        if self.with_wo:
            wo = to_numpy(call.output_projection(), self.store)
            self._require_finite(f"{base}/wo", wo)
            self.trace.dataset(f"{base}/wo", wo)
        if call.input_norm is not None:
            self.trace.begin_tensor(f"{base}/input_norm", np.dtype(np.float32), (self.tokens,))
        if self.with_hidden:
            self.trace.begin_tensor(f"{base}/x", self.store, (self.tokens, call.x.shape[1]))

    def _select(self, number: int, call: LayerCall, first: int, positions: np.ndarray) -> None:
        """Keeps the tokens that these queries read."""
        assert call.selected is not None
        wide = self.selections.setdefault(number, np.full((len(self.query_positions), 0), -1, np.int32))
        for row, position in enumerate(positions, first):
            read = np.unique(call.selected[position - call.begin].cpu().numpy())
            read = read[(read >= 0) & (read <= position)]
            if len(read) > wide.shape[1]:
                more = np.full((len(wide), len(read) - wide.shape[1]), -1, np.int32)
                wide = self.selections[number] = np.concatenate([wide, more], 1)
            wide[row, : len(read)] = read

    def _write_selection(self, base: str, units: np.ndarray, kv_heads: int) -> None:
        """Of each KV head the same. Nothing of a layer whose queries read all tokens that they see."""
        if ((units >= 0).sum(1) <= self.query_positions).any():
            self.trace.dataset(f"{base}/visible", np.repeat(units[None], kv_heads, 0))
            self.selects = True

    def write(self, path: str, begin: int, tensor: np.ndarray) -> None:
        self._require_finite(path, tensor)
        self.trace.write_tokens(path, begin, tensor)

    def _require_finite(self, path: str, tensor: np.ndarray) -> None:
        if not _is_finite(tensor):
            expected = f"finite numbers in {tensor.dtype}, or --store-dtype float32"
            raise Error(f"{self.trace.path}:{path}", "value", expected, "NaN or Inf")

    def _verify(self, base: str, call: LayerCall, checked: np.ndarray) -> None:
        if not len(checked):
            return
        positions = self.query_positions[checked]
        compute = REAL_TYPES[str(call.output.dtype).removeprefix("torch.")]
        output = call.output[torch.from_numpy(positions - call.begin)].transpose(0, 1)
        output = to_numpy(output, np.dtype(np.float32))
        source = f"/layers/{self.sources[self.numbers[call.layer]]:03d}"
        # Query heads that share keys and values; the values of MLA are those of one query head.
        group = call.q.shape[0] // call.k.shape[0] if call.expansion is None else 1
        for first in range(0, call.q.shape[0], group):  # mapped anew each: pages of the others are not kept in memory
            heads = slice(first, first + group)
            kv_head = first * call.k.shape[0] // call.q.shape[0]
            keys = self.trace.read_back(f"{source}/k")[kv_head]
            if call.expansion is None:
                values = self.trace.read_back(f"{source}/v")[kv_head]
            else:
                expansion = call.expansion[first].cpu().numpy()
                values = keys[:, : call.rope_offset].astype(np.float32) @ expansion.T
            result = deviation(
                layer=call.layer,
                first_head=first,
                q=self.trace.read_back(f"{base}/q")[heads][:, checked],
                k=keys,
                v=values,
                positions=positions,
                output=output[heads],
                scale=call.scale,
                softcap=call.softcap,
                window=call.window,
                chunk=call.chunk,
                selected=None if call.selected is None else call.selected[torch.from_numpy(positions - call.begin)],
                sinks=np.full(group, -np.inf) if call.sinks is None else call.sinks[heads].double().cpu().numpy(),
                compute=compute,
                absorbed=call.expansion is not None,
            )
            if not result.ratio <= 1:
                place = f"layer {result.layer}, head {result.head}, query {result.position}"
                expected = f"within rounding, {result.allowed:.3g} of sum a|v|"
                found = f"{result.found:.3g}"
                raise Error(str(self.trace.path), f"{place}: attention output", expected, found, Refusal.NO)
            if self.worst is None or result.ratio > self.worst.ratio:
                self.worst = result
