"""Does every notebook run on the small corpus, keep its figures, numbers and findings, and are the numbers right?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from scipy.stats import permutation_test, ttest_1samp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "notebooks"))

import execute  # noqa: E402
import frame  # noqa: E402
import retrieval  # noqa: E402

from kvreplay.errors import Error  # noqa: E402
from kvreplay.results import Run  # noqa: E402
from kvreplay.trace import Trace  # noqa: E402

PROGRAM = Path(os.environ.get("KVREPLAY", ROOT / "build" / "release" / "kvreplay")).resolve()
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in execute.PAGES)
PAPER = (8.5, 11.0)  # inches: both letter and A4 hold a figure of this size less margins
MARGIN = 0.7

NAMES = [name for name in execute.notebooks() if name != execute.QUICKSTART]
Figures = Callable[[str], Path]


def tools_figures(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """What tools/figures does once everything is built."""
    path = f"{PROGRAM.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [sys.executable, execute.__file__, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path})


@pytest.fixture(scope="session")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """The folder that a notebook leaves, executed once on the small corpus."""
    output = tmp_path_factory.mktemp("figures")
    subprocess.run([ROOT / "tools" / "corpus", "--small"], check=True, capture_output=True)
    done: dict[str, subprocess.CompletedProcess[str]] = {}

    def of(name: str) -> Path:
        if name not in done:
            done[name] = tools_figures(name, "--corpus", ROOT / "build" / "corpus-small", "-o", output)
        assert done[name].returncode == 0, done[name].stderr
        return output / name

    return of


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_its_numbers_fits_on_paper_and_says_which_loop(name: str, figures: Figures):
    folder = figures(name)
    drawn = {path.stem for path in folder.glob("*.svg")}
    assert drawn and drawn == {path.stem for path in folder.glob("*.png")}
    for figure in drawn:
        assert len(pd.read_csv(folder / f"{figure}.csv")) > 0, figure
        picture = (folder / f"{figure}.svg").read_text(encoding="utf-8")
        width, height = (
            float(size) / 72 for size in re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', picture).groups()
        )
        assert width <= PAPER[0] - MARGIN and height <= PAPER[1] - 2 * MARGIN, (figure, width, height)
        words = " ".join(re.findall(r"<!-- (.*?) -->", picture))  # a line of text each
        loop = "closed loop" if name == execute.OF_STUDY else "Open loop: queries as captured under the full cache"
        assert loop in words, figure


@pytest.mark.parametrize("name", NAMES)
def test_every_table_has_its_numbers_and_every_finding_its_verdict(name: str, figures: Figures):
    folder = figures(name)
    assert {path.stem for path in folder.glob("*.md")} <= {path.stem for path in folder.glob("*.csv")}
    found = pd.read_csv(folder / "findings.csv")
    assert list(found) == ["paper", "says", "here", "verdict"] and found.notna().all(axis=None)
    verdicts = ("holds", "holds in part", "does not hold", "not resolved", "by construction", "not tested")
    assert set(found["verdict"].str.partition(":")[0]) <= set(verdicts)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_needs_no_network(name: str, figures: Figures):
    page = (figures(name) / f"{name}.html").read_text(encoding="utf-8")
    assert len(re.findall(r"<img[^>]*data:image/png", page)) == len(list(figures(name).glob("*.png")))
    assert "<script" not in page and not re.search(r'(src|href)="https?:', page)


@pytest.mark.parametrize("name", NAMES)
def test_docs_show_what_the_notebook_leaves(name: str, figures: Figures):
    """The same tables, with the same first line, and the same pictures, whatever the corpus."""
    folder = figures(name)
    assert f"../notebooks/{name}.py" in PAGE
    assert f"]({name}.py)" in (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    tables = [found for found in execute.SHOWN.findall(PAGE) if found[1] == name]
    assert "findings" in [table for _, _, table, _, _ in tables]
    for _, _, table, shown, _ in tables:
        assert shown.splitlines()[0] == (folder / f"{table}.md").read_text(encoding="utf-8").splitlines()[0]
    pictures = {figure for _, notebook, figure in execute.PICTURE.findall(PAGE) if notebook == name}
    assert pictures and pictures <= {path.stem for path in folder.glob("*.png")}


def test_pictures_of_the_docs_are_small_and_all_shown():
    shown = {target for target, _, _ in execute.PICTURE.findall(PAGE)}
    kept = {f"figures/{path.name}" for name in NAMES for path in (ROOT / "docs" / "figures").glob(f"{name}-*.png")}
    assert shown == kept
    assert all((ROOT / "docs" / target).stat().st_size < 120_000 for target in shown)


def test_markers_of_the_docs_name_notebooks():
    assert {name for _, name, *_ in execute.SHOWN.findall(PAGE)} <= set(NAMES)
    assert len(execute.SHOWN.findall(PAGE)) == PAGE.count("<!-- tools/figures ")


# Numbers, computed another way


def assert_interval(row: pd.Series, values: np.ndarray) -> None:
    """`low` and `high` are the interval of a t-test of `values`."""
    np.testing.assert_allclose(row[["low", "high"]].astype(float), ttest_1samp(values, 0).confidence_interval(0.95))


@pytest.fixture(scope="session")
def chunkkv(figures: Figures) -> Path:
    return figures("chunkkv")


def sets_of(folder: Path, policy: str, params: str) -> dict[str, list[set[int]]]:
    """By trace: the tokens that the first row of each layer chose, those kept by rule left out, from the file."""
    found = {}
    for path in folder.glob("cells/*.h5"):
        with h5py.File(path) as file:
            for cell in file["cells"].values():
                about = {name: cell.attrs[name].decode() for name in ("policy", "params", "trace")}
                if about["policy"] != policy or params not in about["params"]:
                    continue
                prompt = int(file["traces"][about["trace"]].attrs["prompt"])
                rows, offsets = cell["budget"].shape, cell["offsets"][()]
                first = [cell["positions"][offsets[i * rows[1]] : offsets[i * rows[1] + 1]] for i in range(rows[0])]
                recent, sinks = cell["recent"][:, 0], cell["sinks"][:, 0]
                found[about["trace"]] = [
                    {int(j) for j in kept if sinks[i] <= j < prompt - recent[i]} for i, kept in enumerate(first)
                ]
    return found


@pytest.mark.parametrize(
    "label, policy, params",
    [("chunkkv:heads=layer", "chunkkv", "heads=layer"), ("h2o:heads=query", "h2o", "heads=query")],
)
def test_adjacent_similarity_and_its_interval(chunkkv: Path, label: str, policy: str, params: str):
    sets = sets_of(chunkkv / "runs" / "tenth", policy, params)
    means = [np.mean([len(a & b) / len(a | b) for a, b in zip(one, one[1:], strict=False)]) for one in sets.values()]
    row = pd.read_csv(chunkkv / "adjacent-layers.csv").set_index("policy").loc[label]
    assert row["traces"] == len(means) == len(pd.read_csv(ROOT / "build" / "corpus-small" / "corpus.csv"))
    assert row["mean"] == pytest.approx(np.mean(means), rel=1e-9)
    assert_interval(row, means)


def test_lengths_of_kept_runs(chunkkv: Path):
    sets = sets_of(chunkkv / "runs" / "tenth", "chunkkv", "heads=layer")
    lengths, alone = [], []
    for layers in sets.values():
        runs = [
            len(list(run))
            for kept in layers
            for _, run in groupby(enumerate(sorted(kept)), lambda one: one[1] - one[0])
        ]
        lengths.append(np.mean(runs))
        alone.append(runs.count(1) / sum(runs))
    found = pd.read_csv(chunkkv / "runs.csv")
    found = found[found["label"] == "ChunkKV"].set_index("quantity")["mean"]
    assert found["length"] == pytest.approx(np.mean(lengths), rel=1e-12)
    assert found["alone"] == pytest.approx(np.mean(alone), rel=1e-12)


def test_the_hybrid_is_its_halves(chunkkv: Path):
    costs = pd.read_csv(chunkkv / "hybrid.csv").pivot(index="layer", columns="series", values="mean")
    half = len(costs) // 2
    np.testing.assert_array_equal(costs["hybrid"].iloc[:half], costs["ChunkKV"].iloc[:half])
    assert (costs["hybrid"].iloc[half:] == 0).all() and (costs["ChunkKV"] != 0).all()
    table = pd.read_csv(chunkkv / "runs" / "hybrid" / "results.csv", dtype=str)
    table = table[(table["metric"] == "output_error") & (table["layer"] == "7") & (table["head"] == "all")]
    means = table.astype({"value": float}).groupby("policy")["value"].mean()
    assert costs.loc[7, "ChunkKV"] == pytest.approx(means["chunkkv"] - means["snapkv"], rel=1e-9)


def test_sizes_at_equal_bytes(chunkkv: Path):
    share = pd.read_csv(chunkkv / "kivi.csv").groupby("series")["share"].agg(["min", "max"])
    expected = [(bits + 32 / 64) / 16 for bits in (2, 4)]  # a scale and a zero point of 16 bits for each 64 numbers
    np.testing.assert_allclose(share.loc["kivi, 2 and 4 bits"], expected, rtol=1e-12)


def test_a_kept_token_on_the_text_is_one_of_the_selection(chunkkv: Path):
    shown = pd.read_csv(chunkkv / "kept-text.csv", keep_default_na=False)
    shown = shown[shown["shown_as"] == "ChunkKV"].set_index("position")
    run = Run(chunkkv / "runs" / "tenth")
    cells = run.cells[run.cells["label"] == "chunkkv:heads=layer"]
    candidates = []
    for cell in cells.itertuples():
        tokens = run.cells_file(cell.trace)[f"/traces/{cell.trace}/tokens"]
        selection = run.selection_of(cell.cell, 10**6)
        text, offsets = tokens["text"][()].decode(), tokens["offsets"][()]
        if max(shown.index) < len(offsets) and all(
            text[slice(*offsets[i])].replace("\n", "⏎") == piece for i, piece in shown["token"].items()
        ):
            counts = np.bincount(selection.positions, minlength=len(offsets)) / len(selection.layers)
            candidates.append(np.allclose(counts[shown.index], shown["share_of_layers"], atol=1e-12))
    assert candidates == [True]


def best_scores(trace: Trace, count: int, window: int) -> np.ndarray:
    """How many of the `count` best window scores, summed over query heads, lie in each layer: in plain numpy."""
    prompt, scores = trace.prompt, []
    rows = np.arange(prompt - window, prompt)
    for layer in range(trace.layers):
        q, k = (trace[f"/layers/{layer:03}/{name}"].astype(np.float64) for name in ("q", "k"))
        k = np.repeat(k[:, :prompt], len(q) // len(k), axis=0)
        logits = q[:, rows] @ k.transpose(0, 2, 1) * trace.attribute("/model", "softmax_scale")
        logits = np.where(np.arange(prompt) <= rows[:, None], logits, -np.inf)
        weights = np.exp(logits - logits.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        scores.append(weights.sum(axis=(0, 1))[: prompt - window])
    best = np.argsort(-np.concatenate(scores), kind="stable")[:count]
    return np.bincount(best // (prompt - window), minlength=trace.layers)


def test_layers_of_the_best_scores(figures: Figures):
    drawn = pd.read_csv(figures("dynamickv") / "layers.csv")
    drawn = drawn[(drawn["panel"] == "code") & (drawn["series"] == "best scores")].sort_values("layer")
    with Trace(ROOT / "build" / "corpus-small" / "code-small-1.h5") as trace:
        expected = best_scores(trace, 128 * trace.layers, window=8)
    np.testing.assert_allclose(drawn["mean"], expected, atol=1)  # scores of float32 may tie otherwise at the cut
    assert np.ptp(expected) > 100


def test_tokens_held_under_a_threshold(figures: Figures):
    drawn = pd.read_csv(figures("sca") / "threshold-residents.csv")
    assert sorted(set(drawn["threshold"])) == [0.15, 0.3, 0.6]
    for peak, line in drawn.groupby("threshold"):
        prompt = len(line)
        most, least = (int(share * prompt + 0.5) for share in (peak, peak / 2))
        held, expected = 0, []
        for _ in range(prompt):
            held += 1
            expected.append(held)
            held = least if held == most else held
        np.testing.assert_array_equal(line["held"], expected)


def test_truncation_keeps_what_the_rule_says_of_an_answer(figures: Figures):
    found = pd.read_csv(figures("finch") / "ratios.csv")
    found = found[(found["series"] == "truncate") & (found["panel"] == "answer")].set_index("budget")
    listed = pd.read_csv(ROOT / "build" / "corpus-small" / "corpus.csv")
    for budget in (0.425, 0.65):
        shares = []
        for name in listed["name"][listed["kind"].isin(["needle", "question"])]:
            with Trace(ROOT / "build" / "corpus-small" / f"{name}.h5") as trace:
                prompt, spans = trace.prompt, {span.kind: span for span in trace.spans}
            question = prompt - spans["question"].begin
            free = int(budget * prompt + 0.5) - question
            kept = {*range(-(-free // 2)), *range(prompt - question - free // 2, prompt)}
            answer = range(spans["answer"].begin, spans["answer"].end)
            shares.append(len(kept.intersection(answer)) / len(answer))
        assert found.loc[budget, "traces"] == len(shares) == 4
        assert found.loc[budget, "mean"] == pytest.approx(np.mean(shares), abs=1e-12)
    assert 0 < found["mean"].min() + found["mean"].max() < 2


def test_retrieval_keeps_whole_chunks_beside_the_question(figures: Figures):
    """At most the free budget's share of an answer is kept by chance, and memory by the formula of Table 6."""
    folder = figures("finch")
    kept = pd.read_csv(folder / "retrieval.csv").pivot(index="ratio", columns="series", values="mean")
    shares = []
    listed = pd.read_csv(ROOT / "build" / "corpus-small" / "corpus.csv")
    for name in listed["name"][listed["kind"].isin(["needle", "question"])]:
        with Trace(ROOT / "build" / "corpus-small" / f"{name}.h5") as trace:
            prompt, question = trace.prompt, {span.kind: span.begin for span in trace.spans}["question"]
        shares.append((int(0.27 * prompt + 0.5) - (prompt - question)) / question)
    assert kept["random chunks"].loc[1 / 0.27] == pytest.approx(np.mean(shares), abs=1e-12)
    sizes = pd.read_csv(folder / "bytes.csv").set_index(["model", "kept tokens"])["mebibytes"]
    assert sizes["Llama2-7B", 4096] == 2048 and sizes["Mistral-7B", 512] == 64 and sizes["SmolLM2-135M", 4096] == 90


