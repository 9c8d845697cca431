"""Quantisation in Triton: one pass over memory, codes and scales equal to kernels/quantize.py bit for bit.

All of it is bound by memory. A program takes a few groups of 128 columns, so that every thread reads 16 bytes or more at a time
and enough programs are in flight; the exact division costs three fused multiply-adds instead of a branching division.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dsv3_jax.kernels.quantize import AMAX_FLOOR, BLOCK, FP8, FP8_MAX
from dsv3_jax.kernels.triton_impl import launch

_FLOOR = tl.constexpr(AMAX_FLOOR)
_FP8_MAX = tl.constexpr(FP8_MAX)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _quantize(x, UE8M0: tl.constexpr):
    """Codes and scales of x (G, 128) float32."""
    amax = tl.maximum(tl.reduce(tl.abs(x), 1, _larger), _FLOOR, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.math.div_rn(amax, _FP8_MAX)
    if UE8M0:  # up to a power of two: any mantissa bit carries into the exponent
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    # x / scale rounded correctly (Markstein): a rounded reciprocal, then one step from the exact remainder. The conversion to e4m3
    # saturates, so that nothing has to be clipped.
    inverse = tl.math.div_rn(1.0, scale)[:, None]
    q = x * inverse
    q = tl.fma(tl.fma(-q, tl.broadcast_to(scale[:, None], x.shape), x), tl.broadcast_to(inverse, x.shape), q)
    return q.to(tl.float8e4nv), scale


@triton.jit
def _act_quant(x, total, codes, scales, K: tl.constexpr, UE8M0: tl.constexpr, GROUPS: tl.constexpr):
    blocks: tl.constexpr = (K + 127) // 128
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, 128)[None, :]
    if K % 128 == 0:
        offset = group.to(tl.int64)[:, None] * 128 + column
        mask = tl.broadcast_to((group < total)[:, None], (GROUPS, 128))
    else:
        row, block = group // blocks, group % blocks
        offset = row.to(tl.int64)[:, None] * K + block[:, None] * 128 + column
        mask = (group < total)[:, None] & (block[:, None] * 128 + column < K)
    q, scale = _quantize(tl.load(x + offset, mask=mask, other=0.0).to(tl.float32), UE8M0)
    tl.store(codes + offset, q, mask=mask)
    tl.store(scales + group, scale, mask=group < total)


@triton.jit
def _swiglu_quant(x, total, codes, scales, F: tl.constexpr, UE8M0: tl.constexpr, GROUPS: tl.constexpr):
    blocks: tl.constexpr = (F + 127) // 128
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, block = (group // blocks).to(tl.int64)[:, None], (group % blocks)[:, None]
    column = block * 128 + tl.arange(0, 128)[None, :]
    mask = (group < total)[:, None] & (column < F)
    gate = tl.load(x + row * (2 * F) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * F) + F + column, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.math.fdiv(1.0, 1.0 + tl.exp(-gate)) * up
    q, scale = _quantize(y.to(x.dtype.element_ty).to(tl.float32), UE8M0)
    tl.store(codes + row * F + column, q, mask=mask)
    tl.store(scales + group, scale, mask=group < total)


@triton.jit
def _rms_norm_quant(x, weight, eps, codes, scales, K: tl.constexpr, UE8M0: tl.constexpr, GROUPS: tl.constexpr):
    """One row a program, all of it in registers; GROUPS is a power of two, at least K / 128."""
    blocks: tl.constexpr = (K + 127) // 128
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = column < K
    value = tl.load(x + row * K + column, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(value * value, axis=1), axis=0) / K
    y = value * tl.rsqrt(mean + eps) * w
    q, scale = _quantize(y.to(x.dtype.element_ty).to(tl.float32), UE8M0)
    tl.store(codes + row * K + column, q, mask=mask)
    tl.store(scales + row * blocks + group, scale, mask=group < blocks)


@triton.jit
def _weight_dequant(codes, scale, n, out, K: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows of one 128x128 block a program; ROWS divides 128."""
    blocks: tl.constexpr = (K + 127) // 128
    block, part, weight = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = part * ROWS + tl.arange(0, ROWS)[:, None]
    column = block * 128 + tl.arange(0, 128)[None, :]
    start = weight.to(tl.int64) * n
    offset = (start + row) * K + column
    mask = (row < n) & (column < K)
    s = tl.load(scale + (weight.to(tl.int64) * tl.cdiv(n, 128) + part * ROWS // 128) * blocks + block)
    q = tl.load(codes + offset, mask=mask, other=0.0)
    tl.store(out + offset, (q.to(tl.float32) * s).to(out.dtype.element_ty), mask=mask)


def _groups(total: int) -> tuple[int, int]:
    """Groups of 128 and warps per program: large programs only where they still fill the card."""
    return (32, 4) if total >= 32 * 132 * 4 else (8, 1) if total >= 8 * 132 else (2, 1)


def _outputs(lead: tuple[int, ...], k: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct((*lead, k), FP8), jax.ShapeDtypeStruct((*lead, -(-k // BLOCK)), jnp.float32)


def act_quant(x: jax.Array, scale_fmt: str | None, config: dict | None = None) -> tuple[jax.Array, jax.Array]:
    """As kernels.quantize.act_quant."""
    *lead, k = x.shape
    out = _outputs((*lead,), k)
    total = out[1].size
    groups, warps = _groups(total)
    c = {"GROUPS": groups, "num_warps": warps} | (config or {})
    grid = (triton.cdiv(total, c["GROUPS"]),)
    return launch.call(_act_quant, x, total, out_type=out, grid=grid, K=k, UE8M0=scale_fmt == "ue8m0", **c)


def swiglu_quant(gate_up: jax.Array, scale_fmt: str | None, config: dict | None = None) -> tuple[jax.Array, jax.Array]:
    """As kernels.quantize.swiglu_quant."""
    *lead, _, f = gate_up.shape
    out = _outputs((*lead,), f)
    total = out[1].size
    groups, warps = _groups(total)
    c = {"GROUPS": groups, "num_warps": warps} | (config or {})
    grid = (triton.cdiv(total, c["GROUPS"]),)
    return launch.call(_swiglu_quant, gate_up, total, out_type=out, grid=grid, F=f, UE8M0=scale_fmt == "ue8m0", **c)


def rms_norm_quant(x: jax.Array, weight: jax.Array, eps: float, scale_fmt: str | None, config: dict | None = None):
    """As kernels.quantize.rms_norm_quant."""
    *lead, k = x.shape
    out = _outputs((*lead,), k)
    groups = triton.next_power_of_2(-(-k // BLOCK))
    c = {"num_warps": min(8, max(1, groups // 4))} | (config or {})
    grid = (out[1].size // out[1].shape[-1],)
    return launch.call(_rms_norm_quant, x, weight, float(eps), out_type=out, grid=grid, K=k, UE8M0=scale_fmt == "ue8m0", GROUPS=groups, **c)


def weight_dequant(codes: jax.Array, scale: jax.Array, dtype, config: dict | None = None) -> jax.Array:
    """As kernels.quantize.weight_dequant."""
    n, k = codes.shape[-2:]
    c = {"ROWS": 16, "num_warps": 2} | (config or {})
    grid = (triton.cdiv(k, 128), triton.cdiv(n, c["ROWS"]), codes.size // (n * k))
    return launch.call(_weight_dequant, codes, scale, n, out_type=jax.ShapeDtypeStruct(codes.shape, dtype), grid=grid, K=k, **c)
