"""The headline table: the columns, texts, marks and lines of the table that `kvreplay replay` prints, and columns of
`kvreplay live`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvreplay.results import TraceFacts
from kvreplay.skill import SKILL

Metric = tuple[str, str]  # name, variant


# Units from the largest: how many make one, and the name. A drawing takes the first of which its largest value has one.
Units = tuple[tuple[float, str], ...]
SECONDS: Units = ((1, "s"), (1e3, "ms"), (1e6, "us"))
TOKENS: Units = ((1, "tokens"),)
BYTES: Units = ((2**-30, "GiB"), (2**-20, "MiB"), (2**-10, "KiB"))


def kibibytes(count: float) -> str:
    """The memory of kept tokens in KiB."""
    return f"{count / 1024:.1f}"


def duration(seconds: float) -> str:
    """A time in the largest unit of which it has at least 1."""
    count, unit = next((one for one in SECONDS if seconds >= 1 / one[0]), SECONDS[-1])
    digits = {"s": 2, "ms": 1, "us": 0}[unit]
    return f"{seconds * count:.{digits}f} {unit}"


def titles() -> dict[Metric, str]:
    """The titles of the table of `kvreplay show`; without the engine, none."""
    try:
        from kvreplay import _engine
    except ImportError:
        return {}
    return {(name, variant): title for title, name, variant in _engine.titles()}


@dataclass(frozen=True)
class Column:
    metric: Metric
    meaning: str
    write: Callable[[float], str] = "{:.3f}".format
    units: Units = ()  # none: a share, a cosine or a distance

    @property
    def title(self) -> str:
        """The title in tables, or the metric's name if it has none."""
        return titles().get(self.metric, ":".join(filter(None, self.metric)))

    def best(self, better: dict[str, str]) -> int:
        """1: the largest value is the best; -1: the smallest; 0: there is no best value. `better` as `Run.better`."""
        return {"higher": 1, "lower": -1}.get(better.get(self.metric[0], ""), 0)


TOKEN_COUNT = "{:.1f}".format
KEPT = ("kept_tokens", "")
MEMORY = ("kv_bytes", "")
SELECT = ("select_seconds", "")
POOLED, PER_HEAD = ("output_error", "pooled"), ("output_error", "")
SKILL_METRIC = (SKILL["name"], "")
SKILL_MEANING = "0 = random, 1 = best"
COLUMNS = (
    Column(KEPT, "tokens of the prompt kept, mean over layers and heads", TOKEN_COUNT, TOKENS),
    Column(
        ("held_tokens", ""), "resident tokens at an evaluation query, mean over layers and heads", TOKEN_COUNT, TOKENS
    ),
    Column(MEMORY, "memory of the kept keys and values, all layers", kibibytes, BYTES),
    Column(("attention_recall", ""), "share of the attention that falls on kept tokens"),
    Column(SKILL_METRIC, f"recall between random twin and oracle, at the same token counts: {SKILL_MEANING}"),
    Column(("attention_cosine", ""), "cosine of the attention before and after"),
    Column(("attention_l1", ""), "L1 distance of the attention before and after"),
    Column(("output_cosine", ""), "cosine of the attention output before and after"),
    Column(POOLED, "relative error of the attention output, pooled over the heads and queries of a layer"),
    Column(PER_HEAD, "relative error of the attention output, mean over heads and queries"),
    Column(("kv_l1_loss", ""), "share of the L1 norm of keys and values evicted or changed"),
    Column(("jaccard_adjacent", "mean"), "Jaccard similarity of the sets of adjacent layers"),
    Column(("span_recall", "needle.mean"), "share of the needle's tokens kept"),
    Column(("span_recall", "answer.mean"), "share of the answer's tokens kept"),
    Column(("span_recall", "question.mean"), "share of the question's tokens kept"),
    Column(SELECT, "time to select the tokens, all layers", duration, SECONDS),
    Column(("kld", ""), "KL divergence of the live model from its full cache, in nats"),
    Column(("same_top_p", ""), "share of positions with the most probable token of the full cache"),
    Column(("nll_increase", ""), "increase of the negative log-likelihood of the true next token, in nats"),
    Column(("contains", ""), "share of the reference strings that the generated text contains, as in RULER"),
)


