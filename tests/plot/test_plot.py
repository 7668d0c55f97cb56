"""Does every figure of a run show its numbers, and the same bytes each time; is what cannot be drawn refused?"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tracemalloc
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import h5py
import ml_dtypes
import numpy as np
import pandas as pd
import pytest
from make_run import CHUNKKV, H2O, NINE, SNAPKV, Policy, make_run, write_trace
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from scipy import stats

import kvreplay
from kvreplay import _engine as engine
from kvreplay.compare.command import main as compare
from kvreplay.errors import Error
from kvreplay.pareto_front import on_front
from kvreplay.plot import colours, heatmap, lines, needle, redundancy, similarity, style
from kvreplay.plot.colours import looks_of
from kvreplay.plot.command import FORMATS, KINDS, main, parser
from kvreplay.plot.figure_options import Choice
from kvreplay.report.content import Page
from kvreplay.results import MOST_OPEN, Run, Selection, Span
from kvreplay.run_names import split_policies

NEEDED = {"compare": ["--baseline", "random"]}  # options that a kind cannot do without
BEGINNINGS = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG", "pgf": b"% needs"}
PAGES = {"screen": {}, "text": {"page_width": 6.75}, "paper": {"paper": True, "page_width": 3.25}}
WIDTHS = "expected column, text or 2.5 to 20 inches, as in 3.25, 83mm or 8.3cm"
NEEDLES = [(f"needle-{i}", 200 * (1 + i % 2), 0.1 + 0.3 * (i // 2)) for i in range(6)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("plot") / "run")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("plot") / "many", traces=NEEDLES)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return make_run(tmp_path / "broken", policies=[SNAPKV], budgets=["0.1"])


def drawn(kind: str, run: Path, folder: Path, *options: str) -> pd.DataFrame:
    data = folder / "numbers.csv"
    assert main([kind, str(run), "-o", str(folder / "figure.svg"), "--data", str(data), *options]) == 0
    return pd.read_csv(data, float_precision="round_trip")


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert main([str(one) for one in arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def cell_of(run: Path, policy: str, budget: str, trace: str = "demo") -> h5py.Group:
    file = h5py.File(run / f"cells/{trace}.h5", "r", locking=False)
    wanted = (policy, budget, trace)
    return next(g for g in file["cells"].values() if wanted == tuple(g.attrs[k] for k in ("policy", "budget", "trace")))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_written_in_every_format_and_is_the_same_twice(kind, run, tmp_path, capsys):
    def files(folder: Path) -> list[Path]:
        return [folder / f"figure{suffix}" for suffix in FORMATS]

    for folder in (tmp_path / "first", tmp_path / "second"):
        options = [text for path in files(folder) for text in ("-o", str(path))]
        assert main([kind, str(run), *options, *NEEDED.get(kind, [])]) == 0
        written = [Path(line) for line in capsys.readouterr().out.splitlines()]
        assert written == [*files(folder), *(folder / f"figure-image{i}.png" for i in range(len(written) - 4))]
        assert sorted(written) == sorted(folder.iterdir())
    for first, second in zip(*(sorted((tmp_path / name).iterdir()) for name in ("first", "second")), strict=True):
        assert first.read_bytes().startswith(BEGINNINGS[first.suffix[1:]])
        assert first.read_bytes() == second.read_bytes()


def test_the_bytes_do_not_depend_on_the_process_or_on_the_users_settings(run, tmp_path):
    (tmp_path / "matplotlibrc").write_text("axes.facecolor: red\nfont.size: 30\n")
    command = [sys.executable, "-m", "kvreplay.plot.command", "heatmap", str(run), "-o", str(tmp_path / "other.svg")]
    subprocess.run(command, check=True, env={"PYTHONPATH": ":".join(sys.path), "MATPLOTLIBRC": str(tmp_path)})
    assert main(["heatmap", str(run), "-o", str(tmp_path / "here.svg")]) == 0
    assert (tmp_path / "other.svg").read_bytes() == (tmp_path / "here.svg").read_bytes()


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("plot") / "single", [H2O], layers=1, budgets=["32"])


@pytest.mark.parametrize("kind", KINDS)
def test_one_policy_with_one_layer_at_one_budget_is_drawn(kind, single, tmp_path):
    assert main([kind, str(single), "-o", str(tmp_path / "figure.png"), *NEEDED.get(kind, [])]) == 0


def test_a_figure_goes_into_the_run_when_nothing_is_said(broken, capsys):
    assert main(["budgets", str(broken)]) == 0
    assert capsys.readouterr().out == f"{broken / 'figures' / 'budgets.svg'}\n"
    assert (broken / "figures" / "budgets.svg").exists()
    assert main(["curve", str(broken), "--metric", "attention_recall:prompt"]) == 0
    assert capsys.readouterr().out == f"{broken / 'figures' / 'curve-attention_recall-prompt.svg'}\n"


def test_a_policy_that_keeps_protected_tokens_only_has_no_similarity(tmp_path):
    """Its matrix is empty and not 1; the colours end where those of the other policies do."""
    only = Policy("streaming-llm", "recent=20", recent=20)  # of a budget of 20
    for name, policies in (("with", [SNAPKV, only]), ("without", [SNAPKV])):
        run = make_run(tmp_path / name, policies, 4, ["0.1"], [("a", 200, 0.4)])
        data = drawn("heatmap", run, tmp_path)
        pairs = data[data["quantity"] == "jaccard"].set_index("policy")["value"]
        assert pairs.loc["snapkv"].notna().all() and pairs.get("streaming-llm", pd.Series()).isna().all()
        with style.settings():
            figure = heatmap.draw(Choice(Run(run))).figure
        ends = [axis.images[0].get_clim()[1] for axis in figure.axes if axis.images]
        assert len(set(ends)) == 1 and ends[0] < 1
        said = " ".join(text.get_text() for axis in figure.axes for text in axis.texts)
        assert ("protected tokens" in said) == (name == "with") and "one layer" not in said


@pytest.mark.parametrize("kind", ["heatmap", "kept", "budgets"])
def test_layers_carry_the_models_own_numbers(kind, broken, tmp_path):
    with h5py.File(broken / "cells/demo.h5", "a") as file:
        [trace] = file["traces"].values()
        layers = int(trace.attrs["layers"])
        trace.attrs["layer_index"] = np.arange(layers, dtype=np.int32) * 3 + 5
    shown = drawn(kind, broken, tmp_path)["layer"].dropna().unique()
    assert sorted(shown) == [3 * layer + 5 for layer in range(layers)]


@pytest.mark.parametrize("variant", ["first", "mean", "union"])
def test_heatmap_shows_the_stored_matrix_and_its_adjacent_mean(variant, run, tmp_path):
    data = drawn("heatmap", run, tmp_path, "--variant", variant)
    assert set(data["budget"]) == {0.1} and list(data["policy"].unique()) == ["chunkkv", "h2o", "snapkv"]
    for policy, rows in data.groupby("policy"):
        stored = cell_of(run, str(policy), "0.1")[f"jaccard_{variant}"][()]
        shown = rows[rows["quantity"] == "jaccard"].pivot(index="layer", columns="other_layer", values="value")
        np.testing.assert_array_equal(shown.to_numpy(), stored)
        adjacent = rows[rows["quantity"] == "adjacent_mean"]["value"].item()
        assert adjacent == pytest.approx((stored[0, 1] + stored[1, 2] + stored[2, 3]) / 3, abs=1e-15)


@pytest.mark.parametrize("variant", ["first", "mean", "union"])
def test_chance_is_what_independent_layers_of_the_same_sizes_share(variant, tmp_path):
    policy = Policy("lean", alike=0.0, sinks=4, recent=8, slope=1.0)
    run = make_run(tmp_path / "run", [policy], layers=3, budgets=["0.2"], kv_heads=3)
    chance = drawn("heatmap", run, tmp_path, "--variant", variant).set_index("quantity").loc["adjacent_chance", "value"]

    group, random, prompt = cell_of(run, "lean", "0.2"), np.random.default_rng(5), 480
    sizes = np.diff(group["offsets"][()]).reshape(3, 3) - 12

    def sets(layer: int) -> list[set[int]]:
        return [set(random.choice(prompt - 12, size, replace=False).tolist()) for size in sizes[layer]]

    def similarity(a: list[set[int]], b: list[set[int]]) -> float:
        if variant == "union":
            a, b = [set().union(*a)], [set().union(*b)]
        pairs = [len(x & y) / len(x | y) for x, y in zip(a, b, strict=True)]
        return pairs[0] if variant == "first" else float(np.mean(pairs))

    draws = [np.mean([similarity(sets(i), sets(i + 1)) for i in (0, 1)]) for _ in range(400)]
    assert chance == pytest.approx(np.mean(draws), abs=0.012)


def test_chance_of_the_first_head_leaves_the_others_out():
    sizes = np.array([[2, 6], [2, 6]])
    selection = Selection(
        layers=np.arange(2), numbers=np.arange(2), offsets=np.array([0, *np.cumsum(sizes)]),
        positions=np.concatenate([np.arange(size) for size in sizes.ravel()]), granted=sizes,
        sinks=0 * sizes, recent=0 * sizes, jaccard={}, boundary=10,
    )  # fmt: skip
    assert heatmap.chance(selection, "first") == pytest.approx(0.2 / 1.8)
    assert heatmap.chance(selection, "mean") == pytest.approx((0.2 / 1.8 + 0.6 / 1.4) / 2)
    assert heatmap.chance(selection, "union") == pytest.approx(0.6 / 1.4)


def test_chance_at_equal_shares_is_f_over_2_minus_f(tmp_path):
    run = make_run(tmp_path / "run", [Policy("lean", recent=0)], budgets=["0.1"])
    data = drawn("heatmap", run, tmp_path).set_index("quantity")
    assert data.loc["adjacent_chance", "value"] == pytest.approx(0.1 / 1.9, abs=1e-15)


def test_kept_shows_the_share_of_heads_at_each_position(run, tmp_path):
    data = drawn("kept", run, tmp_path, "-b", "0.2", "-p", "h2o")
    group = cell_of(run, "h2o", "0.2")
    rows = np.split(group["positions"][()], group["offsets"][1:-1])
    counted = [[sum(p in row for row in rows[3 * layer : 3 * layer + 3]) / 3 for p in range(480)] for layer in range(4)]
    shown = data.pivot(index="layer", columns="begin", values="kept_share").to_numpy()
    np.testing.assert_allclose(shown, counted, atol=1e-15)
    assert (data["end"] - data["begin"] == 1).all()


def test_the_budget_of_a_figure_of_one_budget_is_said(run, tmp_path, capsys):
    words = ["kept", str(run), "-p", "h2o", "-o", str(tmp_path / "a.svg")]
    note = "kvreplay: kept: draws budget 0.1, the smallest; use -b for another: 0.2, 0.3\n"
    assert main(words) == 0 and note in capsys.readouterr().err
    assert main([*words, "-b", "0.2"]) == 0 and "draws budget" not in capsys.readouterr().err


def test_what_takes_seconds_is_said_on_a_terminal_only(run, tmp_path, capsys, monkeypatch):
    words = ["curve", str(run), "-o", str(tmp_path / "a.svg")]
    step = f"kvreplay: curve: drawing {run}\n"
    assert main(words) == 0 and step not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(words) == 0 and capsys.readouterr().err.startswith(step)
    assert main([*words, "-q"]) == 0 and capsys.readouterr().err == ""


def test_kept_of_a_long_prompt_is_drawn_in_means_that_lose_no_token(tmp_path):
    run = make_run(tmp_path / "run", [H2O], 2, ["0.1"], [("long", 2500, 0.5)])
    data = drawn("kept", run, tmp_path)
    width = data["end"] - data["begin"]
    assert width.max() == 3 and data["end"].max() == 2500
    kept = (data["kept_share"] * width).groupby(data["layer"]).sum()
    np.testing.assert_allclose(kept, 250, rtol=1e-12)


def test_a_policy_that_keeps_every_token_changed_is_drawn_whole(broken, tmp_path):
    """It stores no rows; the last layer was not treated."""
    with h5py.File(broken / "cells/demo.h5", "r+") as file:
        group = file["cells/0000000000000000"]
        group.attrs["sets"], group.attrs["layers"] = "all", np.arange(3, dtype=np.int32)
        for name, values in (("offsets", np.zeros(13, np.int64)), ("positions", np.zeros(0, np.int32))):
            del group[name]
            group[name] = values
    selection = Run(broken).selection_of("0000000000000000", 480)
    assert selection.mask().shape == (3, 3, 480) and selection.mask().all()
    np.testing.assert_array_equal(np.diff(selection.offsets), [480] * 9 + [0] * 3)
    assert (drawn("budgets", broken, tmp_path)["kept_least"] == 480).all()
    assert (drawn("kept", broken, tmp_path)["kept_share"] == 1).all()


def test_a_schedule_tells_when_tokens_went_and_is_drawn_as_at_the_end_of_the_prompt(broken, tmp_path, capsys):
    def read() -> Selection:
        return Run(broken).selection_of("0000000000000000", 480)

    before, shown = read(), drawn("kept", broken, tmp_path)
    assert before.evicted_at is None
    gone = np.where(before.mask(), -1, 479)
    gone = np.concatenate([gone, np.full((4, 3, 32), -1)], axis=2)
    gone[0, 0, before.positions[0]] = 490  # after the prompt, so held at its end
    with h5py.File(broken / "cells/demo.h5", "r+") as file:
        file["cells/0000000000000000/evicted_at"] = gone.astype(np.int32)
    np.testing.assert_array_equal(read().evicted_at, gone)
    pd.testing.assert_frame_equal(drawn("kept", broken, tmp_path), shown)
    with h5py.File(broken / "cells/demo.h5", "r+") as file:
        del file["cells/0000000000000000/evicted_at"]
        file["cells/0000000000000000/evicted_at"] = gone[:, 0].astype(np.int32)
    capsys.readouterr()
    assert "evicted_at: expected [4, 3] rows of tokens, found [4, 512]" in refused(capsys, 3, "kept", broken)


def test_redundancy_shows_quartiles_of_what_is_stored(run, tmp_path):
    data = drawn("redundancy", run, tmp_path)
    with h5py.File(run / "cells/demo.h5", "r", locking=False) as file:
        stored = file["traces/demo/redundancy_value"][()].astype(np.float64)
    layer = data[(data["tensor"] == "value") & (data["by"] == "layer")]
    np.testing.assert_allclose(layer["median"], np.median(stored, axis=1), atol=1e-15)
    first = data[(data["tensor"] == "value") & (data["by"] == "position")].iloc[0]
    assert (first["begin"], first["end"]) == (0, 8)
    assert first["upper_quartile"] == pytest.approx(np.quantile(stored[:, :8], 0.75), abs=1e-15)


def test_redundancy_of_one_layer_is_drawn_as_points(tmp_path):
    run = make_run(tmp_path / "run", [H2O], 1, ["0.1"])
    with style.settings():
        by_layer, by_position = redundancy.draw(Choice(Run(run))).figure.axes
    assert {line.get_linestyle() for line in by_layer.lines} == {"None"} and len(by_layer.lines) == 2
    assert {line.get_linestyle() for line in by_position.lines[:2]} == {"-"}


def test_budgets_counts_kept_tokens(tmp_path):
    run = make_run(tmp_path / "run", NINE, 5, ["0.1"])
    data = drawn("budgets", run, tmp_path, "-p", "pyramid-kv")
    group = cell_of(run, "pyramid-kv", "0.1")
    lengths = np.diff(group["offsets"][()]).reshape(5, 3)
    np.testing.assert_array_equal(data["kept_mean"], lengths.mean(axis=1))
    assert data["kept_mean"].iloc[0] > 2 * data["kept_mean"].iloc[-1]


def test_budgets_have_the_scale_of_the_policies_at_equal_memory(with_budget_free):
    figure, choice = page_of("budgets", with_budget_free, "screen")
    of_label = {cell.label: cell for cell in choice.cells(choice.one_trace())}
    assert [cell.own_memory for cell in of_label.values()].count(True) == 1
    top = max(cell.selection.kept.max() for cell in of_label.values() if not cell.own_memory)
    for axes, cell in zip(figure.axes, of_label.values(), strict=True):
        assert top <= axes.get_ylim()[1] < 1.5 * top
        beyond = [text.get_text() for text in axes.texts if text.get_text().startswith("to ")]
        assert beyond == ([f"to {cell.selection.kept.max()}"] if cell.own_memory else [])


def test_curve_shows_the_values_of_results_csv_with_controls(run, tmp_path):
    data = drawn("curve", run, tmp_path, "--metric", "attention_recall:prompt")
    table = pd.read_csv(run / "results.csv", dtype=str, keep_default_na=False)
    mine = table[(table["metric"] == "attention_recall") & (table["variant"] == "prompt") & (table["layer"] == "all")]
    assert len(data) == len(mine) == 18
    assert set(data["policy"][data["role"] == "control"]) == {"full", "random", "oracle"}
    expected = {(row["policy"], float(row["budget"])): float(row["value"]) for _, row in mine.iterrows()}
    assert {(row["policy"], row["budget"]): row["mean"] for _, row in data.iterrows()} == expected


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of controls twins: H2O has less recall than its twin, ChunkKV has none."""
    return make_run(tmp_path_factory.mktemp("plot") / "twins", twins={"snapkv": 0.3, "h2o": 0.9})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "policies" in KINDS[kind].reads])
