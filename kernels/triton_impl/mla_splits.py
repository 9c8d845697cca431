"""Before and after mla_decode's kernel: cutting the rows into tiles of nearly equal work, and putting split rows together again.

B rows, S cache slots, H heads. A tile is a stretch of one row, counted in pairs of blocks of 64 slots.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# A kernel's text is Triton, not Python: pyright cannot know its types.
from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dsv3_jax.kernels.triton_impl import launch


def plan(lengths: jax.Array, slots: int, shares: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cut rows of lengths (B,) int32 so that `shares` tiles at a time are worked on; see _plan for the three tables.

    All layers of a step share one plan: they ask for the same, so XLA computes it once.
    """
    batch = lengths.shape[0]
    tiles = min(batch + shares, batch * triton.cdiv(slots, 128))
    numbers = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return launch.call(
        _plan,
        lengths,
        batch,
        slots,
        out_type=(jax.ShapeDtypeStruct((tiles, 8), jnp.int32), numbers, numbers),
        grid=(1,),
        SHARES=shares,
        TILES=tiles,
        ROWS=max(32, triton.next_power_of_2(batch)),
    )


def combine(firsts: jax.Array, counts: jax.Array, partial: jax.Array, lse: jax.Array, out: jax.Array, most: int) -> jax.Array:
    """Complete out (B, H, W) in place from partial (tiles, H, W) and lse (tiles, H), float32; most: the most tiles that a row can have."""
    batch, heads, width = out.shape
    cols = 128 if batch * heads <= 512 else width  # few rows: more programs for each
    per_program = max(1, batch * heads // 2048)
    return launch.call(
        _combine,
        firsts,
        counts,
        partial,
        lse,
        out,
        out_type=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={4: 0},
        grid=(batch, triton.cdiv(heads, per_program), width // cols),
        H=heads,
        HEADS=per_program,
        SPLITS=8192 // cols,
        COLS=cols,
        MOST=triton.next_power_of_2(most),
    )


@triton.jit
def _plan(lengths, batch, slots, plan, firsts, counts, SHARES: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr):
    """Cut the rows into tiles of nearly equal work, those of the largest first, in one program.

    plan (TILES, 8): tile, row, splits of the row, first pair of blocks, pairs (0: no work), valid slots from there on, 0, 0.
    firsts and counts (B,): each row's first tile and number of tiles. All layers of a step share one plan: XLA sees equal calls.
    """
    row = tl.arange(0, ROWS)
    length = tl.minimum(tl.load(lengths + row, mask=row < batch, other=0), slots)
    pairs = tl.cdiv(length, 128)
    even = tl.maximum(tl.cdiv(tl.sum(pairs, 0), SHARES), 1)
    chunk = even
    for k in tl.static_range(8, -1, -1):  # one wave of slightly longer tiles beats two
        longer = even + k * even // 32 + (k > 0)
        chunk = tl.where(tl.sum(tl.cdiv(pairs, longer), 0) <= SHARES, longer, chunk)
    count = tl.cdiv(pairs, chunk)
    divisor = tl.maximum(count, 1)
    size = tl.cdiv(pairs, divisor)
    first = tl.cumsum(count, 0) - count
    tl.store(firsts + row, first, mask=row < batch)
    tl.store(counts + row, count, mask=row < batch)
    start = tl.zeros((ROWS,), tl.int32)  # where a row's tiles begin in the order of work
    for others in range(0, batch, 16):
        other = others + tl.arange(0, 16)
        other_pairs = tl.cdiv(tl.minimum(tl.load(lengths + other, mask=other < batch, other=0), slots), 128)
        other_count = tl.cdiv(other_pairs, chunk)
        other_size = tl.cdiv(other_pairs, tl.maximum(other_count, 1))
        tied = (other_size[None, :] == size[:, None]) & (other[None, :] < row[:, None])
        start += tl.sum(tl.where((other_size[None, :] > size[:, None]) | tied, other_count[None, :], 0), 1)
    for place in range(0, TILES, ROWS):
        tl.store(plan + (place + row) * 8 + 4, 0, mask=(place + row >= tl.sum(count, 0)) & (place + row < TILES))
    for split in range(0, tl.max(count, 0)):
        begin, end = split * pairs // divisor, (split + 1) * pairs // divisor
        to, here = plan + (start + split) * 8, split < count
        tl.store(to, first + split, mask=here)
        tl.store(to + 1, row, mask=here)
        tl.store(to + 2, count, mask=here)
        tl.store(to + 3, begin, mask=here)
        tl.store(to + 4, end - begin, mask=here)
        tl.store(to + 5, length - begin * 128, mask=here)


@triton.jit
def _combine(firsts, counts, partial, lse, out, H: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, COLS: tl.constexpr,
             MOST: tl.constexpr):
    """Weigh the splits of HEADS heads of one row by their share of the softmax; rows with one split are complete already."""
    row = tl.program_id(0)
    first, count = tl.load(firsts + row), tl.load(counts + row)
    if count == 1:
        return
    cols, split, every = tl.program_id(2) * COLS + tl.arange(0, COLS), tl.arange(0, SPLITS), tl.arange(0, MOST)
    for h in range(tl.program_id(1) * HEADS, min((tl.program_id(1) + 1) * HEADS, H)):
        sums = tl.load(lse + (first + every) * H + h, mask=every < count, other=float("-inf"))
        top = tl.max(sums, 0)
        total = tl.sum(tl.exp2(sums - top), 0)
        acc = tl.zeros((COLS,), tl.float32)
        for start in range(0, count, SPLITS):
            here = start + split < count
            at = (first + start + split) * H + h
            weight = tl.exp2(tl.load(lse + at, mask=here, other=float("-inf")) - top)
            acc += tl.sum(weight[:, None] * tl.load(partial + at[:, None] * 512 + cols[None, :], mask=here[:, None], other=0.0), 0)
        tl.store(out + (row * H + h) * 512 + cols, tl.where(count > 0, acc / total, 0.0).to(out.dtype.element_ty))
