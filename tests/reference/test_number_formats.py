"""The references of the number formats: worked examples, and the packages that define the formats."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import reference_number_formats as formats
from reference_number_formats import E2M1, E4M3, E5M2, decoded, nearest, stored_bytes

F32 = np.float32


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers of sizes from 1e-3 to 1e3; with vectors of zeros, of equal numbers and of ties."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=shape) * 10.0 ** generator.uniform(-3, 3, (*shape[:-1], 1))
    x[0, 0], x[0, 1], x[0, 2] = 0, -1.75, np.tile([1, -1, 0.5, -0.25], shape[-1] // 4)
    return x.astype(F32)


# ----------------------------------------------------------------------------------------------------- worked examples


def test_blocks_by_hand() -> None:
    x = np.zeros((1, 32), F32)
    x[0, :4] = [-8, 7.6, 3.4, 8]
    # scale 1: the largest is the first of -8 and 8, which has the code 0; 8 is cut to 7 steps
    assert decoded(x, "q4_0")[0, :5].tolist() == [-8, 7, 3, 7, 0]
    x[0, :4] = [0, 15, 0.5, 2.4]
    assert decoded(x, "q4_1")[0, :4].tolist() == [0, 15, 1, 2]
    x[0, :4] = [127, 0.5, -2.5, 1.4]  # ties away from zero
    assert decoded(x, "q8_0")[0, :4].tolist() == [127, 1, -3, 1]
    x[0, :4] = [-16, 15.4, 2.6, -0.4]
    assert decoded(x, "q5_0")[0, :4].tolist() == [-16, 15, 3, 0]
    x[0, :4] = [-1, 30, 0.6, 3]
    assert decoded(x, "q5_1")[0, :4].tolist() == [-1, 30, 1, 3]


def test_scales_are_rounded_after_the_codes() -> None:
    x = np.zeros((1, 32), F32)
    x[0, :2] = [1, 0.5]
    scale = F32(np.float16(1 / 127))
    assert decoded(x, "q8_0")[0, :2].tolist() == [127 * scale, 64 * scale]


def test_fp8_by_hand() -> None:
    x = np.array([[[448, 17, 18.9]], [[4.48, -0.17, 1e-9]]], F32)
    # between 16 and 32 the step is 2: 17 is a tie to 16, the even code; of the second head 4.48 and -0.17
    assert decoded(x, "fp8_e4m3", "one")[:, 0].tolist() == [[448, 16, 18], [4.5, F32(-0.171875), 0]]
    # the second head has the scale 0.01: -0.17 is 17 steps, a tie or as near to it as float32 allows
    scale = F32(4.48) / F32(448)
    of_head = decoded(x, "fp8_e4m3", "head")
    assert of_head[0].tolist() == [[448, 16, 18]]
    assert of_head[1, 0, 0] == F32(448) * scale
    assert of_head[1, 0, 1] in (F32(-16) * scale, F32(-18) * scale)
    assert decoded(np.array([[[1e9, -1e9]]], F32), "fp8_e5m2", "one").tolist() == [[[57344, -57344]]]
    assert decoded(np.zeros((1, 1, 4), F32), "fp8_e4m3", "tensor").tolist() == [[[0] * 4]]
    # the smallest scale of a token is 1e-6
    assert decoded(np.full((1, 1, 1), 1e-6, F32), "fp8_e4m3", "token").item() == pytest.approx(1e-6, rel=1e-6)
    assert decoded(np.full((1, 1, 1), 1e-10, F32), "fp8_e4m3", "token").item() == 0


def test_nvfp4_by_hand() -> None:
    x = np.zeros((1, 1, 32), F32)
    x[0, 0, :6] = [2688, 448, 1120, 1121, -672, -111]  # tensor scale 1; group scale 448: in steps 6, 1, 2.5, ...
    x[0, 0, 16:19] = [6, 0.25, 0.26]  # group scale 1
    result = decoded(x, "nvfp4")[0, 0]
    assert result[:6].tolist() == [2688, 448, 896, 1344, -672, 0]
    assert result[16:19].tolist() == [6, 0, 0.5]
    x[0, 0, 16:19] = [0.005, 0, 0]  # the group scale rounds to 0
    assert decoded(x, "nvfp4")[0, 0, 16] == 0


def test_mxfp4_by_hand() -> None:
    x = np.zeros((1, 32), F32)
    x[0, :6] = [7.9, 2.5, -0.75, 5, 0.25, -3.6]  # scale 1: 7.9 is cut to 6, ties go to the smaller number
    assert decoded(x, "mxfp4")[0, :6].tolist() == [6, 2, -0.5, 4, 0, -4]


def test_uniform_by_hand() -> None:
    x = F32([[[0, 15, 7.4, 0.6], [-1, -1, -1, -1]]])
    assert decoded(x, "uniform", bits=4).tolist() == [[[0, 15, 7, 1], [-1, -1, -1, -1]]]
    assert decoded(x, "uniform", bits=1)[0, 0].tolist() == [0, 15, 0, 0]


def test_int4_by_hand() -> None:
    x = F32([[[-4, 11, 2.5, -0.5], [16, 31, 16, 17]]])
    # scale 1: zero points 4, and 0 for a vector of positive numbers, whose codes end at 15; ties go up, as all are >= 0
    assert decoded(x, "int4_per_token_head").tolist() == [[[-4, 11, 3, 0], [15, 15, 15, 15]]]
    step = np.float32(2 / 15)  # its last four bits are 1001, and are cleared
    assert decoded(F32([[[0, 2]]]), "int4_per_token_head")[0, 0, 1] == 15 * (step - F32(9 * 2.0**-26))


def test_hadamard_form_by_hand() -> None:
    """A row of the Hadamard matrix is one centroid and, near 0, others; the decoded vector has the length of x."""
    x = (3 * formats.signs_of_hadamard(4)[1] / 2)[None].astype(F32)
    found = decoded(x, "turboquant", bits=1, form="hadamard")
    # all four centroids have one size, so each coordinate is half of the length
    np.testing.assert_allclose(np.linalg.norm(found), 3)
    np.testing.assert_allclose(np.abs(found @ formats.signs_of_hadamard(4)) / 2, [[1.5] * 4])
    x = np.random.default_rng(2).normal(size=(400, 64)).astype(F32)
    found = decoded(x, "turboquant", bits=4, form="hadamard")
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), np.linalg.norm(x, axis=1), rtol=1e-3)
    assert (((found - x) ** 2).sum(-1) / (x**2).sum(-1)).mean() == pytest.approx(0.0095, rel=0.05)


def test_normal_centroids() -> None:
    """Max 1960, table I: the quantiser of the normal distribution with 8 levels."""
    np.testing.assert_allclose(formats.normal_centroids(1, 3)[4:], [0.2451, 0.7560, 1.344, 2.152], atol=1e-3)


def test_bytes() -> None:
    """Of one vector of 128 numbers, and of the scales of two heads with three tokens."""
    expected = {"q8_0": 136, "q5_1": 96, "q5_0": 88, "q4_1": 80, "q4_0": 72, "mxfp4": 68}
    assert {name: stored_bytes(1, 1, 128, name) for name in expected} == expected
    assert stored_bytes(2, 3, 128, "nvfp4") == 6 * 72 + 4
    scales = {scale: stored_bytes(2, 3, 128, "fp8_e4m3", scale) - 6 * 128 for scale in ("tensor", "head", "token")}
    assert scales == {"tensor": 4, "head": 8, "token": 24}
    assert stored_bytes(1, 1, 128, "turboquant", bits=3) == 50
    assert stored_bytes(1, 1, 80, "turboquant", bits=3, form="product") == 34
    # slots of vLLM: 64 + 2 bytes for a key and 64 + 4 for a value of 4 bits; 48 of 3 bits
    assert stored_bytes(1, 1, 128, "turboquant", bits=4, form="hadamard") == 66
    assert stored_bytes(1, 1, 128, "uniform", bits=4) == 68
    assert stored_bytes(1, 1, 128, "uniform", bits=3) == 52
    assert stored_bytes(1, 1, 128, "int4_per_token_head") == 68


def test_head_dimensions_that_have_no_blocks() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        decoded(np.zeros((1, 48), F32), "q8_0")


# ------------------------------------------------------------------------------------------------------------- packages


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4"])
def test_blocks_of_gguf(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = getattr(gguf.GGMLQuantizationType, name.upper(), None)
    if kind is None:
        pytest.skip(f"this version of gguf has no {name}")
    x = numbers(4, 500, 96)
    written = gguf.quants.quantize(x, kind)
    np.testing.assert_array_equal(decoded(x, name), gguf.quants.dequantize(written, kind))
    assert written.nbytes == stored_bytes(4, 500, 96, name)


@pytest.mark.parametrize(("table", "name"), [(E4M3, "float8_e4m3fn"), (E5M2, "float8_e5m2"), (E2M1, "float4_e2m1fn")])
def test_small_floats_of_ml_dtypes(table: np.ndarray, name: str) -> None:
    kind = getattr(ml_dtypes, name)
    codes = np.arange(len(table)).astype(np.uint8)
    np.testing.assert_array_equal(codes.view(kind).astype(float), table)
    middles = np.concatenate([(table[1:] + table[:-1]) / 2, table])
    x = np.concatenate([middles, -middles, np.nextafter(middles, 0), np.nextafter(middles, table[-1])])
    x = np.concatenate([x, numbers(3, 100, 64).ravel()]).astype(F32).clip(-table[-1], table[-1])
    np.testing.assert_array_equal(nearest(table, x), x.astype(kind).astype(F32))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", ["one", "tensor", "head", "token"])
def test_fp8_of_torch(name: str, scale: str) -> None:
    torch = pytest.importorskip("torch")
    kind, most = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}[name]
    x = numbers(3, 50, 16)
    steps = np.arange(1, 51).astype(F32) / F32(most)  # of tokens whose largest number is 1 to 50
    x[1] = steps[:, None] * F32([most, 17, 19, 21, 23, 34, 38, 42, 46, 68, 76, 84, 92, 136, 152, 168])  # and ties
    x = torch.from_numpy(x)
    if scale == "token":
        step = (x.abs().amax(2, keepdim=True) / most).clamp(min=1e-6)
        scaled = x * (1 / step)
    else:
        dims = {"one": None, "tensor": (0, 1, 2), "head": (1, 2)}[scale]
        step = torch.ones(1) if dims is None else x.abs().amax(dims, keepdim=True) / most
        scaled = x / step
    expected = scaled.clamp(-most, most).to(kind).float() * step
    np.testing.assert_array_equal(decoded(x.numpy(), f"fp8_{name}", scale), expected.numpy())


def test_nvfp4_of_torch_and_ml_dtypes() -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(numbers(3, 50, 64))
    tensor = 2688 / x.abs().max()
    group = x.reshape(3, 50, 4, 16)
    scale = (tensor * (group.abs().amax(3, keepdim=True) * torch.tensor(1 / 6))).clamp(-448, 448)
    scale = scale.to(torch.float8_e4m3fn).float()
    inverse = torch.where(scale == 0, 0, 1 / (scale * (1 / tensor)))
    codes = (group * inverse).clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(F32)
    np.testing.assert_array_equal(decoded(x.numpy(), "nvfp4"), (codes * (scale / tensor).numpy()).reshape(x.shape))


# --------------------------------------------------------------------------------------------- rotations and turboquant


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_hadamard(size: int) -> None:
    matrix = formats.hadamard(size)
    np.testing.assert_allclose(matrix @ matrix, np.eye(size), atol=1e-6)
    for i, j in ((0, 0), (1 % size, 1 % size), (5 % size, 7 % size)):
        assert matrix[i, j] == pytest.approx((-1) ** (i & j).bit_count() / math.sqrt(size))
    x = numbers(2, 3, 128)
    np.testing.assert_allclose(formats.rotated(formats.rotated(x, size), size), x, rtol=1e-5, atol=1e-3)
    one = np.zeros((1, 128), F32)
    one[0, size] = 1  # the first component of the second block: that block becomes constant
    assert np.flatnonzero(formats.rotated(one, size)[0]).tolist() == list(range(size, 2 * size))


def test_centroids() -> None:
    mean = math.exp(math.lgamma(64) - math.lgamma(64.5)) / math.sqrt(math.pi)  # of |u|
    np.testing.assert_allclose(formats.centroids(128, 1), [-mean, mean], rtol=1e-9)
    expected = np.array([0.2449836, 0.7556455, 1.3431800, 2.1503495]) / math.sqrt(128)  # of the normal distribution
    np.testing.assert_allclose(formats.centroids(128, 3)[4:], expected, rtol=0.02)
    # d = 3: a coordinate is uniform on [-1, 1]
    np.testing.assert_allclose(formats.centroids(3, 2), [-0.75, -0.25, 0.25, 0.75], atol=1e-9)
    # d = 4, one bit: the mean of |u| with the density 2/pi sqrt(1 - u^2)
    np.testing.assert_allclose(formats.centroids(4, 1), [-4 / (3 * math.pi), 4 / (3 * math.pi)], atol=1e-9)


def test_random_matrices() -> None:
    turn = formats.rotation(16, 3)
    np.testing.assert_allclose(turn @ turn.T, np.eye(16), atol=1e-12)
    raw = formats.gaussian(3, 0, np.arange(16), 0)
    np.testing.assert_allclose(turn[:, 0], raw / np.linalg.norm(raw))
    assert formats.sketch(16, 3)[2, 1] == formats.gaussian(3, 1, 2, 1)
    # the sign of each column is that of its raw one
    assert (np.diag(turn.T @ formats.gaussian(3, 0, *np.indices((16, 16)))) > 0).all()


@pytest.mark.parametrize(("bits", "bound"), [(1, 0.363), (2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_errors_of_turboquant(bits: int, bound: float) -> None:
    x = np.random.default_rng(0).normal(size=(400, 64)).astype(F32)
    error = ((decoded(x, "turboquant", bits=bits) - x) ** 2).sum(-1) / (x**2).sum(-1)
    assert error.mean() == pytest.approx(bound, rel=0.05)


def test_inner_products_of_turboquant_are_unbiased() -> None:
    generator = np.random.default_rng(1)
    x, q = generator.normal(size=(1, 16)).astype(F32), generator.normal(size=16)
    products = [float((decoded(x, "turboquant", bits=2, form="product", seed=s) @ q).item()) for s in range(1500)]
    exact = float((x @ q).item())
    assert np.mean(products) == pytest.approx(exact, abs=4 * np.std(products) / math.sqrt(1500))
    biased = [float((decoded(x, "turboquant", bits=1, seed=s) @ q).item()) for s in range(1500)]
    assert abs(np.mean(biased) - exact) > 8 * np.std(biased) / math.sqrt(1500)


def test_turboquant_by_hand() -> None:
    """In one dimension of the rotated space: the vector whose direction is the first row of the rotation."""
    turn = formats.rotation(3, 0)
    x = (2 * turn[0])[None].astype(F32)
    # coordinates 1, 0, 0: the nearest of -0.75, -0.25, 0.25, 0.75; a number near 0 takes either sign
    coordinates = decoded(x, "turboquant", bits=2)[0] @ turn.T
    np.testing.assert_allclose(np.abs(coordinates), [1.5, 0.5, 0.5], atol=1e-6)
    assert coordinates[0] > 0
    assert decoded(np.zeros((1, 3), F32), "turboquant", bits=2).tolist() == [[0, 0, 0]]
