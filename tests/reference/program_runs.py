"""Which runs of the program are compared with the reference, and what they wrote.

The program is the one that the environment variable KVREPLAY names, or that of the release build.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import random_traces
import reference
from reference import Trace
from reference_policies import parameters_of
from reference_selection import Policy, call_of, unwrapped
from write_trace import write_trace

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("KVREPLAY", ROOT / "build/release/kvreplay"))
REAL = ROOT / "traces/smollm2-135m-needle.h5"
BUDGETS = ("0.1", "0.2", "5")
MORE_THAN_THE_PROMPT = "1000"

POLICIES = [
    "full",
    "random",
    "random:seed=7,sinks=2,window=3",
    "random:heads=layer",
    "local",
    "streaming-llm",
    "streaming-llm:sinks=1",
    "h2o",
    "h2o:recent=3",
    "h2o:recent=0.25,heads=query",
    "h2o:recent=2,heads=layer",
    "h2o:agg=max",
    "h2o:recent=3,overlap=true",
    "h2o:preset=sca",
    "h2o:preset=factory",
    "snapkv",
    "snapkv:window=2,kernel=3",
    "snapkv:window=2,kernel=3,heads=query",
    "snapkv:window=3,kernel=5,heads=layer",
    "snapkv:window=2,kernel=5,pool=avg",
    "snapkv:window=2,pool=none,agg=sum",
    "snapkv:window=4,kernel=3,agg=max",
    "snapkv:window=2,kernel=3,pool_order=pool-first",
    "snapkv:window=1,kernel=1,heads=query,pool=avg",
    "snapkv:preset=snapkv-paper",
    "snapkv:preset=snapkv-code",
    "snapkv:preset=kvpress",
    "chunkkv",
    "chunkkv:chunk=3,window=2",
    "chunkkv:chunk=4,window=1,heads=kv",
    "chunkkv:chunk=2,window=2,heads=query",
    "chunkkv:chunk=3,window=2,fill=none",
    "chunkkv:chunk=3,window=1,fill=tokens",
    "chunkkv:chunk=4,window=1,chunk_score=mean",
    "chunkkv:chunk=2,window=2,window_mode=replace",
    "chunkkv:chunk=3,window=2,reuse=2,heads=kv",
    "oracle",
    "oracle:heads=query",
    "oracle:heads=layer",
    "oracle:scope=layer",
    "oracle:scope=global",
    "oracle:scope=global,heads=query",
    "oracle:counts=(snapkv:window=2,kernel=3,heads=query)",
    "oracle:counts=(chunkkv:chunk=3,window=2,fill=none)",
]
FEW_POLICIES = [
    "random",
    "h2o:recent=0.25,heads=query",
    "snapkv:window=2,kernel=3",
    "chunkkv:chunk=3,window=2",
    "oracle",
]
REAL_POLICIES = [
    "random",
    "streaming-llm",
    "h2o",
    "h2o:preset=factory,heads=query",
    "snapkv",
    "snapkv:heads=query",
    "snapkv:preset=snapkv-code",
    "snapkv:heads=layer",
    "chunkkv",
    "chunkkv:heads=query,reuse=3",
    "oracle",
    "oracle:scope=global",
    "strided",
    "truncate",
    "h2o-online",
    "h2o-online:prefill=once,heads=query",
    "h2o:schedule=threshold(0.5,0.25),preset=sca-threshold",
    "pyramid-kv",
    "pyramid-infer",
    "pyramid-infer:lengths=natural",
    "hybrid",
    "dynamickv",
    "dynamickv:heads=query,mid_total=proportional",
    "sca",
    "sca:objective=max,use=key",
    "sca:share=2",
    "sca:share=2,sinks=4",
    "sca:schedule=threshold(0.5,0.25),recent=20",
    "finch:blocks=64",
    "finch:blocks=100,condition=all,order=relevance,heads=kv",
    "kivi",
    "kivi:preset=table11",
    "streaming-llm:positions=cache",
    "streaming-llm:positions=cache,rolling=true",
]
# Each family in its default form, its readings and its parameters; on every shape.
SHAPE_POLICIES = [
    "snapkv:window=2,kernel=3",
    "snapkv:window=2,pool=none",
    "chunkkv:chunk=1,window=2,heads=kv",
    "strided",
    "strided:schedule=threshold(0.5,0.2)",
    "strided:schedule=threshold(17,5)",
    "random:schedule=threshold(0.6,0.2),sinks=1,window=2",
    "truncate",
    "truncate:keep_question=false",
    "streaming-llm:positions=cache",
    "streaming-llm:sinks=2,rolling=true",
    "streaming-llm:positions=cache,rolling=true",
    "h2o:schedule=threshold(0.5,0.25)",
    "h2o:schedule=threshold(16,9),agg=max,recent=0.25",
    "h2o:schedule=threshold(18,17),heads=layer,recent=3",
    "h2o-online",
    "h2o-online:recent=1,heads=query",
    "h2o-online:recent=0.25,heads=layer",
    "h2o-online:grow=true",
    "h2o-online:prefill=once,recent=3",
    "h2o-online:prefill=once,heads=query,grow=true",
    "pyramid-kv",
    "pyramid-kv:window=2,kernel=3,beta=5",
    "pyramid-kv:window=3,heads=query,short_uniform=true",
    "pyramid-kv:window=2,heads=layer,pool=none,beta=2",
    "pyramid-infer",
    "pyramid-infer:recent=3,sinks=1,r=0.5",
    "pyramid-infer:decay=linear,r=0.3,sinks=0",
    "pyramid-infer:decay=constant,r=0.6,distance_weight=2.5,recent=0.5",
    "pyramid-infer:over=all,sinks=0,recent=4",
    "pyramid-infer:lengths=natural,sinks=1,recent=0.1,r=0.5",
    "hybrid",
    "hybrid:chunkkv.chunk=3,chunkkv.window=2,snapkv.window=3,snapkv.kernel=3,snapkv.heads=query",
    "hybrid:chunkkv.chunk=4,chunkkv.window=3,chunkkv.heads=kv,snapkv.heads=layer,snapkv.window=3",
    "dynamickv",
    "dynamickv:window=2,kernel=3,update=1,r_max=2",
    "dynamickv:window=3,heads=query,update=2,r_max=1.5",
    "dynamickv:window=2,update=2,mid_total=proportional,pool=none",
    "dynamickv:window=2,update=2,norm=minmax,heads=layer",
    "dynamickv:window=4,progressive=false,r_max=3",
    "dynamickv:window=2,kernel=3,r_max=1",
    "sca",
    "sca:use=key,recent=0.5",
    "sca:use=value,recent=2,layer=0",
    "sca:objective=max,recent=2",
    "sca:share=1,positions=cache",
    "sca:schedule=threshold(0.5,0.25),recent=2",
    "sca:schedule=threshold(19,8),recent=3,positions=original,use=value",
    "sca:schedule=threshold(0.6,0.4),recent=0.25,share=1,objective=max,sinks=1",
    "finch:blocks=16,question_tokens=4",
    "finch:blocks=7,question_tokens=4,norm=none",
    "finch:blocks=9,question_tokens=4,condition=context",
    "finch:blocks=12,question_tokens=4,condition=all,heads=kv",
    "finch:blocks=8,question_tokens=4,order=relevance",
    "finch:blocks=10,question_tokens=4,rate=code",
    "finch:blocks=11,question_tokens=4,positions=original",
    "finch:question=last,question_tokens=5,order=relevance,condition=all,norm=none",
    "kivi",
    "kivi:bits=4,group=8,residual=16",
    "kivi:group=5,residual=7",
    "kivi:preset=table11",
    "oracle:counts=(pyramid-kv:window=2)",
    "oracle:counts=(pyramid-infer:sinks=1)",
    "oracle:counts=(sca)",
]
FIXTURE_POLICIES = [
    "random:seed=0",
    "h2o:recent=3,heads=query",
    "h2o-online:recent=3",
    "pyramid-kv:window=2,kernel=3",
    "pyramid-infer:sinks=1,recent=2,r=0.3",
    "hybrid:chunkkv.chunk=3,chunkkv.window=2,snapkv.window=2,snapkv.kernel=3",
    "layers:0-1=(chunkkv:chunk=3,window=2),2-3=(snapkv:window=2,kernel=3)",
    "dynamickv:window=2,kernel=3,heads=query,r_max=2,update=2",
    "dynamickv:window=2,kernel=3,r_max=2.5,update=1",
    "strided",
    "truncate",
    "sca:recent=2",
    "sca:recent=2,use=key",
    "sca:recent=2,use=value",
    "sca:recent=2,objective=max,sinks=1",
    "sca:recent=2,layer=0",
    "sca:recent=1,share=2",
    "sca:schedule=threshold(8,4),recent=1",
    "sca:schedule=threshold(8,4),recent=1,positions=original",
    "finch:question_tokens=2,blocks=5",
    "finch:question_tokens=2,blocks=5,positions=original",
    "finch:question_tokens=2,blocks=5,rate=code",
    "kivi:bits=2,group=4,residual=4",
    "oracle:counts=(dynamickv:window=2,kernel=3,r_max=2.5,update=1)",
    "oracle:counts=(hybrid:chunkkv.chunk=3,chunkkv.window=2,snapkv.window=2,snapkv.kernel=3)",
]
NEW_FEW_POLICIES = [
    "strided",
    "h2o-online",
    "h2o:schedule=threshold(0.5,0.25)",
    "streaming-llm:positions=cache",
    "streaming-llm:sinks=2,rolling=true",
    "sca:schedule=threshold(0.5,0.25),recent=2",
    "finch:blocks=16,question_tokens=4",
    "kivi:group=8,residual=16",
]
# Policies that came later: in their default form, and where their parameters matter on a short prompt. {folder} has a
# table for each trace.
FURTHER_POLICIES = [
    "tova",
    "tova:protect_last=true",
    "tova:schedule=online",
    "tova:schedule=online,protect_last=true",
    "scissorhands",
    "scissorhands:history=4,recent=2",
    "scissorhands:history=9,recent=0.3,heads=query",
    "scissorhands:history=12,recent=1,binary=false,agg=max",
    "scissorhands:history=7,recent=3,heads=layer",
    "knorm",
    "knorm:skip_layers=(0)",
    "keydiff",
    "keydiff:schedule=every(7)",
    "value-norm",
    "value-norm:p=1,sinks=1,window=2",
    "vatp",
    "vatp:sinks=1,recent=2",
    "vatp:base=scissorhands,sinks=2,recent=3,history=12",
    "observed-attention",
    "observed-attention:heads=query",
    "observed-attention:heads=layer",
    "observed-attention:agg=max",
    "expected-attention",
    "expected-attention:sinks=1,future=4",
    "expected-attention:sinks=2,future=7,covariance=false,epsilon=0.02",
    "expected-attention:sinks=0,future=50,vnorm=false,heads=layer",
    "expected-attention:sinks=1,future=9,heads=query",
    "expected-attention:sinks=3,agg=max",
    "lagkv",
    "lagkv:sinks=2,lag=3",
    "lagkv:sinks=1,lag=5",
    "ada-kv",
    "ada-kv:window=2,kernel=3,alpha=0.5,heads=query",
    "ada-kv:window=2,normalise=true,alpha=0",
    "ada-kv:window=1,pool=none",
    "head-kv:table={folder}/{trace}-importance.npy",
    "head-kv:table={folder}/{trace}-importance.npy,window=2,kernel=3,heads=query,beta=1.5",
    "critical-kv",
    "critical-kv:base=snapkv,first=0.75",
    "critical-kv:wo=none",
    "critical-kv:base=snapkv,wo=none,first=0.3",
    "critical-kv:base=h2o,wo=none",
    "quest",
    "quest:page=4,dense_layers=1,least_pages=2",
    "quest:page=3,dense_layers=0,least_pages=1",
    "think",
    "think:window=4,ratio=0.5,recent=3",
    "think:window=1,ratio=0.75,recent=0",
    "nacl:question_tokens=2",
    "nacl:question_tokens=3,random=0.5,temperature=0.5,seed=3",
    "cam",
    "cam:sinks=2,merge=3,mode=sampled,seed=5",
    "cam:preset=generate",
    "cam:merge=2,mean=later,schedule=rolling",
    "cam-one-shot",
    "cam-one-shot:merge=2,recent=2,schedule=every(7)",
    "cam-one-shot:merge=2,recent=2",
    "cam-one-shot:merge=3,mode=sampled,seed=5",
    "h2o:store=merged-similar",
    "ada-kv:window=2,kernel=1,store=merged-tokens",
    "h2o:recent=2,heads=layer,store=merged-tokens",
    "h2o:schedule=online,recent=3,store=merged-similar,similarity_threshold=0.2",
    "snapkv:window=2,kernel=1,agg=max,schedule=every(7),store=merged-similar,merge_fraction=0.75",
    "minicache",
    "minicache:gap=0.5,t=0.3",
    "minicache:distance=code,gap=0.2",
    "q-filter",
    "q-filter:filters={folder}/{trace}-filters.npy",
    "duo-attention",
    "duo-attention:sinks=2,recent=5,full_heads=0.3",
    "duo-attention:table={folder}/{trace}-gates.npy,sinks=1,recent=3",
    "simlayerkv",
    "simlayerkv:rows=3,sinks=1,recent=5,threshold=0.3",
    "simlayerkv:sinks=2,recent=4,threshold=0.2",
    "leverage",
    "leverage:sketch=3,seed=2",
    "leverage:ridge=0.5",
    "compactor",
    "compactor:mix=0.35,sketch=4,seed=1,sinks=1,recent=2,block=16",
    "compactor:sinks=2,recent=0,block=7",
    "cur",
    "cur:use=key,block=5,sinks=1",
    "cur:use=value,sinks=0",
    "cur:use=avg,block=7",
    "caote:window=2",
    "caote:base=cumulative,heads=query",
    "caote:window=1,heads=layer",
    "lava:window=2,kernel=3",
    "lava:window=3,pool=none,heads=query,agg=mean,floor=0",
    "lava:window=2,kernel=3,floor=0.7",
    "defensive-kv:window=2,kernel=3",
    "defensive-kv:window=4,pool=none,heads=layer",
]
# Policies whose reference was written before them: compared as soon as the registry has them.
AHEAD_POLICIES = [
    "r-kv:window=2,kernel=3",
    "r-kv:window=4,kernel=1,mix_lambda=0.5,threshold=0.2",
    "vase:window=4,sinks=1",
    "vase:window=2,sinks=0,large=0.6,kernel=3,temperature=2,seed=3",
    "cap-kv:sinks=1,future=4",
    "cap-kv:sinks=0,future=50,tau=1,epsilon=0.1",
    "kvcrush:window=2,page=3",
    "kvcrush:window=3,page=2,ratio=0.6,anchor=alternating",
    "kvcrush:window=1,page=4,ratio=0.4,anchor=random,seed=2",
    "keyformer",
    "keyformer:recent=0.5,tau=2,seed=3,gap=true",
    "dms:base=(knorm),threshold=-2.5,recent=3",
    "lru",
    "lfu",
    "tri-attention:recent=2",
    "tri-attention:recent=0,agg=mean",
    "laprox:window=2,kernel=3",
    "kvzip",
    "kvzip:sinks=1",
    "kvzip:sinks=0,agg=mean,heads=query",
    "kvcompose",
    "kvcompose:heads=query",
    "kvcompose:agg=max,allocate=ranked-global",
    "oracle-top-k",
    "oracle-top-k:sinks=2,local=2,dense_layers=1",
    "oracle-top-p:p=0.8",
    "oracle-top-p:p=0.3,sinks=1,local=3",
    "double-sparsity:group_factor=2",
    "double-sparsity:group_factor=4,label_bits=16,sinks=1,local=1,share=kv-head",
    "double-sparsity:group_factor=2,label_bits=3,channels=q",
    "page-means:page=4,least_pages=2",
    "page-means:page=3,least_pages=1,dense_layers=1",
    "magic-pig:bits=3,tables=4,sinks=2,local=3,seed=1",
    "magic-pig:bits=2,tables=5,collisions=2,sinks=0,local=0,dense_layers=1",
    "pq:init_offset=2,sinks=2,local=2",
    "pq:init_offset=0,sinks=0,local=0,bits=2,iterations=3,seed=4",
]
FURTHER_FIXTURE_POLICIES = [
    "tova",
    "tova:schedule=online",
    "knorm",
    "knorm:skip_layers=(3)",
    "keydiff",
    "keydiff:schedule=every(5)",
    "observed-attention",
    "vatp:recent=3,sinks=1",
    "scissorhands:history=4,recent=2",
    "expected-attention:sinks=1,future=4",
    "lagkv:sinks=2,lag=3",
    "ada-kv:window=2,kernel=3",
    "cur:block=4,sinks=1",
    "think:window=2,ratio=0.5,recent=2",
    "minicache",
    "cam:sinks=1,merge=2",
    "cam-one-shot:recent=3",
    "h2o:recent=3,store=merged-similar,merge_fraction=0.5",
    "quest:page=2,least_pages=1",
]
FURTHER_REAL_POLICIES = [
    "tova",
    "tova:schedule=online",
    "scissorhands",
    "knorm",
    "keydiff",
    "keydiff:schedule=every(128)",
    "value-norm",
    "vatp",
    "observed-attention",
    "expected-attention",
    "lagkv",
    "ada-kv",
    "head-kv:table={folder}/{trace}-importance.npy",
    "critical-kv:base=snapkv,wo=none",
    "quest",
    "think",
    "nacl",
    "cam",
    "cam-one-shot",
    "snapkv:store=merged-similar",
    "minicache",
    "q-filter",
    "duo-attention:sinks=4,recent=20",
    "simlayerkv:recent=44",
    "leverage",
    "leverage:sketch=48",
    "compactor",
    "cur",
    "caote",
    "lava",
    "defensive-kv",
]
ALSO_LARGE_BUDGETS = (random_traces.one_layer, random_traces.sliding_windows)
ALSO_ALL_ROWS = (
    random_traces.grouped_queries,
    random_traces.prompt_shorter_than_the_window,
    random_traces.sliding_windows,
    random_traces.softcap,
)
METRICS = [
    "attention_recall",
    "attention_recall:prompt",
    "attention_recall:nosink",
    "attention_recall:oracle",
    "attention_recall:unprotected",
    "attention_recall:worst",
    "sink_mass",
    "attention_cosine",
    "attention_cosine:prompt",
    "attention_cosine:nosink",
    "attention_cosine:logits",
    "attention_cosine:unaligned",
    "attention_l1",
    "output_cosine",
    "output_error",
    "output_error:pooled",
    "output_error:worst",
    "kv_l1_loss",
    "kv_l1_loss:key",
    "kv_l1_loss:value",
    "kv_l1_loss:absolute",
    "kv_l1_loss:token",
    "jaccard_adjacent",
    "layer_budget",
    "layer_budget:unprotected",
    "span_recall",
    "span_erased",
    "head_consensus",
    "head_consensus:protected",
    "kv_bytes",
    "kv_bytes:union",
    "kv_bytes:peak",
    "kv_bytes:mean",
    "compression",
    "compression:context",
    "held_tokens",
    "redundancy_key",
    "redundancy_value",
]


@dataclass(frozen=True)
class Run:
    """One call of the program."""

    trace: str
    choice: str
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    rows: bool  # with the cosine over all queries


@dataclass
class Cell:
    """A cell of the program's: its policy with all parameters, the budget as asked, its rows of results.csv."""

    policy: Policy
    budget: str
    name: str
    rows: pd.DataFrame


