#!/usr/bin/env python3
"""The GPU's matrix products through PyTorch, and H2O's and SnapKV's attention as people write it: a line of JSON each.

python pytorch_device.py --tokens 32768
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

NO_DEVICE = 4
WINDOW = 32  # SnapKV's


def seconds_of(call: Callable[[], Any], calls: int = 3) -> float:
    """The best of some calls, after one that is not counted."""
    import torch

    best = float("inf")
    for number in range(calls + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if number:
            best = min(best, time.perf_counter() - begin)
    return best


def matrix_products() -> list[dict[str, Any]]:
    """The largest rate of some sizes, by type."""
    import torch

    lines = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rates = {}
        for size in (4096, 8192, 16384):
            a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
            calls = max(1, 2**41 // size**3)

            def several(a: torch.Tensor = a, b: torch.Tensor = b, calls: int = calls) -> None:
                for _ in range(calls):
                    a @ b

            rates[str(size)] = 2.0 * size**3 * calls / seconds_of(several)
        name = str(dtype).removeprefix("torch.")
        lines.append({"product": f"torch/{name}", "rate": max(rates.values()), "rates": rates})
    return lines


def forms(tokens: int, heads: int, kv_heads: int, dim: int) -> list[dict[str, Any]]:
    """Of one layer in bfloat16: eager H2O with SnapKV, and ways to H2O that need less memory."""
    import torch
    from pytorch_forms import blocks_causal, causal_mask, head_by_head, naive, window_grouped

    shape = {"query_heads": heads, "kv_heads": kv_heads, "dim": dim, "tokens": tokens, "dtype": "bfloat16"}
    q, k = (torch.randn(h, tokens, dim, device="cuda", dtype=torch.bfloat16) for h in (heads, kv_heads))

    lines = []
    # Forms make what they need on the default device.
    with torch.inference_mode(), torch.device("cuda"):
        mask = causal_mask(tokens).to(q.dtype)
        calls: dict[str, Callable[[], Any]] = {
            "H2O, all heads at once": lambda: naive(q, k, mask),
            "H2O, head by head": lambda: head_by_head(q, k, mask),
            "H2O, causal blocks of 256 queries": lambda: blocks_causal(q, k, mask, 256, q.dtype),
            "SnapKV": lambda: window_grouped(q, k, WINDOW),
        }
        for name, call in calls.items():
            line: dict[str, Any] = {"form": name, **shape}
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            try:
                line["seconds"] = seconds_of(call)
                line["peak_bytes"] = torch.cuda.max_memory_allocated()
            except torch.OutOfMemoryError as error:
                line["out_of_memory"] = str(error).split(". ")[0]
            lines.append(line)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--query-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    options = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        print(f"no PyTorch: {error}")
        return NO_DEVICE
    if not torch.cuda.is_available():
        print(f"PyTorch {torch.__version__} finds no device")
        return NO_DEVICE
    torch.manual_seed(0)
    print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda}))
    for line in matrix_products():
        print(json.dumps(line), flush=True)
    for line in forms(options.tokens, options.query_heads, options.kv_heads, options.dim):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