def test_random_twins_are_drawn_only_where_they_are_named(kind, twins, tmp_path):
    shown = set(drawn(kind, twins, tmp_path, *NEEDED.get(kind, []))["policy"].dropna())
    assert {"snapkv", "h2o", "chunkkv"} <= shown and not any(label.startswith("random-twin") for label in shown)
    twin = "random-twin:of=(snapkv)"
    shown = set(drawn(kind, twins, tmp_path, "-p", f"snapkv,{twin}", *NEEDED.get(kind, []))["policy"].dropna())
    assert shown - {"random"} == {"snapkv", twin}


@pytest.mark.parametrize("kind, layer", [("curve", "all"), ("layers", "2")])
def test_skill_is_drawn_from_three_recalls(kind, layer, twins, tmp_path):
    data = drawn(kind, twins, tmp_path, "--metric", "skill")
    data = (data if kind == "curve" else data[data["layer"] == int(layer)]).set_index(["policy", "budget"])["mean"]
    table = pd.read_csv(twins / "results.csv", dtype=str, keep_default_na=False)
    table = table[(table["metric"] == "attention_recall") & (table["layer"] == layer)].astype({"value": float})
    recall = table.set_index(["policy", "params", "budget", "variant"])["value"]
    budgets = ["0.1", "0.2", "0.3"] if kind == "curve" else ["0.1"]
    expected = {}
    for budget, policy in itertools.product(budgets, (SNAPKV, H2O)):
        own, best = (recall[policy.name, policy.params, budget, variant] for variant in ("", "oracle"))
        twin = recall["random-twin", f"of=({policy.name}),seed=0", budget, ""]
        expected[policy.name, float(budget)] = (own - twin) / (best - twin)
    assert data.to_dict() == pytest.approx(expected, rel=1e-12)
    assert data["snapkv"].min() > 0 > data["h2o"].min()


def test_an_axis_has_the_unit_of_the_variant_drawn(broken):
    table = pd.read_csv(broken / "results.csv", dtype=str, keep_default_na=False)
    table["unit"] = table["variant"].map({"": "share", "prompt": "ratio"}).fillna(table["unit"])
    table.to_csv(broken / "results.csv", index=False)
    shown = {name: Choice(Run(broken), metric_asked=name).metric_axis
             for name in ("attention_recall", "attention_recall:prompt")}  # fmt: skip
    assert list(shown.values()) == ["attention recall (share)", "attention recall, prompt (ratio)"]


def interval_of(values: list[float], clusters: list[int]) -> tuple[float, float]:
    """Student's t for the mean of clusters that have equally many values: the ends of scipy's test of their means."""
    means = pd.Series(values).groupby(clusters).mean()
    return tuple(stats.ttest_1samp(means, 0).confidence_interval(0.95))


def test_several_traces_are_a_mean_with_its_interval(many, tmp_path):
    data = drawn("curve", many, tmp_path).set_index(["policy", "budget"]).loc[("h2o", 0.2)]
    table = pd.read_csv(many / "results.csv", dtype=str, keep_default_na=False)
    mine = table[(table["policy"] == "h2o") & (table["budget"] == "0.2") & (table["layer"] == "all")]
    values = mine[(mine["metric"] == "attention_recall") & (mine["variant"] == "")]["value"].astype(float)
    assert (data["traces"], data["mean"]) == (6, pytest.approx(values.mean(), abs=1e-15))
    low, high = interval_of(list(values), list(range(6)))
    assert (data["low"], data["high"]) == (pytest.approx(low), pytest.approx(high))


