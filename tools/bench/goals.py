"""What is measured for the page of performance figures, and what is wanted of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """A bound on one figure of a benchmark."""

    least: float | None = None
    most: float | None = None

    def text(self, unit: str) -> str:
        if self.least is None and self.most is None:
            return ""
        sign, bound = ("≥", self.least) if self.least is not None else ("≤", self.most)
        return f"{sign} {bound:g}{unit}"

    def met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


NONE = Goal()


@dataclass(frozen=True)
class Row:
    """A figure of the cases DATA/LEVEL/threads:N of kvreplay_bench. `level` "best" is the machine's first."""

    data: str
    figure: str = "of_sgemm"
    goal: Goal = NONE
    level: str = "best"
    threads: tuple[str, ...] = ("1", "all")
    quick: bool = False


UNITS = {
    "of_sgemm": " of sgemm",
    "extra_MB": " MB",
    "GB/s": " GB/s",
    "seconds": " s",
    "direct_over_steps": " x the direct form",
    "max_error": "",
    "top_tenth_differs": " tokens of the top tenth differ",
}

LARGE, SMALL = "cumulative_attention/32-8-128", "cumulative_attention/9-3-64"
ALL = ("all",)
BACKEND = [
    Row(f"{LARGE}/n:4096/float32", goal=Goal(0.95), quick=True),
    Row(f"{SMALL}/n:4096/float32", goal=Goal(0.88), quick=True),
    Row(f"{LARGE}/n:4096/float32", goal=Goal(0.88), level="AVX2", threads=ALL),
    Row(f"{SMALL}/n:4096/float32", goal=Goal(0.78), level="AVX2", threads=ALL, quick=True),
    Row(f"{LARGE}/n:4096/bfloat16", goal=Goal(1.65)),
    Row(f"{SMALL}/n:4096/bfloat16", goal=Goal(1.45), quick=True),
    Row(f"{LARGE}/n:4096/float16", threads=ALL),
    Row(f"{LARGE}/n:4096/float32", level="SSE4", threads=ALL),
    Row(f"{SMALL}/n:8192/float32", threads=ALL),
    Row(f"{LARGE}/n:16384/float32", threads=ALL),
    Row(f"{LARGE}/n:4096/float32", "extra_MB", Goal(most=32), threads=ALL),
    Row(f"{LARGE}/n:16384/float32", "extra_MB", Goal(most=48), threads=ALL),
    Row("cumulative_attention/4-1-128/n:131072/float32", "extra_MB", Goal(most=128), threads=ALL),
    Row("window_attention/32-8-128/n:32768/float32/w:32", goal=Goal(0.70), threads=ALL),
    Row("window_attention/32-8-128/n:32768/float16/w:32", goal=Goal(0.80), threads=ALL),
    Row("window_attention/32-8-128/n:32768/bfloat16/w:32", threads=ALL),
    Row("window_attention/32-8-128/n:32768/float16/w:8", threads=ALL),
    Row("window_attention/32-8-128/n:8192/float32/w:32", threads=ALL, quick=True),
    Row("window_attention/32-8-128/n:131072/float16/w:32", threads=ALL),
    Row("resident_attention/32-8-128/n:32768/float16/w:32", threads=ALL),
    Row("kept_moments/32-8-128/n:8192/bfloat16/sets:65/attention", threads=ALL),
    Row("kept_moments/32-8-128/n:8192/bfloat16/sets:65/outputs", threads=ALL),
    Row("kept_moments/9-3-64/n:8192/bfloat16/sets:65/attention", threads=ALL),
    Row("kept_moments/9-3-64/n:8192/bfloat16/sets:65/outputs", threads=ALL),
    Row("similarity_row_maxima/3-3-64/n:4000/float32", threads=ALL, quick=True),
    Row("similarity_row_maxima/8-8-128/n:4000/float32", goal=Goal(0.95), threads=ALL),
    Row("similarity_row_maxima/8-8-128/n:4000/bfloat16", threads=ALL),
    Row("similarity_row_maxima/32-32-128/n:4000/float32", threads=ALL),
    Row("similarity_row_maxima/3-3-64/n:16384/float32", goal=Goal(0.95), threads=ALL),
    Row("least_redundant/3-3-64/n:4000/float32/keep:2000", "seconds", Goal(most=0.2), threads=ALL, quick=True),
    Row("least_redundant/3-3-64/n:4000/float32/keep:2000", "direct_over_steps", Goal(100), threads=ALL, quick=True),
    Row("least_redundant/8-8-128/n:4000/float32/keep:2000", "seconds", threads=ALL),
    Row("online_eviction/9-3-64/n:4096/bfloat16/held:2048", "seconds", threads=ALL),
    Row("online_eviction/32-8-128/n:4096/bfloat16/held:2048", "seconds", threads=ALL),
    Row("key_norms/32-8-128/n:32768/float16", "GB/s", threads=ALL),
    Row("mapped_bytes/n:65536/float16", "GB/s", Goal(20), level="", threads=("1",), quick=True),
    Row("mapped_bytes/n:65536/bfloat16", "GB/s", Goal(20), level="", threads=("1",)),
    Row("mapped_bytes/n:65536/float32", "GB/s", Goal(20), level="", threads=("1",)),
]

