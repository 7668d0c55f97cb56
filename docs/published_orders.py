"""Prints which published orders of policies remain, as tables in Markdown: python docs/published_orders.py OWN EQUAL.

OWN and EQUAL are runs over the same traces with `--controls twins`, with each policy's own protected tokens and with
`--protect`. Differences are paired by trace; Holm's correction is over all orders and metrics of both runs.
"""

import sys
from pathlib import Path

import pandas as pd

from kvreplay.compare.comparison import Comparison
from kvreplay.compare.statistics import holm
from kvreplay.results import Run

SIGNIFICANT = 0.05
METRICS = ("output_error", "attention_recall", "skill")
# Where it is published, the better policy, and the other one.
ORDERS = (
    ("ChunkKV", "h2o", "streaming-llm"),
    ("ChunkKV", "snapkv", "h2o"),
    ("ChunkKV", "pyramid-kv", "snapkv"),
    ("ChunkKV", "chunkkv", "snapkv"),
    ("ChunkKV", "chunkkv", "pyramid-kv"),
    ("DynamicKV", "dynamickv", "snapkv"),
    ("DynamicKV", "dynamickv", "pyramid-kv"),
    ("SCA", "sca", "h2o"),
    ("SCA", "sca", "streaming-llm"),
    ("SCA", "streaming-llm", "strided"),
    ("Ada-KV", "ada-kv", "snapkv"),
    ("LAVa", "lava", "ada-kv"),
    ("TOVA", "tova", "h2o"),
    ("VATP", "vatp", "h2o"),
)


def line(run: Run, metric: str, better: str, worse: str) -> dict[str, float]:
    """The difference of `better` less `worse`, paired by trace, and the sign that it has by the published order."""
    label, baseline = (plain_label(run, policy) for policy in (better, worse))
    lines = Comparison.of([run], baseline, [label], metrics=[metric]).lines.set_index("policy").loc[label]
    sign = 1 if lines["better"] == "higher" else -1
    return dict(lines[["difference", "difference_low", "difference_high", "p", "pairs"]]) | {"sign": sign}


def plain_label(run: Run, policy: str) -> str:
    """The label of the policy with its default values: of the variants of one name the one replayed first."""
    cells = run.cells
    return cells["label"][(cells["policy"] == policy) & (cells["role"] == "asked")].iloc[0]


def verdict(one: pd.Series) -> str:
    if not one["p_all"] < SIGNIFICANT:
        return "not resolved"
    return "remains" if one["difference"] * one["sign"] > 0 else "reversed"


def main(own: Path, equal: Path) -> None:
    runs = {"own": Run(own), "equal": Run(equal)}
    found = pd.DataFrame([
        {"source": source, "better": better, "worse": worse, "run": name, "metric": metric,
         **line(run, metric, better, worse)}
        for source, better, worse in ORDERS for name, run in runs.items() for metric in METRICS
    ])  # fmt: skip
    found["p_all"] = holm(found["p"].to_numpy(float))
    found["verdict"] = found.apply(verdict, axis=1)
    print(found.to_string())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
