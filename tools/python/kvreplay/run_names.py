"""Names of a run's policies, budgets, traces and metrics, as on command lines."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvreplay.errors import Error, Refusal
from kvreplay.nearest import nearest
from kvreplay.parameters import of_policy, split_outside_parentheses

if TYPE_CHECKING:
    import pandas as pd


def pick(flag: str, what: str, asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """`asked` in the order of `known`; a name that is not known is refused with the nearest."""
    for name in asked:
        if name not in known:
            raise Error(flag, f"unknown {what}", nearest(name, known), name, Refusal.USAGE)
    return [name for name in known if name in asked]


def pick_metrics(asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """`pick` of metrics NAME[:VARIANT], which titles of the table, such as recall, stand for as well."""
    if not set(asked) <= set(known):
        with contextlib.suppress(Error):  # figures work without the engine
            from kvreplay.engine import _engine

            asked = [name if name in known else _engine.metric_of_title(name) for name in asked]
    return pick("--metric", "metric", asked, known)


def chosen_labels(flag: str, cells: pd.DataFrame, asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """The labels that `asked` names, in its order: as labels of `known`, or as replay writes policies.

    A name takes all labels of that policy, in the order of `known`; name:key=value,… takes those with these values.
    """
    policies = cells[["label", "policy", "params"]].drop_duplicates()
    chosen: list[str] = []
    for one in asked:
        labels = set(policies["label"][of_policy(policies, one)]) or set(pick(flag, "policy", [one], known))
        chosen += [label for label in known if label in labels]
    return list(dict.fromkeys(chosen))


def metric_names(rows: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Metric and variant by NAME[:VARIANT], of the rows of cells, sorted."""
    pairs = rows[rows["role"] != "trace"][["metric", "variant"]].drop_duplicates().itertuples(index=False, name=None)
    return dict(sorted((name + (f":{variant}" if variant else ""), (name, variant)) for name, variant in pairs))


def split_policies(values: Sequence[str]) -> list[str]:
    """Policies of comma lists: a piece with `=` before any `:` or `(` belongs to the policy before it."""
    names: list[str] = []
    for value in values:
        for i, piece in enumerate(split_outside_parentheses(value)):
            head = piece.split(":")[0].split("(")[0]
            if i and "=" in head:
                names[-1] += "," + piece
            else:
                names.append(piece)
    return names