def test_the_way_from_random_to_oracle(figures: Figures):
    folder = figures("overview")
    table = pd.read_csv(folder / "runs" / "one" / "results.csv", keep_default_na=False)
    table = table[(table["metric"] == "attention_recall") & (table["variant"] == "") & (table["layer"] == "all")]
    table = table[(table["head"] == "all") & (table["policy"] != "random-twin")]
    recall = table.pivot(index="trace", columns="policy", values="value").astype(float)
    shown = pd.read_csv(folder / "policies.csv")
    shown = shown[shown["quantity"] == "of the way"].set_index("label")
    for policy in ("h2o", "local", "snapkv"):
        way = (recall[policy] - recall["random"]) / (recall["oracle"] - recall["random"])
        assert shown.loc[policy, "mean"] == pytest.approx(way.mean(), rel=1e-9)
        assert_interval(shown.loc[policy], way)
    assert shown.loc["oracle", "mean"] == 1 and shown.loc["random", "mean"] == 0


def test_skill_is_the_way_from_the_random_twin_to_the_best_set(figures: Figures):
    folder = figures("overview")
    table = pd.read_csv(folder / "runs" / "one" / "results.csv", keep_default_na=False)
    table = table[(table["metric"] == "attention_recall") & (table["layer"] == "all") & (table["head"] == "all")]
    name = table["policy"] + table["params"].where(table["policy"] == "random-twin", "")
    table = table.assign(name=name, value=pd.to_numeric(table["value"]))
    recall = table.pivot(index="trace", columns=["name", "variant"], values="value")
    shown = pd.read_csv(folder / "policies.csv")
    assert not shown["label"].str.startswith("random-twin").any()
    shown = shown[shown["quantity"] == "skill"].set_index("label")
    assert not {"h2o-online", "kivi", "full", "random", "oracle"} & set(shown.index) and len(shown) > 8
    for policy in ("h2o", "snapkv", "sca"):
        twin = recall[f"random-twinof={policy},seed=0", ""]
        skill = (recall[policy, ""] - twin) / (recall[policy, "oracle"] - twin)
        assert shown.loc[policy, "mean"] == pytest.approx(skill.mean(), rel=1e-9)
        assert_interval(shown.loc[policy], skill)
    assert shown.loc["local", "mean"] == 0, "all that it keeps is protected"


