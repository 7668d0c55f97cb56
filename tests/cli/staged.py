"""Traces as the staging format: every object of the schema, tensors in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvreplay.staging import StagingWriter
from kvreplay.trace import Trace

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "core" / "trace" / "schema.json").read_text())
WRITTEN_BY_READERS = ("format", "version", "complete", "created")
FOLLOWING_FROM_TENSORS = ("/model@n_layers", "/model@n_query_heads", "/model@n_kv_heads", "/model@head_dim",
                          "/model@value_dim", "/model/heads", "/model/head_dims")  # fmt: skip


def stage(trace: Trace, folder: Path, tokens: int, file_bytes: int = 1 << 20) -> None:
    """Writes `trace` in pieces of `tokens` rows, without the objects that follow from the tensors' shapes."""
    with StagingWriter(folder, file_bytes) as staged:
        for one in SCHEMA["attributes"]:
            path = one["object"] + "@" + one["name"]
            if one["name"] not in WRITTEN_BY_READERS and path not in FOLLOWING_FROM_TENSORS and path in trace:
                staged.attributes(one["object"], **{one["name"]: trace[path]})
        for one in SCHEMA["datasets"]:
            if "{layer}" not in one["path"] and one["path"] not in FOLLOWING_FROM_TENSORS and one["path"] in trace:
                staged.dataset(one["path"], trace[one["path"]])
        for layer in range(trace.layers):
            positions = trace.query_positions(layer)
            if len(positions):
                staged.dataset(f"/layers/{layer:03d}/q_positions", positions)
            for name in ("q", "k", "v", "wo", "input_norm", "x"):
                if f"/layers/{layer:03d}/{name}" not in trace:
                    continue
                whole = trace[f"/layers/{layer:03d}/{name}"]
                axis = 1 if whole.ndim == 3 else 0
                rows = positions if name == "q" and len(positions) else np.arange(whole.shape[axis])
                for begin, end in runs(rows, tokens):
                    piece = whole[:, begin:end] if axis else whole[begin:end]
                    staged.add(layer, name, int(rows[begin]), piece)


def runs(rows: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `most` rows whose positions follow each other."""
    begin = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or end - begin == most or rows[end] != rows[end - 1] + 1:
            yield begin, end
            begin = end
