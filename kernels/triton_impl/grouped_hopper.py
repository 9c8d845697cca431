"""The grouped GEMM for Hopper, in Gluon: a persistent grid, one warp that loads tiles by TMA, one or two warpgroups that multiply.

Every program finds its tiles from group_sizes by itself, so that neither a launch nor the host stands between routing and the
experts. G groups, PN = P * N rows of each group's weight, K columns; a tile is BM rows of x by BN rows of w. With few rows in a
group the product is turned round (SWAP): w's rows are then wgmma's M, which is 64 at least, and x's rows its N, 8 at least.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
# Gluon's language is not Python's: a constexpr stands where its annotations ask for an int, a layout or a dtype.
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

    FIRST: gl.constexpr  # groups of w; those behind are of `more`
    G: gl.constexpr  # of both
    GP: gl.constexpr  # G rounded up to a power of two, 32 at least
    PN: gl.constexpr
    K: gl.constexpr
    BM: gl.constexpr
    BN: gl.constexpr
    BK: gl.constexpr
    STAGES: gl.constexpr
    SWAP: gl.constexpr
    SCALED: gl.constexpr  # w holds FP8 codes with block scales
    DEQUANT: gl.constexpr  # only w does: its codes become bf16 on their way to the product
    CONSUMERS: gl.constexpr
    PARTS: gl.constexpr  # products that a consumer computes one after the other in each step, to need fewer registers
    ZERO: gl.constexpr  # write zeros to the rows in no group
    COALESCE: gl.constexpr  # bring results into row order before they are stored: 4-byte ones fill their sectors as they are


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
def _before(stage, c):
    # Not a variable kept from the step before: Triton takes `last = stage` in a loop for the stage of this step.
    return gl.where(stage == 0, c.STAGES - 1, stage - 1)


@gluon.jit
def _load(x_desc, w_desc, more_desc, x_tile, w_tile, full, empty, sizes, c):
    tile_end, row_end = _plan(sizes, c)
    total = gl.max(tile_end, 0) * ((c.PN + c.BN - 1) // c.BN)
    stage, phase = 0, 1
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        g, row, _, col = _locate(t, tile_end, row_end, c)
        for k in range((c.K + c.BK - 1) // c.BK):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), x_desc.nbytes_per_cta + w_desc.nbytes_per_cta)
            if g < c.FIRST:
                tma.async_load(w_desc, [g * c.PN + col, k * c.BK], full.index(stage), w_tile.index(stage))
            else:
                tma.async_load(more_desc, [(g - c.FIRST) * c.PN + col, k * c.BK], full.index(stage), w_tile.index(stage))
            tma.async_load(x_desc, [row, k * c.BK], full.index(stage), x_tile.index(stage))
            stage, phase = _advance(stage, phase, c)


@gluon.jit
def _store(out, value, row, end, col, c):
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
def _scales_of(x_scale, w_scale, more_scale, g, row, col, part, M, LAYOUT: gl.constexpr, c):
    """Where the scales of one part of a tile begin: x's per row, w's for the one block of 128 rows that the part lies in."""
    KB: gl.constexpr = (c.K + 127) // 128
    PER: gl.constexpr = (c.BN if c.SWAP else c.BM) // (c.CONSUMERS * c.PARTS)
    if c.SWAP:
        col += part * PER
        rows = row + gl.arange(0, c.BM, layout=gl.SliceLayout(0, LAYOUT))
    else:
        rows = row + part * PER + gl.arange(0, PER, layout=gl.SliceLayout(1, LAYOUT))
    w_at = gl.where(g < c.FIRST, w_scale, more_scale) + (gl.where(g < c.FIRST, g, g - c.FIRST) * ((c.PN + 127) // 128) + col // 128) * KB
    return x_scale + rows * KB, rows < M, w_at


@gluon.jit
def _scales(x_at, seen, w_at, k, c):
    """One scale per row of x."""
    w_s = gl.load(w_at + k)
    if c.DEQUANT:
        return gl.full(seen.shape, 1.0, gl.float32, seen.type.layout) * w_s
    return gl.load(x_at + k, mask=seen, other=0.0) * w_s


@gluon.jit
def _product(a, b, zero, LAYOUT: gl.constexpr, c):
    if c.DEQUANT:
        a = a.load(gl.DotOperandLayout(0, LAYOUT, 2))
        a = a.to(gl.float16).to(gl.float32).to(gl.bfloat16)  # straight to bf16 goes through a unit eight times slower
        part = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
    else:
        part = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(part,))


@gluon.jit
def _scaled(value, s, c):
    return value * (s[None, :] if c.SWAP else s[:, None])


@gluon.jit
def _multiply(x_tile, w_tile, full, empty, sizes, x_scale, w_scale, more_scale, out, M, WHO: gl.constexpr, c):
    PER: gl.constexpr = (c.BN if c.SWAP else c.BM) // (c.CONSUMERS * c.PARTS)  # rows of wgmma's M
    OTHER: gl.constexpr = c.BM if c.SWAP else c.BN
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OTHER, 32 if c.SCALED and not c.DEQUANT else 16])
    KB: gl.constexpr = (c.K + c.BK - 1) // c.BK
    FIRST: gl.constexpr = WHO * c.PARTS
    tile_end, row_end = _plan(sizes, c)
    total = gl.max(tile_end, 0) * ((c.PN + c.BN - 1) // c.BN)
    a_tile = w_tile if c.SWAP else x_tile
    b_tile = x_tile if c.SWAP else w_tile
    zero = gl.zeros((PER, OTHER), gl.float32, layout=LAYOUT)
    stage, phase = 0, 0
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        g, row, end, col = _locate(t, tile_end, row_end, c)
        acc0 = gl.zeros((PER, OTHER), gl.float32, layout=LAYOUT)
        if c.SCALED:
            x_at0, seen0, w_at0 = _scales_of(x_scale, w_scale, more_scale, g, row, col, FIRST, M, LAYOUT, c)
            next0 = _scales(x_at0, seen0, w_at0, 0, c)
            if c.PARTS == 2:
                acc1 = gl.zeros((PER, OTHER), gl.float32, layout=LAYOUT)
                x_at1, seen1, w_at1 = _scales_of(x_scale, w_scale, more_scale, g, row, col, FIRST + 1, M, LAYOUT, c)
                next1 = _scales(x_at1, seen1, w_at1, 0, c)
            for k in range(KB):
                after = gl.minimum(k + 1, KB - 1)  # scales are fetched one step ahead
                s0 = next0
                next0 = _scales(x_at0, seen0, w_at0, after, c)
                if c.PARTS == 2:
                    s1 = next1
                    next1 = _scales(x_at1, seen1, w_at1, after, c)
                mbarrier.wait(full.index(stage), phase)
                a, b = a_tile.index(stage), b_tile.index(stage).permute((1, 0))
                part = _product(a.slice(FIRST * PER, PER), b, zero, LAYOUT, c)
                if c.PARTS == 1:
                    mbarrier.arrive(empty.index(stage), count=1)
                acc0 += _scaled(part, s0, c)
                if c.PARTS == 2:
                    part = _product(a.slice((FIRST + 1) * PER, PER), b, zero, LAYOUT, c)
                    mbarrier.arrive(empty.index(stage), count=1)
                    acc1 += _scaled(part, s1, c)
                stage, phase = _advance(stage, phase, c)
        else:
            for k in range(KB):
                mbarrier.wait(full.index(stage), phase)
                a, b = a_tile.index(stage).slice(FIRST * PER, PER), b_tile.index(stage).permute((1, 0))
                token = warpgroup_mma(a, b, acc0, is_async=True)
                acc0 = warpgroup_mma_wait(1, deps=(token,))  # the product before this one is done: its tiles are free
                mbarrier.arrive(empty.index(_before(stage, c)), count=1, pred=k > 0)
                stage, phase = _advance(stage, phase, c)
            acc0 = warpgroup_mma_wait(0, deps=(acc0,))
            mbarrier.arrive(empty.index(_before(stage, c)), count=1)
        TYPE: gl.constexpr = out.dtype.element_ty
        down, across = (0, FIRST * PER) if c.SWAP else (FIRST * PER, 0)
        _store(out, acc0.to(TYPE), row + down, end, col + across, c)
        if c.SCALED and c.PARTS == 2:
            gl.static_assert(not c.SWAP)
            _store(out, acc1.to(TYPE), row + down + PER, end, col + across, c)
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
    x_desc, w_desc, more_desc, sizes, x_scale, w_scale, more_scale, M, out,
    FIRST: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, PN: gl.constexpr, K: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, SWAP: gl.constexpr, SCALED: gl.constexpr, DEQUANT: gl.constexpr,
    CONSUMERS: gl.constexpr, PARTS: gl.constexpr, ZERO: gl.constexpr, COALESCE: gl.constexpr,
):  # fmt: skip
    c = _Shape(FIRST, G, GP, PN, K, BM, BN, BK, STAGES, SWAP, SCALED, DEQUANT, CONSUMERS, PARTS, ZERO, COALESCE)
    x_tile = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    w_tile = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_multiply, (x_tile, w_tile, full, empty, sizes, x_scale, w_scale, more_scale, out, M, 0, c)),
            (_load, (x_desc, w_desc, more_desc, x_tile, w_tile, full, empty, sizes, c)),
        ], [1], [64])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (x_tile, w_tile, full, empty, sizes, x_scale, w_scale, more_scale, out, M, 0, c)),
            (_multiply, (x_tile, w_tile, full, empty, sizes, x_scale, w_scale, more_scale, out, M, 1, c)),
            (_load, (x_desc, w_desc, more_desc, x_tile, w_tile, full, empty, sizes, c)),
        ], [4, 1], [232, 40])  # fmt: skip


def grouped_gemm(x, w, group_sizes, x_scale, w_scale, out_dtype, more: tuple, zero_rest: bool, config: dict):
    """The contract of kernels/grouped_gemm.py; config names BM, BN, STAGES, SWAP, CONSUMERS, PARTS and COALESCE."""
    (m, k), (first, p, n, _), g, no_scale = x.shape, w.shape, len(group_sizes), group_sizes
    bm, bn, bk = config["BM"], config["BN"], 128 // w.dtype.itemsize
    row_tiles = min(m, m // bm + min(g, m))
    programs = min(PROGRAMS, row_tiles * -(-p * n // bn))
    return launch.call(
        _grouped,
        TensorDescriptor.from_array(x, [bm, bk], layout=_rows_of_128_bytes(x)),
        *(TensorDescriptor.from_array(a.reshape(-1, k), [bn, bk], layout=_rows_of_128_bytes(a)) for a in (w, more[0] if more else w)),
        group_sizes,
        no_scale if x_scale is None else x_scale,
        no_scale if w_scale is None else w_scale,
        no_scale if w_scale is None else more[1] if more else w_scale,
        m,
        out_type=jax.ShapeDtypeStruct((m, p * n), jnp.dtype(out_dtype)),
        grid=(programs,),
        num_warps=4,
        FIRST=first, G=g, GP=max(32, 1 << (g - 1).bit_length()), PN=p * n, K=k,
        BM=bm, BN=bn, BK=bk, STAGES=config["STAGES"], SWAP=config["SWAP"],
        SCALED=w_scale is not None, DEQUANT=w_scale is not None and x_scale is None, CONSUMERS=config["CONSUMERS"],
        PARTS=config["PARTS"], ZERO=zero_rest, COALESCE=config["COALESCE"] and jnp.dtype(out_dtype).itemsize == 2,
    )  # fmt: skip


def _rows_of_128_bytes(a: jax.Array):
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * a.dtype.itemsize, rank=2)