@dataclass
class Results:
    """What the program wrote: results.csv, whole and by cell, and where the file of cells lies."""

    frame: pd.DataFrame
    cells: list[Cell]
    cells_path: Path


def cells_file(run: Path) -> Path:
    """Of the one trace of a run."""
    [path] = run.glob("cells/*.h5")
    return path


def table(trace: str, layers: int, query_heads: int, kv_heads: int, d: int) -> None:
    """Tables for a trace, beside it: importances of query heads that sum to 1, gates of KV heads, and filters."""
    generator = np.random.default_rng(sum(trace.encode()))
    importance = generator.uniform(size=(layers, query_heads)) ** 3
    tables = {
        "importance": importance / importance.sum(),
        "gates": generator.uniform(size=(layers, kv_heads)),
        "filters": generator.normal(size=(layers, kv_heads, d)),
    }
    for name, values in tables.items():
        np.save(Path(folder().name) / f"{trace}-{name}.npy", values)


def further(trace: str, content: random_traces.Content | None, policies: list[str], budget: str) -> tuple[str, ...]:
    """Of the policies those that the trace has what it takes for, with its tables."""
    if content:
        layers = sum(window == 0 for window in content.windows or [0] * len(content.k))
        table(trace, layers, len(content.q[0]), *content.k[0].shape[::2])
        policies = [policy for policy in policies if has_what_it_takes(content, policy, budget)]
    return tuple(policy.format(folder=folder().name, trace=trace) for policy in policies)


