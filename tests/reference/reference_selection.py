"""What a policy is given, what it answers, and how another answer to the same question may differ.

A policy that decides many times is followed: each decision is made again from the state in which the other
implementation was, so that one exchange of two nearly equal tokens does not excuse everything after it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from reference import Trace, budget_tokens, protection, top

TOLERANCE = 1e-5  # two sets may differ in positions whose score lies this near to the score at the cut, relative to it


@dataclass(frozen=True)
class Policy:
    """A policy by name with the parameters that are given, as the command line spells them."""

    name: str
    given: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Policy:
        """name[:key=value{,key=value}]; commas inside parentheses do not separate."""
        name, _, rest = text.partition(":")
        return cls(name, tuple(tuple(piece.split("=", 1)) for piece in pieces(rest)))  # type: ignore[misc]


def pieces(text: str) -> list[str]:
    """What stands between the commas outside parentheses."""
    result, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            result.append("")
        else:
            result[-1] += character
    return [piece for piece in result if piece]


def call_of(value: str) -> tuple[str, list[str]]:
    """'threshold(8,4)' as its name and its arguments."""
    name, _, arguments = value.partition("(")
    return name, pieces(arguments.removesuffix(")"))


def unwrapped(text: str) -> str:
    """A policy without the parentheses that let it stand inside another's parameters."""
    return text.removeprefix("(").removesuffix(")") if text.startswith("(") else text


class Verdict(enum.IntEnum):
    """How another decision compares with ours."""

    EQUAL = 0
    NEAR = 1  # as good within the tolerance
    WRONG = 2


@dataclass
class Decision:
    """One choice that a policy makes at once; `verdict` judges another selection."""

    where: str
    verdict: Callable[[Selection], Verdict]
    places: list[tuple[int, int]] = field(default_factory=list)  # (treated layer, row)


@dataclass(eq=False)
class Selection:
    """Kept prompt positions `rows[treated layer][row]` at the end of the prompt, ascending, and all else that follows.

    Without `evicted_at` and `seen`, query t sees the kept tokens, every later token up to itself, and itself.
    """

    heads: str
    rows: list[list[np.ndarray]]
    protected: list[np.ndarray]  # by treated layer: what is kept without a score
    source: list[int]  # treated layer whose selection a treated layer uses
    decisions: list[Decision] = field(default_factory=list)
    layer_heads: list[str] | None = None  # by treated layer, where layers differ; their rows are repeated to `heads`
    evicted_at: np.ndarray | None = None  # [L,H,T]: the query that saw the token last, -1: never evicted
    seen: Callable[[np.ndarray], np.ndarray] | None = None  # query positions [E] to the tokens that they see, [E,T]
    read: Callable[[int, np.ndarray], np.ndarray] | None = None  # treated layer, [E] to what query heads read [Hq,E,T]
    dense_layers: int = 0  # first treated layers in which all queries read everything, whatever `read` is
    weight: Callable[[int, np.ndarray], np.ndarray] | None = None  # the same to factors of e^z [Hq,E,T], by default 1
    moved: bool = False  # residents sit at their slots, by ascending position unless `order` says otherwise
    order: list[list[np.ndarray]] | None = None  # kept prompt positions by slot
    stored: Callable[[int], tuple[np.ndarray, np.ndarray]] | None = None  # stored layer to changed K, V
    # stored layer, [E] to the V [Hkv,E,T,d] that each query reads, where evictions go on changing them
    evolving: Callable[[int, np.ndarray], np.ndarray] | None = None
    stored_bytes: Callable[[int], float] | None = None  # bytes of a stored layer's changed prompt

    def granularity(self, layer: int) -> str:
        """Of a treated layer."""
        return self.layer_heads[layer] if self.layer_heads else self.heads


@dataclass(frozen=True, eq=False)
class Case:
    """What a policy is asked: a trace, all its parameters, a budget; and whose states it follows, if any's."""

    trace: Trace
    parameters: dict[str, str]
    literal: str
    choice: str = "continuation"
    follow: Selection | None = None

    @property
    def budget(self) -> int:
        """B."""
        return budget_tokens(self.literal, self.trace.prompt)

    @property
    def heads(self) -> str:
        return self.parameters.get("heads", "kv")

    @property
    def row_count(self) -> int:
        """H."""
        return row_count(self.trace, self.heads)

    def number(self, name: str) -> int:
        return int(self.parameters[name])

    @property
    def sinks(self) -> int:
        """Protected first tokens of a policy that has none of its own."""
        return int(self.parameters.get("sinks", "0"))

    @property
    def window_end(self) -> int:
        """Position behind the observation window."""
        at_question = self.parameters.get("window_at") == "question"
        return self.trace.prompt - (self.trace.tokens_behind_question if at_question else 0)

    def guarded(self, sinks: int, recent: int, budget: int | None = None) -> tuple[int, int]:
        """Protected first and last tokens within a budget, B by default, of a policy whose own are these.

        protect=(sinks=s,recent=r) replaces them; with window_at=question tokens behind the window are protected too.
        """
        most = self.budget if budget is None else budget
        sinks, recent = self.protect(most) or (sinks, recent + self.trace.prompt - self.window_end)
        sinks = min(sinks, most)
        return sinks, min(recent, most - sinks)

    def protect(self, budget: int) -> tuple[int, int] | None:
        """The numbers of tokens that replace a policy's own protected ones, if they are given."""
        if "protect" not in self.parameters:
            return None
        given = dict(piece.split("=") for piece in pieces(unwrapped(self.parameters["protect"])))
        return int(given.get("sinks", "0")), tokens_of(given.get("recent", "0"), budget)

    def fixed(self, sinks: int, recent: int) -> np.ndarray:
        """Their positions."""
        return protection(*self.guarded(sinks, recent), self.budget, self.trace.prompt)

    def selection(self, rows: list, fixed: np.ndarray, decisions: list[Decision], **others: object) -> Selection:
        """The answer of a policy that keeps `fixed` in every layer, each layer with a selection of its own."""
        values = {"source": list(range(len(rows))), **others}
        return Selection(self.heads, rows, [fixed] * len(rows), decisions=decisions, **values)  # type: ignore[arg-type]


