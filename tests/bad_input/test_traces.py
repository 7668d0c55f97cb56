"""Broken traces, each refused in its own words: by `info` with exit code 3, by `validate` as invalid with 1
(with 3 where there is no file to read).

Every trace is the fixture of `kvreplay synth fixture` (L = 4, Hq = 4, Hkv = 2, d = 4, P = 12, T = 16) with one thing
wrong. The wording is exact: whoever changes a message changes it here.
The program is taken from the environment variable KVREPLAY, by default build/release/kvreplay.
"""

import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pytest

PROGRAM = Path(os.environ.get("KVREPLAY", Path(__file__).parents[2] / "build" / "release" / "kvreplay")).resolve()


@dataclass(frozen=True)
class Broken:
    """A way to break a trace, and the message after the file's name."""

    name: str
    message: str
    damage: Callable[[Path], None]


BROKEN: list[Broken] = []


def broken(name: str, message: str):
    """Register a function that damages the open h5py file."""

    def register(damage: Callable[[h5py.File], None]):
        def on_path(path: Path) -> None:
            with h5py.File(path, "r+", libver=("v108", "v110")) as file:
                damage(file)

        BROKEN.append(Broken(name, message, on_path))
        return damage

    return register


def write(path: Path, data: bytes) -> None:
    """The file's new bytes."""
    path.write_bytes(data)


def broken_bytes(name: str, message: str):
    """Register a function from the file's bytes to damaged ones."""

    def register(damage: Callable[[bytes], bytes]):
        BROKEN.append(Broken(name, message, lambda path: write(path, damage(path.read_bytes()))))
        return damage

    return register


def set_attribute(name: str, owner: str, attribute: str, value: object, message: str) -> None:
    """The attribute gets a value; None removes it."""

    def damage(file: h5py.File) -> None:
        del file[owner].attrs[attribute]
        if value is not None:
            file[owner].attrs[attribute] = value

    separator = "" if owner == "/" else owner
    broken(name, f":{separator or '/'}@{attribute}: {message}")(damage)


def set_dataset(name: str, path: str, change: Callable[[np.ndarray], np.ndarray], message: str, **options) -> None:
    """The dataset becomes `change` of its elements."""

    def damage(file: h5py.File) -> None:
        elements = file[path][()]
        del file[path]
        file.create_dataset(path, data=change(elements), **options)

    broken(name, f":{path}: {message}")(damage)


def remove(name: str, path: str, message: str) -> None:
    """The object goes."""

    def damage(file: h5py.File) -> None:
        del file[path]

    broken(name, f":{path}: {message}")(damage)


