"""`kvreplay example -o FILE`: a trace of a real model for a first replay, a third of the repository's shipped trace."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from kvreplay.export import replacing
from kvreplay.program import Parser, exit_code, print_next_replay, writing

SHIPPED = Path(__file__).parents[3] / "traces/smollm2-135m-needle.h5"  # in the source folder
PACKED = Path(__file__).with_name("example.h5")  # in an installed package: the build calls `cut(SHIPPED, PACKED)`
STEP = 3  # every third layer: at most 10 MB


def cut(whole: Path | str, path: Path | str) -> None:
    """Writes every third layer of a trace of SHIPPED's fields as a trace. Numbers keep their types and bits."""
    import h5py
    import numpy as np

    # PAGE of kvreplay.trace: aligned tensors can be mapped.
    with h5py.File(whole) as source, h5py.File(
        path, "w", libver=("v108", "v110"), alignment_threshold=4096, alignment_interval=4096
    ) as target:  # fmt: skip
        target.attrs.update(source.attrs)
        for name in ("tokens", "spans"):
            source.copy(name, target)
        model = target.create_group("model")
        model.attrs.update(source["model"].attrs)
        kept = np.arange(0, source["model"].attrs["n_layers"], STEP)
        model.attrs["n_layers"] = len(kept)
        for name in ("layer_index", "sliding_window", "rope/inv_freq", "rope/attention_scaling"):
            model[name] = source["model"][name][kept]
        model["rope"].attrs.update(source["model/rope"].attrs)
        for place, layer in enumerate(kept):
            source.copy(f"layers/{layer:03d}", target, f"layers/{place:03d}")


def example(path: Path | str, force: bool = False) -> Path:
    """Writes a trace of 10 MB for a first replay, as `kvreplay example` does, and returns its path.

    The trace has every third layer of SmolLM2-135M-Instruct on a prompt of 480 tokens with a needle and a question, and
    32 generated tokens. An existing file is an Error, unless `force` is true.
    """
    from kvreplay.trace import refuse_existing

    path = Path(path)
    refuse_existing(path, force)
    with writing(path), replacing(path) as partial:
        shutil.copyfile(PACKED, partial) if PACKED.exists() else cut(SHIPPED, partial)
    return path


def parser() -> Parser:
    """The parser of the command line."""
    found = Parser(
        prog="kvreplay example",
        writes_files=True,
        description="Writes an example trace of 10 MB: every third layer of SmolLM2-135M-Instruct on a prompt of 480 "
        "tokens with a needle and a question.",
        examples=("kvreplay example -o t.h5", "kvreplay replay t.h5 -p snapkv,h2o -b 0.1 -o out"),
    )
    found.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="trace to write")
    found.add_argument("--force", action="store_true", help="overwrite an existing file")
    return found


def write(arguments: argparse.Namespace) -> None:
    """Does what the command line says."""
    path = example(arguments.output, arguments.force)
    print(f"trace    {path}")
    print_next_replay(path)


def main(argv: list[str] | None = None) -> int:
    """Writes the trace; returns the exit code."""
    return exit_code("example", lambda: write(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
