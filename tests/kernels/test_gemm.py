"""fp8_gemm, grouped_gemm and attend against float64 NumPy, and fp8_gemm against torch on real activations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv3_jax.checkpoint import safetensors_reader
from dsv3_jax.kernels.attention import attend
from dsv3_jax.kernels.fp8_gemm import fp8_gemm
from dsv3_jax.kernels.grouped_gemm import grouped_gemm
from tests import tolerances
from tests.golden import load

FP8 = ml_dtypes.float8_e4m3fn


def random_fp8(rng, *shape):
    return (rng.normal(size=shape) * 60).clip(-448, 448).astype(FP8)


def random_scale(rng, *shape):
    return np.exp(rng.normal(size=shape)).astype(np.float32)


def spread(scale, axis, size):
    """One scale per element along an axis, from one per 128."""
    return np.take(np.asarray(scale, np.float64), np.arange(size) // 128, axis=axis)


def gemm64(a, a_scale, b, b_scale):
    """(M, K) times (N, K) in float64, every element multiplied by its own scale first."""
    a = np.asarray(a, np.float64) * spread(a_scale, 1, a.shape[1])
    b = np.asarray(b, np.float64) * spread(spread(b_scale, 0, b.shape[0]), 1, b.shape[1])
    return a @ b.T


@pytest.mark.parametrize(("m", "n", "k"), [(1, 576, 256), (5, 128, 128), (64, 300, 512), (3, 96, 200)])
def test_fp8_gemm(m, n, k):
    rng = np.random.default_rng(m * n + k)
    a, b = random_fp8(rng, m, k), random_fp8(rng, n, k)
    a_scale, b_scale = random_scale(rng, m, -(-k // 128)), random_scale(rng, -(-n // 128), -(-k // 128))
    want = gemm64(a, a_scale, b, b_scale)
    tolerances.within_one_rounding(jax.jit(fp8_gemm)(a, a_scale, b, b_scale), want, 24)
    tolerances.within_one_rounding(fp8_gemm(a, a_scale, b, b_scale, jnp.bfloat16), want, 8)


def test_fp8_gemm_with_weights_side_by_side_in_ragged_blocks():
    rng = np.random.default_rng(0)
    a, a_scale = random_fp8(rng, 4, 256), random_scale(rng, 4, 2)
    b, b_scale = random_fp8(rng, 2, 144, 256), random_scale(rng, 2, 2, 2)
    want = np.concatenate([gemm64(a, a_scale, b[i], b_scale[i]) for i in (0, 1)], axis=1)
    tolerances.within_one_rounding(fp8_gemm(a, a_scale, b, b_scale), want, 24)


@pytest.mark.parametrize("family", ["v3_fp8", "v31_ue8m0"])
def test_every_kind_of_quantised_linear(family, tmp_path):
    """The checkpoint's own weights and real activations: x -> y as torch computes it from the same codes."""
    want, path = load.answers(family), load.checkpoint(family, tmp_path)
    tensors = {}
    for shard in sorted(tmp_path.joinpath(family).glob("*.safetensors")):
        tensors.update(safetensors_reader.read_header(str(shard)))
    names = sorted(k.removesuffix(".x") for k in want if k.startswith("lin.") and k.endswith(".x"))
    assert path and len(names) >= 8
    for name in names:
        weight = read(tensors[name.removeprefix("lin.") + ".weight"], FP8)
        scale = read(tensors[name.removeprefix("lin.") + ".weight_scale_inv"], np.float32)
        codes = want[name + ".codes"].view(FP8)
        tolerances.within_one_rounding(fp8_gemm(codes, want[name + ".scale"], weight, scale), want[name + ".y"], 24, name)


def read(tensor: safetensors_reader.Tensor, dtype) -> np.ndarray:
    with open(tensor.path, "rb") as f:
        f.seek(tensor.start)
        return np.frombuffer(f.read(tensor.nbytes), dtype).reshape(tensor.shape)


