"""Runs ReplayPress with a policy of a plug-in and with built-in ones; writes the kept keys. In kvpress' environment."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from replay_presses import loaded

import kvreplay as kv
from kvreplay.kvpress import ReplayPress

TOKENS, RATIO = 120, 0.5
POLICIES = {"mine": "mine:window=8", "built in": "snapkv:window=8,pool=none", "another": "local"}


def main(plugin: Path, file: Path) -> None:
    kv.load_plugin(plugin)
    model = loaded("qwen3")
    ids = torch.randint(3, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    found = {}
    for name, policy in POLICIES.items():
        cache = transformers.DynamicCache()
        with torch.inference_mode(), ReplayPress(policy, RATIO)(model):
            model.model(input_ids=ids, past_key_values=cache)
        found[name] = np.stack([layer.keys[0].numpy() for layer in cache.layers])
    np.savez(file, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