def test_the_study_by_another_program(figures: Figures):
    """Rank correlations by scipy, straight from the study's file."""
    from scipy.stats import spearmanr

    cells = pd.read_parquet(ROOT / "docs" / "closed-loop" / "smollm2-135m.parquet")
    asked = cells[cells["role"] == "asked"]
    headline = pd.read_csv(figures("closed_loop") / "headline.csv")
    headline = headline[headline["model"] == "smollm2-135m"].set_index("metric")
    assert {"output_error", "output_error:residual:upper-half", "attention_recall", "kv_l1_loss"} <= set(headline.index)
    for metric, sign in (("output_error", 1), ("output_error:residual:upper-half", 1), ("attention_recall", -1)):
        found = asked.groupby(["prompt", "budget"])[[metric, "kld"]].apply(
            lambda some: spearmanr(some.iloc[:, 0], some.iloc[:, 1]).statistic
        )
        mean = sign * found.groupby("prompt").mean().mean()
        assert headline.loc[metric, "kld_mean"] == pytest.approx(mean, abs=1e-9), metric
    policies = pd.read_csv(figures("closed_loop") / "policies.csv").set_index(["model", "label", "budget"])
    twin = cells[(cells["label"] == "random-twin:of=h2o") & (cells["budget"] == "0.1")]["kld"]
    assert policies.loc[("smollm2-135m", "random-twin:of=h2o", 0.1), "mean"] == pytest.approx(twin.mean(), rel=1e-6)


