"""Which tokens look alike? Token × token cosine of keys and of values in one layer, as means over blocks of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import xxhash

from kvreplay.errors import Error
from kvreplay.plot.figure_options import Choice
from kvreplay.plot.spans import SpanBrackets
from kvreplay.plot.style import Drawing, position_ticks
from kvreplay.results import TraceFacts
from kvreplay.trace import Trace

CELLS = 240  # a side at most; more tokens are drawn as means over pairs of blocks
GAP = 0.36  # inches between keys and values
READ_AT_ONCE = 512  # tokens of a layer in memory as float64
TENSORS = {"keys": "k", "values": "v"}


def directions(tensor: np.ndarray, prompt: int) -> Iterator[tuple[int, np.ndarray]]:
    """First token and unit vectors [b, Hkv*d] of the prompt's tokens, in pieces, from a tensor [Hkv,T,d].

    A token's vector is that of all KV heads concatenated, as the redundancy metrics take it; a zero vector remains
    zero, so its cosines are 0.
    """
    for begin in range(0, prompt, READ_AT_ONCE):
        piece = tensor[:, begin : min(begin + READ_AT_ONCE, prompt)].astype(np.float64)
        vectors = piece.transpose(1, 0, 2).reshape(piece.shape[1], -1)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        yield begin, vectors / np.where(norms > 0, norms, 1.0)


def block_cosines(tensor: np.ndarray, prompt: int, per_block: int) -> np.ndarray:
    """Mean cosine of the pairs of different tokens of every two blocks: float64 [n,n], n = ceil(prompt / per_block).

    The mean of <w_i, w_j> over blocks I and J is <sum of I, sum of J> / (|I| |J|): no matrix of all tokens is needed.
    Inside a block of b tokens the b cosines of a token with itself are left out; a block of one token has 1.
    """
    blocks = -(-prompt // per_block)
    sums = np.zeros((blocks, tensor.shape[0] * tensor.shape[2]))
    own = np.zeros(blocks)  # sum of <w_i, w_i>
    for begin, vectors in directions(tensor, prompt):
        block = np.arange(begin, begin + len(vectors)) // per_block
        np.add.at(sums, block, vectors)
        np.add.at(own, block, (vectors**2).sum(axis=1))
    size = np.minimum(np.arange(1, blocks + 1) * per_block, prompt) - np.arange(blocks) * per_block
    products = sums @ sums.T
    found = products / np.outer(size, size)
    pairs = size * (size - 1)
    inside = np.where(pairs > 0, (np.diagonal(products) - own) / np.where(pairs > 0, pairs, 1), 1.0)
    np.fill_diagonal(found, inside)
    return np.clip(found, -1.0, 1.0)


def check_same(trace: Trace, facts: TraceFacts, prompt_hash: str | None) -> None:
    """Checks by header and token ids of the prompt that the file is the trace that was replayed.

    `prompt_hash`: XXH3-128 of these ids as little-endian int32; None: the run does not record it.
    """
    found = (trace.model, trace.prompt, trace.tokens, trace.layers)
    wanted = (facts.model, facts.prompt, facts.tokens, facts.layers)
    if found != wanted:
        words = "{}, {} prompt of {} tokens, {} layers"
        raise Error(str(trace.path), "not the trace that was replayed", words.format(*wanted), words.format(*found))
    ids = trace.ids[: trace.prompt].astype("<i4")
    own_hash = xxhash.xxh3_128(ids.tobytes()).hexdigest()
    if prompt_hash not in (None, own_hash):
        wanted_ids = f"prompt ids of XXH3-128 {prompt_hash}"
        raise Error(str(trace.path), "not the trace that was replayed", wanted_ids, own_hash)


def draw(choice: Choice) -> Drawing:
    """Keys and values next to each other on one scale; the trace's spans above, and on both axes."""
    facts = choice.one_trace()
    layer = choice.one_layer(facts)
    shown = {name: part for name, part in TENSORS.items() if choice.of in ("", name)}
    per_block = -(-facts.boundary // CELLS)
    with Trace(choice.run.captured(facts.name)) as trace:
        check_same(trace, facts, choice.run.prompt_hashes.get(facts.hash))
        grids = {name: block_cosines(trace[f"/layers/{layer:03d}/{part}"], facts.boundary, per_block)
                 for name, part in shown.items()}  # fmt: skip
    beside = np.concatenate([grid[~np.eye(len(grid), dtype=bool)] for grid in grids.values()])
    low = float(np.floor(beside.min(initial=0.9) * 10) / 10)

    side, columns = choice.fit(2.45 if len(grids) > 1 else 3.4, len(grids), 0.68, 0.95, GAP, least=1.2)
    spans = SpanBrackets(facts, side)
    per = f"; a cell is the mean over pairs of different tokens of two blocks of {per_block}" if per_block > 1 else ""
    sheet = choice.sheet(
        len(grids), (side, side), columns, left=0.68, right=0.95, above=spans.height + 0.26,
        gap=(GAP, spans.height + 0.72), below=0.42,
        title=f"Cosine similarity of tokens in layer {facts.layer_numbers[layer]}",
        subtitle=f"token vectors: all {facts.kv_heads} KV heads concatenated{per}", caption=choice.caption(),
    )  # fmt: skip
    x, y, _, height = sheet.grid
    size = len(next(iter(grids.values())))
    data = []
    for i, (name, grid) in enumerate(grids.items()):
        axis = sheet.axes[i]
        image = axis.imshow(grid, cmap="cividis", vmin=low, vmax=1, interpolation="nearest", aspect="auto",
                            extent=(0, size, size, 0))  # fmt: skip
        axis.set_xlim(0, facts.boundary / per_block)
        axis.set_ylim(facts.boundary / per_block, 0)
        for ticks in (axis.xaxis, axis.yaxis):
            position_ticks(ticks, facts.boundary, per_block, most=5)
        spans.draw_beside(axis, 1 / per_block, side)
        axis.tick_params(labelleft=i % columns == 0)
        if i % columns == 0:
            axis.set_ylabel("position of the token in the prompt")
        axis.set_xlabel("position of the token in the prompt")
        row, column = divmod(i, columns)
        spans.draw(sheet, x + column * (side + GAP), y + height - row * (side + spans.height + 0.72) + 0.02)
        axis.annotate(name, (0, 1), (0, (spans.height + 0.06) * 72), "axes fraction", "offset points", weight="bold")
        begin = np.arange(size) * per_block
        end = np.minimum(begin + per_block, facts.boundary)
        first, second = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
        keep = (first <= second).ravel()
        a, b = first.ravel()[keep], second.ravel()[keep]
        data.append(pd.DataFrame({
            "tensor": name, "layer": facts.layer_numbers[layer], "begin": begin[a], "end": end[a],
            "other_begin": begin[b], "other_end": end[b], "cosine": grid[a, b],
        }))  # fmt: skip
    sheet.colour_bar(image, "cosine similarity", beside=0.3)
    return Drawing(sheet.figure, pd.concat(data, ignore_index=True))