def has_what_it_takes(content: random_traces.Content, text: str, budget: str) -> bool:
    """Queries, RoPE, an output projection, a prompt as long and a model as deep as the parameters say."""
    policy = Policy.parse(text)
    given, parameters = dict(policy.given), parameters_of(policy)
    prompt, tokens = content.prompt, reference.budget_tokens(budget, content.prompt)
    treated = sum(window == 0 for window in content.windows or [0] * len(content.k))
    based = parameters.get("base", "").partition(":")[0]
    rotated = {"expected-attention", "leverage", "compactor", "cap-kv", "tri-attention"}
    if {policy.name, based} & rotated and not content.rope:
        return False
    if policy.name == "cam" and parameters["positions"] == "cache" and not content.rope:
        return False
    if policy.name == "double-sparsity" and parameters["channels"] != "qk" and not content.rope:
        return False
    if policy.name == "laprox" and content.wo is None:
        return False
    if policy.name in ("kvzip", "kvcompose") and content.passes is None:
        return False
    if policy.name == "pq" and content.k[0].shape[2] % int(parameters["parts"]):
        return False
    if policy.name == "duo-attention" and parameters["table"] == "kvpress" and not content.rope:
        return False
    if policy.name == "critical-kv" and parameters["wo"] == "trace" and content.wo is None:
        return False
    if policy.name == "knorm" and parameters["skip_layers"] != "none":
        return treated > 1 and treated * tokens >= prompt + treated
    lengths = ("sinks", "window", "recent", "local", "question_tokens")
    if policy.name in ("ada-kv", "head-kv", "think"):
        lengths = ("recent",)
    return all("." in given[name] or int(given[name]) <= prompt for name in lengths if name in given)


