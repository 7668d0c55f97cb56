"""Small traces for comparing the program with the reference: each has one property that breaks a rule easily."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from write_trace import Content


def normal(
    seed: int, n_layers: int, query_heads: int, kv_heads: int, d: int, prompt: int, tokens: int, **others: object
) -> Content:
    """Normal numbers, logits of about unit size."""
    generator = np.random.default_rng(seed)

    def tensors(heads: int) -> list[np.ndarray]:
        return [generator.normal(size=(heads, tokens, d)) for _ in range(n_layers)]

    content = Content(q=tensors(query_heads), k=tensors(kv_heads), v=tensors(kv_heads), prompt=prompt, **others)
    content.scale = 1.5 * d**-0.5
    return content


def grouped_queries() -> Content:
    spans = {"needle": ("needle", 20, 26), "question": ("question", 60, 67), "reply": ("answer", 67, 76)}
    return normal(1, 3, 6, 2, 40, 67, 76, spans=spans, rope=True)


def one_kv_head() -> Content:
    return normal(2, 2, 5, 1, 8, 41, 46, dtype="float16")


def one_kv_head_a_query_head() -> Content:
    return normal(3, 2, 3, 3, 33, 53, 57, dtype="bfloat16")


def one_layer() -> Content:
    return normal(4, 1, 4, 2, 16, 29, 36)


def prompt_shorter_than_the_window() -> Content:
    return normal(5, 2, 4, 2, 8, 5, 9)


def one_prompt_token() -> Content:
    return normal(6, 1, 2, 1, 4, 1, 3)


def equal_keys() -> Content:
    """Every prompt key of a head is the same: all scores of a window tie."""
    content = normal(7, 2, 4, 2, 8, 37, 42)
    for keys in content.k:
        keys[:] = keys[:, :1]
    return content


def repeated_keys() -> Content:
    """Few different keys: ties between some positions, differences between others."""
    content = normal(8, 3, 4, 2, 8, 48, 55)
    generator = np.random.default_rng(8)
    for keys in content.k:
        keys[:] = keys[:, generator.integers(0, 5, keys.shape[1])]
    return content


def last_queries_only() -> Content:
    """Queries of the last 8 prompt tokens and of the continuation."""
    content = normal(9, 2, 4, 2, 12, 45, 51)
    content.q_positions = np.arange(37, 51)
    content.q = [queries[:, content.q_positions] for queries in content.q]
    return content


def sliding_windows() -> Content:
    """Layers that are left alone between treated ones; numbered by their place in a larger model."""
    return normal(10, 5, 4, 2, 8, 40, 47, windows=[0, 8, 0, 16, 0], layer_index=[2, 3, 5, 8, 9])


def softcap() -> Content:
    return normal(11, 2, 4, 2, 16, 33, 39, softcap=1.25)


def large_logits() -> Content:
    """Logits up to a hundred, whose products are exact in float32: steps of 1/8, queries times 8.

    No attention is as small as 2^-110 of its row's largest, which the program counts as 0.
    """
    content = normal(12, 2, 4, 2, 8, 43, 50, dtype="float16")
    for tensors in (content.q, content.k, content.v):
        tensors[:] = [np.clip(np.rint(8 * values), -16, 16) / 8 for values in tensors]
    content.q = [8 * queries for queries in content.q]
    content.scale = 0.5
    return content


def many_layers() -> Content:
    return normal(13, 7, 2, 2, 4, 31, 35)


def no_continuation() -> Content:
    return normal(14, 2, 4, 2, 8, 30, 30)


def with_passes(content: Content, size: int, seed: int) -> Content:
    """Passes that repeat the prompt but its first two tokens, `size` of them at a time, behind three of an instruction;
    the last pass repeats some tokens again."""
    generator = np.random.default_rng([7, seed])
    begins = range(min(2, content.prompt - 1), content.prompt, size)
    repeated = [(first, min(first + size, content.prompt)) for first in begins] + [(0, min(3, content.prompt))]
    ends = np.cumsum([3 + last - first for first, last in repeated]).tolist()
    content.passes = [(end, first, last) for end, (first, last) in zip(ends, repeated, strict=True)]
    content.q_passes = [generator.normal(size=(len(q), ends[-1], q.shape[2])) for q in content.q]
    content.k_passes = [generator.normal(size=(len(k), ends[-1], k.shape[2])) for k in content.k]
    return content


def shape(seed: int) -> Content:
    """A random shape: grouping, RoPE, stored type, length; a question ends every other, every fourth has Wo."""
    generator = np.random.default_rng(1000 + seed)

    def one_of(*choices: object) -> object:
        return choices[generator.integers(len(choices))]

    prompt, n_layers = int(generator.integers(20, 121)), int(generator.integers(1, 6))
    kv_heads, group, d = one_of(1, 2, 3), one_of(1, 2, 4), one_of(4, 8, 12, 16)
    others = {
        "dtype": one_of("float32", "float16", "bfloat16"),
        "rope": seed % 9 != 8,
        "interleaved": bool(one_of(False, True)),
        "rotated": one_of(1.0, 0.5),
        "attention_scaling": one_of(1.0, 1.25),
        "softcap": one_of(0.0, 0.0, 2.0),
    }
    if n_layers > 2 and seed % 5 == 0:
        others["unrotated_layers"] = (1,)
    if n_layers > 3 and seed % 4 == 1:
        others["windows"] = [0, 8] + [0] * (n_layers - 2)
    if seed % 2:
        question = int(generator.integers(3, 8))
        behind = int(generator.integers(0, 3))
        others["spans"] = {
            "needle": ("needle", 3, 9),
            "first": ("question", 10, 12),
            "question": ("question", prompt - behind - question, prompt - behind),
        }
    content = normal(100 + seed, n_layers, kv_heads * group, kv_heads, d, prompt, prompt + 9, **others)
    if seed % 4 == 0:
        hidden, numbers = int(generator.integers(2, 20)), kv_heads * group * d
        content.wo = [generator.normal(size=(hidden, numbers)) for _ in range(n_layers)]
        content.input_norm = [generator.uniform(1, 9, prompt + 9) for _ in range(n_layers)]
    return with_passes(content, int(generator.integers(4, 60)), seed) if seed % 3 == 0 else content


TRACES: list[Callable[[], Content]] = [
    grouped_queries,
    one_kv_head,
    one_kv_head_a_query_head,
    one_layer,
    prompt_shorter_than_the_window,
    one_prompt_token,
    equal_keys,
    repeated_keys,
    last_queries_only,
    sliding_windows,
    softcap,
    large_logits,
    many_layers,
    no_continuation,
]
SHAPES = 36
