"""Policies and parameters as replay writes them: `name:key=value,…`, and `key=value,…` of a cell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable


def split_list(line: str) -> list[str]:
    """The pieces between commas that no parenthesis encloses, without blanks around them; none for an empty line."""
    pieces, depth = [""], 0
    for letter in line:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece.strip(" ") for piece in pieces] if line else []


def parameters(line: str) -> dict[str, str]:
    """Names and values of a canonical key=value list."""
    return dict(piece.partition("=")[::2] for piece in split_list(line))


def of_policy(cells: Iterable[tuple[str, str]], policy: str) -> list[bool]:
    """Which of `cells`, policy and parameters of each, a text of replay names: NAME all of that name, NAME:KEY=VALUE,…
    those with these values. A preset, or a press of kvpress, is the values that it stands for."""
    cells = list(cells)
    name, _, values = policy.partition(":")
    if "preset=" in values or all(one != name for one, _ in cells):  # in another spelling, which the engine reads
        with contextlib.suppress(ImportError):  # figures work without the engine
            from kvreplay import _engine

            name, _, values = _engine.without_preset(policy).partition(":")
            name = _engine.policy_name(name)
    wanted = parameters(values).items()
    return [one == name and wanted <= parameters(line).items() for one, line in cells]
