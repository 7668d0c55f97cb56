"""An experiment file is the command line that it stands for, and its shards are the whole."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from program import WITH_PYTHON, Answer, done, kvreplay

EXPERIMENT = """\
traces: data
policies:
  - h2o
  - policy: snapkv
    window: [2, 3]
    kernel: [1, 3]
budgets: [0.25, 5]
exclude:
  - {policy: snapkv, window: 3, budget: 5}
  - {policy: snapkv, window: 2, kernel: 3}
metrics: [attention_recall, kv_l1_loss]
detail: summary
seed: 3
"""
# The same by hand: without exclusions a run holds too much, so it is two runs into one folder.
OPTIONS = ["--metrics", "attention_recall,kv_l1_loss", "--detail", "summary", "--seed", "3"]
BY_HAND = [
    ["-p", "h2o,snapkv:window=2,kernel=1,snapkv:window=3,kernel=1,snapkv:window=3,kernel=3", "-b", "0.25"],
    ["-p", "h2o,snapkv:window=2,kernel=1", "-b", "5"],
]
ROOT = Path(__file__).parents[2]
TRACES = ["a", "b", "c", "d"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four traces of different lengths, and a file of stored observables."""
    folder = tmp_path_factory.mktemp("experiment") / "data"
    folder.mkdir()
    shape = ["--layers", "2", "--continuation", "4", "--head-dim", "8", "--query-heads", "2", "--kv-heads", "1"]
    for number, name in enumerate(TRACES, 1):
        done("synth", "sinks", "-o", f"{name}.h5", "--prompt", 24 * number, "--seed", number, *shape, folder=folder)
    done("replay", "a.h5", "-p", "h2o", "-b", "4", "--observables", "keep", "-o", "../kept", folder=folder)
    assert (folder / "a.obs.h5").exists()
    return folder


@pytest.fixture
def place(data: Path, tmp_path: Path) -> Path:
    """A folder with the traces in data/ and the experiment in sweep.yaml."""
    (tmp_path / "data").symlink_to(data)
    (tmp_path / "sweep.yaml").write_text(EXPERIMENT)
    return tmp_path


def wrong(folder: Path, text: str, *words: str) -> Answer:
    (folder / "wrong.yaml").write_text(text)
    return kvreplay("replay", "@wrong.yaml", *words, "--dry-run", folder=folder)


def ran(*words: str | Path, folder: Path) -> None:
    """A replay of which every cell succeeds; what it reads and which budgets are one, it may say."""
    answer = kvreplay("replay", *words, folder=folder)
    assert answer.code == 0, answer


def planned(*words: str | Path, folder: Path) -> dict:
    return json.loads(done("replay", *words, "--dry-run", "--json", folder=folder))


def rows(output: Path) -> list[str]:
    return (output / "results.csv").read_text().splitlines()


def test_rows_are_those_of_the_same_command_lines(place: Path) -> None:
    for words in BY_HAND:
        ran(*(f"data/{name}.h5" for name in TRACES), *words, *OPTIONS, "-o", "hand", folder=place)
    ran("@sweep.yaml", "-o", "out", folder=place)
    assert done("diff", "hand", "out", folder=place) == "equal\n"
    assert rows(place / "hand") == rows(place / "out")
    asked = {(row["params"], row["budget"]) for row in csv.DictReader(rows(place / "out")) if row["policy"] == "snapkv"}
    assert len(asked) == 4


def test_controls_join_as_the_file_says_and_only_where_a_policy_is_asked_for(place: Path) -> None:
    (place / "sweep.yaml").write_text(EXPERIMENT + "controls: twins\n")
    ran("@sweep.yaml", "-o", "out", folder=place)
    assert json.loads((place / "out/run.json").read_text())["options"]["controls"] == "twins"
    found = list(csv.DictReader(rows(place / "out")))
    twins = Counter((row["params"], row["budget"]) for row in found if row["policy"] == "random-twin")
    asked = {(row["policy"], row["budget"]) for row in found if row["role"] == "asked"}
    assert len(twins) == 6 and asked == {("h2o", "0.25"), ("h2o", "5"), ("snapkv", "0.25"), ("snapkv", "5")}
    assert not any("window=3" in params and budget == "5" for params, budget in twins), "left out with its policy"
    assert {row["role"] for row in found if row["policy"] == "random-twin"} == {"control"}
    assert "--controls twins" in " ".join(planned("@sweep.yaml", folder=place)["words"])
    ran("@sweep.yaml", "--controls", "none", "-o", "none", folder=place)
    assert {row["role"] for row in csv.DictReader(rows(place / "none"))} == {"asked"}
    assert "wrong.yaml:1: controls: expected" in wrong(place, "controls: [twins, random]\n").err
    assert wrong(place, "traces: data\npolicies: h2o\nbudgets: 5\ncontrols: all\n").code == 2


