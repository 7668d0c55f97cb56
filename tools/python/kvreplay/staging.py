"""Queries, keys and values of other engines, written in pieces: the staging format of docs/staging.md.

`kvreplay convert FOLDER -o trace.h5` joins the pieces. The module needs numpy and safetensors, not the engine of
kvreplay, so that it can be imported in the environment of any inference engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvreplay.errors import Error

METADATA = "kvtrace"
VERSION = {"kvtrace_staging": "1"}
FILE_BYTES = 64 << 20  # tensors are kept in memory up to this size, then written as one file
HEADER = "header.safetensors"


class StagedMetadata:
    """Writes FOLDER/header.safetensors. Engines whose workers write the tensors in other processes use it alone."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._objects: dict[str, Any] = {}

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

    def model(self, config: Mapping[str, Any], name: str, dtype: str) -> None:
        """The model's attributes by its configuration in Hugging Face's names. Rejects configurations whose attention
        needs more than plain RoPE: write their objects with attributes() and dataset()."""
        d = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise Error(name, "rope_type", "default", str(kind))
        windows = set(config.get("layer_types") or ()) - {"full_attention"}
        if windows or (config.get("sliding_window") and config.get("use_sliding_window", True)):
            raise Error(name, "layers", "full attention", ", ".join(sorted(windows)) or "a sliding window")
        for key in ("attn_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier"):
            if config.get(key):
                raise Error(name, key, "none", str(config[key]))
        layers, pairs = config["num_hidden_layers"], int(d * config.get("partial_rotary_factor", 1.0)) // 2
        theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
        architecture = (config.get("architectures") or [config.get("model_type", "")])[0]
        self.attributes("/model", name=name, architecture=architecture, dtype=dtype, softmax_scale=d**-0.5,
                        logit_softcap=0.0)  # fmt: skip
        self.dataset("/model/sliding_window", [0] * layers)
        self.attributes("/model/rope", style="halves")
        self.dataset("/model/rope/inv_freq", np.tile(theta ** (-np.arange(pairs) / pairs), (layers, 1)))
        self.dataset("/model/rope/attention_scaling", [1.0] * layers)

    def tokens(self, ids: Sequence[int], prompt: int) -> None:
        """Token numbers of the prompt and its continuation."""
        self.attributes("/tokens", prefill=prompt)
        self.dataset("/tokens/ids", list(ids))

    def finish(self) -> None:
        """Writes the metadata."""
        text = json.dumps(self._objects, ensure_ascii=False, allow_nan=False)
        self._write(HEADER, {}, {**VERSION, METADATA: text})

    def _write(self, name: str, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None) -> None:
        from safetensors.numpy import save_file

        partial = self.folder / f"{name}.partial"
        save_file(tensors, partial, metadata)
        partial.rename(self.folder / name)


class StagingWriter(StagedMetadata):
    """Writes FOLDER/tensors-NNNNN.safetensors, and at the end the metadata; an exception leaves a folder without
    metadata, which `kvreplay convert` rejects.

    with StagingWriter(folder) as staged:
        staged.add(0, "k", 0, keys)  # [Hkv, n, d]: the tokens from 0 on
        staged.attributes("/model", name="model", ...)
        staged.dataset("/tokens/ids", ids)
    """

    def __init__(self, folder: str | Path, file_bytes: int = FILE_BYTES) -> None:
        super().__init__(folder)
        self._file_bytes = file_bytes
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
            self.flush()

    def flush(self) -> None:
        """Writes the tensors in memory as a file."""
        if self._tensors:
            self._write(f"tensors-{self._files:05d}.safetensors", self._tensors, None)
            self._files += 1
            self._tensors = {}

    def finish(self) -> None:
        """Writes the rest of the tensors, then the metadata."""
        self.flush()
        super().finish()


def _without_infinity(values: Any) -> Any:
    """-infinity, which JSON lacks, becomes null."""
    if isinstance(values, list):
        return [_without_infinity(value) for value in values]
    return None if values == -math.inf else values
