"""Traces from Python: a writer that streams layer by layer, and a reader that maps what lies in the file.

Shapes: q [Hq,Tq,d], k and v [Hkv,T,d], each float16, bfloat16 (ml_dtypes) or float32, as the schema says.
"""

from __future__ import annotations

import fcntl
import functools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import h5py
import ml_dtypes
import numpy as np
import xxhash

from kvreplay import __version__
from kvreplay.errors import DISK_FULL, Error, Refusal
from kvreplay.hdf5_file import open_to_read
from kvreplay.schema import ARRAY_TYPES, REAL_TYPES, Checker

ALIGNMENT_THRESHOLD, ALIGNMENT = 65536, 4096  # bytes: tensors start on a page, so that they can be mapped
HEADER_ROOM = 1 << 18  # bytes: far more than the headers that HDF5 writes between two datasets
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PRODUCER = f"kvreplay {__version__}"

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Span:
    """Tokens [begin, end) under a name."""

    name: str
    kind: str
    begin: int
    end: int


def _file_type(dtype: np.dtype) -> h5py.h5t.TypeID:
    """The HDF5 type of an element type; bfloat16 is a float of sign 1, exponent 8, mantissa 7 bits."""
    if dtype != BFLOAT16:
        return h5py.h5t.py_create(dtype, logical=True)
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def _storable(array: np.ndarray) -> np.ndarray:
    """Bytes as HDF5 wants them: bfloat16 travels as its 16 bits, everything little-endian and contiguous."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint16) if array.dtype == BFLOAT16 else array.astype(array.dtype.newbyteorder("<"), copy=False)


def _is_bfloat16(kind: h5py.h5t.TypeID) -> bool:
    return isinstance(kind, h5py.h5t.TypeFloatID) and kind.equal(_file_type(BFLOAT16))


def refuse_existing(path: Path, force: bool) -> None:
    """A finished trace is replaced only on request."""
    if path.exists() and not force:
        raise Error(str(path), "output", "a new file (or --force)", "an existing file", Refusal.USAGE)


class _Storage:
    """The file that HDF5 writes, as h5py's driver for Python's files calls it. HDF5 does not survive a write that
    fails: the first failure is kept for the writer, and from there on nothing is written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._position = 0
        self._end = 0  # where HDF5 believes the file to end
        self.failure: OSError | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (self._end if whence == os.SEEK_END else 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def write(self, data: memoryview) -> int:
        left = memoryview(data).cast("B")
        try:
            while left and not self.failure:
                written = os.pwrite(self._descriptor, left, self._position)
                left, self._position = left[written:], self._position + written
        except OSError as error:
            self.failure = error
        self._position += len(left)
        self._end = max(self._end, self._position)
        return len(data)

    def readinto(self, buffer: memoryview) -> int:
        """What was never written, or could not be, is zeros."""
        view = memoryview(buffer).cast("B")
        read = os.preadv(self._descriptor, [view], self._position)
        view[read:] = bytes(len(view) - read)
        return len(view)

    def truncate(self, size: int) -> None:
        """The file itself keeps what is reserved until it is finished."""
        self._end = size

    def flush(self) -> None:
        pass

    def require_written(self) -> None:
        """Raises what the file system refused."""
        if self.failure:
            raise self.failure


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM wait for the end of the block."""
    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        yield
        return
    came: list[tuple[int, Any]] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, lambda *interruption: came.append(interruption))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in came:
            handlers[number](number, frame)


def _calls_hdf5(method: Method) -> Method:
    """HDF5 calls Python where it writes, and must not be left from there: an interruption waits until the method has
    returned, and so does what the file system refused."""

    @functools.wraps(method)
    def call(self: TraceWriter, *arguments: Any, **named: Any) -> Any:
        try:
            with _uninterrupted():
                result = method(self, *arguments, **named)
            self._storage.require_written()
        except OSError as error:
            if error.errno in DISK_FULL:
                found = "no space left (nothing is kept)"
                raise Error(str(self.path), "disk", "room for the whole trace", found, Refusal.RESOURCES) from error
            raise Error(str(self.path), "output", "a folder that can be written", str(error), Refusal.USAGE) from error
        return result

    return call  # type: ignore[return-value]


class TraceWriter:
    """Writes PATH.partial, and renames it to PATH when all is there; on any exception the partial file goes.

    `producer`: the program, with its version, that the trace names as its own.

    with TraceWriter(path) as trace:
        trace.attributes("/model", n_layers=2, ...)
        trace.dataset("/tokens/ids", ids)
        trace.layer(0, q, k, v)
    """

    def __init__(self, path: str | Path, force: bool = False, producer: str = PRODUCER) -> None:
        self.path = Path(path)
        self.producer = producer
        self.partial = self.path.with_name(self.path.name + ".partial")
        refuse_existing(self.path, force)
        self._checker = Checker(str(self.path))
        self._descriptor = -1
        self._file: h5py.h5f.FileID | None = None
        self._storage = _Storage(-1)
        try:
            self._create()
        except BaseException:
            self._leave()
            raise

    @_calls_hdf5
    def _create(self) -> None:
        self._descriptor = os.open(self.partial, os.O_RDWR | os.O_CREAT, 0o666)
        self._lock()
        os.ftruncate(self._descriptor, 0)
        self._storage = _Storage(self._descriptor)
        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_V110)
        access.set_alignment(ALIGNMENT_THRESHOLD, ALIGNMENT)
        access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
        access.set_fileobj_driver(h5py.h5fd.fileobj_driver, self._storage)
        creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
        creation.set_obj_track_times(False)
        self._file = h5py.h5f.create(os.fsencode(self.partial), h5py.h5f.ACC_TRUNC, fcpl=creation, fapl=access)

    def _lock(self) -> None:
        """One writer a file; a killed one leaves no lock. File systems without locks are used without."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            self._descriptor = -1
            raise Error(str(self.partial), "output", "one writer", "another at work", Refusal.USAGE) from error
        except OSError:
            pass

    def __enter__(self) -> TraceWriter:
        try:
            self.attributes(
                "/",
                format=self._checker.schema["format"],
                version=self._checker.schema["version"],
                producer=self.producer,
                created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            )
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Closes the file, and removes what is not finished."""
        with _uninterrupted():
            if self._file is not None and self._file.valid:
                self._file.close()
            if self._descriptor >= 0:
                with suppress(OSError):  # it stays, as a killed writer's does
                    self.partial.unlink(missing_ok=True)
                os.close(self._descriptor)
                self._descriptor = -1

    @_calls_hdf5
    def _finish(self) -> None:
        self._checker.attribute("/", "complete", 1)
        self._checker.finish()
        self.flush()
        self._write_attribute("/", "complete", 1)
        self.flush()
        size = self._file.get_filesize()
        self._file.close()
        self._storage.require_written()
        os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)
        os.replace(self.partial, self.path)

    def _reserve(self, size: int) -> None:
        """Disk for `size` more bytes and the headers around them, so that a full disk shows before they are written."""
        os.posix_fallocate(self._descriptor, 0, self._file.get_filesize() + size + HEADER_ROOM)

    @_calls_hdf5
    def flush(self) -> None:
        """All written so far is in the file, for whoever reads it back."""
        h5py.h5f.flush(self._file)

    def _group(self, path: str) -> None:
        """Creates a group and those above it, without times."""
        built = ""
        for name in path.strip("/").split("/"):
            built += f"/{name}"
            if built == "/" or built.encode() in self._file:
                continue
            creation = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
            creation.set_obj_track_times(False)
            h5py.h5g.create(self._file, built.encode(), gcpl=creation)
            self._checker.group(built)

    @_calls_hdf5
    def attributes(self, path: str, **values: Any) -> None:
        """Attributes of a group (made if new) or dataset, each checked."""
        if path != "/" and path.encode() not in self._file:
            self._group(path)
        for name, value in values.items():
            if self._checker.attribute_rule(path, name) is None:
                raise Error(f"{self.path}:{path}@{name}", "attribute", "one of the schema", name, Refusal.INTERNAL)
            self._checker.attribute(path, name, value)
            self._write_attribute(path, name, value)

    def _write_attribute(self, path: str, name: str, value: Any) -> None:
        target = h5py.h5o.open(self._file, path.encode())
        if isinstance(value, str):
            kind, data = _fixed_string(value)
        else:
            data = np.asarray(value, np.float64 if isinstance(value, (float, np.floating)) else np.int64)
            kind = h5py.h5t.py_create(data.dtype)
        scalar = h5py.h5s.create(h5py.h5s.SCALAR)
        h5py.h5a.create(target, name.encode(), kind, scalar).write(data, mtype=kind)

    @_calls_hdf5
    def dataset(self, path: str, data: np.ndarray | str | Sequence[Span]) -> None:
        """Writes one dataset of the schema, contiguous and allocated early."""
        rule = self._checker.dataset_rule(path)
        if rule is None:
            raise Error(f"{self.path}:{path}", "dataset", "one of the schema", path, Refusal.INTERNAL)
        if rule["type"] == "string":
            file_type, array = _fixed_string(str(data))
        elif rule["type"] == "span":
            file_type, array = self._spans(list(data))
        else:
            array = np.asarray(data)
            file_type = _file_type(array.dtype)
        if rule["type"] in ("int32", "float64"):
            self._checker.values(path, array)
        created = self._create_dataset(path, array.dtype, file_type, array.shape)
        created.write(h5py.h5s.ALL, h5py.h5s.ALL, _storable(array), mtype=file_type)
        if self._checker.is_tensor(path):
            self.attributes(path, xxh3=xxhash.xxh3_128(_storable(array)).hexdigest())

    def _create_dataset(
        self, path: str, dtype: np.dtype, file_type: h5py.h5t.TypeID, shape: tuple[int, ...]
    ) -> h5py.h5d.DatasetID:
        """A new dataset of the schema, whose place in the file is reserved."""
        self._checker.element_type(path, dtype)
        self._checker.shape(path, shape)
        self._group(path.rsplit("/", 1)[0] or "/")
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_obj_track_times(False)
        creation.set_layout(h5py.h5d.CONTIGUOUS)
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        self._reserve(math.prod(shape) * dtype.itemsize)
        space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
        return h5py.h5d.create(self._file, path.encode(), file_type, space, dcpl=creation)

    @_calls_hdf5
    def begin_tensor(self, path: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        """A tensor of a layer that is written in pieces: `write_tokens()` fills it, `end_tensor()` states its hash."""
        self._create_dataset(path, dtype, _file_type(dtype), shape)

    @_calls_hdf5
    def write_tokens(self, path: str, begin: int, piece: np.ndarray) -> None:
        """The tokens from `begin` on of a begun tensor [H,T,d] or [T]: [H,n,d] or [n]."""
        dataset = h5py.h5d.open(self._file, path.encode())
        start = (0, begin, 0) if piece.ndim == 3 else (begin,)
        place = dataset.get_space()
        place.select_hyperslab(start, piece.shape)
        source = h5py.h5s.create_simple(piece.shape)
        dataset.write(source, place, _storable(piece), mtype=dataset.get_type())

    def end_tensor(self, path: str) -> None:
        """States the hash of a tensor that is all written."""
        self.attributes(path, xxh3=xxhash.xxh3_128(_storable(self.read_back(path))).hexdigest())

    def _spans(self, spans: list[Span]) -> tuple[h5py.h5t.TypeID, np.ndarray]:
        for span in spans:
            self._checker.span(span.name, span.kind, span.begin, span.end)
        columns = self._checker.schema["compounds"]["span"]
        members = []
        for column in columns:
            if column["type"] == "string":
                length = max((len(getattr(span, column["name"]).encode()) for span in spans), default=0)
                members.append((column["name"], h5py.string_dtype("utf-8", max(1, length))))
            else:
                members.append((column["name"], np.dtype(column["type"])))
        rows = [[getattr(span, column["name"]) for column in columns] for span in spans]
        encoded = [tuple(value.encode() if isinstance(value, str) else value for value in row) for row in rows]
        array = np.array(encoded, dtype=members)
        return h5py.h5t.py_create(array.dtype, logical=True), array

    def layer(
        self,
        number: int,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        q_positions: np.ndarray | None = None,
        wo: np.ndarray | None = None,
        input_norm: np.ndarray | None = None,
    ) -> None:
        """One layer, whole: q [Hq,Tq,d], k and v [Hkv,T,d], wo [hidden, Hq*d], input_norm [T]."""
        base = f"/layers/{number:03d}"
        if q_positions is not None:
            self.dataset(f"{base}/q_positions", np.asarray(q_positions, np.int32))
        for name, array in (("q", q), ("k", k), ("v", v), ("wo", wo), ("input_norm", input_norm)):
            if array is not None:
                self.dataset(f"{base}/{name}", array)

    @_calls_hdf5
    def read_back(self, path: str) -> np.ndarray:
        """A tensor as it lies in the file, mapped; what is not written yet is any number."""
        self.flush()
        return _mapped(self.partial, h5py.h5d.open(self._file, path.encode()))


def storable_text(text: str) -> str:
    """As a trace has it: strings are padded with nulls, and a null inside would end one."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _fixed_string(text: str) -> tuple[h5py.h5t.TypeID, np.ndarray]:
    """A scalar string of fixed length, UTF-8, padded with nulls."""
    data = storable_text(text).encode("utf-8")
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(max(1, len(data)))
    kind.set_cset(h5py.h5t.CSET_UTF8)
    kind.set_strpad(h5py.h5t.STR_NULLPAD)
    return kind, np.array(data, dtype=f"S{max(1, len(data))}")


def _mapped(path: Path, dataset: h5py.h5d.DatasetID) -> np.ndarray:
    """A dataset's elements: mapped where they lie contiguous, read through HDF5 where they are chunked."""
    kind = dataset.get_type()
    dtype = BFLOAT16 if _is_bfloat16(kind) else kind.dtype
    offset = dataset.get_offset()
    if offset is not None and dtype.byteorder != ">" and np.prod(dataset.shape):
        return np.memmap(path, dtype, "r", offset, dataset.shape)
    array = np.empty(dataset.shape, np.uint16 if dtype == BFLOAT16 else dtype)
    dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, array, mtype=kind)
    return array.view(dtype)


