"""`kvreplay convert` of the staging format: equal traces from pieces, from Python and from C, and its errors."""

from __future__ import annotations

import json
import random
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from program import PROGRAM, done, kvreplay, start
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from staged import ROOT, stage

from kvreplay.errors import Error
from kvreplay.staging import StagingWriter
from kvreplay.trace import Trace, TraceWriter


def normal(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


def write_last_queries(path: Path) -> None:
    """Three layers of a bigger model; queries of the last tokens, output projections, spans, text."""
    with TraceWriter(path) as trace:
        trace.attributes("/", synthetic=1)
        trace.attributes("/model", name='a "model"', architecture="A\\B", n_layers=2, n_query_heads=4, n_kv_heads=2,
                         head_dim=6, dtype="bfloat16", softmax_scale=0.1, logit_softcap=30.0)  # fmt: skip
        trace.dataset("/model/sliding_window", np.array([0, 7], np.int32))
        trace.dataset("/model/layer_index", np.array([1, 5], np.int32))
        trace.attributes("/model/rope", style="interleaved")
        trace.dataset("/model/rope/inv_freq", np.array([[1.0, 0.1, 1e-3 / 3], [0.0, 0.0, 0.0]]))
        trace.dataset("/model/rope/attention_scaling", np.array([1.0, 1.1]))
        trace.attributes("/tokens", prefill=17)
        trace.dataset("/tokens/ids", np.arange(20, dtype=np.int32))
        trace.dataset("/tokens/offsets", np.stack([np.arange(20), np.arange(1, 21)], 1).astype(np.int32))
        trace.dataset("/tokens/text", "ä\n\t" + 17 * "\N{PILE OF POO}")
        trace.dataset("/spans", [("naïve", "context", 2, 9), ("question", "question", 9, 12)])
        positions = np.array([3, 4, 5, 11, 18, 19], np.int32)
        for layer in range(2):
            tensors = [normal((heads, n, 6), ml_dtypes.bfloat16) for heads, n in ((4, 6), (2, 20), (2, 20))]
            trace.layer(layer, *tensors, q_positions=positions, wo=normal((5, 24), np.float32),
                        input_norm=normal((20,), np.float32), x=normal((20, 5), np.float16))  # fmt: skip


def write_version_2(path: Path) -> None:
    """Layers of different shapes, one of which reads the keys of another; sink logits, chunks."""
    with TraceWriter(path) as trace:
        trace.attributes("/", synthetic=1)
        trace.attributes("/model", name="model", architecture="B", n_layers=3, n_query_heads=6, n_kv_heads=3,
                         head_dim=8, value_dim=4, dtype="float32", softmax_scale=0.5, logit_softcap=0.0)  # fmt: skip
        trace.dataset("/model/sliding_window", np.zeros(3, np.int32))
        trace.dataset("/model/layer_index", np.arange(3, dtype=np.int32))
        trace.dataset("/model/heads", np.array([[4, 2], [6, 3], [6, 3]], np.int32))
        trace.dataset("/model/head_dims", np.array([[8, 4], [6, 2], [6, 2]], np.int32))
        trace.dataset("/model/kv_source", np.array([0, 1, 1], np.int32))
        trace.dataset("/model/sinks", np.array([[0.5, -np.inf, 1 / 3, 2, 0, 0], 6 * [-np.inf], 6 * [-np.inf]]))
        trace.dataset("/model/chunk", np.array([0, 8, 8], np.int32))
        trace.attributes("/tokens", prefill=10)
        trace.dataset("/tokens/ids", np.arange(11, dtype=np.int32))
        for layer, (query_heads, kv_heads, d, value_dim) in enumerate(((4, 2, 8, 4), (6, 3, 6, 2), (6, 3, 6, 2))):
            trace.dataset(f"/layers/{layer:03d}/q", normal((query_heads, 11, d), np.float32))
            if layer < 2:
                trace.dataset(f"/layers/{layer:03d}/k", normal((kv_heads, 11, d), np.float32))
                trace.dataset(f"/layers/{layer:03d}/v", normal((kv_heads, 11, value_dim), np.float32))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("originals")
    done("synth", "fixture", "-o", "fixture.h5", folder=folder)
    write_last_queries(folder / "last-queries.h5")
    write_version_2(folder / "version-2.h5")
    found = {path.stem: path for path in folder.iterdir()}
    return {**found, "needle": ROOT / "traces" / "smollm2-135m-needle.h5"}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("fixture", 1),
        ("fixture", 5),
        ("fixture", 1000),
        ("last-queries", 1),
        ("last-queries", 9),
        ("version-2", 4),
        ("needle", 100),
    ],
)
def test_pieces_become_the_trace(name: str, tokens: int, originals: dict[str, Path], tmp_path: Path) -> None:
    stage(Trace(originals[name]), tmp_path / "staged", tokens)
    said = done("convert", "staged", "-o", "joined.h5", folder=tmp_path)
    assert said.startswith("joined.h5  ")
    assert Trace(tmp_path / "joined.h5").hash == Trace(originals[name]).hash
    done("diff", originals[name], "joined.h5", folder=tmp_path)
    done("validate", "--deep", "joined.h5", folder=tmp_path)


