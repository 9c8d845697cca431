"""Causal flash attention for Hopper with keys of width 128 + 64 per head and values of width 128, over rows of their own lengths.

B rows, T new tokens, S slots, H heads. A tile is 128 queries of one head: two groups of four warps take 64 each, a fifth warp loads keys
and values in blocks of 128. The softmax of a block runs beside the product of the block before it with its values, as in
FlashAttention-3 (arXiv 2407.08608, section 3.2). The rotary part of the keys is one array for all heads, loaded beside the rest.
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

from dsv3_jax.kernels.triton_impl import launch

NOPE, ROPE, VALUE = 128, 64, 128
GROUP = 8  # heads that walk the queries together, so that their keys and values stay in the L2 cache


@gluon.jit
def _load(q_desc, q_pe_desc, k_desc, k_pe_desc, v_desc, q_smem, q_pe_smem, k_smem, k_pe_smem, v_smem, q_full, k_full, v_full, k_empty,
          v_empty, q_row, k_row, head, blocks, STAGES: gl.constexpr):
    if blocks > 0:
        mbarrier.expect(q_full, 128 * 192 * 2)
        for g in gl.static_range(2):
            tma.async_load(q_desc, [q_row + 64 * g, head * 192], q_full, q_smem.index(g))
            tma.async_load(q_pe_desc, [q_row + 64 * g, head * 192 + 128], q_full, q_pe_smem.index(g))
    for j in range(blocks):
        stage, free = j % STAGES, (j // STAGES & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), free)
        mbarrier.expect(k_full.index(stage), 128 * 192 * 2)
        tma.async_load(k_desc, [k_row + 128 * j, head * 128], k_full.index(stage), k_smem.index(stage))
        tma.async_load(k_pe_desc, [k_row + 128 * j, 0], k_full.index(stage), k_pe_smem.index(stage))
        mbarrier.wait(v_empty.index(stage), free)
        mbarrier.expect(v_full.index(stage), 128 * 128 * 2)
        tma.async_load(v_desc, [k_row + 128 * j, head * 128], v_full.index(stage), v_smem.index(stage))


@gluon.jit
def _score(q, q_pe, k, k_pe, S_LAYOUT: gl.constexpr):
    s = warpgroup_mma(q, k.permute((1, 0)), gl.zeros((64, 128), gl.float32, layout=S_LAYOUT), use_acc=False, is_async=True)
    return warpgroup_mma(q_pe, k_pe.permute((1, 0)), s, is_async=True)


@gluon.jit
def _hide(s, first_key, first_query, length, LAYOUT: gl.constexpr):
    """Set the scores of keys behind their query, or beyond the row's length, to minus infinity."""
    if first_key + 128 > gl.minimum(first_query + 1, length):
        keys = first_key + gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
        queries = gl.minimum(first_query + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)), length - 1)
        s = gl.where(keys[None, :] <= queries[:, None], s, float("-inf"))
    return s


