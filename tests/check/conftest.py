"""A small trace, and the command in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))

from write_trace import Content, write_trace  # noqa: E402

from kvreplay.conformance.command import main  # noqa: E402

L, HQ, HKV, P, D = 3, 6, 3, 96, 16


@dataclass(frozen=True)
class Written:
    """A trace file and its content."""

    path: Path
    content: Content

    @property
    def layers(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Queries and keys of the prompt of each layer, float64."""
        return [(q[:, :P].astype(float), k[:, :P].astype(float))
                for q, k in zip(self.content.q, self.content.k, strict=True)]  # fmt: skip


@pytest.fixture(scope="session")
def content() -> Content:
    """Queries and keys after RoPE of L layers: first tokens are attention sinks, as in language models."""
    random = np.random.default_rng(7)
    q, k, v = ([random.normal(size=(heads, P + 4, D)).astype(np.float32) for _ in range(L)] for heads in (HQ, HKV, HKV))
    for layer in range(L):
        k[layer][:, :2] = q[layer].reshape(HKV, -1, D).mean(axis=1, keepdims=True) * 4
    return Content(q, k, v, prompt=P, scale=0.5, rope=True, layer_index=[2, 5, 9])


@pytest.fixture(scope="session")
def written(content: Content, tmp_path_factory: pytest.TempPathFactory) -> Written:
    path = tmp_path_factory.mktemp("trace") / "trace.h5"
    write_trace(path, content)
    return Written(path, content)


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of `kvreplay check WORDS`."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(one) for one in words])
        return code, *capsys.readouterr()

    return run
