"""Does `kvreplay regret` split the gap of every policy that has one, print what it found, and refuse the others?"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import kvreplay as kv
from kvreplay import _engine, python_policies, regret_terms
from kvreplay.bounds.command import main
from kvreplay.errors import Error, Refusal
from kvreplay.regret_terms import ROUNDING, TERMS

NEEDLE = Path(__file__).resolve().parents[2] / "traces" / "smollm2-135m-needle.h5"
OF_CHUNKS = ["chunkkv:heads=kv,fill=none", "chunkkv:fill=tokens", "chunkkv:window_mode=replace", "h2o:select=chunks",
             "hybrid:chunkkv.heads=kv", "layers:0-14=(chunkkv:heads=kv),15-29=snapkv"]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_terms_of_every_policy_are_no_less_than_0_and_sum_to_the_gap(tiny: list[Path]) -> None:
    """On the shipped trace. What is refused is refused for a reason of the bounds, or needs more than a name."""
    bounded, refused = [], {}
    for policy in sorted(set(kv.policy) - set(python_policies._entered)):  # other tests may have entered some
        try:
            kv.regret(tiny[0], policy, 4)
            bounded.append(policy)
        except Error as error:
            assert error.exit_code in (Refusal.USAGE, Refusal.INPUT), error
            refused[policy] = str(error)
    assert {"snapkv", "h2o", "pyramid-kv", "pyramid-infer", "chunkkv", "dynamickv", "sca", "random"} <= set(bounded)
    for policy, why in refused.items():
        if not why.startswith("oracle:"):
            with pytest.raises(Error):
                kv.replay(tiny[0], policy, 4)
    assert all(one.startswith("oracle:") for one in (refused["full"], refused["h2o-online"], refused["kivi"]))

    found = kv.regret(NEEDLE, [*bounded, *OF_CHUNKS], ["0.05", "64"])
    assert len(found) == 2 * (len(bounded) + len(OF_CHUNKS))
    assert found.notna().all(axis=None)
    assert (found[list(TERMS)] >= -ROUNDING).all(axis=None)
    whole_gap = found["bound"] - found["recall"]
    assert np.allclose(found[list(TERMS)].sum(axis=1), whole_gap, rtol=0, atol=1e-12)
    assert (found["bound"] <= 1 + ROUNDING).all()
    chunked = found["policy"].str.contains("chunk")
    assert (found["structure"][chunked] > 0.001).all() and (found["structure"][~chunked].abs() <= ROUNDING).all()
    assert (found["head"][found["heads"] == "layer"].abs() <= ROUNDING).all(), "one set a layer has one count"
    assert (found.set_index("policy")["head"].loc["snapkv"] > 0.001).all()
    assert (found.set_index("policy")["layer"].loc["snapkv"] > 0.001).all()
    assert (found.set_index("policy")["score"].loc["oracle"].abs() <= ROUNDING).all(), "it has the best score"


def test_everything_kept_has_no_gap(tiny: list[Path]) -> None:
    found = kv.regret(tiny, "snapkv", 1.0)
    assert (found["recall"] == 1).all() and (found["bound"] == 1).all() and (found[list(TERMS)] == 0).all(axis=None)


@pytest.mark.filterwarnings("ignore")
def test_table_document_and_file_say_the_same(tiny: list[Path], said, tmp_path: Path) -> None:
    words = [*tiny, "-p", "chunkkv:chunk=3,window=2,snapkv:window=2", "-b", "0.5,3"]
    data = tmp_path / "made" / "terms.csv"
    document = json.loads(said(*words, "-o", data, "--json"))
    rows = pd.read_csv(data, dtype={"budget": str}, float_precision="round_trip")
    assert rows.columns.tolist() == list(regret_terms.COLUMNS) and len(rows) == len(document["traces"]) == 3 * 2 * 2
    assert document["open_loop"] and document["metric"] == "attention_recall"
    expected = kv.regret(tiny, ["chunkkv:chunk=3,window=2", "snapkv:window=2"], [0.5, 3])
    pd.testing.assert_frame_equal(rows, expected, check_exact=True)
    printed = said(*words)
    assert "OPEN LOOP" in printed and "mean over 3 traces" in printed
    blocks = re.split(r"\nbudget ", printed)[1:]
    assert [block.split(":")[0] for block in blocks] == ["3", "0.5"], "by their tokens"
    for block in blocks:
        budget = block.split(":")[0]
        for line in block.splitlines()[2:4]:
            policy, heads, traces, *numbers = line.split()
            [mean] = [one for one in document["means"] if (one["budget"], one["policy"]) == (budget, policy)]
            of_policy = rows[(rows["budget"] == budget) & (rows["policy"] == policy)]
            names = ["recall", *TERMS, "bound"]
            assert (heads, int(traces)) == (mean["heads"], 3) and mean["traces"] == 3
            assert numbers == [f"{mean[name]:z.4f}" for name in names]
            assert [mean[name] for name in names] == pytest.approx(of_policy[names].mean().tolist(), abs=1e-12)


@pytest.mark.filterwarnings("ignore")
def test_policies_in_python_have_bounds_too(tiny: list[Path], said, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PYTHON_POLICY)
    [line] = json.loads(said(tiny[0], "-p", f"{tmp_path}/mine.py:early", "-b", "3", "--json"))["means"]
    assert line["score"] > 0 and line["policy"] == "early"
    (tmp_path / "other.py").write_text(PYTHON_POLICY.replace("first: int = 2", "first: int = 3"))
    both = f"{tmp_path}/mine.py:early,{tmp_path}/other.py:early"
    assert said(tiny[0], "-p", both, "-b", "3", code=2).startswith("early: two policies of this name")


PYTHON_POLICY = """
import kvreplay as kv
import numpy as np


