"""Runs kvpress' presses on the prompt of a trace and writes what the model then predicts of its continuation. In
kvpress' environment."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import h5py
import kvpress
import numpy as np
import torch
import transformers
from cases import LIVE_CASES, RATIOS
from gguf_model import load_gguf


def predicted(
    press: object | None, model: torch.nn.Module, ids: torch.Tensor, prompt: int
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [G,V] of the continuation, which sees what the press left of the prompt, at its own positions; and the
    keys [L,Hkv,n,d] that it left."""
    cache = transformers.DynamicCache()
    with torch.inference_mode():
        with press(model) if press else nullcontext():
            model(input_ids=ids[:, :prompt], past_key_values=cache)
        keys = np.stack([layer.keys[0].numpy() for layer in cache.layers])
        positions = torch.arange(prompt, ids.shape[1])[None]
        logits = model(input_ids=ids[:, prompt:], past_key_values=cache, position_ids=positions).logits[0].numpy()
    return logits, keys


def main(model_file: Path, folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with h5py.File(folder / "continued.h5") as trace:
        ids = torch.tensor(trace["tokens/ids"][()], dtype=torch.long)[None]
        prompt = int(trace["tokens"].attrs["prefill"])
    model = load_gguf(model_file)
    model.set_attn_implementation("sdpa")
    found = {"full": predicted(None, model, ids, prompt)[0]}
    for case in LIVE_CASES:
        # ObservedAttentionPress reads the attention weights that eager attention computes.
        model.set_attn_implementation("eager" if "Observed" in case.press else "sdpa")
        for ratio in RATIOS:
            press = eval(case.press, {**vars(kvpress), "R": ratio})
            name = f"{case.press} {ratio}"
            found[name], found[f"keys {name}"] = predicted(press, model, ids, prompt)
    np.savez(folder / "continuations.npz", **found)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