def test_protected_tokens_of_all_policies_and_of_one(place: Path) -> None:
    """`protect:` of the file is --protect, that of a policy is its parameter; lists of it multiply."""
    (place / "sweep.yaml").write_text(EXPERIMENT + "protect: sinks=1,recent=25%\n")
    ran("@sweep.yaml", "-o", "out", folder=place)
    (place / "sweep.yaml").write_text(EXPERIMENT)
    ran("@sweep.yaml", "--protect", "sinks=1,recent=25%", "-o", "option", folder=place)
    each = EXPERIMENT.replace("  - h2o\n", "  - policy: h2o\n    protect: sinks=1,recent=25%\n")
    (place / "each.yaml").write_text(each.replace("snapkv\n", "snapkv\n    protect: (sinks=1,recent=0.25)\n"))
    ran("@each.yaml", "-o", "each", folder=place)
    assert rows(place / "out") == rows(place / "option") == rows(place / "each")
    policies = {row["params"] for row in csv.DictReader(rows(place / "out")) if row["role"] == "asked"}
    assert all(params.endswith("protect=(sinks=1,recent=0.25)") for params in policies)
    one = EXPERIMENT.replace("- h2o\n", '- {policy: h2o, protect: ["sinks=1", "recent=2"]}\n')
    (place / "lists.yaml").write_text(one)
    words = planned("@lists.yaml", folder=place)["words"]
    assert {"h2o:protect=(sinks=1)", "h2o:protect=(recent=2)"} <= set(words), words
    mapping = "traces: data\npolicies: h2o\nbudgets: 5\nprotect: {sinks: 1}\n"
    assert wrong(place, mapping).err == "kvreplay: wrong.yaml:4: protect: expected one value, found a mapping\n"
    assert (
        wrong(place, mapping.replace("{sinks: 1}", "sinks=1,sinks=2")).err
        == "kvreplay: wrong.yaml:4: --protect: given more than once: expected one value, found sinks\n"
    )


def test_shards_are_the_whole_and_hold_each_trace_once(place: Path) -> None:
    ran("@sweep.yaml", "-o", "whole", folder=place)
    held: Counter[str] = Counter()
    found: list[str] = []
    sizes = []
    for number in (1, 2, 3):
        ran("@sweep.yaml", "--shard", f"{number}/3", "-o", f"shard-{number}", folder=place)
        replayed = sorted(file.stem for file in (place / f"shard-{number}/cells").glob("*.h5"))
        assert replayed == [
            trace["name"] for trace in planned("@sweep.yaml", "--shard", f"{number}/3", folder=place)["traces"]
        ]
        held.update(replayed)
        sizes.append(sum((place / f"data/{name}.h5").stat().st_size for name in replayed))
        found += rows(place / f"shard-{number}")[1:]
    assert held == Counter(TRACES)
    assert sorted(found) == sorted(rows(place / "whole")[1:])
    assert max(sizes) < 2 * min(sizes), "the longest trace stands alone"


def test_a_shard_without_traces_says_so(place: Path) -> None:
    answer = kvreplay("replay", "@sweep.yaml", "--shard", "5/5", "-o", "none", folder=place)
    assert (answer.code, answer.out, answer.err) == (0, "", "kvreplay: shard 5/5 of the traces is empty\n")
    assert not (place / "none").exists()
    assert planned("@sweep.yaml", "--shard", "5/5", folder=place)["traces"] == []


