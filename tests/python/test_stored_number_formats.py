"""Have stores of number formats the numbers and bytes of gguf, PyTorch and ml_dtypes?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import kvreplay as kv

gguf = pytest.importorskip("gguf", reason="the formats of ggml need tools/setup build python")
torch = pytest.importorskip("torch", reason="float8 needs tools/setup build python")

Array = np.ndarray
F32 = np.float32


def trace_of(keys: Array, values: Array | None, **more: object) -> kv.Trace:
    """A layer of these keys and values [Hkv, T, d]; the last token is the continuation."""
    layers = keys if keys.ndim == 4 else keys[None]
    queries = [np.ones((layer.shape[0], layer.shape[1], layer.shape[2]), layer.dtype) for layer in layers]
    values = None if values is None else list(values if values.ndim == 4 else values[None])
    return kv.from_arrays(queries, list(layers), values, prompt=layers.shape[2] - 1, **more)


class Stored:
    def __init__(
        self, trace: kv.Trace, store: str, layer: int = 0, policy: str = "full", budget: int = 4, seed: int = 0
    ) -> None:
        text = f"{policy}:store={store}"
        run = kv.replay(trace, text, budget, metrics="kv_bytes", progress=False, seed=seed)
        label = max(run.cells["label"][run.cells["policy"] == policy], key=len)
        found = run.stored(label, budget, trace).layer(layer)
        self.keys, self.values, self.bytes, self.positions = found.keys, found.values, found.bytes, found.positions


def rows_of(dim: int, seed: int = 1) -> Array:
    """[2, 161, d]: random, large, tiny, zero and constant rows, and rows of multiples where codes are at ties."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((2, 161, dim)) * np.exp2(random.integers(-6, 7, (2, 161, 1)))
    rows[:, 100:110] *= 1e-3
    rows[:, 110:120] = 0
    rows[:, 120:125] = 1.7
    rows[:, 125:130] = -0.3
    rows[:, 130:150] = random.integers(-16, 17, (2, 20, dim)) / 4
    rows[:, 150:155] = random.integers(-127, 128, (2, 5, dim)) / 2
    rows[:, 150:155, 0] = 127
    rows[:, 155, 1:] = 0
    return rows.astype(F32)


def ggml(name: str, rows: Array) -> Array:
    kind = getattr(gguf.GGMLQuantizationType, name.upper())
    flat = np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]))
    return gguf.quants.dequantize(gguf.quants.quantize(flat, kind), kind).reshape(rows.shape)


def float8(name: str, scale: str, rows: Array) -> Array:
    """Decoded rows; scales are those of all but the last row."""
    kind, most = {"e4m3": (torch.float8_e4m3fn, F32(448)), "e5m2": (torch.float8_e5m2, F32(57344))}[name]
    prompt = np.abs(rows[:, :-1])
    if scale == "token":
        s = np.maximum(np.abs(rows).max(axis=2, keepdims=True) / most, F32(1e-6))
        y = rows * (F32(1) / s)
    else:
        largest = {"tensor": prompt.max(keepdims=True), "head": prompt.max(axis=(1, 2), keepdims=True), "one": most}[
            scale
        ]
        s = largest / most
        y = rows / s
    return torch.from_numpy(np.clip(y, -most, most)).to(kind).to(torch.float32).numpy() * s


def nvfp4(rows: Array) -> Array:
    e4m3, e2m1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
    groups = rows.reshape(*rows.shape[:2], -1, 16)
    g = F32(2688) / np.abs(rows[:, :-1]).max()
    s = np.clip(g * (np.abs(groups).max(axis=3, keepdims=True) * (F32(1) / F32(6))), -448, 448).astype(e4m3).astype(F32)
    with np.errstate(divide="ignore"):
        r = np.where(s == 0, F32(0), F32(1) / (s * (F32(1) / g)))
    return (np.clip(groups * r, -6, 6).astype(e2m1).astype(F32) * (s / g)).reshape(rows.shape)


