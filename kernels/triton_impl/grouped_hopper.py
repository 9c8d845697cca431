"""The grouped GEMM for Hopper, in Gluon: a persistent grid, one warp that loads tiles by TMA, one or two warpgroups that multiply.

Every program finds its tiles from group_sizes by itself, so that no launch and no host stands between routing and the experts.
G groups, PN = P * N rows of each group's weight, K columns; a tile is BM rows of x by BN rows of w.
"""

from __future__ import annotations

import jax
from jax_triton import TensorDescriptor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from dsv3_jax.kernels.triton_impl import launch

SHARED = 227 * 1024  # bytes of shared memory that one program may have
WALK = gl.constexpr(16)  # row tiles that walk the columns together, so that both operands stay in L2


@gluon.jit
def _plan(sizes, G: gl.constexpr, GP: gl.constexpr, BM: gl.constexpr):
    """Per group, the row tiles and the rows up to its end."""
    layout: gl.constexpr = gl.BlockedLayout([GP // 32], [32], [gl.num_warps()], [0])
    i = gl.arange(0, GP, layout=layout)
    size = gl.load(sizes + i, mask=i < G, other=0)
    return gl.cumsum((size + BM - 1) // BM, 0), gl.cumsum(size, 0)


@gluon.jit
def _locate(t, tile_end, row_end, PN: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Tile t: its group, first row, the group's end, and first column."""
    COLS: gl.constexpr = (PN + BN - 1) // BN
    before = tile_end * COLS <= t
    g = gl.sum(before.to(gl.int32), 0)
    first_tile = gl.max(gl.where(before, tile_end, 0), 0)
    first_row = gl.max(gl.where(before, row_end, 0), 0)
    end = gl.min(gl.where(before, 0x7FFFFFFF, row_end), 0)
    t -= first_tile * COLS
    high = (end - first_row + BM - 1) // BM
    low = t // (WALK * COLS) * WALK
    t -= low * COLS
    height = gl.minimum(high - low, WALK)
    return g, first_row + (low + t % height) * BM, end, t // height * BN


@gluon.jit
def _load(x_desc, w_desc, x_tile, w_tile, full, empty, sizes, c):
    tile_end, row_end = _plan(sizes, c.G, c.GP, c.BM)
    total = gl.max(tile_end, 0) * ((c.PN + c.BN - 1) // c.BN)
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        g, row, _, col = _locate(t, tile_end, row_end, c.PN, c.BM, c.BN)
        w_row = g * c.PN + col
        for k in range(c.KB):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), x_desc.nbytes_per_cta + w_desc.nbytes_per_cta)
            tma.async_load(w_desc, [w_row, k * c.BK], full.index(stage), w_tile.index(stage))
            tma.async_load(x_desc, [row, k * c.BK], full.index(stage), x_tile.index(stage))
            stage += 1
            phase = gl.where(stage == c.STAGES, phase ^ 1, phase)
            stage = gl.where(stage == c.STAGES, 0, stage)