def row_count(trace: Trace, heads: str) -> int:
    """H."""
    return {"kv": trace.kv_heads, "query": trace.query_heads, "layer": 1}[heads]


def tokens_of(value: str, whole: int) -> int:
    """A number of tokens; with a point or % a share of `whole`, rounded down."""
    if value.endswith("%"):
        return int(Fraction(value[:-1]) / 100 * whole)
    return int(Fraction(value) * whole) if "." in value else int(value)


def sets_agree(ours: np.ndarray, theirs: np.ndarray, scores: np.ndarray, cut: float) -> bool:
    """Whether two sets of equally many positions differ only where the score is as good as the one at the cut.

    `scores` [n] is indexed by position. Exactly equal scores are no excuse: of these the lower positions must be kept.
    """
    if len(ours) != len(theirs):
        return False
    different = np.setxor1d(ours, theirs)
    if not (np.abs(scores[different] - cut) <= TOLERANCE * abs(cut)).all():
        return False
    for value in np.unique(scores[different]):
        kept = np.isin(np.flatnonzero(scores == value), theirs)
        if (np.diff(kept.astype(int)) > 0).any():
            return False
    return True


def decided(
    places: list[tuple[int, int]], ours: list[np.ndarray], agrees: Callable[[list[np.ndarray]], bool]
) -> Decision:
    """A choice of whole rows of the selection, at places (treated layer, row)."""

    def verdict(theirs: Selection) -> Verdict:
        rows = [theirs.rows[layer][row] for layer, row in places]
        if all(np.array_equal(one, other) for one, other in zip(ours, rows, strict=True)):
            return Verdict.EQUAL
        return Verdict.NEAR if agrees(rows) else Verdict.WRONG

    layer, row = places[0]
    return Decision(f"treated layer {layer} row {row}: expected {ours[0].tolist()}", verdict, places)


def exactly(place: tuple[int, int], ours: np.ndarray) -> Decision:
    """No other set will do."""
    return decided([place], [ours], lambda theirs: False)


def found(where: str, verdict: Verdict) -> Decision:
    """A choice of the followed selection, judged already."""
    return Decision(where, lambda theirs: verdict)


def ranked(
    places: list[tuple[int, int]], scores: np.ndarray, count: int, fixed: np.ndarray
) -> tuple[list[np.ndarray], Decision]:
    """The `count` best of the flat order of `scores` [len(places), n], finite for candidates only, beside `fixed`."""
    width = scores.shape[1]
    flat = scores.ravel()
    kept = top(flat, count, np.flatnonzero(np.isfinite(flat)))
    cut = flat[kept].min() if len(kept) else np.nan
    rows = [np.union1d(fixed, kept[kept // width == row] % width) for row in range(len(places))]

    def agrees(theirs: list[np.ndarray]) -> bool:
        if not all(np.isin(fixed, row).all() for row in theirs):
            return False
        chosen = [np.setdiff1d(row, fixed, assume_unique=True) + width * index for index, row in enumerate(theirs)]
        return sets_agree(kept, np.concatenate(chosen), flat, cut)

    return rows, decided(places, rows, agrees)


def best_beside(
    case: Case, fixed: np.ndarray, scores: Callable[[int], np.ndarray], counts: list[list[int]] | None = None
) -> Selection:
    """`fixed`, and beside it the best others by scores(stored layer) [H,P]: counts [L][H] of them, or B in all."""
    candidates = np.setdiff1d(np.arange(case.trace.prompt), fixed)
    rows: list[list[np.ndarray]] = []
    decisions = []
    for index, layer in enumerate(case.trace.treated):
        rows.append([])
        for row, of_row in enumerate(scores(layer)):
            count = counts[index][row] if counts else case.budget - len(fixed)
            [kept], decision = ranked([(index, row)], only(of_row, candidates)[None], count, fixed)
            rows[-1].append(kept)
            decisions.append(decision)
    return case.selection(rows, fixed, decisions)


def ranked_once(scores: np.ndarray, count: int, fixed: np.ndarray, theirs: np.ndarray | None) -> tuple:
    """The `count` best of `scores` [n] beside `fixed`, and what `theirs` is beside them."""
    [ours], decision = ranked([(0, 0)], scores[None], count, fixed)
    if theirs is None:
        return ours, Verdict.EQUAL
    nothing = np.array([], dtype=int)
    return ours, decision.verdict(Selection("layer", [[theirs]], [nothing], [0]))


def only(scores: np.ndarray, candidates: Iterable[int] | np.ndarray) -> np.ndarray:
    """Scores [..., n] with everything but the candidates at minus infinity."""
    masked = np.full(scores.shape, -np.inf)
    masked[..., candidates] = scores[..., candidates]
    return masked


def uniform(case: Case, kept: Callable[[int, int], np.ndarray], protected: np.ndarray) -> Selection:
    """A set per stored layer and row that nothing near a cut can change."""
    rows = [[kept(layer, row) for row in range(case.row_count)] for layer in case.trace.treated]
    decisions = [exactly((index, row), one) for index, layer in enumerate(rows) for row, one in enumerate(layer)]
    return case.selection(rows, protected, decisions)
