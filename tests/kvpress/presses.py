"""Runs kvpress' presses on the tokens of a trace and writes the positions that each keeps. In kvpress' environment."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack, chdir
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import h5py
import kvpress
import numpy as np
import requests
import torch
import transformers
from cases import CASES, LUKV, QUESTION, RATIOS, THINK
from gguf_model import load_gguf
from kvpress.presses import duo_attention_press, kvzip_press, lukv_press, qfilter_press


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


class FilesOf:
    """Stands for `requests`: the files of a folder, by the last part of a URL."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, url: str) -> requests.Response:
        response = requests.Response()
        response.status_code, response._content = 200, (self.folder / url.rpartition("/")[2]).read_bytes()
        return response


def with_files(folder: Path, model_name: str, ids: torch.Tensor) -> None:
    """Files of the folder replace those that kvpress downloads. Random matrices are those of the policies, and the text
    for scores of heads is the prompt."""
    sketch = np.load(folder / "sketch.npy")
    scored = kvpress.LeverageScorePress.score

    def score(press: Any, module: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        with patch(
            "torch.randn", lambda *shape, **_: torch.tensor(sketch[module.layer_idx], dtype=torch.float32)[None]
        ):
            return scored(press, module, *arguments, **named)

    kvpress.LeverageScorePress.score = score
    filters = qfilter_press.QFilters.from_pretrained(folder / "filters").q_filters
    kvpress.QFilterPress.load_q_filters = staticmethod(lambda _: filters)
    duo_attention_press.PATTERNS_DICT[model_name] = "duo"
    duo_attention_press.requests = FilesOf(folder / "duo")
    lukv_press.BUDGET_CURVE_URLS[model_name, "ExpectedAttentionPress"] = "curve.npy"
    lukv_press.requests = FilesOf(folder)
    texts = MagicMock()
    texts.return_value.to_pandas.return_value.sample.return_value.__getitem__.return_value.tolist.return_value = [""]
    tokenizer = MagicMock()
    tokenizer.from_pretrained.return_value.return_value = transformers.BatchEncoding({"input_ids": ids})
    duo_attention_press.load_dataset, duo_attention_press.AutoTokenizer = texts, tokenizer
    # Keys as they were captured say which positions are kept.
    kvpress.KeyRerotationPress.rerotate_keys = staticmethod(
        lambda module, kept, keys: keys.gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, module.head_dim))
    )


def with_tokenizer(model_file: Path) -> None:
    """KVzipPress loads the tokenizer of the GGUF file, without a chat template: the trace's prompt has none."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name)
    tokenizer.chat_template = None
    kvzip_press.AutoTokenizer = MagicMock()
    kvzip_press.AutoTokenizer.from_pretrained.return_value = tokenizer


def places_of(keys: torch.Tensor) -> list[dict[bytes, int]]:
    """Of each head, the positions of the keys [H,n,d]."""
    return [{key.tobytes(): at for at, key in enumerate(head)} for head in keys.numpy()]


def rows_of(module: Any, keys: torch.Tensor, places: list[dict[bytes, int]]) -> np.ndarray:
    """Which positions of each head are among the keys [H,n,d] that a press left, and are not masked."""
    rows = np.zeros((len(places), len(places[0])), bool)
    for row, of_head, head in zip(rows, places, keys.numpy(), strict=True):
        row[[of_head[key.tobytes()] for key in head]] = True
    if getattr(module, "masked_key_indices", None) is not None:
        rows[module.masked_key_indices[1].numpy(), module.masked_key_indices[2].numpy()] = False
        module.masked_key_indices = None
    return rows


def kept_after_passes(press: Any, model: Any, ids: torch.Tensor) -> np.ndarray:
    """What a press keeps of a prompt that decides after further passes. One of them leaves the keys of its
    last pass in the cache, after those of the prompt."""
    modules = [layer.self_attn for layer in model.model.layers]
    cache = transformers.DynamicCache()
    places: dict[int, list[dict[bytes, int]]] = {}

    def before(module: Any, *_: Any) -> None:
        if module.layer_idx not in places:
            places[module.layer_idx] = places_of(cache.layers[module.layer_idx].keys[0])

    with ExitStack() as stack, torch.inference_mode():
        for module in modules:
            stack.callback(module.register_forward_hook(before).remove)
        with press(model):
            model.model(input_ids=ids, past_key_values=cache)
    return np.stack(
        [
            rows_of(module, cache.layers[number].keys[0, :, : ids.shape[1]], places[number])
            for number, module in enumerate(modules)
        ]
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
        positions.append(places_of(layer.keys[0]))
        restore(layer, module.layer_idx)

    def after(name: str, press: Any, module: Any, *_: Any) -> None:
        layer = cache.layers[module.layer_idx]
        if isinstance(press, kvpress.ThinKPress):
            kept[name].append((layer.keys[0].numpy() != 0).any(axis=1))
        else:
            kept[name].append(rows_of(module, layer.keys[0], positions[module.layer_idx]))
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


def run_page(model: Any, ids: torch.Tensor, folder: Path) -> None:
    """The code of docs/check.md that records the kept positions of SnapKVPress; it writes a file into the folder."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "check.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {"model": model, "ids": ids}
    with chdir(folder), torch.inference_mode():
        for words in ("def save_kept", "class Recorded"):
            exec(next(block for block in blocks if words in block), names)


def main(model_file: Path, folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with h5py.File(folder / "trace.h5") as trace:
        ids = torch.tensor(trace["tokens/ids"][()], dtype=torch.long)[None]
    model = load_gguf(model_file)
    with_files(folder, model.config.name_or_path, ids)
    with_tokenizer(model_file)
    presses: dict[str, dict[str, Any]] = {"sdpa": {}, "eager": {}, "passes": {}}
    for case in (*CASES, THINK, LUKV):
        group = "passes" if case.passes else "eager" if "Observed" in case.press else "sdpa"
        for ratio in RATIOS:
            names = {**vars(kvpress), "FinchPress": FinchPress, "R": ratio, "statistics": folder / "statistics"}
            presses[group][f"{case.press} {ratio}"] = eval(case.press, names)
    model.set_attn_implementation("sdpa")
    run_page(model, ids, folder)
    found = {name: kept_after_passes(press, model, ids) for name, press in presses["passes"].items()}
    of_sdpa, keys = kept_by(presses["sdpa"], model, ids)
    model.set_attn_implementation("eager")  # which computes the attention weights that the others read
    found |= of_sdpa | kept_by(presses["eager"], model, ids)[0]
    np.savez(folder / "kept.npz", keys=keys, **found)
    (folder / "presses.json").write_text(json.dumps(exported()))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