def test_files_are_read_in_any_order(originals: dict[str, Path], tmp_path: Path) -> None:
    stage(Trace(originals["fixture"]), tmp_path / "staged", 3, file_bytes=1000)
    files = sorted((tmp_path / "staged").iterdir(), reverse=True)
    assert len(files) > 3
    done("convert", *files, "-o", "joined.h5", folder=tmp_path)
    assert Trace(tmp_path / "joined.h5").hash == Trace(originals["fixture"]).hash


C_PROGRAM = r"""
#include "kvtrace_staging.h"

int main(void) {
  /* k of token t, head h, component i: t + 10 h + 100 i, with the tokens outermost, as ggml stores them. */
  float q[5][4][2], k[5][2][2];
  const int32_t window[1] = {0}, ids[5] = {1, 2, 3, 4, 5}, offsets[10] = {0, 1, 1, 2, 2, 3, 3, 4, 4, 5};
  const double frequencies[1] = {1.0 / 3}, scaling[1] = {1}, sinks[4] = {0.5, -INFINITY, 1.0 / 3, -2};
  for (int t = 0; t < 5; ++t)
    for (int h = 0; h < 4; ++h)
      for (int i = 0; i < 2; ++i) {
        q[t][h][i] = (float)(-t - 10 * h - 100 * i);
        if (h < 2) k[t][h][i] = (float)(t + 10 * h + 100 * i);
      }
  kvtrace_staging *staged = kvtrace_staging_open("staged");
  for (int begin = 0; begin < 5; begin += 2) {
    const int n = begin + 2 < 5 ? 2 : 5 - begin;
    kvtrace_staging_add(staged, 0, "q", begin, "F32", 4, n, 2, q[begin], sizeof q[0][0], sizeof q[0]);
    kvtrace_staging_add(staged, 0, "k", begin, "F32", 2, n, 2, k[begin], sizeof k[0][0], sizeof k[0]);
    kvtrace_staging_add(staged, 0, "v", begin, "F32", 2, n, 2, k[begin], sizeof k[0][0], sizeof k[0]);
  }
  kvtrace_staging_text(staged, "/@producer", "C");
  kvtrace_staging_text(staged, "/model@name", "a \"model\"\\\n");
  kvtrace_staging_text(staged, "/model@architecture", "C");
  kvtrace_staging_text(staged, "/model@dtype", "float32");
  kvtrace_staging_number(staged, "/model@softmax_scale", 1.0 / 7);
  kvtrace_staging_number(staged, "/model@logit_softcap", 0);
  kvtrace_staging_integers(staged, "/model/sliding_window", window, 1, 0);
  kvtrace_staging_numbers(staged, "/model/sinks", sinks, 1, 4);
  kvtrace_staging_text(staged, "/model/rope@style", "halves");
  kvtrace_staging_numbers(staged, "/model/rope/inv_freq", frequencies, 1, 1);
  kvtrace_staging_numbers(staged, "/model/rope/attention_scaling", scaling, 1, 0);
  kvtrace_staging_integer(staged, "/tokens@prefill", 4);
  kvtrace_staging_integers(staged, "/tokens/ids", ids, 5, 0);
  kvtrace_staging_integers(staged, "/tokens/offsets", offsets, 5, 2);
  kvtrace_staging_text(staged, "/tokens/text", "\xc3\xa4\t\"\\b");
  const int failed = kvtrace_staging_finish(staged);
  if (failed) fprintf(stderr, "%s\n", kvtrace_staging_error(staged));
  kvtrace_staging_free(staged);
  return failed ? 1 : 0;
}
"""


