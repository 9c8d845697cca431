"""The order in which experts see their rows: (token, expert) pairs sorted by expert, and the way back.

M tokens, K experts for each, H experts of this device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv3_jax.kernels import dispatch

LARGEST = 8192  # pairs: the kernel compares each with all, so that beyond it a real sort is faster, and runs unless the kernel is named


def sort_by_expert(
    topk_ids: jax.Array, valid: jax.Array, first: jax.Array | int, here: int, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort pairs by expert, in the order of the tokens within an expert; pairs of other devices and of padding come last.

    topk_ids (M, K) int32; valid (M,) bool; this device has the experts [first, first + here). Returns order (M*K,), the pair at
    each sorted place; inverse (M*K,), the place of each pair; group_sizes (here,), the pairs of each expert; all int32.
    """
    pairs = topk_ids.size
    if not pairs or (implementation is None and pairs > LARGEST):
        implementation = "xla"
    if dispatch.choose("sort_by_expert", implementation) == "triton":
        from dsv3_jax.kernels.triton_impl import moe_sort

        return moe_sort.sort_by_expert(topk_ids, valid, jnp.asarray(first, jnp.int32), here)
    local = topk_ids - first
    mine = (local >= 0) & (local < here) & valid[:, None]
    expert = jnp.where(mine, local, here).reshape(-1)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    inverse = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    return order, inverse, jnp.bincount(expert, length=here + 1)[:here].astype(jnp.int32)
