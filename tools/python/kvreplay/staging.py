"""Queries, keys and values of other engines, written in pieces: the staging format of docs/staging.md.

`kvreplay convert FOLDER -o trace.h5` joins the pieces. The module needs numpy and safetensors, not the engine of
kvreplay, so that it can be imported in the environment of any inference engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvreplay.errors import Error

METADATA = "kvtrace"
VERSION = {"kvtrace_staging": "1"}
FILE_BYTES = 64 << 20  # tensors are kept in memory up to this size, then written as one file
HEADER = "header.safetensors"


class StagingWriter:
    """Writes FOLDER/tensors-NNNNN.safetensors, and at the end FOLDER/header.safetensors with the metadata; an exception
    leaves a folder without metadata, which `kvreplay convert` rejects.

    with StagingWriter(folder) as staged:
        staged.add(0, "k", 0, keys)  # [Hkv, n, d]: the tokens from 0 on
        staged.attributes("/model", name="model", ...)
        staged.dataset("/tokens/ids", ids)
    """

    def __init__(self, folder: str | Path, file_bytes: int = FILE_BYTES) -> None:
        self.folder = Path(folder)
        self._file_bytes = file_bytes
        self._objects: dict[str, Any] = {}
        self._tensors: dict[str, np.ndarray] = {}
        self._files = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self.folder.glob("*.safetensors")):
            raise Error(str(self.folder), "exists", "an empty folder", "files of safetensors")

    def __enter__(self) -> StagingWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if kind is None:
            self.finish()

    def add(self, layer: int, tensor: str, begin: int, piece: np.ndarray) -> None:
        """Rows of a tensor of a stored layer from row `begin` on: q, k, v are [heads, n, d]."""
        name = f"layers.{layer}.{tensor}@{begin}"
        if name in self._tensors:
            raise Error(f"{self.folder}:{name}", "exists", "another position", "a piece of that name")
        self._tensors[name] = np.array(piece, order="C")  # a copy: engines use their buffers again
        if sum(one.nbytes for one in self._tensors.values()) >= self._file_bytes:
            self._write_tensors()

    def attributes(self, path: str, **values: str | int | float) -> None:
        """Attributes of a group of the trace format, as TraceWriter.attributes() takes them."""
        self._objects |= {f"{path}@{name}": value for name, value in values.items()}

    def dataset(self, path: str, data: np.ndarray | str | Sequence[Any]) -> None:
        """A dataset of the trace format, as TraceWriter.dataset() takes it."""
        if isinstance(data, str):
            self._objects[path] = data
        elif path == "/spans":
            members = ("name", "kind", "begin", "end")
            self._objects[path] = [dict(zip(members, span, strict=True)) for span in data]
        else:
            self._objects[path] = _without_infinity(np.asarray(data).tolist())

    def finish(self) -> None:
        """Writes the rest of the tensors, then the metadata."""
        self._write_tensors()
        text = json.dumps(self._objects, ensure_ascii=False, allow_nan=False)
        self._write(HEADER, {}, {**VERSION, METADATA: text})

    def _write_tensors(self) -> None:
        if self._tensors:
            self._write(f"tensors-{self._files:05d}.safetensors", self._tensors, None)
            self._files += 1
            self._tensors = {}

    def _write(self, name: str, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None) -> None:
        from safetensors.numpy import save_file

        partial = self.folder / f"{name}.partial"
        save_file(tensors, partial, metadata)
        partial.rename(self.folder / name)


def _without_infinity(values: Any) -> Any:
    """-infinity, which JSON lacks, becomes null."""
    if isinstance(values, list):
        return [_without_infinity(value) for value in values]
    return None if values == -math.inf else values
