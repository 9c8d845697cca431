"""The grouped GEMM for Hopper, in Gluon: a persistent grid, one warp that loads tiles by TMA, one or two warpgroups that multiply.

Every program finds its tiles from group_sizes by itself, so that neither a launch nor the host stands between routing and the
experts. G groups, PN = P * N rows of each group's weight, K columns; a tile is BM rows of x by BN rows of w. With few rows in a
group the product is turned round (SWAP): w's rows are then wgmma's M, which is 64 at least, and x's rows its N, 8 at least.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax_triton import TensorDescriptor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from dsv3_jax.kernels.triton_impl import launch

PROGRAMS = 132  # one for each multiprocessor
WALK = gl.constexpr(16)  # row tiles that walk the columns together, so that both operands stay in L2
NEVER = gl.constexpr(0x7FFFFFFF)


@gluon.aggregate
class _Shape:
    """What the kernel is compiled for."""

    G: gl.constexpr
    GP: gl.constexpr  # G rounded up to a power of two, 32 at least
    PN: gl.constexpr
    K: gl.constexpr
    BM: gl.constexpr
    BN: gl.constexpr
    BK: gl.constexpr
    STAGES: gl.constexpr
    SWAP: gl.constexpr
    SCALED: gl.constexpr  # FP8 codes with block scales
    CONSUMERS: gl.constexpr
    PARTS: gl.constexpr  # products that a consumer computes one after the other in each step, to need fewer registers
    ZERO: gl.constexpr  # write zeros to the rows in no group
    COALESCE: gl.constexpr  # bring results into row order before they are stored


@gluon.jit
def _plan(sizes, c):
    """Per group: the row tiles, and the rows, up to its end."""
    layout: gl.constexpr = gl.BlockedLayout([c.GP // 32], [32], [gl.num_warps()], [0])
    i = gl.arange(0, c.GP, layout=layout)
    size = gl.load(sizes + i, mask=i < c.G, other=0)
    return gl.cumsum((size + c.BM - 1) // c.BM, 0), gl.cumsum(size, 0)


@gluon.jit
def _locate(t, tile_end, row_end, c):
    """Tile t: its group, its first row, the group's end, and its first column."""
    COLS: gl.constexpr = (c.PN + c.BN - 1) // c.BN
    before = tile_end * COLS <= t
    g = gl.sum(before.to(gl.int32), 0)
    first_tile = gl.max(gl.where(before, tile_end, 0), 0)
    first_row = gl.max(gl.where(before, row_end, 0), 0)
    end = gl.min(gl.where(before, NEVER, row_end), 0)
    t -= first_tile * COLS
    low = t // (WALK * COLS) * WALK
    t -= low * COLS
    height = gl.minimum((end - first_row + c.BM - 1) // c.BM - low, WALK)
    return g, first_row + (low + t % height) * c.BM, end, t // height * c.BN


@gluon.jit
def _advance(stage, phase, c):
    stage += 1
    return gl.where(stage == c.STAGES, 0, stage), gl.where(stage == c.STAGES, phase ^ 1, phase)


@gluon.jit
def _load(x_desc, w_desc, x_tile, w_tile, full, empty, sizes, c):
    tile_end, row_end = _plan(sizes, c)
    total = gl.max(tile_end, 0) * ((c.PN + c.BN - 1) // c.BN)
    stage, phase = 0, 1
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        g, row, _, col = _locate(t, tile_end, row_end, c)
        for k in range((c.K + c.BK - 1) // c.BK):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), x_desc.nbytes_per_cta + w_desc.nbytes_per_cta)
            tma.async_load(w_desc, [g * c.PN + col, k * c.BK], full.index(stage), w_tile.index(stage))
            tma.async_load(x_desc, [row, k * c.BK], full.index(stage), x_tile.index(stage))
            stage, phase = _advance(stage, phase, c)


@gluon.jit
def _store(out, value, row, end, col, LAYOUT: gl.constexpr, c):
    """Store value, whose dims are (columns, rows) with SWAP and (rows, columns) otherwise."""
    if c.SWAP:
        value = value.permute((1, 0))
    ROWS: gl.constexpr = value.shape[0]
    COLS: gl.constexpr = value.shape[1]
    if c.COALESCE:
        WIDE: gl.constexpr = 16 * 8 // out.dtype.element_ty.primitive_bitwidth
        LANES: gl.constexpr = COLS // WIDE if COLS // WIDE < 32 else 32
        to: gl.constexpr = gl.BlockedLayout([1, WIDE], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
        value = gl.convert_layout(value, to)
    else:
        to: gl.constexpr = value.type.layout
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, to))
    cols = col + gl.arange(0, COLS, layout=gl.SliceLayout(0, to))
    at = out + rows.to(gl.int64)[:, None] * c.PN + cols[None, :]
    gl.store(at, value, mask=(rows < end)[:, None] & (cols < c.PN)[None, :])


@gluon.jit
def _scale_pointers(x_scale, w_scale, g, row, col, part, c, LAYOUT: gl.constexpr):
    """Where the scales of one part of a tile begin: x's per row, w's for its one block of 128 rows."""
    KB: gl.constexpr = (c.K + 127) // 128
    PER: gl.constexpr = (c.BN if c.SWAP else c.BM) // (c.CONSUMERS * c.PARTS)
    if c.SWAP:
        col += part * PER
        rows = row + gl.arange(0, c.BM, layout=gl.SliceLayout(0, LAYOUT))
    else:
        rows = row + part * PER + gl.arange(0, PER, layout=gl.SliceLayout(1, LAYOUT))
    return x_scale + rows * KB, rows, w_scale + (g * ((c.PN + 127) // 128) + col // 128) * KB


@gluon.jit
def _scaled(value, x_s, w_s, c):
    s = x_s * w_s
    return value * (s[None, :] if c.SWAP else s[:, None])


@gluon.jit
def _multiply(x_tile, w_tile, full, empty, sizes, x_scale, w_scale, out, M, WHO: gl.constexpr, c):
    PER: gl.constexpr = (c.BN if c.SWAP else c.BM) // (c.CONSUMERS * c.PARTS)  # rows of wgmma's M
    OTHER: gl.constexpr = c.BM if c.SWAP else c.BN
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OTHER, 32 if c.SCALED else 16])
    KB: gl.constexpr = (c.K + c.BK - 1) // c.BK
    FIRST: gl.constexpr = WHO * c.PARTS
    COLS: gl.constexpr = (c.PN + c.BN - 1) // c.BN
    tile_end, row_end = _plan(sizes, c)
    total = gl.max(tile_end, 0) * COLS
    a_tile = w_tile if c.SWAP else x_tile
    b_tile = x_tile if c.SWAP else w_tile
    zero = gl.zeros((PER, OTHER), gl.float32, layout=LAYOUT)
    stage, phase = 0, 0
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        g, row, end, col = _locate(t, tile_end, row_end, c)
        acc0 = gl.zeros((PER, OTHER), gl.float32, layout=LAYOUT)
        if c.SCALED:
            x_at0, rows0, w_at0 = _scale_pointers(x_scale, w_scale, g, row, col, FIRST, c, LAYOUT)
            x_next0, w_next0 = gl.load(x_at0, mask=rows0 < M, other=0.0), gl.load(w_at0)
            if c.PARTS == 2:
                acc1 = gl.zeros((PER, OTHER), gl.float32, layout=LAYOUT)
                x_at1, rows1, w_at1 = _scale_pointers(x_scale, w_scale, g, row, col, FIRST + 1, c, LAYOUT)
                x_next1, w_next1 = gl.load(x_at1, mask=rows1 < M, other=0.0), gl.load(w_at1)
            for k in range(KB):
                x_s0, w_s0 = x_next0, w_next0
                after = gl.minimum(k + 1, KB - 1)  # scales are fetched one step ahead
                x_next0, w_next0 = gl.load(x_at0 + after, mask=rows0 < M, other=0.0), gl.load(w_at0 + after)
                if c.PARTS == 2:
                    x_s1, w_s1 = x_next1, w_next1
                    x_next1, w_next1 = gl.load(x_at1 + after, mask=rows1 < M, other=0.0), gl.load(w_at1 + after)
                mbarrier.wait(full.index(stage), phase)
                a, b = a_tile.index(stage), b_tile.index(stage).permute((1, 0))
                part = warpgroup_mma(a.slice(FIRST * PER, PER), b, zero, use_acc=False, max_num_imprecise_acc=128, is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                if c.PARTS == 1:
                    mbarrier.arrive(empty.index(stage), count=1)
                acc0 += _scaled(part, x_s0, w_s0, c)
                if c.PARTS == 2:
                    a = a.slice((FIRST + 1) * PER, PER)
                    part = warpgroup_mma(a, b, zero, use_acc=False, max_num_imprecise_acc=128, is_async=True)
                    part = warpgroup_mma_wait(0, deps=(part,))
                    mbarrier.arrive(empty.index(stage), count=1)
                    acc1 += _scaled(part, x_s1, w_s1, c)
                stage, phase = _advance(stage, phase, c)
        else:
            last = stage
            for k in range(KB):
                mbarrier.wait(full.index(stage), phase)
                a, b = a_tile.index(stage).slice(FIRST * PER, PER), b_tile.index(stage).permute((1, 0))
                token = warpgroup_mma(a, b, acc0, is_async=True)
                acc0 = warpgroup_mma_wait(1, deps=(token,))  # the product before this one is done: its tiles are free
                mbarrier.arrive(empty.index(last), count=1, pred=k > 0)
                last = stage
                stage, phase = _advance(stage, phase, c)
            acc0 = warpgroup_mma_wait(0, deps=(acc0,))
            mbarrier.arrive(empty.index(last), count=1)
        TYPE: gl.constexpr = out.dtype.element_ty
        down, across = (0, FIRST * PER) if c.SWAP else (FIRST * PER, 0)
        _store(out, acc0.to(TYPE), row + down, end, col + across, LAYOUT, c)
        if c.SCALED and c.PARTS == 2:
            down, across = (0, PER) if c.SWAP else (PER, 0)
            _store(out, acc1.to(TYPE), row + FIRST * PER + down, end, col + across, LAYOUT, c)
    if c.ZERO and WHO == 0:
        _store_zeros(out, gl.max(row_end, 0), M, c)


@gluon.jit
def _store_zeros(out, used, M, c):
    """Programs share the rows behind the last group."""
    WIDTH: gl.constexpr = 1024
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    for i in range(used + gl.program_id(0), M, gl.num_programs(0)):
        for j in range((c.PN + WIDTH - 1) // WIDTH):
            cols = j * WIDTH + gl.arange(0, WIDTH, layout=LAYOUT)
            gl.store(out + i.to(gl.int64) * c.PN + cols, gl.zeros((WIDTH,), out.dtype.element_ty, LAYOUT), mask=cols < c.PN)


@gluon.jit
def _grouped(
    x_desc, w_desc, sizes, x_scale, w_scale, M, out,
    G: gl.constexpr, GP: gl.constexpr, PN: gl.constexpr, K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, SWAP: gl.constexpr, SCALED: gl.constexpr, CONSUMERS: gl.constexpr, PARTS: gl.constexpr,
    ZERO: gl.constexpr, COALESCE: gl.constexpr,
):  # fmt: skip
    c = _Shape(G, GP, PN, K, BM, BN, BK, STAGES, SWAP, SCALED, CONSUMERS, PARTS, ZERO, COALESCE)
    x_tile = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    w_tile = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_multiply, (x_tile, w_tile, full, empty, sizes, x_scale, w_scale, out, M, 0, c)),
            (_load, (x_desc, w_desc, x_tile, w_tile, full, empty, sizes, c)),
        ], [1], [64])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (x_tile, w_tile, full, empty, sizes, x_scale, w_scale, out, M, 0, c)),
            (_multiply, (x_tile, w_tile, full, empty, sizes, x_scale, w_scale, out, M, 1, c)),
            (_load, (x_desc, w_desc, x_tile, w_tile, full, empty, sizes, c)),
        ], [4, 1], [232, 40])  # fmt: skip


