"""Every command does what it says, in words and as JSON."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import xxhash
from program import PROGRAM, done, kvreplay

from kvreplay.trace import Trace, TraceWriter

POLICIES = set(
    "ada-kv cam cam-one-shot caote cap-kv chunkkv compactor critical-kv cur defensive-kv dms double-sparsity "
    "duo-attention dynamickv expected-attention finch full h2o h2o-online head-kv hybrid keydiff keyformer kivi "
    "knorm kvcompose kvcrush kvzip lagkv lava leverage lfu local lru magic-pig minicache nacl native "
    "observed-attention oracle oracle-top-k oracle-top-p page-means pq pyramid-infer pyramid-kv q-filter quest r-kv "
    "random random-twin sca scissorhands simlayerkv snapkv streaming-llm strided think tova tri-attention truncate "
    "value-norm vase vatp".split()
)
# Output projections, a threshold, a table, passes that repeat the prompt, a policy.
ASK_FOR_MORE = {"critical-kv", "dms", "head-kv", "kvcompose", "kvzip", "random-twin"}
COMMANDS = set(
    "doctor synth info validate convert replay show diff policies new-policy metrics completion help".split()
)
WINDOW = "window=2,kernel=3"
REPLAY = ["-p", f"snapkv:{WINDOW},h2o:recent=3", "-b", "6"]


def test_the_overview_lists_every_command(tmp_path: Path) -> None:
    overview = done(folder=tmp_path)
    assert overview == done("help", folder=tmp_path) == done("--help", folder=tmp_path)
    names = re.findall(r"^  ([a-z][a-z-]*)  ", overview.partition("exit codes")[0], re.MULTILINE)
    assert {*names} >= COMMANDS | {"merge", "capture", "plot", "why"} and len({*names}) == len(names)
    headings = re.findall(r"\n\n([a-z][a-z ]*)\n  ", overview)
    assert headings == ["first steps", "traces", "replay and results", "figures and reports", "policies and metrics",
                        "models and engines", "exit codes"]  # fmt: skip


def test_help_of_a_command_is_that_of_its_option(tmp_path: Path) -> None:
    for command in COMMANDS:
        text = done("help", command, folder=tmp_path)
        assert text == done(command, "--help", folder=tmp_path)
        assert text.startswith(f"kvreplay {command}")


def test_version_names_version_and_commit(tmp_path: Path) -> None:
    name, version, commit = done("--version", folder=tmp_path).split()
    assert name == "kvreplay"
    assert [part.isdigit() for part in version.split(".")] == [True] * 3
    assert commit[0] == "(" and commit[-1] == ")"


def test_an_empty_simd_level_is_none_at_all(tmp_path: Path) -> None:
    unset = {name: value for name, value in os.environ.items() if name != "KVREPLAY_SIMD"}
    expected = kvreplay("doctor", folder=tmp_path, env=unset)
    assert (expected.code, expected.err) == (0, "")
    empty = kvreplay("doctor", folder=tmp_path, env=unset | {"KVREPLAY_SIMD": ""})
    lines = [[line for line in one.out.splitlines() if not line.startswith("memory")] for one in (empty, expected)]
    assert lines[0] == lines[1]  # the free memory varies
    wrong = kvreplay("doctor", folder=tmp_path, env=unset | {"KVREPLAY_SIMD": "AVX1"})
    assert wrong.code == 2 and wrong.err.startswith(
        "kvreplay: KVREPLAY_SIMD: unknown SIMD level AVX1: did you mean AVX2?"
    )


def test_doctor_names_libraries_and_backends(tmp_path: Path) -> None:
    found = json.loads(done("doctor", "--json", folder=tmp_path))
    assert {"HDF5", "Eigen", "Highway", "Boost", "fmt"} <= found["libraries"].keys()
    assert all(version[0].isdigit() for version in found["libraries"].values())
    assert found["threads"] == len(os.sched_getaffinity(0))
    assert found["page size"] == os.sysconf("SC_PAGE_SIZE")
    assert 0 < found["memory"]["free_bytes"] <= found["memory"]["bytes"]
    backends = {backend["name"]: backend for backend in found["backends"]}
    assert backends["cpu"]["runs"]
    assert "cuda" in backends
    programs = {program["name"] for program in found["programs"]}
    assert {"calibrate", "capture", "compare", "export", "plot", "regret", "report", "sweep", "tune"} <= programs
    reasons = ("not in this build", "not usable: CUDA: no usable device")
    assert backends["cuda"]["runs"] or backends["cuda"]["description"].startswith(reasons)
    assert backends["cuda"]["description"] in " ".join(done("doctor", folder=tmp_path).split())


def test_synth_obeys_its_options(tmp_path: Path) -> None:
    shape = "--layers 3 --query-heads 6 --kv-heads 2 --head-dim 8 --prompt 20 --continuation 5".split()
    more = "--dtype bfloat16 --queries last:7 --sliding-window 0,9 --softcap 30 --seed 3".split()
    done("synth", "needle", "-o", "a.h5", *shape, *more, folder=tmp_path)
    with h5py.File(tmp_path / "a.h5") as file:
        model = file["model"].attrs
        assert [model[key] for key in ("n_layers", "n_query_heads", "n_kv_heads", "head_dim")] == [3, 6, 2, 8]
        assert model["logit_softcap"] == 30
        assert list(file["model/sliding_window"]) == [0, 9, 0]
        assert file["tokens"].attrs["prefill"] == 20
        assert file["layers/000/q"].shape == (6, 7, 8)
        assert file["layers/000/k"].shape == (2, 25, 8)
        assert list(file["layers/000/q_positions"]) == list(range(18, 25))
        assert file["layers/000/k"].id.get_type().get_fields() == (15, 7, 8, 0, 7)
        assert any(span["name"] == b"needle" for span in file["spans"])


def test_synth_replaces_only_by_force(tmp_path: Path) -> None:
    done("synth", "fixture", "-o", "a.h5", folder=tmp_path)
    before = (tmp_path / "a.h5").stat().st_ino
    assert kvreplay("synth", "fixture", "-o", "a.h5", folder=tmp_path).code == 3
    assert (tmp_path / "a.h5").stat().st_ino == before
    done("synth", "fixture", "-o", "a.h5", "--force", folder=tmp_path)
    assert (tmp_path / "a.h5").stat().st_ino != before


def test_info_says_what_the_trace_is_and_serves(traces: Path) -> None:
    [found] = json.loads(done("info", "--json", "fixture.h5", folder=traces))
    keys = ["layers", "query_heads", "kv_heads", "head_dim", "prompt", "continuation", "tensor_bytes", "synthetic"]
    assert [found[key] for key in keys] == [4, 4, 2, 4, 12, 4, 4 * (4 + 2 + 2) * 16 * 4 * 2, True]
    served = {policy["name"]: policy["served"] for policy in found["policies"]}
    assert served == {name: name not in ASK_FOR_MORE for name in POLICIES}
    assert found["estimate"]["seconds"] > 0
    text = done("info", "--no-estimate", "--each", "fixture.h5", "long.h5", folder=traces)
    assert "prompt 12 + continuation 4" in text and "prompt 512 + continuation 64" in text and "about" not in text


def without_breaks(text: str) -> str:
    """Each row of a list on one line: continued lines begin with spaces."""
    return re.sub(r"\n +", "  ", text)


def test_info_of_several_traces_is_a_table(traces: Path) -> None:
    text = done("info", "fixture.h5", "long.h5", folder=traces)
    assert max(map(len, text.splitlines())) <= 80
    head, *rows, gap, total, _, _, each = without_breaks(text).splitlines()
    assert re.split("  +", head) == ["trace", "model", "tokens", "layers", "heads", "dtype", "size", "spans"]
    for row in rows:
        cells = re.split("  +", row)
        [found] = json.loads(done("info", "--json", "--no-estimate", f"{cells[0]}.h5", folder=traces))
        assert cells[1] == found["model"]
        assert cells[2:6] == [
            f"{found['prompt']} + {found['continuation']}", str(found["layers"]),
            f"{found['query_heads']}/{found['kv_heads']}", found["stored_dtype"],
        ]  # fmt: skip
        assert cells[7:] == [", ".join(span["name"] for span in found["spans"])] or not found["spans"]
    assert gap == "" and total.split()[:2] == ["traces", "2,"] and each.startswith("--each")


def test_info_counts_what_is_under_compression(traces: Path) -> None:
    words = ["info", "fixture.h5", "--boundary", "span:context"]
    [found] = json.loads(done(*words, "--json", folder=traces))
    [context] = [span for span in found["spans"] if span["name"] == "context"]
    assert (found["boundary"], found["prompt"]) == (context["end"], 12) and context["end"] < 12
    assert f"boundary   {context['end']} tokens under compression" in done(*words, "--no-estimate", folder=traces)
    assert "boundary" not in done("info", "fixture.h5", "--no-estimate", folder=traces)


def test_info_takes_folders_patterns_and_manifests(traces: Path, tmp_path: Path) -> None:
    def listed(name: str) -> list[str]:
        return [one["name"] for one in json.loads(done("info", name, "--json", "--no-estimate", folder=tmp_path))]

    (tmp_path / "data").symlink_to(traces)
    assert listed("data") == ["fixture", "long"] and listed("data/f*.h5") == ["fixture"]
    [long] = json.loads(done("info", traces / "long.h5", "--json", "--no-estimate", folder=tmp_path))
    (tmp_path / "list.csv").write_text(f"file,trace_hash\ndata/long.h5,{long['hash']}\n")
    assert listed("list.csv") == ["long"]
    (tmp_path / "list.csv").write_text(f"file,trace_hash\ndata/fixture.h5,{long['hash']}\n")
    answer = kvreplay("info", "list.csv", folder=tmp_path)
    assert answer.code == 3 and answer.err.startswith("kvreplay: list.csv:2: trace_hash of data/fixture.h5: expected ")


def test_info_says_which_policies_a_trace_cannot_serve(tmp_path: Path) -> None:
    shape = "--prompt 20 --continuation 0 --queries last:10".split()
    done("synth", "gaussian", "-o", "a.h5", *shape, folder=tmp_path)
    [found] = json.loads(done("info", "--json", "a.h5", folder=tmp_path))
    refused = {policy["name"]: policy["why_not"] for policy in found["policies"] if not policy["served"]}
    all_queries = (
        "cam cam-one-shot cap-kv compactor double-sparsity duo-attention expected-attention h2o h2o-online keyformer "
        "lfu lru observed-attention q-filter tri-attention vatp"
    )
    windows_of_more = "defensive-kv lava scissorhands think vase"
    assert set(refused) == {"oracle", *ASK_FOR_MORE, *all_queries.split(), *windows_of_more.split()}
    assert refused["h2o"] == (
        "a.h5:/layers/000/q_positions: missing stored queries for h2o: expected queries 0..19, found no query 0"
    )
    assert len(found["notes"]) == 1 and "no continuation" in found["notes"][0]
    rows = [line.split(maxsplit=1) for line in without_breaks(done("info", "a.h5", folder=tmp_path)).splitlines()]
    parameters = [text for row, text in rows if row == "parameter"]
    assert [text.split()[0] for text in parameters] == ["dms", "head-kv", "random-twin"]
    assert parameters[2] == "random-twin needs a parameter: of: (POLICY), as in of=(snapkv)"
    rejected = {text.partition(":")[0] for row, text in rows if row == "rejected"}
    assert rejected == {*refused} - {"dms", "head-kv", "random-twin"}


def test_validate_says_yes_and_no(traces: Path, tmp_path: Path) -> None:
    assert done("validate", traces / "fixture.h5", folder=tmp_path) == f"{traces / 'fixture.h5'}: valid\n"
    assert "2048 finite numbers" in done("validate", "--deep", traces / "fixture.h5", folder=tmp_path)

    shutil.copy(traces / "fixture.h5", tmp_path / "nan.h5")
    with h5py.File(tmp_path / "nan.h5", "r+") as file:
        file["layers/002/v"][1, 3, 2] = float("nan")
    assert kvreplay("validate", "nan.h5", folder=tmp_path).code == 0
    answer = kvreplay("validate", "--deep", "--json", traces / "fixture.h5", "nan.h5", folder=tmp_path)
    assert answer.code == 1
    good, bad = json.loads(answer.out)
    assert (good["valid"], bad["valid"]) == (True, False)
    assert any("/layers/002/v" in problem for problem in bad["problems"])

    (tmp_path / "text.h5").write_text("no trace")
    answer = kvreplay("validate", "text.h5", folder=tmp_path)
    assert (answer.code, answer.err) == (1, "")
    assert answer.out.startswith("text.h5: invalid\n")


def test_a_trace_of_the_python_writer_may_list_no_span(tmp_path: Path) -> None:
    path = tmp_path / "no-span.h5"
    with TraceWriter(path) as trace:
        trace.attributes("/", synthetic=1)
        trace.attributes("/model", name="m", architecture="none", n_layers=1, n_query_heads=1, n_kv_heads=1, head_dim=2,
                         dtype="float16", softmax_scale=1.0, logit_softcap=0.0)  # fmt: skip
        for name in ("sliding_window", "layer_index"):
            trace.dataset(f"/model/{name}", np.zeros(1, np.int32))
        trace.attributes("/tokens", prefill=2)
        trace.dataset("/tokens/ids", np.arange(3, dtype=np.int32))
        trace.dataset("/spans", [])
        trace.layer(0, *np.ones((3, 1, 3, 2), np.float16))
    with Trace(path) as trace:
        assert trace.spans == []
    with h5py.File(path) as file:
        spans = file["spans"]
        assert spans.shape == (0,) and spans.dtype.names == ("name", "kind", "begin", "end")
        assert [h5py.check_string_dtype(spans.dtype[name]).encoding for name in ("name", "kind")] == ["utf-8"] * 2
        assert spans.dtype["begin"] == spans.dtype["end"] == "<i4"
    assert done("validate", "--deep", path, folder=tmp_path).startswith(f"{path}: valid")
    [shown] = json.loads(done("info", path, "--json", folder=tmp_path))
    assert shown["spans"] == []


def hash_of_the_page(trace: Trace, tensors: str) -> str:
    """The trace hash, from the bytes that traces/FORMAT.md lists."""
    digest = xxhash.xxh3_128()

    def add(path: str, value: bytes) -> None:
        digest.update(path.encode() + b"\0" + len(value).to_bytes(8, "little") + value)

    for place in """/@version /@synthetic /model@name /model@architecture /model@n_layers /model@n_query_heads
                    /model@n_kv_heads /model@head_dim /model@dtype /model@softmax_scale /model@logit_softcap
                    /tokens@prefill""".split():
        value = trace.attribute(*place.split("@"))
        add(
            place,
            value.encode()
            if isinstance(value, str)
            else np.asarray(value).astype("<f8" if isinstance(value, float) else "<i8").tobytes(),
        )
    for path in "/model/sliding_window /model/layer_index /tokens/ids".split():
        add(path, trace[path].astype("<i4").tobytes())
    for name, kind in (("ids", "<i4"), ("log_probabilities", "<f8"), ("tail", "<f8")):
        if f"/reference/{name}" in trace:
            add(f"/reference/{name}", trace[f"/reference/{name}"].astype(kind).tobytes())
    for name in tensors.split():
        array = trace[f"/layers/000/{name}"]
        bits = xxhash.xxh3_128(np.ascontiguousarray(array).tobytes()).hexdigest()
        add(f"/layers/000/{name}", f"{array.dtype} [{', '.join(map(str, array.shape))}] {bits}".encode())
    return digest.hexdigest()


def test_norms_and_reference_distributions_are_optional_parts_of_a_trace(tmp_path: Path) -> None:
    """A trace without them keeps its hash; one with them serves the same policies."""
    hashes, random = {}, np.random.default_rng(1)
    tensors = random.normal(size=(3, 1, 6, 2)).astype(np.float16)
    for name in ("plain", "whole"):
        with TraceWriter(tmp_path / f"{name}.h5") as trace:
            trace.attributes("/", synthetic=1)
            trace.attributes("/model", name="m", architecture="none", n_layers=1, n_query_heads=1, n_kv_heads=1,
                             head_dim=2, dtype="float16", softmax_scale=1.0, logit_softcap=0.0)  # fmt: skip
            for of_layers in ("sliding_window", "layer_index"):
                trace.dataset(f"/model/{of_layers}", np.zeros(1, np.int32))
            trace.attributes("/tokens", prefill=4)
            trace.dataset("/tokens/ids", np.arange(6, dtype=np.int32))
            norms = np.arange(1, 7, dtype=np.float32) if name == "whole" else None
            if name == "whole":
                trace.dataset("/reference/ids", np.array([[4, 1, 0], [5, 2, 3]], np.int32))
                trace.dataset("/reference/log_probabilities", -np.array([[1, 2, 3], [0.5, 2, 3]], np.float32))
                trace.dataset("/reference/tail", np.array([0.5, 0.25], np.float32))
            trace.layer(0, *tensors, input_norm=norms)
        path = tmp_path / f"{name}.h5"
        assert done("validate", "--deep", path, folder=tmp_path).startswith(f"{path}: valid")
        [shown] = json.loads(done("info", path, "--json", folder=tmp_path))
        with Trace(path) as trace:
            assert shown["hash"] == hash_of_the_page(trace, "q k v" if name == "plain" else "q k v input_norm")
        hashes[name] = shown["hash"]
        done("replay", path, "-p", "knorm", "-b", "2", "-o", tmp_path / name, folder=tmp_path)
    assert hashes["plain"] != hashes["whole"]
    rows = []
    for name in hashes:
        table = pd.read_csv(tmp_path / name / "results.csv", dtype=str)
        rows.append(table.drop(columns=["trace", "trace_hash", "cell"]))  # cells are named after their trace
    assert rows[0].equals(rows[1])
    differences = kvreplay("diff", "plain.h5", "whole.h5", folder=tmp_path)
    assert (
        differences.code == 1 and "/layers/000/input_norm" in differences.out and "/reference/tail" in differences.out
    )

    def damaged(change: str, value: np.ndarray, message: str) -> None:
        copy = shutil.copy(tmp_path / "whole.h5", tmp_path / "damaged.h5")
        with h5py.File(copy, "r+") as file:
            del file[change]
            file.create_dataset(change, data=value)
        answer = kvreplay("validate", "damaged.h5", folder=tmp_path)
        assert answer.code == 1 and message in answer.out, answer.out

    damaged("layers/000/input_norm", np.ones(6, "<f8"), "input_norm: type: expected float32, found float64")
    damaged("layers/000/input_norm", np.ones(5, "<f4"), "input_norm: shape: expected [6], found [5]")
    damaged("reference/tail", np.ones(3), "/reference/tail: shape: expected [2], found [3]")
    damaged("reference/log_probabilities", np.ones((2, 3)), "/reference/log_probabilities: value: expected at most 0")


def test_policies_and_metrics_show_their_declarations(tmp_path: Path) -> None:
    policies = json.loads(done("policies", "--json", folder=tmp_path))
    assert {policy["name"] for policy in policies} == POLICIES
    snapkv = json.loads(done("policies", "snapkv", "--json", folder=tmp_path))
    assert snapkv in policies
    window = next(parameter for parameter in snapkv["parameters"] if parameter["name"] == "window")
    assert window["default"] == "8"
    text = done("policies", "snapkv", folder=tmp_path)
    assert all(policy[fact] for policy in policies for fact in ("granularity", "needs", "class", "cost"))
    facts = {policy["name"]: policy for policy in policies}
    assert facts["chunkkv"]["granularity"] == "chunk, per layer"
    assert facts["sca"]["granularity"] == "token, one set for all layers"
    assert facts["critical-kv"]["needs"] == "all prompt queries, RoPE, W_o"
    assert facts["kvzip"]["needs"] == "passes that repeat the prompt" and facts["kvzip"]["cost"] == "O(n^2)"
    assert facts["head-kv"]["needs"] == "last 8 queries, file (table=)"
    assert facts["h2o-online"]["class"] == "online" and facts["quest"]["class"].startswith("sparse reads")
    assert facts["simlayerkv"]["class"] == "one-shot, after prefill; budget-free"
    assert (facts["h2o"]["cost"], facts["snapkv"]["cost"], facts["knorm"]["cost"]) == ("O(n^2)", "O(w n)", "O(n)")
    assert "window=8" in text and "arXiv:2404.14469" in text and "preset=kvpress" in text

    names = {metric["name"] for metric in json.loads(done("metrics", "--json", folder=tmp_path))}
    assert {"attention_recall", "kv_l1_loss", "jaccard_matrix", "redundancy_key", "kv_bytes", "kld"} <= names
    for metric in names:
        card = json.loads(done("metrics", metric, "--json", folder=tmp_path))
        assert card["better"] in {"higher", "lower", "neither"}
        assert card["formula"] and card["source"]
        assert " ".join(card["formula"].split()) in " ".join(done("metrics", metric, folder=tmp_path).split())
    loss = json.loads(done("metrics", "kv_l1_loss", "--json", folder=tmp_path))
    better = {one["name"].partition(":")[2]: one["better"] for one in loss["variants"]}
    # loss = 1 - f rho, and token = 1 - f is a size: the budget sets it
    lower = dict.fromkeys(["", "key", "value", "absolute"], "lower")
    assert loss["better"] == "lower" and better == lower | {"rho": "higher", "token": "neither"}
    unit = {one["name"].partition(":")[2]: one["unit"] for one in loss["variants"]}
    share = dict.fromkeys(["", "key", "value", "token"], "share")
    assert loss["unit"] == "share" and unit == share | {"rho": "ratio", "absolute": "L1 norm per number"}
    assert "; unit: ratio; better: higher kv_" in " ".join(done("metrics", "kv_l1_loss", folder=tmp_path).split())


def test_parts_that_do_not_fit_are_refused(traces: Path, tmp_path: Path) -> None:
    listed = json.loads(done("policies", "--parts", "--json", folder=tmp_path))
    not_with = {f"{part['kind']}={part['name']}": part["not_with"] for part in listed}
    assert all(part in not_with[other] for part, others in not_with.items() for other in others)
    assert "schedule=every" in not_with["allocate=ada"] and not_with["select=top-k"] == []
    words = ("replay", traces / "fixture.h5", "-b", "6", "--dry-run", "-p")
    for part, other in (("allocate=ada", "schedule=every"), ("store=q8_0", "schedule=online")):
        assert other in not_with[part]
        assert kvreplay(*words, f"snapkv:{part},{other}", folder=tmp_path).code == 2
    assert kvreplay(*words, "snapkv:allocate=ada,select=chunks", folder=tmp_path).code == 0
    assert "select=chunks" not in not_with["allocate=ada"]


def test_placed_parts_are_shown_with_their_names(tmp_path: Path) -> None:
    shown = done("policies", "h2o:select=chunks,protect=(sinks=4)", folder=tmp_path).split()
    assert "select=chunks" in shown and "protect=(sinks=4,recent=0)" in shown and "chunk=10" in shown


def test_parts_fit_a_narrow_terminal(tmp_path: Path) -> None:
    text = done("policies", "--parts", folder=tmp_path)
    assert max(map(len, text.splitlines())) <= 80
    words = text.split()
    for part in json.loads(done("policies", "--parts", "--json", folder=tmp_path)):
        assert part["name"] in words and part["kind"] + "=" in words


def test_another_trace_of_the_same_name_is_rejected(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        done("synth", "sinks", "-o", "t.h5", "--prompt", "64", "--seed", seed, "--force", folder=tmp_path)
        answer = kvreplay("replay", "t.h5", "-p", "h2o", "-b", "6", "-o", "out", folder=tmp_path)
    assert answer.code == 2 and "out/cells/t.h5: results of another trace named t; use another folder" in answer.err
    done("replay", "t.h5", "-p", "h2o", "-b", "6", "-o", "out", "--force", folder=tmp_path)


@pytest.mark.parametrize("words", [["policies"], ["policies", "--parts"], ["policies", "h2o"], ["metrics"],
                                   ["metrics", "jaccard_matrix"]])  # fmt: skip
def test_markdown_tables_are_whole(words: list[str], tmp_path: Path) -> None:
    rows = [line for line in done(*words, "--markdown", folder=tmp_path).splitlines() if line.startswith("|")]
    assert len(rows) > 2
    tables: list[int] = []
    for row in rows:
        bars = row.replace("\\|", "").count("|")
        if set(row) <= set("| -"):
            tables.append(bars)
    assert all(row.replace("\\|", "").count("|") in tables for row in rows)


def test_replay_prints_a_table_and_fills_the_folder(traces: Path, tmp_path: Path) -> None:
    table = done("replay", traces / "fixture.h5", *REPLAY, folder=tmp_path)
    assert "OPEN LOOP" in table and "snapkv" in table and "(oracle)" in table and "self-check full error 0" in table
    names = sorted(str(path.relative_to(tmp_path / "kvreplay-out")) for path in (tmp_path / "kvreplay-out").rglob("*"))
    assert names == ["cells", "cells/fixture.h5", "results.csv", "run.json", "seconds.csv"]
    record = json.loads((tmp_path / "kvreplay-out/run.json").read_text())
    assert record["argv"][1:] == ["replay", str(traces / "fixture.h5"), *REPLAY]
    assert record["build"]["version"] and record["build"]["HDF5"]
    declared = [card for card in json.loads(done("metrics", "--json", folder=tmp_path)) if not card["live"]]
    keys = ("name", "unit", "better")
    of_variants = [[{key: one[key] for key in keys} for one in card["variants"]] for card in declared]
    assert record["metrics"] == [{key: card[key] for key in keys} | {"variants": variants}
                                 for card, variants in zip(declared, of_variants, strict=True)]  # fmt: skip
    with h5py.File(traces / "fixture.h5") as file:
        ids = file["tokens/ids"][: file["tokens"].attrs["prefill"]].astype("<i4")
    assert record["inputs"][0]["prompt_hash"] == xxhash.xxh3_128(ids.tobytes()).hexdigest()


def test_what_is_better_of_a_metric_is_what_keeping_everything_gives(traces: Path, tmp_path: Path) -> None:
    names = [card["name"] for card in json.loads(done("metrics", "--json", folder=tmp_path)) if not card["live"]]
    done("replay", traces / "fixture.h5", *REPLAY, "--metrics", ",".join(names), folder=tmp_path)
    record = json.loads((tmp_path / "kvreplay-out/run.json").read_text())
    better = {metric["name"]: metric["better"] for metric in record["metrics"]}
    with (tmp_path / "kvreplay-out/results.csv").open(encoding="utf-8", newline="") as page:
        rows = [row for row in csv.DictReader(page) if row["layer"] == row["head"] == "all"]
    values = {(row["policy"], row["metric"], row["variant"]): float(row["value"]) for row in rows if row["value"]}
    measured = [(metric, variant) for policy, metric, variant in values if policy == "full"]
    directed = [name for name in measured if better[name[0]] != "neither"]
    undirected = {metric for metric, word in better.items() if word == "neither"}
    assert {metric for metric, _ in directed} == set(better) - undirected - {"select_seconds"}  # in seconds.csv
    for metric, variant in directed:
        gain = values["full", metric, variant] - values["random", metric, variant]
        assert gain >= 0 if better[metric] == "higher" else gain <= 0, metric


def test_every_row_has_the_unit_of_its_variant(traces: Path, tmp_path: Path) -> None:
    asked = "kv_l1_loss:rho,kv_l1_loss:absolute,span_recall,kv_bytes"
    done("replay", traces / "fixture.h5", *REPLAY, "--metrics", asked, folder=tmp_path)
    cards = {card["name"]: card for card in json.loads(done("metrics", "--json", folder=tmp_path))}
    units = {one["name"]: one["unit"] for card in cards.values() for one in card["variants"]}
    with (tmp_path / "kvreplay-out/results.csv").open(encoding="utf-8", newline="") as page:
        found = {(row["metric"], row["variant"]): row["unit"] for row in csv.DictReader(page)}
    assert len(found) > 9 and {("kv_l1_loss", "rho"), ("kv_l1_loss", "absolute")} < found.keys()
    for (metric, variant), unit in found.items():  # a span's variant is SPAN.NAME
        assert unit == units[":".join(filter(None, (metric, variant.rpartition(".")[2])))], (metric, variant)


def test_replay_as_json_has_the_numbers_of_the_fixture(traces: Path, tmp_path: Path) -> None:
    found = json.loads(done("replay", traces / "fixture.h5", *REPLAY, "--json", folder=tmp_path))
    recall = {cell["policy"]: cell["values"]["attention_recall"] for cell in found["cells"]}
    assert recall["snapkv"] == pytest.approx(0.588619, abs=1e-6)
    assert recall["h2o"] == pytest.approx(0.578642, abs=1e-6)
    assert recall["oracle"] == pytest.approx(0.736435, abs=1e-6)
    assert recall["full"] == 1
    assert found["self_check"] == ["full error 0", "budget ok", "identities ok", "oracle bound ok"]


COMPOSED = [
    "h2o:select=chunks,chunk=3,allocate=pyramid",
    "random:schedule=threshold(0.5,0.25)",
    "snapkv:window=2,kernel=3,store=quantised,bits=4,group=4,residual=0",
    "layers:0-1=(chunkkv:chunk=3,window=2),2-3=(snapkv:window=2,kernel=3)",
    "oracle:counts=(pyramid-kv:window=2)",
    "streaming-llm:rolling=true,positions=cache",
    "sca:schedule=threshold(8,4),recent=1",
    "finch:question=last,question_tokens=2,blocks=5",
]


@pytest.mark.parametrize("policy", COMPOSED)
def test_policies_are_put_together_from_parts(policy: str, traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "fixture.h5", "-b", "6", "-o", "out"]
    found = json.loads(done(*words, "-p", policy, "--json", folder=tmp_path))
    [cell] = [cell for cell in found["cells"] if cell["role"] == "asked"]
    assert cell["state"] == "done" and 0 < cell["values"]["attention_recall"] <= 1
    assert found["self_check"] == ["full error 0", "budget ok", "identities ok", "oracle bound ok"]
    # Its label is the same policy again.
    again = json.loads(done(*words, "-p", cell["label"], "--json", folder=tmp_path))
    [same] = [cell for cell in again["cells"] if cell["role"] == "asked"]
    assert (same["cell"], same["params"], same["state"]) == (cell["cell"], cell["params"], "skipped")


def test_a_hybrid_is_two_ranges_of_layers(traces: Path, tmp_path: Path) -> None:
    hybrid = "hybrid:chunkkv.window=2,chunkkv.chunk=3,snapkv.window=2,snapkv.kernel=3"
    ranges = "layers:0-1=(chunkkv:chunk=3,window=2),2-3=(snapkv:window=2,kernel=3)"
    words = ["replay", traces / "fixture.h5", "-p", f"{hybrid},{ranges}", "-b", "6", "--json"]
    cells = json.loads(done(*words, folder=tmp_path))["cells"]
    one, other = (cell for cell in cells if cell["role"] == "asked")
    assert (one["policy"], other["policy"]) == ("hybrid", "layers")
    assert one["values"] == other["values"]


def test_budgets_of_memory_are_equal_memory_whatever_the_heads(traces: Path, tmp_path: Path) -> None:
    words = ["-p", f"snapkv:{WINDOW}", "-p", f"snapkv:{WINDOW},heads=query", "-b", "1KiB"]
    found = json.loads(done("replay", traces / "fixture.h5", *words, "--json", folder=tmp_path))
    cells = {cell["heads"]: cell for cell in found["cells"] if cell["role"] == "asked"}
    # 4 layers of 2 KV heads or 4 query heads, 4 + 4 numbers of 2 bytes: 128 or 256 bytes a token.
    assert {heads: cell["budget_tokens"] for heads, cell in cells.items()} == {"kv": 8, "query": 4}
    assert {cell["values"]["kv_bytes"] for cell in cells.values()} == {1024}
    assert {cell["budget_tokens"] for cell in found["cells"] if cell["policy"] == "oracle"} == {8}
    table = done("replay", traces / "fixture.h5", *words, folder=tmp_path)
    assert "budget   1KiB = 4 to 8 tokens per layer and head on average" in table and " KiB " in table
    plain = done("replay", traces / "fixture.h5", *words[:2], "-b", "8", "-o", "plain", folder=tmp_path)
    assert " KiB " not in plain, "bytes say no more than tokens"


def test_a_budget_of_memory_binds_a_store_of_exact_size(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "fixture.h5", "-b", "1KiB", "--json"]
    merged = ["-p", "h2o", "-p", "cam-one-shot", "-p", "snapkv:window=2,store=merged-values"]
    found = json.loads(done(*words, *merged, folder=tmp_path))
    cells = [cell for cell in found["cells"] if cell["role"] == "asked"]
    assert [(cell["budget_tokens"], cell["values"]["kv_bytes"]) for cell in cells] == [(8, 1024)] * 3
    answer = kvreplay(*words, "-p", f"snapkv:{WINDOW},store=quantised", folder=tmp_path)
    assert answer.code == 2 and "do not follow from the number of tokens" in answer.err


def test_a_budget_of_the_tokens_seen_is_another_cell(traces: Path, tmp_path: Path) -> None:
    words = ["-p", f"snapkv:{WINDOW}", "-p", "h2o-online", "-b", "0.5,0.5@seen"]
    found = json.loads(done("replay", traces / "fixture.h5", *words, "--json", folder=tmp_path))
    cells = {(cell["policy"], cell["budget"]): cell for cell in found["cells"] if cell["role"] == "asked"}
    assert len(cells) == len({cell["cell"] for cell in cells.values()}) == 4
    assert {cell["budget_tokens"] for cell in cells.values()} == {6}
    once, of_seen = (cells["snapkv", budget]["values"] for budget in ("0.5", "0.5@seen"))
    assert once == of_seen, "decided when all of the prompt has been seen"
    once, of_seen = (cells["h2o-online", budget]["values"] for budget in ("0.5", "0.5@seen"))
    # After query t half of t + 1 tokens are held; queries 12 to 15 find 6, 7, 7, 8 and themselves.
    assert (once["held_tokens"], of_seen["held_tokens"]) == (7, 8)
    assert of_seen["resident_tokens:mean"] < once["resident_tokens:mean"]
    table = done("replay", traces / "fixture.h5", *words, "--all", folder=tmp_path)
    assert table.count("budget   0.5 of 12 = 6 tokens") == table.count("budget   0.5@seen of 12 = 6 tokens") == 1


def test_protected_tokens_of_a_run_are_those_given_to_each_policy(traces: Path, tmp_path: Path) -> None:
    asked = ["-p", "snapkv:window=16,h2o,streaming-llm,layers:0-1=full,2-11=h2o", "-b", "40"]
    words = [*asked, "--protect", "sinks=4,recent=25%", "-o", "run"]
    table = done("replay", traces / "long.h5", *words, folder=tmp_path)
    assert table.count("keeps its own protected tokens: streaming-llm, (full), (random), (oracle)\n") == 1
    protect = "protect=(sinks=4,recent=0.25)"
    given = f"snapkv:window=16,{protect},h2o:{protect},streaming-llm,layers:0-1=full,2-11=(h2o:{protect})"
    done("replay", traces / "long.h5", "-p", given, "-b", "40", "-o", "each", folder=tmp_path)
    done("diff", "run", "each", folder=tmp_path)
    with h5py.File(tmp_path / "run/cells/long.h5") as file:
        cells = {cell.attrs["policy"].decode(): cell for cell in file["cells"].values()}
        for policy in ("snapkv", "h2o"):
            offsets, positions = cells[policy]["offsets"][:], cells[policy]["positions"][:]
            for begin, end in zip(offsets[:-1], offsets[1:], strict=True):
                kept = positions[begin:end].tolist()
                assert len(kept) == 40 and kept[:4] == [0, 1, 2, 3] and kept[-10:] == list(range(502, 512)), policy
    plain = done("replay", traces / "long.h5", *asked, "-o", "plain", folder=tmp_path)
    assert "own protected tokens" not in plain


TWINS = ["-p", f"snapkv:{WINDOW},h2o:recent=3,streaming-llm,h2o-online", "-b", "6"]


def test_controls_are_none_random_or_twins(traces: Path, tmp_path: Path) -> None:
    def cells(*words: str) -> list[dict]:
        found = json.loads(done("replay", traces / "fixture.h5", *TWINS, *words, "--json", folder=tmp_path))
        return [cell for cell in found["cells"] if cell["role"] == "control"]

    assert cells("--controls", "none", "-o", "none") == []
    default = cells("-o", "default")
    assert [cell["policy"] for cell in default] == ["full", "random", "oracle"]
    assert [cell["values"] for cell in cells("--controls", "random", "-o", "random")] == [
        cell["values"] for cell in default
    ]
    labels = [cell["label"] for cell in cells("--controls", "twins", "-o", "twins")]
    of = [f"(snapkv:{WINDOW})", "(h2o:recent=3)", "streaming-llm"]  # the set of h2o-online is dynamic
    assert labels == ["full", "random", "oracle", *(f"random-twin:of={policy}" for policy in of)]
    for name in ("none", "random", "twins"):
        assert json.loads((tmp_path / name / "run.json").read_text())["options"]["controls"] == name
    answer = kvreplay("replay", traces / "fixture.h5", *TWINS, "--controls", "all", folder=tmp_path)
    assert answer.code == 2 and "--controls" in answer.err and "none" in answer.err and "twins" in answer.err


def test_without_controls_the_self_check_says_that_full_was_not_replayed(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "fixture.h5", "-b", "6", "--controls", "none"]
    table = done(*words, "-p", "h2o", "-o", "none", folder=tmp_path)
    assert "self-check full not replayed | budget ok | identities ok | oracle bound ok" in table
    assert "\n(" not in table
    assert "self-check full error 0 | budget ok" in done(*words, "-p", "h2o,full", "-o", "asked", folder=tmp_path)


def test_a_table_names_the_error_that_it_shows(traces: Path, tmp_path: Path) -> None:
    """The error pooled over heads and the mean of the heads' errors are different numbers."""
    words = ["replay", traces / "fixture.h5", "-p", "h2o", "-b", "6"]
    for metrics, title, name in (
        ("output_error:pooled", "out.err", "output_error:pooled"),
        ("output_error", "head.err", "output_error"),
        ("output_error,output_error:pooled", "out.err", "output_error:pooled"),
    ):
        asked = [*words, "--metrics", metrics, "-o", title + str(len(metrics))]
        table = [line.split() for line in done(*asked, folder=tmp_path).splitlines()]
        titles = next(line for line in table if line[:1] == ["policy"])
        assert {"out.err", "head.err"} & set(titles) == {title}
        row = next(line for line in table if line[:1] == ["h2o"])
        [cell] = [
            cell for cell in json.loads(done(*asked, "--json", folder=tmp_path))["cells"] if cell["label"] == "h2o"
        ]
        assert row[titles.index(title)].rstrip("*") == f"{cell['values'][name]:.3f}"


