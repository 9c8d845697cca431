"""RMSNorm of a sum, as it stands between two layers: the residual stream takes what a layer adds and is normalised for the next.

K columns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv3_jax.kernels import dispatch


def add_rms_norm(
    x: jax.Array, update: jax.Array | None, weight: jax.Array, eps: float, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return x + update and its root-mean-square norm times weight.

    x (..., K), bfloat16 or float32; update of the same shape and dtype, or None for x alone; weight (K,), any float. The sum is rounded
    to x's dtype first; the norm of what that leaves is taken in float32 and rounded once. Both results are of x's shape and dtype.
    Without an update the first result is x itself. Other dtypes and empty arrays run on XLA. Raises ValueError where update or weight
    do not fit x, and where 'triton' is named for another dtype or cannot run here. Source: arXiv 1910.07467.
    """
    if update is not None and (update.shape, update.dtype) != (x.shape, x.dtype):
        raise ValueError(f"update = {update.dtype}{list(update.shape)}: must be as x, {x.dtype}{list(x.shape)}")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {weight.shape}: must be {x.shape[-1:]}, one number for each column of x")
    has_kernel = x.dtype in (jnp.bfloat16, jnp.float32)
    if implementation == "triton" and not has_kernel:
        dispatch.resolve("rms_norm", implementation)  # a GPU that is missing or too old is named first
        raise ValueError(f"implementation = 'triton': rms_norm needs bfloat16 or float32 and got {x.dtype}; use 'xla' or None")
    if dispatch.choose("rms_norm", implementation if has_kernel and x.size else "xla") == "triton":
        from dsv3_jax.kernels.triton_impl import norm as kernel

        return kernel.add_rms_norm(x, update, weight, eps)
    if update is not None:
        bits = jnp.finfo(x.dtype)
        x = jax.lax.reduce_precision(x + update, bits.nexp, bits.nmant)  # or XLA would norm the sum before it is rounded
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return x, (y * weight.astype(jnp.float32)).astype(x.dtype)
