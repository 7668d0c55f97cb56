"""Are the sets of --live-decisions those that the policy chooses from what the evicted model computes?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from captured_case import Case
from registered import REGISTERED

import kvreplay as kv
from kvreplay.capture.model import load
from kvreplay.capture.model_options import ModelChoices
from kvreplay.engine import decision_and_store
from kvreplay.live import passes
from kvreplay.live.attention import NEVER
from kvreplay.live.cells import LiveCell, cells_of, evicted
from kvreplay.live.decided import Replayed, _Recording, decide, decided_live
from kvreplay.results import Run, TraceFacts

SCHEDULES = ("every(16)", "threshold(0.6,0.3)", "decoding(3)", "generated(4,3)", "rolling")
NEEDS_A_VALUE = {"dms", "head-kv"}
FEW = (
    "h2o:recent=4,schedule=every(16)", "knorm:schedule=every(16)", "knorm:schedule=threshold(0.6,0.3)",
    "snapkv:window=4,kernel=3,schedule=every(7)",
)  # fmt: skip


def opened(case: Case) -> tuple[object, passes.Text, Run, TraceFacts]:
    run = Run(case.run)
    trace = run.trace("t")
    model, _ = load(ModelChoices(str(case.model), dtype="float32"))
    ids = [int(one) for one in run.cells_file("t")["/traces/t/tokens/ids"][()]]
    return model, passes.read(model, "m", ids, trace.boundary), run, trace


def cells(run: Run, trace: TraceFacts) -> list[LiveCell]:
    return decided_live(cells_of(run, trace, run.cells)[0])[0]


def tensors_under(model: object, whole: passes.Text, cell: LiveCell, trace: TraceFacts) -> dict:
    """What the model computes in one pass in which tokens leave as the cell says, not in blocks."""
    leaves = evicted(whole, [cell], trace).leaves
    seen = _Recording(whole.layers, 0, leaves=leaves, tokens=len(whole.ids))
    with torch.inference_mode(), passes.masked(model, seen):
        model(input_ids=whole.ids[None], use_cache=False)
    return seen.tensors


def during_prefill() -> list[str]:
    """Every registered policy whose sets change while the prompt is read, by itself or under these schedules."""
    found = []
    for name in REGISTERED:
        for words in ("", *(f":schedule={schedule}" for schedule in SCHEDULES)):
            try:
                if name not in NEEDS_A_VALUE and decision_and_store(name + words, 4)[0] == "during-prefill":
                    found.append(name + words)
            except kv.Error:
                continue  # it does not accept that schedule
    return found


def checked(model: object, whole: passes.Text, run: Run, trace: TraceFacts) -> int:
    """Asserts the law for every cell: replayed over what one pass under its sets computes, it has the same sets. The
    value is the number of layers whose sets are not those of the full cache."""
    differs = 0
    for cell in cells(run, trace):
        again = Replayed(run, trace, cell, whole)
        found = decide(model, whole, cell, trace, again)
        replayed = again(tensors_under(model, whole, found, trace))
        for number, gone in found.leaves.items():
            assert torch.equal(replayed[number], gone), (cell.label, number)
            differs += not torch.equal(gone, cell.leaves[number])
    return differs


# With QK norms of weight 1, as in qwen3, all keys are of one length but for rounding, and knorm orders that.
@pytest.mark.parametrize("name", ["llama", "gemma2", "smollm3"])
def test_sets_are_those_of_their_own_tensors(name: str, case: Callable[..., Case]) -> None:
    model, whole, run, trace = opened(case(name, "decided", FEW))
    assert len(cells(run, trace)) == 2 * len(FEW)
    assert checked(model, whole, run, trace)


def test_every_policy_that_evicts_while_it_reads(case: Callable[..., Case], tmp_path: Path) -> None:
    """Those that cannot be decided live are named, with the reason."""
    model, whole, run, trace = opened(case("llama", "decided", FEW))
    asked = [f"{one}:question_tokens=4" if one == "finch" else one for one in during_prefill()]
    every = kv.replay(run.captured("t"), asked, 48, controls="none", output=tmp_path, progress=False)
    of_run, changing, _ = cells_of(every, trace, every.cells)
    found, left_out = decided_live(of_run)
    assert len(found) + len(left_out) + len(changing) == len(asked) > 40
    assert {line.partition(":")[0] for line in changing} == {"cam", "cam-one-shot"}
    assert {line.partition(":")[0] for line in left_out} == {"finch", "pyramid-infer", "sca"}
    assert checked(model, whole, every, trace)


@pytest.mark.parametrize("kv_head", [0, 1])
def test_smallest_keys_by_hand(kv_head: int, case: Callable[..., Case]) -> None:
    """knorm in blocks of 16 at 24 tokens, written out: behind each block the longest keys go."""
    model, whole, run, trace = opened(case("llama", "decided", FEW))
    cell = next(one for one in cells(run, trace) if "every" in one.label and one.facts["policy"] == "knorm"
                and one.facts["budget"] == "24")  # fmt: skip
    found = decide(model, whole, cell, trace, Replayed(run, trace, cell, whole))
    tensors = tensors_under(model, whole, found, trace)
    for number, gone in found.leaves.items():
        norms = np.linalg.norm(tensors[number][1][kv_head].astype(np.float64), axis=-1)
        held: list[int] = []
        for begin in range(0, trace.boundary, 16):
            end = min(begin + 16, trace.boundary)
            held += range(begin, end)
            for token in sorted(held, key=lambda one: norms[one])[24:]:
                held.remove(token)
                assert int(gone[kv_head, token]) == end - 1
        assert all(int(gone[kv_head, token]) == NEVER for token in held)


def test_rows_stand_beside_those_of_the_replay(case: Callable[..., Case], capsys: pytest.CaptureFixture[str]) -> None:
    made = case("llama", "decided rows", ("knorm:schedule=every(16)", "snapkv:window=4", "pyramid-infer"))
    assert made.live("--live-decisions") == 0
    assert "pyramid-infer" in capsys.readouterr().err
    rows = pd.read_csv(made.run / "live.csv", dtype=str)
    assert set(rows["policy"]) == {"knorm"} and set(rows["decisions"]) == {"during-prefill"}
    assert made.live() == 0
    kld = Run(made.run).results.query("metric == 'kld' and policy == 'knorm' and layer == 'all'")
    values = kld.set_index("variant")["value"]
    assert {"", "during-prefill", "median", "median:during-prefill"} <= set(values.index)
    assert len(set(values[""]) | set(values["during-prefill"])) == 4  # two budgets, two ways
    assert made.live("--live-decisions", "--generate", "4") == 2
    capsys.readouterr()
    assert made.live("--live-decisions", "-p", "snapkv") == 0
    assert "t: omitted: no policy of the run evicts during prefill" in capsys.readouterr().err
