"""The search space: parameters of a policy and of its parts, each with its possible values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvreplay import _engine, python_policies
from kvreplay.errors import Error, Refusal
from kvreplay.parameters import parameters, split_list

WIDEST = 4096  # of a declared range that is searched when nothing is said
NOT_UNASKED = ("heads", "agg", "grow")  # what changes how much a policy holds, or what its sets are
REDRAWN = 20  # draws for one candidate, before a small space counts as used up


@dataclass(frozen=True)
class Words:
    """A|B|C, with equal probability."""

    every: tuple[str, ...]

    @property
    def count(self) -> float:
        return len(self.every)

    def draw(self, generator: np.random.Generator) -> str:
        return self.every[generator.integers(len(self.every))]

    def __str__(self) -> str:
        return "|".join(self.every)


@dataclass(frozen=True)
class Whole:
    """LOW..HIGH in integers, on a logarithmic scale if LOW is above 0, since ratios of sizes matter."""

    low: int
    high: int

    @property
    def count(self) -> float:
        return self.high - self.low + 1

    @property
    def every(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.low, self.high + 1)))

    def draw(self, generator: np.random.Generator) -> str:
        return str(min(self.high, math.floor(drawn(self.low, self.high + 1, generator))))

    def __str__(self) -> str:
        return f"{self.low}..{self.high}"


@dataclass(frozen=True)
class Real:
    """LOW..HIGH with three digits, on a logarithmic scale if LOW is above 0."""

    low: float
    high: float
    count = math.inf
    every = ()

    def draw(self, generator: np.random.Generator) -> str:
        return repr(min(max(float(f"{drawn(self.low, self.high, generator):.3g}"), self.low), self.high))

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}"


# The values of one parameter: `count` of them, `every` one where that is finite.
Domain = Words | Whole | Real


def drawn(low: float, high: float, generator: np.random.Generator) -> float:
    if low > 0:
        return math.exp(generator.uniform(math.log(low), math.log(high)))
    return generator.uniform(low, high)


def domain(where: str, text: str) -> Domain:
    """The domain of a text LOW..HIGH or A|B|C. Errors name `where`."""
    if ".." not in text:
        words = tuple(text.split("|"))
        if not all(words) or len(set(words)) < len(words):
            raise Error(where, "words", "different values, as in A|B|C", text or "nothing", Refusal.USAGE)
        return Words(words)
    low, _, high = text.partition("..")
    for kind, number in ((Whole, int), (Real, float)):
        try:
            found = kind(number(low), number(high))
        except ValueError:
            continue
        try:
            in_order = -math.inf < float(found.low) < float(found.high) < math.inf
        except OverflowError:  # a whole number beyond any float
            in_order = False
        if not in_order:
            raise Error(where, "range", "LOW..HIGH with LOW below HIGH", text, Refusal.USAGE)
        return found
    raise Error(where, "range", "two numbers, as in 8..64", text, Refusal.USAGE)


def asked_space(texts: Sequence[str]) -> dict[str, Domain]:
    """The domains of --search: NAME=DOMAIN,…"""
    space: dict[str, Domain] = {}
    for piece in [piece for text in texts for piece in split_list(text)]:
        name, equals, values = piece.partition("=")
        if not name or not equals:
            raise Error("--search", "not an assignment", "NAME=LOW..HIGH or NAME=A|B|C", piece or "nothing",
                        Refusal.USAGE)  # fmt: skip
        if name in space:
            raise Error("--search", "given more than once", "one range", name, Refusal.USAGE)
        space[name] = domain(f"--search {name}", values)
    return space


def declared_space(policy: str) -> dict[str, Domain]:
    """Every parameter of the policy and its parts whose declared range is short and bounded: choices, and numbers."""
    declared = _engine.parameters(policy)
    space: dict[str, Domain] = {}
    for name, _, span, seed in declared:
        if seed or name.rpartition(".")[2] in NOT_UNASKED:
            continue
        if re.fullmatch(r"[\w-]+( \| [\w-]+)+", span):
            space[name] = Words(tuple(span.split(" | ")))
        elif re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?\.\.-?[\d.]+(e[-+]?\d+)?", span):
            found = domain(name, span)
            if found.high - found.low <= WIDEST:
                space[name] = found
    if not space:
        named = ", ".join(name for name, *_ in declared)
        raise Error("--search", f"no parameter of {policy} has choices or a range up to {WIDEST} wide",
                    f"NAME=LOW..HIGH or NAME=A|B|C of {named}" if named else "a policy with parameters", "",
                    Refusal.USAGE)  # fmt: skip
    return space


@dataclass(frozen=True)
class Candidates:
    policies: list[str]  # the start first, all different
    every: bool  # whether the space holds no others
    refused: list[Error]  # why draws were left out


def candidates(start: str, space: dict[str, Domain], trials: int, seed: int) -> Candidates:
    """The start and up to `trials` others: the whole space if it is small enough, else random draws. Raises Error if
    every other candidate is invalid."""
    generator = np.random.default_rng(seed)
    found, refused = {_engine.canonical(start): start}, []
    few = math.prod(one.count for one in space.values()) <= trials
    if few:
        draws = itertools.product(*(one.every for one in space.values()))
    else:
        draws = ([one.draw(generator) for one in space.values()] for _ in range(REDRAWN * trials))
    for values in draws:
        try:
            policy = with_values(start, dict(zip(space, values, strict=True)))
            found.setdefault(_engine.canonical(policy), policy)
        except Error as error:
            refused.append(error)
        if len(found) > trials and not few:
            break
    if len(found) == 1 and refused:
        raise refused[0]
    return Candidates(list(found.values()), few, refused)


def with_values(policy: str, values: dict[str, str]) -> str:
    """The policy with these values, in its normal form. Another part has other parameters, so the values of a replaced
    part are removed. Raises Error if the result is not a valid policy."""
    for place in python_policies.PLACES:
        if place in values and values_of(policy).get(place, values[place]) != values[place]:
            policy = without_part(policy, place)
    name = policy[: _engine.end_of_policy_name(policy)]
    return assembled(name, values_of(policy) | values)


def without_part(policy: str, place: str) -> str:
    """The policy without the part that was put into `place`, and without the values of that part."""
    name = policy[: _engine.end_of_policy_name(policy)]
    values = values_of(policy)
    if place in values:
        own = {one for one, *_ in _engine.parameters(name)}
        of_part = {one for one, *_ in _engine.parameters(f"{name}:{place}={values[place]}")} - own
        values = {key: value for key, value in values.items() if key not in of_part}
    return assembled(name, values)


def values_of(policy: str) -> dict[str, str]:
    """The values that differ from the defaults."""
    return parameters(_engine.label(policy)[len(_engine.canonical(policy)[0]) + 1 :])


def assembled(name: str, values: dict[str, str]) -> str:
    """The policy `name` with these values, in its normal form."""
    text = python_policies.with_values(name, values)
    return name + _engine.label(text)[len(_engine.canonical(text)[0]) :]