def element(index: tuple[int, ...] | int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    """A copy with one element changed."""

    def change(elements: np.ndarray) -> np.ndarray:
        changed = elements.copy()
        changed[index] = value
        return changed

    return change


# Attributes of the root.
set_attribute("another format", "/", "format", np.bytes_("kvtrade"), 'value: expected kvtrace, found "kvtrade"')
set_attribute("results of a replay", "/", "format", np.bytes_("kvcells"), 'value: expected kvtrace, found "kvcells"')
set_attribute("no format", "/", "format", None, "missing attribute: expected fixed-length string, found none")


@broken(
    "variable-length string",
    ": strings: expected strings of fixed length, found 1 of variable length, the first at /@format",
)
def _(file: h5py.File) -> None:
    file.attrs["format"] = "kvtrace"


set_attribute(
    "newer version",
    "/",
    "version",
    3,
    "format version is newer than this program supports: expected at most 2, found 3",
)
set_attribute("version 0", "/", "version", 0, "value: expected 1 to 2, found 0")
set_attribute("version as text", "/", "version", np.bytes_("1"), "type: expected integer, found string of 1 bytes")
set_attribute("version as a list", "/", "version", np.array([1]), "shape: expected scalar, found [1]")
set_attribute("empty version", "/", "version", h5py.Empty("i8"), "shape: expected scalar, found empty")
set_attribute("not complete", "/", "complete", 0, "value: expected 1, found 0")
set_attribute("no complete", "/", "complete", None, "missing attribute: expected integer, found none")
set_attribute("synthetic 2", "/", "synthetic", 2, "value: expected 0 to 1, found 2")
set_attribute("no producer", "/", "producer", None, "missing attribute: expected fixed-length string, found none")
set_attribute(
    "producer not UTF-8", "/", "producer", np.bytes_(b"caf\xe9"), "value: expected UTF-8, found byte 0xe9 at 3"
)

# The model.
remove("no model", "/model", "missing: expected a group, found none")
set_attribute("no layers stated", "/model", "n_layers", None, "missing attribute: expected integer, found none")
set_attribute("0 layers", "/model", "n_layers", 0, "value: expected 1 to 65536, found 0")
set_attribute("negative heads", "/model", "n_query_heads", -4, "value: expected 1 to 65536, found -4")
set_attribute("float heads", "/model", "n_query_heads", 4.0, "type: expected integer, found float64")
set_attribute("KV heads do not divide", "/model", "n_kv_heads", 3, "value: expected a divisor of 4 (Hq), found 3")
set_attribute("huge head", "/model", "head_dim", 5000, "value: expected 1 to 4096, found 5000")
set_attribute(
    "unknown dtype",
    "/model",
    "dtype",
    np.bytes_("float8"),
    'value: expected float16 or bfloat16 or float32, found "float8"',
)
set_attribute("scale 0", "/model", "softmax_scale", 0.0, "value: expected above 0, found 0")
set_attribute("scale NaN", "/model", "softmax_scale", float("nan"), "value: expected a finite number, found nan")
set_attribute("scale as integer", "/model", "softmax_scale", 1, "type: expected float, found int64")
set_attribute("softcap negative", "/model", "logit_softcap", -1.0, "value: expected at least 0, found -1")
set_attribute("softcap infinite", "/model", "logit_softcap", float("inf"), "value: expected a finite number, found inf")
remove("no windows", "/model/sliding_window", "missing: expected a dataset, found none")
set_dataset(
    "negative window", "/model/sliding_window", element(2, -1), "value: expected at least 0, found -1 at element 2"
)
set_dataset("windows of 3 layers", "/model/sliding_window", lambda w: w[:3], "shape: expected [4], found [3]")
set_dataset(
    "windows beyond 32 bits",
    "/model/sliding_window",
    lambda w: element(1, 2**31)(w.astype("i8")),
    "value: expected at most 2147483647, found 2147483648 at element 1",
)
set_dataset(
    "layer twice",
    "/model/layer_index",
    element(2, 1),
    "order: expected strictly ascending, found 1 after 1 at element 2",
)

# RoPE.
set_attribute(
    "unknown style",
    "/model/rope",
    "style",
    np.bytes_("thirds"),
    'value: expected halves or interleaved, found "thirds"',
)
remove("no frequencies", "/model/rope/inv_freq", "missing: expected a dataset, found none")
set_dataset(
    "frequency NaN",
    "/model/rope/inv_freq",
    element((1, 0), np.nan),
    "value: expected finite numbers, found nan at element 2",
)
set_dataset(
    "too many pairs",
    "/model/rope/inv_freq",
    lambda f: np.ones((4, 3)),
    "shape: expected at most 2 pairs (offset + 2r <= d), found 3",
)
set_dataset(
    "frequencies in float16", "/model/rope/inv_freq", np.float16, "type: expected float64 or float32, found float16"
)
set_dataset("frequencies of one layer", "/model/rope/inv_freq", lambda f: f[0], "shape: expected [4, r], found [2]")
set_dataset(
    "scaling 0",
    "/model/rope/attention_scaling",
    element(3, 0.0),
    "value: expected above 0, found 0 at element 3",
)

# Tokens and spans.
remove("no tokens", "/tokens", "missing: expected a group, found none")
remove("no token numbers", "/tokens/ids", "missing: expected a dataset, found none")
set_dataset("negative token", "/tokens/ids", element(5, -7), "value: expected at least 0, found -7 at element 5")
set_dataset(
    "tokens in 16 bits", "/tokens/ids", lambda ids: ids.astype("i2"), "type: expected int32 or int64, found int16"
)
set_dataset(
    "tokens unsigned", "/tokens/ids", lambda ids: ids.astype("u4"), "type: expected int32 or int64, found uint32"
)
set_dataset(
    "tokens big-endian",
    "/tokens/ids",
    lambda ids: ids.astype(">i4"),
    "type: expected int32 or int64, found big-endian int32",
)
set_dataset("token table", "/tokens/ids", lambda ids: ids.reshape(2, 8), "shape: expected [T], found [2, 8]")
set_dataset("no tokens in the list", "/tokens/ids", lambda ids: ids[:0], "shape: expected [T], found [0]")
set_attribute("prompt longer than all", "/tokens", "prefill", 17, "value: expected at most 16 (T), found 17")
set_attribute("no prompt", "/tokens", "prefill", 0, "value: expected at least 1, found 0")
broken("text without offsets", ":/tokens/text: alone: expected /tokens/offsets beside it, found none")(
    lambda file: file.__delitem__("/tokens/offsets")
)
broken("offsets without text", ":/tokens/offsets: alone: expected /tokens/text beside it, found none")(
    lambda file: file.__delitem__("/tokens/text")
)
set_dataset("offsets of one end", "/tokens/offsets", lambda o: o[:, :1], "shape: expected [16, 2], found [16, 1]")
set_dataset(
    "offset backwards",
    "/tokens/offsets",
    element((1, 0), 50),
    "range: expected begin <= end <= 78 characters, found [50, 10) at token 1",
)
set_dataset(
    "offset past the text",
    "/tokens/offsets",
    element((15, 1), 80),
    "range: expected begin <= end <= 78 characters, found [73, 80) at token 15",
)


@broken(
    "strings of variable length and no layers",
    ": strings: expected strings of fixed length, found 2 of variable length, the first at /@producer",
)
def _(file: h5py.File) -> None:
    del file["layers"]
    file.attrs["producer"] = "an exporter"
    del file["tokens/text"]
    file.create_dataset("tokens/text", data="x" * 79, dtype=h5py.string_dtype())


@broken(
    "state of another form",
    ":/model@other_state: value: expected a JSON list of objects with kind, layers and bytes, "
    """found "[{"kind": "conv"}]\"""",
)
def _(file: h5py.File) -> None:
    file["model"].attrs["other_state"] = np.bytes_('[{"kind": "conv"}]')


@broken("text as bytes", ":/tokens/text: type: expected fixed-length string, found opaque of 79 bytes")
def _(file: h5py.File) -> None:
    del file["tokens/text"]
    file.create_dataset("tokens/text", data=np.void(b"x" * 79))


def set_span(name: str, index: int, begin: int, end: int, message: str) -> None:
    """One span gets another range."""

    def change(spans: np.ndarray) -> np.ndarray:
        changed = spans.copy()
        changed["begin"][index], changed["end"][index] = begin, end
        return changed

    set_dataset(name, "/spans", change, message)


set_span(
    "span past the end", 2, 12, 17, 'range: expected 0 <= begin < end <= 16 (T), found [12, 17) in span 2 "answer"'
)
set_span("empty span", 1, 10, 10, 'range: expected 0 <= begin < end <= 16 (T), found [10, 10) in span 1 "question"')
set_span(
    "span before the start", 0, -1, 3, 'range: expected 0 <= begin < end <= 16 (T), found [-1, 3) in span 0 "context"'
)
set_dataset(
    "spans without end",
    "/spans",
    lambda s: s[["name", "kind", "begin"]].copy(),
    'missing of member "end": expected compound of name, kind, begin, end, found none',
)
set_dataset(
    "spans as numbers",
    "/spans",
    lambda s: np.zeros((3, 2), "i4"),
    "type: expected compound of name, kind, begin, end, found int32",
)
NARROW_SPAN = [("name", "S8"), ("kind", "S8"), ("begin", "i4"), ("end", "i2")]
set_dataset(
    "span ends in 16 bits",
    "/spans",
    lambda s: s.astype(NARROW_SPAN),
    'type of member "end": expected int32 or int64, found int16',
)


@broken("span without a name", ":/spans: name: expected UTF-8, at least one character, found none in span 1")
def _(file: h5py.File) -> None:
    spans = file["spans"][()]
    spans["name"][1] = b""
    file["spans"][...] = spans


# Layers and tensors.
remove("no layers", "/layers", "missing: expected a group, found none")
remove("a layer is missing", "/layers/002", "missing: expected a group, found none")
remove("no queries", "/layers/001/q", "missing: expected a dataset, found none")
remove("no keys", "/layers/003/k", "missing: expected a dataset, found none")
remove("no values", "/layers/000/v", "missing: expected a dataset, found none")
set_dataset("keys of 15 tokens", "/layers/003/k", lambda k: k[:, :15], "shape: expected [2, 16, 4], found [2, 15, 4]")
set_dataset("keys repeated", "/layers/000/k", lambda k: k.repeat(2, 0), "shape: expected [2, 16, 4], found [4, 16, 4]")
set_dataset("values without heads", "/layers/000/v", lambda v: v[0], "shape: expected [2, 16, 4], found [16, 4]")
set_dataset(
    "fewer queries, no positions", "/layers/000/q", lambda q: q[:, 8:], "shape: expected [4, 16, 4], found [4, 8, 4]"
)
set_dataset(
    "queries in 64 bits", "/layers/000/q", np.float64, "type: expected float16, bfloat16 or float32, found float64"
)
set_dataset("keys as integers", "/layers/000/k", np.int16, "type: expected float16, bfloat16 or float32, found int16")
set_dataset(
    "values big-endian",
    "/layers/000/v",
    lambda v: v.astype(">f4"),
    "type: expected float16, bfloat16 or float32, found big-endian float32",
)
set_dataset(
    "bfloat16 as opaque bytes",
    "/layers/000/v",
    lambda v: v.view("V2"),
    "type: expected float16, bfloat16 or float32, found opaque of 2 bytes",
)
set_dataset(
    "foreign filter", "/layers/001/k", lambda k: k, "filter: expected deflate or shuffle, found lzf", compression="lzf"
)
set_dataset(
    "checksum filter",
    "/layers/001/k",
    lambda k: k,
    "filter: expected deflate or shuffle, found fletcher32",
    fletcher32=True,
)


@broken("a group for a tensor", ":/layers/000/k: kind: expected a dataset, found a group")
def _(file: h5py.File) -> None:
    del file["layers/000/k"]
    file.create_group("layers/000/k")


@broken("a dataset for a layer", ":/layers/000: kind: expected a group, found a dataset")
def _(file: h5py.File) -> None:
    del file["layers/000"]
    file["layers/000"] = 1


@broken("never written", ":/layers/000/k: storage: expected 256 bytes, found none allocated")
def _(file: h5py.File) -> None:
    del file["layers/000/k"]
    file.create_dataset("layers/000/k", (2, 16, 4), "f2")


@broken("chunks never written", ":/layers/000/k: chunks: expected 4 written, found 3")
def _(file: h5py.File) -> None:
    keys = file["layers/000/k"][()]
    del file["layers/000/k"]
    file.create_dataset("layers/000/k", keys.shape, keys.dtype, chunks=(1, 8, 4), compression="gzip")
    file["layers/000/k"][0], file["layers/000/k"][1, :8] = keys[0], keys[1, :8]


@broken("no chunk written", ":/tokens/ids: chunks: expected 3 written, found 0")
def _(file: h5py.File) -> None:
    del file["tokens/ids"]
    file.create_dataset("tokens/ids", (16,), "i4", chunks=(7,))


@broken("compact keys", ":/layers/000/k: layout: expected contiguous or chunked, found compact")
def _(file: h5py.File) -> None:
    del file["layers/000/k"]
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.COMPACT)
    h5py.h5d.create(file["layers/000"].id, b"k", h5py.h5t.IEEE_F16LE, h5py.h5s.create_simple((2, 16, 4)), creation)


