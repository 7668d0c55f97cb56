"""Number formats of caches: the numbers that a reader gets back, and the bytes that a writer needs.

Vectors are float32 [...,d]: the keys or values of one head and token along the last axis. Each operation rounds to
float32 once, as in the engines; `turboquant` and `rotated` compute in float64 and round their result.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from reference_geometry import gaussian

F32 = np.float32


def halves(x: np.ndarray) -> np.ndarray:
    """Rounded to float16."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(F32)


# ------------------------------------------------------------------------------------------- block formats of llama.cpp

BLOCK_BYTES = {"q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18, "mxfp4": 17}  # of 32 numbers


def blocks(x: np.ndarray, size: int) -> np.ndarray:
    """[...,d/size,size]."""
    if x.shape[-1] % size:
        raise ValueError(f"expected a head dimension that is a multiple of {size}, got {x.shape[-1]}")
    return x.reshape(*x.shape[:-1], -1, size)


def ggml(x: np.ndarray, name: str) -> np.ndarray:
    """q8_0, q5_1, q5_0, q4_1, q4_0: blocks of 32 with a float16 scale; names that end in 1 have a float16 minimum."""
    block = blocks(x, 32)
    levels = 2 ** int(name[1])
    least = block.min(axis=-1, keepdims=True)
    if name == "q8_0":
        scale = np.abs(block).max(axis=-1, keepdims=True) / F32(127)
    elif name.endswith("_1"):
        scale = (block.max(axis=-1, keepdims=True) - least) / F32(levels - 1)
    else:
        largest = np.abs(block).argmax(axis=-1, keepdims=True)  # the first of equal ones; with its sign
        scale = np.take_along_axis(block, largest, axis=-1) / F32(-levels // 2)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale != 0, F32(1) / scale, F32(0))
    if name == "q8_0":
        scaled = block * inverse
        codes = np.copysign(np.floor(np.abs(scaled.astype(float)) + 0.5), scaled).astype(F32)  # ties away from zero
        decoded = codes * halves(scale)
    elif name.endswith("_1"):
        codes = np.minimum(np.trunc((block - least) * inverse + F32(0.5)), F32(levels - 1))
        decoded = codes * halves(scale) + halves(least)
    else:
        codes = np.minimum(np.trunc(block * inverse + F32(levels // 2 + 0.5)), F32(levels - 1))
        decoded = (codes - F32(levels // 2)) * halves(scale)
    return decoded.reshape(x.shape)


# -------------------------------------------------------------------------------------------------- one scale a vector


def uniform(x: np.ndarray, bits: int) -> np.ndarray:
    """Codes from the minimum of a vector on; scale and minimum are float16."""
    levels = F32(2**bits - 1)
    least = x.min(axis=-1, keepdims=True)
    scale = np.maximum((x.max(axis=-1, keepdims=True) - least) / levels, F32(1e-8))
    codes = np.minimum(np.trunc((x - least) / scale + F32(0.5)), levels)
    return codes * halves(scale) + halves(least)


def int4_per_token_head(x: np.ndarray) -> np.ndarray:
    """Codes 0 to 15 around an integer zero point, which takes the last four bits of the float32 scale."""

    def code(numbers: np.ndarray) -> np.ndarray:
        return np.trunc(np.where(numbers >= 0, numbers + F32(0.5), numbers - F32(0.5))).clip(F32(0), F32(15))

    least = x.min(axis=-1, keepdims=True)
    scale = np.maximum((x.max(axis=-1, keepdims=True) - least) / F32(15), F32(1e-6))
    zero = code(-least / scale)
    shortened = (scale.view(np.int32) >> 4 << 4).view(F32)
    return (code(x * (F32(1) / scale) + zero) - zero) * shortened


# --------------------------------------------------------------------------------------------------------- small floats


@functools.cache
def small_floats(exponent_bits: int, mantissa_bits: int, bias: int, largest: float) -> np.ndarray:
    """The numbers from 0 to the largest finite one; the index is the code."""
    steps = 2**mantissa_bits
    codes = np.arange(2 ** (exponent_bits + mantissa_bits))
    exponent, mantissa = codes // steps, codes % steps
    values = np.where(
        exponent == 0, mantissa * 2.0 ** (1 - bias) / steps, (1 + mantissa / steps) * 2.0 ** (exponent - bias)
    )
    return values[values <= largest]


E4M3 = small_floats(4, 3, 7, 448)
E5M2 = small_floats(5, 2, 15, 57344)
E2M1 = small_floats(2, 1, 1, 6)


def nearest(table: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The nearest number of the table with the sign of x, of two equally near ones that of the even code; above the
    largest one, the largest."""
    size = np.abs(x.astype(float))
    above = np.searchsorted(table, size).clip(1, len(table) - 1)
    low, high = size - table[above - 1], table[above] - size
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return np.copysign(table[code], x).astype(F32)


def fp8(x: np.ndarray, table: np.ndarray, scale: str) -> np.ndarray:
    """x [Hkv,P,d] of one layer: a scale for the tensor, each head, or each head and token; or the scale one."""
    most = F32(table[-1])
    if scale == "token":  # of the engine that computes it when the token arrives: by the inverse, and never 0
        step = np.maximum(np.abs(x).max(axis=-1, keepdims=True) / most, F32(1e-6))
        scaled = x * (F32(1) / step)
    else:
        axes = {"tensor": (0, 1, 2), "head": (1, 2)}.get(scale)
        step = np.abs(x).max(axis=axes, keepdims=True) / most if axes else np.ones((1, 1, 1), F32)
        step = np.where(step == 0, F32(1), step)
        scaled = x / step
    return nearest(table, np.clip(scaled, -most, most)) * step


def nvfp4(x: np.ndarray) -> np.ndarray:
    """x [Hkv,P,d] of one layer: groups of 16 numbers of four bits, a scale e4m3 each, a float32 scale of the tensor."""
    largest = np.abs(x).max()
    tensor = F32(2688) / largest if largest > 0 else F32(1)
    group = blocks(x, 16)
    wanted = tensor * (np.abs(group).max(axis=-1, keepdims=True) * (F32(1) / F32(6)))
    scale = nearest(E4M3, wanted.clip(F32(-448), F32(448)))
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, F32(0), F32(1) / (scale * (F32(1) / tensor)))
    codes = nearest(E2M1, (group * inverse).clip(F32(-6), F32(6)))
    return (codes * (scale / tensor)).reshape(x.shape)


def mxfp4(x: np.ndarray) -> np.ndarray:
    """Groups of 32 numbers of four bits with a power of two; of two equally near numbers the smaller one."""
    group = blocks(x, 32)
    largest = np.abs(group).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        exponent = np.where(largest > 0, np.floor(np.log2(largest)) - 2, -127)
    scale = (2.0**exponent)[..., None]
    size = np.abs(group.astype(float))[..., None]
    codes = np.abs(E2M1 * scale - size).argmin(axis=-1)
    return np.copysign(E2M1[codes] * scale[..., 0], group).astype(F32).reshape(x.shape)


# ------------------------------------------------------------------------------------------------------------ rotations


def signs_of_hadamard(size: int) -> np.ndarray:
    """[n,n] symmetric, n a power of two: (-1)^(bits that i and j share)."""
    result = np.ones((1, 1))
    while len(result) < size:
        result = np.block([[result, result], [result, -result]])
    if len(result) != size:
        raise ValueError(f"expected a power of two, got {size}")
    return result


def hadamard(size: int) -> np.ndarray:
    """The same, orthonormal, with a factor in float32."""
    return signs_of_hadamard(size) * float(F32(1) / np.sqrt(F32(size)))


def rotated(x: np.ndarray, size: int) -> np.ndarray:
    """Each block of `size` components by the Hadamard matrix; the same again takes it back."""
    return (blocks(x, size).astype(float) @ hadamard(size)).astype(F32).reshape(x.shape)


# ----------------------------------------------------------------------------------------------------------- turboquant


@functools.cache
def rotation(d: int, seed: int) -> np.ndarray:
    """Pi [d,d], the same for all layers and heads: modified Gram-Schmidt from left to right over the columns of the
    matrix whose element (i,j) is gaussian(seed, 0, i, j)."""
    columns = gaussian(seed, 0, *np.indices((d, d)))
    for j in range(d):
        for i in range(j):
            columns[:, j] -= (columns[:, i] @ columns[:, j]) * columns[:, i]
        columns[:, j] /= np.linalg.norm(columns[:, j])
    return columns


@functools.cache
def sketch(d: int, seed: int) -> np.ndarray:
    """S [d,d]: element (i,j) is gaussian(seed, 1, i, j)."""
    return gaussian(seed, 1, *np.indices((d, d)))


@functools.cache
def centroids(d: int, bits: int) -> np.ndarray:
    """[2^bits] ascending: the numbers that represent a coordinate of a random unit vector with the least mean squared
    error. The fixed point of Lloyd's iteration is unique, because the logarithm of the density is concave (d >= 3)."""
    # u = sin(phi): the density of phi is cos(phi)^(d-2), and that of u times u has a closed integral
    grid = np.linspace(-math.pi / 2, math.pi / 2, 400_001)
    density = np.cos(grid) ** (d - 2)
    mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(grid))])
    values = np.interp((np.arange(2**bits) + 0.5) / 2**bits * mass[-1], mass, np.sin(grid))
    while True:
        edges = np.arcsin(np.concatenate([[-1], (values[1:] + values[:-1]) / 2, [1]]))
        moments = -np.diff(np.cos(edges) ** (d - 1)) / (d - 1)
        moved = moments / np.diff(np.interp(edges, grid, mass))
        if np.abs(moved - values).max() < 1e-12:
            return moved
        values = moved


@functools.cache
def normal_centroids(d: int, bits: int) -> np.ndarray:
    """[2^bits] ascending: the same of the normal distribution of variance 1/d."""
    values = 3.5 * ((np.arange(2**bits) + 0.5) / 2 ** (bits - 1) - 1)
    while True:
        edges = np.concatenate([[-np.inf], (values[1:] + values[:-1]) / 2, [np.inf]])
        mass = np.diff([0.5 * math.erfc(-edge / math.sqrt(2)) for edge in edges])
        moved = -np.diff(np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)) / mass
        if np.abs(moved - values).max() < 1e-12:
            return moved / math.sqrt(d)
        values = moved


def of_length_one(x: np.ndarray, bits: int) -> np.ndarray:
    """The form `hadamard`: rotated directions as centroids, these divided by their length; the length is a float16."""
    lengths = np.linalg.norm(x.astype(float), axis=-1, keepdims=True)
    direction = np.divide(x, lengths, out=np.zeros(x.shape), where=lengths > 0)
    d = x.shape[-1]
    turn = np.kron(np.eye(d // (d & -d)), signs_of_hadamard(d & -d) / math.sqrt(d & -d))
    values = normal_centroids(d, bits)
    coarse = values[np.searchsorted((values[1:] + values[:-1]) / 2, direction @ turn, side="right")]
    coarse /= np.linalg.norm(coarse, axis=-1, keepdims=True)
    return np.where(lengths > 0, halves(lengths).astype(float) * (coarse @ turn), 0).astype(F32)


def turboquant(x: np.ndarray, bits: int, form: str = "mse", seed: int = 0) -> np.ndarray:
    """The forms `mse` and `product` (unbiased inner products: the last bit is the sign of a Gaussian projection of the
    residual) of a vector's direction; its length is a float16. And the form `hadamard`."""
    if form == "hadamard":
        return of_length_one(x, bits)
    d = x.shape[-1]
    lengths = np.linalg.norm(x.astype(float), axis=-1, keepdims=True)
    direction = np.divide(x, lengths, out=np.zeros(x.shape), where=lengths > 0)
    coarse = np.zeros(x.shape)
    if form == "mse" or bits > 1:
        values = centroids(d, bits if form == "mse" else bits - 1)
        turn = rotation(d, seed)
        codes = np.searchsorted((values[1:] + values[:-1]) / 2, direction @ turn.T, side="right")
        coarse = values[codes] @ turn
    if form == "product":
        residual = direction - coarse
        signs = np.where(residual @ sketch(d, seed).T >= 0, 1.0, -1.0)
        size = halves(np.linalg.norm(residual, axis=-1, keepdims=True)).astype(float)
        coarse = coarse + math.sqrt(math.pi / 2) / d * size * (signs @ sketch(d, seed))
    return np.where(lengths > 0, halves(lengths).astype(float) * coarse, 0).astype(F32)


# --------------------------------------------------------------------------------------------------------- all of them


def decoded(
    x: np.ndarray, name: str, scale: str = "tensor", bits: int = 4, form: str = "mse", seed: int = 0
) -> np.ndarray:
    """decode(encode(x)) of the keys or values [Hkv,P,d] of one layer."""
    if name.startswith("fp8"):
        return fp8(x, {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2}[name], scale)
    if name == "turboquant":
        return turboquant(x, bits, form, seed)
    if name == "uniform":
        return uniform(x, bits)
    if name in ("nvfp4", "mxfp4", "int4_per_token_head"):
        return {"nvfp4": nvfp4, "mxfp4": mxfp4, "int4_per_token_head": int4_per_token_head}[name](x)
    return ggml(x, name)


def stored_bytes(
    heads: int, tokens: int, d: int, name: str, scale: str = "tensor", bits: int = 4, form: str = "mse"
) -> int:
    """Bytes of the keys or of the values of one layer."""
    return vectors_bytes(heads, heads * tokens, d, name, scale, bits, form)


def vectors_bytes(
    heads: int, vectors: int, d: int, name: str, scale: str = "tensor", bits: int = 3, form: str = "mse"
) -> int:
    """Bytes of a number of vectors, all heads together."""
    if name.startswith("fp8"):
        return vectors * d + {"tensor": 4, "one": 4, "head": 4 * heads, "token": 4 * vectors}[scale]
    if name == "turboquant":
        return vectors * (-(-d * bits // 8) + {"mse": 2, "product": 4, "hadamard": 2}[form])
    if name == "uniform":
        return vectors * (-(-d * bits // 8) + 4)
    if name == "int4_per_token_head":
        return vectors * (d // 2 + 4)
    if name == "nvfp4":
        return vectors * (d // 2 + d // 16) + 4
    return vectors * d // 32 * BLOCK_BYTES[name]
