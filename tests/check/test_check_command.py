"""Does `kvreplay check` find the bugs of an engine that computes kept sets on its own, and accept correct ones?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import HKV, L, P, Written
from naive_engine import Engine, rotated, with_bug
from write_trace import Content, write_trace

from kvreplay.kept_rows import decision
from kvreplay.trace import Trace

B = 20
SNAPKV = "snapkv:window=8,kernel=7,pool=max"
BLOCKS = "snapkv:window=8,kernel=7,pool=max,schedule=every,interval=32"
H2O = "h2o"
OF_POLICY = {SNAPKV: Engine(B), BLOCKS: Engine(B, block=32), H2O: Engine(B, is_h2o=True)}
Check = Callable[..., tuple[int, str, str]]


def kept_by(engine: Engine, written: Written) -> np.ndarray:
    """[L,Hkv,B]"""
    return np.stack([engine.kept(q, k, written.content.scale) for q, k in written.layers])


def save(path: Path, positions: np.ndarray, **metadata: object) -> Path:
    """The file in the format of its suffix."""
    positions = np.ascontiguousarray(positions, np.int32)
    if path.suffix == ".npz":
        np.savez(path, positions=positions, metadata=json.dumps(metadata))
    else:
        numpy_files = pytest.importorskip("safetensors.numpy")
        numpy_files.save_file(
            {"positions": positions}, path, {key: json.dumps(value) for key, value in metadata.items()}
        )
    return path


def twice_rotated(written: Written) -> np.ndarray:
    frequencies = 10000.0 ** -np.linspace(0, 1, 8, endpoint=False)
    scale = written.content.scale
    return np.stack([Engine(B).kept(rotated(q, frequencies), rotated(k, frequencies), scale)
                     for q, k in written.layers])  # fmt: skip


def changed(policy: str, **bug: object) -> Callable[[Written], np.ndarray]:
    """The kept sets of the engine of a policy with a bug."""
    return lambda written: kept_by(with_bug(OF_POLICY[policy], **bug), written)


def rearranged(rearrange: Callable[[np.ndarray], np.ndarray]) -> Callable[[Written], np.ndarray]:
    """The kept sets of the correct SnapKV, arranged otherwise."""
    return lambda written: rearrange(kept_by(OF_POLICY[SNAPKV], written))


BUGS = [
    (H2O, "sums divided by the group", changed(H2O, divides_sums=True)),
    (SNAPKV, "mask ignored", changed(SNAPKV, masked=False)),
    (H2O, "mask ignored", changed(H2O, masked=False)),
    (BLOCKS, "indices wrong after the first eviction", changed(BLOCKS, numbers_slots=True)),
    (SNAPKV, "RoPE applied twice", twice_rotated),
    (SNAPKV, "window shifted by one", changed(SNAPKV, shift=1)),
    (SNAPKV, "budget -1", changed(SNAPKV, budget=B - 1)),
    (SNAPKV, "budget +1", changed(SNAPKV, budget=B + 1)),
    (SNAPKV, "ties to the higher position", changed(SNAPKV, higher_ties=True)),
    (SNAPKV, "heads in another order", rearranged(lambda kept: kept[:, [1, 2, 0]])),
    (SNAPKV, "layer off by one", rearranged(lambda kept: np.roll(kept, -1, axis=0))),
    (SNAPKV, "unsorted positions", rearranged(lambda kept: kept[:, :, ::-1])),
    (SNAPKV, "another pool", changed(SNAPKV, kernel=1)),
    (SNAPKV, "positions shifted by one", rearranged(lambda kept: kept - 1)),
]


@pytest.mark.parametrize(("policy", "cause", "make"), BUGS, ids=[f"{cause}-{policy[:6]}" for policy, cause, _ in BUGS])
def test_a_bug_is_found_and_named(
    policy: str, cause: str, make: Callable[[Written], np.ndarray], written: Written, check: Check, tmp_path: Path
) -> None:
    file = save(tmp_path / "kept.npz", make(written))
    code, out, err = check(written.path, file, "-p", policy, "-b", B, "--json")
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert not found["equal"]
    assert found["causes"][0]["name"] == cause, out
    assert found["causes"][0]["share"] > 0.9


@pytest.mark.parametrize("policy", OF_POLICY)
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_correct_kept_sets_are_equal(policy: str, suffix: str, written: Written, check: Check, tmp_path: Path) -> None:
    file = save(tmp_path / f"kept{suffix}", kept_by(OF_POLICY[policy], written))
    code, out, err = check(written.path, file, "-p", policy, "-b", B)
    assert (code, err) == (0, "")
    assert out.startswith(f"equal: {policy} at {B} tokens a row: {L} layers, {HKV} sets a layer")


def test_metadata_orders_heads_and_layers(written: Written, check: Check, tmp_path: Path) -> None:
    kept = kept_by(OF_POLICY[SNAPKV], written)[[2, 0, 1]][:, [1, 2, 0]]
    for suffix in (".npz", ".safetensors"):
        file = save(tmp_path / f"kept{suffix}", kept, heads=[1, 2, 0], layers=[9, 2, 5], engine="ours")
        assert check(written.path, file, "-p", SNAPKV, "-b", B)[0] == 0


def test_padding_and_repeated_rows(written: Written, check: Check, tmp_path: Path) -> None:
    """An engine with a row for each head, and a policy with one set a layer."""
    kept = np.array(decision(Trace(written.path), "tova", B).rows)
    padded = np.pad(np.repeat(kept, HKV, axis=1), ((0, 0), (0, 0), (0, 5)), constant_values=-1)
    assert check(written.path, save(tmp_path / "kept.npz", padded), "-p", "tova", "-b", B)[0] == 0


@pytest.fixture
def tied(content: Content, tmp_path: Path) -> tuple[Written, np.ndarray]:
    """A trace on which, in one row, the keys at both sides of the cut are nearly equal, and kept sets with the other of
    the two tokens: their scores differ by some 1e-6."""
    policy = "snapkv:pool=none"
    write_trace(tmp_path / "plain.h5", content)
    plain = decision(Trace(tmp_path / "plain.h5"), policy, B)
    keys = [one.copy() for one in content.k]
    pairs = {}
    for layer, row in np.ndindex(L, HKV):
        lowest_kept, last = pairs[layer, row] = plain.ranked(layer, row)[[B - 8 - 1, -1]]
        keys[layer][row, last] = keys[layer][row, lowest_kept] * np.float32(1 - 1e-6)
    path = tmp_path / "nearly.h5"
    write_trace(path, Content(**vars(content) | {"k": keys}))
    ours = decision(Trace(path), policy, B)
    at_cut = {place: ours.ranked(*place)[[B - 8 - 1, B - 8]] for place in pairs}
    layer, row = next(place for place in pairs if set(at_cut[place]) == set(pairs[place]))
    inside, outside = at_cut[layer, row]
    assert ours.scores[layer, row, inside] > ours.scores[layer, row, outside]
    kept = np.array(ours.rows)
    kept[layer, row] = np.sort(np.where(kept[layer, row] == inside, outside, kept[layer, row]))
    return Written(path, content), kept


def test_rounding_is_a_legal_tie(tied: tuple[Written, np.ndarray], check: Check, tmp_path: Path) -> None:
    trace, kept = tied
    words = trace.path, save(tmp_path / "kept.npz", kept), "-p", "snapkv:pool=none", "-b", B
    code, out, _ = check(*words)
    assert code == 0
    assert out.rstrip().endswith("; 1 differ in tied tokens alone")
    assert check(*words, "--tolerance", "1e-9")[0] == 1


def test_equal_scores_are_a_legal_tie_on_request(written: Written, check: Check, tmp_path: Path) -> None:
    file = save(tmp_path / "kept.npz", kept_by(with_bug(OF_POLICY[SNAPKV], higher_ties=True), written))
    words = written.path, file, "-p", SNAPKV, "-b", B
    assert check(*words)[0] == 1
    assert check(*words, "--ties", "any")[0] == 0


def test_the_table_and_the_lines_of_every_row(written: Written, check: Check, tmp_path: Path) -> None:
    kept = kept_by(OF_POLICY[SNAPKV], written)
    other = np.setdiff1d(np.arange(P), kept[1, 2])[0]
    evicted = kept[1, 2, 3]
    kept[1, 2, 3] = other
    kept[1, 2].sort()
    file = save(tmp_path / "kept.npz", kept)
    code, out, _ = check(written.path, file, "-p", SNAPKV, "-b", B, "--data", tmp_path / "rows.csv")
    assert code == 1
    assert f"layer 5, head 2; it keeps {other} (score" in out
    assert f"it evicts {evicted}" in out
    assert "1 of 9 sets differ" in out
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert lines[0] == "layer,head,ours,theirs,shared,overlap,tied"
    assert len(lines) == 1 + L * HKV
    assert lines[6] == f"5,2,{B},{B},{B - 1},{(B - 1) / (B + 1):.17g},False"


WRONG = {
    "no array": ({"kept": np.zeros((L, HKV, B), np.int32)}, "arrays: expected positions, found kept"),
    "shape": ({"positions": np.zeros((L, B), np.int32)}, "array: expected int32 [layers, heads, slots]"),
    "floats": ({"positions": np.zeros((L, HKV, B))}, "array: expected int32 [layers, heads, slots]"),
    "rows": ({"positions": np.zeros((L, 2, 1), np.int32)}, "rows of a layer: expected 3, or a multiple, found 2"),
    "layers": ({"positions": np.zeros((2, HKV, 1), np.int32)}, "layers: metadata: expected 2 different numbers"),
    "outside": ({"positions": np.full((L, HKV, 1), P, np.int32)}, f"[0, 0]: position: expected 0 to {P - 1}"),
    "twice": ({"positions": np.zeros((L, HKV, 2), np.int32)}, "positions: expected each once, found 0 twice"),
    "metadata": (
        {"positions": np.zeros((L, HKV, 1), np.int32), "metadata": '{"heads": [0, 0, 1]}'},
        "heads: metadata: expected 3 different numbers",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_rejected(case: str, written: Written, check: Check, tmp_path: Path) -> None:
    arrays, said = WRONG[case]
    np.savez(tmp_path / "kept.npz", **arrays)
    code, out, err = check(written.path, tmp_path / "kept.npz", "-p", SNAPKV, "-b", B)
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert said in err