def test_skill_is_the_way_from_the_twin_to_the_best_set(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "long.h5", "-p", "h2o,streaming-llm,h2o-online", "-b", "0.1", "--controls", "twins"]
    found = json.loads(done(*words, "--json", folder=tmp_path))
    cells = {cell["label"]: cell["values"] for cell in found["cells"]}
    recall, oracle = cells["h2o"]["attention_recall"], cells["h2o"]["attention_recall:oracle"]
    twin = cells["random-twin:of=h2o"]["attention_recall"]
    assert twin < recall < oracle
    assert oracle == pytest.approx(cells["oracle"]["attention_recall"], abs=1e-6), "as many tokens in each head"
    assert cells["h2o-online"]["attention_recall:oracle"] is None
    assert cells["full"]["attention_recall:oracle"] == 1
    table = done(*words, "--wide", folder=tmp_path)
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line.startswith(("h2o", "stream", "("))}
    place = [line.split() for line in table.splitlines() if line.startswith("policy")][0].index("skill")
    assert table.split("\n")[2].split()[place - 1] == "recall"
    assert rows["h2o"][place].rstrip("*") == f"{(recall - twin) / (oracle - twin):.3f}"
    assert rows["streaming-llm"][place] == "0.000", "all that it keeps is protected"
    assert rows["h2o-online"][place] == rows["(oracle)"][place] == "-"
    assert "*" not in " ".join(rows["streaming-llm"]) and "random-twin" not in table
    assert (
        "\nskill = (recall - random twin) / (oracle - random twin), at the same token counts: 0 = random, 1 = best"
        in table
    )