@pytest.fixture(scope="module", params=["c99", "c++17"])
def c_program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("c")
    language = "c" if request.param == "c99" else "c++"
    (folder / "main.c").write_text(C_PROGRAM)
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror", "-fsanitize=address,undefined"]
    command = ["g++" if language == "c++" else "gcc", "-x", language, f"-std={request.param}", *warnings,
               f"-I{ROOT / 'tools' / 'engines'}", "main.c", "-o", "program", "-lm"]  # fmt: skip
    subprocess.run(command, cwd=folder, check=True)
    return folder / "program"


def test_the_c_header_writes_the_same_format(c_program: Path, tmp_path: Path) -> None:
    (tmp_path / "staged").mkdir()
    subprocess.run([c_program], cwd=tmp_path, check=True)
    done("convert", "staged", "-o", "joined.h5", folder=tmp_path)
    done("validate", "--deep", "joined.h5", folder=tmp_path)
    trace = Trace(tmp_path / "joined.h5")
    t, h, i = np.meshgrid(np.arange(5), np.arange(4), np.arange(2), indexing="ij")
    numbers = (t + 10 * h + 100 * i).transpose(1, 0, 2)
    assert (trace.q(0) == -numbers).all() and trace.q(0).dtype == np.float32
    assert (trace.k(0) == numbers[:2]).all() and (trace.v(0) == numbers[:2]).all()
    assert (trace.model, trace.text, trace.prompt) == ('a "model"\\\n', 'ä\t"\\b', 4)
    assert trace["/model/sinks"].tolist() == [[0.5, -np.inf, 1 / 3, -2]]
    assert trace["/model@softmax_scale"] == 1 / 7 and trace["/model/rope/inv_freq"].tolist() == [[1 / 3]]
    assert trace["/tokens/offsets"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert trace["/@producer"] == "C"


def test_the_c_header_reports_a_failure(c_program: Path, tmp_path: Path) -> None:
    failed = subprocess.run([c_program], cwd=tmp_path, capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr == "staged/tensors-00000.safetensors.partial: No such file or directory\n"


Tensors = dict[str, np.ndarray]
Objects = dict[str, object]


@pytest.fixture
def parts(originals: dict[str, Path], tmp_path: Path) -> tuple[Tensors, Objects]:
    """Tensors and metadata of the fixture: T = 16, four layers, pieces of 8 tokens."""
    stage(Trace(originals["fixture"]), tmp_path / "sound", 8)
    with safe_open(tmp_path / "sound" / "header.safetensors", "np") as header:
        objects = json.loads(header.metadata()["kvtrace"])
    return load_file(tmp_path / "sound" / "tensors-00000.safetensors"), objects


def refused(tensors: Tensors, objects: Objects | str | None, tmp_path: Path, version: str | None = "1") -> str:
    """The error line of a file `a` with these parts."""
    metadata = {} if version is None else {"kvtrace_staging": version}
    if objects is not None:
        metadata["kvtrace"] = objects if isinstance(objects, str) else json.dumps(objects)
    save_file(tensors, tmp_path / "a", metadata)
    answer = kvreplay("convert", "a", "-o", "b.h5", folder=tmp_path)
    assert answer.code == 3 and answer.err.startswith("kvreplay: a") and answer.err.count("\n") == 1, answer
    assert not list(tmp_path.glob("b.h5*"))
    return answer.err.removeprefix("kvreplay: ").rstrip()


def rename(tensors: Tensors, old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


BAD_TENSORS: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda t: t.pop("layers.1.k@0"), "a:layers.1.k@8: gap: expected position 0 after the piece before it, "
                                      "found position 8"),
    (lambda t: t.pop("layers.1.v@8"), "a:layers.1.v: missing at the end: expected 16 rows (T), found 8"),
    (lambda t: rename(t, "layers.2.q@8", "layers.2.q@7"), "a:layers.2.q@7: overlap: expected position 8 after the "
                                                          "piece before it, found position 7"),
    (lambda t: rename(t, "layers.2.q@8", "layers.2.q@9"), "a:layers.2.q@9: gap: expected position 8 after the piece "
                                                          "before it, found position 9"),
    (lambda t: [t.pop("layers.1.k@0"), t.pop("layers.1.k@8")], "a:layers.1.k: missing: expected layers.1.k@0, "
                                                               "found none"),
    (lambda t: [t.pop(n) for n in list(t) if n.startswith("layers.1.")], "a: missing: expected layers.1.q@0, "
                                                                         "found none"),
    (lambda t: t.update({"layers.0.v@8": t["layers.0.v@8"][:1]}), "a:layers.0.v@8: shape: expected [2, 8, 4], as "
                                                                 "layers.0.v@0, found [1, 8, 4]"),
    (lambda t: t.update({"layers.0.v@8": t["layers.0.v@8"].astype(np.float32)}),
     "a:layers.0.v@8: dtype: expected F16, as layers.0.v@0, found F32"),
    (lambda t: t.update({"layers.0.v@8": t["layers.0.v@8"].astype(np.float64)}),
     "a:layers.0.v@8: dtype: expected F16, BF16 or F32, found F64"),
    (lambda t: t.update({"layers.0.v@8": t["layers.0.v@8"][0]}), "a:layers.0.v@8: shape: expected [Hkv, T, dv], "
                                                                "found [8, 4]"),
    (lambda t: t.update({"layers.0.v@8": t["layers.0.v@8"][:, :0]}), "a:layers.0.v@8: shape: expected [Hkv, T, dv], "
                                                                    "found [2, 0, 4]"),
    (lambda t: t.update({"layers.0.v@16": t["layers.0.v@8"]}), "a:layers.0.v: shape: expected [2, 16, 4], "
                                                              "found [2, 24, 4]"),
    (lambda t: rename(t, "layers.0.v@8", "layers.0.w@8"), "a:layers.0.w@8: name of a tensor: expected "
     "layers.LAYER.q@BEGIN, or k, v, wo, input_norm, x, found layers.0.w@8"),
    (lambda t: rename(t, "layers.0.v@8", "model.layers.0.v"), "a:model.layers.0.v: name of a tensor: expected "
     "layers.LAYER.q@BEGIN, or k, v, wo, input_norm, x, found model.layers.0.v"),
    (lambda t: rename(t, "layers.0.v@8", "layers.70000.v@8"), "a:layers.70000.v@8: name of a tensor: expected "
     "layers.LAYER.q@BEGIN, or k, v, wo, input_norm, x, found layers.70000.v@8"),
    (lambda t: t.clear(), "a: tensors: expected layers.0.q@0 and others, found none"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), BAD_TENSORS)
def test_bad_tensors(change: Callable, said: str, parts: tuple[Tensors, Objects], tmp_path: Path) -> None:
    tensors, objects = parts
    change(tensors)
    assert refused(tensors, objects, tmp_path) == said


BAD_OBJECTS: list[tuple[str, object, str]] = [
    ("/model@softmax_scale", None, "a:/model@softmax_scale: missing in the metadata: expected float "
                                   "(z = softmax_scale * <q,k>), found none"),
    ("/model@softmax_scale", "1", 'a:/model@softmax_scale: type: expected float, found "1"'),
    ("/model@softmax_scale", 0, "a:/model@softmax_scale: value: expected above 0, found 0"),
    ("/model@softmax", 1, "a:__metadata__: unknown object /model@softmax: did you mean /model@softmax_scale?"),
    ("/model@n_layers", 3, "a:/model@n_layers: value: expected 4, the layers of the tensors, found 3"),
    ("/model@dtype", "float64", 'a:/model@dtype: value: expected float16 or bfloat16 or float32, found "float64"'),
    ("/model/sliding_window", [0, 0], "a:/model/sliding_window: shape: expected [4], found [2]"),
    ("/model/sliding_window", [0, 0, 0, 0.5], "a:/model/sliding_window: type: expected int32, found 0.5"),
    ("/model/sliding_window", [0, 0, 0, 1 << 40], "a:/model/sliding_window: type: expected int32, "
                                                  "found 1099511627776"),
    ("/model/rope/inv_freq", [[1], [1, 2], [1], [1]], "a:/model/rope/inv_freq: type: expected rows of one length, "
                                                      "found [1,2]"),
    ("/model/rope@style", None, "a:/model/rope@style: missing in the metadata: expected string (which components "
                                "form a pair: (i, i+r) or (2i, 2i+1)), found none"),
    ("/tokens/ids", list(range(15)), "a:/tokens/offsets: shape: expected [15, 2], found [16, 2]"),
    ("/tokens@prefill", 17, "a:/tokens@prefill: value: expected at most 16 (T), found 17"),
    ("/spans", [{"name": "a", "kind": "b", "begin": 3}], "a:/spans: type: expected name, kind, begin and end of a "
                                                         'span, found {"begin":3,"kind":"b","name":"a"}'),
    ("/layers/001/q_positions", [0, 1], "a:layers.1.q@0: rows: expected 2 positions of q_positions, "
                                        "found position 2"),
    ("/layers/001/q_positions", [*range(15), 16], "a:/layers/001/q_positions: value: expected below 16 (T), "
                                                  "found 16 at element 15"),
    ("/model@value_is_key", 4, "a:layers.0.v: present: expected none, because of /model@value_is_key, "
                               "found layers.0.v@0"),
]  # fmt: skip


@pytest.mark.parametrize(("object_path", "value", "said"), BAD_OBJECTS)
def test_bad_metadata(
    object_path: str, value: object, said: str, parts: tuple[Tensors, Objects], tmp_path: Path
) -> None:
    tensors, objects = parts
    objects.pop(object_path, None)
    if value is not None:
        objects[object_path] = value
    assert refused(tensors, objects, tmp_path) == said


def test_missing_metadata(parts: tuple[Tensors, Objects], tmp_path: Path) -> None:
    """Such as those of a writer that was interrupted."""
    tensors, objects = parts
    none = "a: no metadata: expected kvtrace in a file; it is written last, found none"
    assert refused(tensors, None, tmp_path) == none
    assert refused(tensors, objects, tmp_path, "2") == "a:__metadata__: kvtrace_staging: expected 1, found 2"
    assert refused(tensors, objects, tmp_path, None) == "a:__metadata__: kvtrace_staging: expected 1, found none"
    assert refused(tensors, "{", tmp_path) == "a:__metadata__: kvtrace: expected a JSON object, found other text"


def test_files_that_contradict_each_other(parts: tuple[Tensors, Objects], tmp_path: Path) -> None:
    tensors, objects = parts
    for name, scale in (("a", 0.5), ("c", 0.25)):
        metadata = {"kvtrace_staging": "1", "kvtrace": json.dumps({**objects, "/model@softmax_scale": scale})}
        save_file(tensors if name == "a" else {}, tmp_path / name, metadata)
    answer = kvreplay("convert", "a", "c", "-o", "b.h5", folder=tmp_path)
    said = "c:__metadata__: /model@softmax_scale: expected the value that another file has, found another value"
    assert (answer.code, answer.err) == (3, f"kvreplay: {said}\n")
    answer = kvreplay("convert", "a", "a", "-o", "b.h5", folder=tmp_path)
    assert answer.code == 3 and ": overlap: " in answer.err


def header_of(sound: bytes) -> tuple[dict, bytes]:
    length = struct.unpack("<Q", sound[:8])[0]
    return json.loads(sound[8 : 8 + length]), sound[8 + length :]


def file_of(header: dict, elements: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + elements


def with_entry(sound: bytes, **fields: object) -> bytes:
    header, elements = header_of(sound)
    header["layers.0.k@0"] = {**header["layers.0.k@0"], **fields}
    return file_of(header, elements)


BAD_FILES: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda b: b[:-1], "data_offsets"),
    (lambda b: b + b"x", "length: expected "),
    (lambda b: b[:200], "length of the header: expected at most 192 bytes, found "),
    (lambda b: struct.pack("<Q", 1 << 62) + b[8:], "length of the header: expected at most "),
    (lambda b: b[:8] + b"{" + b"[" * 100 + b[109:], "header: expected a JSON object, found other text"),
    (lambda b: with_entry(b, dtype="F8"), ":layers.0.k@0: dtype: expected F16, BF16 or F32, found F8"),
    (lambda b: with_entry(b, shape=[2, 9, 4]), ":layers.0.k@0: data_offsets: expected the bytes of F16 [2, 9, 4], "),
    (lambda b: with_entry(b, shape=[1 << 62, 1 << 62, 4]), ":layers.0.k@0: data_offsets: expected the bytes of F16 "),
    (lambda b: with_entry(b, shape=[-2, 8, 4]), ":layers.0.k@0: header: expected dtype, shape and data_offsets of "),
    (lambda b: with_entry(b, data_offsets=[0]), ":layers.0.k@0: header: expected dtype, shape and data_offsets of "),
    (lambda b: with_entry(b, data_offsets=[8, 0]), ":layers.0.k@0: data_offsets: expected ascending, at most "),
    (lambda b: with_entry(b, data_offsets=[1, 129]), "data_offsets: expected "),
    (lambda b: with_entry(b, data_offsets=[1 << 63, (1 << 63) + 128]), "data_offsets: expected ascending, at most "),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "said"), BAD_FILES)
