"""The place of a model: a name on the hub, a folder, or a GGUF file. Imports no package that loads models."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvreplay.errors import Error

# Where transformers looks for weights, in its order; an index lists shards.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
READ_AT_ONCE = 1 << 20  # bytes
HUB_SECONDS = 5  # until an answer of the hub
GGUF_MAGIC = b"GGUF"  # the first bytes of such a file
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # NAME or OWNER/NAME


@dataclass(frozen=True)
class Source:
    """Where a model comes from, as transformers' loaders take it."""

    name: str  # as it was asked for
    title: str  # what traces call it: no folder of anybody's
    location: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, model: str, revision: str | None = None) -> Source:
        path = Path(model)
        if path.suffix == ".gguf":
            return cls(model, path.stem, str(path.parent), {"gguf_file": path.name})
        if path.is_dir():
            return cls(model, path.resolve().name, model, {})
        return cls(model, model, model, {"revision": revision} if revision else {})

    def require_model(self) -> None:
        """Rejects a file or folder that is missing or contains no model; of a hub name, only the form is checked."""
        path, wanted = Path(self.name), "a hub name, a folder or a .gguf file"
        if "gguf_file" in self.options:
            if not path.is_file():
                raise Error("--model", self.name, "a GGUF file", "no such file")
            with open(path, "rb") as file:
                if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                    raise Error("--model", self.name, "a GGUF file", "a file of another format")
            _require_whole(path)
        elif path.is_dir():
            if not (path / "config.json").is_file():
                raise Error(
                    "--model", self.name, "a folder with config.json and the weights of a model", "no config.json"
                )
            for weights in self.weights():
                _require_whole(weights)
        elif path.exists():
            raise Error("--model", self.name, wanted, "another file")
        elif not HUB_NAME.fullmatch(self.name):
            raise Error("--model", self.name, wanted, "no such file or folder")

    def require_reachable(self) -> None:
        """Rejects a hub name that is neither in the cache nor on the hub, within seconds: transformers tries for most
        of a minute."""
        if "gguf_file" in self.options or Path(self.name).is_dir() or self._file("config.json"):
            return
        from huggingface_hub import HfApi

        try:
            HfApi().model_info(self.location, revision=self.options.get("revision"), timeout=HUB_SECONDS)
        except Exception as error:  # of the hub or of any layer of the network
            reason = " ".join(str(error).split()) or type(error).__name__
            found = f"no such file or folder here, and of the hub: {reason}"
            raise Error(
                "--model", self.name, "a file, a folder, or a model in the cache or on the hub", found
            ) from error

    def _file(self, name: str) -> Path | None:
        """A file of the model, if it is on this machine."""
        if (path := Path(self.location)).is_dir():
            return path / name if (path / name).is_file() else None
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.location, name, revision=self.options.get("revision"))
        return Path(cached) if isinstance(cached, str) else None

    def weights(self) -> list[Path]:
        """The files with the weights, by name; none for a hub model that has not been loaded yet."""
        names = [self.options["gguf_file"]] if "gguf_file" in self.options else WEIGHTS
        first = next((path for name in names if (path := self._file(name))), None)
        if first is None or first.suffix != ".json":
            return [first] if first else []
        try:
            names = sorted(set(json.loads(first.read_text("utf-8"))["weight_map"].values()))
            return [first.parent / name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise Error("--model", str(first), "an index of weights with weight_map", "another text") from problem

    def hash(self) -> str:
        """SHA-256 of the weights files, one after the other by name, hexadecimal; empty where none is at hand."""
        digest = hashlib.sha256()
        files = self.weights()
        for path in files:
            with open(path, "rb") as file:
                while piece := file.read(READ_AT_ONCE):
                    digest.update(piece)
        return digest.hexdigest() if files else ""


def _require_whole(weights: Path) -> None:
    """Rejects a file that is missing, or a safetensors or GGUF file that ends before its numbers do."""
    if not weights.is_file():
        raise Error("--model", str(weights), "a file with weights", "no such file")
    if weights.suffix not in (".safetensors", ".gguf"):
        return
    size, whole = weights.stat().st_size, -1
    damaged = (ValueError, KeyError, TypeError, AttributeError, EOFError, OverflowError, MemoryError)
    with open(weights, "rb") as file, suppress(*damaged):
        whole = (_length_of_safetensors if weights.suffix == ".safetensors" else _length_of_gguf)(file, size)
    if size != whole:
        wanted = f"a complete {weights.suffix[1:]} file (git lfs pull, or download it again)"
        found = f"{size:,} bytes" + (f" of {whole:,}" if whole > 0 else " without a complete header")
        raise Error("--model", str(weights), wanted, found)


def _length_of_safetensors(file: BinaryIO, size: int) -> int:
    """Bytes of the complete file by its header; the file has `size`."""
    header = int.from_bytes(file.read(8), "little")  # the format: bytes of the JSON behind these 8
    if 8 + header > size:
        raise EOFError
    tensors = json.loads(file.read(header))
    ends = (one["data_offsets"][1] for name, one in tensors.items() if name != "__metadata__")
    return 8 + header + max(ends, default=0)


def _length_of_gguf(file: BinaryIO, size: int) -> int:
    """The same of a GGUF file, which may end with padding. transformers reads its tokens for seconds beforehand."""
    from kvreplay.capture import gguf_header

    return max(size, gguf_header.length_of(file))
