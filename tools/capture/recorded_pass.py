"""The recorded pass over prompt and continuation, whole or in chunks, and the model's predictions during it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvreplay.capture.model import cache_name, decoder, input_device
from kvreplay.capture.observe import LayerCall, observed
from kvreplay.capture.refusals import Layers, refused
from kvreplay.capture.rope import frequencies, same
from kvreplay.trace import TraceWriter

LISTED = 64  # most probable tokens of each distribution
ROWS_AT_ONCE = 16  # distributions in float64


@dataclass
class Reference:
    """The model's distributions of the continuation tokens P to T - 1, that of each at the token before it."""

    prompt_tokens: int
    tokens: int
    ids: list[np.ndarray] = field(default_factory=list)
    log_probabilities: list[np.ndarray] = field(default_factory=list)
    tail: list[np.ndarray] = field(default_factory=list)

    def wanted(self, begin: int, end: int) -> range:
        """The tokens of [begin, end) whose logits are distributions of continuation tokens."""
        return range(max(begin, self.prompt_tokens - 1), min(end, self.tokens - 1))

    def add(self, logits: torch.Tensor) -> None:
        """The next rows [n,V]."""
        for rows in logits.split(ROWS_AT_ONCE):
            log_probabilities = rows.cpu().double().log_softmax(-1)
            listed, ids = log_probabilities.topk(min(LISTED, rows.shape[-1]))
            rest = log_probabilities.scatter(-1, ids, -torch.inf)
            self.ids.append(ids.numpy().astype(np.int32))
            self.log_probabilities.append(listed.clamp(max=0).numpy().astype(np.float32))
            self.tail.append(rest.logsumexp(-1).exp().numpy().astype(np.float32))

    def write(self, trace: TraceWriter) -> None:
        for name in ("ids", "log_probabilities", "tail"):
            trace.dataset(f"/reference/{name}", np.concatenate(getattr(self, name)))


def _logits(model: Any, inputs: dict[str, Any], last: int) -> tuple[torch.Tensor, Any]:
    """Logits [last,V] of the last tokens of a pass, and its output."""
    kept = {"logits_to_keep": last} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    output = model(**inputs, **kept)
    return output.logits[0, -last:], output


def run_pass(
    model: Any,
    name: str,
    ids: list[int],
    observer: Callable[[LayerCall], None],
    chunk: int,
    reference: Reference | None,
    layers: Layers = None,
    *,
    cache: Any = None,
    use_cache: bool = False,
) -> Any:
    """All tokens through all layers, `chunk` at once with the model's own cache: `observer` is shown chosen layers.
    They follow the tokens of `cache`; the value is the cache after them, which one pass has only with `use_cache`.

    The output head runs only where `reference` wants logits.
    """
    before = frequencies(decoder(model))
    name_of_cache = cache_name(decoder(model))
    for begin in range(0, len(ids), chunk):
        end = min(begin + chunk, len(ids))
        inputs = {
            "input_ids": torch.tensor([ids[begin:end]], device=input_device(model)),
            "use_cache": use_cache or chunk < len(ids),
        }
        if cache is not None:
            inputs[name_of_cache] = cache
        wanted = reference.wanted(begin, end) if reference else range(0)
        with torch.inference_mode(), observed(model, name, observer, layers):
            if reference and wanted:
                logits, output = _logits(model, inputs, end - wanted.start)
                reference.add(logits[: len(wanted)])
            else:
                output = decoder(model)(**inputs)
        cache = getattr(output, name_of_cache, None)
        # Some kinds of RoPE have other frequencies for short sequences, so also for early chunks.
        after = frequencies(decoder(model))
        if len(before) != len(after) or not all(map(same, before, after)):
            raise refused(name, "RoPE whose frequencies changed in the pass", "those that the probe saw")
        if cache is None and end < len(ids):
            raise refused(name, "a model without a cache", "a cache, for --chunk")
    return cache
