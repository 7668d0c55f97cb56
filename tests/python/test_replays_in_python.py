"""Is a replay in Python what the program does with the same words, and does it leave the process to its user?"""

from __future__ import annotations

import gc
import inspect
import json
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from program import done, kvreplay

import kvreplay as kv

POLICIES = ["snapkv", "h2o:recent=8", "chunkkv:chunk=5"]
WORDS = ["-p", ",".join(POLICIES), "-b", "0.1,40"]
BUDGETS = [0.1, 40]


def test_the_rows_are_those_that_the_program_writes(small: Path, tmp_path: Path) -> None:
    done("replay", small, *WORDS, "-o", "told", folder=tmp_path)
    run = kv.replay(small, POLICIES, BUDGETS)
    assert (run.folder / "results.csv").read_bytes() == (tmp_path / "told/results.csv").read_bytes()
    assert done("diff", tmp_path / "told", run.folder, folder=tmp_path) == "equal\n"


def test_a_shard_without_traces_is_an_error(small: Path) -> None:
    with pytest.raises(kv.Error, match="replay: no trace: expected at least one"):
        kv.replay(small, "h2o", 40, shard="2/2")


def test_options_are_those_of_the_program(small: Path, traces: Path, tmp_path: Path) -> None:
    options = [
        "--detail",
        "head",
        "--eval",
        "last:20",
        "--boundary",
        "120",
        "--seed",
        "3",
        "--save",
        "scores,attention",
    ]
    done("replay", small, traces / "sliding.h5", *WORDS, *options, "--no-text", "--sliding", "treat", "-o", "told",
         "--metrics", "attention_recall,kv_bytes", folder=tmp_path)  # fmt: skip
    run = kv.replay(
        [kv.open(small), traces / "sliding.h5"], POLICIES, BUDGETS, metrics=["attention_recall", "kv_bytes"],
        detail="head", eval="last:20", boundary=120, seed=3, save=["scores", "attention"], no_text=True,
        sliding="treat", force=False, device="cpu", memory=None, output=tmp_path / "run",
    )  # fmt: skip
    assert run.folder == tmp_path / "run"
    assert done("diff", "told", "run", folder=tmp_path) == "equal\n"
    assert (tmp_path / "run/results.csv").read_bytes() == (tmp_path / "told/results.csv").read_bytes()


def test_the_boundary_may_be_the_end_of_a_span(tmp_path: Path) -> None:
    shape = ["--layers", "2", "--prompt", "120", "--continuation", "8"]
    done("synth", "needle", "-o", "asked.h5", *shape, folder=tmp_path)
    trace = kv.open(tmp_path / "asked.h5")
    [end] = [end for name, _, _, end in trace.spans if name == "context"]
    run = kv.replay(trace, ["snapkv", "h2o"], 0.1, boundary="span:context")
    assert 0 < end < trace.prompt and run.trace("asked").boundary == end
    assert set(map(int, run.results["boundary"])) == {end} and set(map(int, run.results["n_queries"])) == {8}
    assert run.selection("h2o", 0.1).mask().shape[-1] == end
    assert trace.layer(1, boundary="span:context").prompt == end
    with pytest.raises(kv.Error, match=r"asked.h5: unknown span: expected .*context.*, found contxt"):
        kv.replay(trace, "snapkv", 0.1, boundary="span:contxt")


def test_budgets_of_every_kind_and_pages(small: Path) -> None:
    policies = ["snapkv:window=4", "snapkv:window=4,heads=query"]
    run = kv.replay(small, policies, ["0.1@seen", "18KiB"], structure="page=4,heads=own")
    # 3 layers of 2 KV heads or 6 query heads, 16 + 16 numbers of 4 bytes: 768 or 2304 bytes a token.
    asked = run.cells[(run.cells["role"] == "asked") & (run.cells["budget"] == "18KiB")]
    assert dict(zip(asked["heads"], asked["budget_tokens"], strict=True)) == {"kv": 24, "query": 8}
    assert set(run.cells["budget_tokens"][run.cells["budget"] == "0.1@seen"]) == {15}
    assert all("window_mode=whole" in params for params in asked["params"])


