"""Causal attention of new tokens with a key and a value per head, over rows that begin and end where they like.

B rows, T new tokens, S slots, H heads, N nope width, P rotary width, V value width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv3_jax.kernels import dispatch
from dsv3_jax.kernels.attention import attend


def mla_prefill(
    q: jax.Array,
    k_nope: jax.Array,
    k_pe: jax.Array,
    v: jax.Array,
    start: jax.Array,
    new: jax.Array,
    scale: float,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Attend from each row's new tokens to its slots up to themselves, without the scores in memory; the work follows the lengths.

    q (B, T, H, N+P); k_nope (B, S, H, N); k_pe (B, S, P), one for all heads; v (B, S, H, V); start (B,) int32: the slots that were filled
    before, so that row b's token t is slot start[b] + t; new (B,) int32: its valid new tokens, 0 to T, with start + new <= S. Slots
    and tokens beyond may hold anything, NaN too. Scores and softmax in float32, weights in v's dtype, sums in float32.
    Returns (B, T, H, V) of q's dtype, zero for tokens beyond `new`. Bit for bit the same in every run.
    Triton: bfloat16, N = V = 128 and P = 64, on Hopper; anything else runs on XLA unless 'triton' is named, which then raises ValueError.
    Source: DeepSeek-V2 report, section 2.1; FlashAttention-3 (arXiv 2407.08608) for the kernel.
    """
    why_not = unsupported(k_nope.shape[-1], k_pe.shape[-1], v.shape[-1], *(x.dtype for x in (q, k_nope, k_pe, v)))
    if why_not and implementation == "triton":
        dispatch.resolve("mla_prefill", implementation)  # a GPU that is missing or too old is named first
        raise ValueError(f"implementation = 'triton': mla_prefill {why_not}; use 'xla' or None")
    if dispatch.choose("mla_prefill", implementation or ("xla" if why_not else None)) == "triton":
        from dsv3_jax.kernels.triton_impl import mla_prefill as kernel

        return kernel.mla_prefill(q, k_nope, k_pe, v, start, new, scale)
    t, s, h = q.shape[1], *k_nope.shape[1:3]
    valid = (jnp.arange(s) < (start + new)[:, None])[..., None, None]
    k = jnp.concatenate([k_nope, jnp.broadcast_to(k_pe[:, :, None], (*k_nope.shape[:2], h, k_pe.shape[-1]))], axis=-1)
    k, v = jnp.where(valid, k, 0), jnp.where(valid, v, 0)
    out = attend(q, k, v, start[:, None] + jnp.arange(t), scale, implementation="xla")
    return jnp.where((jnp.arange(t) < new[:, None])[..., None, None], out, 0)


def unsupported(nope: int, rope: int, value: int, *dtypes) -> str | None:
    """Why the kernel cannot take heads of these widths and dtypes, None if it can."""
    if (nope, rope, value) != (128, 64, 128):
        return f"needs widths 128, 64 and 128 of k_nope, k_pe and v and got {(nope, rope, value)}"
    kinds = {str(jnp.dtype(dtype)) for dtype in dtypes}
    return None if kinds == {"bfloat16"} else f"needs bfloat16 and got {', '.join(sorted(kinds))}"
