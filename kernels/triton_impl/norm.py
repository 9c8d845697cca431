"""RMSNorm of a sum in Triton: one program a row, which stays in registers between its sum of squares and its scaling.

In a decode step XLA takes two or three kernels for it, each of which is over before it has filled the card.
"""

from __future__ import annotations

import jax
import triton
import triton.language as tl

from dsv3_jax.kernels.triton_impl import launch


@triton.jit
def _add_rms_norm(x, update, weight, eps, total, out, K: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr):
    """Rows of K columns, WIDTH of them a power of two; total, of x + update, is written only where there is an update (ADD)."""
    column = tl.arange(0, WIDTH)
    at, mask = tl.program_id(0).to(tl.int64) * K + column, column < K
    value = tl.load(x + at, mask=mask, other=0.0)
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)  # no load passes the barrier of the sum: all go out before it
    if ADD:
        value = (value.to(tl.float32) + tl.load(update + at, mask=mask, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + at, value, mask=mask)
    y = value.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / K + eps) * w
    tl.store(out + at, y.to(x.dtype.element_ty), mask=mask)


def add_rms_norm(x: jax.Array, update: jax.Array | None, weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """The contract of kernels/norm.py."""
    k = x.shape[-1]
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    # Without an update the first result is a scalar that nobody reads.
    unused = jax.ShapeDtypeStruct((1,), x.dtype)
    total, out = launch.call(
        _add_rms_norm,
        x,
        x if update is None else update,
        weight,
        float(eps),
        out_type=(unused if update is None else like, like),
        grid=(x.size // k,),
        num_warps=min(16, max(1, triton.next_power_of_2(k) // 512)),  # 16 elements a thread, loaded 16 bytes at a time
        K=k,
        WIDTH=triton.next_power_of_2(k),
        ADD=update is not None,
    )
    return x if update is None else total, out