def test_protected_tokens_of_a_run(small: Path) -> None:
    run = kv.replay(small, ["snapkv", kv.policy.h2o(recent=1, sinks=2)], 15, protect="sinks=3,recent=20%")
    for policy in ("snapkv", "h2o"):
        mask = run.selection(policy, 15).mask()
        assert mask[..., :3].all() and mask[..., -3:].all() and (mask.sum(axis=-1) == 15).all()
    own = kv.replay(small, kv.policy.keydiff(sinks=2), 15).selection("keydiff", 15).mask()
    assert own[..., :2].all()


def test_the_bits_do_not_depend_on_threads(small: Path) -> None:
    runs = [kv.replay(small, POLICIES, BUDGETS, threads=n) for n in (1, 2, 3)]
    assert len({(run.folder / "results.csv").read_bytes() for run in runs}) == 1


def test_a_run_says_who_was_kept(small: Path) -> None:
    run = kv.replay(small, POLICIES, BUDGETS)
    assert {"trace", "policy", "budget", "layer", "head", "metric", "value"} <= set(run.results.columns)
    assert set(run.results["role"]) == {"asked", "control", "trace"}
    for budget in (0.1, "0.1", 15):  # as asked for, or in tokens
        kept = run.selection("snapkv", budget)
        assert kept.mask().shape == (3, 2, 150) and (kept.mask().sum(axis=-1) == 15).all()
    assert run.selection("h2o", 40).jaccard["mean"].shape == (3, 3)
    assert "snapkv" in run.table() and "OPEN LOOP" in run.table()
    with pytest.raises(kv.Error, match=r"no such cell: expected small: snapkv at 0.1; .*, found snapkv at 0.3"):
        run.selection("snapkv", 0.3)
    with pytest.raises(kv.Error, match="not in this run"):
        run.selection("snapvk", 0.1)


