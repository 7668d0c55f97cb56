"""Does a capture of many prompts on many workers leave the traces that one process leaves, whatever dies on the way?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

pytest.importorskip("distributed", reason="sweeps need tools/setup build python")

from kvreplay.capture.command import main

Folder = Callable[..., Path]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"The {word} fox jumps over the lazy dog, and back."} for word in ("brown", "grey")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arrays(path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, one: found.update({name: np.asarray(one).tobytes()}) if hasattr(one, "shape") else None
        )
    return found


def test_prompts_are_tasks(model_folder: Folder, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A trace that is there stays as it is with --resume."""
    words = ["--model", str(model_folder("llama")), "--prompts", str(prompts), "--generate", "4", "-n", "2"]
    assert main([*words, "-o", str(tmp_path / "one"), "--threads", "1"]) == 0
    swept = tmp_path / "swept"
    assert main([*words, "--only", "mine-001", "-o", str(swept), "--threads", "1"]) == 0
    before = (swept / "mine-001.h5").stat().st_mtime_ns
    capsys.readouterr()
    asked = [*words, "-o", str(swept), "--executor", "local", "--workers", "1", "--threads", "1"]
    assert main(asked) == 2 and "mine-001.h5: exists: expected --resume" in capsys.readouterr().err
    assert main([*asked, "--resume"]) == 0
    assert capsys.readouterr().out.startswith("sweep    1 of 1 tasks done   1 prompts in ")
    assert sorted(path.name for path in swept.iterdir()) == ["mine-000.h5", "mine-001.h5", "tasks.csv"]
    assert (swept / "mine-001.h5").stat().st_mtime_ns == before
    for name in ("mine-000", "mine-001"):
        assert arrays(swept / f"{name}.h5") == arrays(tmp_path / "one" / f"{name}.h5"), name


def test_a_prompt_of_another_name(
    model_folder: Folder, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["--model", str(model_folder("llama")), "--prompts", str(prompts), "-o", str(tmp_path / "out")]
    assert main([*words, "--executor", "local", "--only", "mine-000,mine-1"]) == 2
    assert "--only: unknown prompt mine-1: did you mean mine-001?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
