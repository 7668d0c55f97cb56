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


def line(run: Run, metric: str, better: str, worse: str) -> dict[str, float]:
    """The difference of `better` less `worse`, paired by trace, and the sign that it has by the published order."""
    label, baseline = (label_of(run, policy) for policy in (better, worse))
    lines = Comparison.of([run], baseline, [label], metrics=[metric]).lines.set_index("policy").loc[label]
    sign = 1 if lines["better"] == "higher" else -1
    return dict(lines[["difference", "difference_low", "difference_high", "p", "pairs"]]) | {"sign": sign}


def label_of(run: Run, policy: str) -> str:
    """What the run calls a policy that is written with the values that tell it from others."""
    asked = run.cells[run.cells["role"] == "asked"]
    (label,) = set(asked["label"][of_policy(asked, policy)])
    return label


def verdict(one: pd.Series) -> str:
    if not one["p_all"] < SIGNIFICANT:
        return "not resolved"
    return "remains" if one["difference"] * one["sign"] > 0 else "reversed"


def main(own: Path, equal: Path) -> None:
    runs = {"own": Run(own), "equal": Run(equal)}
    found = pd.DataFrame([
        {"source": source, "order": f"{better}, {worse}", "run": name, "metric": metric,
         **line(run, metric, better, worse)}
        for source, better, worse in ORDERS for name, run in runs.items() for metric in METRICS
    ])  # fmt: skip
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
        texts = wide.loc[(source, f"{better}, {worse}"), columns]
        print(f"| {source} | `{better}`, `{worse}` | " + " | ".join(texts) + " |")
    print(f"\n{found['pairs'].iloc[0]:.0f} traces; {len(found)} tests.")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