def test_bad_files(damage: Callable[[bytes], bytes], said: str, parts: tuple[Tensors, Objects], tmp_path: Path) -> None:
    tensors, objects = parts
    save_file(tensors, tmp_path / "sound.x", {"kvtrace_staging": "1", "kvtrace": json.dumps(objects)})
    (tmp_path / "a").write_bytes(damage((tmp_path / "sound.x").read_bytes()))
    answer = kvreplay("convert", "a", "-o", "b.h5", folder=tmp_path)
    assert answer.code == 3 and answer.err.startswith("kvreplay: a:") and said in answer.err, answer
    assert answer.err.count("\n") == 1 and not list(tmp_path.glob("b.h5*"))


def test_damaged_files_are_refused_or_read(parts: tuple[Tensors, Objects], tmp_path: Path) -> None:
    """Bytes of the header are changed, removed and repeated, and the file is cut."""
    tensors, objects = parts
    save_file(tensors, tmp_path / "sound.x", {"kvtrace_staging": "1", "kvtrace": json.dumps(objects)})
    sound = (tmp_path / "sound.x").read_bytes()
    header_end = 8 + struct.unpack("<Q", sound[:8])[0]
    chance = random.Random(1)
    codes = set()
    for _ in range(200):
        damaged = bytearray(sound)
        for _ in range(chance.choice((1, 1, 2, 5))):
            at = chance.randrange(min(header_end, len(damaged)))
            kind = chance.randrange(4)
            if kind == 0:
                damaged[at] = chance.choice(b'0123456789[]{}":,@.x\x00\xff')
            elif kind == 1:
                damaged[at] = chance.choice(b"0123456789")
            elif kind == 2:
                size = chance.randrange(1, 40)
                damaged[at : at + size] = damaged[max(0, at - size) : at]
            else:
                del damaged[chance.randrange(1, len(damaged) + 1) :]
        (tmp_path / "a").write_bytes(damaged)
        answer = kvreplay("convert", "a", "-o", "b.h5", "--force", folder=tmp_path)
        codes.add(answer.code)
        assert answer.code in (0, 3) and answer.err.count("\n") == (answer.code == 3), (answer, bytes(damaged))
    assert codes == {0, 3}