@broken("keys in another file", ":/layers/000/k: layout: expected stored in this file, found external files")
def _(file: h5py.File) -> None:
    del file["layers/000/k"]
    file.create_dataset("layers/000/k", (2, 16, 4), "f2", external=[("/etc/passwd", 0, 256)])


@broken("virtual keys", ":/layers/000/k: layout: expected contiguous or chunked, found virtual")
def _(file: h5py.File) -> None:
    del file["layers/000/k"]
    layout = h5py.VirtualLayout((2, 16, 4), "f2")
    layout[...] = h5py.VirtualSource(".", "/layers/000/v", (2, 16, 4))
    file.create_virtual_dataset("layers/000/k", layout)


@broken("link to another file", ":/layers/000/k: link: expected an object of this file, found an external link")
def _(file: h5py.File) -> None:
    del file["layers/000/k"]
    file["layers/000/k"] = h5py.ExternalLink("other.h5", "/k")


@broken("soft link", ":/layers/000/k: link: expected an object of this file, found a soft link")
def _(file: h5py.File) -> None:
    del file["layers/000/k"]
    file["layers/000/k"] = h5py.SoftLink("/layers/000/v")


@broken("hash of another length", ':/layers/000/k@xxh3: value: expected 32 lower-case hexadecimal digits, found "12"')
def _(file: h5py.File) -> None:
    file["layers/000/k"].attrs["xxh3"] = np.bytes_("12")


