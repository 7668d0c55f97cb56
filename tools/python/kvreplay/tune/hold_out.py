"""The two sides of a fit: traces for fitting, and held-out traces for the test. No prompt is on both sides."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvreplay.compare.comparison import part_of_name
from kvreplay.compare.statistics import joined
from kvreplay.engine import Trace, _engine
from kvreplay.errors import Error, Refusal

LEAST_HELD_OUT = 2  # prompts: one has no interval


@dataclass(frozen=True)
class Captured:
    """A trace, and the number of its prompt: equal for all traces of one prompt, as `kvreplay compare` joins them."""

    path: Path
    name: str
    hash: str
    tokens: int  # of the prompt
    prompt: int


@dataclass(frozen=True)
class Sides:
    fitting: list[Captured]
    held_out: list[Captured]


def split_prompts(
    paths: Sequence[Path], held_out: Sequence[Path], share: float, pattern: re.Pattern[str] | None, seed: int
) -> Sides:
    """Both sides, of traces, folders, patterns and manifests. `held_out` as given, or else a random `share` of the
    prompts of `paths`, at least LEAST_HELD_OUT; in a random order of prompts. Raises Error where a
    side has too few prompts, or both have the same."""
    traces, traces_apart = _engine.list_traces(paths), _engine.list_traces(held_out)
    every = captured([*traces, *traces_apart], pattern)
    generator = np.random.default_rng(seed)
    if held_out:
        fitting, apart = every[: len(traces)], every[len(traces) :]
        known = {one.prompt: one.name for one in fitting}
        for one in apart:
            if one.prompt in known:
                found = f"{one.name}, of the prompt of {known[one.prompt]}"
                raise Error("--held-out", "prompt both fitted and held out", "prompts that are not used for "
                                                                             "fitting", found,
                            Refusal.USAGE)  # fmt: skip
        found = len({one.prompt for one in apart})
        if found < LEAST_HELD_OUT:
            raise Error("--held-out", "too few prompts for an interval", f"{LEAST_HELD_OUT} or more", str(found),
                        Refusal.USAGE)  # fmt: skip
        order = generator.permutation(len({one.prompt for one in every})).tolist()
        return Sides(in_order(fitting, order), in_order(apart, order))
    # A permutation of the prompts by name, so that the order of the command line does not matter.
    every.sort(key=lambda one: (one.name, str(one.path)))
    prompts = list(dict.fromkeys(one.prompt for one in every))
    if len(prompts) < LEAST_HELD_OUT + 1:
        raise Error("traces", "too few prompts for a held-out set",
                    f"traces of at least {LEAST_HELD_OUT + 1} prompts, or --held-out TRACE", str(len(prompts)),
                    Refusal.USAGE)  # fmt: skip
    order = [prompts[i] for i in generator.permutation(len(prompts))]
    count = min(max(LEAST_HELD_OUT, round(share * len(prompts))), len(prompts) - 1)
    return Sides(in_order(every, order[count:]), in_order(every, order[:count]))


def in_order(traces: Sequence[Captured], prompts: Sequence[int]) -> list[Captured]:
    """The traces of these prompts, prompt by prompt."""
    place = {prompt: i for i, prompt in enumerate(prompts)}
    return sorted((one for one in traces if one.prompt in place), key=lambda one: place[one.prompt])


def captured(traces: Sequence[_engine.ListedTrace], pattern: re.Pattern[str] | None) -> list[Captured]:
    """The traces, in the same order."""
    facts = [facts_of(trace) for trace in traces]
    # Equal tokens are one prompt whatever the names say: no policy is judged by what it was fitted on.
    prompts = joined([part_of_name(name, pattern) for _, name, _, _, _ in facts], [ids for *_, ids in facts])
    found = [Captured(*fact[:4], int(prompt)) for fact, prompt in zip(facts, prompts, strict=True)]
    first: dict[str, Captured] = {}
    for one in found:
        if one.name in first:
            raise Error(str(one.path), "duplicate trace name", "traces with different names",
                        str(first[one.name].path), Refusal.USAGE)  # fmt: skip
        first[one.name] = one
    return found


def facts_of(listed: _engine.ListedTrace) -> tuple[Path, str, str, int, bytes]:
    """The fields of `Captured` without the number of the prompt, and the prompt's token ids."""
    path = listed.path
    try:
        path.name.encode()
    except UnicodeEncodeError as problem:
        raise Error(os.fsdecode(path.name.encode("ascii", "backslashreplace")), "name", "UTF-8", "other bytes",
                    Refusal.INPUT) from problem  # fmt: skip
    trace = Trace(path)
    listed.check_hash(trace.hash)
    if trace.prompt == trace.tokens:
        raise Error(str(path), "no continuation, so no evaluation queries", "tokens after the prompt", "none")
    return path, trace.name, trace.hash, trace.prompt, bytes(trace.ids[: trace.prompt])
