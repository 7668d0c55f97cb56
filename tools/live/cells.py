"""Cells of a run whose sets can be held in the live model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch

from kvreplay.engine import decision_and_store
from kvreplay.engine import open as open_trace
from kvreplay.errors import Error
from kvreplay.live.attention import NEVER, Held, Layer, PageReads, Reads, TokenReads, kept_tokens
from kvreplay.live.passes import Evicted, Row, Text
from kvreplay.parameters import parameters
from kvreplay.results import COLUMNS, NUMBERS, Run, Selection, Stored, StoredLayer, TraceFacts

# What the column `decisions` says: whether the sets are those of a live system.
DECISIONS = {
    "after-prefill": "after-prefill",  # they are, bit for bit
    "during-prefill": "replayed",  # decided by what the full cache shows; live, later tokens would have seen less
    "future": "future",  # of a control that reads later queries
    "never": "none",  # all tokens are held
}
CHOSEN_LIVE = "live"  # all tokens are held, and each live query chooses which it reads


@dataclass(frozen=True)
class LiveCell:
    """The kept tokens of one cell of a trace, by the model's own number of each layer; other layers keep all tokens."""

    facts: dict[str, str]  # columns of results.csv that all its rows share
    label: str
    decisions: str
    kept: dict[int, torch.Tensor]  # bool [1 | Hkv | Hq, P]
    leaves: dict[int, torch.Tensor] | None = None  # int64 [1 | Hkv | Hq, T]: the query after which a token goes
    stored: Stored | None = None  # of a store that moves or changes kept tokens
    reads: dict[int, Reads] = field(default_factory=dict)  # where each query reads a part of what is held

    def row(self, text: Text, trace: TraceFacts) -> Row:
        """The prompt's keys and values that a pass over the continuation attends to, by layer."""
        every = torch.ones(1, text.prompt, dtype=torch.bool)
        row = {number: kept_tokens(layer, self.kept.get(number, every)) for number, layer in text.layers.items()}
        if self.stored is not None:
            for place in trace.treated:
                number = int(trace.layer_numbers[place])
                row[number] = given_back(text.layers[number], self.stored.layer(int(place)))
        return row


def given_back(layer: Layer, stored: StoredLayer) -> Held:
    """Keys and values of a layer as the store returns them."""
    kv_heads = len(stored.values)
    heads = max(kv_heads, len(stored.positions), len(stored.keys))
    most = max(1, *(len(row) for row in stored.positions))
    keys, values = (torch.zeros(heads, most, x.shape[2]) for x in (layer.k, layer.v))
    tokens, positions = (torch.full((heads, most), NEVER) for _ in range(2))
    for head in range(heads):
        row = head * len(stored.positions) // heads
        kept = stored.positions[row]
        some = slice(0, len(kept))
        keys[head, some] = torch.from_numpy(stored.keys[head * len(stored.keys) // heads, kept])
        values[head, some] = torch.from_numpy(stored.values[head * kv_heads // heads, kept])
        tokens[head, some] = torch.from_numpy(kept.astype(np.int64))
        positions[head, some] = torch.from_numpy(stored.stands_at[row].astype(np.int64))
    device = layer.k.device
    return Held(keys.to(layer.k), values.to(layer.v), tokens.to(device), positions.to(device))


def cells_of(run: Run, trace: TraceFacts, rows: pd.DataFrame) -> tuple[list[LiveCell], list[str], list[str]]:
    """The live cells of `rows` of run.cells; reasons why some cannot be applied in a model; reasons why some failed."""
    found, left_out, failed = [], [], []
    for row in rows.itertuples():
        decision, store = decision_and_store(f"{row.policy}:{row.params}".rstrip(":"), len(trace.treated))
        selection = run.selection_of(row.cell, trace.boundary)
        facts = _facts(run, row.cell, trace.name)
        if row.policy in SPARSE_READS:
            found.append(LiveCell(facts, row.label, CHOSEN_LIVE, {}, reads=_reads(row, trace)))
            continue
        if selection is None:
            left_out.append(
                f"{row.label}: each query reads other tokens, which live selects for {', '.join(SPARSE_READS)} only"
            )
            continue
        if decision == "during-prefill" and store == "changed":
            left_out.append(f"{row.label}: its values change whenever tokens are evicted")
            continue
        stored = leaves = None
        if store != "exact":
            try:
                stored = Stored(run.folder, trace.name, row.cell, open_trace(run.captured(trace.name)))
            except Error as problem:
                failed.append(f"{row.label} at {row.budget}: its store changes tokens of the trace: {problem}")
                continue
        elif decision == "during-prefill" and selection.evicted_at is not None:
            leaves = leaves_of(selection)
        kept = _by_layer(selection.numbers, selection.mask())
        found.append(LiveCell(facts, row.label, DECISIONS[decision], kept, leaves, stored))
    return found, list(dict.fromkeys(left_out)), failed


def evicted(whole: Text, rows: Sequence[LiveCell], trace: TraceFacts) -> Evicted:
    """The evicted tokens of cells whose passes begin at the same token."""
    if rows[0].leaves is None:
        return Evicted.behind_prompt(whole, [cell.row(whole, trace) for cell in rows], rows[0].reads)
    nobody = torch.full((1, len(whole.ids)), NEVER)
    return Evicted.over_time(
        whole, [{number: (cell.leaves or {}).get(number, nobody) for number in whole.layers} for cell in rows]
    )


def _facts(run: Run, cell: str, trace: str) -> dict[str, str]:
    table = run.overall
    row = table[(table["cell"] == cell) & (table["trace"] == trace)].iloc[0]
    return {name: f"{row[name]:.17g}" if name in NUMBERS else row[name] for name in COLUMNS}


def _pages(parameters: dict[str, str], budget: int, by_mean: bool = False) -> PageReads:
    page = int(parameters["page"])
    return PageReads(page, max(int(parameters["least_pages"]), budget // page), by_mean)


def _tokens(parameters: dict[str, str], **chosen: Any) -> TokenReads:
    return TokenReads(int(parameters["sinks"]), int(parameters["local"]), **chosen)


SPARSE_READS: dict[str, Callable[[dict[str, str], int], Reads]] = {
    "quest": _pages,
    "page-means": lambda parameters, budget: _pages(parameters, budget, by_mean=True),
    "oracle-top-k": lambda parameters, budget: _tokens(parameters, count=budget),
    "oracle-top-p": lambda parameters, budget: _tokens(parameters, share=float(parameters["p"])),
}


def _reads(row: Any, trace: TraceFacts) -> dict[int, Reads]:
    """By layer, what queries read in a cell of a policy with sparse reads."""
    values = parameters(row.params)
    reads = SPARSE_READS[row.policy](values, int(row.budget_tokens))
    return {int(trace.layer_numbers[place]): reads for place in trace.treated[int(values["dense_layers"]) :]}


def leaves_of(selection: Selection) -> dict[int, torch.Tensor]:
    """`LiveCell.leaves` of a selection with `evicted_at`, by the model's own number of the layer."""
    gone = selection.evicted_at[selection.layers].astype(np.int64)
    gone[gone < 0] = NEVER
    # A one-shot layer among online ones has no times of eviction: its other tokens are evicted after the prompt.
    prompt = gone[..., : selection.boundary]
    prompt[~selection.mask() & (prompt == NEVER)] = selection.boundary - 1
    return _by_layer(selection.numbers, gone)


def _by_layer(numbers: Iterable[int], rows: np.ndarray) -> dict[int, torch.Tensor]:
    return {int(number): torch.from_numpy(np.ascontiguousarray(one)) for number, one in zip(numbers, rows, strict=True)}
