"""Policies written in Python: a function `view -> scores`, or a class that overrides parts of a policy.

```python
import kvreplay as kv

@kv.policy
def long_keys(view, p: float = 2.0):
    "tokens with long keys"
    return view.key_norms(p)
```

H rows of the policy's granularity (KV heads, query heads, or 1 for the layer), Hq query heads, n resident tokens.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import marshal
import pickle
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import xxhash

from kvreplay.errors import Error, Refusal
from kvreplay.nearest import nearest

PLACES = ("score", "select", "allocate", "share", "schedule", "store")
TAKEN = (*PLACES, "heads", "agg", "preset")  # what a command line says of any policy
NAME = re.compile("[A-Za-z_][A-Za-z0-9_-]*")
Standard = bool | int | float | str
PLAIN = Standard | bytes | tuple | list | dict | np.ndarray | np.generic


@dataclass(frozen=True)
class Parameter:
    """One value that a user may set: its default, which determines the type, its range or choices, and its help."""

    default: Standard
    least: float | None = None
    most: float | None = None
    help: str = ""
    choices: Sequence[str] = ()
    name: str = ""


def parameter(
    default: Any, least: float | None = None, most: float | None = None, help: str = "", *, choices: Sequence[str] = ()
) -> Any:
    """The default of an argument or of a class's attribute, with its range (least to most) or its choices."""
    return Parameter(default, least, most, help, tuple(choices))


@dataclass(frozen=True)
class Division:
    """The budget that `allocate` divides over layers and rows: see core/policies/policy.h."""

    layers: int  # L
    prompt: int  # P
    budget: int  # B, tokens a layer and row on average
    sinks: int  # first tokens that are protected at B
    recent: int  # last tokens that are protected at B


@dataclass(frozen=True)
class Row:
    """One row of resident tokens to select from, numbered 0 to n - 1."""

    scores: np.ndarray | None  # float64 [n]; None without a scorer
    tokens: int  # n
    budget: int  # tokens that this row may keep
    sinks: int  # first tokens that are protected; they count towards the budget
    recent: int  # last tokens that are protected; they count as well


@dataclass(frozen=True)
class BlockEnd:
    """The state at the end of a block of the prompt, the argument of `schedule`."""

    budget: int  # B
    prompt: int  # P
    seen: int  # tokens so far
    held: int  # tokens of a row before this block
    block: int  # tokens of this block


class Policy:
    """The base class of policies that are classes. Defaults are those of core/policies/policy.h.

    The docstring of a class is the policy's summary. An attribute `window: int = kv.parameter(32, 1, 4096, "help")` is
    a parameter; methods read its value as `self.window`. Each of `score`, `select`, `allocate`, `share`, `schedule` and
    `store` is a method, or the name of a registered part, such as `select = "chunks(10)"`.
    """

    name: str = ""  # empty: the class's own
    paper: str = ""
    formula: str = ""
    heads: str = "kv"  # kv | query | layer
    agg: str = "mean"  # how a group of query heads becomes one: mean | sum | max
    sinks: int = 0  # first tokens that are protected
    recent: int | float = 0  # last tokens that are protected; a float is a fraction of the budget
    queries: str | int | None = None  # that the trace must contain: all, future (oracles), or a number of last ones
    score: Any = None  # (self, view) -> [H, n] or [Hq, n]; tokens with larger scores are kept
    select: Any = None  # (self, row: Row) -> numbers of the kept tokens, at most row.budget
    allocate: Any = None  # (self, division) -> [layers], or (self, division, scores) -> [layers, H]
    share: Any = None  # (self, layer, layers) -> the layer whose set it uses
    block: int = 512  # tokens of the prompt between two calls of `schedule`
    schedule: Any = None  # (self, end: BlockEnd) -> how many tokens each row holds from here on
    store: Any = None  # (self, view, kept: bool [Hkv, P]) -> keys [Hkv, P, d], values [Hkv, P, d], bytes of the kept

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        register(_of_class(cls))

    def __init__(self, **values: Standard) -> None:
        cls = type(self)
        known = {one.name: one for one in cls.definition.parameters}
        for name in values:
            if name not in known:
                expected = nearest(name, known) if known else "no parameters"
                raise Error(cls.definition.name, "unknown parameter", expected, name, Refusal.USAGE)
        self._given = values
        for name, one in known.items():
            setattr(self, name, values.get(name, one.default))

    def __str__(self) -> str:
        return with_values(type(self).definition.name, self._given)