class Trace:
    """A finished trace, checked against the schema when it is opened; tensors are mapped, not copied.

    `prompt_tokens` P, `tokens` T, `layers` L; `trace["/layers/000/k"]` any array; `trace.attribute("/model", "name")`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file = open_to_read(self.path)
        except OSError as error:
            raise Error(str(path), "file", "a trace that can be read", str(error), Refusal.INPUT) from error
        self._checker = Checker(str(self.path))
        try:
            self._check()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()

    def _check(self) -> None:
        checker = self._checker
        objects: list[tuple[str, Any]] = [("/", self._file)]
        self._file.visititems(lambda name, item: objects.append((f"/{name}", item)))
        for path, item in objects:
            checker.group(path)
            for name in item.attrs:
                checker.attribute(path, name, self.attribute(path, name))
        checker.present -= {path for path, item in objects if isinstance(item, h5py.Dataset)}
        datasets = [(path, item) for path, item in objects if isinstance(item, h5py.Dataset)]
        # /tokens/ids binds T, which the layers need.
        for path, item in sorted(datasets, key=lambda pair: (pair[0] != "/tokens/ids", pair[0].startswith("/layers"))):
            checker.element_type(path, BFLOAT16 if _is_bfloat16(item.id.get_type()) else item.dtype)
            checker.shape(path, item.shape)
            rule = checker.dataset_rule(path)
            if rule:
                self._require_every_chunk(path, item)
            if rule and rule["type"] in ("int32", "float64"):
                checker.values(path, _mapped(self.path, item.id))
        checker.finish()
        for span in self.spans:
            checker.span(span.name, span.kind, span.begin, span.end)
        if self.prompt_tokens > self.tokens:
            raise Error(f"{self.path}:/tokens@prefill", "value", f"at most {self.tokens}", str(self.prompt_tokens))

    def _require_every_chunk(self, path: str, dataset: h5py.Dataset) -> None:
        """HDF5 reads zeros where a chunk was never written."""
        if not dataset.chunks or not dataset.size:
            return
        needed = int(np.prod([-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True)]))
        written = dataset.id.get_num_chunks()
        if written < needed:
            raise Error(f"{self.path}:{path}", "chunks", f"{needed} written", str(written))

    def attribute(self, path: str, name: str) -> Any:
        """An attribute as str, int or float."""
        value = self._file[path].attrs[name]
        if isinstance(value, bytes):
            return value.decode("utf-8")
        return value.item() if isinstance(value, np.generic) else value

    def __contains__(self, path: str) -> bool:
        return path in self._file

    def __getitem__(self, path: str) -> np.ndarray:
        array = _mapped(self.path, self._file[path].id)
        rule = self._checker.dataset_rule(path)
        return array.astype(ARRAY_TYPES.get(rule["type"], array.dtype), copy=False) if rule else array

    @property
    def tokens(self) -> int:
        return self._file["/tokens/ids"].shape[0]

    @property
    def prompt_tokens(self) -> int:
        return int(self.attribute("/tokens", "prefill"))

    @property
    def layers(self) -> int:
        return int(self.attribute("/model", "n_layers"))

    @property
    def text(self) -> str:
        return self._file["/tokens/text"][()].decode("utf-8") if "/tokens/text" in self else ""

    @property
    def spans(self) -> list[Span]:
        return list(self._read_spans())

    def _read_spans(self) -> Iterator[Span]:
        for row in self._file["/spans"][()] if "/spans" in self else ():
            yield Span(row["name"].decode("utf-8"), row["kind"].decode("utf-8"), int(row["begin"]), int(row["end"]))

    def damaged(self) -> list[str]:
        """The tensors whose numbers are not those that their hashes were made of; reads all of them."""
        found = []
        layers = (self._file[f"/layers/{layer:03d}"] for layer in range(self.layers))
        for path in (f"{layer.name}/{name}" for layer in layers for name in layer):
            has_hash = self._checker.is_tensor(path) and "xxh3" in self._file[path].attrs
            if has_hash and xxhash.xxh3_128(_storable(self[path])).hexdigest() != self.attribute(path, "xxh3"):
                found.append(path)
        return found

    def q_positions(self, layer: int) -> np.ndarray:
        """The positions [Tq] of a layer's stored queries."""
        path = f"/layers/{layer:03d}/q_positions"
        return self[path] if path in self else np.arange(self.tokens, dtype=np.int32)


def expected_bytes(shapes: Sequence[tuple[tuple[int, ...], str]]) -> int:
    """Bytes of tensors given as (shape, type name), each rounded up to a page."""
    sizes = (int(np.prod(shape)) * REAL_TYPES[name].itemsize for shape, name in shapes)
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