def test_traces_of_one_prompt_are_no_independent_evidence():
    """Values 1, 3 of one prompt and 5 of another: the deviations of their sums from the mean 3 are -2 and 2."""
    rows = pd.DataFrame({"trace_hash": list("abc"), "label": "x", "value": [1.0, 3.0, 5.0]})
    found = lines.mean_over_traces(rows, ["label"], pd.Series([0, 0, 1], list("abc"))).iloc[0]
    half_width = stats.t.ppf(0.975, 1) * 4 / 3
    assert tuple(found[["traces", "mean", "low", "high"]]) == pytest.approx((3, 3, 3 - half_width, 3 + half_width))
    alone = lines.mean_over_traces(rows, ["label"], pd.Series([0, 0, 0], list("abc"))).iloc[0]
    assert alone["traces"] == 3 and np.isnan(alone["low"]) and np.isnan(alone["high"])
    missing = pd.concat([rows, rows.assign(value=np.nan, label="y"), rows.assign(value=[1.0, np.nan, 2.0], label="z")])
    found = lines.mean_over_traces(missing.reset_index(drop=True), ["label"]).set_index("label")
    assert list(found["traces"]) == [3, 0, 2] and np.isnan(found.loc["y", "mean"]) and np.isnan(found.loc["y", "low"])
    assert tuple(found.loc["z", ["low", "high"]]) == pytest.approx(interval_of([1, 2], [0, 1]))
    assert lines.mean_over_traces(rows[:0], ["label"]).empty


@pytest.mark.parametrize("kind", ["curve", "layers", "needle"])
def test_the_band_of_two_traces_a_prompt_is_that_of_the_prompts(kind, tmp_path):
    run = make_run(tmp_path / "run", [SNAPKV], 2, ["0.1"], [(f"n{i}", 300, 0.42) for i in range(6)])
    about = json.loads((run / "run.json").read_text())
    for i, one in enumerate(about["inputs"]):
        one["prompt_hash"] = f"prompt {i // 2}"
    (run / "run.json").write_text(json.dumps(about))
    shown = drawn(kind, run, tmp_path, "-p", "snapkv").query("policy == 'snapkv'").iloc[0]
    table = pd.read_csv(run / "results.csv", dtype=str, keep_default_na=False)
    metric = ("span_recall", "code word.mean") if kind == "needle" else ("attention_recall", "")
    mine = table[(table["policy"] == "snapkv") & (table["layer"] == ("0" if kind == "layers" else "all"))]
    mine = mine[(mine["metric"] == metric[0]) & (mine["variant"] == metric[1])]
    low, high = interval_of(list(mine["value"].astype(float)), [0, 0, 1, 1, 2, 2])
    assert shown["traces"] == 6
    assert (shown["low"], shown["high"]) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize("traces", [1, 3])
@pytest.mark.parametrize("points", [1, 2, 3, lines.MOST_MARKERS, lines.MOST_MARKERS + 1])
def test_a_mean_has_a_band_of_several_traces_and_markers_where_they_are_few(traces, points):
    rows = pd.DataFrame([{"layer": x, "value": float(x + trace)} for x in range(points) for trace in range(traces)])
    found, look = lines.mean_over_traces(rows, ["layer"]), looks_of(["a"])["a"]
    axis = Figure().subplots()
    end = lines.draw_mean(axis, found, "layer", look, "name")
    assert (end.label, end.x, end.y, end.colour) == ("name", points - 1, found["mean"].iloc[-1], look["color"])
    [drawn] = axis.lines
    np.testing.assert_array_equal(drawn.get_ydata(), found["mean"])
    assert drawn.get_marker() == look["marker"]
    assert len(range(0, points, drawn.get_markevery() or 1)) == min(points, 5 if points > lines.MOST_MARKERS else 8)
    assert (drawn.get_linestyle() == "None") == (points == 1)
    shown = [path.get_extents().intervaly for one in axis.collections for path in one.get_paths()]
    if traces == 1:
        assert not shown
    elif points == 1:
        np.testing.assert_allclose(shown, found[["low", "high"]])
    else:
        [ends] = shown
        np.testing.assert_allclose(ends, [found["low"].min(), found["high"].max()])


def test_the_tokens_of_a_budget_are_those_of_the_traces_that_are_drawn(tmp_path):
    run = make_run(tmp_path / "run", traces=[("short", 200, 0.4), ("long", 1000, 0.4)])
    data = drawn("curve", run, tmp_path, "--trace", "short")
    assert set(data["budget_tokens"][data["budget"] == 0.1]) == {20}
    data = drawn("curve", run, tmp_path)
    assert set(data["budget_tokens"][data["budget"] == 0.1]) == {60}


@pytest.mark.parametrize("lows, words", [([0.1, 0.2], ""), ([0.0, 0.2], lines.WITH_ZERO), ([np.nan, 0.2], "")])
def test_missing_bands_are_said_on_a_logarithmic_axis(lows, words):
    means = pd.DataFrame({"traces": 2, "low": lows})
    prompts = pd.Series([0, 1])
    said = lines.interval_words(means, prompts, logarithmic=True)
    assert said == f"Means over n = 2 traces of 2 prompts. {lines.INTERVAL}{words}"
    assert not lines.interval_words(means, prompts, logarithmic=False).endswith(lines.WITH_ZERO)


def test_a_band_on_a_logarithmic_axis_ends_where_it_includes_zero():
    line = pd.DataFrame({"x": range(4), "mean": 1.0, "low": [0.5, 0.5, -0.5, 0.5], "high": 2.0})
    look = {"color": "blue"}
    for logarithmic, widest in ((False, 3), (True, 1)):
        axis = Figure().subplots()
        lines.draw_mean(axis, line, "x", look, "name", logarithmic)
        [band] = axis.collections
        assert max(np.ptp(path.vertices[:, 0]) for path in band.get_paths()) == widest
        assert band.get_datalim(axis.transData).y0 == (0.5 if logarithmic else -0.5)


def test_a_value_of_zero_is_a_gap_on_a_logarithmic_axis():
    line = pd.DataFrame({"x": range(4), "mean": [0, 1, 2, 0], "low": np.nan, "high": np.nan})
    for logarithmic, mean, end in ((False, [0, 1, 2, 0], (3, 0)), (True, [np.nan, 1, 2, np.nan], (2, 2))):
        axis = Figure().subplots()
        found = lines.draw_mean(axis, line, "x", {"color": "blue"}, "name", logarithmic)
        np.testing.assert_array_equal(axis.lines[0].get_ydata(), mean)
        assert (found.x, found.y) == end
    choice = SimpleNamespace(run=SimpleNamespace(better_of=lambda _: "lower"), metric_name="error")
    found = pd.DataFrame({"policy": [*"aabbcc"], "mean": [0, 0, 0, 1, 20, 20]})
    words = "Always 0 and not on the logarithmic axis: a. Gaps where the value is 0: b"
    assert lines.never_zero(choice, found, [*"abc"]) == ([*"bc"], True, words)
    assert lines.never_zero(choice, found.tail(2), ["c"]) == (["c"], False, "")


@pytest.mark.parametrize("policies, grey", [([], True), (["-p", "snapkv"], False), (["-p", "snapkv,random"], True)])
def test_controls_are_said_where_they_are_drawn(policies, grey, run, tmp_path):
    assert main(["curve", str(run), "-o", str(tmp_path / "figure.svg"), *policies]) == 0
    assert ("controls in grey" in (tmp_path / "figure.svg").read_text()) == grey


def test_layers_shows_single_layers_at_one_budget(run, tmp_path):
    data = drawn("layers", run, tmp_path, "--metric", "kv_bytes", "-b", "0.3", "-p", "chunkkv")
    assert list(data["layer"]) == [0, 1, 2, 3] and set(data["policy"]) == {"chunkkv"}
    assert list(data["mean"]) == [256.0 * 144] * 4


def test_needle_shows_span_recall_at_its_depth_and_length(many, tmp_path):
    data = drawn("needle", many, tmp_path).set_index(["policy", "prompt_tokens", "depth"])
    table = pd.read_csv(many / "results.csv", dtype=str, keep_default_na=False)
    mine = table[(table["metric"] == "span_recall") & (table["layer"] == "all") & (table["budget"] == "0.1")]
    value = mine[(mine["trace"] == "needle-3") & (mine["policy"] == "snapkv")]["value"].item()
    shown = data.loc[("snapkv", 400, 0.4)]
    assert (shown["traces"], shown["span_recall"]) == (1, float(value))
    assert len(data) == 18


def test_needles_of_one_depth_in_the_context_share_a_row(tmp_path):
    """A chat template of 12 or 24 tokens before the context moves the needle in the prompt, not in the context."""
    spans = [Span("report", "context", 12, 112), Span("question", "question", 112, 120)]
    short = SimpleNamespace(prompt=120, spans=spans)
    long = SimpleNamespace(prompt=1024, spans=[Span("report", "context", 24, 1024)])
    assert needle.depth_of(Span("n", "needle", 62, 70), short) == 0.5
    assert needle.depth_of(Span("n", "needle", 524, 530), long) == 0.5
    assert needle.depth_of(Span("n", "needle", 30, 36), SimpleNamespace(prompt=120, spans=[])) == 0.25
    run = make_run(tmp_path / "run", [SNAPKV], 2, ["0.1"], [("a", 200, 0.497), ("b", 200, 0.513)])
    data = drawn("needle", run, tmp_path)  # (99 - 12) / 178 = 0.49 and (102 - 12) / 178 = 0.51
    assert list(data["depth"]) == [0.5] and list(data["traces"]) == [2]


def test_needle_gives_the_interval_of_a_cell_with_several_traces(tmp_path):
    run = make_run(tmp_path / "run", [SNAPKV], 3, ["0.1"], [(f"n{i}", 300, 0.42) for i in range(5)])
    shown = drawn("needle", run, tmp_path).iloc[0]
    table = pd.read_csv(run / "results.csv", dtype=str, keep_default_na=False)
    mine = table[(table["metric"] == "span_recall") & (table["layer"] == "all") & (table["policy"] == "snapkv")]
    low, high = interval_of(list(mine["value"].astype(float)), list(range(5)))
    assert shown["traces"] == 5
    assert (shown["low"], shown["high"]) == (pytest.approx(low), pytest.approx(high))