def queries_of(policy: Policy) -> str:
    """Which prompt queries a policy reads: all, last or none."""
    if policy.name == "oracle" and parameters_of(policy)["counts"] != "none":
        return queries_of(Policy.parse(unwrapped(parameters_of(policy)["counts"])))
    return {"h2o": "all", "snapkv": "last", "chunkkv": "last"}.get(policy.name, "none")


def accepted(content: random_traces.Content, text: str, budget: str = "0.2") -> bool:
    """Whether the trace has what the policy reads, and is long and deep enough for what the user gives."""
    policy = Policy.parse(text)
    given, parameters = dict(policy.given), parameters_of(policy)
    if content.q_positions is not None:
        first = content.prompt - content.q_positions[0]
        window = parameters.get("window", "0")
        if queries_of(policy) == "all" or (queries_of(policy) == "last" and int(window) > first):
            return False
    at_threshold = parameters.get("schedule", "once") != "once"
    moved = parameters.get("positions") == "cache" or (policy.name == "sca" and at_threshold)
    if moved and parameters.get("positions") != "original" and not content.rope:
        return False
    trace = Trace("", [], content.prompt, 1.0, 0.0, 4)
    trace.spans = {name: (begin, end) for name, (_, begin, end) in content.spans.items()}
    trace.kinds = {name: kind for name, (kind, _, _) in content.spans.items()}
    tokens = reference.budget_tokens(budget, content.prompt)
    question = trace.question_tokens if parameters.get("question", "auto") == "auto" else 0
    question = question or int(parameters.get("question_tokens", "0"))
    if policy.name in ("finch", "truncate") and tokens <= question:
        return False
    if at_threshold:
        peak, keep = (reference.budget_tokens(size, content.prompt) for size in call_of(parameters["schedule"])[1])
        if not keep < peak <= content.prompt:
            return False
    treated = sum(window == 0 for window in content.windows or [0] * len(content.k))
    limits = {"sinks": content.prompt, "recent": content.prompt, "reuse": treated, "share": treated}
    if policy.name == "random":
        limits["window"] = content.prompt
    return all("." in given[key] or int(given[key]) <= limit for key, limit in limits.items() if key in given)


