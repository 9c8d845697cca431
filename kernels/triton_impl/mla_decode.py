"""Flash decoding over the latent cache for Hopper: one new token per row, all heads share one key of width 576.

B rows, S cache slots, H heads. A tile is one stretch of one row's slots for 64 heads; how long a stretch is follows from the lengths,
so that all tiles together fill the card once. The slot's first 512 columns are its value too, so each slot is loaded once.

Two groups of four warps share a tile. Slots come in pairs of blocks of 64: group 0 scores the first block, group 1 the second, and each
keeps one half (64 x 256) of the output, to which it adds both blocks' weights times its half of the values. A fifth warp loads. The
groups swap their weights and running maxima through shared memory, so that one group's softmax runs beside the other's products.
This is FlashMLA's division of the work (github.com/deepseek-ai/FlashMLA, "seesaw" scheduling), with a schedule of its own.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# A kernel's text is Gluon, not Python: pyright cannot know its types.
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from dsv3_jax.kernels.triton_impl import launch, mla_splits

LATENT = 512
SMS = 132  # multiprocessors of an H100 or H200; on another card the tiles are cut less well


@gluon.jit
def _load(q_half, q_rest, k_half, k_rest, q_smem, k_left, k_right, k_rope, p_smem, q_full, full, empty, q_row, k_row, pairs):
    if pairs > 0:
        mbarrier.expect(q_full, 64 * 576 * 2)
        tma.async_load(q_half, [q_row, 0], q_full, q_smem.index(0))
        tma.async_load(q_half, [q_row, 256], q_full, q_smem.index(1))
        tma.async_load(q_rest, [q_row, 512], q_full, p_smem.index(1))
    for i in range(pairs):
        free = (i & 1) ^ 1
        for t in gl.static_range(2):
            row = k_row + i * 128 + t * 64
            mbarrier.wait(empty.index(3 * t), free)
            mbarrier.expect(full.index(3 * t), 64 * 64 * 2)
            tma.async_load(k_rest, [row, 512], full.index(3 * t), k_rope.index(t))
            mbarrier.wait(empty.index(3 * t + 1), free)
            mbarrier.expect(full.index(3 * t + 1), 64 * 256 * 2)
            tma.async_load(k_half, [row, 0], full.index(3 * t + 1), k_left.index(t))
            mbarrier.wait(empty.index(3 * t + 2), free)
            mbarrier.expect(full.index(3 * t + 2), 64 * 256 * 2)
            tma.async_load(k_half, [row, 256], full.index(3 * t + 2), k_right.index(t))


@gluon.jit
def _clear(v_smem, rows):
    """Zero the values beyond the row's length: their weight is zero, but zero times NaN is not."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    index = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    for t in gl.static_range(2):
        for j in gl.static_range(4):
            part = v_smem.index(t).slice(64 * j, 64, dim=1)
            value = part.load(LAYOUT)
            part.store(gl.where((index < rows - 64 * t)[:, None], value, gl.zeros_like(value)))
    fence_async_shared()
    gl.barrier()