def test_needle_has_rows_of_depths_that_exist_and_says_how_many_needles_a_cell_has(tmp_path):
    """Depths 0.1, 0.4 and 0.9 at 200 tokens, 0.4 alone at 400: three rows, two of them without a needle at 400."""
    places = [("a", 200, 0.13), ("b", 200, 0.42), ("c", 200, 0.43), ("d", 200, 0.85), ("e", 400, 0.42)]
    run = make_run(tmp_path / "run", [SNAPKV], 2, ["0.1"], places)
    with style.settings():
        figure = needle.draw(Choice(Run(run))).figure
    axis = figure.axes[0]
    assert "needles of a cell, 1 to 2;" in " ".join(text.get_text() for text in figure.texts)
    assert [text.get_text() for text in axis.get_yticklabels()] == ["10", "40", "90"]
    shown = axis.images[0].get_array()
    assert shown.shape == (3, 2)
    np.testing.assert_array_equal(np.isnan(np.ma.filled(shown, np.nan)), [[0, 1], [0, 0], [0, 1]])
    shown_texts = {
        text.get_position(): text.get_text() for text in axis.texts if re.fullmatch(r"[.\d]+", text.get_text())
    }
    assert {(x, y): needle.share_text(shown[y, x]) for x, y in shown_texts} == shown_texts
    assert set(shown_texts) == {(0, 0), (0, 1), (1, 1), (0, 2)}
    assert [needle.share_text(share) for share in (0, 0.004, 0.07, 0.994, 1)] == ["0", ".00", ".07", ".99", "1"]


def test_compare_shows_each_difference_and_what_the_compare_command_computes(many, tmp_path, capsys):
    data = drawn("compare", many, tmp_path, "--baseline", "h2o", "-b", "0.1,0.3", "--metric", "attention_l1")
    table = pd.read_csv(many / "results.csv", dtype=str, keep_default_na=False)
    mine = table[(table["metric"] == "attention_l1") & (table["layer"] == "all") & (table["budget"] == "0.3")]
    values = mine.pivot(index="trace", columns="policy", values="value").astype(float)
    rows = data[(data["budget"] == 0.3) & (data["policy"] == "snapkv")].set_index("quantity")
    expected = values["snapkv"] - values["h2o"]
    np.testing.assert_array_equal(rows.loc["trace", "difference"], expected)
    assert list(rows.loc["trace", "trace"]) == list(expected.index)
    mean = rows.loc["mean"]
    assert mean["difference"] == pytest.approx(expected.mean(), abs=1e-15)
    assert (mean["wins"], mean["losses"]) == ((expected < 0).sum(), (expected > 0).sum())  # less is better
    capsys.readouterr()
    options = ["--baseline", "h2o", "-b", "0.1,0.3", "--metric", "attention_l1", "--json"]
    assert compare([str(many), *options]) == 0
    lines = pd.DataFrame(json.loads(capsys.readouterr().out)["lines"])
    line = lines[(lines["budget"] == "0.3") & (lines["policy"] == "snapkv")].iloc[0]
    same = ["difference_low", "difference_high", "p", "p_holm"]
    assert list(mean[same]) == list(line[same])


@pytest.mark.parametrize("prompts", [3, 12])  # with three prompts no p is below 0.05
def test_compare_explains_a_star_where_one_is_drawn(prompts, tmp_path):
    traces = [(f"t{i}", 400 + 7 * i, 0.2 + 0.05 * i) for i in range(prompts)]
    figure, _ = page_of("compare", make_run(tmp_path / "run", [SNAPKV, H2O], 2, ["0.1"], traces), "screen")
    drawn = any(text.get_text().endswith("*") for axes in figure.axes for text in axes.texts)
    assert drawn == (prompts == 12) == any("Holm" in text.get_text() for text in figure.texts)


def test_compare_sorts_the_better_to_the_top(many, tmp_path):
    def order(*options: str) -> list[str]:
        data = drawn("compare", many, tmp_path, "--baseline", "random", *options)
        return list(data[(data["quantity"] == "mean") & (data["budget"] == 0.1)]["policy"])

    first, last = order(), order("--metric", "attention_l1")
    assert first == last and set(first) == {"snapkv", "h2o", "chunkkv"}
    means = drawn("compare", many, tmp_path, "--baseline", "random").query("quantity == 'mean' and budget == 0.1")
    assert list(means["difference"]) == sorted(means["difference"], reverse=True)


def test_compare_puts_what_no_budget_binds_last_and_does_not_judge_it(tmp_path, capsys):
    run = make_run(tmp_path / "run", [SNAPKV, H2O, NINE[3]], 2, ["0.1"], NEEDLES)
    about = json.loads((run / "run.json").read_text())
    cells = Run(run).cells
    own = cells[(cells["policy"] == "snapkv") & (cells["heads"] == "kv")]
    assert len(own) == len(NEEDLES)
    about["cells"] = [{"trace": row["trace"], "cell": row["cell"], "own_memory": True} for _, row in own.iterrows()]
    (run / "run.json").write_text(json.dumps(about))
    means = drawn("compare", run, tmp_path, "--baseline", "random").query("quantity == 'mean'")
    assert list(means["policy"])[-1] == own["label"].iloc[0]
    assert means["difference"].iloc[-1] > means["difference"].min()
    for column in (means["own_memory"], means["wins"].isna(), means["p"].isna()):
        assert column.tolist() == [False, False, True]
    assert dict(zip(means["heads"], means["memory"], strict=True)) == {"kv": 1, "query": 3}
    assert "not at equal memory, so no p and no verdict: snapkv" in capsys.readouterr().err
    assert compare([str(run), "--baseline", "random"]) == 0
    assert "  query 3x  " in capsys.readouterr().out


def test_attention_shows_what_a_head_attends_to_and_its_own_set(run, tmp_path):
    with h5py.File(run / "cells/demo.h5", "r", locking=False) as file:
        heads = file["traces/demo/eval_attention_heads"][()].astype(float) / 32
        mean = file["traces/demo/eval_attention"][()].astype(float) / 32
    data = drawn("attention", run, tmp_path, "--layer", "2", "--head", "5", "-b", "0.2").set_index("policy")
    np.testing.assert_allclose(data.loc["h2o", "attention"], heads[2, 5], rtol=1e-12)
    for policy, row in (("h2o", 2 * 3 + 1), ("chunkkv", 2)):  # query head 5 reads KV head 1 of 3; layer 2
        group = cell_of(run, policy, "0.2")
        kept = np.split(group["positions"][()], group["offsets"][1:-1])[row]
        np.testing.assert_array_equal(np.flatnonzero(data.loc[policy, "kept_share"]), kept)
    data = drawn("attention", run, tmp_path, "--layer", "2", "-b", "0.2").set_index("policy")
    np.testing.assert_allclose(data.loc["h2o", "attention"], mean[2], rtol=1e-12)
    shares = np.bincount(cell_of(run, "h2o", "0.2")["positions"][()][6 * 96 : 9 * 96], minlength=480) / 3
    np.testing.assert_allclose(data.loc["h2o", "kept_share"], shares, rtol=1e-12)


def test_attention_of_a_long_prompt_is_drawn_in_means_that_lose_nothing(tmp_path):
    run = make_run(tmp_path / "run", [H2O], 2, ["0.1"], [("long", 2500, 0.5)])
    data = drawn("attention", run, tmp_path, "--head", "0")
    width = data["end"] - data["begin"]
    assert width.max() == 3 and data["end"].max() == 2500
    assert (data["attention"] * width).sum() == pytest.approx(0.8, rel=1e-5)
    assert (data["kept_share"] * width).sum() == pytest.approx(250, rel=1e-12)


def test_attention_that_was_not_saved_or_not_measured_says_so(broken, capsys):
    with h5py.File(broken / "cells/demo.h5", "r+") as file:
        del file["traces/demo/eval_attention_heads"]
        file["traces/demo/eval_attention"][1:3] = np.nan
        treated = np.array([0, 3], dtype=np.int32)  # as of sliding windows 0, 64, 64, 0
        file["traces/demo"].attrs["treated"] = treated
        for cell in file["cells"].values():
            cell.attrs["layers"] = treated
    assert main(["attention", str(broken)]) == 0
    capsys.readouterr()
    line = refused(capsys, 3, "attention", broken, "--head", "0")
    assert "attention by head was not saved: expected a run with replay --save attention" in line
    line = refused(capsys, 2, "attention", broken, "--layer", "1")
    assert "--layer: not treated in this run: expected one of 0, 3, found 1" in line


def cosines(path: Path, layer: int, part: str, prompt: int) -> np.ndarray:
    """Token by token, from the definition: [P,P]."""
    with h5py.File(path) as file:
        tensor = file[f"layers/{layer:03d}/{part}"][()].astype(np.float64)
    vectors = [np.concatenate([head[token] for head in tensor]) for token in range(prompt)]
    return np.array([[a @ b / np.sqrt((a @ a) * (b @ b)) for b in vectors] for a in vectors])


@pytest.mark.parametrize(("name", "part"), [("keys", "k"), ("values", "v")])
def test_similarity_of_a_short_prompt_is_the_cosine_of_every_two_tokens(name, part, tmp_path):
    run = make_run(tmp_path / "run", [SNAPKV], 2, ["0.1"], [("short", 60, 0.3)])
    data = drawn("similarity", run, tmp_path, "--layer", "1", "--of", name)
    assert set(data["tensor"]) == {name} and len(data) == 60 * 61 // 2
    expected = cosines(run / "traces" / "short.h5", 1, part, 60)
    np.testing.assert_allclose(data["cosine"], expected[data["begin"], data["other_begin"]], atol=1e-12)
    assert data[(data["begin"] == 17) & (data["other_begin"] == 17)]["cosine"].item() == pytest.approx(1, abs=1e-12)


def test_similarity_of_a_long_prompt_is_the_mean_over_pairs_of_different_tokens(tmp_path):
    path = make_run(tmp_path / "run", [SNAPKV], 1, ["0.1"], [("long", 601, 0.3)]) / "traces" / "long.h5"
    data = drawn("similarity", path, tmp_path, "--of", "values").set_index(["begin", "other_begin"])
    each = cosines(path, 0, "v", 601)
    assert data.loc[(30, 90), ["end", "other_end"]].tolist() == [33, 93]
    assert data.loc[(30, 90), "cosine"] == pytest.approx(each[30:33, 90:93].mean(), abs=1e-12)
    inside = (each[30:33, 30:33].sum() - 3) / 6
    assert data.loc[(30, 30), "cosine"] == pytest.approx(inside, abs=1e-12)
    assert data.loc[(597, 600), "end"] == 600 and data.loc[(600, 600), "cosine"] == 1
    assert data.loc[(597, 600), "cosine"] == pytest.approx(each[597:600, 600].mean(), abs=1e-12)