def set_positions(name: str, positions: list[int], message: str, layer: str = "002") -> None:
    """Queries at some positions only."""

    def damage(file: h5py.File) -> None:
        queries = file[f"layers/{layer}/q"][()][:, : len(positions)]
        del file[f"layers/{layer}/q"]
        file[f"layers/{layer}/q"] = queries
        file[f"layers/{layer}/q_positions"] = np.array(positions, "i4")

    broken(name, f":/layers/{layer}/{message}")(damage)


set_positions(
    "positions descend", [3, 2], "q_positions: order: expected strictly ascending, found 2 after 3 at element 1"
)
set_positions("position twice", [5, 5], "q_positions: order: expected strictly ascending, found 5 after 5 at element 1")
set_positions("position past the end", [0, 16], "q_positions: value: expected below 16 (T), found 16 at element 1")
set_positions("position before the start", [-1, 3], "q_positions: value: expected at least 0, found -1 at element 0")


@broken("more positions than queries", ":/layers/002/q: shape: expected [4, 3, 4], found [4, 2, 4]")
def _(file: h5py.File) -> None:
    queries = file["layers/002/q"][()][:, :2]
    del file["layers/002/q"]
    file["layers/002/q"] = queries
    file["layers/002/q_positions"] = np.array([1, 2, 3], "i4")


