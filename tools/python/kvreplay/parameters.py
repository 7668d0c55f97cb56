"""Policies and parameters as replay writes them: `name:key=value,…`, and `key=value,…` of a cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def split_outside_parentheses(line: str) -> list[str]:
    """The pieces between commas that no parenthesis encloses; none for an empty line."""
    pieces, depth = [""], 0
    for letter in line:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces if line else []


def parameters(line: str) -> dict[str, str]:
    """Names and values of a canonical key=value list."""
    return dict(piece.partition("=")[::2] for piece in split_outside_parentheses(line))


def of_policy(cells: pd.DataFrame, policy: str) -> pd.Series:
    """Which rows are of a policy as replay writes it: a name means all of that name, name:key=value,… those with these
    values."""
    name, _, values = policy.partition(":")
    if not (cells["policy"] == name).any():  # in another spelling, which the engine reads
        from kvreplay.engine import _engine

        name = _engine.policy_name(name)
    wanted = parameters(values).items()
    return (cells["policy"] == name) & cells["params"].map(lambda line: wanted <= parameters(line).items()).astype(bool)
