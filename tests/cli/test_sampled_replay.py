"""Replays that estimate metrics from a sample of the eval queries."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
from program import done, kvreplay
from scipy.stats import t

POLICIES = ["-p", "snapkv,h2o,streaming-llm", "-b", "0.1"]
SAMPLE = ["--sample", "queries=16"]


def table(output: Path) -> pd.DataFrame:
    return pd.read_csv(output / "results.csv", keep_default_na=False, dtype=str)


def overall(output: Path) -> pd.DataFrame:
    """Numbers over all layers and heads by policy, metric and variant."""
    rows = table(output)
    rows = rows[(rows["layer"] == "all") & (rows["head"] == "all") & (rows["role"] != "trace")]
    return rows.set_index(["policy", "metric", "variant"]).sort_index()


def by_query(output: Path, cell: str) -> dict[tuple[str, str], np.ndarray]:
    """Values of the sampled queries in pairs, as the file of cells has them."""
    with h5py.File(output / "cells/long.h5") as file:
        group = file["by_query"][cell]
        lines = group["metrics"].asstr()[()].split()
        return {tuple(line.split(",")): numbers for line, numbers in zip(lines, group["numbers"][()], strict=True)}


def pairs_error(values: np.ndarray, population: int) -> tuple[float, float]:
    """Variance and degrees of freedom of the mean of values in pairs."""
    n, squares = len(values), (values[0::2] - values[1::2]) ** 2
    return (1 - n / population) * squares.sum() / n**2, squares.sum() ** 2 / max((squares**2).sum(), 1e-300)


def test_estimates_have_the_intervals_of_their_pairs(traces: Path, tmp_path: Path) -> None:
    printed = done("replay", traces / "long.h5", *POLICIES, *SAMPLE, "-o", "out", folder=tmp_path)
    assert "ESTIMATE from 16 of 64 eval queries" in printed and " ± " in printed and "(oracle)" not in printed
    rows = table(tmp_path / "out")
    assert list(rows.columns[-2:]) == ["sample", "half_width"]
    assert set(rows["sample"]) == {"16 of 64 eval queries"} and set(rows["n_queries"]) == {"16"}
    found = overall(tmp_path / "out")
    assert ("snapkv", "attention_recall", "oracle") not in found.index
    cells = found["cell"].groupby("policy").first()
    for policy, cell in cells.items():
        values = by_query(tmp_path / "out", cell)
        assert {("attention_recall", ""), ("output_error", "pooled"), ("held_tokens", "")} <= set(values)
        for (metric, variant), numbers in values.items():
            row = found.loc[(policy, metric, variant)]
            assert numbers.mean() == pytest.approx(float(row["value"]), rel=1e-12, abs=1e-15)
            variance, degrees = pairs_error(numbers, 64)
            expected = t.ppf(0.975, degrees) * np.sqrt(variance) if variance > 0 else 0
            assert float(row["half_width"]) == pytest.approx(expected, rel=1e-9, abs=1e-15)
    of_sets = found.xs("kept_tokens", level="metric")
    assert set(of_sets["half_width"]) == {""}
    of_layers = rows[(rows["layer"] != "all") | (rows["role"] == "trace")]
    assert set(of_layers["half_width"]) == {""}


def test_intervals_of_many_seeds_cover_the_exact_values(traces: Path, tmp_path: Path) -> None:
    words = [
        "replay",
        traces / "long.h5",
        "-p",
        "snapkv",
        "-b",
        "0.1",
        "--metrics",
        "attention_recall,output_error:pooled",
    ]
    done(*words, "--controls", "none", "-o", "exact", folder=tmp_path)
    exact = overall(tmp_path / "exact").loc["snapkv", "value"].astype(float)
    covered, estimates = [], set()
    for seed in range(40):
        kvreplay(*words, "--controls", "none", *SAMPLE, "--seed", seed, "-o", f"sample-{seed}", folder=tmp_path)
        found = overall(tmp_path / f"sample-{seed}").loc["snapkv"]
        found = found[found["half_width"] != ""]
        error = (found["value"].astype(float) - exact.loc[found.index]).abs()
        covered += list(error <= found["half_width"].astype(float))
        estimates.add(found["value"].iloc[0])
    assert len(estimates) == 40
    assert np.mean(covered) > 0.87  # 95 % of some 300 that depend on each other


def test_the_exact_replay_is_unchanged(traces: Path, tmp_path: Path) -> None:
    done("replay", traces / "long.h5", *POLICIES, "-o", "exact", folder=tmp_path)
    assert "half_width" not in table(tmp_path / "exact").columns
    with h5py.File(tmp_path / "exact/cells/long.h5") as file:
        assert set(file) == {"cells", "seconds", "traces", "values"}
        assert not {"sample", "all_queries"} & set(file["traces/long"].attrs)
    every = ["--sample", "queries=64", "--controls", "none"]
    done("replay", traces / "long.h5", *POLICIES, *every, "-o", "every", folder=tmp_path)
    rows = (tmp_path / "exact/results.csv").read_text().splitlines()
    assert set((tmp_path / "every/results.csv").read_text().splitlines()) < set(rows)


def test_finished_estimates_are_reused(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "long.h5", *POLICIES, *SAMPLE]
    done(*words, "--metrics", "attention_cosine:,output_error:pooled", "-o", "out", folder=tmp_path)
    few = set((tmp_path / "out/results.csv").read_text().splitlines())
    done(*words, "-o", "out", folder=tmp_path)
    more = set((tmp_path / "out/results.csv").read_text().splitlines())
    done(*words, "-o", "at-once", folder=tmp_path)
    assert few < more == set((tmp_path / "at-once/results.csv").read_text().splitlines())
    again = json.loads(done(*words, "--json", "-o", "out", folder=tmp_path))
    assert {cell["state"] for cell in again["cells"]} == {"skipped"}
    assert again["traces"][0]["sample"]["text"] == "queries=16,seed=0"
    snapkv = next(cell for cell in again["cells"] if cell["policy"] == "snapkv")
    row = overall(tmp_path / "out").loc[("snapkv", "attention_recall", "")]
    assert snapkv["half_widths"]["attention_recall"] == float(row["half_width"])
    shown = done("show", "out", "--columns", "recall,out.err", folder=tmp_path)
    assert "ESTIMATE from 16 of 64 eval queries" in shown and f"± {float(row['half_width']):.3f}" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sample", "queries=3"], "--sample: queries: not in pairs: expected an even number, found 3"),
        (["--sample", "quereis=2"],
         "--sample: unknown parameter: expected one of layers, heads, queries, found quereis"),
        (["--sample", "queries=2", "-p", "oracle"],
         "oracle: selects by the attention of all eval queries: expected a replay without --sample"),
        (["--sample", "queries=2", "--metrics", "attention_recall:worst"],
         "attention_recall:worst: is a percentile over all eval queries: expected a replay without --sample"),
    ],
)  # fmt: skip
def test_samples_that_estimate_nothing_are_rejected(
    traces: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    answer = kvreplay("replay", traces / "long.h5", *POLICIES, *words, "-o", "out", folder=tmp_path)
    assert (answer.code, answer.err) == (2, f"kvreplay: {message}\n")
    assert not (tmp_path / "out").exists()


def test_a_folder_has_one_sample_of_a_trace(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "long.h5", *POLICIES, "-o", "out"]
    done(*words, *SAMPLE, folder=tmp_path)
    before = (tmp_path / "out/results.csv").read_bytes()
    for other in ([], ["--sample", "queries=18"], [*SAMPLE, "--seed", "1"]):
        answer = kvreplay(*words, *other, folder=tmp_path)
        assert answer.code == 2 and "sample of the earlier results" in answer.err
    assert (tmp_path / "out/results.csv").read_bytes() == before
    done(*words, "--force", folder=tmp_path)
    assert "half_width" not in table(tmp_path / "out").columns


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wide.h5, of 12 layers, 6 KV heads and 64 eval queries, and its exact results."""
    folder = tmp_path_factory.mktemp("wide")
    heads = ["--query-heads", "12", "--kv-heads", "6", "--head-dim", "16"]
    done("synth", "sinks", "-o", "wide.h5", "--layers", "12", *heads, "--prompt", "128", "--continuation", "64",
         folder=folder)  # fmt: skip
    done("replay", "wide.h5", *WIDE, "-o", "exact", folder=folder)
    return folder


