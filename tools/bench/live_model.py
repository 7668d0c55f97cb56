"""The policies on a live model, one policy and one budget after the other, as they are compared without a trace.

    python tools/bench/live_model.py TRACE --model build/model/smollm2-135m-instruct.gguf -o live_model.json

TRACE gives the tokens: its prompt, and the first 32 that follow. A run is: the prompt through the model, in each layer
scores and selection by hand in PyTorch (cumulative attention needs the whole matrix of a layer, as
`attn_implementation="eager"` computes it; all other layers run `sdpa`), then the 32 tokens through the model with the
full cache, and in each layer recall, cosine and L1 distance of their attention over what the policy keeps. Each policy
is run at one budget; at every other budget it would take as long again, so the time of a comparison is their sum times
the number of budgets.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from pytorch_forms import window_sums
from torch import Tensor

from kvreplay.capture.model import load
from kvreplay.capture.model_options import ModelChoices
from kvreplay.trace import Trace

EVAL_QUERIES = 32
WINDOW = 8  # last prompt queries that score in the SnapKV family, and stay


@dataclass
class LayerState:
    """One layer after the prompt: q [Hq, P, d], k [Hkv, P, d]."""

    number: int
    layers: int
    q: Tensor
    k: Tensor
    scale: float
    budget: int
    cumulative: Tensor | None = None  # [Hq, P]

    @property
    def prompt(self) -> int:
        return self.k.shape[1]

    @property
    def group(self) -> int:
        return self.q.shape[0] // self.k.shape[0]

    def window_attention(self) -> Tensor:
        """[Hkv, P - WINDOW]: what the last queries attend to, mean over the query heads of a group."""
        rows = self.q[:, -WINDOW:].reshape(self.k.shape[0], -1, self.q.shape[2])
        logits = (rows @ self.k.transpose(-1, -2)).float().view(-1, WINDOW, self.prompt) * self.scale
        return window_sums(logits).view(-1, self.group, self.prompt).mean(1)[:, :-WINDOW]

    def positions(self, *ranges: tuple[int, int]) -> Tensor:
        """[Hkv, n]: the same ranges for every head."""
        kept = torch.cat([torch.arange(begin, end) for begin, end in ranges])
        return kept.expand(self.k.shape[0], -1)

    def with_window(self, kept: Tensor) -> Tensor:
        window = torch.arange(self.prompt - WINDOW, self.prompt).expand(kept.shape[0], -1)
        return torch.cat([kept, window], -1)


def _snapkv(state: LayerState, budget: int) -> Tensor:
    pooled = torch.nn.functional.max_pool1d(state.window_attention(), 7, stride=1, padding=3)
    return state.with_window(pooled.topk(budget - WINDOW).indices)


def _pyramid(state: LayerState) -> Tensor:
    """Budgets fall evenly from 2b - b/20 to b/20 beside the window."""
    b = state.budget - WINDOW
    first = min(2 * b - b / 20, state.prompt - WINDOW)
    share = first - (first - (2 * b - first)) * state.number / (state.layers - 1)
    return _snapkv(state, WINDOW + round(share))


def _chunks(state: LayerState) -> Tensor:
    """Whole chunks of 10 tokens for all heads; the last one that fits is cut."""
    scores = state.window_attention().sum(0)
    sums = torch.nn.functional.pad(scores, (0, -len(scores) % 10)).view(-1, 10).sum(-1)
    order = sums.argsort(descending=True)[:, None] * 10 + torch.arange(10)
    kept = order.flatten()
    kept = kept[kept < len(scores)][: state.budget - WINDOW]
    return state.with_window(kept.expand(state.k.shape[0], -1))


def _h2o(state: LayerState) -> Tensor:
    assert state.cumulative is not None
    recent = state.budget // 2
    scores = state.cumulative.view(-1, state.group, state.prompt).mean(1)[:, : state.prompt - recent]
    last = state.positions((state.prompt - recent, state.prompt))
    return torch.cat([scores.topk(state.budget - recent).indices, last], -1)


POLICIES: dict[str, Callable[[LayerState], Tensor]] = {
    "full": lambda state: state.positions((0, state.prompt)),
    "random": lambda state: torch.rand(state.k.shape[0], state.prompt).argsort(-1)[:, : state.budget],
    "local": lambda state: state.positions((state.prompt - state.budget, state.prompt)),
    "streaming-llm": lambda state: state.positions((0, 4), (state.prompt - state.budget + 4, state.prompt)),
    "strided": lambda state: (torch.arange(state.budget) * state.prompt // state.budget).expand(state.k.shape[0], -1),
    "truncate": lambda state: state.positions(
        (0, (state.budget + 1) // 2), (state.prompt - state.budget // 2, state.prompt)
    ),
    "h2o": _h2o,
    "snapkv": lambda state: _snapkv(state, state.budget),
    "pyramid-kv": _pyramid,
    "chunkkv": _chunks,
}


@dataclass
class Run:
    """What the attention function that the model calls sees and leaves behind."""

    policy: str
    budget: int
    layers: int
    kept: dict[int, Tensor] = field(default_factory=dict)
    metrics: list[tuple[float, float, float]] = field(default_factory=list)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """query [1, Hq, n, d], key and value [1, Hkv, T, d] -> output [1, n, Hq, d]."""
        group = query.shape[1] // key.shape[1]
        prompt = query.shape[2] == key.shape[2]
        if prompt and self.policy == "h2o":
            weights = self._eager(query, key, scaling, group)
            output = weights.to(value.dtype) @ value.repeat_interleave(group, 1)
            cumulative = weights[0].sum(-2)
        else:
            seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
            output = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if prompt else seen,
                is_causal=prompt,
                scale=scaling,
                enable_gqa=True,
            )
            cumulative = None
        if prompt:
            state = LayerState(module.layer_idx, self.layers, query[0], key[0], scaling, self.budget, cumulative)
            self.kept[module.layer_idx] = POLICIES[self.policy](state)
        else:
            self._measure(module.layer_idx, self._eager(query, key, scaling, group)[0])
        return output.transpose(1, 2).contiguous(), None

    @staticmethod
    def _eager(query: Tensor, key: Tensor, scaling: float, group: int) -> Tensor:
        """[1, Hq, n, T] float32 attention."""
        n, tokens = query.shape[2], key.shape[2]
        logits = (query @ key.repeat_interleave(group, 1).transpose(-1, -2)).float() * scaling
        unseen = torch.ones(n, tokens, dtype=torch.bool).triu(tokens - n + 1)
        return torch.softmax(logits.masked_fill(unseen, -math.inf), -1)

    def _measure(self, layer: int, attention: Tensor) -> None:
        """attention [Hq, n, T] of the tokens after the prompt."""
        kept = self.kept[layer]
        tokens, n = attention.shape[2], attention.shape[1]
        stays = torch.zeros(kept.shape[0], tokens, dtype=torch.bool)
        stays.scatter_(1, kept, True)
        stays[:, tokens - n :] = True
        over_kept = attention * stays.repeat_interleave(attention.shape[0] // kept.shape[0], 0)[:, None]
        mass = over_kept.sum(-1)
        compressed = over_kept / mass[..., None]
        cosine = torch.nn.functional.cosine_similarity(attention, compressed, dim=-1)
        distance = (attention - compressed).abs().sum(-1)
        self.metrics.append((float(mass.mean()), float(cosine.mean()), float(distance.mean())))

    def mean(self, metric: int) -> float:
        return sum(values[metric] for values in self.metrics) / len(self.metrics)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("trace", type=Path)
    options.add_argument("--model", required=True)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--budget", type=float, default=0.1, help="share of the prompt")
    options.add_argument("-o", dest="output", type=Path, required=True)
    given = options.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, _ = load(ModelChoices(given.model, dtype=given.dtype))
    with Trace(given.trace) as trace:
        prompt = trace.prompt
        ids = torch.from_numpy(trace["/tokens/ids"][: prompt + EVAL_QUERIES].astype("int64"))[None]
    run: Run
    transformers.AttentionInterface.register("observed", lambda *inputs, **named: run.attend(*inputs, **named))
    model.set_attn_implementation("observed")
    layers = model.config.num_hidden_layers
    rows = []
    with torch.inference_mode():
        for number, policy in enumerate(["full", *POLICIES]):
            run = Run(policy, int(given.budget * prompt + 0.5), layers)
            begin = time.perf_counter()
            cache = model(ids[:, :prompt], use_cache=True, logits_to_keep=1).past_key_values
            model(ids[:, prompt:], past_key_values=cache, logits_to_keep=1)
            seconds = time.perf_counter() - begin
            if number == 0:
                continue  # the first run also loads what it needs
            rows.append({"policy": policy, "seconds": seconds, "recall": run.mean(0)})
            print(f"{policy}: {seconds:.2f} s, recall {run.mean(0):.4f}, cosine {run.mean(1):.4f}")
    given.output.write_text(json.dumps({"prompt": prompt, "runs": rows}, indent=1))


if __name__ == "__main__":
    main()