@dataclass(frozen=True)
class Definition:
    """A policy as the engine registers it."""

    name: str
    summary: str
    make: Callable[[Mapping[str, Standard]], Policy]
    paper: str = ""
    formula: str = ""
    heads: str = "kv"
    agg: str = "mean"
    parameters: Sequence[Parameter] = ()
    source: object = None  # the function or class
    file: str = ""  # where it was written; empty: nowhere that can be read again
    source_hash: str = ""

    def bind(self, values: Mapping[str, Standard]) -> Bound:
        """The policy with these values."""
        return Bound(self, self.call("the constructor", self.make, values))

    def call(self, what: str, function: Callable, *arguments: Any) -> Any:
        """Calls a function of the policy's author. Its exceptions become an Error with the line of the code."""
        try:
            return function(*arguments)
        except Exception as problem:
            frames = [one for one in traceback.extract_tb(problem.__traceback__) if one.filename != __file__]
            own = [one for one in frames if one.filename == self.file] or frames
            place = f"{own[-1].filename}:{own[-1].lineno}" if own else self.name
            if isinstance(problem, Error):
                pieces = (problem.what, problem.expected, problem.found, problem.exit_code)
                raise Error(f"{place}: {problem.where}", *pieces) from problem
            raise Error(
                place, f"{what} raised {type(problem).__name__}: {problem}", exit_code=Refusal.INPUT
            ) from problem


