"""Routing in one launch: one warp per token, its scores in registers from the load of the logits to the store of the K winners.

A row of the score tile is a group (or any 32 experts where there are no groups) and lies across the warp's lanes. So what goes over
rows costs no communication, and what goes over columns is a reduction of 32-bit integers over a whole warp: one instruction
(redux.sync). Hence scores are compared as integers that sort as they do. Shared memory and barriers are not used.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dsv3_jax.kernels.route import tile_of
from dsv3_jax.kernels.triton_impl import launch

_NEVER = tl.constexpr(-0x80000000)  # the key of what does not exist or is taken: below that of every float
_DROPPED = tl.constexpr(-0x7F800001)  # the key of -inf, which the reference gives to experts of dropped groups
_NAN = tl.constexpr(0x7FFFFFFF)  # above the key of every float, as in jax.lax.top_k
_LOG2E = tl.constexpr(1.4426950216293335)  # of float32, and what it lacks
_LOG2E_REST = tl.constexpr(1.925963033500e-8)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _exp(x):
    """e**x to a few units in the last place: the hardware's 2**y, corrected for the rounding of y, for which it has to be finite."""
    x = tl.minimum(tl.maximum(x, -150.0, propagate_nan=tl.PropagateNan.ALL), 88.0, propagate_nan=tl.PropagateNan.ALL)
    y = x * _LOG2E
    log2e = tl.full(x.shape, _LOG2E, tl.float32)
    rest = tl.fma(x, log2e, -y) + x * _LOG2E_REST
    power = tl.exp2(y)
    return tl.fma(power, rest * _LN2, power)


@triton.jit
def _key(x):
    """int32 that sorts as the float32 x does."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, _NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _float(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _max(x):
    """Rows first, in registers; then one reduction over the lanes."""
    return tl.max(tl.max(x, 0), 0)


@triton.jit
def _score(x, peak, total, SOFTMAX: tl.constexpr):
    """The score of logits x, where a softmax has its largest logit and the sum of its powers already."""
    return _exp(x - peak) / total if SOFTMAX else 1.0 / (1.0 + _exp(-x))


@triton.jit
def _live(key, row, BIAS: tl.constexpr, GROUPS: tl.constexpr, LIVE: tl.constexpr):
    """Which rows (ROWS, 1) are the best LIVE of GROUPS groups, by their best expert or, with a bias, by the sum of their best two."""
    best = tl.max(key, 1, keep_dims=True)
    rank = best
    if BIAS:
        top = key == best
        alone = tl.sum(top.to(tl.int32), 1, keep_dims=True) == 1
        second = tl.where(alone, tl.max(tl.where(top, _NEVER, key), 1, keep_dims=True), best)
        rank = _key(_float(best) + _float(second))
    rank = tl.where(row < GROUPS, rank, _NEVER)
    live = row < 0
    for _ in range(LIVE):
        winner = row == tl.min(tl.where(rank == tl.max(rank, 0, keep_dims=True), row, 0x7FFFFFFF), 0, keep_dims=True)
        live = live | winner
        rank = tl.where(winner, _NEVER, rank)
    return live


@triton.jit
def _route(
    logits, bias, picks, ids, weights,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, LIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PLACES: tl.constexpr, SOFTMAX: tl.constexpr, BIAS: tl.constexpr, NORMALISE: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """picks is K, unknown to the compiler so that it leaves the loop rolled; PLACES is a power of two, at least K."""
    WIDTH: tl.constexpr = E // GROUPS if GROUPS > 1 else COLUMNS
    token = tl.program_id(0)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    index = row * WIDTH + column
    exists = (column < WIDTH) & (index < E)
    # Addresses said not to be contiguous are loaded one column a lane; else each lane would take four columns of a row.
    x = tl.load(tl.max_contiguous(logits + token * E + index, [1, 1]), mask=exists, other=float("-inf"))
    peak, total = 0.0, 1.0
    if SOFTMAX:
        peak = _max(x)
        total = tl.sum(tl.sum(_exp(x - peak), 0), 0)
    choice = _score(x, peak, total, SOFTMAX)
    if BIAS:
        choice += tl.load(tl.max_contiguous(bias + index, [1, 1]), mask=exists, other=0.0)
    key = tl.where(exists, _key(choice), _NEVER)
    if GROUPS > 1:
        key = tl.where(_live(key, row, BIAS, GROUPS, LIVE) | ~exists, key, _DROPPED)

    at = tl.arange(0, PLACES)
    topk_ids = tl.zeros((PLACES,), tl.int32)
    for k in range(picks):  # unrolled, it would be 16 KB of code that each SM has to fetch before it runs once
        winner = tl.min(tl.min(tl.where(key == _max(key), index, 0x7FFFFFFF), 0), 0)
        topk_ids = tl.where(at == k, winner, topk_ids)
        key = tl.where(index == winner, _NEVER, key)
    # The winners' scores once more, from logits that are in the L1 cache by now: the loop has less to carry.
    chosen = tl.load(logits + token * E + topk_ids, mask=(at < K) & (topk_ids < E), other=0.0)
    topk_weights = tl.where(at < K, _score(chosen, peak, total, SOFTMAX), 0.0)
    if NORMALISE:
        topk_weights = topk_weights / (tl.sum(topk_weights, 0) + 1e-20)
    tl.store(ids + token * K + at, topk_ids, mask=at < K)
    tl.store(weights + token * K + at, topk_weights * FACTOR, mask=at < K)


def route(
    logits: jax.Array, bias: jax.Array | None, k: int, groups: int, live: int, scoring_func: str, normalise: bool, factor: float
) -> tuple[jax.Array, jax.Array]:
    """The contract of kernels/route.py; groups is 1 where the choice is not limited by groups."""
    m, e = logits.shape
    topk_ids, topk_weights = launch.call(
        _route,
        logits,
        logits if bias is None else bias,
        k,
        out_type=(jax.ShapeDtypeStruct((m, k), jnp.int32), jax.ShapeDtypeStruct((m, k), jnp.float32)),
        grid=(m,),
        num_warps=1,
        **constants(e, k, groups, live, scoring_func, bias is not None, normalise, factor),
    )
    return topk_ids, topk_weights


def constants(e: int, k: int, groups: int, live: int, scoring_func: str, bias: bool, normalise: bool, factor: float) -> dict:
    """The kernel's constexpr arguments."""
    rows, columns = tile_of(e, groups)
    shape = {"E": e, "K": k, "GROUPS": groups, "LIVE": live, "ROWS": rows, "COLUMNS": columns, "PLACES": triton.next_power_of_2(k)}
    return shape | {"SOFTMAX": scoring_func == "softmax", "BIAS": bias, "NORMALISE": normalise, "FACTOR": float(factor)}
