"""Models are built once a run, each in its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="capture needs tools/setup build python")
pytest.importorskip("transformers", reason="capture needs tools/setup build python")

import torch
from tiny_models import save


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices are slower on many threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """model_folder("llama") -> its folder."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def folder(name: str, dtype: torch.dtype = torch.float32) -> Path:
        key = (name, dtype)
        if key not in made:
            made[key] = save(tmp_path_factory.mktemp(name), name, dtype)
        return made[key]

    return folder