def test_chance_of_adjacent_layers():
    """By hand: of three layers that keep {0, 1}, {0, 2} and {0, 1}, two share 1, 2 and 1 tokens, on average 4/3, and
    have 4 - 4/3 together. Drawn sets have the same level, of single tokens and of whole chunks."""
    kept = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]], dtype=bool)
    assert frame.chance_jaccard(kept) == pytest.approx((4 / 3) / (4 - 4 / 3))
    random = np.random.default_rng(5)
    share = random.beta(0.3, 2.0, size=2_000)
    expected = (share**2).sum() / (2 * share - share**2).sum()
    for chunk in (1, 10):
        drawn = np.repeat(random.random((200, 2_000)) < share, chunk, axis=1)
        pairs = [(a & b).sum() / (a | b).sum() for a, b in zip(drawn, drawn[1:], strict=False)]
        assert frame.chance_jaccard(drawn[:30]) == pytest.approx(np.mean(pairs), rel=0.04)
        assert np.mean(pairs) == pytest.approx(expected, rel=0.04)


def test_distance_of_kept_vectors_from_all():
    """By hand: 0 and 1 on a line, 0 kept: (2 · 0.5 - 0 - 0.5) / (2 · 0.5). A set with the mix of all is at 0."""
    apart = frame.distances(np.array([[0.0], [1.0]]))
    np.testing.assert_allclose(apart, [[0, 1], [1, 0]])
    assert frame.energy_coefficient(apart, np.array([True, False])) == pytest.approx(0.5)
    twice = frame.distances(np.repeat([[0.0, 0.0], [3.0, 4.0]], 2, axis=0))
    assert twice.max() == pytest.approx(5)
    assert frame.energy_coefficient(twice, np.array([True, False, True, False])) == pytest.approx(0)