def test_the_writer_wants_an_empty_folder(tmp_path: Path) -> None:
    with StagingWriter(tmp_path) as staged:
        staged.add(0, "k", 0, np.zeros((1, 2, 3), np.float16))
        with pytest.raises(Error, match="layers.0.k@0: exists: expected another position, found a piece of that name"):
            staged.add(0, "k", 0, np.zeros((1, 2, 3), np.float16))
    with pytest.raises(Error, match="exists: expected an empty folder, found files of safetensors"):
        StagingWriter(tmp_path)


def test_an_interrupted_writer_leaves_no_metadata(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), StagingWriter(tmp_path / "staged", 1) as staged:
        staged.add(0, "q", 0, np.zeros((1, 2, 3), np.float16))
        raise ZeroDivisionError
    answer = kvreplay("convert", "staged", "-o", "b.h5", folder=tmp_path)
    said = "staged: no metadata: expected kvtrace in a file; it is written last, found none"
    assert (answer.code, answer.err) == (3, f"kvreplay: {said}\n")


def test_convert_says_what_it_expects(originals: dict[str, Path], tmp_path: Path) -> None:
    answer = kvreplay("convert", originals["fixture"], "b.h5", "-o", "c.h5", folder=tmp_path)
    said = "convert: several inputs: expected one trace, or files of the staging format, found b.h5"
    assert (answer.code, answer.err) == (2, f"kvreplay: {said}\n")
    answer = kvreplay("convert", ".", "-o", "c.h5", folder=tmp_path)
    said = ".: folder: expected files NAME.safetensors, found none"
    assert (answer.code, answer.err) == (3, f"kvreplay: {said}\n")


