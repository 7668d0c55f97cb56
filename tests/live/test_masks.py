"""Does a model under live's masks predict what it predicts with eager attention and the whole mask, written out?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from captured_case import Case
from tiny_models import CONFIGS, LOCAL_AND_GLOBAL, VERSION_2

from kvreplay.capture.model import load
from kvreplay.capture.model_options import ModelChoices
from kvreplay.live import passes
from kvreplay.live.attention import Layer, PageReads, Queries, TokenReads
from kvreplay.live.cells import LiveCell, cells_of, evicted
from kvreplay.live.measure import alike
from kvreplay.results import Run, TraceFacts
from kvreplay.trace import Trace

STORES = (
    "streaming-llm:positions=cache", "sca:positions=cache,recent=8", "kivi:bits=2,group=8,residual=16",
    "think:window=4,ratio=0.5", "cam-one-shot:recent=4", "finch:positions=cache,question_tokens=4,blocks=16,heads=kv",
)  # fmt: skip
MODELS = ["llama", "one_kv_head", "mistral", "gemma2", "qwen3", "smollm3", "gpt_oss"]


def window_of(model: str, layer: int) -> int:
    if model == "mistral":
        return 24
    return 24 if model in ("gemma2", "gpt_oss") and LOCAL_AND_GLOBAL[layer] == "sliding_attention" else 0


def whole_mask(
    cell: LiveCell | None, model: str, layer: int, heads: int, tokens: int, prompt: int, from_: int
) -> np.ndarray:
    """[Hq,T,T]: which keys j query t sees. Queries from `from_` on see the kept tokens of the prompt; sets that change
    with time are seen by all. One query and key at a time."""
    seen = np.zeros((heads, tokens, tokens), dtype=bool)
    window = window_of(model, layer)
    for head in range(heads):
        for t in range(tokens):
            for j in range(t + 1):
                visible = not window or j > t - window
                if cell is not None and cell.leaves is not None:
                    rows = cell.leaves[layer]
                    visible &= int(rows[head * len(rows) // heads, j]) >= t
                elif cell is not None and t >= from_ and j < min(prompt, from_):
                    rows = cell.kept[layer]
                    visible &= bool(rows[head * len(rows) // heads, j])
                seen[head, t, j] = visible
    return seen


@contextmanager
def with_masks(model: Any, masks: list[np.ndarray]) -> Iterator[None]:
    """Each attention module gets its own mask in place of the model's."""

    def give(number: int) -> Callable[..., Any]:
        mask = torch.where(torch.from_numpy(masks[number]), 0.0, torch.finfo(torch.float32).min)[None]

        def hook(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, {**named, "attention_mask": mask}

        return hook

    modules = [layer.self_attn for layer in model.model.layers]
    hooks = [module.register_forward_pre_hook(give(i), with_kwargs=True) for i, module in enumerate(modules)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def expected(eager: Any, cell: LiveCell | None, name: str, ids: torch.Tensor, prompt: int, from_: int) -> torch.Tensor:
    """Log probabilities [T - from_, V] of a pass of eager attention over all tokens, float64."""
    heads = eager.config.num_attention_heads
    masks = [
        whole_mask(cell, name, layer, heads, len(ids), prompt, from_) for layer in range(eager.config.num_hidden_layers)
    ]
    with torch.inference_mode(), with_masks(eager, masks):
        return eager(input_ids=ids[None], use_cache=False).logits[0, from_:].double().log_softmax(-1)


def loaded(made: Case) -> tuple[Run, TraceFacts, Any, Any, passes.Text]:
    """A run, its trace, the model as live loads it and with eager attention, and the text as the model read it."""
    run = Run(made.run)
    trace = run.trace("t")
    model, _ = load(ModelChoices(str(made.model)))
    eager = transformers.AutoModelForCausalLM.from_pretrained(made.model, attn_implementation="eager").eval()
    ids = [int(one) for one in run.cells_file("t")["/traces/t/tokens/ids"][()]]
    text = passes.read(model, "tiny", ids, trace.boundary)
    return run, trace, model, eager, text


@pytest.mark.parametrize("name", [*MODELS, "deepseek_v3"])
@pytest.mark.parametrize("batch", [1, 3])
def test_continuation(name: str, batch: int, case: Callable[..., Case]) -> None:
    """Every cell, alone and beside others, and the reference."""
    made = case(name)
    run, trace, model, eager, text = loaded(made)
    cells, left_out, failed = cells_of(run, trace, run.cells)
    assert not left_out and not failed and len(cells) == len(run.cells)
    assert {cell.decisions for cell in cells} == {"after-prefill", "replayed", "future", "none"}
    torch.testing.assert_close(text.own, expected(eager, None, name, text.ids, trace.boundary, trace.boundary),
                               atol=2e-4, rtol=0)  # fmt: skip
    changed = False
    kinds = alike(cells, trace.kv_heads)
    assert len(kinds) > 2
    for kind in kinds:
        for first in range(0, len(kind), batch):
            some = kind[first : first + batch]
            of_cells = evicted(text, some, trace)
            reference = passes.run(model, text, passes.Evicted.nothing(of_cells, text))
            torch.testing.assert_close(reference.log_probabilities[0], text.own, atol=2e-4, rtol=0)
            found = passes.run(model, text, of_cells)
            for row, cell in enumerate(some):
                wanted = expected(eager, cell, name, text.ids, trace.boundary, trace.boundary)
                torch.testing.assert_close(found.log_probabilities[row], wanted, atol=2e-4, rtol=0, msg=cell.label)
                if cell.label == "full":
                    assert torch.equal(found.log_probabilities[row], reference.log_probabilities[row])
                changed |= bool((found.log_probabilities[row] - reference.log_probabilities[row]).abs().max() > 1e-3)
    assert changed


@pytest.mark.parametrize("name", MODELS)
def test_written_text(name: str, case: Callable[..., Case]) -> None:
    """Token by token the most probable one; the last prompt token is read under the mask."""
    made = case(name)
    run, trace, model, eager, text = loaded(made)
    cells = [cell for cell in cells_of(run, trace, run.cells)[0] if cell.leaves is None]
    found = passes.generate(model, text, [cell.row(text, trace) for cell in cells], 4)
    for cell, tokens in zip(cells, found, strict=True):
        so_far = text.ids[: trace.boundary]
        for token in tokens:
            last = expected(eager, cell, name, so_far, trace.boundary, trace.boundary - 1)[-1]
            assert last.max() - last[token] < 1e-4, cell.label
            so_far = torch.cat([so_far, torch.tensor([token])])


@pytest.mark.parametrize("name", ["llama", "one_kv_head", "qwen3"])
def test_stores(name: str, case: Callable[..., Case]) -> None:
    """Moved and changed keys and values, as transformers' own cache of the kept tokens."""
    made = case(name, "stores", STORES)
    run, trace, model, eager, text = loaded(made)
    cells, left_out, failed = cells_of(run, trace, run.cells[run.cells["role"] == "asked"])
    assert not left_out and not failed and all(cell.stored is not None for cell in cells)
    reference = passes.run(model, text, passes.Evicted.behind_prompt(text, [passes.everything(text)]))
    for cell in cells:
        found = passes.run(model, text, evicted(text, [cell], trace)).log_probabilities[0]
        cache = transformers.DynamicCache()
        for layer in range(len(text.layers)):
            stored = cell.stored.layer(layer)
            kv_heads = len(stored.values)
            rows = [stored.positions[head * len(stored.positions) // kv_heads] for head in range(kv_heads)]
            keys, values = (
                np.stack([one[head * len(one) // kv_heads, row] for head, row in enumerate(rows)])
                for one in (stored.keys, stored.values)
            )
            cache.update(torch.from_numpy(keys)[None], torch.from_numpy(values)[None], layer)
        count, held = text.continuation, cache.get_seq_length()
        mask = torch.cat([torch.ones(count, held), torch.ones(count, count).tril()], 1).bool()
        with torch.inference_mode(), with_masks(eager, [mask[None].numpy()] * len(text.layers)):
            output = eager(
                input_ids=text.ids[None, trace.boundary :], past_key_values=cache,
                position_ids=torch.arange(trace.boundary, trace.tokens)[None],
            )  # fmt: skip
        torch.testing.assert_close(found, output.logits[0].double().log_softmax(-1), atol=2e-4, rtol=0, msg=cell.label)
        assert (found - reference.log_probabilities[0]).abs().max() > 1e-3, cell.label
        passes.generate(model, text, [cell.row(text, trace)], 2)


def pages_read(query: np.ndarray, keys: np.ndarray, page: int, count: int) -> np.ndarray:
    """[m] bool: the tokens of the best `count` pages, of equal ones the earlier; a page and a channel at a time."""
    scores = []
    for first in range(0, len(keys), page):
        of_page = keys[first : first + page]
        scores.append(sum(max(q * of_page[:, c].min(), q * of_page[:, c].max()) for c, q in enumerate(query)))
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]
    return np.isin(np.arange(len(keys)) // page, best)


def pages_by_mean(query: np.ndarray, keys: np.ndarray, page: int, count: int) -> np.ndarray:
    means = [keys[first : first + page].mean(axis=0) @ query for first in range(0, len(keys), page)]
    best = sorted(range(len(means)), key=lambda i: (-means[i], i))[:count]
    return np.isin(np.arange(len(keys)) // page, best)


def tokens_read(query: np.ndarray, keys: np.ndarray, t: int, sinks: int, local: int, count: int) -> np.ndarray:
    """Token by token, by the rule of docs/conventions.md."""
    chosen = list(range(sinks))[:count]
    recent = [j for j in range(len(keys)) if j > t - local and j not in chosen]
    chosen += recent[max(0, len(recent) - (count - len(chosen))) :]
    others = [j for j in range(len(keys)) if j not in chosen and j not in recent]
    chosen += sorted(others, key=lambda j: (-(query @ keys[j]), j))[: count - len(chosen)]
    return np.isin(np.arange(len(keys)), chosen)


def share_read(z: np.ndarray, t: int, sinks: int, local: int, p: float) -> np.ndarray:
    read = (np.arange(len(z)) < sinks) | (np.arange(len(z)) > t - local)
    others = sorted(np.flatnonzero(~read), key=lambda j: -z[j])
    total, so_far = sum(math.exp(z[j]) for j in others), 0.0
    for j in others:
        so_far += math.exp(z[j])
        read[j] = True
        if so_far / total > p:
            break
    return read


def queries_of(q: np.ndarray, first: int, tokens: int, layer: Layer) -> Queries:
    """Masks of the queries after a prompt of this length, all of which they see."""
    seen = torch.ones(*q.shape[:3], tokens, dtype=torch.bool)
    return Queries(torch.from_numpy(q), torch.arange(first, first + q.shape[2]), seen, layer)


PLAIN = Layer(0.3, 0.0, 0, torch.zeros(0), torch.zeros(0))


@pytest.mark.parametrize(("tokens", "page", "count"), [(20, 4, 2), (21, 4, 3), (5, 8, 1), (9, 1, 4), (12, 3, 9)])
def test_pages_that_a_query_reads(tokens: int, page: int, count: int) -> None:
    generator = np.random.default_rng(tokens)
    q, keys = generator.normal(size=(1, 4, 3, 6)), generator.normal(size=(1, 2, tokens, 6))
    keys[0, 1, page : 2 * page] = keys[0, 1, :page][: max(0, min(page, tokens - page))]  # two pages that are equal
    queries = queries_of(q, tokens, tokens, PLAIN)
    for by_mean, rule in ((False, pages_read), (True, pages_by_mean)):
        found = PageReads(page, count, by_mean).read(queries, torch.from_numpy(keys))
        for head, n in np.ndindex(4, 3):
            wanted = rule(q[0, head, n], keys[0, head // 2], page, count)
            np.testing.assert_array_equal(found[0, head, n].numpy(), wanted)


@pytest.mark.parametrize(("sinks", "local", "count"), [(0, 0, 5), (2, 4, 9), (2, 5, 4), (3, 2, 2), (4, 30, 20)])
def test_tokens_that_a_query_reads(sinks: int, local: int, count: int) -> None:
    generator = np.random.default_rng(count)
    q, keys = generator.normal(size=(1, 4, 3, 6)), generator.normal(size=(1, 2, 20, 6))
    keys[0, 1, 7] = keys[0, 1, 12]  # of equal tokens the first one
    found = TokenReads(sinks, local, count).read(queries_of(q, 20, 20, PLAIN), torch.from_numpy(keys))
    share = TokenReads(sinks, local, share=0.6).read(queries_of(q, 20, 20, PLAIN), torch.from_numpy(keys))
    for head, n in np.ndindex(4, 3):
        query, of_head = q[0, head, n], keys[0, head // 2]
        wanted = tokens_read(query, of_head, 20 + n, sinks, local, count)
        np.testing.assert_array_equal(found[0, head, n].numpy(), wanted)
        if head < 2:  # of equal tokens, the share reads both
            wanted = share_read(0.3 * of_head @ query, 20 + n, sinks, local, 0.6)
            np.testing.assert_array_equal(share[0, head, n].numpy(), wanted)


READS: dict[str, Callable[[np.ndarray, np.ndarray, int, int, float], np.ndarray]] = {
    "quest:page=8,least_pages=1": lambda q, k, t, budget, scale: pages_read(q, k, 8, budget // 8),
    "page-means:page=8,least_pages=1": lambda q, k, t, budget, scale: pages_by_mean(q, k, 8, budget // 8),
    "oracle-top-k:sinks=2,local=3": lambda q, k, t, budget, scale: tokens_read(q, k, t, 2, 3, budget),
    "oracle-top-p:p=0.6,sinks=1,local=2": lambda q, k, t, budget, scale: share_read(scale * k @ q, t, 1, 2, 0.6),
}


@pytest.mark.parametrize("policy", READS)
@pytest.mark.parametrize("name", ["llama", "one_kv_head", "qwen3"])
def test_sparse_reads(name: str, policy: str, case: Callable[..., Case]) -> None:
    """In the last layer alone a query is what it was captured as, so it reads what the trace's tensors say."""
    made = case(name, policy.partition(":")[0], (f"{policy},dense_layers=3", f"{policy},dense_layers=2"))
    run, trace, model, eager, text = loaded(made)
    cells, left_out, failed = cells_of(run, trace, run.cells[run.cells["role"] == "asked"])
    assert len(cells) == 4
    assert not left_out and not failed and {cell.decisions for cell in cells} == {"live"}
    with Trace(run.captured("t")) as captured:
        q, k = (captured[f"/layers/003/{one}"].astype(np.float64) for one in "qk")
    group, last = len(q) // len(k), len(text.layers) - 1
    for cell in cells:
        found = passes.run(model, text, evicted(text, [cell], trace))
        whole = passes.run(model, text, passes.Evicted.nothing(evicted(text, [cell], trace), text))
        torch.testing.assert_close(whole.log_probabilities[0], text.own, atol=2e-4, rtol=0)
        assert (found.log_probabilities[0] - whole.log_probabilities[0]).abs().max() > 1e-3, cell.label
        passes.generate(model, text, [cell.row(text, trace)], 2, cell.reads)
        if set(cell.reads) != {last}:
            assert set(cell.reads) == {2, 3}
            continue
        mask = np.broadcast_to(np.tri(trace.tokens, dtype=bool), (len(q), trace.tokens, trace.tokens)).copy()
        budget, scale = int(cell.facts["budget_tokens"]), text.layers[last].scale
        for head in range(len(q)):
            for t in range(trace.boundary, trace.tokens):
                keys = k[head // group, : trace.boundary]
                mask[head, t, : trace.boundary] = READS[policy](q[head, t], keys, t, budget, scale)
        causal = np.tri(trace.tokens, dtype=bool)[None]
        with torch.inference_mode(), with_masks(eager, [causal] * last + [mask]):
            wanted = eager(input_ids=text.ids[None], use_cache=False).logits[0, trace.boundary :]
        torch.testing.assert_close(
            found.log_probabilities[0], wanted.double().log_softmax(-1), atol=2e-4, rtol=0, msg=cell.label
        )


def test_models_are_known() -> None:
    assert set(MODELS) <= {*CONFIGS, *VERSION_2}