WIDE = ["-p", "snapkv,pyramid-kv", "-b", "0.1", "--controls", "none"]
SIZES = {"queries": (16, 64), "layers": (4, 12), "heads": (2, 6)}


@pytest.mark.parametrize("kinds", ["layers", "heads", "layers,heads", "layers,heads,queries"])
def test_intervals_add_the_errors_of_all_kinds_of_units(wide: Path, kinds: str) -> None:
    names = kinds.split(",")
    sample = ",".join(f"{name}={SIZES[name][0]}" for name in names)
    output = wide / sample
    done("replay", "wide.h5", *WIDE, "--sample", sample, "-o", sample, folder=wide)
    found = overall(output)
    count = {name: SIZES[name][0 if name in names else 1] for name in SIZES}
    with h5py.File(output / "cells/wide.h5") as file:
        assert file["traces/wide"].attrs["sample"].decode() == f"{sample},seed=0"
        assert len(file["traces/wide"].attrs["treated"]) == count["layers"]
        for policy in ("snapkv", "pyramid-kv"):
            row = found.loc[(policy, "attention_recall", "")]
            errors = []
            for name in names:
                group = file[f"by_{name.removesuffix('s').replace('querie', 'query')}"][row["cell"]]
                place = group["metrics"].asstr()[()].split().index("attention_recall,")
                numbers = group["numbers"][place]
                assert numbers.mean() == pytest.approx(float(row["value"]), rel=1e-12)
                if name != "heads":
                    errors.append(pairs_error(numbers, SIZES[name][1]))
                    continue
                for of_layer in numbers.reshape(count["layers"], count["heads"]):
                    variance, degrees = pairs_error(of_layer, SIZES["heads"][1])
                    errors.append((variance / count["layers"] / 12, degrees))  # n_L / N_L / n_L²
            variance = sum(one for one, _ in errors)
            degrees = variance**2 / sum(one**2 / degrees for one, degrees in errors)
            assert float(row["half_width"]) == pytest.approx(t.ppf(0.975, degrees) * variance**0.5, rel=1e-9)


