"""act_quant and weight_dequant, bit for bit against torch's answers and the vectors of the release notes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv3_jax.kernels import dispatch, quantize
from tests.golden import load

UNITS = load.units()


@pytest.mark.parametrize("fmt", [None, "ue8m0"])
def test_activation_edge_cases(fmt):
    """Zeros, 1e-7, exact powers of two, halfway points, 1e4: codes and scales equal torch's."""
    name = fmt or "f32"
    codes, scale = jax.jit(quantize.act_quant, static_argnums=1)(UNITS["act.x"], fmt)
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), UNITS[f"act.codes_{name}"])
    np.testing.assert_array_equal(np.asarray(scale), UNITS[f"act.scale_{name}"])


@pytest.mark.parametrize("family", ["v3_fp8", "v31_ue8m0"])
def test_real_activations(family):
    want = load.answers(family)
    fmt = load.info(family)["config"]["quantization_config"].get("scale_fmt")
    names = sorted(k.removesuffix(".x") for k in want if k.startswith("lin.") and k.endswith(".x"))
    assert len(names) >= 8
    for name in names:
        codes, scale = jax.jit(quantize.act_quant, static_argnums=1)(want[name + ".x"], fmt)
        np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), want[name + ".codes"])
        np.testing.assert_array_equal(np.asarray(scale), want[name + ".scale"])


def test_published_vectors():
    zeros = np.zeros((2, 128), np.float32)
    zeros[1, 7] = 5.0
    codes, scale = quantize.act_quant(zeros)
    assert not np.asarray(codes[0]).view(np.uint8).any()
    np.testing.assert_allclose(np.asarray(scale)[:, 0], [2.2321429e-07, 0.011160714], rtol=1e-7)
    block = np.zeros((1, 128), np.float32)
    block[0, :3] = 300, -7, 0.1
    assert np.asarray(quantize.act_quant(block)[1]) == np.float32(0.66964287)
    codes, scale = quantize.act_quant(block, "ue8m0")
    assert np.asarray(scale) == 1.0
    assert np.asarray(codes, np.float32)[0, :3].tolist() == [288, -7, 0.1015625]


def test_values_above_the_largest_code_are_clamped():
    """JAX's own cast turns 465 into NaN. A power-of-two scale below amax/448 cannot occur, so the clamp is seen through bf16 input."""
    x = np.zeros((1, 128), np.float32)
    x[0, :6] = 448, 449, 464, 465, 1000, -1000
    codes = jnp.clip(x, -quantize.FP8_MAX, quantize.FP8_MAX).astype(quantize.FP8)
    assert np.asarray(codes, np.float32)[0, :6].tolist() == [448, 448, 448, 448, 448, -448]
    codes, scale = quantize.act_quant(x.astype(ml_dtypes.bfloat16))
    assert np.abs(np.asarray(codes, np.float32)).max() == 448
    assert np.isfinite(np.asarray(codes, np.float32)).all() and np.isfinite(np.asarray(scale)).all()


def test_power_of_two_scales_are_exact():
    powers = (2.0 ** np.arange(-126, 127)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(quantize.round_up_to_power_of_two(powers)), powers)
    above = np.nextafter(powers, np.float32(np.inf))
    np.testing.assert_array_equal(np.asarray(quantize.round_up_to_power_of_two(above)), powers * 2)


@pytest.mark.parametrize("k", [128, 200, 64])
def test_a_partial_last_group_is_quantised_on_its_own(k):
    x = np.random.default_rng(0).normal(size=(3, k)).astype(np.float32)
    codes, scale = quantize.act_quant(x)
    assert codes.shape == x.shape and scale.shape == (3, -(-k // 128))
    last = x[:, k // 128 * 128 :] if k % 128 else x[:, -128:]
    np.testing.assert_array_equal(np.asarray(scale)[:, -1], np.maximum(np.abs(last).max(-1), np.float32(1e-4)) / np.float32(448))


@pytest.mark.parametrize("fmt", ["f32", "ue8m0"])
def test_weight_dequant(fmt):
    codes = UNITS[f"weight.codes_{fmt}"].view(ml_dtypes.float8_e4m3fn)
    scale = UNITS[f"weight.scale_{fmt}"]
    want = np.empty(codes.shape, np.float32)
    for r in range(codes.shape[0]):
        for c in range(codes.shape[1]):
            want[r, c] = np.float32(codes[r, c]) * scale[r // 128, c // 128]
    np.testing.assert_array_equal(np.asarray(quantize.weight_dequant(jnp.asarray(codes), scale, jnp.float32)), want)
    got = np.asarray(quantize.weight_dequant(jnp.asarray(codes), scale, jnp.bfloat16))
    np.testing.assert_array_equal(got, want.astype(ml_dtypes.bfloat16))


def test_weight_dequant_of_576_rows():
    """kv_a_proj_with_mqa has 4.5 blocks of rows: row r has the scale of block r // 128, and the last half block its own."""
    scale = np.tile(np.arange(1, 6, dtype=np.float32)[:, None], (1, 2))
    got = np.asarray(quantize.weight_dequant(jnp.ones((576, 256), quantize.FP8), scale, jnp.float32))
    np.testing.assert_array_equal(got, np.repeat(1 + np.arange(576) // 128, 256).reshape(576, 256))


def test_a_named_implementation_runs_or_raises():
    with pytest.raises(ValueError, match=r"weight_dequant needs a GPU of compute capability 8.9 or newer, and no GPU is here; use 'xla'"):
        quantize.weight_dequant(jnp.ones((8, 8), quantize.FP8), jnp.ones((1, 1)), jnp.float32, implementation="triton")
    with pytest.raises(ValueError, match="'triton': attend has no Triton kernel"):
        dispatch.choose("attend", "triton")
    with pytest.raises(ValueError, match="implementation = 'cuda': must be None, 'xla' or 'triton'"):
        dispatch.choose("fp8_gemm", "cuda")
