"""Sorting a decode step's pairs by expert in one launch: every pair counts the pairs that come before it.

No program waits for another and nothing is added atomically, so the result is the stable order, the same in every run.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dsv3_jax.kernels.triton_impl import launch


@triton.jit
def _expert(ids, valid, first, i, N: tl.constexpr, K: tl.constexpr, HERE: tl.constexpr):
    """The local expert of pair i, HERE for those of others."""
    local = tl.load(ids + i, mask=i < N, other=-1) - first
    mine = (local >= 0) & (local < HERE) & (tl.load(valid + i // K, mask=i < N, other=0) != 0)
    return tl.where(mine, local, HERE)


@triton.jit
def _sort(
    ids, valid, first, order, inverse, sizes,
    N: tl.constexpr, K: tl.constexpr, HERE: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """The first programs place OWN pairs each, the others count the pairs of OWN experts each."""
    begin = tl.load(first)
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    PAIR_PROGRAMS: tl.constexpr = (N + OWN - 1) // OWN
    if tl.program_id(0) < PAIR_PROGRAMS:
        key = _expert(ids, valid, begin, own, N, K, HERE) * N + own
        place = tl.zeros((OWN,), tl.int32)
        for start in range(0, N, OTHERS):
            j = start + tl.arange(0, OTHERS)
            other = tl.where(j < N, _expert(ids, valid, begin, j, N, K, HERE) * N + j, 0x7FFFFFFF)
            place += tl.sum((other[None, :] < key[:, None]).to(tl.int32), 1)
        tl.store(inverse + own, place, mask=own < N)
        tl.store(order + place, own, mask=own < N)
    else:
        own -= PAIR_PROGRAMS * OWN
        count = tl.zeros((OWN,), tl.int32)
        for start in range(0, N, OTHERS):
            j = start + tl.arange(0, OTHERS)
            other = tl.where(j < N, _expert(ids, valid, begin, j, N, K, HERE), -1)
            count += tl.sum((other[None, :] == own[:, None]).to(tl.int32), 1)
        tl.store(sizes + own, count, mask=own < HERE)


def sort_by_expert(topk_ids: jax.Array, valid: jax.Array, first: jax.Array, here: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The contract of kernels/moe_sort.py."""
    n, k = topk_ids.size, topk_ids.shape[1]
    own, others = 16, min(256, max(32, triton.next_power_of_2(n)))
    order, inverse, sizes = launch.call(
        _sort,
        topk_ids,
        valid,
        first,
        out_type=tuple(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (n, n, here)),
        grid=(triton.cdiv(n, own) + triton.cdiv(here, own),),
        num_warps=4,
        N=n,
        K=k,
        HERE=here,
        OWN=own,
        OTHERS=others,
    )
    return order, inverse, sizes
