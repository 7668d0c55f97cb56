"""Prints what the rules of engines cost policies: python docs/engines_table.py TRACE... [--budget BUDGET].

For each policy and engine the mean attention recall over traces, its difference to the policy alone at the same budget,
and the 95 % interval of the difference. Needle traces that differ in the depth alone share a prompt.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from kvreplay.compare.statistics import cluster_sums, mean_intervals
from kvreplay.results import Run

POLICIES = ("snapkv", "h2o", "knorm", "chunkkv")
ENGINES = ("openvino", "sglang", "vllm")  # trtllm evicts generated tokens, of which these traces have too few


def recall(traces: list[str], budget: str, rules: list[str], out: Path) -> pd.DataFrame:
    """[traces, policies]"""
    words = [
        "-p",
        ",".join(POLICIES),
        "-b",
        budget,
        "--metrics",
        "attention_recall",
        "--controls",
        "none",
        "-o",
        str(out),
    ]
    subprocess.run(["kvreplay", "replay", *traces, *words, *rules], check=True, capture_output=True)
    rows = Run(out).overall
    rows = rows[(rows["metric"] == "attention_recall") & (rows["variant"] == "")]
    return rows.pivot(index="trace", columns="policy", values="value")[list(POLICIES)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("traces", nargs="+")
    options.add_argument("--budget", default="0.3")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        alone = recall(asked.traces, asked.budget, [], Path(folder, "alone"))
        under = {name: recall(asked.traces, asked.budget, ["--engine", name], Path(folder, name)) for name in ENGINES}
    prompts = np.unique([re.sub(r"(needle-\d+).*", r"\1", name) for name in alone.index], return_inverse=True)[1]
    print(f"{len(alone)} traces of {prompts.max() + 1} prompts, budget {asked.budget}: attention_recall\n")
    print("| policy | alone | " + " | ".join(f"`{name}`" for name in ENGINES) + " |")
    print("| --- |" + " --- |" * (1 + len(ENGINES)))
    for policy in POLICIES:
        cells = [f"`{policy}`", f"{alone[policy].mean():.3f}"]
        for name in ENGINES:
            difference = (under[name] - alone)[policy].to_numpy()
            [low], [high] = mean_intervals(*cluster_sums(difference[:, None], prompts))
            cells.append(f"{under[name][policy].mean():.3f}: {difference.mean():+.3f} [{low:+.3f}, {high:+.3f}]")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
