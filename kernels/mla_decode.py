"""One new token per row against the latent cache: absorbed MLA as multi-query attention whose values are part of the keys.

B rows, S cache slots, H query heads, R latent width, P rotary width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv3_jax.kernels import dispatch
from dsv3_jax.kernels.attention import attend


def mla_decode(
    q: jax.Array, latent: jax.Array, lengths: jax.Array, scale: float, latent_width: int = 512, *, implementation: str | None = None
) -> jax.Array:
    """Attend from one token per row to the first `lengths` slots of that row; the work follows the lengths.

    q (B, H, R+P); latent (B, S, R+P), of which the first R = latent_width columns are the values too; lengths (B,) int32, at least 1:
    the valid slots with the new token's own; slots beyond may hold anything, NaN too. Scores and softmax in float32, weights in
    latent's dtype, sums in float32. Returns (B, H, R) of q's dtype. Bit for bit the same in every run.
    Triton: bfloat16, R = 512 and P = 64, on Hopper; anything else runs on XLA unless 'triton' is named, which then raises ValueError.
    Source: DeepSeek-V2 report, section 2.1; FlashMLA for the kernel's division of work.
    """
    why_not = _unsupported(q, latent, latent_width)
    if why_not and implementation == "triton":
        dispatch.resolve("mla_decode", implementation)  # a GPU that is missing or too old is named first
        raise ValueError(f"implementation = 'triton': mla_decode {why_not}; use 'xla' or None")
    if dispatch.choose("mla_decode", implementation or ("xla" if why_not else None)) == "triton":
        from dsv3_jax.kernels.triton_impl import mla_decode as kernel

        return kernel.mla_decode(q, latent, lengths, scale)
    valid = jnp.arange(latent.shape[1]) < lengths[:, None]
    latent = jnp.where(valid[..., None], latent, 0)[:, :, None]
    out = attend(q[:, None], latent, latent[..., :latent_width], lengths[:, None] - 1, scale, implementation="xla")
    return out[:, 0]


def _unsupported(q: jax.Array, latent: jax.Array, latent_width: int) -> str | None:
    if (q.shape[-1], latent_width) != (576, 512):
        return f"needs 512 latent and 64 rotary columns and got {latent_width} and {q.shape[-1] - latent_width}"
    if q.dtype != jnp.bfloat16 or latent.dtype != jnp.bfloat16:
        return f"needs bfloat16 and got {q.dtype} and {latent.dtype}"
    return None