@broken("projection of another width", ":/layers/001/wo: shape: expected [hidden, 16], found [8, 12]")
def _(file: h5py.File) -> None:
    file["layers/001/wo"] = np.zeros((8, 12), "f4")


# The file itself.
broken_bytes("empty file", ": length: expected an HDF5 file, found 0 bytes")(lambda data: b"")
broken_bytes("text file", ": signature: expected an HDF5 file, found another file format")(
    lambda data: b"not a trace\n" * 100
)
broken_bytes("signature damaged by text mode", ": signature: expected an HDF5 file, found another file format")(
    lambda data: data.replace(b"\r\n", b"\n")
)
broken_bytes("only the signature", ": length: expected at least 36 bytes, found 8 bytes")(lambda data: data[:8])
broken_bytes("cut in the superblock", ": length: expected at least 36 bytes, found 20 bytes")(lambda data: data[:20])
broken_bytes("cut after the superblock", ": length: expected {length} bytes, found 48 bytes")(lambda data: data[:48])
broken_bytes("cut in the middle", ": length: expected {length} bytes, found 5000 bytes")(lambda data: data[:5000])
broken_bytes("one byte short", ": length: expected {length} bytes, found {less} bytes")(lambda data: data[:-1])
broken_bytes("superblock of the future", ": superblock version: expected 2 or 3, found 9")(
    lambda data: data[:8] + b"\x09" + data[9:]
)
broken_bytes("short offsets", ": size of offsets and lengths: expected 8 and 8 bytes, found 4 and 8")(
    lambda data: data[:9] + b"\x04" + data[10:]
)
broken_bytes("end of file moved", ": length: expected 1152921504606846976 bytes, found {length} bytes")(
    lambda data: data[:28] + struct.pack("<Q", 1 << 60) + data[36:]
)