def test_similarity_of_bfloat16_and_of_a_token_that_is_zero():
    tensor = np.random.default_rng(0).normal(size=(2, 700, 4)).astype(ml_dtypes.bfloat16)
    tensor[:, 5] = 0
    found = similarity.block_cosines(tensor, 650, 1)
    assert found.shape == (650, 650) and (found[5, np.arange(650) != 5] == 0).all()
    wide = tensor.astype(np.float64).transpose(1, 0, 2).reshape(700, 8)
    expected = wide[600] @ wide[20] / np.linalg.norm(wide[600]) / np.linalg.norm(wide[20])
    assert found[600, 20] == found[20, 600] == pytest.approx(expected, abs=1e-12)


def test_similarity_holds_neither_all_pairs_nor_the_whole_tensor():
    prompt = 20_000
    tensor = np.ones((2, prompt, 16), dtype=np.float16)
    tracemalloc.start()
    found = similarity.block_cosines(tensor, prompt, 100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.shape == (200, 200) and found == pytest.approx(1, abs=1e-12)
    assert peak < prompt * 32 * 8 / 4  # a quarter of the tensor in float64; all pairs would be 3.2 GB


def test_similarity_takes_a_trace_in_place_of_a_run(run, tmp_path, monkeypatch, capsys):
    path = run / "traces" / "demo.h5"
    shown = drawn("similarity", run, tmp_path, "--layer", "1")
    pd.testing.assert_frame_equal(drawn("similarity", path, tmp_path, "--layer", "1"), shown)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["similarity", str(path), "--layer", "1"]) == 0
    assert capsys.readouterr() == ("similarity.svg\n", "")
    assert "heatmap needs a run: expected a folder of results of kvreplay replay" in refused(capsys, 2, "heatmap", path)
    assert "cannot be opened: No such file" in refused(capsys, 3, "similarity", tmp_path / "none.h5")


def test_a_trace_that_moved_or_changed_is_named(broken, capsys):
    path = broken / "traces" / "demo.h5"
    path.rename(broken / "other.h5")
    line = refused(capsys, 3, "similarity", broken)
    assert (
        f"trace demo not found: expected its file at this path, or TRACE.h5 in place of the run, found {path}" in line
    )
    write_trace(path, 470, 4, 9, 3, [("needle", "needle", 3, 5)])
    line = refused(capsys, 3, "similarity", broken)
    assert "not the trace that was replayed: expected made-up-135M, 480 prompt of 512 tokens, 4 layers, found" in line
    path.unlink()
    write_trace(path, 480, 4, 9, 3, [("needle", "needle", 3, 5)], first_id=7)  # same name and shapes
    line = refused(capsys, 3, "similarity", broken)
    assert f"{path}: not the trace that was replayed: expected prompt ids of XXH3-128" in line
    (broken / "run.json").write_text(json.dumps({"schema": "kvreplay-run/1"}))
    assert "run.json: path of trace demo: expected an entry of inputs" in refused(capsys, 3, "similarity", broken)


def test_a_figure_of_one_trace_speaks_of_that_trace(many, tmp_path):
    choice = Choice(Run(many), traces_asked=["needle-1", "needle-2"])
    assert choice.one_trace().name == "needle-1"
    assert "trace needle-1, 400 prompt" in choice.caption() and "40 tokens per layer" in choice.budget_line()


def test_policies_are_called_by_name_until_parameters_tell_them_apart(tmp_path):
    other = Policy("chunkkv", "chunk=20,window=8,heads=layer,reuse=1", "layer")
    nested = Policy("oracle", "scope=head,heads=kv,counts=(snapkv:window=32,kernel=5)")
    labels = set(Run(make_run(tmp_path / "run", [SNAPKV, CHUNKKV, other, nested], budgets=["0.1"])).cells["label"])
    nested_label = "oracle:counts=(snapkv:window=32,kernel=5)"
    assert labels == {"snapkv", "chunkkv:chunk=10", "chunkkv:chunk=20", nested_label, "oracle", "full", "random"}


def test_policies_are_chosen_as_replay_writes_them(wide):
    def labels(*asked: str) -> list[str]:
        return Choice(Run(wide), policies=asked).labels(controls=True)

    assert labels("chunkkv") == ["chunkkv:reuse=1", "chunkkv:reuse=4"]
    assert labels("chunkkv:chunk=10,reuse=4", "h2o:recent=0.5") == ["chunkkv:reuse=4", "h2o"]
    assert labels("snapkv:window=32", "random") == ["snapkv:window=32,kernel=5,pool=avg,heads=query", "random"]


def test_a_failed_cell_is_not_drawn(tmp_path, capsys):
    folder = make_run(tmp_path / "run", [SNAPKV, H2O], budgets=["0.1"])
    about = json.loads((folder / "run.json").read_text())
    about["cells"] = [{"cell": f"{i:016x}", "trace": "demo", "state": "failed" if i else "done"} for i in range(2)]
    (folder / "run.json").write_text(json.dumps(about))
    data = drawn("curve", folder, tmp_path)
    assert set(data["policy"]) == {"snapkv", "full", "random", "oracle"}
    assert capsys.readouterr().err == "kvreplay: curve: 1 failed cells are not drawn\n"


def test_a_boundary_before_the_end_of_the_prompt_bounds_every_map(tmp_path):
    folder = make_run(tmp_path / "run", [Policy("lean", recent=0)], budgets=["0.1"])
    with h5py.File(folder / "cells/demo.h5", "r+") as file:
        trace = file["traces/demo"]
        trace.attrs["prompt"], trace.attrs["boundary"] = 520, 480
    assert drawn("kept", folder, tmp_path)["end"].max() == 480
    chance = drawn("heatmap", folder, tmp_path).set_index("quantity").loc["adjacent_chance", "value"]
    assert chance == pytest.approx(0.1 / 1.9, abs=1e-15)


def test_what_two_cells_differ_in_besides_parameters_becomes_part_of_their_names(broken):
    table = (broken / "results.csv").read_text()
    again = [line.replace("continuation", "last:16").replace("0" * 15, "f" * 15) for line in table.splitlines()[1:]]
    (broken / "results.csv").write_text(table + "\n".join(again) + "\n")
    assert set(Run(broken).cells["label"]) >= {"snapkv:eval=continuation", "snapkv:eval=last:16"}


def test_a_policy_keeps_its_colour_whatever_else_is_drawn(wide):
    alone = {label: looks_of([label])[label]["color"] for names in colours.POLICIES for label in names}
    together = looks_of([f"other-{i}" for i in range(20)] + list(reversed(alone)))
    assert alone == {label: together[label]["color"] for label in alone}
    first = [names[0] for names in colours.POLICIES]
    assert [alone[label] for label in first] == list(colours.COLOURS)
    for label in ("snapkv:window=32", "SnapKV", "SnapKV without pooling"):
        assert looks_of(["snapkv", label])[label]["color"] == alone["snapkv"]
    run = Run(wide)
    whole, few = Choice(run).looks, Choice(run, policies=["tova", "h2o"]).looks
    assert few == {label: whole[label] for label in few}


def test_figures_of_different_runs_have_equal_colours_in_their_files(run, wide, tmp_path):
    """Strokes of the SVG, also where other policies are drawn before."""

    def strokes(kind: str, folder: Path, policies: str) -> set[str]:
        drawn(kind, folder, tmp_path, "-p", policies)
        found = set(re.findall(r"stroke: (#[0-9a-f]{6})", (tmp_path / "figure.svg").read_text()))
        return found & {colour.lower() for colour in colours.COLOURS} - {"#000000"}

    for kind in ("curve", "layers", "tradeoff"):
        assert strokes(kind, run, "h2o") == {"#d55e00"}, kind
        assert strokes(kind, wide, "knorm,tova,h2o") == {"#d55e00", "#56b4e9"}, kind


def test_lines_of_many_policies_are_drawn_without_the_engine(wide, tmp_path, monkeypatch):
    assert page_of("curve", wide, "screen")[0].axes[1:]  # a panel for each family
    monkeypatch.setitem(sys.modules, "kvreplay._engine", None)
    monkeypatch.delattr(kvreplay, "_engine", raising=False)
    assert not page_of("curve", wide, "screen")[0].axes[1:]
    assert {policy["family"] for policy in Page(Run(wide)).content["policies"]} == {"user-defined"}


def test_each_built_in_policy_has_a_look_of_its_own_and_no_small_family_has_a_colour_twice():
    families = dict(engine.families())
    known = [name for family, names in families.items() if family not in ("controls", "user-defined") for name in names]
    placed = {name for names in colours.POLICIES for name in names}
    assert placed <= set(known) and len(placed) == len(colours.PLACES) >= 40
    looks = looks_of(known)
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == len(known)
    for family, names in families.items():
        if family != "controls":
            shown = [looks[name]["color"] for name in names if name in placed]
            assert len(set(shown)) == min(len(shown), len(colours.COLOURS)), family


def test_labels_of_one_policy_differ_in_dash_and_marker():
    labels = ["snapkv:window=8", "snapkv:window=32", "SnapKV", *(f"snapkv:window={i}" for i in range(64, 70))]
    looks = looks_of(labels)
    assert list(looks) == labels and looks["SnapKV"] == looks_of(["snapkv"])["snapkv"]
    assert {look["color"] for look in looks.values()} == {colours.COLOURS[0]}
    assert len({(str(look["linestyle"]), look["marker"]) for look in looks.values()}) == len(labels)
    assert looks["snapkv:window=8"]["linestyle"] != looks["snapkv:window=32"]["linestyle"] != "-"


def test_other_policies_and_series_have_colours_that_the_figure_does_not_use():
    labels = ["snapkv", "mine:a=1", "mine:a=2", *(f"window {i}" for i in range(8))]
    looks = looks_of(labels)
    assert looks["mine:a=1"]["color"] == looks["mine:a=2"]["color"]
    assert len({look["color"] for look in looks.values()}) == 10
    assert looks == looks_of(list(reversed(labels))) | {label: looks[label] for label in labels if "mine" in label}
    crowd = looks_of([f"other {i}" for i in range(40)]).values()
    assert len({(look["color"], look["marker"]) for look in crowd}) == 40


def test_controls_are_grey():
    controls = looks_of(["a", "full", "random", "oracle"], ["full", "random", "oracle"])
    greys = [controls[name] for name in ("full", "random", "oracle")]
    assert {look["color"] for look in greys} == {colours.GREY} and len({str(look["linestyle"]) for look in greys}) == 3
    references = looks_of([], ["PyramidKV", "even"])
    assert references["PyramidKV"] != references["even"]


# Of full dichromacy, on linear RGB (Machado, Oliveira and Fernandes 2009, table 1).
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
}


