"""Policies of plug-ins in Python: beside built-in ones and policies in Python, in caches of transformers, and live."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from program import WITH_PYTHON, done, kvreplay

from kvreplay.results import Run

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "traces" / "smollm2-135m-needle.h5"
PYTHON_POLICY = f"{ROOT}/docs/value_attention.py:value_attention"
TWIN = "snapkv:window=16,pool=none"  # the policy of new-policy
FEW = ["--metrics", "attention_recall"]
INPUT = 3
QUIET = os.environ | {"TRANSFORMERS_VERBOSITY": "error"}

# h5py brings another HDF5 into the process, before or after the plug-in.
SELECTIONS = """
{first}
import sys
import kvreplay as kv
kv.load_plugin(sys.argv[1])
kv.load_plugin(sys.argv[1].encode())
import h5py
import numpy as np
run = kv.replay(sys.argv[2], ["mine", sys.argv[3], sys.argv[4]], 0.1, metrics="attention_recall", progress=False)
mine, twin, python = (run.selection(one, 0.1).positions for one in ("mine", sys.argv[3], "value_attention"))
assert np.array_equal(mine, twin) and not np.array_equal(mine, python)
assert kv.policy.mine(window=8) == "mine:window=8"
assert "window" in kv.policy.mine.__doc__
try:
    kv.load_plugin("missing.so")
except kv.Error as error:
    print(error)
"""

CACHES = """
import sys
import torch
import transformers
import kvreplay as kv
from kvreplay.capture.model import cache_name
from kvreplay.transformers import ReplayCache

kv.load_plugin(sys.argv[1])
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2)
model = transformers.LlamaForCausalLM(config).eval()
ids = torch.randint(3, 64, (1, 60))
caches = [ReplayCache(model, policy, 20) for policy in ("mine", sys.argv[2], "local")]
logits = []
with torch.inference_mode():
    for cache in caches:
        named = {cache_name(model.model): cache}
        model(input_ids=ids[:, :50], **named)
        logits.append(model(input_ids=ids[:, 50:], **named).logits)
mine, twin, other = ([layer.positions for layer in cache.layers] for cache in caches)
assert all(map(torch.equal, mine, twin)) and not all(map(torch.equal, mine, other))
assert mine[0].shape == (2, 30)
assert torch.equal(logits[0], logits[1])
"""


def python(script: str, *words: object, folder: Path) -> str:
    """Stdout of a script in a separate process: registered policies remain until a process ends."""
    command = [sys.executable, "-c", script, *map(str, words)]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=QUIET)
    assert (answer.returncode, answer.stderr) == (0, ""), answer
    return answer.stdout


@pytest.mark.parametrize("first", ["import h5py", ""])
def test_a_loaded_plugin_is_replayed(first: str, plugins: Path, tmp_path: Path) -> None:
    said = python(SELECTIONS.format(first=first), plugins / "mine.so", TRACE, TWIN, PYTHON_POLICY, folder=tmp_path)
    assert said == "missing.so: cannot be opened: No such file or directory\n"


def test_one_command_line_has_both_kinds(plugins: Path, tmp_path: Path) -> None:
    words = ["--plugin", plugins / "mine.so", "-p", f"mine,{PYTHON_POLICY}", "-b", "0.1", *FEW, "-o", "out"]
    answer = kvreplay("replay", TRACE, *words, folder=tmp_path, env=WITH_PYTHON)
    assert (answer.code, answer.err) == (0, ""), answer
    done("replay", TRACE, *words[:3], "mine", *words[4:-1], "alone", folder=tmp_path)
    cells = [Run(tmp_path / name).cells.set_index("policy")["cell"] for name in ("out", "alone")]
    assert cells[0]["mine"] == cells[1]["mine"] and "value_attention" in cells[0]


@pytest.mark.parametrize("name", ["nothing", "unresolved"])
def test_the_same_files_are_rejected(name: str, plugins: Path, tmp_path: Path) -> None:
    program = kvreplay("policies", "--plugin", plugins / f"{name}.so", folder=tmp_path)
    script = "import sys, kvreplay as kv\ntry: kv.load_plugin(sys.argv[1])\nexcept kv.Error as error: print(error)"
    assert f"kvreplay: {python(script, plugins / f'{name}.so', folder=tmp_path)}" == program.err


def test_caches_of_transformers(plugins: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs tools/setup build python")
    python(CACHES, plugins / "mine.so", TWIN, folder=tmp_path)


def test_live_models(plugins: Path, tmp_path: Path) -> None:
    """The plug-in is found by run.json; it must be that of the replay."""
    pytest.importorskip("transformers", reason="needs tools/setup build python")
    script = "import sys; sys.path.append(sys.argv[1]); from tiny_models import save; save('model', 'llama')"
    python(script, ROOT / "tests" / "capture", folder=tmp_path)
    mine = tmp_path / "mine.so"
    mine.write_bytes((plugins / "mine.so").read_bytes())

    def answered(*words: str) -> tuple[int, str]:
        answer = kvreplay(*words, "--progress", "never", folder=tmp_path, env=WITH_PYTHON)
        return answer.code, answer.err

    text = "The heron stood in the shallow water all the morning, and did not say what it was waiting for."
    words = ["--model", "model", "--prompt", text, "--generate", "4", "-o", "t.h5"]
    assert answered("capture", *words)[0] == 0
    words = ["--plugin", "mine.so", "-p", f"mine,{TWIN}", "-b", "24", "--controls", "none", *FEW, "-o", "out"]
    assert answered("replay", "t.h5", *words)[0] == 0
    assert answered("live", "out", "--model", "model")[0] == 0
    live = Run(tmp_path / "out").live
    measured = {policy: rows["value"].tolist() for policy, rows in live.groupby("policy")}
    assert measured["mine"] == measured["snapkv"]

    mine.write_bytes(mine.read_bytes() + b"\0")
    code, said = answered("live", "out", "--model", "model")
    assert code == INPUT and f"{mine}: mine has changed since the replay" in said
    [source] = json.loads((tmp_path / "out/run.json").read_text())["policies"][0]["source"]
    assert source["path"] == str(mine)