def grouped_gemm(x, w, group_sizes, x_scale, w_scale, out_dtype, zero_rest: bool, config: dict):
    """The contract of kernels/grouped_gemm.py for bf16 x bf16 and FP8 x FP8; config holds BM, BN, STAGES, SWAP, CONSUMERS, PARTS."""
    (m, k), (g, p, n, _) = x.shape, w.shape
    scaled = x_scale is not None
    bm, bn, bk = config["BM"], config["BN"], 128 // x.dtype.itemsize
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.dtype.itemsize, rank=2)
    row_tiles = min(m, m // bm + min(g, m))
    programs = min(config.get("PROGRAMS", PROGRAMS), row_tiles * -(-p * n // bn))
    return launch.call(
        _grouped,
        TensorDescriptor.from_array(x, [bm, bk], layout=layout),
        TensorDescriptor.from_array(w.reshape(g * p * n, k), [bn, bk], layout=layout),
        group_sizes,
        x_scale if scaled else group_sizes,
        w_scale if scaled else group_sizes,
        m,
        out_type=jax.ShapeDtypeStruct((m, p * n), jnp.dtype(out_dtype)),
        grid=(programs,),
        num_warps=4,
        G=g, GP=max(32, 1 << (g - 1).bit_length()), PN=p * n, K=k, BM=bm, BN=bn, BK=bk, STAGES=config["STAGES"], SWAP=config["SWAP"],
        SCALED=scaled, CONSUMERS=config["CONSUMERS"], PARTS=config["PARTS"], ZERO=zero_rest, COALESCE=config["COALESCE"],
    )  # fmt: skip
