"""The router's decision: which experts a token goes to, and with what weights.

M tokens, E experts, K num_experts_per_tok.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv3_jax.kernels import dispatch

LARGEST_TILE = 4096  # the kernel holds a token's scores in one warp's registers: groups times group width, each rounded up


def route(
    logits: jax.Array,
    bias: jax.Array | None,
    *,
    num_experts_per_tok: int,
    n_group: int,
    topk_group: int,
    scoring_func: str,
    topk_method: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Choose experts: logits (M, E) float32 and the correction bias (E,) or None -> topk_ids (M, K) int32, topk_weights (M, K) float32.

    The bias and the groups decide which experts are taken; the weights come from the scores without the bias. The best expert comes
    first, and of equal ones the one with the lower index; a row with NaN gets experts that exist. The keywords are config.json's.
    Triton: any router whose scores fit one warp's registers; a larger one runs on XLA unless 'triton' is named, which then raises
    ValueError. Its scores may differ from XLA's in the last bit, so experts that are equal to within that may come in another order.
    Source: DeepSeek-V3 report, section 2.1.2; DeepSeek-V2 report, section 2.2.
    """
    m, e = logits.shape
    grouped = topk_method != "greedy" and n_group > 1
    tile = tile_of(e, n_group if grouped else 1)
    too_large = tile[0] * tile[1] > LARGEST_TILE
    if too_large and implementation == "triton":
        found = f"{e} experts in tiles of {tile[0]} x {tile[1]}"
        raise ValueError(f"implementation = 'triton': route holds at most {LARGEST_TILE} scores, not {found}; use 'xla' or None")
    if dispatch.choose("route", "xla" if too_large or not m else implementation) == "triton":
        from dsv3_jax.kernels.triton_impl import route as kernel

        groups = (n_group, topk_group) if grouped else (1, 1)
        return kernel.route(logits, bias, num_experts_per_tok, *groups, scoring_func, norm_topk_prob, routed_scaling_factor)
    scores = jax.nn.softmax(logits, axis=-1) if scoring_func == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if grouped:
        groups = choice.reshape(m, n_group, e // n_group)
        rank = groups.max(-1) if bias is None else jax.lax.top_k(groups, 2)[0].sum(-1)  # (M, n_group)
        live = jax.nn.one_hot(jax.lax.top_k(rank, topk_group)[1], n_group, dtype=jnp.bool_).any(1)
        choice = jnp.where(live[..., None], groups, -jnp.inf).reshape(m, e)
    topk_ids = jax.lax.top_k(choice, num_experts_per_tok)[1]
    weights = jnp.take_along_axis(scores, topk_ids, axis=-1)
    if norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return topk_ids, weights * routed_scaling_factor


def tile_of(experts: int, groups: int) -> tuple[int, int]:
    """Rows and columns of the tile of one token's scores: powers of two, a group a row, or rows of 32 where there are no groups."""

    def up(n: int) -> int:
        return 1 << (n - 1).bit_length()

    return (up(groups), max(32, up(experts // groups))) if groups > 1 else (up(-(-experts // 32)), 32)
