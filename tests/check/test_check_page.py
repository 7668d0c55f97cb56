"""docs/check.md: the shown output is that of the command, and `kvreplay check` accepts the files that the shown code
writes. The code for kvpress runs in its environment: tests/kvpress/agreement.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import HKV, L, P, Written
from test_check_command import OF_POLICY as ENGINES
from test_check_command import SNAPKV, B, kept_by, twice_rotated
from write_trace import Content, write_trace

from kvreplay.kept_rows import decision
from kvreplay.trace import Trace

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "check.md").read_text()
BLOCKS = re.findall(r"```\w*\n(.*?)```", PAGE, re.DOTALL)
RUN_HERE = ("$ kvreplay check", "def save_kept", "block_size", "llama_memory_seq_rm")
RUN_IN_KVPRESS = ("class Recorded",)
Check = Callable[..., tuple[int, str, str]]


def block(words: str) -> str:
    """The one block with these words."""
    [found] = [one for one in BLOCKS if words in one]
    return found


@pytest.fixture
def save_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """The function of the page; files without a folder are written into `tmp_path`."""
    pytest.importorskip("safetensors.numpy")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block("def save_kept"), names)
    return names["save_kept"]


def test_every_block_is_run() -> None:
    assert len(BLOCKS) == len({block(words) for words in (*RUN_HERE, *RUN_IN_KVPRESS)})


def test_the_shown_output(written: Written, check: Check, tmp_path: Path) -> None:
    np.savez(tmp_path / "kept.npz", positions=twice_rotated(written).astype(np.int32))
    command, _, shown = block("$ kvreplay check").partition("\n")
    assert command == f"$ kvreplay check trace.h5 kept.npz -p {SNAPKV} -b {B}"
    assert check(written.path, tmp_path / "kept.npz", "-p", SNAPKV, "-b", B)[1] == shown


def test_rows_of_several_lengths(save_kept: Callable[..., None], written: Written, check: Check) -> None:
    rows = [[row[::-1] for row in layer] for layer in kept_by(ENGINES[SNAPKV], written)]
    save_kept("kept.safetensors", rows, [2, 5, 9])
    assert check(written.path, "kept.safetensors", "-p", SNAPKV, "-b", B)[0] == 0
    rows[1][2] = rows[1][2][1:]
    save_kept("kept.safetensors", rows, [2, 5, 9])
    code, out, _ = check(written.path, "kept.safetensors", "-p", SNAPKV, "-b", B)
    assert code == 1 and "1 of 9 sets differ" in out


def test_pages_of_vllm(save_kept: Callable[..., None], written: Written, check: Check) -> None:
    policy, budget, size = f"{SNAPKV},select=chunks,chunk=16,window_mode=whole", 48, 16
    rows: list[list] = [[None] * HKV for _ in range(L)]
    for (layer, head), kept in zip(np.ndindex(L, HKV), np.reshape(decision(Trace(written.path), policy, budget).rows,
                                                                  (L * HKV, budget)), strict=True):  # fmt: skip
        names = {"np": np, "pages": np.unique(kept // size), "block_size": size, "prompt_tokens": P}
        exec(block("block_size"), names | {"rows": rows, "layer": layer, "head": head})
    save_kept("kept.safetensors", rows, [2, 5, 9])
    assert check(written.path, "kept.safetensors", "-p", policy, "-b", budget)[0] == 0


def test_the_last_page_of_vllm_is_not_full() -> None:
    rows = [[None]]
    names = {"np": np, "pages": np.array([0, 2]), "block_size": 4, "prompt_tokens": 10}
    exec(block("block_size"), names | {"rows": rows, "layer": 0, "head": 0})
    assert rows[0][0].tolist() == [0, 1, 2, 3, 8, 9]


def test_the_context_shift_of_llama_cpp(
    save_kept: Callable[..., None], content: Content, check: Check, tmp_path: Path
) -> None:
    write_trace(tmp_path / "trace.h5", Content(**vars(content) | {"layer_index": None}))
    names = {"prompt_tokens": P, "n_keep": 4, "n_discard": 50, "kv_heads": HKV, "layers": L, "save_kept": save_kept}
    exec(block("llama_memory_seq_rm"), names)
    assert check(tmp_path / "trace.h5", "kept.safetensors", "-p", "streaming-llm:sinks=4", "-b", P - 50)[0] == 0
