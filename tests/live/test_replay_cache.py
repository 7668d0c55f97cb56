"""Policies in `model.generate`: the kept sets of a replay, and the predictions of eager attention with the mask written
out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from captured_case import Case
from test_masks import loaded, window_of, with_masks

import kvreplay as kv
from kvreplay.capture.model import cache_name, decoder
from kvreplay.live import passes
from kvreplay.live.cells import cells_of, evicted
from kvreplay.transformers import ReplayCache

BUDGET = 24
STORES = ("streaming-llm:positions=cache", "kivi:bits=2,group=8,residual=16", "think:window=4,ratio=0.5",
          "cam-one-shot:recent=4")  # fmt: skip
ONE_SHOT = ["snapkv:window=4,kernel=3", "chunkkv:window=4,chunk=4", "ada-kv:window=4", "local"]  # conftest.POLICIES


def predicted(model: Any, cache: ReplayCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits [n,V] of a pass over the next tokens."""
    with torch.inference_mode():
        return model(input_ids=ids[None], **{cache_name(decoder(model)): cache}).logits[0]


def resident(cache: ReplayCache, layer: int, tokens: int) -> np.ndarray:
    """Whether a token is in the cache: bool [Hkv,tokens]."""
    rows = cache.layers[layer].positions
    kept = np.zeros((len(rows), tokens), dtype=bool)
    for head, row in enumerate(rows):
        kept[head, row[row < tokens]] = True
    return kept


def full_masks(model: Any, name: str, tokens: int) -> list[np.ndarray]:
    """Causal attention, in sliding windows where layers have these: bool [Hq,T,T] by layer."""
    heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    windows = [window_of(name, layer) or tokens for layer in range(layers)]
    return [
        np.broadcast_to((distance >= 0) & (distance < window), (heads, tokens, tokens)).copy() for window in windows
    ]


def restrict(masks: list[np.ndarray], query: int, cache: ReplayCache) -> None:
    """Hides from the query, and from all later ones, the earlier tokens that are not in the cache."""
    for layer, mask in enumerate(masks):
        kept = resident(cache, layer, query)
        mask[:, query:, :query] &= kept.repeat(len(mask) // len(kept), axis=0)[:, None]


def by_eager(eager: Any, masks: list[np.ndarray], ids: torch.Tensor) -> torch.Tensor:
    """Logits [T,V] of one pass over all tokens."""
    with torch.inference_mode(), with_masks(eager, masks):
        return eager(input_ids=ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("policy", ONE_SHOT)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "gemma2"])
def test_one_shot_policies(name: str, policy: str, case: Callable[..., Case]) -> None:
    run, trace, model, eager, text = loaded(case(name))
    before = model.config._attn_implementation
    cache, prompt = ReplayCache(model, policy, BUDGET), text.prompt
    own = predicted(model, cache, text.ids[:prompt])
    kept = run.selection(policy, BUDGET).mask()
    for layer, rows in enumerate(kept):
        # The run treats layers with sliding windows, too.
        wanted = np.ones_like(rows) if window_of(name, layer) else rows
        np.testing.assert_array_equal(resident(cache, layer, prompt), np.broadcast_to(wanted, (trace.kv_heads, prompt)))
        assert cache.layers[layer].keys.shape[2] == wanted.sum(axis=-1).max()
    masks = full_masks(eager, name, len(text.ids))
    whole = by_eager(eager, masks, text.ids)
    restrict(masks, prompt, cache)
    wanted = by_eager(eager, masks, text.ids)
    found = torch.cat([predicted(model, cache, ids) for ids in (text.ids[prompt : prompt + 1], text.ids[prompt + 1 :])])
    torch.testing.assert_close(own, wanted[:prompt], atol=2e-4, rtol=0)
    torch.testing.assert_close(found, wanted[prompt:], atol=2e-4, rtol=0)
    assert (found - whole[prompt:]).abs().max() > 1e-3
    assert cache.get_seq_length() == len(text.ids) and model.config._attn_implementation == before


