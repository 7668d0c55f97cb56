"""Is a policy that was compiled apart replayed like any other, and a file that cannot be meant refused?"""

from __future__ import annotations

import csv
import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import xxhash
from program import PROGRAM, WITH_PYTHON, done, kvreplay
from watched import watching

from kvreplay.plot.command import main as plot
from kvreplay.report.command import main as report
from kvreplay.results import Run

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "traces" / "smollm2-135m-needle.h5"
FEW = ["--metrics", "attention_recall,kv_l1_loss"]
INPUT, CAPABILITY = 3, 4


def replay(folder: Path, *words: str | Path, out: str = "out") -> dict:
    return json.loads(done("replay", TRACE, *words, *FEW, "-o", out, "--json", folder=folder))


def about(folder: Path, out: str = "out") -> dict:
    return json.loads((folder / out / "run.json").read_text())


def states(run: dict) -> dict[tuple[str, str], str]:
    return {(cell["policy"], cell["budget"]): cell["state"] for cell in run["cells"]}


def cell_id(cell: dict, run: dict, source: str = "") -> str:
    """As analysis/run.h has it."""
    [trace] = run["inputs"]
    layers = ",".join(map(str, range(trace["treated_layers"])))
    lines = ["kvreplay cell", f"numerics={run['numerics']}", f"trace={trace['trace_hash']}", f"policy={cell['policy']}"]
    lines += [f"params={cell['params']}", f"budget={cell['budget_tokens']}", f"boundary={trace['prompt']}"]
    lines += [f"eval={run['options']['eval']}", f"layers={layers}", f"seed={run['seed']}"]
    lines += [f"backend={run['backend']['name']}", *([f"source={source}"] if source else [])]
    return xxhash.xxh3_128_hexdigest("".join(f"{line}\n" for line in lines).encode())[:16]


def copied(file: Path, folder: Path, name: str, changed: Callable[[bytes], bytes] = lambda data: data) -> Path:
    data = changed(file.read_bytes())
    (folder / name).write_bytes(data)
    return folder / name


def test_a_plugin_is_replayed_beside_what_is_built_in(plugins: Path, tmp_path: Path) -> None:
    mine = plugins / "mine.so"
    alone = {
        cell["policy"]: cell["cell"] for cell in replay(tmp_path, "-p", "snapkv", "-b", "0.1", out="alone")["cells"]
    }
    words = ["--plugin", mine, "-p", "mine,snapkv:window=16,pool=none", "-b", "0.1"]
    table = done("replay", TRACE, *words, *FEW, "-o", "out", folder=tmp_path)
    [row] = [line.split() for line in table.splitlines() if line.startswith("mine ")]
    assert row[:2] == ["mine", "48.0"]
    assert "self-check full error 0 | budget ok | identities ok | oracle bound ok" in table

    run = about(tmp_path)
    source = {"path": str(mine), "hash": xxhash.xxh3_128_hexdigest(mine.read_bytes())}
    assert {policy["name"]: policy.get("source") for policy in run["policies"]} == {"mine": [source], "snapkv": None}
    for cell in run["cells"]:
        assert cell["cell"] == cell_id(cell, run, source["hash"] if cell["policy"] == "mine" else "")
        assert cell["policy"] in ("mine", "snapkv") or cell["cell"] == alone[cell["policy"]]

    with h5py.File(tmp_path / f"out/cells/{TRACE.stem}.h5") as file:
        kept = {cell.attrs["policy"].decode(): cell["positions"][()] for cell in file["cells"].values()}
    assert np.array_equal(kept["mine"], kept["snapkv"])
    assert not np.array_equal(kept["mine"], kept["random"])