def test_each_recall_has_the_bound_beside_it(traces: Path, tmp_path: Path) -> None:
    words = ["-p", f"snapkv:{WINDOW},heads=layer", "-b", "6", "--metrics", "attention_recall", "--detail", "head"]
    done("replay", traces / "fixture.h5", *words, "-o", "out", folder=tmp_path)
    with (tmp_path / "out/results.csv").open(encoding="utf-8", newline="") as page:
        rows = [row for row in csv.DictReader(page) if row["metric"] == "attention_recall"]
    places: dict[str, dict] = {"": {}, "oracle": {}}
    for row in rows:
        places[row["variant"]][row["policy"], row["layer"], row["head"]] = float(row["value"])
    assert places[""].keys() == places["oracle"].keys() and len(places[""]) == 4 * (4 * (4 + 1) + 1)
    for (policy, layer, head), bound in places["oracle"].items():
        if head == "all":
            assert places[""][policy, layer, head] <= bound + 1e-6
        if policy == "full":
            assert bound == 1


def test_a_random_twin_names_what_it_lacks(traces: Path, tmp_path: Path) -> None:
    def refused(policy: str) -> str:
        answer = kvreplay("replay", traces / "fixture.h5", "-p", policy, "-b", "6", folder=tmp_path)
        assert answer.code == 2 and answer.err.count("\n") == 1, answer
        return answer.err

    assert refused("random-twin").startswith("kvreplay: random-twin:of: no policy: expected (POLICY)")
    assert "random-twin:of: has a dynamic kept set: expected a one-shot policy (a static set)" in refused(
        "random-twin:of=(h2o-online)"
    )
    described = done("policies", "random-twin", folder=tmp_path)
    assert "the policy whose kept set is permuted" in described