def test_bm25_by_hand():
    """Three documents of 2, 1 and 3 terms. a is in one of them: idf = ln(1 + 2.5 / 1.5); so is b, asked for twice."""
    idf = np.log(8 / 3)
    first = idf * 2 * 2.2 / (2 + 1.2)  # as long as the mean
    second = 2 * idf * 2.2 / (1 + 1.2 * (0.25 + 0.75 / 2))  # half as long
    assert retrieval.bm25(["A a", "b", "c, c: c!"], "a b B d?") == pytest.approx([first, second, 0])
    everywhere = np.log(1 + 0.5 / 2.5)
    assert retrieval.bm25(["a", "a"], "a") == pytest.approx([everywhere * 2.2 / 2.2] * 2) and everywhere > 0


# What is refused, and the frame's own rules


def test_a_cell_that_fails_is_named(tmp_path: Path):
    path = tmp_path / "broken.py"
    path.write_text("# %% [markdown]\n# # Broken\n\n# %%\nfine = 1\n\n# %%\nwrong = fine / 0\n")
    with pytest.raises(Error) as refused:
        execute.execute(path, tmp_path)
    assert str(refused.value) == "broken, code cell 2 of 2 (wrong = fine / 0): ZeroDivisionError: division by zero"
    assert not (tmp_path / "broken.html").exists()