@pytest.mark.parametrize("detail", ["summary", "layer", "head"])
def test_results_in_memory_are_those_of_a_folder(small: Path, traces: Path, detail: str, tmp_path: Path) -> None:
    """Without a file of their own, until somebody asks for the folder."""
    given = ([traces / "sliding.h5", small], POLICIES, BUDGETS)
    options = {"detail": detail, "save": ["scores", "attention"], "controls": "twins"}
    kept = kv.replay(*given, **options, output=tmp_path / "kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
        run = kv.replay(*given, **options)
        pd.testing.assert_frame_equal(run.results, kept.results)
        pd.testing.assert_frame_equal(run.cells, kept.cells)
        assert run.stored_traces == kept.stored_traces == ["sliding", "small"]
        assert run.select_seconds.keys() == kept.select_seconds.keys() and sum(run.select_seconds.values()) > 0
        for policy in ("snapkv", "h2o"):
            ours, theirs = (one.selection(policy, 0.1, "small") for one in (run, kept))
            assert np.array_equal(ours.mask(), theirs.mask())
        cell = run.cells["cell"][run.cells["policy"] == "snapkv"].iloc[0]
        assert np.array_equal(run.scores(cell), kept.scores(cell), equal_nan=True)
        assert np.array_equal(run.eval_attention("small", 1, 2), kept.eval_attention("small", 1, 2))
        assert run.texts("small") == kept.texts("small") and run.prompt_hashes == kept.prompt_hashes
    assert (run.folder / "results.csv").read_bytes() == (kept.folder / "results.csv").read_bytes()
    assert done("diff", run.folder, kept.folder, folder=tmp_path) == "equal\n"


def test_results_in_memory_have_the_detail_of_an_experiment(small: Path, tmp_path: Path) -> None:
    experiment = tmp_path / "one.yaml"
    experiment.write_text(f"traces: ['{small}']\npolicies: [h2o]\nbudgets: [0.1]\ndetail: summary\n")
    run = kv.replay(f"@{experiment}", [], [])
    assert set(run.results["layer"]) == {"all"}
    assert set(kv.Run(run.folder).results["layer"]) == {"all"}


def test_rows_are_chosen_by_their_texts(small: Path) -> None:
    run = kv.replay(small, "h2o", 15)
    chosen, kept = (one.rows(lambda rows: rows["budget_tokens"] == "15") for one in (run, kv.Run(run.folder)))
    assert len(chosen) and chosen.equals(kept)


def test_results_in_memory_may_be_sent_to_another_process(small: Path) -> None:
    run = kv.replay(small, "h2o", 0.1)
    kept, folder = run.selection("h2o", 0.1), run.folder
    sent = pickle.loads(pickle.dumps(run))
    del run
    gc.collect()
    assert not folder.exists() and sent.folder != folder
    assert np.array_equal(sent.selection("h2o", 0.1).mask(), kept.mask()) and (sent.folder / "results.csv").exists()


def test_progress_may_be_a_function(small: Path, traces: Path, tmp_path: Path) -> None:
    heard: list[tuple[float, str]] = []
    kv.replay(small, "h2o", 0.1, progress=lambda share, trace: heard.append((share, trace)))
    assert heard == sorted(heard) and heard[-1] == (1.0, "small")

    class Mine(Exception):
        pass

    def fail(share: float, trace: str) -> None:
        raise Mine

    for output in (None, tmp_path / "out"):
        with pytest.raises(Mine):
            kv.replay([small, traces / "sliding.h5"], "h2o", 0.1, progress=fail, output=output)


def test_a_folder_that_was_asked_for_goes_with_the_run(small: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = kv.replay(small, "h2o", 0.1, metrics="kv_bytes")
        folder = run.folder
        assert (folder / "results.csv").is_file() and (folder / "run.json").is_file()
        del run
        gc.collect()
    assert not folder.exists()


def test_a_plan_says_what_a_replay_would_do(small: Path, traces: Path, tmp_path: Path) -> None:
    plan = kv.plan([small, traces / "sliding.h5"], POLICIES, BUDGETS)
    assert list(plan["name"]) == ["small", "sliding"] and set(plan["skipped"]) == {0}
    assert (plan[["cells", "seconds", "memory_bytes", "disk_bytes"]] > 0).all(axis=None)
    cells = len(kv.replay(small, POLICIES, BUDGETS, output=tmp_path / "out").cells)
    again = kv.plan([small, traces / "sliding.h5"], POLICIES, BUDGETS, output=tmp_path / "out")
    assert list(again["cells"]) == [0, plan["cells"][1]] and list(again["skipped"]) == [cells, 0]


def test_a_refused_replay_leaves_no_folder(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(kv.Error):
        kv.replay(small, "nobody", 0.1)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_resumed(small: Path, tmp_path: Path) -> None:
    def states(run: kv.Run) -> dict[str, str]:
        return {cell["policy"]: cell["state"] for cell in run.about["cells"]}

    assert set(states(kv.replay(small, "h2o", 0.1, output=tmp_path / "out")).values()) == {"done"}
    more = states(kv.replay(small, ["h2o", "snapkv"], 0.1, output=tmp_path / "out"))
    assert more["h2o"] == "skipped" and more["snapkv"] == "done"
    again = states(kv.replay(small, ["h2o", "snapkv"], 0.1, output=tmp_path / "out", force=True))
    assert set(again.values()) == {"done"}


REFUSED = [
    (["snapvk"], [0.1], {}, ["-p", "snapvk", "-b", "0.1"]),
    (["snapkv:windw=3"], [0.1], {}, ["-p", "snapkv:windw=3", "-b", "0.1"]),
    (["snapkv:kernel=4"], [0.1], {}, ["-p", "snapkv:kernel=4", "-b", "0.1"]),
    (["h2o"], [2.5], {}, ["-p", "h2o", "-b", "2.5"]),
    (["h2o"], [0], {}, ["-p", "h2o", "-b", "0"]),
    (["h2o"], [0.1], {"metrics": ["recal"]}, ["-p", "h2o", "-b", "0.1", "--metrics", "recal"]),
    (["h2o"], [0.1], {"devise": "cpu"}, ["-p", "h2o", "-b", "0.1", "--devise", "cpu"]),
    (["h2o"], [0.1], {"detail": "everything"}, ["-p", "h2o", "-b", "0.1", "--detail", "everything"]),
    (["h2o"], [0.1], {"eval": "span:nothing"}, ["-p", "h2o", "-b", "0.1", "--eval", "span:nothing"]),
    (["h2o"], [0.1], {"memory": "1K", "output": "new"}, ["-p", "h2o", "-b", "0.1", "--memory", "1K", "-o", "new"]),
    (["h2o"], [0.1], {"device": "abacus"}, ["-p", "h2o", "-b", "0.1", "--device", "abacus"]),
]


@pytest.mark.parametrize(("policies", "budgets", "options", "words"), REFUSED)
def test_refused_as_by_the_program(policies, budgets, options, words, small: Path, tmp_path: Path) -> None:
    answer = kvreplay("replay", small, *words, folder=tmp_path)
    with pytest.raises(kv.Error) as refused:
        kv.replay(small, policies, budgets, **options)
    assert f"kvreplay: {refused.value}\n" == answer.err
    assert refused.value.exit_code == answer.code != 0
    assert not (tmp_path / "kvreplay-out").exists()


@pytest.mark.parametrize("option", ["dry_run", "json", "help", "policy"])
def test_what_only_prints_is_no_option(option: str, small: Path) -> None:
    with pytest.raises(
        kv.Error, match=f"replay: not an option in Python: expected an option of kvreplay replay, found {option}"
    ) as refused:
        kv.replay(small, "h2o", 0.1, **{option: True})
    assert refused.value.exit_code == 2


def test_no_policy_at_all(small: Path) -> None:
    with pytest.raises(kv.Error, match="not a policy: expected a string, or a policy in Python, found int"):
        kv.replay(small, 3, 0.1)


def test_budgets_of_numpy(small: Path) -> None:
    run = kv.replay(small, "h2o", np.int64(12), metrics="kv_bytes")
    assert set(run.cells["budget"]) == {"12"}
    run = kv.replay(small, "h2o", np.array([0.1, 0.2]), metrics="kv_bytes")
    assert set(run.cells["budget"]) == {"0.1", "0.2"}


def test_every_registered_policy_is_a_function() -> None:
    listed = json.loads(done("policies", "--json", folder=Path.cwd()))
    names = [one["name"] for one in listed]
    assert set(kv.policy) >= set(names) and {name.replace("-", "_") for name in names} <= set(dir(kv.policy))
    for one in listed:
        make = getattr(kv.policy, one["name"].replace("-", "_"))
        declared = {
            name: p for name, p in inspect.signature(make).parameters.items() if p.kind != inspect.Parameter.VAR_KEYWORD
        }
        assert list(declared) == [parameter["name"].replace(".", "_") for parameter in one["parameters"]]
        for parameter in one["parameters"]:
            standard = declared[parameter["name"].replace(".", "_")].default
            assert str(standard).lower() == parameter["default"].lower(), parameter
            assert parameter["help"] in make.__doc__
        assert make.__doc__.startswith(one["summary"]) and make() == one["name"]


def test_defaults_are_values() -> None:
    declared = inspect.signature(kv.policy.snapkv).parameters
    assert (declared["window"].default, declared["pool"].default) == (8, "max")
    declared = inspect.signature(kv.policy.h2o).parameters
    assert (declared["recent"].default, declared["overlap"].default) == (0.5, False)


def test_a_function_gives_the_policy_as_users_write_it() -> None:
    assert kv.policy.snapkv(window=4, pool="avg") == "snapkv:window=4,pool=avg"
    assert kv.policy.snapkv(window=8) == "snapkv"  # its default
    assert kv.policy.h2o(select="chunks(7)", overlap=False) == "h2o:select=chunks,chunk=7"
    assert kv.policy.oracle(counts="snapkv:window=4,kernel=3") == "oracle:counts=(snapkv:window=4,kernel=3)"
    assert kv.policy.hybrid(chunkkv_chunk=5) == "hybrid:chunkkv.chunk=5"
    with pytest.raises(kv.Error, match="snapkv:window: out of range"):
        kv.policy.snapkv(window=0)
    with pytest.raises(AttributeError, match=r"unknown policy snapvk: did you mean snapkv"):
        kv.policy.snapvk  # noqa: B018


def test_policies_and_budgets_may_be_written_as_in_kvpress(small: Path) -> None:
    assert kv.policy.snap_kv(window=4) == "snapkv:window=4"
    assert kv.policy.SnapKVPress(window=4) == "snapkv:window=4,kernel=5,pool=avg"
    ratio = kv.replay(small, "KnormPress", compression_ratio=0.75, metrics="attention_recall")
    budget = kv.replay(small, "knorm", 0.25, metrics="attention_recall")
    assert ratio.results.equals(budget.results)
    assert (ratio.selection("KnormPress", 0.25).kept == budget.selection("knorm", 0.25).kept).all()
    with pytest.raises(kv.Error, match="--compression-ratio: contradicts --budget"):
        kv.replay(small, "knorm", 0.25, compression_ratio=0.75)


def test_failed_cells_are_warned_of_and_left_out(traces: Path) -> None:
    broken = kv.policy(lambda view: view.key_norms() * np.nan, name="broken")
    with pytest.warns(UserWarning, match=r"^failed: fixture, broken at 0\.4: layer 0: score of broken is NaN"):
        run = kv.replay(traces / "fixture.h5", [broken, "h2o"], 0.4)
    assert "broken" not in set(run.results["policy"]) and "h2o" in set(run.results["policy"])
    assert [cell["policy"] for cell in run.failed] == ["broken"]


def test_warnings_of_the_program_are_warnings(small: Path) -> None:
    with pytest.warns(UserWarning, match="^budget 4: protected tokens fill the budget of snapkv, which selects no"):
        kv.replay(small, "snapkv", 4, metrics="kv_bytes")


def test_progress_is_a_bar_where_it_is_asked_for(small: Path, capsys: pytest.CaptureFixture) -> None:
    kv.replay(small, "h2o", 0.1, metrics="kv_bytes")
    assert capsys.readouterr().err == ""  # nobody watches
    kv.replay(small, "h2o", 0.1, metrics="kv_bytes", progress=True)
    shown = capsys.readouterr().err
    assert "small" in shown and "100 %" in shown


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Traces that each take more than a moment."""
    folder = tmp_path_factory.mktemp("long")
    shape = "--layers 6 --prompt 1024 --continuation 32 --head-dim 64".split()
    for seed in range(3):
        done("synth", "sinks", "-o", f"t{seed}.h5", *shape, "--seed", str(seed), folder=folder)
    return [folder / f"t{seed}.h5" for seed in range(3)]


def test_other_threads_of_python_go_on(long: list[Path]) -> None:
    beats, over = [], threading.Event()

    def beat() -> None:
        while not over.wait(0.005):
            beats.append(time.monotonic())

    heart = threading.Thread(target=beat)
    heart.start()
    start = time.monotonic()
    kv.replay(long, ["h2o", "snapkv"], [0.1, 0.2], threads=1)
    end = time.monotonic()
    over.set()
    heart.join()
    during = [moment for moment in beats if start < moment < end]
    gaps = np.diff([start, *during, end])
    assert end - start > 0.1, "too short to tell"
    assert gaps.max() < 0.75 * (end - start)


CTRL_C = """
import signal
import sys
import kvreplay as kv
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
try:
    kv.replay(sys.argv[2:], ["h2o", "snapkv"], [0.1, 0.2, 0.3], output=sys.argv[1], threads=1)
except KeyboardInterrupt:
    print("interrupted")
    kv.open(sys.argv[2])  # and goes on
    raise SystemExit(3)
"""


def test_ctrl_c_is_heard_and_finished_traces_are_kept(long: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", CTRL_C, out, *long], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(out.glob("cells/*.h5")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (3, "interrupted\n")
    kept = {path: path.stat().st_mtime_ns for path in out.glob("cells/*.h5")}
    assert 1 <= len(kept) < len(long)
    run = kv.replay(long, ["h2o", "snapkv"], [0.1, 0.2, 0.3], output=out)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(set(run.cells["trace"])) == len(long)


def test_measure_says_of_sets_what_replay_says(small: Path) -> None:
    trace = kv.open(small)
    run = kv.replay(trace, "snapkv", 0.2)
    chosen = run.selection("snapkv", 0.2)
    rows = [[np.flatnonzero(row) for row in layer] for layer in chosen.mask()]
    columns = ["layer", "head", "metric", "variant", "value"]
    metrics = ["attention_recall", "output_error", "kv_l1_loss", "kv_bytes"]

    def told(of: kv.Run, policy: str) -> list[list]:
        table = of.results[(of.results["policy"] == policy) & (of.results["variant"] == "")]
        return table.loc[table["metric"].isin(metrics), columns].values.tolist()

    for selection in (chosen, rows, np.array(rows)):
        measured = kv.measure(trace, selection, metrics=metrics)
        assert (measured.selection("given", 30).positions == chosen.positions).all()
        assert told(measured, "given") == told(run, "snapkv")


def test_measure_takes_a_set_for_all_heads_or_one_for_each(traces: Path) -> None:
    trace = kv.open(traces / "small.h5")
    one = kv.measure(trace, [[5, 3, 9], [], [149]], metrics="kv_bytes")
    assert one.selection("given", 2).positions.tolist() == [3, 5, 9, 149]
    query = kv.measure(trace, [[[0, 1]] * 6] * 3, metrics="kv_bytes")
    assert query.selection("given", 2).granted.shape == (3, 6)
    sliding = kv.open(traces / "sliding.h5")
    left = kv.measure(sliding, [[0], [1, 2, 3], [4, 5, 6]], metrics="kv_bytes")
    assert left.selection("given", 2).positions.tolist() == [0, 4, 5, 6]  # layer 1 is left as it is
    treated = kv.measure(sliding, [[0], [1, 2, 3], [4, 5, 6]], metrics="kv_bytes", sliding="treat")
    assert treated.selection("given", 3).positions.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_selections_are_one_line_and_unknown_policies_have_a_suggestion(small: Path) -> None:
    run = kv.replay(small, "snapkv", 40, metrics="attention_recall", progress=False)
    assert repr(run.selection("snapkv", 40)) == "<kvreplay selection of 3 layers: 40.0 of 150 tokens kept on average>"
    with pytest.raises(kv.Error) as refused:
        run.selection("snapvk", 40)
    assert str(refused.value) == "policy: not in this run snapvk: did you mean snapkv?"


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ([[0]] * 2, "selection: layers: expected 3, found 2"),
        ([[0], [150], [0]], "selection, layer 1, row 0: position: expected 0..149, found 150"),
        ([[0], [0], [-1]], "selection, layer 2, row 0: position: expected 0..149, found -1"),
        ([[0, 0]] * 3, "selection, layer 0, row 0: positions: expected unique positions, found duplicates"),
        ([[[0], [1], [2]]] * 3, "selection, layer 0: rows: expected 1, 2 or 6, found 3"),
        ([[0], [[0], [1]], [0]], "selection: rows: expected the same number in every layer, found 1, 2, 1"),
        ([[0.5]] * 3, "selection, layer 0, row 0: positions: expected whole numbers, found float64"),
        (5, "selection: kind: expected a list for each layer, found int"),
        ([5, 6, 7], "selection, layer 0: kind: expected a list of positions, found int"),
    ],
)
def test_sets_that_cannot_be_are_refused(selection: object, words: str, small: Path) -> None:
    with pytest.raises(kv.Error) as refused:
        kv.measure(small, selection)
    assert str(refused.value) == words and refused.value.exit_code == 2


@pytest.mark.parametrize("path", [Path, str, lambda path: str(path).encode()], ids=["path", "text", "bytes"])
def test_paths_of_any_kind(path: Callable, small: Path, tmp_path: Path) -> None:
    assert kv.open(path(small)).path == small
    one = kv.replay(path(small), "local", 0.1, output=path(tmp_path / "out"), progress=False)
    both = kv.replay([path(small)], "local", 0.1, progress=False)
    assert one.results.equals(both.results)
    assert (tmp_path / "out" / "results.csv").exists()


def test_masks_are_measured_as_positions_are(small: Path) -> None:
    kept = kv.replay(small, "snapkv", 0.2, progress=False).selection("snapkv", 0.2)
    expected = kv.measure(small, kept, progress=False).results
    mask = kept.mask()
    assert mask.dtype == bool
    for selection in (mask, list(mask), mask.tolist()):
        assert kv.measure(small, selection, progress=False).results.equals(expected)
    one_set = np.ones((len(mask), mask.shape[2]), dtype=bool)
    assert kv.measure(small, one_set, metrics="kv_bytes", progress=False).results.value.min() > 0
    with pytest.raises(kv.Error, match=r"^selection, layer 0, row 0: mask: expected 150 values, found 149$"):
        kv.measure(small, mask[:, :, :-1])
