"""Is a trace of arrays in memory the trace that a file of the same arrays is?"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from program import kvreplay

import kvreplay as kv

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))

import random_traces  # noqa: E402
from write_trace import Content, write_trace  # noqa: E402

POLICIES = [
    "snapkv:window=4,kernel=3",
    "h2o",
    "streaming-llm:positions=cache",
    "kivi:group=8,residual=16",
    "ada-kv:window=4",
]
METRICS = "attention_recall,output_error,kv_bytes,jaccard_adjacent,redundancy_key"


def arguments(path: Path) -> dict:
    """What `kv.from_arrays` is given for the trace of a file: its own mapped tensors, and what h5py reads."""
    trace = kv.open(path)
    layers = range(trace.layers)
    positions = [trace.query_positions(layer) for layer in layers]
    with h5py.File(path) as file:
        model = file["model"]
        text = {name: model.attrs[name].decode() for name in ("name", "architecture", "dtype")}
        given = {
            "q": [trace.q(layer) for layer in layers],
            "k": [trace.k(layer) for layer in layers],
            "v": [trace.v(layer) for layer in layers],
            "prompt": trace.prompt,
            "ids": file["tokens/ids"][()],
            "spans": trace.spans,
            "softmax_scale": model.attrs["softmax_scale"],
            "softcap": model.attrs["logit_softcap"],
            "sliding_window": model["sliding_window"][()],
            "layer_index": model["layer_index"][()],
            "query_positions": [one if len(one) else None for one in positions],
            "model": text["name"],
            "architecture": text["architecture"],
            "dtype": text["dtype"],
            "synthetic": True,
            "name": path.stem,
        }
        if "rope" in model:
            rope = model["rope"]
            given["rope"] = kv.Rope(
                rope["inv_freq"][()], rope["attention_scaling"][()], style=rope.attrs["style"].decode()
            )
        if "tokens/text" in file:
            given |= {"text": trace.text, "offsets": trace.offsets}
        if "layers/000/wo" in file:
            given["wo"] = [file[f"layers/{layer:03}/wo"][()] for layer in layers]
    return given


def odd() -> Content:
    """All that a trace can have at once."""
    content = random_traces.normal(
        6, 3, 6, 2, 16, 70, 80, dtype="bfloat16", softcap=3.0, windows=[0, 9, 0], layer_index=[1, 2, 7], rope=True,
        interleaved=True, rotated=0.5, unrotated_layers=(1,), spans={"needle": ("needle", 20, 26)},
    )  # fmt: skip
    content.q_positions = np.arange(30, 80)
    content.q = [queries[:, content.q_positions] for queries in content.q]
    generator = np.random.default_rng(1)
    content.wo = [generator.normal(size=(24, 96)) * 0.1 for _ in range(3)]
    return content


@pytest.fixture(scope="module", params=["small", "fixture", "sliding", "odd"])
def file(request: pytest.FixtureRequest, traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param != "odd":
        return traces / f"{request.param}.h5"
    path = tmp_path_factory.mktemp("odd") / "odd.h5"
    content = odd()
    wo, content.wo = content.wo, None
    write_trace(path, content)
    with h5py.File(path, "r+") as made:  # in float32, which h5py reads as it is
        for layer, projection in enumerate(wo):
            made[f"layers/{layer:03}"].create_dataset("wo", data=projection.astype(np.float32), track_times=False)
    return path


def test_the_trace_is_that_of_the_file(file: Path) -> None:
    opened, made = kv.open(file), kv.from_arrays(**arguments(file))
    assert made.hash == opened.hash
    assert made.in_memory and not opened.in_memory
    facts = "name model synthetic dtype layers query_heads kv_heads head_dim prompt tokens text spans".split()
    assert [getattr(made, one) for one in facts] == [getattr(opened, one) for one in facts]
    assert (made.ids == opened.ids).all() and (made.offsets == opened.offsets).all()
    assert repr(made) == repr(opened)
    for layer in range(made.layers):
        assert (made.query_positions(layer) == opened.query_positions(layer)).all()
        for name in "qkv":
            mine, theirs = (getattr(trace, name)(layer) for trace in (made, opened))
            assert mine.dtype == theirs.dtype and (mine == theirs).all()


def test_observables_are_those_of_the_file(file: Path) -> None:
    opened, made = kv.open(file), kv.from_arrays(**arguments(file))
    for name in ("window_attention", "key_norms"):
        mine, theirs = (getattr(trace.layer(0), name)(4) for trace in (made, opened))
        assert (mine == theirs).all()


def test_results_are_those_of_the_file_bit_by_bit(file: Path) -> None:
    made = kv.from_arrays(**arguments(file))
    few = POLICIES[:1] if file.stem == "odd" else POLICIES  # which lacks queries, and RoPE in a layer
    runs = [
        kv.replay(trace, few, [0.2, 9], metrics=METRICS, seed=3, progress=False, detail="head")
        for trace in (made, file)
    ]
    assert len(runs[0].results) > 50 and runs[0].results.equals(runs[1].results)
    tables = [(run.folder / "results.csv").read_bytes() for run in runs]
    assert tables[0] == tables[1]
    assert kvreplay("diff", *(run.folder for run in runs), folder=file.parent).out == "equal\n"


def test_what_takes_a_trace_takes_it(small: Path) -> None:
    made, opened = kv.from_arrays(**arguments(small)), kv.open(small)
    sets = [[range(0, 150, 5)] * made.kv_heads] * made.layers
    mine, theirs = (kv.measure(trace, sets, metrics="output_error", progress=False) for trace in (made, opened))
    assert mine.results.equals(theirs.results)
    mine, theirs = (kv.regret(trace, "snapkv", 0.1) for trace in (made, opened))
    assert mine.equals(theirs)


def test_several_traces_with_and_without_a_file(small: Path, traces: Path) -> None:
    made = kv.from_arrays(**arguments(traces / "fixture.h5"))
    run = kv.replay(iter([made, small]), "local", 4, metrics="kv_bytes", progress=False)
    assert list(dict.fromkeys(run.cells.trace)) == ["fixture", "small"]
    with pytest.raises(kv.Error, match="another trace has the same name"):
        kv.replay([made, traces / "fixture.h5"], "local", 4, progress=False)


def test_nothing_beside_a_trace_in_memory_is_read_or_written(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").write_text("a file of the trace's name")
    made = kv.from_arrays(**arguments(small))
    assert kv.replay(made, "h2o", 9, metrics="kv_bytes", progress=False).failed == []
    with pytest.warns(UserWarning, match="memory:/small.obs.h5"):
        kv.replay(made, "h2o", 9, metrics="kv_bytes", observables="keep", progress=False)
    assert [one.name for one in tmp_path.iterdir()] == ["small"]


def test_arrays_are_not_copied_where_they_lie_as_they_should(small: Path) -> None:
    given = arguments(small)
    written = given["k"][1].copy()
    given["k"][1] = written
    given["v"][1] = given["v"][1].copy()[::-1][::-1]  # the same elements, but another stride on the way
    given["q"][1] = np.asfortranarray(given["q"][1])
    given["q"][2] = given["q"][2].astype(">f4")
    made = kv.from_arrays(**given)
    assert made.hash == kv.open(small).hash
    shared = [np.shares_memory(getattr(made, name)(layer), given[name][layer]) for name in "qkv" for layer in range(3)]
    assert shared == [True, False, False] + [True] * 6
    assert not made.k(1).flags.writeable and written.flags.writeable


def test_a_tensor_outlives_trace_and_arguments(small: Path) -> None:
    given = arguments(small)
    given["k"] = [one.copy() for one in given["k"]]
    keys = kv.from_arrays(**given).k(1)
    del given
    gc.collect()
    assert (keys == kv.open(small).k(1)).all()


def test_tensors_of_pytorch(traces: Path) -> None:
    torch = pytest.importorskip("torch")
    given = arguments(traces / "sliding.h5")
    for kind, stored in (
        (torch.bfloat16, ml_dtypes.bfloat16),
        (torch.float16, np.float16),
        (torch.float32, np.float32),
    ):
        ours = {name: [torch.from_numpy(one.astype(np.float32)).to(kind) for one in given[name]] for name in "qkv"}
        arrays = {name: [one.astype(np.float32).astype(stored) for one in given[name]] for name in "qkv"}
        ours["k"][0].requires_grad_()
        made = kv.from_arrays(**given | ours)
        assert made.hash == kv.from_arrays(**given | arrays).hash
        assert made.k(0).dtype == stored
        assert made.k(0).ctypes.data == ours["k"][0].data_ptr()  # not copied
    with pytest.raises(
        kv.Error, match=r"v\[2\]: device: expected a tensor on the CPU, as .cpu\(\) gives it, found meta"
    ):
        kv.from_arrays(**given | {"v": [*given["v"][:2], torch.zeros(2, 162, 16, device="meta")]})


def test_what_is_left_out_has_the_default(small: Path) -> None:
    trace = kv.open(small)
    q, k, v = ([getattr(trace, name)(layer) for layer in range(3)] for name in "qkv")
    made = kv.from_arrays(q, k, v, prompt=150)
    said = kv.from_arrays(
        q, k, v, prompt=150, ids=np.zeros(162, int), softmax_scale=0.25, softcap=0, sliding_window=[0, 0, 0],
        query_positions=range(162), layer_index=[0, 1, 2], dtype="float32", model="arrays", architecture="arrays",
        name="other",
    )  # fmt: skip
    assert (made.name, made.dtype, made.model, made.spans, made.text) == ("arrays", "float32", "arrays", [], "")
    assert made.hash != said.hash  # which says what positions its queries have
    assert kv.from_arrays(q, k, v, prompt=150, softmax_scale=0.25, name="other").hash == made.hash
    mine, theirs = (kv.replay(one, "snapkv", 0.1, metrics="output_error", progress=False) for one in (made, said))
    assert (mine.results["value"] == theirs.results["value"]).all()


def test_frequencies_for_all_layers_at_once(small: Path) -> None:
    given = arguments(small)
    inv_freq = given["rope"].inv_freq[0]
    assert kv.from_arrays(**given | {"rope": kv.Rope(inv_freq)}).hash == kv.open(small).hash


Change = Callable[[dict], None]


def changed(argument: str, layer: int | None, to: object) -> Change:
    def change(given: dict) -> None:
        if layer is None:
            given[argument] = to
        else:
            given[argument] = [to if place == layer else one for place, one in enumerate(given[argument])]

    return change


def with_number(argument: str, layer: int, place: tuple[int, int, int], number: float) -> Change:
    def change(given: dict) -> None:
        given[argument][layer] = given[argument][layer].copy()
        given[argument][layer][place] = number

    return change


ZEROS = np.zeros((2, 162, 16), np.float32)
REFUSED = {
    "k[1]: number: expected finite numbers, found nan at head 1, position 3, component 7":
        with_number("k", 1, (1, 3, 7), np.nan),
    "q[2]: number: expected finite numbers, found -inf at head 5, position 161, component 0":
        with_number("q", 2, (5, 161, 0), -np.inf),
    "v[1]: shape: expected [2, 162, 16], found [2, 5, 16]": changed("v", 1, ZEROS[:, :5]),
    "k[0]: shape: expected [Hkv, T, d], found [162, 16]": changed("k", 0, ZEROS[0]),
    "q[0]: shape: expected [Hq, Tq, d], found [1, 2, 162, 16]": changed("q", 0, ZEROS[None]),
    "q, k: value: expected a divisor of 5 (Hq), found 2 at element 3": changed(
        "q", 1, np.concatenate([ZEROS, ZEROS, ZEROS[:1]])
    ),
    "v[2]: type: expected float16, bfloat16 or float32, found float64": changed("v", 2, ZEROS.astype(float)),
    "v[2]: type: expected float16, bfloat16 or float32, found object": changed("v", 2, None),
    "v: layers: expected 3, found 2": changed("v", None, [ZEROS, ZEROS]),
    "k: layers: expected at least 1, found 0": changed("k", None, []),
    "prompt: value: expected at most 162 (T), found 163": changed("prompt", None, 163),
    "prompt: value: expected at least 1, found 0": changed("prompt", None, 0),
    "prompt: type: expected a whole number, found float": changed("prompt", None, 150.0),
    "ids: shape: expected [162], found [3]": changed("ids", None, [1, 2, 3]),
    "ids: value: expected at least 0, found -1 at element 0": changed("ids", None, np.full(162, -1)),
    "ids: value: expected at most 2147483647, found 2147483648": changed("ids", None, np.full(162, 2**31)),
    "ids: type: expected whole numbers, found float64": changed("ids", None, np.zeros(162)),
    "text: alone: expected offsets beside it, found none": changed("offsets", None, None),
    "offsets: alone: expected text beside it, found none": changed("text", None, None),
    "offsets: range: expected begin <= end <= 3 characters, found [0, 4) at token 0":
        lambda given: given.update(text="abc", offsets=np.tile([0, 4], (162, 1))),
    "text: value: expected UTF-8, found byte 0xed at 1": changed("text", None, "a\ud800"),
    'spans: range: expected 0 <= begin < end <= 162 (T), found [3, 163) in span 1 "b"':
        changed("spans", None, [("a", "needle", 0, 2), ("b", "needle", 3, 163)]),
    "spans: name: expected UTF-8, at least one character, found none in span 0":
        changed("spans", None, [("", "needle", 0, 2)]),
    "spans[0]: kind: expected (name, kind, begin, end), found ('a', 1, 2)": changed("spans", None, [("a", 1, 2)]),
    "softmax_scale: value: expected above 0, found 0": changed("softmax_scale", None, 0),
    "softmax_scale: value: expected a finite number, found nan": changed("softmax_scale", None, np.nan),
    "softcap: value: expected at least 0, found -1": changed("softcap", None, -1),
    "softcap: type: expected a number, found 'much'": changed("softcap", None, "much"),
    "dtype: value: expected float16 or bfloat16 or float32, found \"float64\"": changed("dtype", None, "float64"),
    "sliding_window: shape: expected [3], found [2]": changed("sliding_window", None, [0, 5]),
    "sliding_window: value: expected at least 0, found -5 at element 0": changed("sliding_window", None, -5),
    "layer_index: order: expected strictly ascending, found 1 after 1 at element 1": changed("layer_index", None, 1),
    "rope.style: value: expected halves or interleaved, found \"other\"":
        changed("rope", None, kv.Rope(np.ones(8), style="other")),
    "rope.inv_freq: shape: expected at most 8 pairs (offset + 2r <= d), found 9":
        changed("rope", None, kv.Rope(np.ones(9))),
    "rope.inv_freq: shape: expected [3, r] or [r], found []": changed("rope", None, kv.Rope(1.0)),
    "rope.inv_freq: value: expected at most pi radians a position, found 4":
        changed("rope", None, kv.Rope(np.full(8, 4.0))),
    "rope.inv_freq: value: expected at most pi radians a position, found -4":
        changed("rope", None, kv.Rope(np.full(8, -4.0))),
    "rope.attention_scaling: value: expected above 0, found 0 at element 0":
        changed("rope", None, kv.Rope(np.ones(8), 0.0)),
    "query_positions[1]: order: expected strictly ascending, found 3 after 3 at element 1":
        changed("query_positions", None, [None, [3, 3], None]),
    "query_positions[1]: value: expected below 162 (T), found 162 at element 0":
        changed("query_positions", None, [None, [162], None]),
    "q[1]: shape: expected [6, 2, 16], found [6, 162, 16]": changed("query_positions", None, [None, [3, 5], None]),
    "query_positions: layers: expected 3, found 1": changed("query_positions", None, [[3, 5]]),
    "wo[0]: shape: expected [hidden, 96], found [96]": changed("wo", None, [np.zeros(96, np.float32)] * 3),
    "wo[1]: shape: expected [4, 96], found [5, 96]":
        changed("wo", None, [np.zeros((4 + layer, 96), np.float32) for layer in range(3)]),
    "name: value: expected a text without / * ? [, found 'a/b'": changed("name", None, "a/b"),
    "k: value: expected a divisor of 6 (Hq), found 4":
        lambda given: given.update({one: [np.zeros((4, 162, 16), np.float32)] * 3 for one in "kv"}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_wrong_is_said_in_one_line_with_the_argument(message: str, small: Path) -> None:
    given = arguments(small)
    REFUSED[message](given)
    with pytest.raises(kv.Error) as refused:
        kv.from_arrays(**given)
    assert str(refused.value) == message


def bad_files(small: Path, folder: Path) -> dict[Path, tuple[str, Change]]:
    """Files with one violation each, and the same violation in arguments: its object, and the change."""

    def spoil(name: str, change: Callable[[h5py.File], None]) -> Path:
        path = folder / name
        path.write_bytes(small.read_bytes())
        with h5py.File(path, "r+") as file:
            change(file)
        return path

    def set_nan(file: h5py.File) -> None:
        file["layers/001/k"][1, 3, 7] = np.nan
        del file["layers/001/k"].attrs["xxh3"]

    def set_scale(file: h5py.File) -> None:
        file["model"].attrs["softmax_scale"] = np.float64(-1)

    def set_prompt(file: h5py.File) -> None:
        file["tokens"].attrs["prefill"] = np.int64(163)

    def set_ids(file: h5py.File) -> None:
        file["tokens/ids"][4] = -2

    ids = kv.open(small).ids.copy()
    ids[4] = -2
    return {
        spoil("nan.h5", set_nan): ("k[1]", with_number("k", 1, (1, 3, 7), np.nan)),
        spoil("scale.h5", set_scale): ("softmax_scale", changed("softmax_scale", None, -1.0)),
        spoil("prompt.h5", set_prompt): ("prompt", changed("prompt", None, 163)),
        spoil("ids.h5", set_ids): ("ids", changed("ids", None, ids)),
    }


def test_the_words_are_those_of_the_validator(small: Path, tmp_path: Path) -> None:
    for path, (argument, change) in bad_files(small, tmp_path).items():
        answer = kvreplay("validate", "--deep", path, folder=tmp_path)
        given = arguments(small)
        change(given)
        with pytest.raises(kv.Error) as refused:
            kv.from_arrays(**given)
        where, rest = str(refused.value).split(": ", 1)
        assert where == argument and rest in answer.out + answer.err, (answer, rest)
        assert refused.value.exit_code == 3 and answer.code in (1, 3)


def test_keys_from_before_rope_are_refused() -> None:
    generator = np.random.default_rng(2)
    shape = (1, 200, 16)
    keys = (generator.normal(size=(1, 1, 16)) + 0.1 * generator.normal(size=shape)).astype(np.float32)
    queries, values = (generator.normal(size=shape).astype(np.float32) for _ in range(2))
    rope = kv.Rope(10000.0 ** (-np.arange(8) / 8))
    with pytest.raises(kv.Error, match=r"^k\[0\]: RoPE: expected keys after RoPE"):
        kv.from_arrays([queries], [keys], [values], prompt=180, rope=rope)


def test_a_run_says_that_its_trace_was_in_memory(small: Path) -> None:
    run = kv.replay(kv.from_arrays(**arguments(small)), "local", 9, metrics="kv_bytes", progress=False)
    with pytest.raises(kv.Error, match="trace small was in memory"):
        run.captured("small")


@pytest.mark.parametrize(
    "options",
    [
        ["--sink-logits", "--chunk", "80,0"],
        ["--value-is-key", "--value-dim", "40", "--kv-heads", "1"],
        ["--value-dim", "24"],
        ["--head-dim", "24,40", "--value-dim", "56,16"],
        ["--query-heads", "4,6", "--kv-heads", "2,3"],
        ["--query-heads", "4,6", "--kv-source", "0,0"],
        ["--kv-heads", "2,4", "--query-heads", "4,4", "--visible", "5,4"],
    ],
    ids="_".join,
)
def test_objects_of_version_2(options: list[str], tmp_path: Path) -> None:
    """The hash of the file; layers of different shape are those of the arrays."""
    words = ["synth", "gaussian", "--layers", "2", "--prompt", "90", "--continuation", "6", *options, "-o", "t.h5"]
    assert kvreplay(*words, folder=tmp_path).code == 0
    trace = kv.open(tmp_path / "t.h5")
    frequencies, layers = trace["/model/rope/inv_freq"], range(2)
    if "/model/rope/pairs" in trace:
        frequencies = [row[:pairs] for row, pairs in zip(frequencies, trace["/model/rope/pairs"], strict=True)]
    latent = int(trace["/model@value_is_key"]) if "/model@value_is_key" in trace else 0
    stored = {name: [f"/layers/00{layer}/{name}" for layer in layers] for name in ("k", "v", "visible")}
    made = kv.from_arrays(
        [trace.q(layer) for layer in layers],
        [trace[path] if path in trace else None for path in stored["k"]],
        None if latent else [trace[path] if path in trace else None for path in stored["v"]],
        prompt=trace.prompt,
        ids=trace.ids,
        text=trace.text,
        offsets=trace.offsets,
        spans=trace.spans,
        rope=kv.Rope(frequencies),
        softmax_scale=trace["/model@softmax_scale"],
        sinks=trace["/model/sinks"] if "/model/sinks" in trace else None,
        chunk=trace["/model/chunk"] if "/model/chunk" in trace else 0,
        value_is_key=latent,
        kv_source=trace["/model/kv_source"] if "/model/kv_source" in trace else None,
        visible=[trace[path] if path in trace else None for path in stored["visible"]],
        visible_block=4,
        model=trace["/model@name"],
        architecture=trace["/model@architecture"],
        synthetic=True,
        name="t",
    )
    assert made["/@version"] == 2 and made.hash == trace.hash
    policies = ["h2o", "native"] if "--visible" in options else ["h2o", "streaming-llm"]
    runs = [
        kv.replay(one, policies, 20, metrics="attention_recall,output_error", detail="head") for one in (made, trace)
    ]
    assert len(runs[0].results) > 8 and runs[0].results.equals(runs[1].results)


def test_layers_that_read_the_keys_of_another(tmp_path: Path) -> None:
    """Each layer has its own queries and the arrays of its source; none of them is copied."""
    words = ["synth", "gaussian", "--layers", "3", "--kv-source", "0,0,2", "-o", "t.h5"]
    assert kvreplay(*words, folder=tmp_path).code == 0
    trace = kv.open(tmp_path / "t.h5")
    with h5py.File(tmp_path / "t.h5") as file:
        for layer, source in enumerate([0, 0, 2]):
            assert (trace.q(layer).view(np.uint16) == file[f"layers/00{layer}/q"][()].view(np.uint16)).all()
            for name in "kv":
                array = getattr(trace, name)(layer)
                assert (array.view(np.uint16) == file[f"layers/00{source}/{name}"][()].view(np.uint16)).all()
                assert np.shares_memory(array, getattr(trace, name)(source))
            assert np.shares_memory(trace.q(layer), trace.q(layer))
    q, k, v = ([getattr(trace, name)(layer) for layer in range(3)] for name in "qkv")
    with pytest.raises(
        kv.Error, match=r"^k\[1\]: array: expected None, because layer 0 has them \(kv_source\), found an a"
    ):
        kv.from_arrays(q, k, v, prompt=trace.prompt, kv_source=[0, 0, 2])
    with pytest.raises(
        kv.Error, match=r"^kv_source\[1\]: value: expected 1 or an earlier layer with keys and values, fo"
    ):
        kv.from_arrays(q, k, v, prompt=trace.prompt, kv_source=[0, 2, 2])
    every = np.zeros((trace.kv_heads, trace.tokens, 2), np.int32)
    with pytest.raises(kv.Error, match=r"^visible\[0\]: units of a query: expected at least one, ascending, at most 0"):
        kv.from_arrays(q, k, v, prompt=trace.prompt, visible=[every, None, None])
    with pytest.raises(kv.Error, match=r"^visible\[2\]: shape: expected \[\d+, \d+, \w+\], found \[1, 3, 2\]"):
        kv.from_arrays(q, k, v, prompt=trace.prompt, visible=[None, None, every[:1, :3]])