@dataclass
class Bound:
    """A policy with values, as the engine calls it. The Error of an invalid result contains the policy's file."""

    definition: Definition
    policy: Policy
    parts: dict[str, str] = field(default_factory=dict)
    methods: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for place in PLACES:
            given = getattr(self.policy, place)
            if isinstance(given, str):
                self.parts[place] = given
            elif callable(given):
                self.methods.append(place)
            elif given is not None:
                what = "the name of a part, or a method"
                raise Error(self.definition.name, place, what, type(given).__name__, Refusal.USAGE)

    @property
    def queries(self) -> str | int | None:
        asked = self.policy.queries
        counts = isinstance(asked, int) and not isinstance(asked, bool) and asked > 0
        if not counts and asked not in (None, "all", "future"):
            raise self._wrong("queries", "all, future or how many of the last", repr(asked), Refusal.USAGE)
        return asked

    @property
    def sinks(self) -> int:
        return self._amount("sinks", self.policy.sinks, 0, "a number of tokens, 0 or more", (int,))

    @property
    def recent(self) -> int | float:
        expected = "a number of tokens, 0 or more, or a fraction of the budget"
        return self._amount("recent", self.policy.recent, 0, expected, (int, float))

    def _amount(self, what: str, value: Any, least: int, expected: str, kinds: tuple[type, ...]) -> Any:
        most = 1 if isinstance(value, float) else np.iinfo(np.int32).max
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            raise self._wrong(what, expected, repr(value), Refusal.USAGE)
        return value

    @property
    def block(self) -> int:
        return self._amount("block", self.policy.block, 1, "a number of tokens, 1 or more", (int,))

    @property
    def allocates_by_scores(self) -> bool:
        return "allocate" in self.methods and len(inspect.signature(self.policy.allocate).parameters) > 1

    def score(self, view: Any, rows: int) -> np.ndarray:
        """float64 [rows, n], or [Hq, n] where the engine makes rows of query heads."""
        found = self.definition.call("score", self.policy.score, view)
        scores = self._numbers("scores", found, np.float64)
        kv, query, n = view.kv_heads, view.query_heads, view.tokens
        if scores.ndim == 2 and scores.shape[1] == n and scores.shape[0] in (rows, query):
            return scores
        if scores.shape == (kv, n):  # finer or coarser than heads of keys and values
            return scores.sum(axis=0, keepdims=True) if rows == 1 else np.repeat(scores, rows // kv, axis=0)
        expected = " or ".join(f"[{count}, {n}]" for count in dict.fromkeys((rows, kv, query)))
        raise self._wrong("scores", expected, str(list(scores.shape)))

    def select(self, scores: np.ndarray | None, tokens: int, budget: int, sinks: int, recent: int) -> np.ndarray:
        """int64 numbers of the kept tokens, ascending."""
        found = self.definition.call("select", self.policy.select, Row(scores, tokens, budget, sinks, recent))
        kept = np.sort(self._numbers("selected tokens", found, np.int64).ravel())
        if len(kept) > budget:
            raise self._wrong("selected tokens", f"at most {budget}", str(len(kept)))
        if len(kept) and (kept[0] < 0 or kept[-1] >= tokens):
            raise self._wrong("selected tokens", f"0..{tokens - 1}", str(kept[0] if kept[0] < 0 else kept[-1]))
        if (np.diff(kept) == 0).any():
            raise self._wrong("selected tokens", "each once", f"{kept[:-1][np.diff(kept) == 0][0]} twice")
        return kept

    def allocate(self, division: Division, scores: Sequence[np.ndarray] | None) -> np.ndarray:
        """int64 [layers, H], or [layers] where it reads no scores."""
        rest = () if scores is None else (scores,)
        given = self.definition.call("allocate", self.policy.allocate, division, *rest)
        found = self._numbers("counts", given, np.int64)
        shape = (division.layers,) if scores is None else (division.layers, len(scores[0]))
        if found.shape != shape:
            raise self._wrong("counts", str(list(shape)), str(list(found.shape)))
        if (found < 0).any() or (found > division.prompt).any():
            raise self._wrong("counts", f"0..{division.prompt}", str(found.min() if found.min() < 0 else found.max()))
        return found

    def share(self, layer: int, layers: int) -> int:
        """The layer whose set it uses."""
        source = self.definition.call("share", self.policy.share, layer, layers)
        if not isinstance(source, int | np.integer) or not 0 <= source < layers:
            raise self._wrong("layer to share", f"0..{layers - 1}", str(source))
        return int(source)

    def schedule(self, budget: int, prompt: int, seen: int, held: int, block: int) -> int:
        """How many tokens each row holds from the end of a block on."""
        found = self.definition.call("schedule", self.policy.schedule, BlockEnd(budget, prompt, seen, held, block))
        if not isinstance(found, int | np.integer) or isinstance(found, bool) or not 1 <= found <= held + block:
            raise self._wrong("tokens held", f"1..{held + block}", str(found))
        if seen == prompt and found > budget:
            raise self._wrong("tokens held at the end of the prompt", f"at most {budget}", str(found))
        return int(found)

    def store(self, view: Any, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """float32 keys and values [Hkv, P, d] as the store returns them, and the bytes that the kept ones take."""
        found = self.definition.call("store", self.policy.store, view, kept.astype(bool))
        if not isinstance(found, tuple | list) or len(found) != 3:
            raise self._wrong("store", "keys, values and bytes", type(found).__name__)
        shape = (view.kv_heads, view.tokens, view.head_dim)
        arrays = []
        for what, one in zip(("stored keys", "stored values"), found, strict=False):
            array = self._numbers(what, one, np.float32)
            if array.shape != shape:
                raise self._wrong(what, str(list(shape)), str(list(array.shape)))
            if not np.isfinite(array[kept.astype(bool)]).all():
                raise self._wrong(what, "finite numbers", "one that is not")
            arrays.append(array)
        size = self._numbers("bytes", found[2], np.float64)
        if size.size != 1 or not 0 <= (size := size.item()) < np.inf:
            raise self._wrong("bytes", "a number, 0 or more", str(found[2]))
        return arrays[0], arrays[1], size

    def _numbers(self, what: str, found: Any, kind: type) -> np.ndarray:
        whole = kind is np.int64
        expected = "an array of whole numbers" if whole else "an array of numbers"
        try:
            given = np.asarray(found)
        except (TypeError, ValueError) as problem:
            raise self._wrong(what, expected, str(problem)) from None
        fits = np.issubdtype(given.dtype, np.integer) if whole else np.can_cast(given.dtype, kind, "same_kind")
        if given.size and not fits:
            raise self._wrong(what, expected, "None" if found is None else str(given.dtype))
        return np.ascontiguousarray(given, dtype=kind)

    def _wrong(self, what: str, expected: str, found: str, refusal: Refusal = Refusal.INPUT) -> Error:
        """Of an answer, which fails the policy's own cells; of an option (USAGE), which is refused at once."""
        where = self.definition.name + (f" ({self.definition.file})" if self.definition.file else "")
        return Error(where, what, expected, found, refusal)


class FunctionPolicy:
    """A function that `@kv.policy` has registered. Call it with values and parts, as `kv.policy.NAME(…)`, or pass it to
    `kv.replay` unchanged."""

    def __init__(self, definition: Definition, function: Callable) -> None:
        self.definition = definition
        self.__doc__, self.__name__, self.__wrapped__ = function.__doc__, function.__name__, function
        self.__signature__ = signature((one.name, one.default) for one in definition.parameters)

    def __call__(self, **values: Standard) -> str:
        return with_values(self.definition.name, values)

    def __str__(self) -> str:
        return self.definition.name


def signature(defaults: Iterable[tuple[str, Standard]]) -> inspect.Signature:
    """The signature of a function that takes these parameters of a policy, and parts, and returns its text."""
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in defaults]
    more = inspect.Parameter("parts_of_plan", inspect.Parameter.VAR_KEYWORD)
    return inspect.Signature([*keywords, more], return_annotation="str")


def from_function(function: Callable, **options: Any) -> FunctionPolicy:
    """The policy of a function `(view, parameters with defaults) -> scores`; options are attributes of `Policy`."""
    if isinstance(function, type | FunctionPolicy) or not callable(function):
        raise Error(
            "policy", "not a function", "def NAME(view, …), or a class of Policy", repr(function), Refusal.USAGE
        )
    name = options.pop("name", "") or function.__name__
    unknown = set(options) - {one for one in vars(Policy) if not one.startswith("_")} - {"score"}
    if unknown:
        raise Error(name, "unknown option of a policy", ", ".join(sorted(PLACES[1:])), min(unknown), Refusal.USAGE)
    arguments = list(inspect.signature(function).parameters.values())
    if not arguments:
        raise Error(name, "arguments", "a view, and parameters with defaults", "none", Refusal.USAGE)
    parameters = [_declared(name, one.name, one.default) for one in arguments[1:]]

    def make(values: Mapping[str, Standard]) -> Policy:
        made = object.__new__(Policy)
        for option, value in options.items():
            from_values = option in ("recent", "sinks", "queries") and value in values
            setattr(made, option, values[value] if from_values else value)
        made.score = lambda view: function(view, **values)
        return made

    definition = _definition(function, name, function.__doc__, options, parameters, make)
    register(definition)
    return FunctionPolicy(definition, function)


def _of_class(cls: type[Policy]) -> Definition:
    name = cls.__dict__.get("name") or cls.__name__
    found = {one: value for base in reversed(cls.__mro__) for one, value in vars(base).items()}
    parameters = [_declared(name, one, value) for one, value in found.items() if isinstance(value, Parameter)]
    cls.definition = _definition(cls, name, cls.__doc__, found, parameters, lambda values: cls(**values))
    return cls.definition


def _declared(policy: str, name: str, default: Any) -> Parameter:
    known = default if isinstance(default, Parameter) else Parameter(default)
    standard, where = known.default, f"{policy}:{name}"
    if name in TAKEN:
        raise Error(where, "reserved parameter name", "another name", name, Refusal.USAGE)
    if not name.isascii():
        raise Error(where, "name", "ASCII letters", name, Refusal.USAGE)
    if not isinstance(standard, Standard):
        found = "no default" if standard is inspect.Parameter.empty else type(standard).__name__
        raise Error(where, "default", "a number, a Boolean or a string", found, Refusal.USAGE)
    if known.choices and standard not in known.choices:
        raise Error(where, "default", " | ".join(known.choices), str(standard), Refusal.USAGE)
    if not isinstance(standard, str | bool):
        ends = np.iinfo(np.int32) if isinstance(standard, int) else np.finfo(np.float64)
        least = ends.min if known.least is None else known.least
        most = ends.max if known.most is None else known.most
        if not max(least, ends.min) <= standard <= min(most, ends.max):
            raise Error(where, "default", f"{least}..{most}", str(standard), Refusal.USAGE)
    return Parameter(standard, known.least, known.most, known.help, known.choices, name)


def _definition(
    source: Any, name: str, doc: str | None, options: Mapping[str, Any], parameters: Sequence[Parameter], make: Callable
) -> Definition:
    summary = " ".join((inspect.cleandoc(doc or "").split("\n\n")[0] or name).split())
    file, content = _written(source)
    if not NAME.fullmatch(name):
        raise Error("policy", "name", "ASCII letters, digits, - and _", repr(name), Refusal.USAGE)
    texts = {one: options.get(one, getattr(Policy, one)) for one in ("paper", "formula", "heads", "agg")}
    for one, value in texts.items():
        if not isinstance(value, str):
            raise Error(name, one, "a string", repr(value), Refusal.USAGE)
    digest = xxhash.xxh3_128_hexdigest(content)
    return Definition(name, summary, make, **texts, parameters=parameters, source=source, file=file, source_hash=digest)


def _written(source: Any) -> tuple[str, bytes]:
    """The policy's file, and the content that identifies its version: the bytes of this file, its own lines there (or
    their compiled code), and the outer variables that it reads."""
    functions = [one for one in (vars(source).values() if isinstance(source, type) else [source]) if _has_code(one)]
    try:
        file = inspect.getsourcefile(source) or ""
    except (OSError, TypeError):  # typed in a session, or compiled
        file = ""
    linecache.checkcache(file)
    try:
        lines = inspect.getsource(source).encode()
    except (OSError, TypeError):
        lines = marshal.dumps([one.__code__ for one in functions])
    content = Path(file).read_bytes() if Path(file).is_file() else b""
    above = [base for base in getattr(source, "__mro__", ())[1:] if issubclass(base, Policy) and base is not Policy]
    return file, b"\0".join([content, lines, *map(_values_around, functions), *(_written(base)[1] for base in above)])


def _has_code(value: Any) -> bool:
    return isinstance(getattr(value, "__code__", None), CodeType)


def _values_around(function: Any) -> bytes:
    """The variables of outer functions and of its module that a function reads, where they are plain data."""
    around = inspect.getclosurevars(function)
    found = []
    for name, value in sorted({**around.globals, **around.nonlocals}.items()):
        found.append(name.encode())
        if isinstance(value, PLAIN):
            with contextlib.suppress(Exception):  # a list of what is no data
                found.append(pickle.dumps(value))
    return b"\0".join(found)


def with_values(name: str, values: Mapping[str, Any]) -> str:
    """The policy's text, as on the command line."""
    from kvreplay import _engine

    texts = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in values.items()}
    return name + ":" * bool(texts) + ",".join(f"{key}={_engine.list_value(text)}" for key, text in texts.items())


