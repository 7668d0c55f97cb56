"""Every metric of a selection, from the full attention and from what is left of it."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from reference import (
    Trace,
    aggregate,
    attention,
    capped,
    eval_attention,
    eval_queries,
    logits,
    norms,
    rotate,
    rows_of,
    softmax,
    token_cosines,
    top,
)
from reference_selection import Selection, row_count


@dataclass
class Values:
    """One metric and variant: by treated layer and head [L,H], by treated layer [L], over all; None: not defined."""

    heads: np.ndarray | None
    layers: np.ndarray | None
    all: float | None


def averaged(heads: np.ndarray) -> Values:
    """Equal weight for the heads of a layer, and for the layers."""
    layers = heads.mean(axis=1)
    return Values(heads, layers, float(layers.mean()))


def cosine(a: np.ndarray, b: np.ndarray, both_zero: float = 0.0) -> np.ndarray:
    """Along the last axis; 0 where one is zero, `both_zero` where both are."""
    norm_a, norm_b = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
    product = norm_a * norm_b
    result = np.divide((a * b).sum(axis=-1), product, out=np.zeros_like(product), where=product > 0)
    return np.where((norm_a == 0) & (norm_b == 0), both_zero, result)


def ratio(part: np.ndarray, whole: np.ndarray, undefined: float) -> np.ndarray:
    """part / whole, `undefined` for 0/0."""
    return np.divide(part, whole, out=np.full_like(whole, undefined), where=whole > 0)


def kept_by_query_head(trace: Trace, selection: Selection, layer: int) -> np.ndarray:
    """[Hq,P] bool of a treated layer."""
    kept = np.zeros((len(selection.rows[layer]), trace.prompt), bool)
    for row, positions in enumerate(selection.rows[layer]):
        kept[row, positions] = True
    return np.repeat(kept, trace.query_heads // len(kept), axis=0)


def residents(trace: Trace, selection: Selection, layer: int, queries: np.ndarray) -> np.ndarray:
    """[Hq,E,T] bool of a treated layer: the tokens that each query sees, itself among them."""
    position, query = np.arange(trace.tokens), queries[:, None]
    if selection.read is not None:
        return selection.read(layer, queries)
    if selection.seen is not None:
        return np.broadcast_to(selection.seen(queries), (trace.query_heads, len(queries), trace.tokens))
    if selection.evicted_at is not None:
        gone = selection.evicted_at[layer][:, None]
        kept = (gone < 0) | (gone >= query)
    else:
        kept = np.ones((len(selection.rows[layer]), 1, trace.tokens), bool)
        for row, positions in enumerate(selection.rows[layer]):
            kept[row, 0, : trace.prompt] = np.isin(position[: trace.prompt], positions)
    kept = np.repeat(kept, trace.query_heads // len(kept), axis=0)
    return (kept & (position <= query)) | (position == query)


def changed_logits(trace: Trace, selection: Selection, index: int, queries: np.ndarray) -> np.ndarray | None:
    """z [Hq,E,T] as the changed cache has it: transformed keys, or residents and query at their slots; None: as is."""
    layer = trace.treated[index]
    group = trace.query_heads // trace.kv_heads
    if selection.stored is not None and not selection.moved:
        keys = np.repeat(selection.stored(layer)[0], group, axis=0)
        return capped(trace, rows_of(trace, layer, queries) @ keys.transpose(0, 2, 1))
    if not selection.moved:
        return None
    kept = residents(trace, selection, index, queries)
    asked = rows_of(trace, layer, queries)
    z = np.zeros(kept.shape)
    heads_a_row = trace.query_heads // len(selection.rows[index])
    for head, e in np.ndindex(kept.shape[:2]):
        tokens = np.flatnonzero(kept[head, e])
        if selection.order is not None:
            first = [position for position in selection.order[index][head // heads_a_row] if kept[head, e, position]]
            tokens = np.concatenate([np.array(first, int), np.setdiff1d(tokens, first)])
        slots = np.arange(len(tokens))
        keys = rotate(trace, layer, trace.layers[layer].k[head // group, tokens], slots - tokens)
        query_slot = slots[tokens == queries[e]]
        query = rotate(trace, layer, asked[head, e][None], query_slot - queries[e])
        z[head, e, tokens] = capped(trace, query @ keys.T)[0]
    return z


def attention_metrics(trace: Trace, selection: Selection, choice: str) -> dict[tuple[str, str], Values]:
    """Recall, cosine, L1 and outputs by treated layer and query head, mean over the eval queries."""
    queries = np.array(eval_queries(trace, choice))
    prompt = slice(0, trace.prompt)
    nosink = slice(4, max(4, trace.prompt))
    sums: dict[tuple[str, str], list[np.ndarray]] = {}
    pooled, projected = [], []
    for index, layer in enumerate(trace.treated):
        z, visible = logits(trace, layer, queries)
        kept = residents(trace, selection, index, queries)
        changed_z = changed_logits(trace, selection, index, queries)
        changed_z = z if changed_z is None else changed_z
        factor = 1 if selection.weight is None else selection.weight(index, queries)
        a, b = softmax(z, visible), softmax(changed_z + np.log(factor), kept)
        kept_a, kept_z = np.where(kept, a, 0), np.where(kept, changed_z, 0)
        z = np.where(visible, z, 0)
        group = trace.query_heads // trace.kv_heads
        values = changed_values = np.repeat(trace.layers[layer].v, group, axis=0)
        if selection.stored is not None:
            changed_values = np.repeat(selection.stored(layer)[1], group, axis=0)
        output, changed = a @ values, b @ changed_values
        if selection.evolving is not None:
            changed = np.einsum("het,hetd->hed", b, np.repeat(selection.evolving(layer, queries), group, axis=0))
        first = np.argsort(~kept[..., prompt], axis=-1, kind="stable")  # kept entries move to the front, in order
        unaligned = np.take_along_axis(kept_a[..., prompt], first, axis=-1)
        by_query = {
            ("attention_recall", ""): kept_a.sum(-1),
            ("attention_recall", "prompt"): ratio(kept_a[..., prompt].sum(-1), a[..., prompt].sum(-1), 1),
            ("attention_recall", "nosink"): ratio(kept_a[..., nosink].sum(-1), a[..., nosink].sum(-1), 1),
            ("sink_mass", ""): kept_a[..., : min(4, trace.prompt)].sum(-1),
            ("attention_cosine", ""): cosine(a, b),
            ("attention_cosine", "prompt"): cosine(a[..., prompt], b[..., prompt]),
            ("attention_cosine", "nosink"): cosine(a[..., nosink], b[..., nosink]),
            ("attention_cosine", "logits"): cosine(z[..., prompt], kept_z[..., prompt]),
            ("attention_cosine", "unaligned"): cosine(a[..., prompt], unaligned),
            ("attention_l1", ""): np.abs(a - b).sum(-1),
            ("output_cosine", ""): cosine(output, changed, both_zero=1),
            ("output_error", ""): ratio(np.linalg.norm(output - changed, axis=-1), np.linalg.norm(output, axis=-1), 0),
        }
        for key, value in by_query.items():
            sums.setdefault(key, []).append(value.mean(axis=1))
        worst = {("attention_recall", "worst"): 5, ("output_error", "worst"): 95}
        for (metric, variant), percent in worst.items():
            of_queries = by_query[metric, ""]
            sums.setdefault((metric, variant), []).append(np.percentile(of_queries, percent, axis=1))
        squares = [((output - changed) ** 2).sum(-1).sum(axis=1), (output**2).sum(-1).sum(axis=1)]
        pooled.append(np.stack(squares))
        if trace.has_projections:
            of_layer = trace.layers[layer]
            whole, error = (
                np.linalg.norm(vectors.transpose(1, 0, 2).reshape(len(queries), -1) @ of_layer.wo.T, axis=1)
                for vectors in (output, changed - output)
            )
            beside = {"projected": ratio(error, whole, 0), "residual": ratio(error, of_layer.input_norm[queries], 0)}
            projected.append({variant: value.mean() for variant, value in beside.items()})
    measured = {key: averaged(np.stack(value)) for key, value in sums.items()}
    error, whole = np.stack(pooled, axis=1)  # [L,Hq] each
    layers = np.sqrt(ratio(error.sum(axis=1), whole.sum(axis=1), 0))
    measured["output_error", "pooled"] = Values(np.sqrt(ratio(error, whole, 0)), layers, float(layers.mean()))
    for variant in projected[0] if projected else ():
        of_layers = np.array([of_layer[variant] for of_layer in projected])
        measured["output_error", variant] = Values(None, of_layers, float(of_layers.mean()))
    return measured


def is_static(selection: Selection, index: int) -> bool:
    """Whether the policy gives all queries the same set of the prompt's tokens in a treated layer."""
    if selection.read is not None:
        return index < selection.dense_layers
    return selection.evicted_at is None and selection.seen is None