def test_sums_over_layers_are_estimated(wide: Path) -> None:
    done("replay", "wide.h5", *WIDE, "--sample", "layers=4", "-o", "sums", folder=wide)
    exact, found = overall(wide / "exact"), overall(wide / "sums")
    uniform, pyramid = (("snapkv", "kv_bytes", ""), ("pyramid-kv", "kv_bytes", ""))
    assert float(found.loc[uniform, "value"]) == float(exact.loc[uniform, "value"])
    assert float(found.loc[uniform, "half_width"]) == 0
    error = abs(float(found.loc[pyramid, "value"]) - float(exact.loc[pyramid, "value"]))
    assert 0 < error <= float(found.loc[pyramid, "half_width"])


def test_intervals_of_sampled_layers_and_heads_cover_the_exact_values(wide: Path) -> None:
    exact = overall(wide / "exact")["value"]
    covered = []
    for seed in range(30):
        words = ["--sample", "layers=6,heads=4,queries=16", "--seed", seed, "-o", f"seed-{seed}"]
        kvreplay("replay", "wide.h5", *WIDE, *words, folder=wide)
        found = overall(wide / f"seed-{seed}")
        found = found.loc[(["snapkv", "pyramid-kv"], ["attention_recall", "attention_l1", "output_error"]), :]
        error = (found["value"].astype(float) - exact.loc[found.index].astype(float)).abs()
        covered += list(error <= found["half_width"].astype(float))
    assert np.mean(covered) > 0.88  # 95 % of 240 that depend on each other


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sample", "layers=4", "-p", "dynamickv"],
         "dynamickv: allocates tokens by the scores of all layers: expected a replay without --sample"),
        (["--precision", "0.1", "--sample", "layers=4"],
         "--precision: samples the eval queries of all layers and heads: expected --sample without layers= and heads="),
        (["--sample", "heads=4", "--metrics", "attention_cosine:rows"],
         "attention_cosine:rows: is measured in a pass over all heads: expected a replay without --sample"),
    ],
)  # fmt: skip
def test_units_that_cannot_be_sampled_are_rejected(wide: Path, words: list[str], message: str) -> None:
    answer = kvreplay("replay", "wide.h5", "-p", "snapkv", "-b", "0.1", *words, "-o", "rejected", folder=wide)
    assert (answer.code, answer.err) == (2, f"kvreplay: {message}\n")