REFERENCES: dict[str, tuple[Callable[[Array], Array], Callable[[int], float]]] = {
    "q8_0": (functools.partial(ggml, "q8_0"), lambda d: d * 34 / 32),
    "q5_1": (functools.partial(ggml, "q5_1"), lambda d: d * 24 / 32),
    "q5_0": (functools.partial(ggml, "q5_0"), lambda d: d * 22 / 32),
    "q4_1": (functools.partial(ggml, "q4_1"), lambda d: d * 20 / 32),
    "q4_0": (functools.partial(ggml, "q4_0"), lambda d: d * 18 / 32),
    "mxfp4": (functools.partial(ggml, "mxfp4"), lambda d: d * 17 / 32),
    "nvfp4": (nvfp4, lambda d: d * 9 / 16),
    **{
        f"fp8_{name}({scale})": (
            functools.partial(float8, name, scale),
            (lambda d: d + 4.0) if scale == "token" else float,
        )
        for name in ("e4m3", "e5m2")
        for scale in ("tensor", "head", "token", "one")
    },
}
# Bytes of scales of a tensor with 2 heads, beside those of vectors.
RANGE_BYTES = {"nvfp4": 4, "tensor": 4, "one": 4, "head": 8}


def range_bytes(store: str) -> int:
    return next((bytes_ for name, bytes_ in RANGE_BYTES.items() if name in store), 0)