_entered: dict[str, Definition] = {}


def register(definition: Definition) -> None:
    """Registers a policy. It replaces an earlier policy in Python of the same name."""
    from kvreplay import _engine

    if _entered.get(definition.name) is not definition:
        _engine.register_policy(definition)
        _entered[definition.name] = definition


def source_hash(name: str) -> str:
    """Of the source of a registered policy in Python, as in run.json."""
    return _entered[name].source_hash


def load(file: str, name: str) -> str:
    """Registers the policy FILE.py:NAME of a command line; returns the name of the registered policy."""
    path = Path(file)
    if not path.is_file():
        raise Error(file, "cannot be read", "a file with a policy in Python", "no such file", Refusal.INPUT)
    sys.path.insert(0, str(path.resolve().parent))  # its own imports
    try:
        found = _run(str(path.resolve()), path.read_bytes())
    except (Error, KeyboardInterrupt):
        raise
    except SyntaxError as problem:
        raise Error(f"{file}:{problem.lineno}", "syntax error", found=problem.msg, exit_code=Refusal.INPUT) from problem
    except Exception as problem:
        inside = [
            one.lineno for one in traceback.extract_tb(problem.__traceback__) if Path(one.filename) == path.resolve()
        ]
        place = f"{file}:{inside[-1]}" if inside else file
        raise Error(place, f"raised {type(problem).__name__}: {problem}", exit_code=Refusal.INPUT) from problem
    finally:
        sys.path.pop(0)
    defined = {one: value.definition for one, value in found.items() if _is_policy(value)}
    policies = {one.name: one for one in defined.values()}
    chosen = policies.get(name, defined.get(name))  # by its own name, or by the name of its class
    if chosen is None:
        known = nearest(name, policies) if policies else "a function under @kv.policy"
        raise Error(file, "unknown policy", known, name, Refusal.USAGE)
    register(chosen)  # another file may have taken the name since
    return chosen.name


def _is_policy(value: Any) -> bool:
    is_class = isinstance(value, type) and issubclass(value, Policy) and value is not Policy
    return is_class or isinstance(value, FunctionPolicy)


@functools.cache
def _run(file: str, content: bytes) -> dict[str, Any]:
    """The definitions of the file. It runs once for each content, since a command line may name several policies."""
    return runpy.run_path(file)