def test_names_and_corpora_that_are_not_there_are_refused(tmp_path: Path):
    answer = tools_figures("chunkvk", "--corpus", tmp_path)
    assert (answer.returncode, answer.stderr) == (
        2,
        "kvreplay: figures: no such notebook chunkvk: did you mean chunkkv?\n",
    )
    answer = tools_figures("chunkkv", "--corpus", tmp_path, "-o", tmp_path)
    assert answer.returncode == 3 and answer.stderr.count("\n") == 1
    assert answer.stderr.startswith(f"kvreplay: {tmp_path}: no corpus: expected corpus.csv and the traces in it")


def test_a_corpus_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "corpus.csv").write_text("name,kind,prompt_tokens,needle_depth\na,poem,100,\n")
    monkeypatch.setattr(frame, "CORPUS", tmp_path)
    with pytest.raises(Error, match="corpus.csv: kind: expected one of needle, .*, found poem"):
        frame.traces()


def test_a_run_is_begun_anew_when_the_request_changes_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(frame, "FIGURES", tmp_path)
    monkeypatch.setenv("PATH", f"{PROGRAM.parent}:{os.environ['PATH']}")
    for name in ("a", "b"):
        subprocess.run([PROGRAM, "synth", "fixture", "-o", tmp_path / f"{name}.h5"], check=True, capture_output=True)
    page = frame.Page("test")

    def policies(*asked: str, trace: str = "a") -> tuple[set[str], int]:
        run = page.replay("run", [tmp_path / f"{trace}.h5"], asked, ["0.5"])
        return set(run.cells["policy"]), (run.folder / "cells" / f"{trace}.h5").stat().st_mtime_ns

    both, made = policies("local", "strided")
    assert sorted(path.name for path in tmp_path.glob("*.h5")) == ["a.h5", "b.h5"]
    assert both == {"local", "strided", "full", "random", "oracle"}
    assert policies("local", "strided") == (both, made)
    one, made = policies("strided")
    assert one == both - {"local"}
    os.utime(tmp_path / "a.h5")
    again, made_again = policies("strided")
    assert again == one and made_again > made
    with pytest.raises(Error) as refused:
        policies("stride")
    assert (str(refused.value), refused.value.exit_code) == (
        "replay run: stride: unknown policy: did you mean strided?", 2,
    )  # fmt: skip


def statement(mean: float, higher: bool = False) -> frame.Difference:
    return frame.Difference("a", "b", mean, mean - 0.1, mean + 0.1, 0.5, 12, higher=higher)


def test_verdicts_and_tables():
    no_test = float("nan")
    assert frame.verdict([True, True], [no_test] * 2, "why") == "holds"
    assert frame.verdict([True, False], [no_test] * 2, "why") == "holds in part: why"
    assert frame.verdict([False, False], [no_test] * 2, "why") == "does not hold: why"
    assert frame.verdict([None], [no_test], "why") == "not resolved: why"
    assert frame.verdict([statement(-1)], [0.04]) == "holds"
    assert frame.verdict([statement(1, higher=True)], [0.04]) == "holds"
    reversed_one, open_one = "a < b (n = 12, +1.000 [+0.900, +1.100])", "a < b (n = 12, -1.000 [-1.100, -0.900])"
    assert frame.verdict([statement(1)], [0.04]) == f"does not hold: reversed: {reversed_one}"
    assert frame.verdict([statement(-1)], [0.06]) == f"not resolved: {open_one}"
    assert frame.verdict([statement(-1), statement(1), True], [0.06, 0.04, no_test]) == (
        f"holds in part: reversed: {reversed_one}; not resolved: {open_one}"
    )