def test_a_new_library_has_a_new_row(plugins: Path, tmp_path: Path) -> None:
    """Another build of it: bytes behind its end, which nothing reads."""
    shutil.copy(TRACE, tmp_path / "trace.h5")
    shutil.copy(plugins / "mine.so", tmp_path)
    words = ["--plugin", "mine.so", "-p", "mine,snapkv", "--figure", "curve=curve.svg"]
    with watching(tmp_path, *words) as watched:
        first = watched.replays(1)[0]
        copied(plugins / "mine.so", tmp_path, "new.so", lambda data: data + bytes(16)).rename(tmp_path / "mine.so")
        second = watched.replays(2)[1]
        states = {(cell["policy"], cell["state"]) for cell in about(tmp_path, "run")["cells"]}
    assert states == {("mine", "done"), *((name, "skipped") for name in ("snapkv", "full", "random", "oracle"))}
    [before], [after] = (
        [line.split()[:4] for line in one.splitlines() if line.startswith("mine ")] for one in (first, second)
    )
    assert before == after and (tmp_path / "curve.svg").is_file()


def test_the_tutorials_policy_keeps_the_same_in_python_and_in_cpp(plugins: Path, tmp_path: Path) -> None:
    """Bit by bit, at windows and budgets, and where each KV head holds tokens of its own."""
    windows = ("window=8", "window=32", "window=8,schedule=every,interval=100")
    policy = ROOT / "notebooks/two_horizons.py:two_horizons"
    for name, words in (("two-horizons", ["--plugin", plugins / "tutorial.so"]), (str(policy), [])):
        asked = [word for window in windows for word in ("-p", f"{name}:{window}")]
        asked += ["-b", "0.1,200", *FEW, "-o", "out"]
        answer = kvreplay("replay", TRACE, *words, *asked, folder=tmp_path, env=WITH_PYTHON)
        assert (answer.code, answer.err) == (0, ""), answer
    run = Run(tmp_path / "out")
    for window in windows:
        for budget in ("0.1", "200"):
            ours, theirs = (run.selection(f"{name}:{window}", budget) for name in ("two_horizons", "two-horizons"))
            assert np.array_equal(ours.positions, theirs.positions) and np.array_equal(ours.offsets, theirs.offsets)


def test_a_plugin_is_listed_with_its_parameters(plugins: Path, tmp_path: Path) -> None:
    words = ["policies", "--plugin", plugins / "mine.so", "--plugin", plugins / "pair.so"]
    names = done(*words, "--names", folder=tmp_path).split()
    assert set(names) - set(done("policies", "--names", folder=tmp_path).split()) == {"mine", "last"}
    described = json.loads(done(*words, "mine", "--json", folder=tmp_path))
    assert [(p["name"], p["default"]) for p in described["parameters"]] == [
        ("window", "16"),
        ("window_at", "end"),
        ("sinks", "0"),
    ]
    assert "position" in {part["name"] for part in json.loads(done(*words, "--parts", "--json", folder=tmp_path))}
    served = json.loads(done("info", TRACE, *words[1:], "--no-estimate", "--json", folder=tmp_path))
    assert {"name": "mine", "served": True, "why_not": ""} in served[0]["policies"]
    twice = ["policies", "--plugin", plugins / "mine.so", "--plugin", plugins / "mine.so", "--names"]
    assert "mine" in done(*twice, folder=tmp_path)


def test_what_is_made_of_a_plugin_comes_from_it(plugins: Path, tmp_path: Path) -> None:
    words = ["--plugin", plugins / "mine.so", "--plugin", plugins / "pair.so", "-b", "0.1"]
    asked = ["layers:0-14=(mine),15-29=snapkv", "oracle:counts=(mine)", "snapkv:score=position", "last"]
    both = "layers:0-14=(mine),15-29=(snapkv:score=position)"
    for policy in [*asked, both]:
        words += ["-p", policy]
    replay(tmp_path, *words)
    run = about(tmp_path)
    hashes = {name: xxhash.xxh3_128_hexdigest((plugins / f"{name}.so").read_bytes()) for name in ("mine", "pair")}
    sources = [[source["hash"] for source in policy["source"]] for policy in run["policies"]]
    one_each = [[hashes[name]] for name in ("mine", "mine", "pair", "pair")]
    assert sources == [*one_each, sorted(hashes.values())]
    from_both = run["cells"][len(asked)]
    assert from_both["cell"] == cell_id(from_both, run, ",".join(sorted(hashes.values())))


