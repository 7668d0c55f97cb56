"""The gap in mean attention recall between a policy and the best kept sets, as a sum of terms.

R0 is the recall of the policy. R1 is the recall of the best sets with the policy's structure and token counts, and R2
with its counts alone. In R3 the counts may change among the heads of a layer, in R4 among all layers as well. Each
choice contains the one before it. So no term is negative, except for the rounding of different orders of summation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvreplay import _engine, engine
from kvreplay.errors import Error, Refusal
from kvreplay.tables import aligned, records

if TYPE_CHECKING:
    import pandas as pd

FREE = ("chunks", "tokens", "heads", "layers")  # what R1 ... R4 may choose
TERMS = ("score", "structure", "head", "layer")  # R1 - R0 ... R4 - R3
NUMBERS = ["recall", *TERMS, "bound"]
COLUMNS = ["trace", "budget", "budget_tokens", "policy", "heads", *NUMBERS]
ROUNDING = 1e-6  # of a recall: what the program's own check of the oracle allows
OWN = ("metrics", "detail", "seed", "output")  # options of a replay that are no choice here


def regret(
    traces: engine.Traces | Iterable[engine.Traces],
    policies: Any,
    budgets: float | str | Iterable[float | str],
    *,
    progress: bool | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Splits the gap in attention recall between policies and the best kept sets into terms.

    Returns one row for each budget, policy and trace: `recall` R0, the terms `score`, `structure`, `head` and `layer`,
    and `bound` R4, the sum of the recall and the terms. A failed cell is omitted, with a warning. Values that
    depend on a failed bound are NaN.

    The arguments are those of `kv.replay` without metrics, detail, seed and output. Raises Error for policies without
    such bounds: budget-free policies, dynamic sets, and layers that differ in granularity.
    """
    for option in OWN:
        if option in options:
            raise Error("regret", "unknown option", "seed=N of a policy" if option == "seed" else "", option,
                        Refusal.USAGE)  # fmt: skip
    texts = [one for text in engine.policy_texts(policies) for one in _engine.split_policies(text)]
    meant: dict[str, tuple[str, str]] = {}
    for text in texts:
        policy, canonical = _engine.label(text), _engine.canonical(text)
        if meant.setdefault(policy, canonical) != canonical:  # a bound could not say whose counts it takes
            raise Error(policy, "two policies of this name, from different files", "different names", "",
                        Refusal.USAGE)  # fmt: skip
    family = {policy: [policy, *(bound_of(policy, free) for free in FREE)] for policy in meant}
    bounds = [bound for of_policy in family.values() for bound in of_policy[1:]]
    run = engine.replay(traces, [*texts, *bounds], budgets, metrics="attention_recall", progress=progress, **options)
    rows = run.overall[(run.overall["metric"] == "attention_recall") & (run.overall["variant"] == "")]
    rows = rows.set_index(["trace", "budget", "policy", "params"])
    found = []
    for budget in rows.index.unique("budget"):
        for policy, of_policy in family.items():
            for trace in rows.index.unique("trace"):
                cells = [(trace, budget, *_engine.canonical(one)) for one in of_policy]
                if cells[0] not in rows.index:
                    continue  # failed, and warned of
                recalls = rows["value"].reindex(cells).to_numpy()
                own = rows.loc[cells[0]]
                found.append((trace, budget, own["budget_tokens"], policy, own["heads"], recalls[0],
                              *terms(f"{policy} at {budget} of {trace}", recalls), recalls[-1]))  # fmt: skip
    if not found:
        why = next((cell["error"] for cell in run.failed if "error" in cell), "none")
        raise Error("regret", "every policy failed", "a policy without error", why)
    import pandas as pd

    return pd.DataFrame(found, columns=COLUMNS).astype({"budget_tokens": int})


def bound_of(policy: str, free: str) -> str:
    """The oracle with the policy's token counts and the freedom `free` (of FREE), in its normal form."""
    return _engine.label(f"oracle:counts=({policy}),free={free}")


def terms(place: str, recalls: np.ndarray) -> np.ndarray:
    """Differences of R0 ... R4. Raises Error where one is negative beyond rounding."""
    found = np.diff(recalls)
    for i in np.flatnonzero(found < -ROUNDING):
        raise Error(place, f"{TERMS[i]} is negative", f"a bound of {recalls[i]:.9f} or more", f"{recalls[i + 1]:.9f}",
                    Refusal.INTERNAL)  # fmt: skip
    return found


def means(found: pd.DataFrame) -> pd.DataFrame:
    """One row a budget and policy, in the order of the command line: means over the traces on which all numbers are
    defined, and the number of these traces. Where no trace has a bound over layers, recall and the terms within
    layers are means over the traces that have these."""
    key = ["budget", "policy", "heads"]
    within_layers = found.dropna(subset=["recall", *TERMS[:-1]])
    has_bound = within_layers["bound"].notna()
    any_has_bound = has_bound.groupby([within_layers[one] for one in key]).transform("any")
    groups = within_layers[has_bound | ~any_has_bound].groupby(key, sort=False)
    lines = groups[NUMBERS].mean().assign(traces=groups["trace"].nunique())
    import pandas as pd

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
    return "-" if np.isnan(value) else f"{value:z.4f}"