@kv.policy
def early(view, first: int = 2):
    return -np.abs(np.tile(np.arange(view.tokens), (view.kv_heads, 1)) - first).astype(float)
"""


@pytest.mark.parametrize("sources", [[0, 1, 2], [0, 0, 2]], ids=str)
def test_bound_over_layers_with_other_query_heads(sources: list[int], tmp_path: Path) -> None:
    """The best entries of all layers: each is a share of the mean over the query heads of its layer, then over layers.
    Layers that share keys count as one layer with the query heads of both."""
    path = tmp_path / "heads.h5"
    words = "--layers 3 --kv-heads 2 --query-heads 16,2,4 --prompt 30 --continuation 4 --dtype float32"
    shared = "--kv-source " + ",".join(map(str, sources))
    assert _engine.program(["synth", "gaussian", "-o", str(path), *words.split(), *shared.split()]) == 0
    trace, scale = kv.open(path), kv.open(path)["/model@softmax_scale"]
    prompt, future = trace.prompt, range(trace.prompt, trace.tokens)
    bound, entries = 0.0, []
    for source in set(sources):
        layers = [layer for layer in range(3) if sources[layer] == source]
        share = 1 / len(set(sources)) / len(future) / sum(len(trace.q(layer)) for layer in layers)
        sums = np.zeros((2, trace.tokens))
        for layer in layers:
            queries = trace.q(layer).astype(float)
            for head, t in itertools.product(range(len(queries)), future):
                row = head * 2 // len(queries)
                weights = np.exp(scale * trace.k(layer)[row, : t + 1].astype(float) @ queries[head, t])
                sums[row, : t + 1] += weights / weights.sum()
        bound += share * sums[:, prompt:].sum()
        entries += (share * sums[:, :prompt]).ravel().tolist()
    bound += sum(sorted(entries, reverse=True)[: 6 * 2 * len(set(sources))])
    assert kv.regret(path, "snapkv:window=2", 6)["bound"].tolist() == pytest.approx([bound], abs=1e-6)


@pytest.mark.parametrize(
    "shape, field",
    [("--query-heads 8,4 --kv-heads 4,2", "heads"), ("--head-dim 8,16", "head_dims")],
)
def test_layers_of_different_shape(
    shape: str, field: str, tiny: list[Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The terms within layers are those of two traces with one of the layers each. There is no bound over layers."""
    path = tmp_path / "layers.h5"
    words = f"--layers 2 --prompt 24 --continuation 3 --dtype float32 {shape}".split()
    assert _engine.program(["synth", "gaussian", "-o", str(path), *words]) == 0
    trace, policies = kv.open(path), ["snapkv:window=2", "chunkkv:chunk=3,window=2"]
    alone = [
        kv.from_arrays([trace.q(layer)], [trace.k(layer)], [trace.v(layer)], prompt=trace.prompt,
                       softmax_scale=trace["/model@softmax_scale"])
        for layer in range(2)
    ]  # fmt: skip
    with pytest.warns(UserWarning, match=f"/model/{field}: oracle allocates tokens among layers"):
        found = kv.regret(path, policies, 8)
    parts = [kv.regret(one, policies, 8) for one in alone]
    for name in ["recall", *TERMS[:-1]]:
        expected = (parts[0][name] + parts[1][name]) / 2
        assert found[name].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert found[["layer", "bound"]].isna().all(axis=None)
    capsys.readouterr()
    assert main([str(path), "-p", ",".join(policies), "-b", "8"]) == 0
    printed = capsys.readouterr()
    for policy, line in zip(policies, printed.out.splitlines()[4:6], strict=True):
        assert line.split()[0] == policy and line.split()[2] == "1"
        assert line.split()[-2:] == ["-", "-"] and "-" not in line.split()[3:7]
    assert "expected layers of one shape" in printed.err
    with pytest.warns(UserWarning):
        both = regret_terms.means(kv.regret([path, tiny[0]], policies[0], 4))
    assert both["traces"].tolist() == [1] and both.notna().all(axis=None)


