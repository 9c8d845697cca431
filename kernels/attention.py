"""Causal attention over a cache whose rows have lengths of their own.

B rows, T new tokens, S cache slots, H query heads, G key heads (1 or H), C key width, W value width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv3_jax.kernels import dispatch


def attend(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, scale: float, *, implementation: str | None = None) -> jax.Array:
    """Attend from each new token to the cache slots at or before its position.

    q (B, T, H, C), k (B, S, G, C), v (B, S, G, W), positions (B, T) int32. Scores and softmax in float32, the weighted sum in v's
    dtype with float32 accumulation. Returns (B, T, H, W) of q's dtype. G = 1 is absorbed MLA: all heads share the latent.
    """
    dispatch.choose("attend", implementation)
    b, t, h, c = q.shape
    s, g = k.shape[1:3]
    q = q.reshape(b, t, g, h // g, c)
    scores = jnp.einsum("btghc,bsgc->bghts", q, k, preferred_element_type=jnp.float32) * scale
    seen = jnp.arange(s) <= positions[:, None, None, :, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v.dtype)
    out = jnp.einsum("bghts,bsgw->btghw", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(b, t, h, -1).astype(q.dtype)