@pytest.mark.parametrize("dtype", [F32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("store", REFERENCES)
def test_numbers_and_bytes(store: str, dtype: type) -> None:
    decode, bytes_of = REFERENCES[store]
    keys, values = rows_of(64).astype(dtype), rows_of(96, seed=2).astype(dtype)
    found = Stored(trace_of(keys, values), store)
    for mine, exact in ((found.keys, keys.astype(F32)), (found.values, values.astype(F32))):
        np.testing.assert_array_equal(mine[:, :-1], decode(exact)[:, :-1])
        np.testing.assert_array_equal(mine[:, -1], exact[:, -1])  # after the prompt
        assert (mine[:, :-1] != exact[:, :-1]).any()
    assert found.bytes == 2 * 160 * (bytes_of(64) + bytes_of(96)) + 2 * range_bytes(store)


def test_subnormal_and_equal_numbers() -> None:
    """A scale without a finite reciprocal gives zeros; of equal magnitudes the first one has code 0."""
    rows = np.zeros((1, 9, 32), F32)
    rows[0, 0, 3] = 1e-42
    rows[0, 1, 5:7] = 8, -8
    rows[0, 2, 5:7] = -8, 8
    keys = Stored(trace_of(rows, rows), "q4_0").keys
    assert (keys[0, 0] == 0).all() and keys[0, 1, 5:7].tolist() == [8, -7] and keys[0, 2, 5:7].tolist() == [-8, 7]
    for store in ("nvfp4", "mxfp4", "q4_1", "q5_1", "q8_0", "fp8_e4m3", "fp8_e5m2(token)"):
        assert np.isfinite(Stored(trace_of(rows * F32(1e-41), rows), store).keys).all()


def test_kept_tokens_alone_are_encoded() -> None:
    """Of evicted tokens nothing is stored, but scales of tensors are calibrated on the whole prompt."""
    rows = rows_of(32)
    found = Stored(trace_of(rows, rows), "fp8_e4m3", policy="snapkv", budget=20)
    expected, decoded = rows.copy(), float8("e4m3", "tensor", rows)
    for head, kept in enumerate(found.positions):
        assert len(kept) == 20
        expected[head, kept] = decoded[head, kept]
    np.testing.assert_array_equal(found.keys, expected)
    assert found.bytes == 2 * 2 * 20 * 32 + 8


def test_keys_and_values_apart() -> None:
    rows = rows_of(64)
    found = Stored(trace_of(rows, rows), "kv(fp8_e5m2(scale=head),q4_0)")
    np.testing.assert_array_equal(found.keys[:, :-1], float8("e5m2", "head", rows)[:, :-1])
    np.testing.assert_array_equal(found.values[:, :-1], ggml("q4_0", rows)[:, :-1])
    assert found.bytes == 2 * 160 * (64 + 36) + 8
    found = Stored(trace_of(rows, rows), "kv(exact,q8_0),hadamard=16")
    np.testing.assert_array_equal(found.keys, rows)
    assert found.bytes == 2 * 160 * (128 + 68)


def test_residual_and_skipped_layers() -> None:
    rows = np.stack([rows_of(32, seed) for seed in range(3)])
    trace = trace_of(rows, rows)
    for layer, exact in ((0, 160), (1, 7), (2, 160)):
        found = Stored(trace, "q4_0(residual=7,skip_layers=(0,2))", layer)
        np.testing.assert_array_equal(found.keys[:, 160 - exact :], rows[layer][:, 160 - exact :])
        np.testing.assert_array_equal(found.values[:, : 160 - exact], ggml("q4_0", rows[layer])[:, : 160 - exact])
        assert found.bytes == 2 * 2 * (exact * 64 + (160 - exact) * 18)


def rotated(rows: Array, size: int) -> Array:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks = rows.astype(float).reshape(*rows.shape[:2], -1, size)
    return (blocks @ matrix * float(F32(1) / np.sqrt(F32(size)))).astype(F32).reshape(rows.shape)


@pytest.mark.parametrize(
    ("dims", "option", "sizes"),
    [
        ((128, 128), "true", (128, 64)),
        ((192, 96), "true", (64, 32)),
        ((80, 80), "true", (16, 16)),
        ((64, 64), "8", (8, 8)),
    ],
)
def test_rotation_before_encoding(dims: tuple[int, int], option: str, sizes: tuple[int, int]) -> None:
    keys, values = rows_of(dims[0]), rows_of(dims[1], seed=2)
    found = Stored(trace_of(keys, values), f"fp8_e4m3(scale=token,hadamard={option})")
    for mine, exact, size in ((found.keys, keys, sizes[0]), (found.values, values, sizes[1])):
        expected = rotated(float8("e4m3", "token", rotated(exact, size)), size)
        np.testing.assert_array_equal(mine[:, :-1], expected[:, :-1])


def test_a_latent_is_encoded_once() -> None:
    rows = rows_of(96)
    trace = trace_of(rows[:1], None, value_is_key=64, softmax_scale=0.1)
    found = Stored(trace, "kv(q8_0,q4_0)")
    np.testing.assert_array_equal(found.keys[:, :-1], ggml("q8_0", rows[:1])[:, :-1])
    np.testing.assert_array_equal(found.values, found.keys[..., :64])
    assert found.bytes == 160 * 96 * 34 / 32


# Mean squared errors of unit vectors, from the paper's table.
@pytest.mark.parametrize(("bits", "error"), [(1, 0.363), (2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_error_of_turboquant(bits: int, error: float) -> None:
    rows = np.random.default_rng(3).standard_normal((2, 201, 128)).astype(F32)
    found = Stored(trace_of(rows, rows), f"turboquant(bits={bits})")
    of_vector = ((found.keys - rows) ** 2).sum(axis=2) / (rows**2).sum(axis=2)
    assert of_vector[:, :-1].mean() == pytest.approx(error, rel=0.04)
    assert found.bytes == 2 * 2 * 200 * (16 * bits + 2)


@pytest.mark.parametrize("bits", [1, 3])
def test_the_product_form_is_unbiased(bits: int) -> None:
    rows = np.random.default_rng(4).standard_normal((1, 41, 32)).astype(F32)
    trace = trace_of(rows, rows)
    decoded = [Stored(trace, f"turboquant(bits={bits},form=product,seed={seed})").keys[:, :-1] for seed in range(60)]
    biased = [Stored(trace, f"turboquant(bits={bits},seed={seed})").keys[:, :-1] for seed in range(60)]
    exact = rows[:, :-1]
    norms = (exact**2).sum()

    def share(runs: list[Array]) -> float:
        return float((np.mean(runs, axis=0) * exact).sum() / norms)

    assert share(decoded) == pytest.approx(1, abs=0.01)
    assert share(biased) == pytest.approx({1: 0.65, 3: 0.966}[bits], abs=0.02)
    assert Stored(trace, f"turboquant(bits={bits},form=product)").bytes == 2 * 40 * (4 * bits + 4)


def test_codebook_of_turboquant() -> None:
    """Decoded in the rotated basis of a unit vector, each number is one of the centroids for large d."""
    rows = np.random.default_rng(5).standard_normal((1, 201, 256)).astype(F32)
    found = Stored(trace_of(rows, rows), "turboquant(bits=2)").keys[0, :-1].astype(float)
    norms = np.linalg.norm(rows[0, :-1].astype(float), axis=1)
    # The squared norm of the decoded vector counts the centroids 0.453 and 1.51 / sqrt(d) by their probabilities.
    expected = 1 - 0.1175
    assert ((found**2).sum(axis=1) / norms**2).mean() == pytest.approx(expected, rel=0.01)


def test_the_seed_of_a_run_reaches_formats_in_parentheses() -> None:
    """It is the default of every seed, also in the parentheses of a format of keys or values."""
    rows = rows_of(16)
    trace = trace_of(rows, rows)

    def keys(store: str, seed: int) -> Array:
        return Stored(trace, store, seed=seed).keys

    other = keys("turboquant(seed=5)", 0)
    assert (other != keys("turboquant", 0)).any()
    for store in ("turboquant", "kv(turboquant,exact)", "kv(turboquant(seed=5),exact)"):
        np.testing.assert_array_equal(keys(store, 5), other)
    np.testing.assert_array_equal(keys("kv(turboquant(seed=0),exact)", 5), keys("turboquant", 0))


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (
            "q8_0",
            "the format of keys has blocks of 32 numbers: expected a head dimension that is a multiple of 32, found 48",
        ),
        ("kv(nvfp4,mxfp4)", "the format of values has blocks of 32 numbers: .* multiple of 32, found 48"),
        (
            "nvfp4(hadamard=32)",
            "hadamard: does not divide the head dimension of keys: expected a divisor of 48, or true",
        ),
        (
            "nvfp4(hadamard=6)",
            "hadamard: not a power of two: expected false, true, or a block size such as 64, found 6",
        ),
        ("nvfp4(skip_layers=(0,3))", "skip_layers: no such layer: expected 0..0, found 3"),
        ("kv(q9,q8_0)", "unknown number format"),
        ("fp8_e4m3(scales=head)", "fp8_e4m3: unknown parameter"),
        ("fp8_e4m3(window=3)", "fp8_e4m3: unknown parameter"),
    ],
)
def test_errors(store: str, message: str) -> None:
    rows = rows_of(48)
    with pytest.raises(kv.Error, match=message):
        Stored(trace_of(rows, rows), store, policy="snapkv")


def test_numbers_beyond_float16() -> None:
    rows = np.full((1, 9, 32), 3e7, F32)
    failure = "layers/000: quantised keys or values: expected scales and minima within float16"
    with pytest.warns(UserWarning, match=failure):
        kv.replay(trace_of(rows, rows), "full:store=q8_0", 4, progress=False)


def test_skipped_layers_have_one_meaning(traces: Path) -> None:
    """In a policy whose skipped layers keep every token, the store skips them too."""
    policy, opened = "knorm:skip_layers=(0),store=fp8_e4m3", kv.open(traces / "small.h5")
    run = kv.replay(traces / "small.h5", policy, 75, metrics="kv_bytes", progress=False)
    found = run.stored("knorm", 75)
    np.testing.assert_array_equal(found.layer(0).keys, opened.k(0))
    assert found.layer(0).bytes == 2 * 2 * 150 * 32 and (found.layer(1).keys != opened.k(1)).any()


def test_skipped_layers_of_a_range_are_numbered_within_it(traces: Path) -> None:
    policy, opened = "layers:0=full,1-2=(full:store=fp8_e4m3,skip_layers=1)", kv.open(traces / "small.h5")
    run = kv.replay(traces / "small.h5", policy, 75, metrics="kv_bytes", progress=False)
    found = run.stored("layers", 75)
    assert [bool((found.layer(layer).keys == opened.k(layer)).all()) for layer in range(3)] == [True, False, True]