def test_eval_queries_are_those_that_were_asked_for(tiny: list[Path], said) -> None:
    words = [tiny[0], "-p", "snapkv:window=2", "-b", "3", "--json"]
    after = json.loads(said(*words))["means"][0]
    of_all = json.loads(said(*words, "--eval", "all"))["means"][0]
    assert after["recall"] != of_all["recall"] and min(of_all[term] for term in TERMS) >= -ROUNDING


def test_what_fails_is_left_out(tiny: list[Path], said, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PYTHON_POLICY.replace("-np.abs", "1 / 0 - np.abs"))
    broken = f"{tmp_path}/mine.py:early"
    with pytest.warns(UserWarning, match="failed: .*division by zero"):
        found = kv.regret(tiny[0], [broken, "snapkv"], 3)
    assert found["policy"].tolist() == ["snapkv"]
    with pytest.warns(UserWarning), pytest.raises(Error, match="regret: every policy failed: .*division by zero"):
        kv.regret(tiny[0], broken, 3)


IN_TIME = "oracle:free: the policy's sets are dynamic; a static set is no bound for them: expected a one-shot policy"


@pytest.mark.parametrize("policy, why", [
    ("h2o-online", f"{IN_TIME}, found h2o-online"),
    ("snapkv:schedule=every(4)", f"{IN_TIME}, found snapkv:schedule=every,interval=4"),
    ("pyramid-infer:lengths=natural", "oracle:free: the policy ignores the budget: expected a policy with a budget, "
                                      "found pyramid-infer:lengths=natural"),
    ("full", "oracle:counts: the policy keeps every token: expected a policy that evicts, found full"),
    ("hybrid", "oracle:free: layers differ in granularity: expected a policy with one granularity in all layers, "
               "found hybrid"),
    ("oracle:counts=(snapkv)", "oracle:counts: the policy takes its own counts from another policy: expected a policy "
                               "that does not use another policy's counts, found oracle:counts=snapkv"),
    ("snapvk", "snapvk: unknown policy: did you mean snapkv?"),
])  # fmt: skip
def test_policies_without_bounds_are_refused(policy: str, why: str, tiny: list[Path], said) -> None:
    assert said(tiny[0], "-p", policy, "-b", "4", code=2) == why


def test_options_that_cannot_be_meant_are_refused(tiny: list[Path], said) -> None:
    words = [tiny[0], "-p", "snapkv", "-b", "4"]
    assert (
        said(*words, "-o", "terms.txt", code=2)
        == "-o: unknown file format: expected a name ending in .csv, found terms.txt"
    )
    assert said(*words, "--evl", "all", code=2) == "regret: unknown option --evl: did you mean --eval?"
    assert "required" in said(tiny[0], "-p", "snapkv", code=2)
    run = tiny[0].parent / "run"
    run.mkdir()
    (run / "run.json").write_text('{"inputs": [{"path": "a.h5"}]}')
    assert said(run, code=2) == f"{run}: not a trace: expected a trace of this run: a.h5, found a folder"
    with pytest.raises(Error, match="regret: unknown option: expected seed=N of a policy, found seed"):
        kv.regret(tiny[0], "random", 4, seed=3)


def test_a_negative_term_is_an_error_and_rounding_is_none() -> None:
    found = regret_terms.terms("", np.array([0.5, 0.5 - ROUNDING / 2, 0.6, 0.6, 0.7]))
    assert found == pytest.approx([-ROUNDING / 2, 0.1 + ROUNDING / 2, 0, 0.1]), "as it is, not clamped"
    with pytest.raises(Error, match="here: structure is negative"):
        regret_terms.terms("here", np.array([0.5, 0.6, 0.6 - 2 * ROUNDING, 0.6, 0.7]))


def test_budgets_may_be_compression_ratios(tiny: list[Path], said: Callable[..., str]) -> None:
    words = [tiny[0], "-p", "SnapKVPress:window=2", "--json"]
    assert said(*words, "--compression-ratio", "0.75,0.5") == said(*words, "-b", "0.25,0.5")
    wrong = said(*words, "-b", "0.25", "--compression-ratio", "0.5", code=2)
    assert "argument --compression-ratio: not allowed with argument -b/--budget" in wrong