@pytest.mark.parametrize("policy", ["h2o-online:recent=4", "h2o:schedule=every(16),recent=4"])
def test_schedules(policy: str, case: Callable[..., Case]) -> None:
    """Tokens are evicted for good, and each query sees the tokens that were resident before it."""
    run, trace, model, eager, text = loaded(case("llama"))
    cache, prompt = ReplayCache(model, policy, BUDGET), text.prompt
    predicted(model, cache, text.ids[:prompt])
    np.testing.assert_array_equal(
        np.stack([resident(cache, layer, prompt) for layer in range(trace.layers)]),
        run.selection(policy.partition(":")[0], BUDGET).mask(),
    )
    masks = full_masks(eager, "llama", len(text.ids))
    found, counts = [], []
    for query in range(prompt, len(text.ids)):
        restrict(masks, query, cache)
        found.append(predicted(model, cache, text.ids[query : query + 1]))
        for layer in range(trace.layers):
            now, past = resident(cache, layer, query + 1), masks[layer][:: eager.config.num_attention_heads // 2, query]
            assert not (now[:, :query] & ~past[:, :query]).any()
            assert now[:, -4:].all()
            counts.append(now.sum(axis=-1))
    torch.testing.assert_close(torch.cat(found), by_eager(eager, masks, text.ids)[prompt:], atol=2e-4, rtol=0)
    grows = policy.startswith("h2o:")  # every(16) counts tokens of the prompt
    assert (np.array(counts) > BUDGET).any() if grows else (np.array(counts) == BUDGET).all()


@pytest.mark.parametrize("policy", STORES)
def test_stores(policy: str, case: Callable[..., Case]) -> None:
    """Moved and changed keys and values, as in the passes of `kvreplay live`, which test_masks compares."""
    run, trace, model, _, text = loaded(case("llama", "cache_stores", STORES))
    rows = run.cells[run.cells["policy"] == policy.partition(":")[0]]
    [cell, *_] = cells_of(run, trace, rows[rows["budget"].isin((str(BUDGET), "none"))])[0]
    wanted = passes.run(model, text, evicted(text, [cell], trace)).log_probabilities[0]
    cache = ReplayCache(model, policy, BUDGET)
    predicted(model, cache, text.ids[: text.prompt])
    found = predicted(model, cache, text.ids[text.prompt :]).double().log_softmax(-1)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)


def test_generate(case: Callable[..., Case]) -> None:
    """A policy in Python; a cache is used again after `reset`, and leaves nothing behind in the model."""
    _, _, model, eager, text = loaded(case("llama"))

    @kv.policy(recent=4)
    def long_values(view: Any) -> np.ndarray:
        return view.value_norms(1)

    cache = ReplayCache(model, long_values, 0.3)
    argument = "cache" if cache_name(decoder(model)) == "cache" else "past_key_values"
    prompt = text.ids[None, : text.prompt]
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6}
    found = model.generate(prompt, **options, **{argument: cache})[0]
    masks = full_masks(eager, "llama", len(found))
    restrict(masks, text.prompt, cache)
    following = by_eager(eager, masks, found)[text.prompt - 1 : -1].clone()
    following[:, eager.generation_config.eos_token_id] = -torch.inf  # min_new_tokens
    assert torch.equal(following.argmax(-1), found[text.prompt :])
    cache.reset()
    assert torch.equal(model.generate(prompt, **options, **{argument: cache})[0], found)
    hooks = len(decoder(model)._forward_hooks)
    del cache
    gc.collect()
    assert len(decoder(model)._forward_hooks) == hooks - 1


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("oracle", "oracle: reads queries of the continuation: expected a policy without them"),
        ("quest", "quest: each query reads a different set, and no token is evicted"),
        ("snapkv:window=4,heads=query", "keeps a set for each query head: expected heads=kv or heads=layer"),
        ("snapkv:window=0", "window"),
    ],
)
def test_rejected_policies(policy: str, message: str, case: Callable[..., Case]) -> None:
    _, _, model, _, text = loaded(case("llama"))
    with pytest.raises(kv.Error, match=message):
        predicted(model, ReplayCache(model, policy, BUDGET), text.ids)
    assert model.config._attn_implementation == "sdpa"


def test_rejected_inputs(case: Callable[..., Case]) -> None:
    _, _, model, _, text = loaded(case("llama"))
    name = cache_name(decoder(model))
    two = text.ids.expand(2, -1)
    with pytest.raises(kv.Error, match="ReplayCache: batch: expected token ids of one sequence, found 2 sequences"):
        model(input_ids=two, **{name: ReplayCache(model, "knorm", BUDGET)})
    mask = torch.ones(1, len(text.ids))
    mask[0, 0] = 0
    with pytest.raises(kv.Error, match="attention mask: expected a sequence without padding, found padding"):
        model(input_ids=text.ids[None], attention_mask=mask, **{name: ReplayCache(model, "knorm", BUDGET)})


def test_sliding_windows(case: Callable[..., Case]) -> None:
    """A layer whose window is no shorter than the prompt is treated."""
    _, _, model, _, text = loaded(case("mistral"))
    cache = ReplayCache(model, "knorm", 8)
    predicted(model, cache, text.ids[:24])
    assert {layer.keys.shape[2] for layer in cache.layers} == {8}
    with pytest.raises(kv.Error, match="every layer has a sliding window"):
        predicted(model, ReplayCache(model, "knorm", 8), text.ids[:25])