@dataclass(frozen=True)
class Line:
    """One cell of one trace that has not failed. `own_memory`: it ignores the budget. `fails_twin`: its recall
    is at most that of its random twin."""

    label: str
    role: str
    heads: str
    values: dict[Metric, float]
    own_memory: bool = False
    fails_twin: bool = False
    half_widths: dict[Metric, float] = field(default_factory=dict)  # of 95 % intervals of estimates

    @property
    def compared(self) -> bool:
        """Whether it is compared with others: no control, and at equal memory."""
        return self.role != "control" and not self.own_memory

    @property
    def may_be_best(self) -> bool:
        """Whether it may be marked best."""
        return self.compared and not self.fails_twin

    def heads_shown(self, trace: TraceFacts) -> str:
        """The granularity; with sets of query heads also the factor of memory, the query heads for each KV head."""
        return f"query {trace.query_heads // trace.kv_heads}x" if self.heads == "query" else self.heads


def columns_of(lines: Sequence[Line]) -> list[Column]:
    """The columns for which some line of a trace has a value. Memory is omitted if a kept token takes the same number
    of bytes in every line. Of the two output errors, the pooled one is shown."""
    known = [line.values for line in lines if MEMORY in line.values and line.values.get(KEPT)]
    of_token = [values[MEMORY] / values[KEPT] for values in known]
    same = not of_token or max(of_token) <= min(of_token) * (1 + 1e-9)
    shown = [column for column in COLUMNS if any(column.metric in line.values for line in lines)]
    left_out = {MEMORY} if same else set()
    if any(column.metric == POOLED for column in shown):
        left_out.add(PER_HEAD)
    return [column for column in shown if column.metric not in left_out]


def best_of(column: Column, lines: Sequence[Line], better: dict[str, str]) -> float | None:
    """The best value among lines that may be marked best, if two or more lines are compared and do not look equal."""
    direction = column.best(better)
    compared = [line for line in lines if line.compared and column.metric in line.values]
    values = [line.values[column.metric] for line in compared if line.may_be_best]
    if direction == 0 or not values or len({column.write(line.values[column.metric]) for line in compared}) < 2:
        return None
    return max(values) if direction > 0 else min(values)


def texts(columns: Sequence[Column], lines: Sequence[Line], better: dict[str, str]) -> list[list[list]]:
    """For each line of one budget and each column: value (None: undefined), text, whether it is the best."""
    best = [best_of(column, lines, better) for column in columns]

    def texts_of(line: Line, column: Column, top: float | None) -> list:
        value = line.values.get(column.metric)
        if value is None:
            return [None, "-", False]
        half_width = line.half_widths.get(column.metric)
        interval = "" if half_width is None else f" ± {column.write(half_width)}"
        return [
            value,
            column.write(value) + interval,
            line.may_be_best and top is not None and column.write(value) == column.write(top),
        ]

    return [[texts_of(line, *of_column) for of_column in zip(columns, best, strict=True)] for line in lines]


def trace_line(trace: TraceFacts, treated: int) -> str:
    """The trace in one line."""
    left_out = f" ({trace.layers - treated} not compressed)" if treated < trace.layers else ""
    first = f" (first {trace.boundary} compressed)" if trace.boundary < trace.prompt else ""
    pieces = [
        f"prompt {trace.prompt}{first} + continuation {trace.tokens - trace.prompt} tokens",
        f"{treated} layers{left_out}",
        f"{trace.query_heads} query / {trace.kv_heads} KV heads",
        trace.dtype,
        "synthetic" if trace.synthetic else "",
        f"ESTIMATE from {trace.sample}, ± half width of the 95 % interval" if trace.sample else "",
    ]
    return "   ".join(filter(None, pieces))


def budget_line(budget: str, tokens: Sequence[int], treated: int, boundary: int) -> str:
    """A budget in tokens, at most the whole prompt, also over all layers if its lines have the same number."""
    used = [min(count, boundary) for count in tokens]
    share = any(letter in budget for letter in ".%eE")
    meaning = f"{budget} = " if budget.endswith("B") else f"{budget} of {boundary} = " if share else ""
    if min(tokens) > boundary:
        meaning = f"{budget}, more than the prompt: all "
    if min(used) < max(used):
        return f"{meaning}{min(used)} to {max(used)} tokens per layer and head on average, protected tokens included"
    slots = f"{used[0] * treated:,}".replace(",", " ")
    mean = f"{used[0]} tokens per layer and head on average"
    return f"{meaning}{mean} ({slots} tokens per head over all layers), protected tokens included"


def own_memory_line(lines: Sequence[Line]) -> str:
    """A line with the policies that ignore the budget; empty if there are none."""
    names = [line.label for line in lines if line.own_memory and line.role != "control"]
    return f"not at equal memory, so never marked *: {', '.join(names)}" if names else ""


def skill_line(columns: Sequence[Column]) -> str:
    """The definition of skill, if a column has it."""
    shown = any(column.metric == SKILL_METRIC for column in columns)
    return (
        f"skill = (recall - random twin) / (oracle - random twin), at the same token counts: {SKILL_MEANING}"
        if shown
        else ""
    )