def test_the_plans_words_replay_one_trace_from_anywhere(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (place / "sweep.yaml").write_text(EXPERIMENT + "output: results\nthreads: 1\n")
    plan = planned("@sweep.yaml", folder=place)
    assert plan["output"] == "results"
    assert plan["budgets"] == ["0.25", "5"]
    assert plan["policies"] == [
        "h2o",
        "snapkv:window=2,kernel=1",
        "snapkv:window=3,kernel=1",
        "snapkv:window=3,kernel=3",
    ]
    assert not {"--threads", "--output", "--json", "--dry-run"} & set(plan["words"])
    ran("@sweep.yaml", folder=place)
    whole = rows(place / "results")[1:]
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    found = []
    for trace in plan["traces"]:
        ran(*plan["words"][1:], place / trace["path"], "-o", trace["name"], folder=elsewhere)
        found += rows(elsewhere / trace["name"])[1:]
    assert sorted(found) == sorted(whole)


def test_what_the_command_line_says_wins(place: Path) -> None:
    plan = planned("@sweep.yaml", "-b", "4", "data/b.h5", "--detail", "layer", folder=place)
    assert [trace["name"] for trace in plan["traces"]] == ["b"]
    assert plan["budgets"] == ["4"]
    assert plan["words"][plan["words"].index("--detail") + 1] == "layer"
    # What the file leaves out is not among these budgets: no reason to refuse them, and nothing for the plan's words.
    assert "snapkv:window=3,budget=5" not in plan["words"] and "snapkv:window=2,kernel=3" in plan["words"]
    planned(*plan["words"][1:], "data/b.h5", folder=place)


@pytest.mark.parametrize("traces", ["data/[ab].h5", "[data/a.h5, data/b.h5]", "[data/a*.h5, data/b.h5]"])
def test_traces_are_files_folders_and_globs(place: Path, traces: str) -> None:
    (place / "sweep.yaml").write_text(EXPERIMENT.replace("traces: data", f"traces: {traces}"))
    found = planned("@sweep.yaml", folder=place)["traces"]
    assert [trace["path"] for trace in found] == ["data/a.h5", "data/b.h5"]


def test_operands_are_folders_and_globs_too(place: Path) -> None:
    few = ["-p", "h2o", "-b", "4"]
    assert [trace["name"] for trace in planned("data", *few, folder=place)["traces"]] == TRACES
    assert [trace["name"] for trace in planned("data/[bc].h5", *few, folder=place)["traces"]] == ["b", "c"]


def test_paths_are_relative_to_the_file(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    plan = planned(f"@{place}/sweep.yaml", folder=tmp_path_factory.mktemp("elsewhere"))
    assert [trace["path"] for trace in plan["traces"]] == [f"{place}/data/{name}.h5" for name in TRACES]


def test_a_manifest_holds_traces_to_their_hashes(place: Path) -> None:
    few = ["-p", "h2o", "-b", "4"]
    hashes = {trace["name"]: trace["hash"] for trace in planned("data", *few, folder=place)["traces"]}
    manifest = place / "data.csv"
    manifest.write_text("".join(["kind,file,trace_hash\n", *(f"x,data/{name}.h5,{hashes[name]}\n" for name in "ba")]))
    (place / "sweep.yaml").write_text(EXPERIMENT.replace("traces: data", "traces: data.csv"))
    assert [trace["name"] for trace in planned("@sweep.yaml", folder=place)["traces"]] == ["b", "a"]
    manifest.write_text(manifest.read_text().replace(hashes["a"], hashes["c"]))
    answer = kvreplay("replay", "@sweep.yaml", "-o", "out", folder=place)
    expected = f"kvreplay: data.csv:3: trace_hash of data/a.h5: expected {hashes['c']}, found {hashes['a']}\n"
    assert (answer.code, answer.err) == (3, expected)
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    "text, expected",
    [
        ("file\ndata/a.h5\n", "list.csv: not a manifest: expected columns trace_hash, and file or name, found file"),
        ("name,trace_hash\na,abc\n", 'list.csv:2: trace_hash: expected 32 hexadecimal digits, found "abc"'),
        ("name,trace_hash\na\n", "list.csv:2: number of fields: expected 2, found 1"),
        ("name,trace_hash\n", "list.csv: no trace: expected one row for each trace"),
        ("", "list.csv: not a manifest: expected columns trace_hash, and file or name, found nothing"),
    ],
)
def test_a_wrong_manifest_is_refused_at_its_line(place: Path, text: str, expected: str) -> None:
    (place / "list.csv").write_text(text)
    answer = kvreplay("replay", "list.csv", "-p", "h2o", "-b", "4", folder=place)
    assert (answer.code, answer.err) == (3, f"kvreplay: {expected}\n")


@pytest.mark.parametrize(
    "line, expected",
    [
        ("policys: h2o", "wrong.yaml:1: unknown key policys: did you mean policies?"),
        ("force: true", "wrong.yaml:1: unknown key: expected one of traces, "),
        (
            "policies: {policy: snapkv, windw: [3, 4]}",
            "wrong.yaml:1: snapkv: unknown parameter windw: did you mean window?",
        ),
        ("policies: [h2o, snapkw]", "wrong.yaml:1: snapkw: unknown policy: did you mean snapkv?"),
        ("budgets: [0.1, 2.5]", "wrong.yaml:1: budget 2.5: "),
        ("detail: fine", "wrong.yaml:1: detail: unknown value: expected one of summary, layer, head, found fine"),
        ("save: [scores, colours]", "wrong.yaml:1: save: unknown value: expected one of scores, attention"),
        ("seed: [1, 2]", "wrong.yaml:1: seed: expected one value, found a list"),
        ("no-text: yes", "wrong.yaml:1: no-text: expected true or false, found yes"),
        ("seed: -1", 'wrong.yaml:1: seed: not a random seed: expected 0..2^64-1, found "-1"'),
        ("metrics: attention_recal", "wrong.yaml:1: attention_recal: unknown metric: did you mean attention_recall?"),
        ("eval: sometimes", "wrong.yaml:1: eval: unknown value: expected one of continuation, "),
        ("eval: last:0", "wrong.yaml:1: eval last:0: out of range: expected 1 or more, found 0"),
        ("boundary: 0", "wrong.yaml:1: boundary 0: outside the prompt: expected 1 or more, found 0"),
        ("boundary: 1.5", 'wrong.yaml:1: boundary 1.5: not a number: expected a whole number, found "1.5"'),
        ("traces: nowhere/*.h5", "wrong.yaml:1: traces: no such trace: expected files *.h5, found nowhere/*.h5"),
        ("exclude: {policy: h3o}", "wrong.yaml:1: exclude: unknown policy: expected h2o, found h3o"),
        (
            "exclude: {policy: h2o, budget: 7}",
            "wrong.yaml:1: exclude: excludes no cell: expected values that some policy and budget have, found "
            "h2o:budget=7",
        ),
        ("exclude: {policy: h2o, recnt: 7}", "wrong.yaml:1: exclude: unknown key recnt: did you mean recent?"),
        ("exclude: {policy: h2o}", "wrong.yaml:1: exclude: every cell is excluded: expected at least one cell"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(place: Path, line: str, expected: str) -> None:
    key = line.partition(":")[0]
    others = {"traces": "data", "policies": "h2o", "budgets": "4"}
    others.pop(key, None)
    answer = wrong(place, "\n".join([line, *(f"{other}: {value}" for other, value in others.items())]))
    assert answer.err.startswith(f"kvreplay: {expected}"), answer.err
    assert answer.code == (3 if key == "traces" else 2) and answer.err.count("\n") == 1


def test_an_experiment_may_lack_what_the_command_line_gives(place: Path) -> None:
    assert wrong(place, "policies: h2o\nbudgets: 4\n", "data/a.h5").code == 0
    assert "no trace" in wrong(place, "policies: h2o\nbudgets: 4\n").err
    assert wrong(place, "traces: data/a.h5\nbudgets: 4\n", "-p", "h2o").code == 0
    assert wrong(place, "traces: data/a.h5\npolicies: h2o\n").code == 2
    assert kvreplay("replay", "@sweep.yaml", "@sweep.yaml", folder=place).code == 2
    assert kvreplay("replay", "@missing.yaml", folder=place).code == 3


@pytest.mark.parametrize("shard", ["0/3", "4/3", "1", "1/0", "a/b", "1/2/3", "-1/2"])
def test_a_shard_is_one_of_some(place: Path, shard: str) -> None:
    answer = kvreplay("replay", "@sweep.yaml", f"--shard={shard}", folder=place)
    assert answer.code == 2 and answer.err.startswith("kvreplay: --shard: ")


def test_policies_in_python_work_in_an_experiment(place: Path) -> None:
    """The whole command line goes to kvreplay-python, and the file is looked for beside the experiment."""
    if shutil.which("kvreplay-python", path=WITH_PYTHON["PATH"]) is None:
        pytest.skip("kvreplay-python is not installed")
    (place / "mine.py").write_text((ROOT / "docs/value_attention.py").read_text())
    (place / "sweep.yaml").write_text("traces: data/a.h5\npolicies: [mine.py:value_attention, local]\nbudgets: 6\n")
    (place / "below").mkdir()
    answer = kvreplay("replay", "@../sweep.yaml", "--dry-run", "--json", folder=place / "below", env=WITH_PYTHON)
    assert (answer.code, answer.err) == (0, "")
    named = next(word for word in json.loads(answer.out)["words"] if word.endswith("mine.py:value_attention"))
    assert Path(named).is_absolute() and Path(named.removesuffix(":value_attention")).samefile(place / "mine.py")
