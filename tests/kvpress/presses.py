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
from cases import CASES, QUESTION, RATIOS
from kvpress.presses import duo_attention_press

Sets = np.ndarray  # bool [layers, KV heads, tokens]


def exported() -> list[str]:
    """The presses that kvpress offers."""
    return [name for name, kind in vars(kvpress).items() if inspect.isclass(kind) and issubclass(kind, kvpress.BasePress)]


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
        with patch("torch.randn", lambda *shape, **_: torch.tensor(sketch[module.layer_idx], dtype=torch.float32)[None]):
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


def kept_by(presses: dict[str, Any], model: Any, ids: torch.Tensor) -> tuple[dict[str, Sets], np.ndarray]:
    """What each press keeps of a prompt, in one pass: after its hook the cache gets back all keys and values. And all
    keys."""
    modules = [layer.self_attn for layer in model.model.layers]
    cache = transformers.DynamicCache()
    everything: list[tuple[torch.Tensor, torch.Tensor]] = []
    kept: dict[str, Sets] = {}

    def before(module: Any, *_: Any) -> None:
        layer = cache.layers[module.layer_idx]
        everything.append((layer.keys, layer.values))

    def after(name: str, module: Any, *_: Any) -> None:
        number, layer, (keys, values) = module.layer_idx, cache.layers[module.layer_idx], everything[module.layer_idx]
        sets = kept.setdefault(name, np.zeros((len(modules), *keys.shape[1:3]), bool))
        for head, rows in enumerate(keys[0].numpy()):
            position = {key.tobytes(): place for place, key in enumerate(rows)}
            sets[number, head, [position[key.tobytes()] for key in layer.keys[0, head].numpy()]] = True
        if module.masked_key_indices is not None:
            sets[number, module.masked_key_indices[1].numpy(), module.masked_key_indices[2].numpy()] = False
        layer.keys, layer.values, module.masked_key_indices = keys, values, None

    for press in presses.values():
        press.post_init_from_model(model)  # a pass of its own, of which kvpress remembers the result
    with ExitStack() as stack, torch.inference_mode():

        def hooked(hook: Callable[..., None]) -> None:
            for module in modules:
                stack.callback(module.register_forward_hook(hook).remove)

        hooked(before)
        for name, press in presses.items():
            stack.enter_context(press(model))
            hooked(partial(after, name))
        model.model(input_ids=ids, past_key_values=cache)
    return kept, np.stack([keys[0].numpy() for keys, _ in everything])


def main(model_file: Path, folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with h5py.File(folder / "trace.h5") as trace:
        ids = torch.tensor(trace["tokens/ids"][()], dtype=torch.long)[None]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_file.parent, gguf_file=model_file.name, dtype=torch.float32
    ).eval()
    with_tables(folder, ids)
    presses: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    for case in CASES:
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