def on_shape(seed: int) -> list[str]:
    """The first of each family, which every shape sees, and in turn a third of its other readings."""
    result, families = [], set()
    for index, policy in enumerate(SHAPE_POLICIES):
        family = (Policy.parse(policy).name, "threshold" in policy)
        if family not in families or (index + seed) % 3 == 0:
            result.append(policy)
        families.add(family)
    return result


def runs() -> list[Run]:
    every = [
        Run("fixture", "continuation", tuple(POLICIES), (*BUDGETS, "6", MORE_THAN_THE_PROMPT), True),
        Run("fixture", "stride:2", tuple(FIXTURE_POLICIES), ("6",), False),
    ]
    every += [Run("fixture", choice, tuple(FEW_POLICIES), ("6",), False) for choice in ("last:4", "all", "stride:3")]
    for build in random_traces.TRACES:
        content = build()
        policies = tuple(policy for policy in POLICIES if accepted(content, policy))
        choice = "continuation" if content.prompt < content.k[0].shape[1] else "last:4"
        large = (MORE_THAN_THE_PROMPT,) if build in ALSO_LARGE_BUDGETS else ()
        every.append(Run(build.__name__, choice, policies, BUDGETS + large, build in ALSO_ALL_ROWS))
    for choice in ("last:4", "all", "stride:3", "span:needle", "span:reply"):
        every.append(Run("grouped_queries", choice, tuple(FEW_POLICIES), ("0.2", "5"), False))
    every.append(Run("sliding_windows", "last:5", tuple(FEW_POLICIES), ("0.2",), False))
    every.append(Run("large_logits", "all", tuple(FEW_POLICIES), ("0.2",), False))
    for seed in range(random_traces.SHAPES):
        content = random_traces.shape(seed)
        budget = (f"0.{30 + seed % 17}", str(10 + seed % 8))[seed % 2]
        chosen = on_shape(seed)
        policies = tuple(policy for policy in chosen if accepted(content, policy, budget))
        every.append(Run(f"shape{seed}", "continuation", policies, (budget,), False))
    for seed, choice, budget in ((0, "all", "0.3"), (3, "last:6", "14"), (7, "stride:4", "12"), (11, "all", "0.5")):
        content = random_traces.shape(seed)
        policies = tuple(policy for policy in NEW_FEW_POLICIES if accepted(content, policy, budget))
        every.append(Run(f"shape{seed}", choice, policies, (budget,), False))
    for seed in (2, 5, 6):  # the window is longer than the budget
        content = random_traces.shape(seed)
        policies = tuple(policy for policy in SHAPE_POLICIES if accepted(content, policy, "3"))
        every.append(Run(f"shape{seed}", "stride:5", policies, ("3",), False))
    for seed in (0, 3):
        policies = tuple(policy for policy in SHAPE_POLICIES if accepted(random_traces.shape(seed), policy))
        every.append(Run(f"shape{seed}", "stride:7", policies, (MORE_THAN_THE_PROMPT,), False))
    every += further_runs()
    if REAL.exists():
        every.append(Run("real", "continuation", tuple(REAL_POLICIES), ("0.1",), False))
        every.append(Run("real", "last:20", tuple(FEW_POLICIES), ("0.2",), False))
    return every


