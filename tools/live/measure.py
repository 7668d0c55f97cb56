"""Applies the kept sets of cells in a live model, and measures its predictions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import h5py
import numpy as np
import pandas as pd
import psutil
import torch

from kvreplay.capture.masks import ROW_BLOCK
from kvreplay.capture.model import head_dim
from kvreplay.capture.progress import hidden
from kvreplay.errors import Error, Refusal
from kvreplay.live import texts
from kvreplay.live.cells import LiveCell, cells_of, evicted
from kvreplay.live.decided import Replayed, decide, decided_live
from kvreplay.live.metrics import Value, divergence, drifted, predicted
from kvreplay.live.passes import Evicted, Text, Trajectory, everything, generate, read, run
from kvreplay.live.results import LiveResults, Way
from kvreplay.results import Run, TraceFacts, text

ON_GPU = 8  # cells in one pass; elsewhere 1: padded to the longest of a batch, a cell has other last bits
COMPARED_TOKENS = 8  # whose keys in the first layer must be the trace's, where no hash says which model it is
KEY_TOLERANCE = 0.05  # of the largest key: types differ, models differ by more


def say(line: str) -> None:
    print(f"kvreplay: live: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Work:
    """The cells of a trace that are still to be measured."""

    results: LiveResults
    predict: list[LiveCell]
    write: list[LiveCell]  # a text of each
    reused: int  # cells that were measured before
    left_out: list[str]  # cells that no model can hold, and why
    failed: list[str]  # cells that this machine cannot read, and why

    @classmethod
    def of(cls, run_: Run, trace: TraceFacts, rows: pd.DataFrame, count: int, way: Way, decide: bool = False) -> Work:
        """The work for these rows of run.cells. `count`: tokens of a generated text, 0 for none; `decide`: only the
        cells whose sets are decided live."""
        results = LiveResults(run_.folder, trace.name, way)
        cells, left_out, failed = cells_of(run_, trace, rows)
        if decide:
            cells, left_out = decided_live(cells)
        tokens = trace.tokens - trace.boundary
        predict = [cell for cell in cells if not results.has(cell, "kld", tokens)]
        write = [cell for cell in cells if count and not results.has(cell, "same_tokens", count)]
        waiting = {cell.facts["cell"] for cell in (*predict, *write)}
        reused = sum(cell.facts["cell"] not in waiting for cell in cells)
        left_out = [f"{trace.name}: omitted: {reason}" for reason in left_out]
        return cls(results, predict, write, reused, left_out, [f"{trace.name}: failed: {reason}" for reason in failed])

    def without_moved_keys(self) -> Work:
        """The work in a model whose keys are expanded from latent vectors."""
        cells = {cell.label for cell in (*self.predict, *self.write) if cell.stored is not None or cell.reads}
        reasons = [f"omitted: {label}: it moves, changes or pages latent keys" for label in sorted(cells)]
        predict, write = ([cell for cell in some if cell.label not in cells] for some in (self.predict, self.write))
        return replace(self, predict=predict, write=write, left_out=[*self.left_out, *reasons])

    @property
    def cells(self) -> int:
        """The number of measurements to do."""
        return len(self.predict) + len(self.write)


class LiveModel:
    """One model, for many traces. `failed`: cells that could not be measured. `reused`: the number of cells that were
    measured before. `floors`: by trace the KLD in nats of these passes, nothing evicted, from the model's own
    attention."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        model_hash: str,
        batch: int | None = None,
        memory: int | None = None,
        say: Callable[[str], None] = say,
        decide: bool = False,
    ) -> None:
        """`batch`: the largest number of cells in one pass; `memory`: bytes that the weights and a pass may take; `say`
        receives messages for the user; `decide`: sets of policies that evict during the prefill are decided live."""
        self._model = model
        self._tokenizer = tokenizer
        self._name = name
        self._hash = model_hash
        self._device = model.device.type
        self.way = Way(self._device, str(model.dtype).removeprefix("torch."), model_hash)
        self._most = batch or (ON_GPU if self._device == "cuda" else 1)
        self._batch = self._most
        self._memory = memory
        self._say = say
        self._decide = decide
        self._is_latent = any(hasattr(module, "kv_b_proj") for module in model.modules())
        self.failed: list[str] = []
        self.reused = 0
        self.floors: dict[str, float] = {}

    def measure(
        self,
        run_: Run,
        trace: TraceFacts,
        rows: pd.DataFrame,
        count: int,
        answers: list[str] | None,
        progress: Callable[[str, int], Any] = hidden,
    ) -> None:
        """Adds the numbers of these cells to live/NAME.csv; with `count`, also those of texts of `count` tokens.
        `progress` gives tqdm's bar of a name and a number of cells, or an object with its methods."""
        work = Work.of(run_, trace, rows, count, self.way, self._decide)
        if self._is_latent:
            if self._decide:
                raise Error("--live-decisions", "not in a model with latent attention", "a model that caches keys and "
                            "values", trace.name, Refusal.CAPABILITY)  # fmt: skip
            work = work.without_moved_keys()
        for reason in [*work.left_out, *work.failed]:
            self._say(reason)
        self.failed += work.failed
        self.reused += work.reused
        if not work.cells:
            return
        results, tokens = work.results, trace.tokens - trace.boundary
        known = run_.cells_file(trace.name)[f"/traces/{trace.name}/tokens/ids"][()]
        by_keys = self._check(run_, trace, known)
        self._batch = self.batch_of(trace, rows)
        if self._batch < self._most:
            self._say(f"{trace.name}: batch of {self._batch} cells in place of {self._most}, limited by --memory")
        bar = progress(trace.name, work.cells)
        with contextlib.closing(bar):
            whole = read(self._model, self._name, [int(one) for one in known], trace.boundary)
            if by_keys and not self._is_latent:  # the trace has latent vectors in the place of keys
                bar.clear()
                self._compare_keys(run_, trace, whole)
            try:
                cells = self._decided(run_, whole, work.predict, trace) if self._decide else work.predict
                for some in alike(cells, trace.kv_heads):
                    for cell, values in self._predicted(whole, some, trace):
                        results.add(cell, values, tokens)
                        bar.update()
                answers = answers or _answer_spans(run_, trace)
                if work.write:
                    bar.set_description(f"{trace.name}: generating {count} tokens for each cell")
                for cell, values, words in self._written(whole, work.write, trace, count, answers):
                    results.add(cell, values, count, words)
                    bar.update()
            except torch.OutOfMemoryError as error:
                raise Error("live", "too little device memory", "a smaller --batch", str(error).splitlines()[0],
                            Refusal.RESOURCES) from error  # fmt: skip
            finally:
                results.write()

    def batch_of(self, trace: TraceFacts, rows: pd.DataFrame) -> int:
        """How many of these rows of run.cells a pass measures: at most the number that fits into the memory limit.

        A trace takes the prompt's keys and values and the reference's distributions; a batch row takes kept keys and
        values, activations and the mask of a block of queries, and, once more for the reference, hidden states,
        attention outputs and distributions of the continuation.
        """
        config = self._model.config.get_text_config()
        layers, hidden, size = config.num_hidden_layers, config.hidden_size, self._model.dtype.itemsize
        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        count = trace.tokens - trace.boundary
        token = 2 * layers * head_dim(config) * size  # keys and values of a head
        by_query_head = self._is_latent or (rows["heads"] == "query").any()
        heads = trace.query_heads if by_query_head else trace.kv_heads
        width = layers * (hidden + trace.query_heads * head_dim(config))
        of_trace = trace.tokens * trace.kv_heads * token + 8 * count * vocabulary
        of_row = trace.tokens * (heads * token + 4 * hidden * size + trace.query_heads * min(ROW_BLOCK, trace.tokens))
        of_row += 2 * count * (width * size + 2 * vocabulary * 8)
        if self._memory is None:
            free = torch.cuda.mem_get_info()[0] if self._device == "cuda" else psutil.virtual_memory().available
            if (needed := of_trace + self._most * of_row) > free:
                raise Error(trace.name, "memory", f"{needed / 2**30:.1f} GiB in addition to the model; use a smaller "
                                                  "--batch",
                            f"{free / 2**30:.1f} GiB", Refusal.RESOURCES)  # fmt: skip
            return self._most
        of_trace += self._model.get_memory_footprint()
        if of_trace + of_row > self._memory:
            raise Error("--memory", f"too small for one cell of trace {trace.name}",
                        f"at least {(of_trace + of_row) / 2**20:.1f} MiB", f"{self._memory / 2**20:.1f} MiB",
                        Refusal.RESOURCES)  # fmt: skip
        return min(self._most, (self._memory - of_trace) // of_row)

    def _decided(self, run_: Run, whole: Text, cells: Sequence[LiveCell], trace: TraceFacts) -> list[LiveCell]:
        """These cells with the sets that are decided live."""

        def decided(some: Sequence[LiveCell]) -> list[LiveCell]:
            return [decide(self._model, whole, cell, trace, Replayed(run_, trace, cell, whole)) for cell in some]

        return list(self._each(cells, trace, decided))

    def _predicted(
        self, whole: Text, cells: Sequence[LiveCell], trace: TraceFacts
    ) -> Iterator[tuple[LiveCell, list[Value]]]:
        """Yields the metrics of cells that share a reference."""
        reference: Trajectory | None = None
        following = whole.ids[whole.prompt + 1 :]

        def measured(some: Sequence[LiveCell]) -> list[tuple[LiveCell, list[Value]]]:
            nonlocal reference
            # As many rows in every pass: a row has the same bits in each, and so the full cache is exactly itself.
            rows = [*some, *[some[-1]] * (self._batch - len(some))]
            of_cells = evicted(whole, rows, trace)
            if reference is None:
                reference = run(self._model, whole, Evicted.nothing(of_cells, whole))
                floor = float(divergence(whole.own, reference.log_probabilities[0]).mean())
                self.floors[trace.name] = max(floor, self.floors.get(trace.name, 0.0))
            found = run(self._model, whole, of_cells)
            if found.log_probabilities.isnan().any():
                raise Error("logits are NaN", "", "finite numbers; use another --dtype")
            return [
                (cell, [*predicted(reference, found, row, following), *drifted(reference, found, row)])
                for row, cell in enumerate(some)
            ]

        yield from self._each(cells, trace, measured)

    def _each(
        self, cells: Sequence[LiveCell], trace: TraceFacts, work: Callable[[Sequence[LiveCell]], Sequence[Any]]
    ) -> Iterator[Any]:
        """Yields the results of `work` on batches of cells. The cells of a batch that fails are tried one by one."""
        for some in _groups(cells, self._batch):
            try:
                yield from work(some)
            except Error as problem:
                if len(some) > 1:
                    for cell in some:
                        yield from self._each([cell], trace, work)
                    continue
                self.failed.append(f"{trace.name}: {some[0].label} at {some[0].facts['budget']}")
                self._say(f"{self.failed[-1]}: failed: {problem}")

    def _written(
        self, whole: Text, cells: Sequence[LiveCell], trace: TraceFacts, count: int, answers: list[str]
    ) -> Iterator[tuple[LiveCell, list[Value], str]]:
        """Yields each cell with its metrics and its generated text."""
        if not cells:
            return
        end = self._model.generation_config.eos_token_id
        ends = {end} if isinstance(end, int) else set(end or [])
        reference = _until(generate(self._model, whole, [everything(whole)] * self._batch, count)[0], ends)

        def written(some: Sequence[LiveCell]) -> list[tuple[LiveCell, list[Value], str]]:
            rows = [*some, *[some[-1]] * (self._batch - len(some))]
            held = [cell.row(whole, trace) for cell in rows]
            found = []
            of_rows = generate(self._model, whole, held, count, some[0].reads)
            for cell, tokens in zip(some, of_rows, strict=False):
                tokens = _until(tokens, ends)
                words = self._tokenizer.decode(tokens, skip_special_tokens=True)
                values = [*texts.written(tokens, reference), *(texts.answered(words, answers) if answers else ())]
                found.append((cell, values, words))
            return found

        yield from self._each(cells, trace, written)

    def _check(self, run_: Run, trace: TraceFacts, ids: np.ndarray) -> bool:
        """Rejects another model than the trace's. Returns whether keys must be compared, since a hash is missing."""
        config = self._model.config.get_text_config()
        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        if ids.max() >= vocabulary:
            raise Error(trace.name, "token ids", f"ids below the vocabulary size {vocabulary}", str(ids.max()))
        if trace.reading_layers:
            raise Error(trace.name, "/model/kv_source", "layers with own keys and values, for the live model", "shared")
        if len(np.unique(trace.heads[trace.treated], axis=0)) > 1:
            raise Error(trace.name, "/model/heads", "treated layers with equal heads, for the live model", "others")
        heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
        heads = (heads[0], 1) if self._is_latent else heads
        if heads != (trace.query_heads, trace.kv_heads):
            raise Error(trace.name, "another model", f"{trace.query_heads} query and {trace.kv_heads} KV heads",
                        "{} and {}".format(*heads))  # fmt: skip
        return not has_weights_of(run_, trace, self._hash)

    def _compare_keys(self, run_: Run, trace: TraceFacts, whole: Text) -> None:
        """Compares the keys of the first tokens in the first layer, if the trace's file exists."""
        self._say(
            f"{trace.name}: no hash of the weights; the model is checked by its shapes and the keys of the first tokens"
        )
        try:
            with h5py.File(run_.captured(trace.name)) as file:
                stored = np.asarray(file["/layers/000/k"][:, :COMPARED_TOKENS], dtype=np.float32)
        except (Error, OSError, KeyError):
            return
        number = int(trace.layer_numbers[0])
        found = whole.layers[number].k[:, :COMPARED_TOKENS].float().cpu().numpy()
        if found.shape != stored.shape or np.abs(found - stored).max() > KEY_TOLERANCE * np.abs(stored).max():
            raise Error(
                trace.name,
                "another model",
                f"the keys of the first tokens in layer {number} of the trace",
                "other keys",
            )


def alike(cells: Sequence[LiveCell], kv_heads: int) -> list[list[LiveCell]]:
    """Groups of cells that share a reference, since their arithmetic is the same: the passes begin at the same token,
    and the sets have the same number of heads."""
    kinds: dict[tuple[bool, bool, bool], list[LiveCell]] = {}
    for cell in cells:
        rows = cell.leaves or cell.kept
        by_query_head = any(len(one) > kv_heads for one in rows.values())
        kinds.setdefault((cell.leaves is not None, by_query_head, bool(cell.reads)), []).append(cell)
    return [kinds[kind] for kind in sorted(kinds)]


def _groups(cells: Sequence[LiveCell], size: int) -> Iterator[Sequence[LiveCell]]:
    """Batches of cells. All rows of a pass read the same pages, so a cell with sparse reads is alone in its batch."""
    others = [cell for cell in cells if not cell.reads]
    yield from (others[first : first + size] for first in range(0, len(others), size))
    yield from ([cell] for cell in cells if cell.reads)


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    """The tokens before the first one that ends a text."""
    return list(takewhile(lambda token: token not in ends, tokens))


def has_weights_of(run_: Run, trace: TraceFacts, model_hash: str) -> bool:
    """Whether the hashes of the weights show that the model is the trace's; False where one is missing. Throws Error if
    they show another model."""
    of_trace = _source_hash(run_, trace)
    if of_trace and model_hash and of_trace != model_hash:
        raise Error(trace.name, "another model", f"{trace.model}, weights {of_trace[:16]}...",
                    f"{model_hash[:16]}...")  # fmt: skip
    return bool(of_trace and model_hash)


def _source_hash(run_: Run, trace: TraceFacts) -> str:
    """The hash of the weights from the trace's file; empty if the hash or the file is missing."""
    try:
        with h5py.File(run_.captured(trace.name)) as file:
            return text(file["/model"].attrs.get("source_hash", ""))
    except (Error, OSError, KeyError):
        return ""


def _answer_spans(run_: Run, trace: TraceFacts) -> list[str]:
    """The texts of the spans that contain the answer."""
    tokens = run_.cells_file(trace.name)[f"/traces/{trace.name}/tokens"]
    if "text" not in tokens:
        return []
    encoded = text(tokens["text"][()])
    offsets = tokens["offsets"][()]
    return [
        encoded[int(offsets[one.begin][0]) : int(offsets[one.end - 1][1])].strip()
        for one in trace.spans
        if one.kind == "answer"
    ]
