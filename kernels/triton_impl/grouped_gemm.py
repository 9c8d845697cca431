"""The grouped GEMM in Triton: how its tiles are chosen, and a kernel for any GPU; grouped_hopper.py has the one for Hopper."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dsv3_jax.kernels import dispatch, tiles
from dsv3_jax.kernels.triton_impl import launch


def grouped_gemm(
    x, w, group_sizes, x_scale, w_scale, out_dtype, *, more: tuple = (), zero_rest: bool, mean_rows: int | None = None,
    config: dict | None = None,
):  # fmt: skip
    """The contract of kernels/grouped_gemm.py.

    zero_rest: whether to write the rows in no group. mean_rows: rows of a group to expect, M / G if not given. config overrides
    entries of what `choose` chooses.
    """
    (m, k), g = x.shape, w.shape[0]
    hopper = dispatch.compute_capability() == 90 and (k * x.dtype.itemsize) % 16 == 0 and (k * w.dtype.itemsize) % 16 == 0
    kind = "bf16" if w_scale is None else "w8" if x_scale is None else "fp8"
    rows = mean_rows or max(1, m // g)
    chosen = choose(kind, rows, w.shape[1] * w.shape[2], k) if hopper else configure(kind, rows, hopper=False)
    chosen |= config or {}
    if hopper:
        from dsv3_jax.kernels.triton_impl import grouped_hopper

        return grouped_hopper.grouped_gemm(x, w, group_sizes, x_scale, w_scale, out_dtype, more, zero_rest, chosen)
    return _grouped_anywhere(x, w, group_sizes, x_scale, w_scale, out_dtype, more, zero_rest, chosen)


def choose(kind: str, rows: int, pn: int, k: int) -> dict:
    """Tiles on Hopper for groups of about `rows` rows and weights of pn rows by k columns: measured, or else likely."""
    return tiles.lookup("grouped_gemm", rows, pn, k, kind, default=configure(kind, rows))


def configure(kind: str, rows: int, *, hopper: bool = True) -> dict:
    """Tiles for groups of about `rows` rows; kind is 'bf16', 'fp8' or 'w8' (FP8 weights and bf16 rows).

    Measured on an H200. Few rows: the time is that of reading w, so that w's rows fill the tile and many stages are in flight. From
    17 rows on every tile of x that is read should meet 256 rows of w, or the way from L2 becomes the bound. The tallest tile is for
    groups of many such tiles only: uneven groups leave half a tile empty, each.
    """
    if not hopper:
        return {"BM": min(64, max(16, triton.next_power_of_2(rows))), "BN": 64 if rows <= 16 else 128, "BK": 64 if kind == "bf16" else 128}
    if rows <= 64 or kind == "w8":
        bm = 8 if kind == "bf16" and rows <= 2 else min(128, max(16, triton.next_power_of_2(rows)))
        if bm <= 16:
            return _tile(bm, 128, 9 if kind == "w8" else 11, swap=True, consumers=2)
        return _tile(bm, 128 if bm == 128 else 256, 4 if kind == "w8" else 5, swap=True, consumers=2)
    if kind == "bf16":
        return _tile(128, 256, 4, swap=False, consumers=2)
    return _tile(256, 128, 4, swap=False, consumers=2, parts=2) if rows > 1024 else _tile(128, 128, 6, swap=False, consumers=2)


def _tile(bm: int, bn: int, stages: int, *, swap: bool, consumers: int, parts: int = 1) -> dict:
    return {"BM": bm, "BN": bn, "STAGES": stages, "SWAP": swap, "CONSUMERS": consumers, "PARTS": parts, "COALESCE": bm > 16}


@triton.jit
def _tile_of(t, sizes, G: tl.constexpr, GP: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr):
    """Tile t: its group (G behind the last), its first row, the group's end, and its column of tiles."""
    i = tl.arange(0, GP)
    size = tl.load(sizes + i, mask=i < G, other=0)
    tile_end, row_end = tl.cumsum((size + BM - 1) // BM, 0), tl.cumsum(size, 0)
    before = (tile_end * COLS <= t) & (i < G)
    g = tl.sum(before.to(tl.int32), 0)
    first_row = tl.max(tl.where(before, row_end, 0), 0)
    end = tl.min(tl.where(before | (i >= G), 0x7FFFFFFF, row_end), 0)
    return g, first_row, end, t - tl.max(tl.where(before, tile_end, 0), 0) * COLS


@triton.jit
def _grouped(
    x, w, sizes, x_scale, w_scale, more, more_scale, M, out,
    FIRST: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, PN: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr, DEQUANT: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    COLS: tl.constexpr = (PN + BN - 1) // BN
    g, first_row, end, t = _tile_of(tl.program_id(0), sizes, G, GP, COLS, BM)
    end = tl.minimum(end, M)
    live = g < G
    rows = first_row + (t // COLS) * BM + tl.arange(0, BM)
    cols = (t % COLS) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    if live:
        x_at = x + rows.to(tl.int64)[:, None] * K + depth[None, :]
        behind = g >= FIRST  # of `more`, behind the FIRST groups of w
        w_at = tl.where(behind, more, w) + (tl.where(behind, g - FIRST, g).to(tl.int64) * PN + cols)[None, :] * K + depth[:, None]
        seen, there = (rows < end)[:, None], (cols < PN)[None, :]
        KS: tl.constexpr = (K + 127) // 128
        w_s_at = tl.where(behind, more_scale, w_scale) + (tl.where(behind, g - FIRST, g) * ((PN + 127) // 128) + cols // 128) * KS
        for k in range(0, K, BK):
            a = tl.load(x_at + k, mask=seen & (depth + k < K)[None, :], other=0.0)
            b = tl.load(w_at + k, mask=there & (depth + k < K)[:, None], other=0.0)
            if SCALED:
                s = tl.load(w_s_at + k // 128, mask=cols < PN, other=0.0)[None, :]
                if DEQUANT:
                    acc += tl.dot(a, b.to(a.dtype)) * s
                else:
                    acc += tl.dot(a, b) * s * tl.load(x_scale + rows * KS + k // 128, mask=rows < end, other=0.0)[:, None]
            else:
                acc = tl.dot(a, b, acc)
    if live | ZERO:
        at = out + rows.to(tl.int64)[:, None] * PN + cols[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=(rows < end)[:, None] & (cols < PN)[None, :])


def _grouped_anywhere(x, w, group_sizes, x_scale, w_scale, out_dtype, more: tuple, zero_rest: bool, config: dict):
    (m, k), (first, p, n, _), g = x.shape, w.shape, len(group_sizes)
    no_scale = group_sizes
    bm, bn = config["BM"], config["BN"]
    programs = min(m, m // bm + min(g, m) + 1) * -(-p * n // bn)
    return launch.call(
        _grouped, x, w, group_sizes, no_scale if x_scale is None else x_scale, no_scale if w_scale is None else w_scale,
        more[0] if more else w, no_scale if w_scale is None else more[1] if more else w_scale, m,
        out_type=jax.ShapeDtypeStruct((m, p * n), jnp.dtype(out_dtype)), grid=(programs,), num_warps=4, num_stages=3,
        FIRST=first, G=g, GP=triton.next_power_of_2(g), PN=p * n, K=k, BM=bm, BN=bn, BK=config["BK"], SCALED=w_scale is not None,
        DEQUANT=w_scale is not None and x_scale is None, ZERO=zero_rest,
    )  # fmt: skip
