"""Does `kvreplay tune` find what is better, judge it where it did not look, and refuse what cannot be meant?"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

import kvreplay as kv
from kvreplay import _engine
from kvreplay.errors import Error
from kvreplay.tune import search, space
from kvreplay.tune.command import main
from kvreplay.tune.hold_out import split_prompts

# ---- the page


def test_the_commands_of_the_page_print_what_it_shows(traces, tmp_path, capsys, monkeypatch):
    """On these traces instead of the corpus, so with other numbers: the same lines, and files that replay."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[2] / "docs" / "tune.md").read_text()
    shown = re.findall(r"^\$ kvreplay tune build/corpus/\S+ (.*)\n((?:.+\n)+?)```", page, re.MULTILINE)
    assert len(shown) == 2
    for words, lines in shown:
        assert main([*map(str, traces), *shlex.split(words), "--trials", "8"]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert beginnings(printed) == beginnings(lines.splitlines())
        run = kv.replay(traces[0], "@" + shlex.split(words)[-1], "0.1", metrics="attention_recall", output="replayed")
        assert set(run.overall["role"]) >= {"asked"}


def beginnings(lines: list[str]) -> list[str]:
    """The labels, or the sentences up to their first number; a verdict and its consequence may be either. Wrapped lines
    are indented."""
    found = [re.match(r"(?:not )?(better on held-out traces:|\S*) ?", line)[1] for line in lines if line[0] != " "]
    return [{"written": "replay"}.get(one, one) for one in found]


# ---- search


def test_a_known_optimum_is_found(traces, tune):
    """`random` with the most sinks keeps what the traces of the kind sinks attend to."""
    sinks = [one for one in traces if "sinks" in one.name]
    found = tune(*sinks, "-p", "random", "-b", "12", "--search", "sinks=0|1|2|4,seed=0", "--metric", "attention_recall")
    assert found["best"] == "random:sinks=4"
    assert found["fitting"]["difference"] > 0.1
    assert found["better"] and found["verdict"].startswith("better on held-out traces: +")
    assert found["held_out"]["low"] > 0
    assert found["tried"].startswith("all of sinks=0|1|2|4")


def test_the_numbers_are_those_of_the_file_replayed(traces, tune, tmp_path):
    found = tune(*traces, "-p", "snapkv", "-b", "0.25", "--search", "window=1..32,kernel=1|3|5", "--trials", "10")
    for policy, word in ((found["start"], "start"), ("@best.yaml", "best")):
        run = kv.replay(traces, policy, "0.25", metrics="output_error:pooled", output=tmp_path / word)
        rows = run.overall[(run.overall["metric"] == "output_error") & (run.overall["variant"] == "pooled")]
        rows = rows[rows["role"] == "asked"]
        values = rows.set_index("trace")["value"]
        for side in ("fitting", "held_out"):
            assert found[side][word] == pytest.approx(values[found[side]["traces"]].mean(), abs=1e-12)
    assert found["fitting"]["best"] <= found["fitting"]["start"]  # an error, the metric where none is named
    text = (tmp_path / "best.yaml").read_text()
    assert "# kvreplay tune " in text and found["verdict"] in text and "'" + found["best"] + "'" in text


def test_the_same_call_gives_the_same_answer_and_computes_nothing_again(traces, tune, tmp_path):
    words = [*traces, "-p", "streaming-llm", "-b", "16", "--search", "sinks=0..15", "--trials", "6", "--seed", "3"]
    first = tune(*words)
    files = {one: one.stat().st_mtime_ns for one in tmp_path.glob("kvreplay-tune/*/cells/*.h5")}
    assert files
    assert tune(*words) == first
    assert {one: one.stat().st_mtime_ns for one in tmp_path.glob("kvreplay-tune/*/cells/*.h5")} == files
    shutil.rmtree(tmp_path / "kvreplay-tune")
    assert tune(*reversed(traces), *words[len(traces) :])["held_out"] == first["held_out"]


def test_what_is_held_out_is_never_fitted_on(traces, tune, tmp_path):
    found = tune(*traces, "-p", "snapkv", "-b", "16", "--search", "window=1..16", "--trials", "5")
    fitting = {one.stem for one in tmp_path.glob("kvreplay-tune/fitting/cells/*.h5")}
    held_out = {one.stem for one in tmp_path.glob("kvreplay-tune/held_out/cells/*.h5")}
    assert fitting == set(found["fitting"]["traces"]) and held_out == set(found["held_out"]["traces"])
    assert not fitting & held_out and fitting | held_out == {one.stem for one in traces}
    asked = kv.Run(tmp_path / "kvreplay-tune" / "held_out").overall
    assert set(asked["policy"][asked["role"] == "asked"]) == {"snapkv"}
    assert asked[asked["role"] == "asked"]["cell"].nunique() <= 2 * len(held_out)


def test_nothing_better_is_said_plainly(traces, tune, tmp_path):
    found = tune(*traces, "-p", "oracle", "-b", "16", "--search", "heads=kv|layer", "--metric", "attention_recall")
    assert found["best"] == found["start"] == "oracle"
    assert not found["better"] and found["verdict"].startswith(
        "not better on held-out traces: no candidate beats the start on the fitting traces"
    )
    assert (tmp_path / "best.yaml").read_text().endswith("'oracle'\n")


def test_more_memory_is_no_verdict(traces, tune):
    found = tune(*traces, "-p", "random:sinks=4,heads=layer", "-b", "12", "--search", "sinks=4")
    assert found["held_out"]["memory"] == 1
    found = tune(*traces[1::2], "--held-out", *traces[::2], "-p", "oracle:heads=layer", "-b", "12",
                 "--search", "heads=query", "--metric", "attention_recall")  # fmt: skip
    assert found["best"] == "oracle:heads=query" and found["held_out"]["memory"] == 4
    assert found["held_out"]["low"] > 0 and not found["better"]
    assert found["verdict"].startswith("no verdict, unequal memory: the best uses 4 times as much")


def test_a_loss_is_better_when_lower(traces, tune):
    found = tune(*traces, "-p", "random", "-b", "12", "--search", "sinks=0|4", "--metric", "output_error")
    assert found["fitting"]["best"] <= found["fitting"]["start"] and found["direction"] == "lower"
    assert found["best"] == "random:sinks=4"


def test_protected_tokens_stay_with_every_candidate(traces, tune, tmp_path):
    protect = "protect=(sinks=4,recent=0.1)"
    words = [*traces, "-b", "12", "-p", "random:protect=(sinks=4,recent=10%)"]
    found = tune(*words, "--search", "seed=0|1|2")
    assert found["start"] == f"random:{protect}" and found["best"].endswith(protect)
    assert (tmp_path / "best.yaml").read_text().endswith(f"'{found['best']}'\n")
    run = kv.replay(traces[0], "@best.yaml", "12", metrics="attention_recall", output=tmp_path / "replayed")
    assert run.selection(found["best"], 12).mask()[..., :4].all()
    found = tune(*traces, "-b", "12", "-p", "random", "--search", "protect=(recent=4)|(sinks=4,recent=1)")
    assert found["best"] == "random:protect=(sinks=4,recent=1)", "what the traces with sinks attend to"


def test_parts_are_parameters_too():
    drawn = space.candidates("h2o", space.asked_space(["select=top-k|chunks,chunk=5|10"]), 64, 0)
    assert drawn.policies == ["h2o", "h2o:select=chunks,chunk=5", "h2o:select=chunks"]
    assert len(drawn.refused) == 2 and "chunk" in str(drawn.refused[0])  # of top-k, unused parameter
    assert {"norm", "progressive"} <= set(space.declared_space("h2o:allocate=dynamickv"))


def test_what_is_searched_when_nothing_is_said():
    assert list(space.declared_space("snapkv")) == ["pool", "pool_order", "window_at"]
    found = space.declared_space("pyramid-infer")
    assert isinstance(found["r"], space.Real) and "distance_weight" not in found


def test_values_replace_values():
    assert space.with_values("snapkv:window=32", {"window": "8", "kernel": "3"}) == "snapkv:kernel=3"
    listed = space.with_values("snapkv", {"allocate": "list", "shares": "2,1"})
    assert listed == "snapkv:allocate=list,shares=(2,1)"
    assert space.with_values(listed, {"window": "9"}) == "snapkv:window=9,allocate=list,shares=(2,1)"
    assert space.without_part(listed, "allocate") == "snapkv"
    layers = "layers:0-1=(snapkv:window=9),2-3=h2o"
    assert space.with_values(layers, {}) == "layers:0-1=(snapkv:window=9),2-3=h2o"


@pytest.mark.parametrize("candidates, traces, shares",
                         [(64, 18, [1 / 9, 1 / 3, 1]), (2, 18, [1]), (64, 2, [1]), (4, 6, [1 / 3, 1])])  # fmt: skip
def test_rounds_of_halving(candidates, traces, shares):
    assert search.halving_shares(candidates, traces) == pytest.approx(shares)


def test_policies_in_python_keep_their_file(traces, tune, tmp_path):
    (tmp_path / "mine.py").write_text(PYTHON_POLICY)
    found = tune(*traces, "-p", "mine.py:early", "-b", "12", "--search", "first=1|40", "--metric", "attention_recall")
    assert {found["start"], found["best"]} <= {"mine.py:early", "mine.py:early:first=1", "mine.py:early:first=40"}
    assert found["start"] == "mine.py:early"


PYTHON_POLICY = """
import kvreplay as kv
import numpy as np


@kv.policy
def early(view, first: int = 20):
    return -np.abs(np.tile(np.arange(view.tokens), (view.kv_heads, 1)) - first).astype(float)
"""


SHORT = 80  # tokens of a prompt on which it raises
FAILS_ON_SHORT = f"""
import kvreplay as kv
import numpy as np


@kv.policy
def sometimes(view, first: int = 60):
    if view.tokens == {SHORT}:
        raise ValueError("a short prompt")
    return -np.abs(np.tile(np.arange(view.tokens), (view.kv_heads, 1)) - first).astype(float)
"""


@pytest.fixture
def short(tmp_path):
    """A trace on which the policy of sometimes.py raises."""
    (tmp_path / "sometimes.py").write_text(FAILS_ON_SHORT)
    words = ["--layers", "4", "--prompt", str(SHORT), "--continuation", "16", "--head-dim", "16"]
    assert _engine.program(["synth", "gaussian", "-o", str(tmp_path / "short.h5"), *words]) == 0
    return tmp_path / "short.h5"


@pytest.mark.filterwarnings("ignore:failed")
def test_what_is_undefined_on_a_held_out_trace_has_no_verdict(traces, short, tune):
    found = tune(*traces[:3], "--held-out", *traces[3:5], short, "-p", "sometimes.py:sometimes", "-b", "12",
                 "--search", "first=1|60")  # fmt: skip
    one = found["held_out"]
    assert one["undefined"] == 1 and set(one["traces"]) == {*(trace.stem for trace in traces[3:5]), "short"}
    assert one["difference"] == pytest.approx(one["best"] - one["start"], abs=1e-12)
    if found["best"] != found["start"]:
        assert not found["better"]
        assert found["verdict"] == "no verdict: start or best is undefined on 1 of 3 held-out traces"


@pytest.mark.filterwarnings("ignore:failed")
def test_what_is_undefined_on_every_held_out_trace_is_refused(traces, short, refused):
    other = short.with_name("other.h5")
    words = ["--seed", "9", "--layers", "4", "--prompt", str(SHORT), "--continuation", "16", "--head-dim", "16"]
    assert _engine.program(["synth", "gaussian", "-o", str(other), *words]) == 0
    said = refused(3, *traces[:3], "--held-out", short, other, "-p", "sometimes.py:sometimes", "-b", "12",
                   "--search", "first=1|60")  # fmt: skip
    assert "not defined for both start and best on any held-out trace" in said and "a short prompt" in said


@pytest.mark.filterwarnings("ignore:failed")
def test_a_policy_that_fails_on_a_fitting_trace_takes_no_layer(traces, short, tune):
    sides = [*traces[:2], short, "--held-out", *traces[2:4], "-b", "12", "--ranges", "2"]
    others = ["-p", "random", "-p", "snapkv:window=8"]
    found = tune(*sides, "-p", "sometimes.py:sometimes:first=1", *others)
    assert "sometimes" not in found["best"] and "sometimes" not in found["tried"] and "nan" not in found["tried"]
    assert "omitted, undefined on a fitting trace: sometimes.py:sometimes:first=1" in found["notes"]
    assert found["best"] == tune(*sides, *others)["best"]


@pytest.mark.filterwarnings("ignore:failed")
def test_layers_are_not_sized_by_what_fails_on_a_trace(traces, short, refused):
    said = refused(3, *traces[:2], short, "--held-out", *traces[2:4], "-p", "sometimes.py:sometimes", "-b", "12",
                   "--layers")  # fmt: skip
    assert "not defined for sometimes.py:sometimes:allocate=uniform at 3 of short" in said and "a short prompt" in said


def test_a_trace_that_was_renamed_is_another_row(traces, tune, tmp_path):
    words = ["-p", "streaming-llm", "-b", "16", "--search", "sinks=0|4"]
    first = tune(*traces, *words)
    copy = shutil.copy(traces[0], tmp_path / "gaussian-copy.h5")
    assert tune(copy, *traces[1:], *words)["best"] == first["best"]
    assert tune(*traces, *words) == first


def test_equal_tokens_stay_on_one_side_whatever_the_names_say(traces, refused, tmp_path):
    copy = shutil.copy(traces[0], tmp_path / "copy.h5")
    said = refused(2, *traces[:3], "--held-out", copy, traces[4], "--same-prompt", "zzz", "-p", "random", "-b", "12",
                   "--search", "sinks=0|4")  # fmt: skip
    assert said.startswith("--held-out: prompt both fitted and held out")


def test_what_changes_how_much_is_held_is_searched_only_when_named():
    assert "grow" not in space.declared_space("h2o-online:recent=8")


def test_another_part_brings_its_own_values():
    assert space.with_values("h2o:select=chunks,chunk=5", {"select": "top-k"}) == "h2o:select=top-k"
    assert space.with_values("h2o:select=chunks,chunk=5", {"select": "chunks"}) == "h2o:select=chunks,chunk=5"


def test_numbers_beyond_any_are_refused(traces, refused):
    assert "range" in refused(2, *traces, "-p", "random", "-b", "12", "--search", f"sinks=0..1{'0' * 400}")


# ---- layers


@pytest.mark.filterwarnings("ignore:.*nothing is chosen")
def test_layer_budgets_do_what_the_grid_promised(traces, tune, tmp_path):
    """The predicted mean of the chosen sizes is what the file replays to, exactly: B is a multiple of 4."""
    found = tune(*traces, "-p", "snapkv:window=4", "-b", "16", "--layers", "--metric", "attention_recall")
    fitted = [one for one in traces if one.stem in found["fitting"]["traces"]]
    run = kv.replay(fitted, "snapkv:window=4", [4 * one for one in (1, 2, 3, 4, 5, 6, 8, 12, 16)],
                    metrics="attention_recall", detail="layer")  # fmt: skip
    rows = by_layer(run)
    curve = rows.groupby(["layer", "budget_tokens"])["value"].mean()
    shares = re.search(r"shares=\((.*)\)", found["best"])
    assert shares, found["best"]
    counts = [float(one) * 16 for one in shares[1].split(",")]
    assert sum(counts) == 4 * 16
    predicted = np.mean([curve[layer, count] for layer, count in enumerate(counts)])
    assert found["fitting"]["best"] == pytest.approx(predicted, abs=1e-12)
    assert found["fitting"]["best"] > found["fitting"]["start"]
    again = kv.replay(traces[0], "@best.yaml", "16", metrics="layer_budget", detail="layer")
    assert by_layer(again, "layer_budget").sort_values("layer")["value"].tolist() == counts


def by_layer(run: kv.Run, metric: str = "attention_recall"):
    rows = run.results
    rows = rows[(rows["metric"] == metric) & (rows["variant"] == "") & (rows["role"] == "asked")]
    return rows[(rows["layer"] != "all") & (rows["head"] == "all")].astype({"layer": int})


def test_layers_that_cannot_be_sized(traces, refused):
    for policy, reason in (
        ("h2o", "the number of protected tokens depends on the budget: expected a number of tokens"),
        ("chunkkv:reuse=2", "layers that share a set cannot have different budgets"),
        ("pyramid-infer", "nested sets need token counts that do not depend on scores"),
        ("local", "protected tokens fill the whole budget"),
        ("hybrid", "has a separate plan for each range of layers"),
    ):
        assert reason in refused(2, *traces, "-p", policy, "-b", "16", "--layers")


# ---- ranges


def test_layer_ranges_do_what_their_policies_promised(traces, tune, tmp_path):
    policies = ["streaming-llm", "snapkv:window=4"]
    found = tune(
        *traces, "-p", policies[0], "-p", policies[1], "-b", "16", "--ranges", "2", "--metric", "attention_recall"
    )
    fitted = [one for one in traces if one.stem in found["fitting"]["traces"]]
    run = kv.replay(fitted, policies, 16, metrics="attention_recall", detail="layer")
    values = by_layer(run).groupby(["layer", "policy"])["value"].mean()
    best = max(
        np.mean([values[layer, (one, other)[layer >= cut]] for layer in range(4)])
        for cut in range(5) for one, other in (("streaming-llm", "snapkv"), ("snapkv", "streaming-llm"))
    )  # fmt: skip
    assert found["fitting"]["best"] == pytest.approx(best, abs=1e-12)
    assert found["start"] in policies
    assert found["fitting"]["best"] >= found["fitting"]["start"]


def test_layers_that_cannot_be_parted(traces, refused):
    for policy, reason in (
        ("pyramid-kv", "its layers depend on each other: expected allocate=uniform"),
        ("chunkkv:reuse=2", "its layers depend on each other: expected share=none"),
        ("pyramid-infer", "its layers depend on each other: expected a policy whose layers are not nested"),
        ("full", "the policy ignores the budget"),
    ):
        said = refused(2, *traces, "-p", "snapkv", "-p", policy, "-b", "16", "--ranges")
        assert said.startswith(policy.partition(":")[0]) and reason in said


def test_ranges_are_written_as_policies_are():
    assert search.ranges_text(["a", "a", "b", "c:x=1"]) == "layers:0-1=(a),2=(b),3=(c:x=1)"
    assert search.ranges_text(["a"] * 3) == "a"


# ---- sides


def test_one_prompt_is_on_one_side(traces, tmp_path):
    again = tmp_path / "other-name.h5"
    shutil.copy(traces[0], again)
    for seed in range(10):
        divided = split_prompts([*traces, again], [], 0.3, None, seed)
        fitting = {one.prompt for one in divided.fitting}
        held_out = {one.prompt for one in divided.held_out}
        assert not fitting & held_out and len(held_out) == 2
        assert len(divided.fitting) + len(divided.held_out) == 7
    with pytest.raises(Error, match="prompt both fitted and held out"):
        split_prompts(traces[:3], [again, *traces[4:]], 0.3, None, 0)
    kinds = split_prompts([*traces, again], [], 0.3, re.compile("-(.)"), 0)  # 0 to 5, and n, of the tokens of 0
    assert len({one.prompt for one in [*kinds.fitting, *kinds.held_out]}) == 6
    given = split_prompts(traces[:3], traces[3:], 0.3, None, 0)
    assert {one.path for one in given.held_out} == set(traces[3:])


def test_traces_are_files_folders_patterns_and_manifests(traces, refused, tmp_path):
    names = sorted(path.name for path in traces)
    folder = traces[0].parent
    [sinks, gaussian] = [str(folder / f"{kind}-*.h5") for kind in ("sinks", "gaussian")]
    divided = split_prompts([folder], [], 0.3, None, 0)
    assert sorted(one.path.name for one in [*divided.fitting, *divided.held_out]) == names
    divided = split_prompts([sinks], [gaussian], 0.3, None, 0)
    assert {one.path.name for one in divided.held_out} == {name for name in names if name.startswith("gaussian")}
    out = ["-o", str(tmp_path / "new.yaml"), "--work", str(tmp_path / "runs"), "--trials", "2"]
    assert main([sinks, "--held-out", gaussian, "-p", "snapkv", "-b", "0.5", *out]) == 0
    hashes = [one.hash for one in divided.fitting]
    manifest = tmp_path / "list.csv"
    rows = [f"{one.path},{hash}\n" for one, hash in zip(divided.fitting, hashes, strict=True)]
    manifest.write_text("".join(["file,trace_hash\n", *rows]))
    assert len(split_prompts([manifest], [gaussian], 0.3, None, 0).fitting) == len(rows)
    manifest.write_text(manifest.read_text().replace(hashes[0], hashes[1]))
    said = refused(3, manifest, "-p", "snapkv", "--compression-ratio", "0.9", "-o", "best.yaml")
    assert said.startswith(f"{manifest}:2: trace_hash of ") and said.endswith(
        f"expected {hashes[1]}, found {hashes[0]}"
    )


# ---- refusals


REFUSALS = [
    (["-p", "snapkv", "-b", "16", "--search", "windwo=8..16"], 2, "snapkv: unknown parameter windwo: did you "
                                                                        "mean window?"),
    (["-p", "snapkv", "-b", "16", "--search", "window"], 2, "--search: not an assignment: expected NAME=LOW..HIGH"),
    (["-p", "snapkv", "-b", "16", "--search", "window=16..8"], 2, "--search window: range: expected LOW..HIGH"),
    (["-p", "snapkv", "-b", "16", "--search", "window=a..b"], 2, "--search window: range: expected two numbers"),
    (["-p", "snapkv", "-b", "16", "--search", "window=8,window=9"], 2, "--search: given more than once"),
    (["-p", "strided", "-b", "16"], 2, "--search: no parameter of strided has choices or a range up to 4096 wide"),
    (["-p", "snapvk", "-b", "16"], 2, "snapvk: unknown policy: did you mean snapkv?"),
    (["-p", "snapkv", "-b", "0"], 2, "budget 0: out of range"),
    (["-p", "snapkv", "--compression-ratio", "1.5"], 2, "--compression-ratio: out of range: expected the share"),
    (["-p", "snapkv", "-b", "16", "--compression-ratio", "0.9"], 2, "tune: argument --compression-ratio: not allowed"),
    (["-p", "snapkv", "-b", "many", "--layers"], 2, "budget many: not a budget"),
    (["-p", "snapkv", "-p", "snapkv:window=8", "-b", "16", "--ranges"], 2, "-p: policies to tune: expected different"),
    (["-p", "snapkv", "-b", "1", "--layers"], 2, "-b: protected tokens fill the budget: expected a larger"),
    (["-p", "snapkv", "-b", "16", "--metric", "attention_recal"], 2, "metric"),
    (["-p", "snapkv", "-b", "16", "--metric", "layer_budget"], 2, "--metric: layer_budget has no direction"),
    (["-p", "snapkv", "-b", "16", "--metric", "kld"], 2, "--metric: kld is measured in the live model: expected"),
    (["-p", "snapkv", "-b", "16", "--metric", "kld:mean"], 2, "--metric: unknown variant: expected kld or kld:med"),
    (["-p", "snapkv", "-b", "16", "--metric", "f1", "--model", "m"], 2, "--metric: f1 needs generated text"),
    (["-p", "snapkv", "-b", "16", "--metric", "error_growth:steps"], 2, "--metric: error_growth:steps has no "
                                                                        "direction"),
    (["-p", "snapkv", "-b", "16", "--model", "m"], 2, "--model: output_error:pooled needs no model: expected a metr"),
    (["-p", "snapkv", "-b", "16", "--metric", "kld", "--model", "m", "--layers"], 2, "--metric: kld is not additive o"),
    (["-p", "snapkv", "-b", "16", "--hold-out", "1"], 2, "--hold-out: out of range"),
    (["-p", "snapkv", "-b", "16", "-o", "best.txt"], 2, "-o: unknown file format: expected a name ending in .yaml"),
    (["-p", "snapkv", "-b", "16", "--ranges"], 2, "-p: policies to tune: expected two or more policies, found 1"),
    (["-p", "snapkv", "-p", "h2o", "-b", "16"], 2, "-p: policies to tune: expected one policy, or --ranges, found 2"),
    (["-p", "full", "-b", "16", "--search", "store=exact|quantised"], 2, "full: "),
    (["-p", "snapkv", "-b", "16", "--protect", "sinks=4"], 2,
     "tune: unknown option: expected an option of kvreplay tune --help, found"),
    (["-p", "h2o:protect=sinks=4,recent=4", "-b", "16"], 2, "h2o:protect: missing parentheses: expected (sinks=4,rec"),
    (["-p", "h2o:protect=(recent=10%)", "-b", "16", "--layers"], 2, "the number of protected tokens depends on the "
                                                                    "budget"),
    (["-p", "snapkv", "-b", "16", "--trial", "3"], 2, "tune: unknown option --trial: did you mean --trials?"),
]  # fmt: skip


@pytest.mark.parametrize("words, code, said", REFUSALS, ids=[said[:40] for _, _, said in REFUSALS])
def test_what_cannot_be_meant_is_one_line(words, code, said, traces, refused):
    assert said in refused(code, *traces, *words)


def test_too_few_prompts(traces, refused, tmp_path):
    words = ["-p", "snapkv", "-b", "16"]
    expected = "traces: too few prompts for a held-out set: expected traces of at least 3 prompts, or --held-out TRACE"
    assert refused(2, traces[0], *words) == f"{expected}, found 1"
    assert refused(2, *traces[:2], *words) == f"{expected}, found 2"
    said = refused(2, *traces[:2], *words, "--held-out", traces[3])
    assert said == "--held-out: too few prompts for an interval: expected 2 or more, found 1"
    assert "none.h5" in refused(3, tmp_path / "none.h5", *words)


def test_an_interruption_keeps_what_is_finished(traces, tune, tmp_path, monkeypatch, capsys):
    words = [*map(str, traces), "-p", "snapkv", "-b", "16", "--search", "window=1..16", "--trials", "5"]
    real = kv.replay

    def interrupted(paths, *others, **options):
        real(paths[:1], *others, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr("kvreplay.tune.objective.replay", interrupted)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 130
    assert capsys.readouterr().err == (
        "kvreplay: tune: interrupted; finished traces are kept; run the same command to continue\n"
    )
    [path] = tmp_path.glob("kvreplay-tune/fitting/cells/*.h5")
    with h5py.File(path) as file:
        before = set(file["cells"])
    monkeypatch.setattr("kvreplay.tune.objective.replay", real)
    tune(*words)
    with h5py.File(path) as file:
        assert before <= set(file["cells"])


def test_the_table_is_for_people(traces, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*map(str, traces), "-p", "snapkv", "-b", "16", "--search", "window=2|4|16", "-o", "out/mine.yaml"]
    assert main(words) == 0
    said = capsys.readouterr().out
    words = " ".join(said.split())
    assert "OPEN LOOP" in words and "on held-out traces" in words
    assert max(map(len, said.splitlines())) <= 80
    better = "not better" not in words
    end = "replay     -p @out/mine.yaml\n" if better else "written    out/mine.yaml: not shown to be better\n"
    assert said.endswith("runs       kvreplay-tune, reused by the next call\n" + end)
    assert Path("out/mine.yaml").is_file() and Path("kvreplay-tune").is_dir()