def further_runs() -> list[Run]:
    """Each later policy on the fixture, on a part of the small traces and shapes in turn, and on the real trace."""
    registered = set(call("policies", "--names").stdout.split())
    later = FURTHER_POLICIES + [policy for policy in AHEAD_POLICIES if Policy.parse(policy).name in registered]
    table("fixture", 4, 4, 2, 4)
    every = [
        Run("fixture", "continuation", further("fixture", None, FURTHER_FIXTURE_POLICIES, "6"), ("6", "9"), False),
        Run("fixture", "all", further("fixture", None, FURTHER_FIXTURE_POLICIES, "6"), ("6",), False),
    ]
    for number, build in enumerate(random_traces.TRACES):
        content, budget = build(), ("0.2", "0.4", "5")[number % 3]
        if content.q_positions is not None:
            continue
        chosen = [policy for index, policy in enumerate(later) if (index + number) % 4 == 0]
        policies = further(build.__name__, content, chosen, budget)
        choice = "continuation" if content.prompt < content.k[0].shape[1] else "last:4"
        every.append(Run(build.__name__, choice, policies, (budget,), False))
    for number, seed in enumerate(seed for seed in range(random_traces.SHAPES) if seed % 4 < 2):
        content, budget = random_traces.shape(seed), (f"0.{33 + seed % 17}", str(8 + seed % 11))[seed % 2]
        chosen = [policy for index, policy in enumerate(later) if (index + number) % 4 == 0]
        policies = further(f"shape{seed}", content, chosen, budget)
        every.append(Run(f"shape{seed}", ("continuation", "stride:6")[number % 5 == 0], policies, (budget,), False))
    content = random_traces.shape(4)
    every.append(Run("shape4", "stride:6", further("shape4", content, later, "1000"), ("1000",), False))
    if REAL.exists():
        table("real", 30, 9, 3, 64)
        every.append(Run("real", "continuation", further("real", None, FURTHER_REAL_POLICIES, "0.2"), ("0.2",), False))
    return every