def stage_zeros(folder: Path) -> None:
    """64 MiB of one layer."""
    with StagingWriter(folder) as staged:
        for name in "qkv":
            for begin in range(0, 1 << 14, 1 << 12):
                staged.add(0, name, begin, np.zeros((8, 1 << 12, 80), np.float16))
        staged.attributes("/", producer="test")
        staged.attributes("/model", name="zeros", architecture="Z", dtype="float16", softmax_scale=1, logit_softcap=0)
        staged.dataset("/model/sliding_window", [0])
        staged.attributes("/tokens", prefill=1 << 14)
        staged.dataset("/tokens/ids", np.zeros(1 << 14, np.int32))


def test_convert_of_pieces_can_be_interrupted_and_finds_the_disk_full(tmp_path: Path) -> None:
    stage_zeros(tmp_path / "staged")
    limited = f"ulimit -f 8192; exec {PROGRAM} convert staged -o new.h5"
    answer = subprocess.run(["bash", "-c", limited], cwd=tmp_path, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (5, "kvreplay: new.h5.partial: disk full\n")
    process = start("convert", "staged", "-o", "new.h5", folder=tmp_path)
    while not (tmp_path / "new.h5.partial").exists():
        time.sleep(0.0005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.endswith(".safetensors: interrupted\n"), err
    assert [path.name for path in tmp_path.iterdir()] == ["staged"]
