"""Layers of a trace through kvreplay and through PyTorch, in turns in one run, on the same bytes and all cores.

    python tools/bench/side_by_side.py --folder build/bench -o side_by_side.json [--quick]

Both answers are compared before any time is taken. A form that PyTorch needs minutes for is run at a few steps and
extrapolated; its name says so. The times of a candidate are those of `rounds` rounds, of which the median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from pytorch_forms import (
    blocks_causal,
    blocks_causal_head_by_head,
    blocks_masked,
    causal_mask,
    head_by_head,
    least_redundant,
    least_redundant_steps,
    naive,
    similarity_row_maxima,
    unit_vectors,
    window_grouped,
    window_repeated,
)
from timing_server import PAUSE, TimingServer, best_cases

from kvreplay.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
STEPS = 8  # of the recomputing selection that are run


@dataclass
class Form:
    """One way to write it in PyTorch. `run` returns the answer, or nothing where only some of it is computed."""

    name: str
    run: Callable[[], torch.Tensor | None]
    times: float = 1.0  # what is run is 1/times of the whole
    tolerance: float = 2e-3  # relative: see same()
    rounds: int = 3


@dataclass
class Comparison:
    """Median seconds of a call: ours, and each form's."""

    subject: str
    shape: str
    ours: float
    forms: dict[str, float] = field(default_factory=dict)


