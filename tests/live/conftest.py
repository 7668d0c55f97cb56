"""Tiny models, captured and replayed: a run folder for `kvreplay live`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="live needs tools/setup build python")
pytest.importorskip("transformers", reason="live needs tools/setup build python")
sys.path.append(str(Path(__file__).resolve().parents[1] / "capture"))

import torch
from captured_case import PROMPT, Case
from tiny_models import save

import kvreplay as kv
from kvreplay.capture.command import main as capture

GENERATED = 6
# Sets of a layer, of KV heads and of query heads, equal and unequal counts, a control, and sets that change with time.
POLICIES = [
    "snapkv:window=4,kernel=3", "snapkv:window=4,heads=query", "chunkkv:window=4,chunk=4", "ada-kv:window=4", "random",
    "h2o:schedule=every(16),recent=4", "h2o-online:recent=4", "full", "oracle", "local",
]  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices are slower on many threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """case("llama") -> its run, made once; with a `name` of its own, one that nobody else changes."""
    made: dict[tuple[str, str], Case] = {}

    def make(
        model: str, name: str = "", policies: tuple[str, ...] = tuple(POLICIES), generated: int = GENERATED
    ) -> Case:
        if (model, name) not in made:
            folder = tmp_path_factory.mktemp(model)
            saved = save(folder / "model", model)
            words = [
                "--model",
                str(saved),
                "--prompt",
                PROMPT,
                "--generate",
                str(generated),
                "--queries",
                "all",
                "-o",
                str(folder / "t.h5"),
            ]
            assert capture([*words, "--progress", "never"]) == 0
            measured_at = "continuation" if generated else "last:4"
            kv.replay(
                folder / "t.h5", list(policies), [24, 60], sliding="treat", eval=measured_at, output=folder / "run"
            )
            made[model, name] = Case(saved, folder / "run")
        return made[model, name]

    return make
