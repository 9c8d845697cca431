"""Block-wise FP8: activations in 1x128 groups, weights in 128x128 blocks, e4m3 codes and float32 scales.

M tokens, N rows out, K columns in, b(n) = ceil(n / 128). Edge blocks are partial.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv3_jax.kernels import dispatch

BLOCK = 128
FP8 = jnp.float8_e4m3fn
FP8_MAX = 448.0
AMAX_FLOOR = 1e-4  # an all-zero group still has a finite, positive scale


def act_quant(x: jax.Array, scale_fmt: str | None = None, *, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Quantise activations per row and per 128 columns.

    x (..., K), float. Returns codes (..., K) float8_e4m3fn and scales (..., b(K)) float32, with
    scale = max(amax, 1e-4) / 448, rounded up to a power of two before dividing if scale_fmt is 'ue8m0'.
    Source: act_quant of the reference's kernel.py; DeepSeek-V3 report, section 3.3.
    """
    if _choose("act_quant", x, implementation) == "triton":
        from dsv3_jax.kernels.triton_impl import quantize as triton_impl

        return triton_impl.act_quant(x, scale_fmt)
    *lead, k = x.shape
    blocks = -(-k // BLOCK)
    x = x.astype(jnp.float32)
    padded = jnp.pad(x, [(0, 0)] * len(lead) + [(0, blocks * BLOCK - k)]).reshape(*lead, blocks, BLOCK)
    amax = jnp.maximum(jnp.abs(padded).max(-1), AMAX_FLOOR)
    scale = _divide(amax, jnp.float32(FP8_MAX))
    if scale_fmt == "ue8m0":
        scale = round_up_to_power_of_two(scale)
    codes = jnp.clip(_divide(padded, scale[..., None]), -FP8_MAX, FP8_MAX).astype(FP8)
    return codes.reshape(*lead, blocks * BLOCK)[..., :k], scale


def rms_norm_quant(
    x: jax.Array, weight: jax.Array, eps: float, scale_fmt: str | None = None, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """RMSNorm and act_quant in one pass over memory.

    x (..., K), weight (K,). The norm is taken in float32 and rounded to x's dtype before it is quantised, as model.layers.RMSNorm
    followed by act_quant does. Returns codes and scales as act_quant.
    """
    if _choose("rms_norm_quant", x, implementation) == "triton":
        from dsv3_jax.kernels.triton_impl import quantize as triton_impl

        return triton_impl.rms_norm_quant(x, weight, eps, scale_fmt)
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return act_quant((y * weight.astype(jnp.float32)).astype(x.dtype), scale_fmt, implementation="xla")


def swiglu_quant(gate_up: jax.Array, scale_fmt: str | None = None, *, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """silu(gate) * up and act_quant in one pass over memory.

    gate_up (..., 2, F), gate at 0 and up at 1. The product is taken in float32 and rounded to gate_up's dtype before it is
    quantised, as model.layers.swiglu followed by act_quant does. Returns codes (..., F) and scales (..., b(F)).
    """
    if _choose("swiglu_quant", gate_up, implementation) == "triton":
        from dsv3_jax.kernels.triton_impl import quantize as triton_impl

        return triton_impl.swiglu_quant(gate_up, scale_fmt)
    gate, up = (gate_up[..., i, :].astype(jnp.float32) for i in (0, 1))
    return act_quant((jax.nn.silu(gate) * up).astype(gate_up.dtype), scale_fmt, implementation="xla")


def _choose(op: str, x: jax.Array, implementation: str | None) -> str:
    return dispatch.choose(op, implementation if x.size else "xla")


def _divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b rounded correctly, which XLA's division of float32 is not: it may multiply by a reciprocal, or approximate on a GPU.

    One step of refinement from the exact remainder; the halves have 12 bits, so that their products are exact.
    """
    q = a / b
    q_hi, b_hi = _upper_half(q), _upper_half(b)
    q_lo, b_lo = q - q_hi, b - b_hi
    remainder = (((a - q_hi * b_hi) - q_hi * b_lo) - q_lo * b_hi) - q_lo * b_lo
    return q + remainder / b


def _upper_half(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type(bits & ~0xFFF, jnp.float32)


def round_up_to_power_of_two(scale: jax.Array) -> jax.Array:
    """Round positive normal float32 numbers up to a power of two, exactly: any mantissa bit carries into the exponent."""
    bits = jax.lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.int32)
    return jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)


def expand_scale(scale: jax.Array, n: int, k: int) -> jax.Array:
    """Repeat block scales (..., b(N), b(K)) to one scale per element, (..., N, K)."""
    rows = jnp.repeat(scale, BLOCK, axis=-2)[..., :n, :]
    return jnp.repeat(rows, BLOCK, axis=-1)[..., :k]


def weight_dequant(codes: jax.Array, scale: jax.Array, dtype, *, implementation: str | None = None) -> jax.Array:
    """Dequantise weights stored in 128x128 blocks.

    codes (..., N, K) float8_e4m3fn, scale (..., b(N), b(K)) float32. Returns (..., N, K) of `dtype`: the float32 product,
    rounded once. Source: weight_dequant of the reference's kernel.py.
    """
    if dispatch.choose("weight_dequant", implementation) == "triton":
        from dsv3_jax.kernels.triton_impl import quantize as triton_impl

        return triton_impl.weight_dequant(codes, scale, dtype)
    return (codes.astype(jnp.float32) * expand_scale(scale, *codes.shape[-2:])).astype(dtype)
