"""Files made to harm: small ones that claim to be huge, and policy files that would run code or grow without end."""

import os
import resource
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest

PROGRAM = Path(os.environ.get("KVREPLAY", Path(__file__).parents[2] / "build" / "release" / "kvreplay")).resolve()
MEMORY = 1 << 30


def kvreplay(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """With an address space of 1 GiB and ten seconds: what asks for more fails in other words than a refusal's."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (10, 10))

    return subprocess.run([PROGRAM, *words], cwd=folder, capture_output=True, text=True, preexec_fn=limit, timeout=60)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    assert kvreplay("synth", "fixture", "-o", "a.h5", folder=tmp_path).returncode == 0
    return tmp_path / "a.h5"


def replace(file: h5py.File, path: str, shape: tuple[int, ...], dtype: str, **options) -> None:
    """A dataset of that shape of which nothing is stored."""
    del file[path]
    file.create_dataset(path, shape, dtype, **options)


def refused(trace: Path) -> str:
    """By every command that opens it, in the same line."""
    answers = [
        kvreplay(*words, trace.name, folder=trace.parent)
        for words in (["info"], ["replay", "-p", "h2o", "-b", "6", "-o", "out"])
    ]
    for answer in answers:
        assert answer.returncode == 3 and answer.stderr.count("\n") == 1, answer
    assert answers[0].stderr == answers[1].stderr
    return answers[0].stderr


@pytest.mark.parametrize("options", [{}, {"chunks": (1024, 1024)}, {"chunks": (1024, 1024), "compression": "gzip"}])
def test_one_that_claims_to_hold_far_more_than_its_bytes(trace: Path, options: dict) -> None:
    """2^31 - 2 tokens: ids of 8 GiB, in a file of some kB."""
    tokens = 2**31 - 2
    with h5py.File(trace, "r+", libver=("v108", "v110")) as file:
        file["tokens"].attrs["prefill"] = tokens - 4
        chunks = {"chunks": (1 << 20,), **options, **{"chunks": (1 << 20,)}} if options else {}
        replace(file, "tokens/ids", (tokens,), "<i4", **chunks)
        for name in ("tokens/offsets", "tokens/text"):
            if name in file:
                del file[name]
    assert trace.stat().st_size < 200_000
    line = refused(trace)
    assert "/tokens/ids" in line and ("storage" in line or "in a file of" in line)


@pytest.mark.parametrize("layers", [2**31 - 1, 2**40, -1])
def test_one_that_claims_endless_layers(trace: Path, layers: int) -> None:
    with h5py.File(trace, "r+", libver=("v108", "v110")) as file:
        file["model"].attrs["n_layers"] = np.int64(layers)
    assert "n_layers" in (line := refused(trace)) or "shape" in line


def test_sizes_whose_product_overflows(trace: Path) -> None:
    """A projection of 2^58 rows of 16 numbers of 4 bytes: 2^64 bytes, which 64 bits hold as 0."""
    with h5py.File(trace, "r+", libver=("v108", "v110")) as file:
        file.create_dataset("layers/000/wo", (1 << 58, 16), "<f4", chunks=(1 << 20, 16))
    said = refused(trace)
    assert "/layers/000/wo: shape: expected [hidden, 16], found [288230376151711744, 16]" in said


def nested(depth: int) -> str:
    """Each list holds the one before nine times: 9^depth policies, if somebody wrote them out."""
    lists = ["- &l0 [h2o, h2o]"]
    lists += [f"- &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, depth)]
    return "\n".join(lists) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        nested(12),
        "- policy: h2o\n  recent: &r [1, 2]\n- policy: h2o\n  recent: [*r, *r]\n",
        "- &p {policy: h2o, recent: *p}\n",
        "- policy: " + "[" * 50_000 + "]" * 50_000 + "\n",
        "- policy: " + "{a: " * 50_000 + "1" + "}" * 50_000 + "\n",
        "!!python/object/apply:os.system ['touch hacked']\n",
        "- !!python/object/apply:os.system ['touch hacked']\n",
        "- policy: !<tag:yaml.org,2002:python/object/apply:os.system> ['touch hacked']\n",
        "- policy: h2o\n  recent: !!python/object/apply:os.system ['touch hacked']\n",
    ],
    ids=lambda text: text[:30],
)
def test_policy_files_run_nothing_and_grow_no_further_than_they_are(text: str, trace: Path) -> None:
    (trace.parent / "mine.yaml").write_text(text)
    answer = kvreplay("replay", "a.h5", "-p", "@mine.yaml", "-b", "6", "-o", "out", folder=trace.parent)
    assert answer.returncode == 2 and answer.stderr.startswith("kvreplay: "), answer
    assert answer.stderr.count("\n") == 1
    assert not (trace.parent / "hacked").exists()


def test_code_that_lies_about_is_not_loaded(trace: Path) -> None:
    """Neither a plug-in nor a policy in Python nor a policy file, unless the command line names it."""
    folder = trace.parent
    for name in ("h2o.py", "kvreplay.py", "sitecustomize.py", "plugin.py"):
        (folder / name).write_text("open('hacked', 'w')\n")
    for name in ("h2o.so", "plugin.so", "h2o.yaml"):
        (folder / name).write_bytes(b"\x7fELF")
    for words in (["info", "a.h5"], ["policies"], ["replay", "a.h5", "-p", "h2o", "-b", "6", "-o", "out"]):
        answer = kvreplay(*words, folder=folder)
        assert answer.returncode == 0, answer
    assert not (folder / "hacked").exists()