def test_pages_are_kept_whole_and_for_the_layer(traces: Path, tmp_path: Path) -> None:
    words = ["-p", "h2o:recent=16", "-b", "100", "--structure", "page=16,heads=layer", "-o", "run"]
    [found, *_] = json.loads(done("replay", traces / "long.h5", *words, "--json", folder=tmp_path))["cells"]
    assert found["label"] == "h2o:recent=16,heads=layer,select=chunks,chunk=16,window_mode=whole"
    with h5py.File(tmp_path / "run/cells/long.h5") as file:
        [cell] = [one for one in file["cells"].values() if one.attrs["policy"] == b"h2o"]
        assert cell.attrs["heads"] == b"layer"
        offsets, positions = cell["offsets"][:], cell["positions"][:]
    for begin, end in zip(offsets[:-1], offsets[1:], strict=True):
        pages = [0] * 32
        for position in positions[begin:end]:
            pages[position // 16] += 1
        assert sorted(pages)[-7:] == [4, 16, 16, 16, 16, 16, 16] and sum(pages) == 100 and pages[31] == 16
    same = "h2o:recent=16,select=chunks,chunk=16,window_mode=whole,heads=layer"
    put_in = ["-p", same, "-b", "100", "-o", "run", "--json"]
    [again, *_] = json.loads(done("replay", traces / "long.h5", *put_in, folder=tmp_path))["cells"]
    assert (again["cell"], again["state"]) == (found["cell"], "skipped"), "nothing but these parts"


def test_an_engine_gives_every_policy_its_rules(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "long.h5", "-b", "200", "-o", "run", "--json"]
    [found, *_] = json.loads(done(*words, "-p", "knorm", "--engine", "vllm", folder=tmp_path))["cells"]
    parts = "select=chunks,chunk=16,window_mode=whole"
    same = f"knorm:{parts},protect=(sinks=32,recent=128)"
    [again, *_] = json.loads(done(*words, "-p", same, folder=tmp_path))["cells"]
    assert (again["cell"], again["state"]) == (found["cell"], "skipped"), "nothing but these parts"
    for option in (["--structure", "page=16"], ["--protect", "sinks=4"]):
        answer = kvreplay(*words, "-p", "knorm", "--engine", "vllm", *option, folder=tmp_path)
        assert answer.code == 2
        assert answer.err == (
            "kvreplay: --engine: sets pages and protected tokens: expected either --engine or these options, "
            f"found {option[0]}\n"
        )


def test_policies_are_read_from_a_file(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "- snapkv:window=2,kernel=3\n"
        "- policy: h2o\n  recent: 3\n"
        "- policy: oracle\n  counts: snapkv:window=2\n"
        "- policy: sca\n  schedule: threshold(8,4)\n  recent: 1\n"
    )
    (tmp_path / "one.yaml").write_text("policy: chunkkv\nchunk: 3\nwindow: 2\n")
    words = ["replay", traces / "fixture.h5", "-p", "@mine.yaml,local", "-p", "@one.yaml", "-b", "6", "--json"]
    cells = json.loads(done(*words, folder=tmp_path))["cells"]
    assert [cell["label"] for cell in cells if cell["role"] == "asked"] == [
        "snapkv:window=2,kernel=3",
        "h2o:recent=3",
        "oracle:counts=(snapkv:window=2)",
        "sca:schedule=threshold(8,4),recent=1",
        "local",
        "chunkkv:chunk=3,window=2",
    ]


def test_evictions_over_time_are_stored(traces: Path, tmp_path: Path) -> None:
    policy = "sca:schedule=threshold(8,4),recent=1"
    words = ["replay", traces / "fixture.h5", "-p", policy, "-b", "6", "-o", "out"]
    done(*words, folder=tmp_path)
    with h5py.File(tmp_path / "out/cells/fixture.h5") as file:
        [cell] = [cell for cell in file["cells"].values() if "evicted_at" in cell]
        assert cell.attrs["policy"] == b"sca"
        assert cell["evicted_at"].shape == (4, 1, 16)
        gone = cell["evicted_at"][3, 0]
        assert list(gone) == [7, -1, 11, 11, 7, 7, 7, 11, 11, -1, 15, -1, 15, 15, 15, -1]
        assert list(cell["positions"][:4]) == [1, 9, 10, 11]
        assert list(cell["layer_source"]) == [3, 3, 3, 3]


def test_a_dry_run_plans_and_writes_nothing(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "fixture.h5", *REPLAY, "-o", "out"]
    planned = json.loads(done(*words, "--dry-run", "--json", folder=tmp_path))
    assert list(tmp_path.iterdir()) == []
    [trace] = planned["traces"]
    assert {cell["policy"].split(":")[0] for cell in trace["cells"]} == {"snapkv", "h2o", "full", "random", "oracle"}
    assert trace["skipped"] == 0 and planned["seconds"] > 0 and planned["memory_bytes"] > 0
    done(*words, folder=tmp_path)
    [trace] = json.loads(done(*words, "--dry-run", "--json", folder=tmp_path))["traces"]
    assert (trace["cells"], trace["skipped"]) == ([], 5)
    assert "5 cells" in done(*words, "--dry-run", folder=tmp_path)


def test_a_budget_above_the_prompt_is_said_once(traces: Path, tmp_path: Path) -> None:
    words = ["-p", "h2o,local", "--metrics", "attention_recall"]
    one = kvreplay("replay", traces / "fixture.h5", *words, "-b", "100,12,6", "-o", "one", folder=tmp_path)
    line = "budget 100 holds all prompt tokens of fixture (12 tokens): every token is kept"
    assert one.err.count("every token is kept") == 1 and f"kvreplay: warning: {line}\n" in one.err, one
    assert line in json.loads((tmp_path / "one/run.json").read_text())["warnings"]
    both = kvreplay("replay", traces, *words, "-b", "1GiB", "-o", "both", folder=tmp_path)
    assert "kvreplay: warning: budget 1GiB holds all prompt tokens of 2 traces: every token is kept\n" in both.err


def test_diff_answers_for_traces_and_runs(traces: Path, tmp_path: Path) -> None:
    done("synth", "fixture", "-o", "same.h5", folder=tmp_path)
    done("synth", "integer", "-o", "one.h5", folder=tmp_path)
    done("synth", "integer", "-o", "other.h5", "--seed", "1", folder=tmp_path)
    assert done("diff", traces / "fixture.h5", "same.h5", folder=tmp_path) == "equal\n"
    answer = kvreplay("diff", "one.h5", "other.h5", folder=tmp_path)
    assert answer.code == 1 and "/layers/000/q" in answer.out
    assert json.loads(kvreplay("diff", "one.h5", "other.h5", "--json", folder=tmp_path).out)["equal"] is False
    assert kvreplay("diff", "one.h5", "other.h5", "--tolerance", "1000", folder=tmp_path).code == 1  # ids differ too

    for name, budget in (("a", "6"), ("b", "6"), ("c", "5")):
        done("replay", traces / "fixture.h5", "-p", "h2o", "-b", budget, "-o", name, folder=tmp_path)
    assert done("diff", "a", "b", folder=tmp_path) == "equal\n"
    assert done("diff", "a/cells/fixture.h5", "b/cells/fixture.h5", folder=tmp_path) == "equal\n"
    answer = kvreplay("diff", "a", "c", folder=tmp_path)
    assert answer.code == 1 and answer.out.splitlines()[-1].endswith("differences")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_its_shell(shell: str, tmp_path: Path) -> None:
    script = done("completion", shell, folder=tmp_path)
    assert f"'{PROGRAM}' --complete" in script
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    subprocess.run(
        [shell, "-n", "-c", script] if shell != "fish" else [shell, "-n"], input=script, text=True, check=True
    )


def completed(*words: str, folder: Path) -> list[str]:
    """What bash offers for the last of `words`."""
    line = " ".join(f"'{word}'" for word in words)
    script = (
        done("completion", "bash", folder=folder)
        + f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _kvreplay; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    offered = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=folder).stdout
    return [word for word in offered.split("\n") if word]


def test_bash_completes_names_options_and_values(tmp_path: Path) -> None:
    assert completed("kvreplay", "va", folder=tmp_path) == ["validate"]
    assert completed("kvreplay", "replay", "--bud", folder=tmp_path) == ["--budget"]
    assert completed("kvreplay", "replay", "--detail", "h", folder=tmp_path) == ["head"]
    assert completed("kvreplay", "replay", "-p", "full,sn", folder=tmp_path) == ["full,snapkv"]
    assert completed("kvreplay", "replay", "--metrics", "kv_l", folder=tmp_path) == ["kv_l1_loss"]
    assert completed("kvreplay", "policies", "stream", folder=tmp_path) == ["streaming-llm"]
    assert completed("kvreplay", "synth", "need", folder=tmp_path) == ["needle"]
    assert completed("kvreplay", "replay", "--threads", "", folder=tmp_path) == []
    assert completed("kvreplay", "capture", "--dt", folder=tmp_path) == ["--dtype"]
    assert completed("kvreplay", "compare", "out", "--baseline", "sn", folder=tmp_path) == ["snapkv"]
    (tmp_path / "a trace.h5").touch()
    assert completed("kvreplay", "info", "a", folder=tmp_path) == ["a trace.h5"]


def test_shells_are_offered_words_with_their_meanings(tmp_path: Path) -> None:
    def offered(*words: str) -> dict[str, str]:
        lines = done("--complete", *words, folder=tmp_path).splitlines()
        return dict(line.split("\t") for line in lines)

    assert COMMANDS | {"capture", "sweep"} <= offered("").keys()
    assert offered("val") == {"validate": "checks traces and lists every violation of the trace format"}
    assert offered("replay", "--he") == {"--help": "show this help"}
    assert "snapkv" in offered("replay", "-p", "") and "attention_recall" in offered("metrics", "")
    assert offered("replay", "--eval", "c") == {"continuation": ""}
    assert offered("validate", "") == {"FILE": ""}
    assert offered() == offered("unknown", "") == {}


def test_an_unknown_command_runs_the_program_of_that_name(tmp_path: Path) -> None:
    tool = tmp_path / "kvreplay-hello"
    tool.write_text('#!/bin/sh\necho "hello $1"\nexit 17\n')
    tool.chmod(0o755)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    answer = kvreplay("hello", "you", folder=tmp_path, env=path)
    assert (answer.code, answer.out, answer.err) == (17, "hello you\n", "")


def test_paths_may_have_spaces_and_any_letters(traces: Path, tmp_path: Path) -> None:
    trace = tmp_path / "a trace äöü 痕跡.h5"
    shutil.copy(traces / "fixture.h5", trace)
    assert json.loads(done("info", "--json", "--no-estimate", trace, folder=tmp_path))[0]["name"] == trace.stem
    table = done("replay", trace, *REPLAY, "-o", "a run äöü", folder=tmp_path)
    assert trace.stem in table
    assert (tmp_path / "a run äöü" / "cells" / trace.name).is_file()


def test_progress_is_written_only_where_it_is_wanted(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "fixture.h5", *REPLAY]
    assert kvreplay(*words, "-o", "a", folder=tmp_path).err == ""
    shown = kvreplay(*words, "-o", "b", "--progress", "always", folder=tmp_path)
    assert shown.err.splitlines()[-1].startswith("100 %")
    assert "layer 4 of 4" in shown.err


def test_a_plan_shrinks_to_fit_the_memory_and_gives_the_same_results(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "fixture.h5", *REPLAY, "--threads", "8"]

    def planned(*more: str) -> int:
        return json.loads(done(*words, "-o", "plan", "--dry-run", "--json", *more, folder=tmp_path))["memory_bytes"]

    whole = planned()
    limit = str(whole - 1)
    assert planned("--memory", limit) < whole
    done(*words, "-o", "whole", folder=tmp_path)
    done(*words, "-o", "small", "--memory", limit, folder=tmp_path)
    assert (tmp_path / "small/results.csv").read_bytes() == (tmp_path / "whole/results.csv").read_bytes()


def test_tools_beside_the_script_of_a_wheel(tmp_path: Path) -> None:
    """auditwheel moves the program; bin has a script that starts it under its own path, and the tools in Python."""
    moved = tmp_path / "lib/kvreplay.scripts/kvreplay"
    script, tool = tmp_path / "bin/kvreplay", tmp_path / "bin/kvreplay-example"
    for path in (moved, script):
        path.parent.mkdir(parents=True)
    shutil.copy(PROGRAM, moved)
    script.write_text(f'#!/bin/bash\nexec -a "$0" {moved} "$@"\n')
    tool.write_text('#!/bin/sh\necho "example $1"\n')
    for path in (script, tool):
        path.chmod(0o755)
    command = ["bin/kvreplay", "example", "-h"]
    said = subprocess.run(command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert (said.stdout, said.stderr) == ("example -h\n", "")
