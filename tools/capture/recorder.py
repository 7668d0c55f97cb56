"""Streams each layer to the trace as it is computed, and checks it there: one layer in memory, never the trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import torch

from kvreplay.capture.observe import LayerCall
from kvreplay.capture.verify import Deviation, deviation
from kvreplay.errors import Error, Refusal
from kvreplay.schema import REAL_TYPES
from kvreplay.trace import TraceWriter


def to_numpy(tensor: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    """A contiguous host copy in a stored type."""
    tensor = tensor.detach().to("cpu", getattr(torch, dtype.name)).contiguous()
    return tensor.view(torch.uint16).numpy().view(dtype) if dtype == ml_dtypes.bfloat16 else tensor.numpy()


@dataclass
class Recorder:
    """The observer of one pass over T tokens. `numbers` gives each wanted layer of the model its place in the trace."""

    trace: TraceWriter
    numbers: dict[int, int]
    query_positions: np.ndarray  # [Tq], ascending
    checked: np.ndarray  # indices into query_positions: the queries that are recomputed
    store: np.dtype
    with_wo: bool
    on_layer: Callable[[], None]
    windows: dict[int, int] = field(default_factory=dict)
    worst: Deviation | None = None

    def __call__(self, call: LayerCall) -> None:
        if call.layer not in self.numbers:
            return
        number = self.numbers[call.layer]
        tokens = call.k.shape[1]
        if tokens == len(self.query_positions):
            q, positions = call.q, None
        else:
            q, positions = call.q[:, torch.from_numpy(self.query_positions)], self.query_positions.astype(np.int32)
        tensors = {name: to_numpy(x, self.store) for name, x in (("q", q), ("k", call.k), ("v", call.v))}
        if self.with_wo:
            tensors["wo"] = to_numpy(call.output_projection(), self.store)
        for name, tensor in tensors.items():
            # The largest magnitude is finite only if all are; 16-bit types have no fast test of their own.
            if not np.isfinite(np.max(np.abs(tensor.astype(np.float32, copy=False)))):
                where = f"{self.trace.path}:/layers/{number:03d}/{name}"
                raise Error(
                    where, "value", f"finite in {self.store} (or --store-dtype float32)", "infinite or not a number"
                )
        self.trace.layer(number, q_positions=positions, **tensors)
        self.windows[number] = call.window
        self._verify(number, call)
        self.on_layer()

    def _verify(self, number: int, call: LayerCall) -> None:
        positions = self.query_positions[self.checked]
        compute = REAL_TYPES[str(call.output.dtype).removeprefix("torch.")]
        result = deviation(
            layer=call.layer,
            q=self.trace.read_back(number, "q")[:, self.checked],
            k=self.trace.read_back(number, "k"),
            v=self.trace.read_back(number, "v"),
            positions=positions,
            output=to_numpy(call.output[torch.from_numpy(positions)].transpose(0, 1), np.dtype(np.float32)),
            scale=call.scale,
            softcap=call.softcap,
            window=call.window,
            compute=compute,
        )
        if not result.ratio <= 1:
            place = f"layer {result.layer}, head {result.head}, query {result.position}"
            expected = f"within rounding, {result.allowed:.3g} of sum a|v|"
            raise Error(str(self.trace.path), f"{place}: attention output", expected, f"{result.found:.3g}", Refusal.NO)
        if self.worst is None or result.ratio > self.worst.ratio:
            self.worst = result