def oklab(colour: str, vision: str) -> np.ndarray:
    """Ottosson 2020; distances are about those that are seen."""
    encoded = np.array(to_rgb(colour))
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(VISION[vision]) @ linear, 0, 1)
    cones = np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                      [0.0883024619, 0.2817188376, 0.6299787005]]) @ linear  # fmt: skip
    return np.array([[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099],
                     [0.0259040371, 0.7827717662, -0.808675766]]) @ np.cbrt(cones)  # fmt: skip


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("palette", [(*colours.COLOURS, colours.GREY), (*colours.ON_DARK, colours.GREY_ON_DARK)])
def test_colours_differ_for_everybody(palette, vision):
    places = [oklab(colour, vision) for colour in palette]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(places, 2)) > 0.07


def test_every_colour_has_one_for_a_dark_ground():
    assert len(colours.COLOURS) == len(colours.ON_DARK) >= 8
    assert colours.on_dark(colours.COLOURS[3]) == colours.ON_DARK[3]
    assert colours.on_dark(colours.GREY) == colours.GREY_ON_DARK


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_of_a_paper_has_its_width_and_no_title_but_says_the_caption(kind, many, tmp_path, capsys):
    words = [text.get_text() for text in page_of(kind, many, "screen")[0].texts]
    figure, choice = page_of(kind, many, "paper")
    assert figure.texts == [] and figure.get_figwidth() == 3.25
    assert {text.get_fontsize() for text in figure.findobj(Text) if text.get_text().strip()} == {8}
    [caption] = [note for note in choice.notes if note.startswith("caption: ")]
    for word in " ".join(words).split():
        assert word.strip(".").lower() in caption.lower()
    assert any(words in caption.lower() for words in ("trace needle-0", "6 traces", "traces 6"))
    options = ["--style", "paper", "--title", "Mine", "--width", "text", *NEEDED.get(kind, [])]
    assert main([kind, str(many), "-o", str(tmp_path / "figure.svg"), *options]) == 0
    assert f"kvreplay: {kind}: caption: " in capsys.readouterr().err
    assert 'width="486pt"' in (tmp_path / "figure.svg").read_text()  # 6.75 inches
    assert [text.get_text() for text in page_of(kind, many, "paper", title="Mine")[0].texts] == ["Mine"]


@pytest.mark.parametrize("kind", ["curve", "layers", "tradeoff"])
def test_means_state_the_number_of_traces_and_prompts(kind, many):
    assert "Means over n = 6 traces of 6 prompts" in page_of(kind, many, "paper")[1].notes[-1]


def test_text_remains_text_in_files_for_papers(run, tmp_path):
    """Type 42 fonts in PDF; text of LaTeX in PGF, without a LaTeX to write it."""
    files = [tmp_path / "figure.pdf", tmp_path / "figure.pgf"]
    options = [text for path in files for text in ("-o", str(path))]
    assert main(["heatmap", str(run), *options, "--title", r"a_b & c → d \e{f}~g^h 5%", "--style", "paper"]) == 0
    pdf, pgf = (path.read_bytes() for path in files)
    assert b"/CIDFontType2" in pdf and b"/Type3" not in pdf
    title = rb"a\_b \& c $\to$ d \textbackslash{}e\{f\}\textasciitilde{}g\textasciicircum{}h 5%"
    assert title in pgf and re.search(rb"bfseries.*snapkv}}", pgf)
    for image in re.findall(r"\\includegraphics\[.*?\]{(.*?)}", pgf.decode()):
        assert (tmp_path / image).read_bytes().startswith(BEGINNINGS["png"])


def panels_of(kind: str, folder: Path, **options: object) -> dict[str, set[str]]:
    """Names of lines by the headings of panels."""
    figure, choice = page_of(kind, folder, "screen", **options)
    known = set(choice.labels(controls=True))
    panels = {}
    for axes in figure.axes:
        texts = [text.get_text().removesuffix(" †").replace("\n", "") for text in axes.texts]
        [heading] = [text for text in texts if text not in known] or [""]
        assert len(texts) - (heading in texts) == len(set(texts) - {heading})
        panels[heading] = set(texts) - {heading}
    return panels


@pytest.mark.parametrize("kind", ["curve", "layers", "tradeoff"])
def test_more_than_eight_policies_are_drawn_in_panels_of_their_families(kind, run, wide):
    controls = {"full", "oracle", "random"}
    assert panels_of(kind, run) == {"": {"snapkv", "h2o", "chunkkv"} | controls}
    panels = panels_of(kind, wide)
    assert list(panels) == ["positions", "attention", "keys and values", "budget allocation", "chunks"]
    assert panels["chunks"] == {"chunkkv:reuse=1", "chunkkv:reuse=4"} | controls
    assert panels["keys and values"] == {"knorm"} | controls


def test_more_than_eight_policies_of_one_panel_have_a_legend(tmp_path):
    names = [f"mine-{i}" for i in range(9)]
    folder = make_run(tmp_path / "run", [Policy(name) for name in names])
    figure, choice = page_of("curve", folder, "screen")
    [axes] = figure.axes
    texts = [text.get_text() for text in axes.texts]
    assert texts == [*names, "full", "oracle", "random"]
    lines = [line for line in axes.lines if line.get_transform() == axes.transAxes]
    samples = [line for line in lines if len(line.get_xdata()) == 1]
    assert {line.get_xdata()[0] for line in samples} == {line.get_xdata()[0] for line in lines}  # beside the dashes
    shown = [(line.get_color(), line.get_marker()) for line in samples]
    assert shown == [(look["color"], look["marker"]) for look in map(choice.looks.get, texts)]
    assert not any(line.get_linestyle() == ":" and line.get_linewidth() < 1 for line in axes.lines)


def test_tradeoff_shows_memory_and_the_points_that_no_other_beats(run, tmp_path):
    data = drawn("tradeoff", run, tmp_path, "--metric", "attention_l1")
    table = pd.read_csv(run / "results.csv", dtype=str, keep_default_na=False)
    table = table[(table["layer"] == "all") & table["metric"].isin(["kv_bytes", "attention_l1"])]
    value = table.astype({"value": float}).set_index(["policy", "budget", "metric", "variant"])["value"]
    asked = data[data["role"] == "asked"]
    assert len(asked) == 9 and len(data) == 9 + 3 * 2 + 1  # full keeps the same at every budget
    for row in asked.itertuples():
        memory, error = (value[row.policy, str(row.budget), name, ""] for name in ("kv_bytes", "attention_l1"))
        assert (row.kv_bytes, row.mean) == (memory, error)
        beaten = (asked["kv_bytes"] <= memory) & (asked["mean"] <= error)
        assert row.on_front == (beaten.sum() == 1)
    assert not data[data["role"] == "control"]["on_front"].any()
    recall = drawn("tradeoff", run, tmp_path)
    assert set(recall["metric"]) == {"attention_recall"}  # the run lacks the headline
    recall = recall[recall["role"] == "asked"]
    for row in recall.itertuples():
        beaten = (recall["kv_bytes"] <= row.kv_bytes) & (recall["mean"] >= row.mean)
        assert row.on_front == (beaten.sum() == 1)


@pytest.mark.parametrize("default", ["output_error:pooled", "attention_recall", "attention_l1"])
def test_the_default_metric_is_one_of_the_run(default, tmp_path):
    folder = make_run(tmp_path / "run", layers=2)
    table = pd.read_csv(folder / "results.csv", dtype=str, keep_default_na=False)
    if default == "output_error:pooled":
        errors = table[table["metric"] == "attention_l1"].assign(metric="output_error", variant="pooled")
        table = pd.concat([table, errors])
    elif default == "attention_l1":
        table = table[table["metric"] != "attention_recall"]
    table.to_csv(folder / "results.csv", index=False)
    for kind, *options in (["curve"], ["layers"], ["tradeoff"], ["compare", "--baseline", "h2o"]):
        assert set(drawn(kind, folder, tmp_path, *options)["metric"]) == {default}


@pytest.mark.parametrize("span", [2, 12, 100])
def test_an_axis_of_memory_has_several_ticks(span):
    axes = Figure((4, 3)).add_axes((0.1, 0.1, 0.8, 0.8))
    axes.set_xlim(13, 13 * span)
    style.logarithmic_axis(axes, "x")
    assert 3 <= sum(13 <= tick <= 13 * span for tick in axes.xaxis.get_majorticklocs()) <= 8


def test_tradeoff_has_bits_per_number_of_the_full_cache(run, many, tmp_path):
    for folder in (run, many):
        data = drawn("tradeoff", folder, tmp_path)
        table = Run(folder).overall
        full = table[(table["label"] == "full") & (table["metric"] == "kv_bytes")].groupby("trace")["value"].first()
        np.testing.assert_allclose(data["bits_per_number"], 16 * data["kv_bytes"] / full.mean(), rtol=1e-12)
        figure, _ = page_of("tradeoff", folder, "screen")
        [first] = figure.axes
        [second] = first.child_axes
        FigureCanvasAgg(figure).draw()
        assert second.get_xlabel() == "bits per number (full cache: 16)"
        scale = second.get_xlim()[1] / first.get_xlim()[1]
        assert scale == pytest.approx(16 * 1024 / full.mean()), "the first axis is in KiB"
        assert {tick.get_text() for tick in second.get_xticklabels()} >= {"2", "5"}


def test_tradeoff_without_the_full_cache_has_one_axis(broken, tmp_path):
    table = pd.read_csv(broken / "results.csv", dtype=str, keep_default_na=False)
    table[table["policy"] != "full"].to_csv(broken / "results.csv", index=False)
    assert drawn("tradeoff", broken, tmp_path)["bits_per_number"].isna().all()
    assert not page_of("tradeoff", broken, "screen")[0].axes[0].child_axes


def test_equal_points_are_both_on_the_front():
    memory, cost = pd.Series([2.0, 1, 2, 2, 3, 1]), pd.Series([1.0, 3, 1, 2, 1, 0])
    counts = pd.Series([True] * 5 + [False])
    assert on_front(memory, cost, counts).tolist() == [True, True, True, False, False, False]


@pytest.fixture
def with_budget_free(tmp_path):
    """A run in which kivi is not at equal memory."""
    folder = make_run(tmp_path / "run", [SNAPKV, Policy("kivi", slope=1.6)])
    about = json.loads((folder / "run.json").read_text())
    cells = Run(folder).cells
    about["cells"] = [{"trace": row.trace, "cell": row.cell, "own_memory": row.policy == "kivi"}
                      for row in cells.itertuples()]  # fmt: skip
    (folder / "run.json").write_text(json.dumps(about))
    return folder


def test_curves_name_policies_that_are_not_at_equal_memory(with_budget_free, tmp_path):
    def texts(folder):
        return " ".join(text.get_text() for text in page_of("curve", folder, "screen")[0].texts)

    assert "not at equal memory: kivi" in texts(with_budget_free)
    assert "equal memory" not in texts(make_run(tmp_path / "equal", [SNAPKV]))