def test_a_page_corrects_for_all_its_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same difference is resolved alone and not among many."""
    monkeypatch.setattr(frame, "FIGURES", tmp_path)
    random = np.random.default_rng(1)
    rows = pd.concat([
        pd.DataFrame({"trace": range(12), "label": label, "value": random.normal(shift, 1, 12)})
        for label, shift in (("a", 0.0), ("b", 0.9))
    ])  # fmt: skip
    one = frame.less(rows, "a", "b")
    assert 0.001 < one.p < 0.05
    for others in (0, 60):
        page = frame.Page(f"page-{others}")
        page.find("where", "a below b", "numbers", [one])
        for _ in range(others):
            page.find("where", "noise", "numbers", [frame.replace(one, p=0.9)])
        page.by_construction("where", "bound", "numbers")
        page.not_tested("where", "scores", "numbers")
        page.findings()
        found = list(pd.read_csv(tmp_path / page.name / "findings.csv")["verdict"])
        assert found[0].startswith("not resolved" if others else "holds")
        assert found[-2:] == ["by construction", f"not tested: needs {frame.TASKS}"]


def test_answers_decide_by_share_and_likelihood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Policy `keeps` answers 12 prompts, `loses` none; a prompt that the full cache does not answer has no say."""
    rows = [
        {"trace": f"t{i}", "label": label, "budget": budget, "contains": np.nan if i == 12 else given,
         "nll_increase": rise + 0.001 * i}
        for i in range(13) for label, budget, given, rise in (
            ("full", "0.5", 1.0, 0.0), ("keeps", "0.1", 1.0, 0.1), ("keeps", "0.5", 1.0, 0.1),
            ("loses", "0.1", 0.0, 0.9), ("loses", "0.5", 0.0, 0.5), ("keeps", "0.02", 0.0, 9.0))
    ]  # fmt: skip
    monkeypatch.setattr(frame, "FIGURES", tmp_path)
    monkeypatch.setattr(frame, "read", lambda path: (pd.DataFrame(rows), {}))
    assert len(frame.answers("nll_increase")) == 12 * (4 + len(frame.STUDIES["papers"].budgets))
    page, shown = frame.Page("page"), {"A": "keeps", "B": "loses", "whole": "full"}
    page.answered("where", "A over B", shown, [("A", "B")])
    page.answered("where", "B over A", shown, [("B", "A")])
    page.answered("where", "A as whole", shown, [], [("A", "whole")], ["0.5"])
    page.answered("where", "B as whole", shown, [], [("B", "whole")])
    page.answered("where", "B as B", shown | {"again": "loses"}, [], [("B", "again")])
    page.findings()
    found = pd.read_csv(tmp_path / "page" / "findings.csv").set_index("says")
    assert "12 needles" in found["here"]["A over B"]
    assert "answers given: A 1.00, B 0.00, whole 1.00; NLL increase: A 0.11, B 0.71" in found["here"]["A over B"]
    assert "B minus whole -1.00 [-1.00, -1.00]" in found["here"]["B as whole"]
    verdicts = list(found["verdict"].str.partition(":")[0])
    assert verdicts == ["holds", "does not hold", "holds", "does not hold", "not resolved"]
    assert found["verdict"]["B as whole"] == "does not hold: B within 0.05 of whole: no"
    assert found["verdict"]["B as B"] == "not resolved: almost no prompt is answered, so no difference can show"
    assert "(answers, n = 12" in found["verdict"]["B over A"] and "(NLL, n = 12" in found["verdict"]["B over A"]


def test_noise_has_no_peaks():
    """At 5 % at most one in ten of 60 draws of noise has a peak, and a layer that prompts share is found."""
    random = np.random.default_rng(2)
    where = slice(12, 17)
    found = 0
    for _ in range(60):
        shares = pd.DataFrame(random.dirichlet(np.full(30, 20.0), size=8))
        found += frame.peak_p(shares, where, permutations=199)[1] < 0.05
    assert found <= 6
    shares[14] *= 1.5
    layer, p = frame.peak_p(shares, where, permutations=999)
    assert layer == 14 and p < 0.01


def test_tables():
    assert frame.interval(0.25, 0.125, 0.5) == "0.250 [0.125, 0.500]"
    assert frame.interval(0.25, np.nan, np.nan) == "0.250"
    table = pd.DataFrame({"a": ["x|y"], "b": [1]})
    assert frame.markdown(table) == "| a | b |\n| --- | --- |\n| x\\|y | 1 |\n"
    assert frame.readable([1, 2, 3, 100], "linear") == [3, 100] and frame.readable([1, 10, 11], "log") == [1, 11]


def test_less_is_the_paired_difference():
    """Interval and p as scipy computes them."""
    random = np.random.default_rng(3)
    for shift in (0.0, 0.05, 0.5):
        level = random.normal(size=12)
        a, b = level + 0.1 * random.normal(size=12), level + shift + 0.1 * random.normal(size=12)
        rows = pd.DataFrame({"trace": [*range(12)] * 2, "label": ["a"] * 12 + ["b"] * 12, "value": [*a, *b]})
        interval = ttest_1samp(a - b, 0).confidence_interval(0.95)
        exact = permutation_test((a - b,), np.mean, permutation_type="samples", n_resamples=np.inf)
        one, other = frame.less(rows, "a", "b"), frame.more(rows, "b", "a")
        assert (one.mean, one.prompts) == (pytest.approx((a - b).mean()), 12)
        assert (one.low, one.high) == pytest.approx((interval.low, interval.high))
        assert one.p == pytest.approx(exact.pvalue, abs=1e-6)
        assert other.mean == -one.mean and one.resolved(0.01) == other.resolved(0.01)
    assert one.resolved(one.p) is True and frame.more(rows, "a", "b").resolved(one.p) is False