def recall_of_unprotected(trace: Trace, selection: Selection, choice: str) -> dict[tuple[str, str], Values]:
    """Share of the eval queries' attention to unprotected prompt tokens, their own key left out, that is kept."""
    queries = np.array(eval_queries(trace, choice))
    heads = np.full((len(trace.treated), trace.query_heads), np.nan)
    for index, layer in enumerate(trace.treated):
        if not is_static(selection, index):
            continue
        received = attention(trace, layer, queries)[..., : trace.prompt].copy()
        received[:, np.arange(trace.prompt) == queries[:, None]] = 0
        received = np.delete(received.sum(axis=1), selection.protected[index], axis=1)
        kept = np.delete(kept_by_query_head(trace, selection, index), selection.protected[index], axis=1)
        heads[index] = ratio((received * kept).sum(axis=1), received.sum(axis=1), 1)
    return {("attention_recall", "unprotected"): averaged(heads)}


def cosine_of_all_rows(trace: Trace, selection: Selection) -> dict[tuple[str, str], Values]:
    """The attention cosine with every token of the trace as eval query."""
    return {("attention_cosine", "rows"): attention_metrics(trace, selection, "all")[("attention_cosine", "")]}


def recall_of_best_sets(trace: Trace, selection: Selection, choice: str) -> dict[tuple[str, str], Values]:
    """The greatest recall of static sets with these counts; undefined in layers whose sets are not static."""
    queries, best = np.array(eval_queries(trace, choice)), best_sets(trace, selection, choice)
    heads = np.full((len(trace.treated), trace.query_heads), np.nan)
    for index, layer in enumerate(trace.treated):
        if is_static(selection, index):
            shares = attention(trace, layer, queries) * residents(trace, best, index, queries)
            heads[index] = shares.sum(axis=2).mean(axis=1)
    return {("attention_recall", "oracle"): averaged(heads)}