@pytest.mark.parametrize(("m", "groups"), [(1, 4), (8, 3), (40, 8), (300, 7), (600, 2)])
@pytest.mark.parametrize("kind", ["plain", "fp8 weights", "fp8"])
def test_grouped_gemm(m, groups, kind):
    """Groups of uneven sizes, one empty, and rows behind the last group, whose content must not matter."""
    rng = np.random.default_rng(m + groups)
    sizes = rng.multinomial(m - m // 5, [1 / groups] * groups).astype(np.int32)
    sizes[0], sizes[1] = sizes[0] + sizes[1], 0
    used = sizes.sum()
    w, w_scale = random_fp8(rng, groups, 2, 144, 256), random_scale(rng, groups, 2, 2, 2)
    x, x_scale = random_fp8(rng, m, 256), random_scale(rng, m, 2)
    arguments = {}
    if kind == "plain":
        w_scale = np.ones_like(w_scale)
        w = w.astype(np.float32)
    else:
        arguments["w_scale"] = w_scale
    if kind == "fp8":
        arguments["x_scale"] = x_scale
    else:
        x_scale = np.ones_like(x_scale)
        x = x.astype(np.float32)
        x[used:] = np.nan
    got = np.asarray(jax.jit(grouped_gemm)(x, w, sizes, **arguments))
    if groups > 2:  # in two arrays, which stay apart
        split = {**arguments, "more": (w[2:], *([w_scale[2:]] if kind != "plain" else []))}
        split |= {"w_scale": w_scale[:2]} if kind != "plain" else {}
        np.testing.assert_array_equal(np.asarray(jax.jit(grouped_gemm)(x, w[:2], sizes, **split)), got)
    start = 0
    for g, size in enumerate(sizes):
        rows = slice(start, start + size)
        want = np.concatenate([gemm64(x[rows], x_scale[rows], w[g, p], w_scale[g, p]) for p in (0, 1)], axis=1)
        tolerances.within_one_rounding(got[rows], want, 24 if kind != "plain" else 23, f"group {g}")
        start += size
    assert (got[used:] == 0).all()


def test_grouped_gemm_does_work_for_routed_rows_only():
    """Every row in one group, or none at all: the loop runs over tiles in use, whose number only the device knows."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(64, 32)).astype(np.float32), rng.normal(size=(16, 1, 8, 32)).astype(np.float32)
    sizes = np.zeros(16, np.int32)
    assert not np.asarray(jax.jit(grouped_gemm)(x, w, sizes)).any()
    sizes[9] = 64
    tolerances.within_one_rounding(jax.jit(grouped_gemm)(x, w, sizes), x.astype(np.float64) @ w[9, 0].T, 23)


@pytest.mark.parametrize(("heads", "key_heads"), [(8, 1), (4, 4)])
def test_attend(heads, key_heads):
    """Rows at positions of their own; slots past a row's position hold rubbish that must not be seen."""
    rng = np.random.default_rng(heads)
    b, t, s, c, w, scale = 3, 4, 32, 24, 16, 0.21
    q = rng.normal(size=(b, t, heads, c)).astype(np.float32)
    k = rng.normal(size=(b, s, key_heads, c)).astype(np.float32)
    v = rng.normal(size=(b, s, key_heads, w)).astype(np.float32)
    start = np.array([0, 5, 27])
    positions = (start[:, None] + np.arange(t)).astype(np.int32)
    for i in range(b):
        k[i, start[i] + t :] = 1e4
        v[i, start[i] + t :] = 1e4
    got = attend(q, k, v, positions, scale)
    want = np.zeros((b, t, heads, w))
    for i, j, h in np.ndindex(b, t, heads):
        g, seen = h * key_heads // heads, positions[i, j] + 1
        scores = k[i, :seen, g].astype(np.float64) @ q[i, j, h] * scale
        p = np.exp(scores - scores.max())
        want[i, j, h] = (p / p.sum()) @ v[i, :seen, g]
    np.testing.assert_allclose(np.asarray(got), want, rtol=2e-5, atol=2e-5)
