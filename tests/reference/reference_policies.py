"""Every policy by name, and what it keeps."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import reference_2026
import reference_attention
import reference_geometry
import reference_heads
import reference_layers
import reference_newer
import reference_once
import reference_reads
import reference_rounds
import reference_schedules
import reference_stores
import reference_twins
from reference import Trace, aggregate, eval_attention
from reference_selection import Case, Policy, Selection, call_of, ranked, row_count, uniform, unwrapped

PRESETS = {
    "factory": {"window": "8", "kernel": "7", "pool": "max", "normalise": "true"},
    "snapkv-paper": {"window": "32", "kernel": "7", "pool": "max"},
    "snapkv-code": {"window": "32", "kernel": "5", "pool": "avg"},
    "kvpress": {"window": "64", "kernel": "5", "pool": "avg"},
}
H2O_PRESETS = {"sca": {"recent": "0.25"}, "sca-threshold": {"recent": "128"}, "factory": {"recent": "8"}}
CAM_PRESETS = {"generate": {"attention": "cumulative", "merge": "16", "positions": "cache"}}
KIVI_PRESETS = {"table11": {"group": "64", "residual": "0"}}
SNAPKV = PRESETS["factory"] | {"heads": "kv", "agg": "mean", "pool_order": "group-first"}
CHUNKKV = {
    "chunk": "10",
    "window": "8",
    "heads": "layer",
    "fill": "cut",
    "chunk_score": "sum",
    "window_mode": "reserve",
    "reuse": "1",
}
MERGED = {"merge": "32", "mode": "expected", "mean": "receivers", "seed": "0"}
DEFAULTS: dict[str, dict[str, str]] = {
    "full": {},
    "random": {"seed": "0", "sinks": "0", "window": "0", "heads": "kv", "schedule": "once"},
    "local": {},
    "streaming-llm": {"sinks": "4", "positions": "original", "rolling": "false"},
    "strided": {"schedule": "once"},
    "truncate": {"keep_question": "true"},
    "h2o": {"recent": "0.5", "heads": "kv", "agg": "mean", "overlap": "false", "schedule": "once"},
    "h2o-online": {"recent": "0.5", "heads": "kv", "grow": "false", "prefill": "online"},
    "snapkv": SNAPKV,
    "pyramid-kv": SNAPKV | {"beta": "20", "short_uniform": "false"},
    "pyramid-infer": {
        "recent": "0.2",
        "sinks": "4",
        "r": "0.9",
        "decay": "cosine",
        "distance_weight": "1.2",
        "lengths": "scaled",
        "over": "resident",
        "heads": "layer",
    },
    "chunkkv": CHUNKKV,
    "hybrid": {f"chunkkv.{name}": value for name, value in CHUNKKV.items()}
    | {f"snapkv.{name}": value for name, value in SNAPKV.items()},
    "dynamickv": SNAPKV | {"r_max": "10", "update": "4", "mid_total": "full", "norm": "sum", "progressive": "true"},
    "sca": {
        "schedule": "once",
        "recent": "auto",
        "positions": "auto",
        "use": "kv",
        "objective": "min",
        "sinks": "auto",
        "layer": "-1",
        "share": "all",
        "heads": "layer",
    },
    "finch": {
        "blocks": "512",
        "question": "auto",
        "question_tokens": "32",
        "positions": "cache",
        "norm": "visible",
        "condition": "question",
        "order": "position",
        "rate": "exact",
        "heads": "layer",
    },
    "kivi": {"bits": "2", "group": "32", "residual": "128"},
    "oracle": {"heads": "kv", "scope": "head", "counts": "none"},
    "random-twin": {"seed": "0"},
    "tova": {"protect_last": "false", "schedule": "once", "heads": "layer"},
    "scissorhands": {"history": "400", "recent": "10", "binary": "true", "heads": "kv", "agg": "mean"},
    "knorm": {"skip_layers": "none"},
    "keydiff": {"schedule": "once"},
    "value-norm": {"p": "2", "sinks": "4", "window": "8"},
    "vatp": {"base": "h2o", "sinks": "20", "recent": "auto", "history": "400"},
    "observed-attention": {"heads": "kv", "agg": "mean"},
    "expected-attention": {
        "sinks": "4",
        "future": "512",
        "epsilon": "0",
        "covariance": "true",
        "vnorm": "true",
        "heads": "kv",
        "agg": "mean",
    },
    "lagkv": {"sinks": "4", "lag": "128"},
    "ada-kv": SNAPKV | {"alpha": "0.2", "normalise": "false"},
    "head-kv": SNAPKV | {"beta": "1.01"},
    "critical-kv": {"base": "expected-attention:vnorm=false", "wo": "trace", "first": "0.5"},
    "quest": {"page": "16", "dense_layers": "2", "least_pages": "3"},
    "think": {"window": "32", "ratio": "0.4", "recent": "32"},
    "nacl": {"question": "auto", "question_tokens": "32", "random": "0.3", "temperature": "1", "seed": "0"},
    "cam": {
        "sinks": "4",
        "positions": "original",
        "schedule": "online",
        "grow": "false",
        "prefill": "online",
        "attention": "current",
        **MERGED,
    },
    "cam-one-shot": {"recent": "0.5", "schedule": "once", "attention": "cumulative", **MERGED},
    "minicache": {"t": "0.6", "distance": "paper", "gap": "0.05"},
    "q-filter": {"filters": "trace"},
    "duo-attention": {"table": "kvpress", "full_heads": "0.5", "sinks": "128", "recent": "256"},
    "simlayerkv": {"rows": "1", "sinks": "4", "recent": "1024", "threshold": "0.9", "heads": "layer"},
    "leverage": {"sketch": "0", "ridge": "0.01", "seed": "0"},
    "compactor": {"mix": "auto", "sketch": "0", "seed": "0", "sinks": "8", "recent": "4", "block": "256"},
    "cur": {"use": "product", "block": "16", "sinks": "4"},
    "caote": {"base": "window", "window": "8", "heads": "kv", "agg": "mean"},
    "lava": {"window": "32", "kernel": "7", "pool": "max", "floor": "0.2", "heads": "kv", "agg": "max"},
    "defensive-kv": {"window": "32", "kernel": "5", "pool": "avg", "heads": "kv", "agg": "max"},
    **reference_2026.DEFAULTS,
    **reference_reads.DEFAULTS,
}


def parameters_of(policy: Policy) -> dict[str, str]:
    """Every parameter: the defaults, over them the preset, over it what is given."""
    given = dict(policy.given)
    defaults = DEFAULTS.get(policy.name, {})
    presets = {"cam": CAM_PRESETS, "h2o": H2O_PRESETS, "kivi": KIVI_PRESETS}.get(policy.name, PRESETS)
    chosen = presets[given.pop("preset")] if "preset" in given else {}
    return defaults | {key: value for key, value in chosen.items() if key in defaults} | given


@functools.cache
def select(trace: Trace, policy: Policy, literal: str, choice: str = "continuation") -> Selection:
    """The selection of a policy at a budget; `choice` names the eval queries, which only oracles read."""
    return decide(trace, policy, literal, choice)


def decide(
    trace: Trace, policy: Policy, literal: str, choice: str = "continuation", follow: Selection | None = None
) -> Selection:
    """The same, each decision made from the state that the decisions of `follow` before it lead to."""
    if policy.name == "layers":
        return by_layer(trace, policy, literal, choice, follow)
    case = Case(trace, parameters_of(policy), literal, choice, follow)
    selection = kept_by(case, policy)
    return reference_stores.with_store(case, selection) if "store" in case.parameters else selection


def kept_by(case: Case, policy: Policy) -> Selection:
    """What the policy keeps, in its own store."""
    trace = case.trace
    if policy.name in WITHOUT_BUDGET:
        return WITHOUT_BUDGET[policy.name](case)
    natural = case.parameters.get("lengths") == "natural"
    unbound = natural or case.parameters.get("schedule", "once").startswith(("threshold(", "generated("))
    if policy.name == "full" or (not unbound and case.budget >= trace.prompt):
        return everything(case, policy)
    name, schedule = policy.name, call_of(case.parameters.get("schedule", ""))[0]
    if schedule in reference_rounds.SCHEDULES and name in reference_rounds.RULES:
        return reference_rounds.in_rounds(case, name)
    if (name, schedule) in THE_SAME:
        name, more = THE_SAME[name, schedule]
        case = dataclasses.replace(case, parameters=case.parameters | more | dict(policy.given))
    return POLICIES[name](case)


def everything(case: Case, policy: Policy) -> Selection:
    """All positions; what the policy would protect at B = P counts as protected."""
    every = np.arange(case.trace.prompt)
    if policy.name == "full":
        return uniform(case, lambda layer, row: every, every[:0])
    asked = POLICIES[policy.name](dataclasses.replace(case, literal=str(case.trace.prompt), follow=None))
    whole = dataclasses.replace(case, parameters={"heads": asked.heads})
    selection = uniform(whole, lambda layer, row: every, every[:0])

    def exact(layer: int) -> tuple[np.ndarray, np.ndarray]:
        return case.trace.layers[layer].k, case.trace.layers[layer].v

    stored = exact if asked.evolving else asked.stored  # only evictions would have changed it
    return dataclasses.replace(selection, protected=asked.protected, layer_heads=asked.layer_heads, stored=stored)


def hybrid(case: Case) -> Selection:
    """ChunkKV in the lower half of the layers, SnapKV in the upper one."""
    n_layers = len(case.trace.treated)
    names = ["chunkkv"] * (n_layers // 2) + ["snapkv"] * (n_layers - n_layers // 2)
    parts = {}
    common = tuple((key, case.parameters[key]) for key in ("sinks", "window_at", "protect") if key in case.parameters)
    for name in set(names):
        prefix = f"{name}."
        given = common + tuple(
            (key.removeprefix(prefix), value) for key, value in case.parameters.items() if prefix in key
        )
        parts[name] = select(case.trace, Policy(name, given), case.literal, case.choice)
    return reference_layers.joined(case.trace, [parts[name] for name in names])


def by_layer(trace: Trace, policy: Policy, literal: str, choice: str, follow: Selection | None) -> Selection:
    """layers:0-1=(POLICY),2-3=POLICY: a policy for each range of layers."""
    parts: dict[int, Selection] = {}
    for layers, text in policy.given:
        first, _, last = layers.partition("-")
        part = decide(trace, Policy.parse(unwrapped(text)), literal, choice, follow)
        parts |= dict.fromkeys(range(int(first), int(last or first) + 1), part)
    return reference_layers.joined(trace, [parts[layer] for layer in range(len(trace.treated))])


def oracle(case: Case) -> Selection:
    """The tokens of the greatest attention from the eval queries: a row, a layer or the whole cache ranked together."""
    trace, parameters, heads = case.trace, case.parameters, case.heads
    counts, layer_heads = None, None
    if parameters["counts"] != "none":
        counted = Policy.parse(unwrapped(parameters["counts"]))
        chosen = select(trace, counted, case.literal, case.choice)
        heads, layer_heads = chosen.heads, chosen.layer_heads
        counts = [[len(row) for row in layer] for layer in chosen.rows]
    scores = []
    for index, layer in enumerate(trace.treated):
        own = layer_heads[index] if layer_heads else heads
        rows = aggregate(eval_attention(trace, layer, case.choice), own, "mean", trace.kv_heads)
        scores.append(np.repeat(rows, row_count(trace, heads) // len(rows), axis=0))
    n_layers, n_rows = len(scores), row_count(trace, heads)
    places = [(layer, row) for layer in range(n_layers) for row in range(n_rows)]
    if parameters["scope"] == "head":
        groups = [[place] for place in places]
    elif parameters["scope"] == "layer":
        groups = [[(layer, row) for row in range(n_rows)] for layer in range(n_layers)]
    else:
        groups = [places]
    nothing = np.array([], dtype=int)
    rows: list[list[np.ndarray]] = [[nothing] * n_rows for _ in range(n_layers)]
    decisions = []
    for group in groups:
        count = sum(counts[layer][row] for layer, row in group) if counts else case.budget * len(group)
        kept, decision = ranked(group, np.stack([scores[layer][row] for layer, row in group]), count, nothing)
        for (layer, row), positions in zip(group, kept, strict=True):
            rows[layer][row] = positions
        decisions.append(decision)
    return Selection(heads, rows, [nothing] * n_layers, list(range(n_layers)), decisions, layer_heads)


def random_twin(case: Case) -> Selection:
    """Another policy's sets, each row's runs of kept tokens and gaps in a random order."""
    chosen = select(case.trace, Policy.parse(unwrapped(case.parameters["of"])), case.literal, case.choice)
    return reference_twins.random_twin(case.trace, chosen, case.number("seed"))


KEEPS_ALL = {"full", "kivi", "think", "minicache"}


def has_twin(trace: Trace, policy: Policy) -> bool:
    """Whether a budget binds the policy and its sets are static and chosen: not at random, nor by what is measured."""
    if policy.name == "layers":  # some range has a twin, and the others keep all
        parts = [Policy.parse(unwrapped(text)) for _, text in policy.given]
        others = {part.name for part in parts if not has_twin(trace, part)}
        return len(others) < len(parts) and others <= KEEPS_ALL
    parameters = parameters_of(policy)
    if policy.name in {"random", "oracle", "random-twin", *KEEPS_ALL, *WITHOUT_BUDGET}:
        return False
    if parameters.get("lengths") == "natural" or parameters.get("schedule", "once") != "once":
        return False
    chosen = select(trace, policy, str(trace.prompt - 1))
    return chosen.evicted_at is None and chosen.seen is None and chosen.read is None


def critical_kv(case: Case) -> Selection:
    """With the parameters of its base policy."""
    base = Policy.parse(unwrapped(case.parameters["base"]))
    own = parameters_of(base) | {
        key: case.parameters[key] for key in ("window_at", "protect") if key in case.parameters
    }
    if base.name != "expected-attention" and "sinks" in case.parameters:
        own["sinks"] = case.parameters["sinks"]
    return reference_attention.critical_kv(case, base.name, dataclasses.replace(case, parameters=own))


def cam_one_shot(case: Case) -> Selection:
    """With the tokens of H2O."""
    names = {"recent", "sinks", "protect", "heads", "schedule"} & case.parameters.keys()
    asked = dataclasses.replace(case, parameters=DEFAULTS["h2o"] | {name: case.parameters[name] for name in names})
    schedule = call_of(asked.parameters["schedule"])[0]
    if schedule in reference_rounds.SCHEDULES:
        return reference_stores.merged_values(case, reference_rounds.in_rounds(asked, "h2o"))
    if schedule == "online":
        online = dataclasses.replace(asked, parameters=DEFAULTS["h2o-online"] | asked.parameters)
        return reference_stores.merged_values(case, reference_schedules.h2o_online(online))
    return reference_stores.merged_values(case, reference_once.h2o(asked))


def cam(case: Case) -> Selection:
    """With the tokens of StreamingLLM."""
    schedule = call_of(case.parameters["schedule"])[0]
    asked = dataclasses.replace(case, parameters=case.parameters | {"rolling": str(schedule == "rolling").lower()})
    if schedule in reference_rounds.SCHEDULES:
        return reference_stores.merged_values(case, reference_rounds.in_rounds(asked, "streaming-llm"))
    return reference_stores.merged_values(case, reference_schedules.streaming_llm(asked))


THE_SAME = {  # a policy under a schedule that makes it another one
    ("h2o-online", "once"): ("h2o", {"agg": "mean", "overlap": "false"}),
    ("h2o", "online"): ("h2o-online", {"grow": "false", "prefill": "online"}),
    ("local", "online"): ("streaming-llm", {"sinks": "0", "positions": "original"}),
    ("local", "rolling"): ("streaming-llm", {"sinks": "0", "positions": "original", "rolling": "true"}),
    ("streaming-llm", "rolling"): ("streaming-llm", {"rolling": "true"}),
}
WITHOUT_BUDGET = {  # with a memory of their own, also where B would hold the prompt
    "kivi": reference_stores.kivi,
    "think": reference_stores.think,
    "minicache": reference_stores.minicache,
    "duo-attention": reference_heads.duo_attention,
    "simlayerkv": reference_heads.simlayerkv,
    **reference_2026.WITHOUT_BUDGET,
    **reference_reads.WITHOUT_BUDGET,
}
POLICIES = {
    "random": reference_once.random,
    "local": reference_once.local,
    "streaming-llm": reference_schedules.streaming_llm,
    "strided": reference_once.strided,
    "truncate": reference_once.truncate,
    "h2o": reference_once.h2o,
    "h2o-online": reference_schedules.h2o_online,
    "snapkv": reference_once.snapkv,
    "pyramid-kv": reference_layers.pyramid_kv,
    "pyramid-infer": reference_layers.pyramid_infer,
    "chunkkv": reference_once.chunkkv,
    "hybrid": hybrid,
    "dynamickv": reference_layers.dynamic_kv,
    "sca": reference_schedules.sca,
    "finch": reference_schedules.finch,
    "oracle": oracle,
    "random-twin": random_twin,
    "tova": reference_attention.tova,
    "scissorhands": reference_attention.scissorhands,
    "knorm": reference_geometry.knorm,
    "keydiff": reference_geometry.keydiff,
    "value-norm": reference_geometry.value_norm,
    "vatp": reference_attention.vatp,
    "observed-attention": reference_attention.observed_attention,
    "expected-attention": reference_attention.expected_attention,
    "lagkv": reference_geometry.lagkv,
    "ada-kv": reference_heads.ada_kv,
    "head-kv": reference_heads.head_kv,
    "critical-kv": critical_kv,
    "quest": reference_stores.quest,
    "nacl": reference_attention.nacl,
    "cam": cam,
    "cam-one-shot": cam_one_shot,
    "q-filter": reference_geometry.q_filter,
    "leverage": reference_geometry.leverage,
    "compactor": reference_geometry.compactor,
    "cur": reference_geometry.cur,
    "caote": reference_newer.caote,
    "lava": reference_newer.lava,
    "defensive-kv": reference_newer.defensive_kv,
    **reference_2026.POLICIES,
    **reference_reads.POLICIES,
}
READING = {*reference_reads.POLICIES, *reference_reads.WITHOUT_BUDGET}