@functools.cache
def folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="kvreplay-reference-")


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if not PROGRAM.exists():
        pytest.fail(f"no program at {PROGRAM}: build it, or name it with KVREPLAY")
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=120)


@functools.cache
def trace_path(name: str) -> Path:
    """The trace's file, written on first use."""
    if name == "real":
        return REAL
    path = Path(folder().name) / f"{name}.h5"
    if name == "fixture":
        finished = call("synth", "fixture", "-o", path)
        assert finished.returncode == 0, finished.stderr
    else:
        number = name.removeprefix("shape")
        write_trace(path, random_traces.shape(int(number)) if number != name else getattr(random_traces, name)())
    return path


@functools.cache
def trace_of(name: str) -> Trace:
    return reference.read_trace(trace_path(name))


def results(run: Run) -> Results:
    """The program's results of a run, made once; a run that fails fails every test that reads it."""
    made = replayed(run)
    if isinstance(made, str):
        pytest.fail(made)
    return made


def read_frame(folder: Path) -> pd.DataFrame:
    """results.csv of a run, values as numbers."""
    text = ["policy", "params", "budget", "layer", "head", "metric", "variant", "cell", "role", "heads", "trace_hash"]
    path = folder / "results.csv"
    frame = pd.read_csv(path, dtype=dict.fromkeys(text, str), keep_default_na=False, low_memory=False)
    frame["value"] = frame["value"].replace("", np.nan).astype(float)
    return frame