def test_an_edited_plugin_is_replayed_again_and_nothing_else(plugins: Path, tmp_path: Path) -> None:
    file = copied(plugins / "mine.so", tmp_path, "edited.so")
    words = ["--plugin", file, "-p", "mine,local", "-b", "0.1,0.2"]
    assert set(states(replay(tmp_path, *words)).values()) == {"done"}
    assert set(states(replay(tmp_path, *words)).values()) == {"skipped"}

    copied(plugins / "mine.so", tmp_path, "edited.so", lambda data: data + b"\0")
    again = kvreplay("replay", TRACE, *words[:-1], "0.2", *FEW, "-o", "out", "--json", folder=tmp_path)
    warning = "mine at budget 0.1 has results of an earlier version of its policy file"
    stays = f"kvreplay: warning: smollm2-135m-needle: {warning}\n"
    assert (again.code, again.err) == (0, stays)
    assert {cell for cell, state in states(json.loads(again.out)).items() if state == "done"} == {("mine", "0.2")}
    found = states(replay(tmp_path, *words))
    assert {cell for cell, state in found.items() if state == "done"} == {("mine", "0.1")}

    with (tmp_path / "out/results.csv").open() as file:
        cells = {(row["policy"], row["budget"], row["cell"]) for row in csv.DictReader(file) if row["role"] != "trace"}
    assert len(cells) == len(found) == 2 * (2 + 3)


def test_a_folder_goes_on_without_the_plugin(plugins: Path, tmp_path: Path) -> None:
    replay(tmp_path, "--plugin", plugins / "mine.so", "-p", "mine", "-b", "0.1")
    replay(tmp_path, "-p", "local", "-b", "0.1")
    assert ("mine", "0.1") not in states(about(tmp_path))
    out = tmp_path / "out"
    with (out / "results.csv").open() as file:
        assert {"mine", "local"} < {row["policy"] for row in csv.DictReader(file)}
    shutil.copytree(out, tmp_path / "copy")
    assert done("diff", "out", "copy", folder=tmp_path) == "equal\n"
    assert plot(["heatmap", str(out), "-p", "mine", "-o", str(tmp_path / "mine.svg")]) == 0
    assert "mine" in (tmp_path / "mine.svg").read_text()
    assert report([str(out), "-o", str(tmp_path / "mine.html")]) == 0
    assert "mine" in (tmp_path / "mine.html").read_text()


BUILD = "expected a shared library built by kvreplay_add_plugin, found"


def truncated(size: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:size]


