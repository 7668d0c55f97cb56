"""The terms of `kv.regret` as people and programs read them: means over traces."""

from __future__ import annotations

import pandas as pd

from kvreplay.regret_terms import ROUNDING, TERMS
from kvreplay.tables import aligned, records

NUMBERS = ["recall", *TERMS, "bound"]


def means(found: pd.DataFrame) -> pd.DataFrame:
    """One row a budget and policy, in the order asked for: means over the traces on which all of it is defined, and how
    many these are."""
    key = ["budget", "policy", "heads"]
    defined = found.dropna(subset=NUMBERS)
    groups = defined.groupby(key, sort=False)
    lines = groups[NUMBERS].mean().assign(traces=groups["trace"].nunique())
    every = pd.MultiIndex.from_frame(found[key].drop_duplicates())
    return lines.reindex(every).astype({"traces": "Int64"}).fillna({"traces": 0}).reset_index()


def document(found: pd.DataFrame) -> dict:
    """For JSON."""
    return {
        "open_loop": True,
        "metric": "attention_recall",
        "rounding": ROUNDING,
        "means": records(means(found)),
        "traces": records(found),
    }


def table(found: pd.DataFrame) -> str:
    """One table a budget, and how to read it."""
    count = found["trace"].nunique()
    texts = [f"attention_recall, mean over {count} trace{'s' if count > 1 else ''}        OPEN LOOP"]
    for budget, lines in means(found).groupby("budget", sort=False):
        tokens = sorted(set(found["budget_tokens"][found["budget"] == budget]))
        span = f"{tokens[0]}" if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]}"
        rows = [("policy", "heads", "traces", *NUMBERS)]
        rows += [(line["policy"], line["heads"], str(line["traces"]), *(number(line[name]) for name in NUMBERS))
                 for _, line in lines.iterrows()]  # fmt: skip
        texts += ["", f"budget {budget}: {span} tokens", *aligned(rows, words=2)]
    return "\n".join([*texts, "", "bound = recall + score + structure + head + layer"])


def number(value: float) -> str:
    """A rounded 0 has no sign."""
    return "-" if pd.isna(value) else f"{value:z.4f}"