def best_sets(trace: Trace, selection: Selection, choice: str) -> Selection:
    """In each row as many tokens as the selection keeps, those that the eval queries attend to most."""
    rows = []
    for index, layer in enumerate(trace.treated):
        heads, kept = selection.granularity(index), selection.rows[index]
        scores = aggregate(eval_attention(trace, layer, choice), heads, "mean", trace.kv_heads)
        scores = np.repeat(scores, len(kept) // row_count(trace, heads), axis=0)
        rows.append([top(of_row, len(row), np.arange(trace.prompt)) for of_row, row in zip(scores, kept, strict=True)])
    return Selection(selection.heads, rows, selection.protected, list(range(len(rows))))


def kv_l1_loss(trace: Trace, selection: Selection) -> dict[tuple[str, str], Values]:
    """L1 norm of what keys and values lose over their own, a ratio of sums over the heads of a layer."""
    prompt = trace.prompt
    parts = {"": ("k", "v"), "key": ("k",), "value": ("v",)}
    results: dict[str, tuple[list, list]] = {}
    for index, layer in enumerate(trace.treated):
        evicted = ~kept_by_query_head(trace, selection, index)
        group = trace.query_heads // trace.kv_heads
        if selection.granularity(index) != "query":  # a row a KV head; one set for the layer holds for all of them
            evicted, group = evicted[::group], 1
        exact = {"k": trace.layers[layer].k[:, :prompt], "v": trace.layers[layer].v[:, :prompt]}
        sizes = {name: np.repeat(norms(exact[name], 1), group, axis=0) for name in exact}
        if selection.stored is None:
            losses = {name: np.where(evicted, size, 0) for name, size in sizes.items()}
        else:
            changed = dict(zip(exact, selection.stored(layer), strict=True))
            losses = {name: norms(exact[name] - changed[name][:, :prompt], 1) for name in exact}
            losses = {name: np.where(evicted, sizes[name], loss) for name, loss in losses.items()}
        for variant, names in parts.items():
            lost, size = (sum(values[name] for name in names) for values in (losses, sizes))
            add_row(results, variant, (selection, index), lost.sum(axis=1), size.sum(axis=1))
        numbers = np.full(len(evicted), 2.0 * prompt * trace.dimension)
        both, size = losses["k"] + losses["v"], sizes["k"] + sizes["v"]
        add_row(results, "absolute", (selection, index), both.sum(axis=1), numbers)
        by_token = evicted if selection.stored is None else ratio(both, size, 0)
        add_row(results, "token", (selection, index), by_token.sum(axis=1), np.full(len(evicted), float(prompt)))
    return {
        ("kv_l1_loss", variant): Values(np.array(heads), np.array(layers), float(np.mean(layers)))
        for variant, (heads, layers) in results.items()
    }


def add_row(results: dict, variant: str, place: tuple[Selection, int], lost: np.ndarray, size: np.ndarray) -> None:
    """Append one layer's ratios, by the policy's rows and over them: a ratio of sums each time."""
    selection, layer = place
    heads, layers = results.setdefault(variant, ([], []))
    whole = ratio(lost.sum(keepdims=True), size.sum(keepdims=True), 0)
    layers.append(whole[0])
    rows = whole if selection.granularity(layer) == "layer" else ratio(lost.astype(float), size, 0)
    heads.append(np.repeat(rows, len(selection.rows[layer]) // len(rows)))


def jaccard_matrix(trace: Trace, selection: Selection, variant: str) -> np.ndarray:
    """[L,L] over treated layers: common share of row 0 (first), mean of the rows' own shares, or of the union of rows.

    With +protected as they are, otherwise without what the policy protects. Two empty sets: 1, one empty set: 0.
    """
    kind, _, protected = variant.partition("+")
    kept = np.zeros((len(selection.rows), len(selection.rows[0]), trace.prompt), bool)
    for layer, row in np.ndindex(kept.shape[:2]):
        kept[layer, row, selection.rows[layer][row]] = True
    if not protected:
        for layer, positions in enumerate(selection.protected):
            kept[layer][:, positions] = False
    if kind == "first":
        kept = kept[:, :1]
    elif kind == "union":
        kept = kept.any(axis=1, keepdims=True)
    both = (kept[:, None] & kept[None]).sum(axis=-1).astype(float)
    either = (kept[:, None] | kept[None]).sum(axis=-1).astype(float)
    return ratio(both, either, 1).mean(axis=-1)


def jaccard_adjacent(trace: Trace, selection: Selection) -> dict[tuple[str, str], Values]:
    """Mean over neighbouring treated layers."""
    results = {}
    for variant in [kind + suffix for kind in ("first", "mean", "union") for suffix in ("", "+protected")]:
        pairs = np.diagonal(jaccard_matrix(trace, selection, variant), offset=1)
        results["jaccard_adjacent", variant] = Values(None, None, float(pairs.mean()) if len(pairs) else None)
    return results


@functools.cache
def redundancy(trace: Trace, tensor: str) -> np.ndarray:
    """[L,P]: each prompt token's greatest cosine with another one, in either direction of time; 0 for a lone token."""
    result = np.zeros((len(trace.treated), trace.prompt))
    if trace.prompt > 1:
        for index, layer in enumerate(trace.treated):
            cosines = token_cosines(getattr(trace.layers[layer], tensor)[:, : trace.prompt])
            np.fill_diagonal(cosines, -np.inf)
            result[index] = cosines.max(axis=1)
    return result


def counts(selection: Selection) -> np.ndarray:
    """[L,H] kept tokens."""
    return np.array([[len(row) for row in layer] for layer in selection.rows], float)


def layer_budget(selection: Selection) -> dict[tuple[str, str], Values]:
    """Kept tokens, with and without what is protected."""
    free = [
        [len(np.setdiff1d(row, protected)) for row in layer]
        for layer, protected in zip(selection.rows, selection.protected, strict=True)
    ]
    return {
        ("layer_budget", ""): averaged(counts(selection)),
        ("layer_budget", "unprotected"): averaged(np.array(free, float)),
    }


def span_recall(trace: Trace, selection: Selection) -> dict[tuple[str, str], Values]:
    """Of each span inside the prompt: the share kept by any head, the heads' mean share, whether one head keeps all."""
    results = {}
    for name, (begin, end) in trace.spans.items():
        if end > trace.prompt:
            continue
        span = np.arange(begin, end)
        kept = np.array([[np.isin(span, row) for row in layer] for layer in selection.rows])  # [L,H,tokens]
        shares = {
            "any": kept.any(axis=1).mean(axis=1),
            "mean": kept.mean(axis=(1, 2)),
            "full": kept.all(axis=2).any(axis=1).astype(float),
        }
        for kind, layers in shares.items():
            results["span_recall", f"{name}.{kind}"] = Values(None, layers, float(layers.mean()))
    return results


def span_erased(trace: Trace, selection: Selection) -> dict[tuple[str, str], Values]:
    """Of each span inside the prompt: the share of its tokens that no head keeps, of any layer and of one layer."""
    results = {}
    for name, (begin, end) in trace.spans.items():
        if end > trace.prompt:
            continue
        of_layers = [set(range(begin, end)).difference(*(set(row.tolist()) for row in rows)) for rows in selection.rows]
        of_all = set.intersection(*of_layers)
        layers = np.array([len(erased) / (end - begin) for erased in of_layers])
        results["span_erased", f"{name}.layer"] = Values(None, layers, float(layers.mean()))
        results["span_erased", f"{name}.all"] = Values(None, None, len(of_all) / (end - begin))
    return results


def head_consensus(selection: Selection) -> dict[tuple[str, str], Values]:
    """Mean over pairs of a layer's heads of the common share of their sets, without what the policy protects."""
    results = {}
    for variant in ("", "protected"):
        layers = []
        for rows, protected in zip(selection.rows, selection.protected, strict=True):
            sets = [set(row.tolist()) - (set() if variant else set(np.array(protected).tolist())) for row in rows]
            pairs = [(a & b, a | b) for a, b in itertools.combinations(sets, 2)]
            layers.append(np.mean([len(both) / len(either) if either else 1 for both, either in pairs] or [1]))
        results["head_consensus", variant] = Values(None, np.array(layers), float(np.mean(layers)))
    return results


def kv_bytes(trace: Trace, selection: Selection) -> dict[tuple[str, str], Values]:
    """Bytes of the kept keys and values of the treated layers, summed; `union`: for query rows shared ones once.

    `peak` and `mean` are those of the most and of the mean residents of all queries.
    """
    one = 2 * trace.dimension * trace.number_bytes
    end = [stored_rows(trace, selection, index) for index in range(len(trace.treated))]
    over_time = [tokens_held(trace, selection, index) for index in range(len(trace.treated))]
    bytes_of = {
        "": one * np.array([sum(map(len, rows)) for rows in end]),
        "union": one * np.array([shared_tokens(trace, selection, index) for index in range(len(end))]),
        "peak": one * np.array([held.max() for held in over_time]),
        "mean": one * np.array([held.mean() for held in over_time]),
    }
    if selection.stored_bytes is not None:
        changed = np.array([selection.stored_bytes(layer) for layer in trace.treated])
        for variant in ("peak", "mean"):  # what lies beside the tokens
            bytes_of[variant] = bytes_of[variant] + changed - bytes_of[""]
        bytes_of[""] = bytes_of["union"] = changed
    if selection.stored is not None and selection.evolving is None:
        bytes_of["peak"] = bytes_of["mean"] = np.full(len(end), np.nan)
    return {("kv_bytes", variant): Values(None, layers, float(layers.sum())) for variant, layers in bytes_of.items()}


def stored_rows(trace: Trace, selection: Selection, index: int) -> list[np.ndarray]:
    """Kept positions of a treated layer, a list for each head that is stored: KV heads, or query heads."""
    heads = trace.query_heads if selection.granularity(index) == "query" else trace.kv_heads
    rows = selection.rows[index]
    return [rows[head * len(rows) // heads] for head in range(heads)]


def shared_tokens(trace: Trace, selection: Selection, index: int) -> int:
    """Tokens of a treated layer, those of several query heads of a group counted once."""
    rows = stored_rows(trace, selection, index)
    group = len(rows) // trace.kv_heads
    return sum(len(functools.reduce(np.union1d, rows[first : first + group])) for first in range(0, len(rows), group))


def tokens_held(trace: Trace, selection: Selection, index: int) -> np.ndarray:
    """[T]: tokens in a treated layer's cache when each query attends; all until the prompt ends, if chosen once."""
    queries = np.arange(trace.tokens)
    rows = selection.rows[index]
    if selection.seen is not None:
        held = np.repeat(selection.seen(queries).sum(axis=1)[None], len(rows), axis=0)
    elif selection.evicted_at is not None:
        gone = selection.evicted_at[index][:, None]
        held = queries + 1 - ((gone >= 0) & (gone < queries[:, None])).sum(axis=2)
    else:
        kept = np.array([len(row) for row in rows])[:, None]
        held = np.where(queries < trace.prompt, queries + 1, kept + queries - trace.prompt + 1)
    heads = trace.query_heads if selection.granularity(index) == "query" else trace.kv_heads
    return held[np.arange(heads) * len(rows) // heads].sum(axis=0)


def sizes(trace: Trace, selection: Selection, choice: str) -> dict[tuple[str, str], Values]:
    """Compression and the tokens that an eval query holds."""
    queries = np.array(eval_queries(trace, choice))
    held = np.array(
        [residents(trace, selection, index, queries).sum(axis=2).mean() for index in range(len(trace.treated))]
    )
    kept = counts(selection).mean(axis=1)
    fixed = np.array([len(positions) for positions in selection.protected])
    values = {("held_tokens", ""): Values(None, held, float(held.mean()))}
    for variant, without in (("", np.zeros(len(kept))), ("context", fixed)):
        layers = ratio(trace.prompt - without, kept - without, np.nan)
        scored = trace.prompt - without.astype(float)
        share = ratio(kept - without, scored, np.nan).mean()  # undefined where a layer has none that are scored
        values["compression", variant] = Values(None, layers, float(1 / share) if share else None)
    return values


def measure(trace: Trace, selection: Selection, choice: str, rows: bool = False) -> dict[tuple[str, str], Values]:
    """Every metric and variant of a selection; `rows` adds the cosine over all queries."""
    return {
        **attention_metrics(trace, selection, choice),
        **recall_of_best_sets(trace, selection, choice),
        **recall_of_unprotected(trace, selection, choice),
        **(cosine_of_all_rows(trace, selection) if rows else {}),
        **kv_l1_loss(trace, selection),
        **jaccard_adjacent(trace, selection),
        **layer_budget(selection),
        **span_recall(trace, selection),
        **span_erased(trace, selection),
        **head_consensus(selection),
        **kv_bytes(trace, selection),
        **sizes(trace, selection, choice),
    }
