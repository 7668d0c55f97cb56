"""Runs kvpress' presses that score by further passes over the prompt of a trace, and writes the positions that each
keeps. In kvpress' environment."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import h5py
import kvpress
import numpy as np
import torch
import transformers
from cases import PASS_CASES, PASS_CHUNK, RATIOS
from presses import kept_after_passes


def main(model_folder: Path, trace: Path, file: Path) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with h5py.File(trace) as opened:
        boundary = int(opened["reconstruction"].attrs["boundary"])
        ids = torch.tensor(opened["tokens/ids"][:boundary], dtype=torch.long)[None]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    names = {**vars(kvpress), "KVzipPress": partial(kvpress.KVzipPress, chunk_size=PASS_CHUNK)}
    presses = {
        f"{case.press} {ratio}": eval(case.press, names | {"R": ratio}) for case in PASS_CASES for ratio in RATIOS
    }
    np.savez(file, **{name: kept_after_passes(press, model, ids) for name, press in presses.items()})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
