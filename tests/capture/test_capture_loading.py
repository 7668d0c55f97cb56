"""Do the options that choose a model and its device load that model, or say in one line why not?"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_models import CONFIGS, SIZES, build, character_tokenizer, save

from kvreplay.capture.command import main
from kvreplay.trace import Trace

Folder = Callable[..., Path]

REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM
class RemoteConfig(LlamaConfig):
    model_type = "kvreplay_remote"
class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""


def words(model: Path | str, out: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--prompt", "Rain " * 20, "-o", str(out), "--progress", "never", *more]


def in_a_child(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A capture whose hub cache is `home`, without a network."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "kvreplay.capture.command", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def in_hub_cache(home: Path, model: str, revisions: dict[str, Path]) -> None:
    """The folders as huggingface_hub keeps the revisions of a model."""
    place = home / "hub" / ("models--" + model.replace("/", "--"))
    (place / "refs").mkdir(parents=True)
    for number, (name, folder) in enumerate(revisions.items()):
        commit = f"{number:040x}"
        (place / "refs" / name).write_text(commit)
        shutil.copytree(folder, place / "snapshots" / commit)


def test_a_revision_of_a_hub_model_and_the_hash_of_its_shards(tmp_path: Path) -> None:
    """Two revisions of one name: each trace is of its own weights, and states the hash of all shards by name."""
    model = build(CONFIGS["llama"], seed=1)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    character_tokenizer().save_pretrained(tmp_path / "sharded")
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 2
    whole = save(tmp_path / "whole", "llama")
    in_hub_cache(tmp_path / "home", "maker/tiny", {"main": whole, "v1": tmp_path / "sharded"})

    traces = {}
    for revision in ("main", "v1"):
        out = tmp_path / f"{revision}.h5"
        done = in_a_child(tmp_path / "home", *words("maker/tiny", out, "--revision", revision))
        assert done.returncode == 0, done.stderr
        traces[revision] = Trace(out)
    one_file = hashlib.sha256((whole / "model.safetensors").read_bytes()).hexdigest()
    all_shards = hashlib.sha256(b"".join(shard.read_bytes() for shard in shards)).hexdigest()
    assert traces["main"].attribute("/model", "source_hash") == one_file
    assert traces["v1"].attribute("/model", "source_hash") == all_shards

    assert main(words(tmp_path / "sharded", tmp_path / "folder.h5")) == 0
    folder = Trace(tmp_path / "folder.h5")
    assert folder.attribute("/model", "source_hash") == all_shards
    np.testing.assert_array_equal(folder["/layers/003/k"], traces["v1"]["/layers/003/k"])
    assert not np.array_equal(traces["main"]["/layers/003/k"], traces["v1"]["/layers/003/k"])


def test_code_of_a_repository_runs_only_on_request(tmp_path: Path) -> None:
    folder = save(tmp_path / "remote", "llama")
    (folder / "modeling_remote.py").write_text(REMOTE)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "RemoteConfig", "AutoModelForCausalLM": "RemoteForCausalLM"}
    config["model_type"] = "kvreplay_remote"
    config["auto_map"] = {auto: f"modeling_remote.{name}" for auto, name in classes.items()}
    (folder / "config.json").write_text(json.dumps(config))
    refused = in_a_child(tmp_path / "home", *words(folder, tmp_path / "t.h5"))
    assert refused.returncode == 3
    assert "use --trust-remote-code to run code of the repository" in refused.stderr and refused.stderr.count("\n") == 1
    done = in_a_child(tmp_path / "home", *words(folder, tmp_path / "t.h5", "--trust-remote-code"))
    assert done.returncode == 0, done.stderr
    assert Trace(tmp_path / "t.h5").attribute("/model", "architecture") == "RemoteForCausalLM"


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (["--device", "tpu"], 2, "expected auto, cpu, cuda[:N] or mps, found 'tpu'"),
        (["--device", "cuda:99"], 4, "--device: cuda:99: expected a device that PyTorch detects, found"),
        (["--device", "cpu", "--device-map", "auto"], 2, "not allowed with argument"),
        (["--device-map", "missing.json"], 3, "--device-map: missing.json: expected auto, or a JSON file"),
        (["--device-map", "list.json"], 3, '--device-map: list.json: expected an object as {"model.layers.0": "disk"}'),
        (
            ["--device-map", "nowhere.json"],
            3,
            "model cannot be loaded: expected a hub name or folder of a model that transformers supports",
        ),
        (["--load", "4bit"], 4, "--load: missing package: expected pip install bitsandbytes"),
        (["--load", "8bit", "--with-wo"], 2, "--with-wo: cannot be combined with --load: expected unquantised"),
        (["--load", "3bit"], 2, "invalid choice: '3bit'"),
    ],
)
def test_devices_and_loads_that_are_not_there(
    options: list[str],
    exit_code: int,
    message: str,
    model_folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: find(name) if name != "bitsandbytes" else None)
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[0]")
    Path("nowhere.json").write_text('{"": "nowhere"}')
    folder = model_folder("llama")
    capsys.readouterr()
    assert main(words(folder, tmp_path / "t.h5", *options)) == exit_code
    error = capsys.readouterr().err
    assert message in error and error.startswith("kvreplay: ") and error.count("\n") == 1
    assert not list(tmp_path.glob("t.h5*"))


@pytest.mark.parametrize("options", [["--device", "auto"], ["--device-map", "auto"]])
def test_auto_without_accelerators_is_the_cpu(options: list[str], model_folder: Folder, tmp_path: Path) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has an accelerator")
    for name, more in (("plain", []), ("auto", options)):
        assert main(words(model_folder("llama"), tmp_path / f"{name}.h5", *more)) == 0
    plain, auto = Trace(tmp_path / "plain.h5"), Trace(tmp_path / "auto.h5")
    assert all(np.array_equal(plain[f"/layers/003/{name}"], auto[f"/layers/003/{name}"]) for name in "qkv")


@pytest.mark.parametrize("load", ["8bit", "4bit"])
def test_a_trace_of_quantised_weights_says_so(load: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="--load needs bitsandbytes")
    sizes = {**SIZES, "hidden_size": 64}  # a row is a whole number of blocks of 64
    build(transformers.LlamaConfig(**sizes, head_dim=16)).save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    for name, more in (("plain", []), ("loaded", ["--load", load])):
        assert main(words(tmp_path / "model", tmp_path / f"{name}.h5", *more)) == 0
    plain, loaded = Trace(tmp_path / "plain.h5"), Trace(tmp_path / "loaded.h5")
    assert loaded.attribute("/model", "quantisation") == load
    found, exact = (trace["/layers/000/k"].astype(np.float64) for trace in (loaded, plain))
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.2