def same(found: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    """Number by number, relative to the number or to the median, whichever is larger."""
    if found.shape != expected.shape:
        return False
    scale = np.maximum(np.abs(expected), np.median(np.abs(expected)))
    return bool((np.abs(found - expected) <= tolerance * scale).all())


def compare(server: TimingServer, case: str, subject: str, shape: str, forms: list[Form]) -> Comparison:
    """Checks all answers, then takes turns."""
    if problem := server.problem(case):
        raise RuntimeError(f"{case}: {problem}")
    expected = server.result(case)
    seconds: dict[str, list[float]] = {form.name: [] for form in forms}
    ours: list[float] = []
    for form in forms:
        answer = form.run()  # the first call also warms up
        if answer is not None and not same(answer.double().numpy().ravel(), expected, form.tolerance):
            raise RuntimeError(f"{subject}, {shape}: {form.name} and kvreplay differ")
    for turn in range(max(form.rounds for form in forms)):
        ours.append(server.seconds(case))
        for form in forms:
            if turn >= form.rounds:
                continue
            time.sleep(PAUSE)
            begin = time.perf_counter()
            form.run()
            seconds[form.name].append((time.perf_counter() - begin) * form.times)
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    print(f"{subject}, {shape}: ours {np.median(ours):.4f} s")
    for name, value in medians.items():
        print(f"    {name}: {value:.4f} s, {value / np.median(ours):.1f} x")
    return Comparison(subject, shape, float(np.median(ours)), medians)


def synthetic(folder: Path, program: Path, heads: int, kv_heads: int, dim: int, tokens: int, dtype: str) -> Path:
    """A trace of one random layer, written once."""
    path = folder / f"random-{heads}-{kv_heads}-{dim}-{tokens}-{dtype}.h5"
    if not path.exists():
        options = {"layers": 1, "query-heads": heads, "kv-heads": kv_heads, "head-dim": dim, "prompt": tokens - 1}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [program, "synth", "gaussian", *words, "--continuation", "1", "--dtype", dtype, "-o", path]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return path


def tensors(path: Path, layer: int) -> list[torch.Tensor]:
    """q, k, v of a layer as float32."""
    with Trace(path) as trace:
        return [torch.from_numpy(np.array(trace[f"/layers/{layer:03d}/{name}"], np.float32)) for name in "qkv"]


class Layer:
    """A layer of a trace, for both sides."""

    def __init__(self, path: Path, layer: int, bench: Path) -> None:
        self.q, self.k, self.v = tensors(path, layer)
        self.n = self.k.shape[1]
        self.server = TimingServer(bench, "--trace", str(path), "--layers", str(layer))
        self.cases = self.server.cases()
        self.shape = f"{self.q.shape[0]}/{self.k.shape[0]} heads, d {self.k.shape[2]}, n {self.n:,}"

    def case(self, pattern: str) -> str:
        return best_cases(self.cases, f"^{pattern}/")[0]


def cumulative(layer: Layer, whole: bool) -> Comparison:
    """`whole`: also the forms that hold [n, n]."""
    q, k = layer.q, layer.k
    mask = causal_mask(layer.n if whole else 512)
    forms = [
        Form("causal blocks of 512, all heads", lambda: blocks_causal(q, k, mask, 512)),
        Form("causal blocks of 128, head by head", lambda: blocks_causal_head_by_head(q, k, mask, 128)),
        Form("causal blocks of 256, head by head", lambda: blocks_causal_head_by_head(q, k, mask, 256)),
        Form("causal blocks of 512, head by head", lambda: blocks_causal_head_by_head(q, k, mask, 512)),
        Form(
            "causal blocks of 512, all heads, bfloat16 products",
            lambda: blocks_causal(q, k, mask, 512, torch.bfloat16),
            tolerance=5e-3,
        ),
    ]
    if whole:
        forms = [
            Form("naive, all heads at once", lambda: naive(q, k, mask), rounds=1),
            Form("one head at a time", lambda: head_by_head(q, k, mask), rounds=1),
            Form("blocks of 512 under the full mask", lambda: blocks_masked(q, k, mask, 512), rounds=1),
            *forms,
        ]
    return compare(layer.server, layer.case("cumulative_attention"), "cumulative attention", layer.shape, forms)


def window(layer: Layer, width: int) -> Comparison:
    forms = [
        Form("grouped product", lambda: window_grouped(layer.q, layer.k, width), rounds=5),
        Form("repeat_interleave", lambda: window_repeated(layer.q, layer.k, width), rounds=5),
    ]
    case = layer.case(f"window_attention/.*/w:{width}")
    return compare(layer.server, case, f"window attention, last {width} queries", layer.shape, forms)


def similarity(layer: Layer) -> Comparison:
    forms = [Form("X Xᵀ and its row maxima", lambda: similarity_row_maxima(layer.k), rounds=5)]
    shape = f"n {layer.n:,}, D {layer.k.shape[0] * layer.k.shape[2]:,}"
    return compare(layer.server, layer.case("similarity_row_maxima"), "redundancy row maxima", shape, forms)


def selection(layer: Layer) -> Comparison:
    """Half of the tokens; ties and sums in float32 make other sets of PyTorch's, so only how many differ is checked."""
    keep, recent = layer.n // 2, 128
    counts = [int(count) for count in np.linspace(recent, keep - 1, STEPS)]
    similarities = [unit @ unit.T for unit in (unit_vectors(layer.k), unit_vectors(layer.v))]
    forms = [
        Form("incremental", lambda: least_redundant(layer.k, layer.v, recent, keep), rounds=1, tolerance=np.inf),
        Form(
            f"as the algorithm reads, {STEPS} of {keep - recent:,} steps extrapolated",
            lambda: least_redundant_steps(similarities, counts),
            times=(keep - recent) / STEPS,
            rounds=1,
        ),
    ]
    case = layer.case("least_redundant")
    found = set(least_redundant(layer.k, layer.v, recent, keep).tolist())
    expected = set(layer.server.result(case).astype(int).tolist())
    if len(found & expected) < 0.98 * keep:
        raise RuntimeError(f"least redundant tokens: {len(found & expected)} of {keep} are the same")
    shape = f"{layer.n:,} to {keep:,}, D {layer.k.shape[0] * layer.k.shape[2]:,}"
    return compare(layer.server, case, "least redundant tokens", shape, forms)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--bench", type=Path, default=ROOT / "build/release/kvreplay_bench")
    options.add_argument("--program", type=Path, default=ROOT / "build/release/kvreplay")
    options.add_argument("--folder", type=Path, default=ROOT / "build/bench", help="traces are written here")
    options.add_argument("--trace", type=Path, help="a real trace of about 4,000 tokens, for the selection")
    options.add_argument("--layer", type=int, default=12, help="of that trace")
    options.add_argument("--quick", action="store_true", help="the smallest shapes only")
    options.add_argument("-o", dest="output", type=Path, required=True)
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(os.cpu_count() or 1)

    def random(heads: int, kv_heads: int, dim: int, tokens: int, dtype: str = "float32") -> Layer:
        path = synthetic(given.folder, given.program, heads, kv_heads, dim, tokens, dtype)
        return Layer(path, 0, given.bench)

    comparisons: list[Comparison] = []
    with torch.inference_mode():
        if given.quick:
            layer = random(9, 3, 64, 1024)
            comparisons = [cumulative(layer, True), window(layer, 32), similarity(layer), selection(layer)]
        else:
            layer = random(9, 3, 64, 4096)
            comparisons += [cumulative(layer, True), window(layer, 32)]
            comparisons += [cumulative(random(9, 3, 64, 8192), True), cumulative(random(32, 8, 128, 4096), True)]
            layer = random(32, 8, 128, 32768, "float16")
            comparisons += [window(layer, 8), window(layer, 32)]
            comparisons.append(similarity(random(3, 3, 64, 16384)))
            layer = random(8, 8, 128, 4000)
            comparisons.append(similarity(layer))
            real = Layer(given.trace, given.layer, given.bench) if given.trace else random(3, 3, 64, 4000)
            comparisons += [similarity(real), selection(real)]
    given.output.write_text(json.dumps([asdict(comparison) for comparison in comparisons], indent=1))


if __name__ == "__main__":
    main()