def test_the_oracle_is_replayed_in_sampled_layers(wide: Path) -> None:
    done("replay", "wide.h5", "-p", "snapkv,oracle", "-b", "0.1", "--sample", "layers=4", "-o", "oracle", folder=wide)
    rows = overall(wide / "oracle")
    assert float(rows.loc[("snapkv", "attention_recall", "oracle"), "half_width"]) > 0


def test_finished_cells_of_sampled_layers_and_heads_are_reused(wide: Path) -> None:
    words = ["replay", "wide.h5", *WIDE, "--sample", "layers=4,heads=2"]
    done(*words, "--metrics", "attention_cosine", "-o", "some", folder=wide)
    done(*words, "-o", "some", folder=wide)
    done(*words, "-o", "at-once", folder=wide)
    some, at_once = ((wide / name / "results.csv").read_text() for name in ("some", "at-once"))
    assert some == at_once


PRECISE = ["replay", "deep.h5", "-p", "snapkv", "-b", "0.1", "--controls", "none"]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with deep.h5, which has 1,024 eval queries."""
    folder = tmp_path_factory.mktemp("deep")
    shape = ["--layers", "2", "--prompt", "256", "--continuation", "1024", "--head-dim", "16"]
    done("synth", "sinks", "-o", "deep.h5", *shape, folder=folder)
    return folder


def test_samples_grow_to_the_precision(deep: Path) -> None:
    done(*PRECISE, "-o", "exact", folder=deep)
    recall = ("snapkv", "attention_recall", "")
    exact = float(overall(deep / "exact").loc[recall, "value"])
    sizes = []
    precision = 1.0
    for name, share in (("pilot", 1), ("half", 0.5), ("third", 0.3), ("every", 1e-5)):
        precision, output = share * precision, f"precise-{name}"
        done(*PRECISE, "--precision", precision, "-o", output, folder=deep)
        row = overall(deep / output).loc[recall]
        sizes.append(int(row["n_queries"]))
        if sizes[-1] < 1024:
            assert float(row["half_width"]) <= precision
            assert abs(float(row["value"]) - exact) <= 2 * precision
            with h5py.File(deep / output / "cells/deep.h5") as file:
                [numbers] = [
                    numbers
                    for line, numbers in zip(
                        file["by_query"][row["cell"]]["metrics"].asstr()[()].split(),
                        file["by_query"][row["cell"]]["numbers"][()],
                        strict=True,
                    )
                    if line == "attention_recall,"
                ]
            variance, degrees = pairs_error(numbers, 1024)
            expected = t.ppf(1 - 0.025 / 3, degrees) * np.sqrt(variance)
            assert float(row["half_width"]) == pytest.approx(expected, rel=1e-9)
        if name == "pilot":
            precision = expected
    assert sizes[0] == 64 < sizes[1] < sizes[2] < sizes[3] == 1024
    assert "half_width" not in table(deep / "precise-every").columns  # every query was measured
    of_exact = overall(deep / "exact").drop(columns="kept_tokens")
    of_every = overall(deep / "precise-every").drop(columns="kept_tokens")
    assert of_every["value"].equals(of_exact.loc[of_every.index, "value"])


def test_grown_samples_are_reused(deep: Path) -> None:
    words = [*PRECISE, "--precision", "1", "-o", "grown"]
    done(*words, folder=deep)
    before = overall(deep / "grown")
    again = json.loads(done(*words, "--json", folder=deep))
    assert {cell["state"] for cell in again["cells"]} == {"skipped"}
    done(*[word if word != "snapkv" else "h2o" for word in words], folder=deep)
    after = overall(deep / "grown")
    assert set(after["n_queries"]) == set(before["n_queries"])
    assert after.loc["snapkv"].equals(before.loc["snapkv"])
    answer = kvreplay(*[word if word != "1" else "0.0001" for word in words], folder=deep)
    assert answer.code == 0
    sizes = f"{before['n_queries'].iloc[0]} of 1024 eval queries"
    assert answer.err == f"kvreplay: warning: deep: precision 0.0001:attention_recall not reached with {sizes}\n"


def test_samples_end_when_the_order_is_settled(deep: Path) -> None:
    words = ["replay", "deep.h5", "-p", "snapkv,random", "-b", "0.1", "--controls", "none", "--precision", "1e-6"]
    done(*words, "-o", "ordered", folder=deep)
    rows = overall(deep / "ordered")
    assert set(rows["n_queries"]) == {"64"}


def test_metrics_that_a_sample_does_not_estimate_are_named(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "long.h5", *POLICIES, *SAMPLE, "--metrics", "attention_recall,attention_recall:worst"]
    answer = kvreplay(*words, "-o", "out", folder=tmp_path)
    names = "attention_recall:worst"
    assert (answer.code, answer.err) == (0, f"kvreplay: not estimated from a sample: {names}\n")


def test_spans_are_not_estimated_from_some_layers(tmp_path: Path) -> None:
    words = [
        "replay",
        Path(__file__).parents[2] / "traces" / "smollm2-135m-needle.h5",
        "-p",
        "snapkv",
        "-b",
        "0.1",
        "--controls",
        "none",
        "--sample",
        "layers=6",
        "-o",
        "out",
    ]
    answer = kvreplay(*words, "--metrics", "attention_recall,span_recall:needle.mean", folder=tmp_path)
    assert (answer.code, answer.err) == (0, "kvreplay: not estimated from a sample: span_recall:needle.mean\n")
    assert "span_recall" not in (tmp_path / "out" / "results.csv").read_text()
    answer = kvreplay(*words, "--metrics", "span_recall:needle.mean", "--force", folder=tmp_path)
    said = (
        "kvreplay: span_recall:needle.mean: differs in few layers, which a sample can miss: expected a replay without"
    )
    assert (answer.code, answer.err) == (2, f"{said} --sample\n")


def test_exact_and_sampled_traces_are_merged(traces: Path, tmp_path: Path) -> None:
    done("replay", traces / "long.h5", *POLICIES, *SAMPLE, "-o", "sampled", folder=tmp_path)
    done("replay", traces / "fixture.h5", "-p", "h2o", "-b", "6", "-o", "exact", folder=tmp_path)
    done("merge", "both", "sampled", "exact", folder=tmp_path)
    rows = table(tmp_path / "both")
    assert set(rows["sample"][rows["trace"] == "fixture"]) == {""}
    assert set(rows["half_width"][rows["trace"] == "fixture"]) == {""}
    sampled = table(tmp_path / "sampled")
    assert rows[rows["trace"] == "long"].reset_index(drop=True).equals(sampled)