def test_tradeoff_draws_a_budget_free_policy_as_points(with_budget_free):
    figure, choice = page_of("tradeoff", with_budget_free, "screen")

    def drawn_lines(label: str) -> list[tuple[int, str]]:
        look = choice.looks[label]
        lines = figure.axes[0].lines
        lines = [one for one in lines if (one.get_color(), one.get_marker()) == (look["color"], look["marker"])]
        return [(len(one.get_xdata()), one.get_linestyle()) for one in lines]

    assert drawn_lines("kivi") == [(1, "None")] * 3 and drawn_lines("snapkv") == [(3, "-")]
    assert figure.axes[0].get_xscale() == "log"


def test_pareto_is_another_name_of_tradeoff(run, tmp_path, capsys):
    for kind in ("pareto", "tradeoff"):
        assert main([kind, str(run), "-o", str(tmp_path / f"{kind}.svg"), "--data", str(tmp_path / f"{kind}.csv")]) == 0
    assert (tmp_path / "pareto.csv").read_text() == (tmp_path / "tradeoff.csv").read_text()


def test_a_run_without_memory_has_no_pareto_front(broken, capsys):
    table = pd.read_csv(broken / "results.csv", dtype=str, keep_default_na=False)
    table[table["metric"] != "kv_bytes"].to_csv(broken / "results.csv", index=False)
    assert "expected values of kv_bytes (replay --metrics kv_bytes), found none" in refused(
        capsys, 3, "tradeoff", broken
    )


def test_a_metric_with_one_variant_needs_no_variant(run):
    assert Choice(Run(run), metric_asked="span_recall").metric == ("span_recall", "code word.mean")
    choice = Choice(Run(run), metric_asked="span_recall")
    table = choice.run.overall
    more = table[table["metric"] == "span_recall"].assign(variant="answer.mean")
    choice.run.overall = pd.concat([table, more])
    expected = (
        "several variants: expected one of span_recall:answer.mean, span_recall:code word.mean, found span_recall"
    )
    with pytest.raises(Error, match=expected):
        _ = choice.metric


def test_the_order_of_policies_on_the_command_line_is_that_of_panels_and_colours(wide, tmp_path):
    asked = ["tova", "chunkkv", "h2o"]
    order = ["tova", "chunkkv:reuse=1", "chunkkv:reuse=4", "h2o"]
    for kind in ("heatmap", "kept", "budgets", "attention"):
        data = drawn(kind, wide, tmp_path, "-p", ",".join(asked))
        assert list(data["policy"].unique()) == order, kind
    data = drawn("compare", wide, tmp_path, "-p", ",".join(asked), "--baseline", "random")
    assert list(data["policy"].unique()) == order
    assert Choice(Run(wide), policies=asked).labels(controls=True) == order
    reversed_ = Choice(Run(wide), policies=["chunkkv:reuse=4", "chunkkv:reuse=1"]).looks
    assert reversed_["chunkkv:reuse=4"] == looks_of(["chunkkv"])["chunkkv"]


@pytest.mark.parametrize("kind", ["curve", "layers"])
def test_errors_of_different_orders_have_a_logarithmic_axis(kind, run, tmp_path):
    """attention_l1: 0 of full, some 0.1 of the oracle and 1.7 of random; recall is no error."""

    def scale(metric: str, *policies: str) -> tuple[str, set[str]]:
        choice = Choice(Run(run), metric_asked=metric, policies=policies, variant="mean")
        with style.settings():
            figure = import_module(f"kvreplay.plot.{kind}").draw(choice).figure
        return figure.axes[0].get_yscale(), {text.get_text() for text in figure.axes[0].texts}

    kind_of, names = scale("attention_l1")
    assert kind_of == "log" and "full" not in names and {"oracle", "random", "snapkv"} <= names
    assert scale("attention_l1", "snapkv", "h2o")[0] == "linear"
    assert scale("attention_recall")[0] == "linear"


@pytest.mark.parametrize(
    ("values", "expected"), [([0, 0.1, 1], True), ([0.11, 1], False), ([-0.1, 2], False), ([0], False)]
)
def test_only_errors_that_differ_tenfold_need_logarithms(values, expected):
    assert style.errors_need_logarithms(np.array(values, dtype=float)) is expected


def test_labels_are_moved_apart_as_little_as_needed():
    np.testing.assert_allclose(style.spread(np.array([0.5, 0.5, 0.1]), np.full(3, 0.1), 0, 1), [0.45, 0.55, 0.1])
    np.testing.assert_allclose(style.spread(np.array([1.0, 1.0]), np.full(2, 0.1), 0, 1), [0.85, 0.95])
    np.testing.assert_allclose(style.spread(np.array([0.5, 0.5]), np.array([0.1, 0.3]), 0, 1), [0.4, 0.6])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("plot") / "wide", NINE, 32, ["0.05", "0.1", "0.4"])


@pytest.fixture(scope="module")
def thirteen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [*(name for colour in (0, 2, 5) for name in colours.POLICIES[colour][:4]), "streaming-llm"]
    return make_run(tmp_path_factory.mktemp("plot") / "thirteen", [Policy(name, "heads=kv") for name in names], 20)


def page_of(kind: str, folder: Path, page: str, **options: object) -> tuple[Figure, Choice]:
    choice = Choice(Run(folder), baseline="random", **PAGES[page], **options)
    with style.settings():
        return import_module(f"kvreplay.plot.{kind}").draw(choice).figure, choice


@pytest.mark.parametrize(
    ("page", "fixture"),
    [("screen", "single"), ("screen", "wide"), ("text", "run"), ("paper", "wide"), ("text", "thirteen")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_leaves_the_page_and_no_two_texts_overlap(kind, page, fixture, request):
    with style.settings():
        figure, _ = page_of(kind, request.getfixturevalue(fixture), page)
        figure.set_dpi(200)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        hidden = {
            tick.label1
            for page in (one for axes in figure.axes for one in (axes, *axes.child_axes))
            for axis in (page.xaxis, page.yaxis)
            for tick in axis.get_major_ticks()
            if not page.axison or tick not in axis._update_ticks()
        }
        texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
        texts = [text for text in texts if text not in hidden]
        boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]
    paper = figure.bbox
    for i, (line, box) in enumerate(boxes):
        assert paper.x0 <= box.x0 and box.x1 <= paper.x1 and paper.y0 <= box.y0 and box.y1 <= paper.y1, line
        for other, beside in boxes[:i]:
            across = min(box.x1, beside.x1) - max(box.x0, beside.x0)
            along = min(box.y1, beside.y1) - max(box.y0, beside.y0)
            assert across <= 1 or along <= 2, (line, other)
    assert min(text.get_fontsize() for text in texts) >= 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_figure_of_thirteen_policies_fits_a_page_of_a_paper(kind, thirteen):
    drawing = kvreplay.figure(
        kind, Run(thirteen), style="paper", **({"baseline": "random"} if kind == "compare" else {})
    )
    assert drawing.figure.get_figheight() <= style.TALLEST
    assert drawing.figure.get_figwidth() == (3.25 if kind in ("redundancy", "similarity", "attention") else 6.75)
    assert len(drawing.notes) == len(set(drawing.notes)) and not any("tall" in note for note in drawing.notes)


def test_a_figure_that_is_taller_than_a_page_says_so(thirteen):
    notes = kvreplay.figure("curve", Run(thirteen), style="paper", width="column").notes
    assert any(
        re.fullmatch(r"1\d\.\d inches tall, a page has 8; use -p to draw fewer policies", note) for note in notes
    )


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("expected-attention", ["expected-", "attention"]),
        ("a b,c", ["a b,c"]),
        ("", [""]),
        ("x=-1, yyyyyyyyyyy", ["x=-1,", "yyyyyyyyyyy"]),
    ],
)
def test_lines_break_behind_hyphens_of_words_and_none_is_empty(line, lines):
    assert style.wrap(line, 0.8) == lines