@gluon.jit
def _attend(q_smem, k_left, k_right, k_rope, p_smem, stats, q_full, full, empty, ready, out, partial, lse, tile, row, head, splits, left,
            pairs, H: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr):
    """One group's work on a tile; `left` is the number of valid slots from the tile's first one on."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    HALF: gl.constexpr = 1 + GROUP  # which of a block's barriers is for this group's values
    if pairs > 0:
        values = k_left if GROUP == 0 else k_right
        cols = gl.arange(0, 64, layout=gl.SliceLayout(0, S_LAYOUT)) + 64 * GROUP
        zero = gl.zeros((64, 64), gl.float32, layout=S_LAYOUT)
        o = gl.zeros((64, 256), gl.float32, layout=O_LAYOUT)
        m = gl.full((64,), float("-inf"), gl.float32, layout=S_ROWS)
        total = gl.zeros((64,), gl.float32, layout=S_ROWS)
        mbarrier.wait(q_full, 0)
        q_rope = p_smem.index(1).load(Q_LAYOUT)
        for i in range(pairs):
            phase = i & 1
            mbarrier.wait(full.index(3 * GROUP), phase)
            s = warpgroup_mma(q_rope, k_rope.index(GROUP).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(full.index(3 * GROUP + 1), phase)
            s = warpgroup_mma(q_smem.index(0), k_left.index(GROUP).permute((1, 0)), s, is_async=True)
            mbarrier.wait(full.index(3 * GROUP + 2), phase)
            s = warpgroup_mma(q_smem.index(1), k_right.index(GROUP).permute((1, 0)), s, is_async=True)
            mbarrier.wait(full.index(3 * (1 - GROUP) + HALF), phase)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(empty.index(3 * GROUP), count=1)
            rows = left - i * 128
            if rows < 128:
                s = gl.where((cols < rows)[None, :], s, float("-inf"))
                _clear(values, rows)
            peak = gl.max(s, 1) * SCALE
            if GROUP == 0:
                m_own = gl.maximum(m, peak)
                p = gl.exp2(s * SCALE - m_own[:, None])
                shrink = gl.exp2(m - m_own)
                total = total * shrink + gl.sum(p, 1)
                weights = p.to(gl.bfloat16)
                p_smem.index(0).store(weights)
                stats.index(0).store(m_own)
                fence_async_shared()
                mbarrier.arrive(ready.index(0), count=1)
                o = o * gl.convert_layout(shrink, O_ROWS)[:, None]
                o = warpgroup_mma(gl.convert_layout(weights, P_LAYOUT), values.index(0), o, is_async=True)
                mbarrier.wait(ready.index(1), phase)
                m = stats.index(1).load(S_ROWS)
                shrink = gl.exp2(m_own - m)
                total = total * shrink
                o = warpgroup_mma_wait(0, deps=(o,))
                mbarrier.arrive(empty.index(HALF), count=1)
                o = o * gl.convert_layout(shrink, O_ROWS)[:, None]
                o = warpgroup_mma(p_smem.index(1), values.index(1), o, is_async=True)
            else:
                mbarrier.wait(ready.index(0), phase)
                m_other = stats.index(0).load(S_ROWS)
                o = o * gl.convert_layout(gl.exp2(m - m_other), O_ROWS)[:, None]
                o = warpgroup_mma(p_smem.index(0), values.index(0), o, is_async=True)
                m_own = gl.maximum(m_other, peak)
                p = gl.exp2(s * SCALE - m_own[:, None])
                total = total * gl.exp2(m - m_own) + gl.sum(p, 1)
                weights = p.to(gl.bfloat16)
                p_smem.index(1).store(weights)
                stats.index(1).store(m_own)
                fence_async_shared()
                mbarrier.arrive(ready.index(1), count=1)
                o = warpgroup_mma_wait(0, deps=(o,))
                mbarrier.arrive(empty.index(HALF), count=1)
                o = o * gl.convert_layout(gl.exp2(m_other - m_own), O_ROWS)[:, None]
                o = warpgroup_mma(gl.convert_layout(weights, P_LAYOUT), values.index(1), o, is_async=True)
                m = m_own
            o = warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(empty.index(3 + HALF), count=1)
        stats.index(2 + GROUP).store(total)
        mbarrier.arrive(ready.index(GROUP), count=1)
        mbarrier.wait(ready.index(1 - GROUP), pairs & 1)
        total += stats.index(3 - GROUP).load(S_ROWS)
        o = o * gl.convert_layout(1 / total, O_ROWS)[:, None]
        # Through shared memory, where this group's values were, so that whole lines are written.
        if splits == 1:
            _write(out + row * (H * 512) + GROUP * 256, o.to(gl.bfloat16), values.index(0), head, H)
        else:
            staged = values.reinterpret(gl.float32, [64, 256], gl.NVMMASharedLayout(128, 32, 2))
            _write(partial + tile * (H * 512) + GROUP * 256, o, staged, head, H)
            if GROUP == 0:
                heads = head + gl.arange(0, 64, layout=S_ROWS)
                gl.store(lse + tile * H + heads, m + gl.log2(total), mask=heads < H)


@gluon.jit
def _write(to, o, staged, head, H: gl.constexpr):
    WIDE: gl.constexpr = 128 // o.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, WIDE], [1, 32], [4, 1], [1, 0])
    staged.store(o)
    heads = head + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, 256, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(to + heads[:, None] * 512 + cols[None, :], staged.load(LAYOUT), mask=(heads < H)[:, None])


@gluon.jit
def _decode(q_half, q_rest, k_half, k_rest, plan, slots, out, partial, lse, H: gl.constexpr, SCALE: gl.constexpr):
    HEAD_TILES: gl.constexpr = (H + 63) // 64
    head = gl.program_id(0) % HEAD_TILES * 64
    plan += gl.program_id(0) // HEAD_TILES * 8
    tile, row, splits = gl.load(plan), gl.load(plan + 1), gl.load(plan + 2)
    first, pairs, left = gl.load(plan + 3), gl.load(plan + 4), gl.load(plan + 5)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], q_half.layout)
    k_left = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], k_half.layout)
    k_right = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], k_half.layout)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], k_rest.layout)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], q_rest.layout)  # [1] holds the rotary part of q until weights come
    stats = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(6):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    gl.warp_specialize([
        (_attend, (q_smem, k_left, k_right, k_rope, p_smem, stats, q_full, full, empty, ready, out, partial, lse, tile, row, head, splits,
                   left, pairs, H, SCALE, 0)),
        (_attend, (q_smem, k_left, k_right, k_rope, p_smem, stats, q_full, full, empty, ready, out, partial, lse, tile, row, head, splits,
                   left, pairs, H, SCALE, 1)),
        (_load, (q_half, q_rest, k_half, k_rest, q_smem, k_left, k_right, k_rope, p_smem, q_full, full, empty, row * H + head,
                 row * slots + first * 128, pairs)),
    ], [4, 1], [240, 24])


def mla_decode(q: jax.Array, latent: jax.Array, lengths: jax.Array, scale: float) -> jax.Array:
    """q (B, H, 576) and latent (B, S, 576) bfloat16, lengths (B,) int32 -> (B, H, 512) bfloat16; see kernels/mla_decode.py."""
    batch, heads, width = q.shape
    slots = latent.shape[1]
    head_tiles = triton.cdiv(heads, 64)
    shares = max(1, SMS // head_tiles)
    plan, firsts, counts = mla_splits.plan(lengths, slots, shares)
    tiles = plan.shape[0]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q, latent = q.reshape(-1, width), latent.reshape(-1, width)
    out, partial, lse = launch.call(
        _decode,
        *(jt.TensorDescriptor.from_array(x, [64, cols], layout=layout) for x in (q, latent) for cols in (256, 64)),
        plan,
        slots,
        out_type=(
            jax.ShapeDtypeStruct((batch, heads, LATENT), jnp.bfloat16),
            jax.ShapeDtypeStruct((tiles, heads, LATENT), jnp.float32),
            jax.ShapeDtypeStruct((tiles, heads), jnp.float32),
        ),
        grid=(tiles * head_tiles,),
        H=heads,
        SCALE=scale * math.log2(math.e),
        num_warps=4,
    )
    return mla_splits.combine(firsts, counts, partial, lse, out, most=min(triton.cdiv(slots, 128), shares))
