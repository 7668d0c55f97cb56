"""Caches that keep every token and change what they keep of it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from reference_selection import Case, Selection


def quantised(values: np.ndarray, group: int, bits: int) -> np.ndarray:
    """[...,n] float32 written as `bits`-bit numbers and read again, by groups along the last axis; the last is short.

    A group has its minimum and its step, both float16; all arithmetic is float32.
    """
    levels = np.float32(2**bits - 1)
    result = np.empty_like(values)
    for begin in range(0, values.shape[-1], group):
        x = values[..., begin : begin + group]
        least = x.min(axis=-1, keepdims=True).astype(np.float16).astype(np.float32)
        step = ((x.max(axis=-1, keepdims=True) - least) / levels).astype(np.float16).astype(np.float32)
        scaled = np.divide(x - least, step, out=np.zeros_like(x), where=step != 0)
        result[..., begin : begin + group] = np.rint(np.clip(scaled, 0, levels)) * step + least
    return result


def kivi(case: Case) -> Selection:
    """Keys by channel and values by token in few bits, but for the latest ones."""
    trace = case.trace
    bits, group, residual = case.number("bits"), case.number("group"), case.number("residual")
    prompt = trace.prompt
    n_keys = prompt - (prompt % residual if residual else 0) if prompt >= residual else 0
    n_values = max(0, prompt - residual)

    def stored(layer: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values = trace.layers[layer].k.copy(), trace.layers[layer].v.copy()
        by_channel = keys[:, :n_keys].astype(np.float32).transpose(0, 2, 1)
        keys[:, :n_keys] = quantised(by_channel, group, bits).transpose(0, 2, 1)
        values[:, :n_values] = quantised(values[:, :n_values].astype(np.float32), group, bits)
        return keys, values

    numbers = trace.kv_heads * trace.dimension
    few = (n_keys + n_values) * (bits + Fraction(32, group))
    layer_bytes = numbers * (few + (2 * prompt - n_keys - n_values) * 16) / 8
    every = np.arange(prompt)
    rows = [[every] * trace.kv_heads for _ in trace.treated]
    return case.selection(rows, np.array([], int), [], stored=stored, stored_bytes=lambda layer: float(layer_bytes))