def test_policy_lists_split_as_the_replay_command_splits_them():
    assert split_policies(["h2o, knorm "]) == ["h2o", "knorm"]
    assert split_policies(["h2o,snapkv:window=32,kernel=5", "oracle:counts=(snapkv:window=8,kernel=3)"]) == [
        "h2o", "snapkv:window=32,kernel=5", "oracle:counts=(snapkv:window=8,kernel=3)"]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["heatmaps"], "plot: unknown kind of figure heatmaps: did you mean heatmap?"),
        (["jaccard"], "plot: unknown kind of figure jaccard: did you mean heatmap?"),
        (["curve", "--metric", "atention_recall"], "unknown metric atention_recall: did you mean attention_recall?"),
        (["curve", "--metric", "span_recal"], "unknown metric span_recal: did you mean span_recall:code word.mean?"),
        (
            ["tradeoff", "--metric", "kv_bytes"],
            "--metric: no direction: expected a metric of which higher or lower",
        ),
        (["curve", "--style", "papers"], "plot: argument --style: invalid choice"),
        (["curve", "--width", "page"], f"--width: {WIDTHS}, found page"),
        (["curve", "--width", "1"], f"--width: {WIDTHS}, found 1"),
        (["curve", "--width", "3.25pt"], f"--width: {WIDTHS}, found 3.25pt"),
        (["curve", "--width", "60mm"], f"--width: {WIDTHS}, found 60mm"),
        (["heatmap", "-p", "snapvk"], "-p: unknown policy snapvk: did you mean snapkv?"),
        (["heatmap", "-b", "0.15"], "-b: unknown budget: expected one of 0.1, 0.2, 0.3, found 0.15"),
        (["kept", "--trace", "demos"], "--trace: unknown trace demos: did you mean demo?"),
        (
            ["kept", "-o", "figure.jpg"],
            "-o: unknown file format: expected a name ending in .svg, .pdf, .png or .pgf, found figure.jpg",
        ),
        (
            ["kept", "--data", "numbers.txt"],
            "--data: unknown file format: expected a name ending in .csv, found numbers.txt",
        ),
        (["needle", "--metric", "span_recall:men"], "unknown variant men: did you mean mean?"),
        (
            ["needle", "--metric", "kv_bytes"],
            "--metric: not a metric of this figure: expected span_recall:any|mean|full, found kv_bytes",
        ),
        (["compare"], "--baseline: no policy to compare with: expected a policy of the run, found none"),
        (["compare", "--baseline", "h20"], "--baseline: unknown policy h20: did you mean h2o?"),
        (["compare", "--baseline", "h2o", "--seed", "-2"], "--seed: out of range: expected 0 or more, found -2"),
        (["attention", "--layer", "9"], "--layer: no such layer in this trace: expected 0 to 3, found 9"),
        (["attention", "--head", "9"], "--head: no such query head: expected 0 to 8, found 9"),
        (["similarity", "--layer", "-1"], "--layer: no such layer in this trace: expected 0 to 3, found -1"),
        (["similarity", "--of", "queries"], "plot: argument --of: invalid choice"),
        (["heatmap", "--variant", "none"], "plot: argument --variant: invalid choice"),
        (["heatmap", "--colour"], "plot: unknown option: expected an option of kvreplay plot --help, found --colour"),
        (["heatmap", "--trase", "demo"], "plot: unknown option --trase: did you mean --trace?"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_nearest(options, words, run, capsys):
    assert words in refused(capsys, 2, options[0], run, *options[1:])


@pytest.mark.parametrize(
    "text, inches", [("3.25in", 3.25), ("3.25", 3.25), ("8.255cm", 3.25), ("82.55mm", 3.25), ("text", 6.75)]
)
def test_the_width_of_a_figure_has_a_unit(text: str, inches: float):
    assert parser().parse_args(["curve", "run", "--width", text]).width == pytest.approx(inches)


VALUES = {"-p": "snapkv", "-b": "0.1", "--trace": "demo", "--metric": "span_recall", "--variant": "first",
          "--baseline": "random", "--seed": "0", "--layer": "2", "--head": "0", "--of": "keys"}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_option_that_a_kind_does_not_read_is_refused_with_those_that_do(kind, capsys):
    flags = {parser().flag(field): field for one in KINDS.values() for field in one.reads}
    assert flags.keys() == VALUES.keys()
    for flag, field in flags.items():
        readers = [name for name, one in KINDS.items() if field in one.reads]
        if kind in readers:
            continue
        expected = ", ".join(readers) if len(readers) == 1 else "one of " + ", ".join(readers)
        line = f"kvreplay: {flag}: not an option of this figure: expected {expected}, found {kind}\n"
        assert refused(capsys, 2, kind, "no-run", flag, VALUES[flag]) == line  # before anything is read


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_reads_what_it_declares(kind, run, tmp_path, monkeypatch):
    fields = {field for one in KINDS.values() for field in one.reads}
    read = set()

    class Watched(Choice):
        def __getattribute__(self, name):
            read.update({name} & fields)
            return super().__getattribute__(name)

    monkeypatch.setattr("kvreplay.plot.figure_options.Choice", Watched)
    assert main([kind, str(run), "-o", str(tmp_path / "figure.svg"), *NEEDED.get(kind, [])]) == 0
    assert read == set(KINDS[kind].reads)


def test_help_names_the_options_of_each_kind():
    kinds = parser().format_help().partition("kinds of figure")[2].partition("\n\n")[0].partition("\n")[2]
    expected = [[name, *kind.summary.split(), *map(parser().flag, kind.reads)] for name, kind in KINDS.items()]
    assert kinds.split() == [word for words in expected for word in words]


def test_an_empty_command_line_says_what_is_missing(capsys):
    assert "the following arguments are required: KIND, as in kvreplay plot curve out" in refused(capsys, 2)
    assert refused(capsys, 2, "curve") == "kvreplay: plot: no RUN: expected kvreplay plot curve RUN\n"


def test_a_run_is_no_kind(broken, capsys):
    assert refused(capsys, 2, broken, "curve") == (
        f"kvreplay: plot: the kind of figure comes before RUN: expected kvreplay plot curve {broken}\n"
    )
    assert refused(capsys, 2, broken).startswith(
        "kvreplay: plot: no kind of figure before RUN: expected one of heatmap"
    )


@pytest.mark.parametrize("name", ["results.csv", "cells", "run.json"])
def test_a_folder_without_its_files_is_no_run(name, broken, capsys):
    (broken / name).rename(broken / "elsewhere")
    line = refused(capsys, 3, "heatmap", broken)
    assert line.startswith(f"kvreplay: {broken}: not a finished run: expected ") and line.endswith(f"found no {name}\n")


def test_results_of_format_1_are_refused_with_the_remedy(broken, capsys):
    (broken / "cells").rename(broken / "parts")
    line = f"kvreplay: {broken}: results of format 1; convert them with kvreplay merge NEW OLD\n"
    assert refused(capsys, 3, "heatmap", broken) == line


def test_damaged_files_are_refused_by_name(broken, capsys):
    table = (broken / "results.csv").read_text()
    (broken / "results.csv").write_text(table.replace(",metric,", ",metrik,", 1))
    assert "results.csv: columns: expected trace, " in refused(capsys, 3, "curve", broken)
    number = table.splitlines()[3].split(",")[-7]
    (broken / "results.csv").write_text(table.replace(f",{number},", ",nan?,"))
    assert "results.csv:4: value: expected a number, or empty, found nan?" in refused(capsys, 3, "layers", broken)
    (broken / "results.csv").write_text(table)
    (broken / "run.json").write_text(json.dumps({"schema": "kvreplay-run/2"}))
    assert "schema: expected kvreplay-run/1, found kvreplay-run/2" in refused(capsys, 3, "curve", broken)
    (broken / "run.json").write_text("{")
    assert "run.json: unreadable: expected JSON" in refused(capsys, 3, "curve", broken)
    (broken / "run.json").write_text(json.dumps({"schema": "kvreplay-run/1", "inputs": None}))
    assert "run.json: inputs: expected a list, found null" in refused(capsys, 3, "curve", broken)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_without_a_cell_is_called_empty(kind, broken, capsys):
    (broken / "results.csv").write_text((broken / "results.csv").read_text().splitlines()[0] + "\n")
    given = {"budgets_asked": ["-b", "0.1"], "policies": ["-p", "snapkv"], "metric_asked": ["--metric", "span_recall"]}
    for options in ([], *(words for field, words in given.items() if field in KINDS[kind].reads)):
        line = refused(capsys, 3, kind, broken, *NEEDED.get(kind, []), *options)
        assert line.endswith("results.csv: empty: expected at least one cell, found none\n")


def test_damaged_selections_are_refused_by_object(broken, capsys):
    for change, words in (
        (
            lambda f: f["cells/0000000000000000/positions"].write_direct(np.full(12 * 48, 480, np.int32)),
            "0000000000000000: positions: expected 0 to 479, found 480 to 480",
        ),
        (lambda f: f["cells/0000000000000000/positions"].write_direct(np.zeros(12 * 48, np.int32)), None),
        (lambda f: f.__delitem__("cells/0000000000000000/sinks"), "0000000000000000/sinks: missing"),
        (lambda f: f["cells/0000000000000000"].attrs.__delitem__("layers"), "attribute layers"),
        (lambda f: f.__delitem__("cells/0000000000000000"), "/cells/0000000000000000: missing"),
        (lambda f: f["traces/demo"].attrs.__delitem__("prompt"), "attributes: expected model, prompt"),
        (lambda f: f.attrs.__setitem__("version", 2), "expected kvcells version 1, found kvcells version 2"),
    ):
        with h5py.File(broken / "cells/demo.h5", "r+") as file:
            change(file)
        with h5py.File(broken / "cells/demo.h5", "r") as file:
            assert file.attrs["format"] == "kvcells"
        if words:
            assert words in refused(capsys, 3, "kept", broken)
    (broken / "cells/demo.h5").write_bytes(b"no HDF5")
    assert "cells/demo.h5: unreadable: expected an HDF5 file" in refused(capsys, 3, "kept", broken)


def test_a_few_files_stay_open_and_what_was_read_of_others_does(tmp_path):
    names = [f"t{i}" for i in range(MOST_OPEN + 2)]
    run = Run(make_run(tmp_path / "run", [H2O], 1, ["0.1"], [(name, 40, 0.5) for name in names]))
    groups = [run.cells_file(name)[f"traces/{name}"] for name in names]
    assert len(run._open) == MOST_OPEN and names[0] not in run._open
    assert [int(group.attrs["prompt"]) for group in groups] == [40] * len(names)
    kept = [run.selection_of(cell, 40) for cell in run.cells["cell"]]
    assert len(kept) == len(names) * 4 and len(run._open) == MOST_OPEN
    with pytest.raises(Error, match="cells/t99.h5: missing: expected a file of cells"):
        run.trace("t99")


def test_means_over_traces_are_drawn_of_results_csv_alone(tmp_path, capsys):
    run = make_run(tmp_path / "run", [SNAPKV, H2O, CHUNKKV], traces=NEEDLES)
    figures = {kind: drawn(kind, run, tmp_path, *NEEDED.get(kind, [])) for kind in ("curve", "layers", "compare")}
    for path in (run / "cells").iterdir():
        path.write_bytes(b"no HDF5")
    for kind, numbers in figures.items():
        pd.testing.assert_frame_equal(drawn(kind, run, tmp_path, *NEEDED.get(kind, [])), numbers)
    capsys.readouterr()
    assert ".h5: unreadable: expected an HDF5 file" in refused(capsys, 3, "budgets", run)


def test_what_the_run_does_not_hold_cannot_be_drawn(broken, capsys):
    with h5py.File(broken / "cells/demo.h5", "r+") as file:
        del file["traces/demo/spans"], file["traces/demo/redundancy_key"], file["traces/demo/redundancy_value"]
    assert "no needle: expected traces with a span of kind needle" in refused(capsys, 3, "needle", broken)
    assert "redundancy was not measured" in refused(capsys, 3, "redundancy", broken)
    wanted = "expected values by layer (replay --detail layer), found none of held_tokens"
    assert wanted in refused(capsys, 3, "layers", broken, "--metric", "held_tokens")


def test_a_policy_without_fixed_sets_is_left_out_with_a_word(run, tmp_path, capsys):
    folder = make_run(tmp_path / "run", [SNAPKV, H2O], budgets=["0.1"])
    with h5py.File(folder / "cells/demo.h5", "r+") as file:
        del file["cells/0000000000000001/offsets"]
    assert main(["heatmap", str(folder)]) == 0
    assert capsys.readouterr().err == "kvreplay: heatmap: h2o has no static set\n"
    assert "expected a cell with a static set" in refused(capsys, 3, "heatmap", folder, "-p", "h2o")


def test_without_matplotlib_it_says_what_to_install(run):
    code = "import sys; sys.modules['matplotlib'] = None; from kvreplay.plot.command import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "heatmap", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "kvreplay: plot: matplotlib is not installed; run pip install matplotlib\n"


def test_a_place_that_cannot_be_written_is_named(run, capsys):
    assert "/dev/null" in refused(capsys, 3, "budgets", run, "-o", "/dev/null/figure.svg")