@gluon.jit
def _clear(v, rows):
    """Zero the values beyond the row's length: their weight is zero, but zero times NaN is not."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if rows < 128:
        index = gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
        for j in gl.static_range(2):
            part = v.slice(64 * j, 64, dim=1)
            value = part.load(LAYOUT)
            part.store(gl.where((index < rows)[:, None], value, gl.zeros_like(value)))
        fence_async_shared()
        gl.barrier()


@gluon.jit
def _attend(q_smem, q_pe_smem, k_smem, k_pe_smem, v_smem, q_full, k_full, v_full, k_empty, v_empty, out, first_query, new, length, blocks,
            limit, H: gl.constexpr, SCALE: gl.constexpr, STAGES: gl.constexpr, G: gl.constexpr):
    """One group's 64 queries; first_query is the position of the first, `new` the valid ones of them, `limit` those that exist."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    q, q_pe = q_smem.index(G), q_pe_smem.index(G)
    o = gl.zeros((64, 128), gl.float32, layout=LAYOUT)
    total = gl.full((64,), 1.0, gl.float32, layout=ROWS)
    if blocks > 0:
        mbarrier.wait(q_full, 0)
        mbarrier.wait(k_full.index(0), 0)
        s = _score(q, q_pe, k_smem.index(0), k_pe_smem.index(0), LAYOUT)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(0), count=1)
        s = _hide(s, 0, first_query, length, LAYOUT)
        m = gl.max(s, 1) * SCALE
        p = gl.exp2(s * SCALE - m[:, None])
        total = gl.sum(p, 1)
        weights = gl.convert_layout(p.to(gl.bfloat16), P_LAYOUT)
        for j in range(1, blocks):
            stage, before = j % STAGES, (j - 1) % STAGES
            mbarrier.wait(k_full.index(stage), j // STAGES & 1)
            s = _score(q, q_pe, k_smem.index(stage), k_pe_smem.index(stage), LAYOUT)
            mbarrier.wait(v_full.index(before), (j - 1) // STAGES & 1)
            o = warpgroup_mma(weights, v_smem.index(before), o, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            s = _hide(s, j * 128, first_query, length, LAYOUT)
            m_new = gl.maximum(m, gl.max(s, 1) * SCALE)
            p = gl.exp2(s * SCALE - m_new[:, None])
            shrink = gl.exp2(m - m_new)
            total = total * shrink + gl.sum(p, 1)
            m = m_new
            o = warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(v_empty.index(before), count=1)
            weights = gl.convert_layout(p.to(gl.bfloat16), P_LAYOUT)
            o = o * shrink[:, None]
        final = (blocks - 1) % STAGES
        mbarrier.wait(v_full.index(final), (blocks - 1) // STAGES & 1)
        _clear(v_smem.index(final), length - (blocks - 1) * 128)
        o = warpgroup_mma(weights, v_smem.index(final), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
    q.store((o / total[:, None]).to(gl.bfloat16))
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    cols = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))
    y = gl.where((rows < new)[:, None], q.load(WIDE), gl.zeros((64, 128), gl.bfloat16, layout=WIDE))
    gl.store(out + rows[:, None] * (H * 128) + cols[None, :], y, mask=(rows < limit)[:, None])


@gluon.jit
def _prefill(q_desc, q_pe_desc, k_desc, k_pe_desc, v_desc, start, new, tokens, slots, out, H: gl.constexpr, SCALE: gl.constexpr,
             STAGES: gl.constexpr, GROUP: gl.constexpr):
    tiles = (tokens + 127) // 128
    within, outer = gl.program_id(0) % (GROUP * tiles), gl.program_id(0) // (GROUP * tiles)
    head, row = outer % (H // GROUP) * GROUP + within % GROUP, outer // (H // GROUP)
    first = (tiles - 1 - within // GROUP) * 128  # the longest first
    begin, count = gl.load(start + row), gl.load(new + row)
    count = gl.minimum(count, tokens)
    length = gl.minimum(begin + count, slots)
    blocks = gl.where(first < count, (begin + gl.minimum(first + 128, count) + 127) // 128, 0)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], q_desc.layout)
    q_pe_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], q_desc.layout)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 128], q_desc.layout)
    k_pe_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], q_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 128], q_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    token = row.to(gl.int64) * tokens + first
    to = out + token * (H * 128) + head * 128
    gl.warp_specialize([
        (_attend, (q_smem, q_pe_smem, k_smem, k_pe_smem, v_smem, q_full, k_full, v_full, k_empty, v_empty, to, begin + first,
                   count - first, length, blocks, tokens - first, H, SCALE, STAGES, 0)),
        (_attend, (q_smem, q_pe_smem, k_smem, k_pe_smem, v_smem, q_full, k_full, v_full, k_empty, v_empty, to + 64 * H * 128,
                   begin + first + 64, count - first - 64, length, blocks, tokens - first - 64, H, SCALE, STAGES, 1)),
        (_load, (q_desc, q_pe_desc, k_desc, k_pe_desc, v_desc, q_smem, q_pe_smem, k_smem, k_pe_smem, v_smem, q_full, k_full, v_full,
                 k_empty, v_empty, row * tokens + first, row * slots, head, blocks, STAGES)),
    ], [4, 1], [240, 24])


def mla_prefill(
    q: jax.Array, k_nope: jax.Array, k_pe: jax.Array, v: jax.Array, start: jax.Array, new: jax.Array, scale: float
) -> jax.Array:
    """All bfloat16, start and new (B,) int32 -> (B, T, H, 128) bfloat16; see kernels/mla_prefill.py."""
    batch, tokens, heads, _ = q.shape
    slots = k_nope.shape[1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def described(x, rows, cols):
        return jt.TensorDescriptor.from_array(x.reshape(x.shape[0] * x.shape[1], -1), [rows, cols], layout=layout)

    return launch.call(
        _prefill,
        described(q, 64, NOPE),
        described(q, 64, ROPE),
        described(k_nope, 128, NOPE),
        described(k_pe, 128, ROPE),
        described(v, 128, VALUE),
        start,
        new,
        tokens,
        slots,
        out_type=jax.ShapeDtypeStruct((batch, tokens, heads, VALUE), jnp.bfloat16),
        grid=(batch * heads * triton.cdiv(tokens, 128),),
        H=heads,
        SCALE=scale * math.log2(math.e),
        STAGES=2,
        GROUP=math.gcd(heads, GROUP),
        num_warps=4,
    )