def test_errors_of_different_orders_share_a_logarithmic_axis_and_recall_does_not():
    points = pd.DataFrame([
        {"panel": panel, "series": series, "trace": trace, "x": x, "value": value * (1 + 0.01 * trace)}
        for panel, values in {"recall": (0.05, 0.9), "error": (0.05, 0.9), "less": (-0.5, 0.5)}.items()
        for series, value in zip(("SnapKV", "random"), values, strict=True) for trace in range(3) for x in (1, 2, 4)
    ])  # fmt: skip
    panels = {"recall": "attention recall", "error": "output error"}
    asked = {"title": "t", "subtitle": "s", "caption": "c", "x_label": "x", "grey": ["random"]}
    drawn: Figure = frame.curves(points, "x", panels, **asked).figure
    assert [axis.get_yscale() for axis in drawn.axes[:2]] == ["linear", "log"]
    assert [axis.get_yscale() for axis in frame.curves(points, "x", {"less": "output error"}, **asked).figure.axes] == [
        "linear"
    ]


def test_window_settings_have_a_row_a_policy_and_a_mark_a_setting():
    rows = [{"quantity": "output error", "policy": policy, "setting": setting, "mean": 1.0 + i, "low": i, "high": 2 + i}
            for policy in ("SnapKV", "ChunkKV") for i, ((_, pool), setting) in enumerate(frame.SETTINGS.items())
            if policy == "SnapKV" or pool == "max"]  # fmt: skip
    [axis] = frame.dots(pd.DataFrame(rows), ["output error"], ["SnapKV", "ChunkKV"], "0.1", "c").figure.axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["SnapKV", "ChunkKV"]
    marks = {line.get_label(): line for line in axis.lines}
    assert list(marks) == list(frame.SETTINGS.values())
    assert [len(line.get_xdata()) for line in marks.values()] == [2, 1, 2, 1]
    assert [line.get_markerfacecolor() == "white" for line in marks.values()] == [False, True, False, True]


def test_a_policy_that_does_not_pool_is_ranked_in_every_setting():
    asked = [("SnapKV", setting) for setting in frame.SETTINGS.values()]
    asked += [("ChunkKV", setting) for (_, pool), setting in frame.SETTINGS.items() if pool == "max"]
    means = pd.Series([0.4, 0.1, 0.3, 0.2, 0.5, 0.6], pd.MultiIndex.from_tuples(asked, names=["policy", "setting"]))
    table = frame.in_every_setting(means)[list(frame.SETTINGS.values())]
    assert table.loc["ChunkKV"].tolist() == [0.5, 0.5, 0.6, 0.6]
    assert table.loc["SnapKV"].tolist() == [0.4, 0.1, 0.3, 0.2]


def test_docs_are_refreshed_between_their_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from PIL import Image

    page = tmp_path / "papers.md"
    old = "before\n<!-- tools/figures a/one -->\nold\n<!-- end -->\n<!-- tools/figures b/one -->\nold\n<!-- end -->\n"
    page.write_text(old + "![](figures/a-two.png)\n")
    (tmp_path / "figures").mkdir()
    (tmp_path / "out" / "a").mkdir(parents=True)
    (tmp_path / "out" / "a" / "one.md").write_text("new\n")
    Image.new("RGB", (2000, 1000), "#0072B2").save(tmp_path / "out" / "a" / "two.png")
    monkeypatch.setattr(execute, "PAGES", (page,))
    execute.refresh(tmp_path / "out", ["a"])
    assert page.read_text() == old.replace("old", "new", 1) + "![](figures/a-two.png)\n"
    picture = Image.open(tmp_path / "figures" / "a-two.png")
    assert picture.size == (900, 450)
    np.testing.assert_allclose(picture.convert("RGB").getpixel((9, 9)), (0x00, 0x72, 0xB2), atol=4)