def instead(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Something else under the file's name."""

    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def superblock_0(path: Path) -> None:
    """The same objects in the oldest format."""
    with h5py.File(path) as whole, h5py.File(path.with_suffix(".old"), "w", libver=("earliest", "v108")) as old:
        for name in whole:
            whole.copy(name, old)
        for name, value in whole.attrs.items():
            old.attrs[name] = value
    path.with_suffix(".old").replace(path)


BROKEN.append(Broken("oldest superblock", ": superblock version: expected 2 or 3, found 0", superblock_0))
BROKEN.append(Broken("no file", ": cannot be opened: No such file or directory", Path.unlink))
BROKEN.append(Broken("a pipe", ": kind: expected a file, found a device or pipe", instead(os.mkfifo)))


@broken(
    "more elements than the file can hold",
    ":/tokens/ids: shape: expected at most {most} elements in a file of {length} bytes, found [1073741824]",
)
def _(file: h5py.File) -> None:
    del file["tokens/ids"]
    file.create_dataset("tokens/ids", (2**30,), "i4", chunks=(2**20,), compression="gzip")


# What one wrong number makes wrong elsewhere.
MORE_VIOLATIONS = {"KV heads do not divide": 8, "more elements than the file can hold": 13}


def run(*arguments: object, **options) -> subprocess.CompletedProcess:
    """The program's answer; text, with a limit of 60 seconds."""
    return subprocess.run(
        [PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False, **options
    )


@pytest.fixture(scope="session")
def fixture_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unbroken trace."""
    path = tmp_path_factory.mktemp("traces") / "fixture.h5"
    made = run("synth", "fixture", "-o", path)
    assert made.returncode == 0, made.stderr
    return path


def test_the_unbroken_trace_is_valid(fixture_trace: Path) -> None:
    """Otherwise every refusal below could be for another reason."""
    assert run("info", fixture_trace).returncode == 0
    assert run("validate", fixture_trace).returncode == 0


def test_no_two_cases_are_called_the_same() -> None:
    """Each case is one line of a report; there are at least 40."""
    names = [case.name for case in BROKEN]
    assert len(set(names)) == len(names) >= 40


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name.replace(" ", "-"))
def test_refused(case: Broken, fixture_trace: Path, tmp_path: Path) -> None:
    """`info` refuses with 3, `validate` answers "invalid" with 1, both in exactly these words."""
    path = tmp_path / "broken.h5"
    shutil.copy(fixture_trace, path)
    whole = path.stat().st_size
    case.damage(path)
    length = path.stat().st_size if path.is_file() and "cut" not in case.name and "short" not in case.name else whole
    message = case.message
    for word, value in (("{length}", length), ("{less}", length - 1), ("{most}", length * 1032 // 4)):
        message = message.replace(word, str(value))
    answer = run("info", path)
    assert (answer.stdout, answer.returncode) == ("", 3)
    verdict = run("validate", path)
    if path.is_file():
        [line] = answer.stderr.splitlines()
        problem, remedy = line.removeprefix("kvreplay: ").split("; ", 1)
        assert problem == f"{path}{message}"
        assert remedy.split()[0] in ("write", "run", "use", "give")
        first, *others = verdict.stdout.removeprefix(f"{path}: invalid\n").splitlines()
        assert (first, verdict.returncode) == (f"  {problem}; {remedy}", 1)
        assert len(others) == MORE_VIOLATIONS.get(case.name, 0)
    else:
        assert answer.stderr == f"kvreplay: {path}{message}\n"
        assert (verdict.stderr, verdict.returncode) == (answer.stderr, 3)


def test_a_folder_without_traces(tmp_path: Path) -> None:
    """`info` looks for traces in folders, `validate` reads files alone."""
    for command, message in (
        ("info", "no trace in this folder: expected files *.h5"),
        ("validate", "kind: expected a file, found a directory"),
    ):
        answer = run(command, tmp_path)
        assert (answer.stdout, answer.stderr, answer.returncode) == ("", f"kvreplay: {tmp_path}: {message}\n", 3)


def test_a_file_without_permission(fixture_trace: Path) -> None:
    """As a user who may not read it; a superuser may read everything and so becomes nobody."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "broken.h5"
        shutil.copy(fixture_trace, path)
        path.chmod(0)
        Path(folder).chmod(0o755)
        try:
            answer = run("info", path, **({"user": 65534} if os.geteuid() == 0 else {}))
        except PermissionError:
            pytest.skip("the program lies where another user may not run it")
        expected = f"kvreplay: {path}: cannot be opened: Permission denied\n"
        assert (answer.stderr, answer.returncode) == (expected, 3)


def test_a_damaged_superblock_is_refused(fixture_trace: Path, tmp_path: Path) -> None:
    """Its checksum says so; the words after the file's name are the HDF5 library's."""
    path = tmp_path / "broken.h5"
    data = bytearray(fixture_trace.read_bytes())
    data[44] ^= 1
    path.write_bytes(data)
    answer = run("info", path)
    assert answer.returncode == 3
    assert answer.stderr.startswith(f"kvreplay: {path}: cannot be opened: ")


@pytest.mark.parametrize("tensor", ["q", "k", "v"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_deep_validation_finds_the_first_number_that_is_not_finite(
    fixture_trace: Path, tmp_path: Path, tensor: str, number: float
) -> None:
    """Layer, tensor, head, position and component are named; the stored hash no longer fits either."""
    path = tmp_path / "broken.h5"
    shutil.copy(fixture_trace, path)
    with h5py.File(path, "r+") as file:
        file[f"layers/002/{tensor}"][1, 7, 3] = number
        file[f"layers/002/{tensor}"][1, 9, 0] = number
    answer = run("validate", path, "--deep")
    where = f"  {path}:/layers/002/{tensor}: "
    verdict, first, second = answer.stdout.splitlines()
    assert verdict == f"{path}: invalid"
    assert first == f"{where}number: expected finite numbers, found {number} at head 1, position 7, component 3"
    assert second.startswith(f"{where}xxh3: expected ")
    assert answer.returncode == 1
    assert run("validate", path).returncode == 0


def test_deep_validation_recomputes_hashes(fixture_trace: Path, tmp_path: Path) -> None:
    """One bit of one value changed in the file."""
    path = tmp_path / "broken.h5"
    shutil.copy(fixture_trace, path)
    with h5py.File(path) as file:
        offset = file["layers/001/v"].id.get_offset()
        stated = file["layers/001/v"].attrs["xxh3"].decode()
    data = bytearray(path.read_bytes())
    data[offset + 10] ^= 1
    path.write_bytes(data)
    answer = run("validate", path, "--deep")
    assert answer.returncode == 1
    assert f"{path}:/layers/001/v: xxh3: expected {stated}, found " in answer.stdout
