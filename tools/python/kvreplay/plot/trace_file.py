"""A trace file with the interface of a run, as far as figures of a single trace use it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from kvreplay.results import TraceFacts
from kvreplay.trace import Trace


class TraceFile:
    """Has the interface of a run of this one trace; the folder of figures is the current folder."""

    failed = ()
    figures = Path()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.prompt_hashes: dict[str, str] = {}  # the file is its own witness
        with Trace(path) as trace:
            self._facts = facts_of(trace)
            synthetic = str(int(trace.synthetic))
        self.cells = pd.DataFrame({"trace": [self._facts.name], "model": [self._facts.model], "synthetic": [synthetic]})

    def trace(self, name: str) -> TraceFacts:
        """The facts of the one trace."""
        return self._facts

    def captured(self, name: str) -> Path:
        """The file itself."""
        return self.path


def facts_of(trace: Trace) -> TraceFacts:
    """The facts of a trace file; the whole prompt counts as under compression."""
    return TraceFacts(
        name=trace.path.stem,
        model=trace.model,
        prompt=trace.prompt,
        boundary=trace.prompt,
        tokens=trace.tokens,
        layers=trace.layers,
        layer_numbers=trace["/model/layer_index"].astype(int),
        treated=np.arange(trace.layers),
        hash="",
        dtype=trace.dtype,
        sample="",
        synthetic=trace.synthetic,
        query_heads=trace.query_heads,
        kv_heads=trace.kv_heads,
        heads=trace.heads,
        reading_layers=sum(trace._source(layer) != layer for layer in range(trace.layers)),
        spans=trace.spans,
        redundancy={},
    )
