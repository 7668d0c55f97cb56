"""Prints the metrics of a run, one row for each policy and budget: python docs/policy_table.py RUN."""

import math
import sys
from pathlib import Path

import pandas as pd

from kvreplay.results import Run
from kvreplay.skill import TWIN

# heading: metric of results.csv, divisor, digits
COLUMNS = {
    "kept": ("kept_tokens", 1, 1),
    "held": ("held_tokens", 1, 1),
    "peak": ("resident_tokens:peak", 1, 0),
    "KiB": ("kv_bytes", 1024, 0),
    "recall": ("attention_recall", 1, 3),
    "skill": ("skill", 1, 2),
    "att.cos": ("attention_cosine", 1, 3),
    "att.l1": ("attention_l1", 1, 3),
    "out.cos": ("output_cosine", 1, 3),
    "out.err": ("output_error:pooled", 1, 3),
    "kv.l1": ("kv_l1_loss", 1, 3),
    "jaccard": ("jaccard_adjacent:mean", 1, 3),
    "needle": ("span_recall:needle.mean", 1, 3),
    "answer": ("span_recall:answer.mean", 1, 3),
    "question": ("span_recall:question.mean", 1, 3),
}


def over_layers(run: Run) -> pd.DataFrame:
    """Values over all layers and heads, with the column `name`: METRIC or METRIC:VARIANT."""
    rows = run.overall
    variant = rows["variant"].where(rows["variant"] == "", ":" + rows["variant"])
    return rows.assign(name=rows["metric"] + variant)


def text(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def main(folder: Path) -> None:
    rows = over_layers(Run(folder))
    rows = rows[rows["policy"] != TWIN]
    of_trace = rows[rows["role"] == "trace"].set_index("name")["value"]
    print(f"redundancy of the trace: keys {of_trace['redundancy_key']:.3f}, values {of_trace['redundancy_value']:.3f}")

    cells = rows[rows["role"] != "trace"]
    wide = cells.pivot_table("value", ["budget_tokens", "budget", "label", "heads"], "name")
    for (_, budget), group in wide.groupby(level=["budget_tokens", "budget"]):
        print(f"\nbudget {budget}")
        shown = pd.DataFrame({
            heading: (group[metric] / divisor).map(lambda value, digits=digits: text(value, digits))
            for heading, (metric, divisor, digits) in COLUMNS.items()
        })  # fmt: skip
        names = shown.index.get_level_values("label")
        width = max(map(len, names))
        shown.insert(0, "heads", shown.index.get_level_values("heads"))
        shown.insert(0, f"{'policy':<{width}}", names.str.ljust(width))
        print(shown.to_string(index=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
