"""Runs kvpress' presses on the tokens of a trace and writes the positions that each keeps. In kvpress' environment."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import h5py
import kvpress
import numpy as np
import torch
import transformers
from cases import CASES, QUESTION, RATIOS, THINK
from gguf_model import load_gguf
from kvpress.presses import duo_attention_press


def exported() -> list[str]:
    """The presses that kvpress offers."""
    return [
        name for name, kind in vars(kvpress).items() if inspect.isclass(kind) and issubclass(kind, kvpress.BasePress)
    ]


@dataclass
class FinchPress(kvpress.FinchPress):
    """The question is the last QUESTION tokens; kvpress finds it by a delimiter token in the prompt."""

    window_size: int = field(default=QUESTION, init=False)

    __call__ = kvpress.BasePress.__call__


def with_tables(folder: Path, ids: torch.Tensor) -> None:
    """Random matrices, tables and texts that kvpress draws or downloads are those of the policies."""
    sketch, filters, roles = (np.load(folder / f"{name}.npy") for name in ("sketch", "filters", "roles"))
    scored = kvpress.LeverageScorePress.score

    def score(press: Any, module: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        with patch(
            "torch.randn", lambda *shape, **_: torch.tensor(sketch[module.layer_idx], dtype=torch.float32)[None]
        ):
            return scored(press, module, *arguments, **named)

    kvpress.LeverageScorePress.score = score
    # Published filters point away from the queries.
    kvpress.QFilterPress.load_q_filters = staticmethod(lambda _: torch.tensor(-filters))
    kvpress.DuoAttentionPress.load_attention_pattern = staticmethod(lambda _: (128, 256, roles))
    texts = MagicMock()
    texts.return_value.to_pandas.return_value.sample.return_value.__getitem__.return_value.tolist.return_value = [""]
    tokenizer = MagicMock()
    tokenizer.from_pretrained.return_value.return_value = transformers.BatchEncoding({"input_ids": ids})
    duo_attention_press.load_dataset, duo_attention_press.AutoTokenizer = texts, tokenizer
    # Keys as they were captured say which positions are kept.
    kvpress.KeyRerotationPress.rerotate_keys = staticmethod(
        lambda module, kept, keys: keys.gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, module.head_dim))
    )


def kept_by(presses: dict[str, Any], model: Any, ids: torch.Tensor) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What each press keeps of a prompt, and all keys [layers, KV heads, tokens, d].

    One pass: after the hook of each press the cache has all keys and values again.
    """
    modules = [layer.self_attn for layer in model.model.layers]
    cache = transformers.DynamicCache()
    everything: list[tuple[torch.Tensor, torch.Tensor]] = []
    positions: list[list[dict[bytes, int]]] = []
    kept: dict[str, list[np.ndarray]] = {name: [] for name in presses}

    def restore(layer: Any, number: int) -> None:
        layer.keys, layer.values = (tensor.clone() for tensor in everything[number])

    def before(module: Any, *_: Any) -> None:
        layer = cache.layers[module.layer_idx]
        everything.append((layer.keys, layer.values))
        positions.append([{key.tobytes(): at for at, key in enumerate(head)} for head in layer.keys[0].numpy()])
        restore(layer, module.layer_idx)

    def after(name: str, press: Any, module: Any, *_: Any) -> None:
        layer = cache.layers[module.layer_idx]
        keys = layer.keys[0].numpy()
        if isinstance(press, kvpress.ThinKPress):
            kept[name].append((keys != 0).any(axis=1))
        else:
            rows = np.zeros(everything[0][0].shape[1:3], bool)
            for head, places in enumerate(positions[module.layer_idx]):
                rows[head, [places[key.tobytes()] for key in keys[head]]] = True
            if module.masked_key_indices is not None:
                rows[module.masked_key_indices[1].numpy(), module.masked_key_indices[2].numpy()] = False
                module.masked_key_indices = None
            kept[name].append(rows)
        restore(layer, module.layer_idx)

    for press in presses.values():
        press.post_init_from_model(model)  # a pass of its own, of which kvpress remembers the result
    with ExitStack() as stack, torch.inference_mode():

        def hooked(hook: Callable[..., None]) -> None:
            for module in modules:
                stack.callback(module.register_forward_hook(hook).remove)

        hooked(before)
        for name, press in presses.items():
            stack.enter_context(press(model))
            hooked(partial(after, name, press))
        model.model(input_ids=ids, past_key_values=cache)
    return {name: np.stack(rows) for name, rows in kept.items()}, np.stack([keys[0].numpy() for keys, _ in everything])


def main(model_file: Path, folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with h5py.File(folder / "trace.h5") as trace:
        ids = torch.tensor(trace["tokens/ids"][()], dtype=torch.long)[None]
    model = load_gguf(model_file)
    with_tables(folder, ids)
    presses: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    for case in (*CASES, THINK):
        for ratio in RATIOS:
            names = {**vars(kvpress), "FinchPress": FinchPress, "R": ratio}
            presses["Observed" in case.press][f"{case.press} {ratio}"] = eval(case.press, names)
    model.set_attn_implementation("sdpa")
    found, keys = kept_by(presses[False], model, ids)
    model.set_attn_implementation("eager")  # which computes the attention weights that the others read
    found |= kept_by(presses[True], model, ids)[0]
    np.savez(folder / "kept.npz", keys=keys, **found)
    (folder / "presses.json").write_text(json.dumps(exported()))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