def metrics_of(trace: reference.Trace) -> list[str]:
    """All that the trace has what it takes for."""
    return METRICS + (["output_error:projected", "output_error:residual"] if trace.has_projections else [])


@functools.cache
def replayed(run: Run) -> Results | str:
    """The program's results of a run, or how it failed."""
    out = Path(tempfile.mkdtemp(prefix=f"{run.trace}-", dir=folder().name)) / "out"
    metrics = metrics_of(trace_of(run.trace)) + (["attention_cosine:rows"] if run.rows else [])
    finished = call(
        "replay",
        trace_path(run.trace),
        *(argument for policy in run.policies for argument in ("-p", policy)),
        "-b",
        ",".join(run.budgets),
        "--eval",
        run.choice,
        "--metrics",
        ",".join(metrics),
        "--detail",
        "head",
        "--progress",
        "never",
        "-o",
        out,
    )
    if finished.returncode != 0:
        return f"{run.trace} {run.choice}: exit {finished.returncode}\n{finished.stderr}"
    frame = read_frame(out)
    cells = [
        Cell(Policy.parse(f"{policy}:{params}"), budget, str(name), rows)
        for (policy, params, budget, name), rows in frame.groupby(["policy", "params", "budget", "cell"])
        if policy
    ]
    return Results(frame, cells, cells_file(out))


def program_parameters(policy: Policy) -> dict[str, str]:
    """What the program writes, with a threshold spelled as it is asked for."""
    parameters = parameters_of(policy)
    if parameters.get("schedule") == "threshold":
        parameters["schedule"] = f"threshold({parameters['peak']},{parameters['keep']})"
    if parameters.get("schedule") == "every":
        parameters["schedule"] = f"every({parameters['interval']})"
    if "schedule" in parameters:
        parameters["schedule"] = unwrapped(parameters["schedule"])
    return parameters


def equal_values(ours: str, theirs: str) -> bool:
    """Parameter values as the command line spells them: 0.50 is 0.5, but 1.0 (a share) is not 1 (a count)."""
    if ours.startswith("(") or ":" in ours:
        mine, other = Policy.parse(unwrapped(ours)), Policy.parse(unwrapped(theirs))
        return mine.name == other.name and equal_parameters(mine, other)
    try:
        return float(ours) == float(theirs) and ("." in ours) == ("." in theirs)
    except ValueError:
        return ours == theirs


def equal_parameters(ours: Policy, theirs: Policy) -> bool:
    other = program_parameters(theirs)
    return all(key in other and equal_values(value, other[key]) for key, value in parameters_of(ours).items())


def cell_of(run: Run, policy: str, budget: str) -> Cell:
    """The one cell of a policy with these parameters at this budget; budgets of as many tokens are one."""
    ours = Policy.parse(policy)
    prompt = trace_of(run.trace).prompt
    tokens = reference.budget_tokens(budget, prompt)
    found = [
        cell
        for cell in results(run).cells
        if cell.policy.name == ours.name
        and reference.budget_tokens(cell.budget, prompt) == tokens
        and equal_parameters(ours, cell.policy)
    ]
    assert len(found) == 1, f"{policy} at {budget}: {len(found)} cells of {run.trace}"
    return found[0]
