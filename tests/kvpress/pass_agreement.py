"""kvzip and kvcompose keep the tokens of kvpress' presses in several chunks, with and without a chat template, on tiny
models with random weights: `tests/run kvpress`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from agreement import overlap
from cases import LEAST_OVERLAP, PASS_CASES, PASS_CHUNK, PASS_KINDS, RATIOS, Case

from kvreplay.capture import reconstruction
from kvreplay.capture.command import main

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "capture"))

from tiny_models import character_tokenizer, save  # noqa: E402

PROMPT = "The heron stood in the shallow water all the morning, and did not say what it was waiting for."
TOKENS = {"template": 100, "plain": 80}  # whole numbers of tokens are evicted at all ratios


@dataclass(frozen=True)
class Compared:
    """Traces of both kinds of passes in a folder, and what the presses keep of the prompt."""

    folder: Path
    frame: str
    kept: dict[str, np.ndarray]

    def overlap(self, case: Case, ratio: float) -> float:
        boundary = str(TOKENS[self.frame])
        return overlap(self.folder, case, ratio, self.kept[f"{case.press} {ratio}"], boundary=boundary)


def capture(model: Path, folder: Path, frame: str, kind: str) -> None:
    words = ["--model", str(model), "--prompt", PROMPT, *(["--chat"] if frame == "template" else [])]
    words += f"--generate 2 --reconstruct {kind} --reconstruct-at {TOKENS[frame]} --progress never".split()
    assert main([*words, "-o", str(folder / f"{kind}.h5")]) == 0


@pytest.fixture(scope="module", params=[("llama", "template"), ("qwen3", "plain")], ids="-".join)
def compared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, in_kvpress: Callable[..., None]
) -> Compared:
    """kvpress has no space at the end of the instruction for later chunks."""
    name, frame = request.param
    folder = tmp_path_factory.mktemp(name)
    model = save(folder / "model", name)
    if frame == "plain":
        tokenizer = character_tokenizer()
        tokenizer.chat_template = None
        tokenizer.save_pretrained(model)
        (model / "chat_template.jinja").unlink()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reconstruction, "CHUNK", PASS_CHUNK)
        patched.setattr(reconstruction, "NEXT_INSTRUCTION", reconstruction.NEXT_INSTRUCTION.rstrip())
        for kind in PASS_KINDS:
            capture(model, folder, frame, kind)
    in_kvpress("passes.py", model, folder / "chunks.h5", folder / "kept.npz")
    with np.load(folder / "kept.npz") as arrays:
        return Compared(folder, frame, dict(arrays))


@pytest.mark.filterwarnings("ignore:.*is chosen")
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("case", PASS_CASES, ids=lambda case: case.press)
def test_same_sets(compared: Compared, case: Case, ratio: float) -> None:
    assert compared.overlap(case, ratio) >= LEAST_OVERLAP


def test_another_instruction_keeps_other_tokens(
    compared: Compared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The space at the end of the instruction alone makes a difference."""
    monkeypatch.setattr(reconstruction, "CHUNK", PASS_CHUNK)
    capture(compared.folder / "model", tmp_path, compared.frame, "chunks")
    ours = replace(compared, folder=tmp_path)
    case = next(case for case in PASS_CASES if case.passes == "chunks")
    assert min(ours.overlap(case, ratio) for ratio in RATIOS) < LEAST_OVERLAP