@pytest.mark.parametrize(
    ("name", "changed", "code", "message"),
    [
        ("note.so", lambda data: b"a note\n", INPUT, f"not a plug-in: {BUILD} another file"),
        ("empty.so", lambda data: b"", INPUT, f"not a plug-in: {BUILD} another file"),
        ("head.so", truncated(40), INPUT, "truncated: expected at least 64 bytes, found 40"),
        ("half.so", lambda data: data[: len(data) // 2], INPUT, "truncated: expected at least "),
        ("last.so", lambda data: data[:-1], INPUT, "truncated: expected at least "),
        (
            "machine.so",
            lambda data: data[:18] + struct.pack("<H", 8) + data[20:],
            CAPABILITY,
            "built for another processor: expected ELF machine ",
        ),
        (
            "unstamped.so",
            lambda data: data.replace(b"kvreplay-plugin:", b"kvreplay-plugon:"),
            INPUT,
            f"not a kvreplay plug-in: {BUILD} a library without version stamp",
        ),
        (
            "version.so",
            lambda data: data.replace(b"kvreplay-plugin:0.", b"kvreplay-plugin:9."),
            CAPABILITY,
            "built for another version of kvreplay; rebuild it with the kit of this version: expected 0.",
        ),
        (
            "headers.so",
            lambda data: data.replace(b", headers ", b", headers:"),
            CAPABILITY,
            "built for another version of kvreplay; rebuild it with the kit of this version: expected 0.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".so") else "",
)
def test_a_file_that_is_none_is_refused(
    name: str, changed: Callable[[bytes], bytes], code: int, message: str, plugins: Path, tmp_path: Path
) -> None:
    file = copied(plugins / "mine.so", tmp_path, name, changed)
    for words in (["policies"], ["replay", TRACE, "-p", "local", "-b", "0.1"]):
        answer = kvreplay(*words, "--plugin", file.name, folder=tmp_path)
        assert (answer.code, answer.out, answer.err.count("\n")) == (code, "", 1)
        assert answer.err.startswith(f"kvreplay: {name}: {message}")
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("taken", INPUT, 'policy "snapkv" exists: expected another name\n'),
        ("ranges", INPUT, 'policy "layers" exists: expected another name\n'),
        ("nothing", INPUT, "registers no policy and no part: expected a policy or a part, found none\n"),
        ("unresolved", INPUT, "cannot be loaded: found undefined symbol: "),
        ("foreign", INPUT, f"not a kvreplay plug-in: {BUILD} a library without version stamp\n"),
        ("missing", INPUT, "cannot be opened: No such file or directory\n"),
    ],
)
def test_a_plugin_that_cannot_be_had_is_refused(
    name: str, code: int, message: str, plugins: Path, tmp_path: Path
) -> None:
    file = plugins / f"{name}.so"
    answer = kvreplay("policies", "--plugin", file, folder=tmp_path)
    assert (answer.code, answer.out, answer.err.count("\n")) == (code, "", 1)
    assert answer.err.startswith(f"kvreplay: {file}: {message}")


def test_the_program_is_no_plugin(tmp_path: Path) -> None:
    answer = kvreplay("policies", "--plugin", PROGRAM, folder=tmp_path)
    assert (answer.code, answer.out, answer.err.count("\n")) == (INPUT, "", 1)


def test_the_kit_needs_no_other_library(kit: Path) -> None:
    headers = [path.relative_to(kit / "include/kvreplay") for path in (kit / "include/kvreplay").rglob("*.h")]
    policies = ROOT / "core" / "policies"
    written = {path.relative_to(ROOT / "core") for path in [*policies.glob("*.h"), *policies.glob("*/*.h")]}
    assert written < set(headers)
    for header in headers:
        for line in (kit / "include/kvreplay" / header).read_text().splitlines():
            if line.startswith("#include <"):
                assert line.removeprefix("#include <").rstrip(">").replace("_", "").isalpha(), f"{header}: {line}"


def test_the_stamp_follows_the_kits_headers(tmp_path: Path) -> None:
    core = tmp_path / "core"
    shutil.copytree(ROOT / "core", core, ignore=shutil.ignore_patterns("*.cpp"))

    def stamp() -> str:
        definitions = {"CORE": core, "KIT": tmp_path / "kit", "VERSION": "1.2.3", "STAMP": tmp_path / "plugin_stamp.h"}
        words = [f"-D{name}={value}" for name, value in definitions.items()]
        script = ROOT / "core/policies/kit/kit.cmake"
        subprocess.run(["cmake", *words, "-P", script], check=True, capture_output=True)
        return (tmp_path / "plugin_stamp.h").read_text()

    first = stamp()
    assert '"1.2.3"' in first
    with (core / "trace/writer.h").open("a") as outside:
        outside.write("// nothing that a policy includes\n")
    assert stamp() == first
    with (core / "tensor.h").open("a") as inside:
        inside.write("// what observables/layer_view.h includes\n")
    assert stamp() != first
