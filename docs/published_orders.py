"""Prints which published orders of policies remain, as tables in Markdown: python docs/published_orders.py OWN EQUAL.

OWN and EQUAL are runs over the same traces with `--controls twins`, with each policy's own protected tokens and with
`--protect`. Differences are paired by trace; Holm's correction is over all orders and metrics of both runs.
"""

import sys
from pathlib import Path

import pandas as pd

from kvreplay.compare.comparison import Comparison
from kvreplay.compare.statistics import holm
from kvreplay.parameters import of_policy
from kvreplay.results import Run

SIGNIFICANT = 0.05
METRICS = ("output_error", "skill")
HEADINGS = {
    ("output_error", "own"): "output error",
    ("output_error", "equal"): "with equal protection",
    ("skill", "own"): "skill",
    ("skill", "equal"): "with equal protection",
}
SNAPKV = "snapkv:window=8,pool=max"  # its default values
# Where it is published, the better policy, and the other one.
ORDERS = (
    ("ChunkKV", "h2o", "streaming-llm"),
    ("ChunkKV", SNAPKV, "h2o"),
    ("ChunkKV", "pyramid-kv", SNAPKV),
    ("ChunkKV", "chunkkv", SNAPKV),
    ("ChunkKV", "chunkkv", "pyramid-kv"),
    ("DynamicKV", "dynamickv", SNAPKV),
    ("DynamicKV", "dynamickv", "pyramid-kv"),
    ("SCA", "sca", "h2o"),
    ("SCA", "sca", "streaming-llm"),
    ("SCA", "streaming-llm", "strided"),
    ("Ada-KV", "ada-kv", SNAPKV),
    ("LAVa", "lava", "ada-kv"),
    ("TOVA", "tova", "h2o"),
    ("VATP", "vatp", "h2o"),
    ("(settings)", "snapkv:window=8,pool=none", SNAPKV),
    ("(settings)", "snapkv:window=32,pool=none", "snapkv:window=8,pool=none"),
)


def lines(run: Run, better: str, worse: str) -> pd.DataFrame:
    """A row a metric: `better` less `worse`, paired by trace, and the published sign of this difference."""
    label, baseline = (label_of(run, policy) for policy in (better, worse))
    found = Comparison([run], baseline, [label], metrics=METRICS).lines
    found = found[found["policy"] == label]
    return found.assign(sign=found["better"].map({"higher": 1, "lower": -1}))


def label_of(run: Run, policy: str) -> str:
    """The label in the run of a policy that is written with its distinguishing parameters."""
    asked = run.cells[run.cells["role"] == "asked"]
    (label,) = set(asked["label"][of_policy(zip(asked["policy"], asked["params"], strict=True), policy)])
    return label


def named(*policies: str) -> str:
    return ", ".join(f"`{'snapkv' if policy == SNAPKV else policy}`" for policy in policies)


def verdict(one: pd.Series) -> str:
    if not one["p_all"] < SIGNIFICANT:
        return "not resolved"
    return "remains" if one["difference"] * one["sign"] > 0 else "reversed"


def main(own: Path, equal: Path) -> None:
    runs = {"own": Run(own), "equal": Run(equal)}
    found = pd.concat([
        lines(run, better, worse).assign(source=source, order=named(better, worse), run=name)
        for source, better, worse in ORDERS for name, run in runs.items()
    ], ignore_index=True)  # fmt: skip
    found["p_all"] = holm(found["p"].to_numpy(float))
    digits = "{:+.3f} [{:+.3f}, {:+.3f}] "
    found["text"] = [
        digits.format(one.difference, one.difference_low, one.difference_high) + verdict(found.loc[one.Index])
        for one in found.itertuples()
    ]
    wide = found.pivot(index=["source", "order"], columns=["metric", "run"], values="text")
    columns = [(metric, run) for metric in METRICS for run in runs]
    print("| published by | better, worse | " + " | ".join(HEADINGS[column] for column in columns) + " |")
    print("| --- " * (2 + len(columns)) + "|")
    for source, better, worse in ORDERS:
        order = named(better, worse)
        print(f"| {source} | {order} | " + " | ".join(wide.loc[(source, order), columns]) + " |")
    print(f"\n{found['pairs'].iloc[0]:.0f} traces; {len(found)} tests.")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
