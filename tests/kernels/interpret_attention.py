"""Runs the plain-Triton kernels around mla_decode in the interpreter, for test_triton_attention.py."""

from __future__ import annotations

import numpy as np

from dsv3_jax.kernels.triton_impl import mla_splits as kernels
from tests.kernels.interpreter import Tensor


def check_plan(batch: int, slots: int, shares: int) -> None:
    """Every pair of blocks of every row lies in exactly one tile, the tiles are even, the largest come first."""
    lengths = np.random.default_rng(batch).integers(0, slots + 1, batch).astype(np.int32)
    lengths[0] = slots
    pairs = -(-lengths // 128)
    tiles = min(batch + shares, batch * -(-slots // 128))
    plan = np.full((tiles, 8), -7, np.int32)
    firsts, counts = np.full(batch, -7, np.int32), np.full(batch, -7, np.int32)
    rows = max(32, 1 << (batch - 1).bit_length())
    args = (Tensor(lengths), batch, slots, Tensor(plan), Tensor(firsts), Tensor(counts))
    kernels._plan[(1,)](*args, SHARES=shares, TILES=tiles, ROWS=rows)
    sizes = plan[:, 4]
    assert sizes.min() >= 0 and (np.diff(sizes) <= 1).all(), "within a row the sizes differ by one"
    assert sizes[0] <= 1.6 * pairs.sum() / shares + 1, (sizes[0], pairs.sum() / shares)
    assert counts.max() <= shares
    for b in range(batch):
        mine = sorted(tuple(int(x) for x in t) for t in plan if t[4] and t[1] == b)
        assert [t[0] for t in mine] == list(range(firsts[b], firsts[b] + counts[b]))
        at = 0
        for _, _, splits, first, size, left, _, _ in mine:
            assert (splits, first, left) == (counts[b], at, lengths[b] - at * 128)
            at += size
        assert at == pairs[b]


def check_combine() -> None:
    """Splits are weighed by their share; a row of one split is left alone, a row of none is zero."""
    rng = np.random.default_rng(0)
    counts, heads = np.array([5, 1, 0, 3], np.int32), 3
    firsts = (np.cumsum(counts) - counts).astype(np.int32)
    partial, lse = rng.normal(size=(9, heads, 512)).astype(np.float32), (3 * rng.normal(size=(9, heads))).astype(np.float32)
    out = np.full((4, heads, 512), 7, np.float32)
    arrays = [Tensor(x) for x in (firsts, counts, partial, lse, out)]
    kernels._combine[(4, 2, 2)](*arrays, H=heads, HEADS=2, SPLITS=4, COLS=256, MOST=8)
    for row in (0, 3):
        mine = slice(firsts[row], firsts[row] + counts[row])
        weights = np.exp2(lse[mine].astype(np.float64))
        want = (partial[mine] * (weights / weights.sum(0))[..., None]).sum(0)
        assert np.abs(out[row] - want).max() < 1e-5
    assert (out[1] == 7).all() and (out[2] == 0).all()


if __name__ == "__main__":
    for case in [(16, 1008, 66), (48, 4096, 66), (1, 4096, 66), (5, 32768, 132), (20, 700, 3), (3, 9000, 66)]:
        check_plan(*case)
    check_combine()
    print("all checked")