# On layers of real traces: {4096} and {8000} are the names of the two.
REAL_LAYERS = (0, 14, 29)
REAL = [
    *[
        Row(f"cumulative_attention/{{{tokens}}}-{layer}", figure, Goal(most=most), threads=ALL)
        for figure, most in (("max_error", 1e-5), ("top_tenth_differs", 0))
        for tokens in (4096, 8000)
        for layer in REAL_LAYERS
    ],
    Row("least_redundant/{4096}-14", "seconds", Goal(most=0.2), threads=ALL),
    Row("least_redundant/{4096}-14", "direct_over_steps", Goal(100), threads=ALL),
]

# (subject, shape, form) of side_by_side.py -> how many times slower PyTorch is to be; "best": the fastest float32 form.
PYTORCH = {
    ("cumulative attention", "9/3 heads, d 64, n 4,096", "naive, all heads at once"): Goal(15),
    ("cumulative attention", "32/8 heads, d 128, n 4,096", "naive, all heads at once"): Goal(15),
    ("cumulative attention", "9/3 heads, d 64, n 8,192", "naive, all heads at once"): Goal(30),
    ("cumulative attention", "9/3 heads, d 64, n 4,096", "causal blocks of 512, all heads"): Goal(5.5),
    ("cumulative attention", "32/8 heads, d 128, n 4,096", "causal blocks of 512, all heads"): Goal(3.3),
    ("cumulative attention", "9/3 heads, d 64, n 4,096", "best"): Goal(1.8),
    ("cumulative attention", "32/8 heads, d 128, n 4,096", "best"): Goal(1.6),
    ("window attention, last 32 queries", "32/8 heads, d 128, n 32,768", "grouped product"): Goal(2.3),
    ("window attention, last 32 queries", "32/8 heads, d 128, n 32,768", "repeat_interleave"): Goal(6),
    ("redundancy row maxima", "n 4,000, D 1,024", "X Xᵀ and its row maxima"): Goal(2.1),
    ("redundancy row maxima", "n 16,384, D 192", "X Xᵀ and its row maxima"): Goal(6),
}
# For any real layer; the second by the beginning of the form's name.
SELECTION = {"incremental": Goal(4), "as the algorithm reads": Goal(500)}

WHOLE_REPLAY = Goal(most=1.25)  # of h2o alone
SELECTING = Goal(most=0.02)  # of the run
EVERY_POLICY = Goal(most=6)  # of h2o alone
# What one more policy or metric adds to thirteen policies at five budgets, of h2o alone.
ADDED = {
    "... and output metrics": Goal(most=0.1),
    "... and redundancy": Goal(most=0.2),
    "... and sca": Goal(most=0.25),
    **{f"... and {name}": Goal(most=0.3) for name in ("kivi", "minicache", "think", "cam", "quest", "finch")},
}
BEYOND_MEMORY = Goal(0.70)  # of the rate without a limit
