# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""FP8 block GEMM for many tokens: persistent, warp-specialised, two consumer warpgroups fed by one loader warp (Hopper).

One program per SM walks the output tiles of 128 x BN. The loader fills a ring of shared-memory stages by TMA, one K block of 128 a
stage. Each consumer owns 64 rows of the tile and keeps one multiplication in flight on the tensor cores while it adds the one
before, times both scales, to its float32 total: the promotion costs no tensor-core time. (K is walked in pairs of blocks; where their
number is odd one at a time, and only the two consumers overlap each other.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from dsv3_jax.kernels import tiles
from dsv3_jax.kernels.triton_impl import launch

SMS = 132
BM = 128


@gluon.jit
def _tile(index, m, N: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):
    """Row and column of a tile: GROUP rows of tiles walk the columns together, so that both operands stay in L2."""
    TILES_N: gl.constexpr = (N + BN - 1) // BN
    first = index // (GROUP * TILES_N) * GROUP
    height = gl.minimum(gl.cdiv(m, 128) - first, GROUP)
    rest = index % (GROUP * TILES_N)
    return first + rest % height, rest // height


@gluon.jit
def _load(a_desc, b_desc, a_tile, b_tile, full, empty, m, tiles, N: gl.constexpr, K_BLOCKS: gl.constexpr, BN: gl.constexpr,
          STAGES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    step = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_m, tile_n = _tile(index, m, N, BN, GROUP)
        for k in range(K_BLOCKS):
            stage, phase = step % STAGES, (step // STAGES) & 1
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), (128 + BN) * 128)
            tma.async_load(a_desc, [tile_m * 128, k * 128], full.index(stage), a_tile.index(stage * 2))
            tma.async_load(a_desc, [tile_m * 128 + 64, k * 128], full.index(stage), a_tile.index(stage * 2 + 1))
            tma.async_load(b_desc, [tile_n * BN, k * 128], full.index(stage), b_tile.index(stage))
            step += 1


@gluon.jit
def _scale(step, k, full, a_scale, b_scale, rows, m, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr):
    """The scale of each row in K block k; returns when the block has arrived."""
    scale = gl.load(a_scale + rows * K_BLOCKS + k, mask=rows < m, other=0.0) * gl.load(b_scale + k)
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    return scale


@gluon.jit
def _multiply(a_tile, b_tile, full, empty, a_scale, b_scale, out, m, tiles, N: gl.constexpr, K_BLOCKS: gl.constexpr, BN: gl.constexpr,
              STAGES: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    UNROLL: gl.constexpr = 2 - K_BLOCKS % 2  # four and more spill registers
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [4, 1], [1, 0])
    zero = gl.zeros((64, BN), gl.float32, layout=MMA)
    step = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_m, tile_n = _tile(index, m, N, BN, GROUP)
        first = tile_m * 128 + HALF * 64
        rows = first + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
        scale_b = b_scale + (tile_n * BN // 128) * K_BLOCKS
        total = gl.zeros((64, BN), gl.float32, layout=MMA)
        for chunk in range(K_BLOCKS // UNROLL):
            k = chunk * UNROLL
            scale = _scale(step, k, full, a_scale, scale_b, rows, m, K_BLOCKS, STAGES)
            a = a_tile.index(step % STAGES * 2 + HALF)
            b = b_tile.index(step % STAGES).permute((1, 0))
            part = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
            for u in gl.static_range(1, UNROLL):
                ahead_scale = _scale(step + u, k + u, full, a_scale, scale_b, rows, m, K_BLOCKS, STAGES)
                a = a_tile.index((step + u) % STAGES * 2 + HALF)
                b = b_tile.index((step + u) % STAGES).permute((1, 0))
                ahead = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
                done = warpgroup_mma_wait(1, deps=(part,))
                mbarrier.arrive(empty.index((step + u - 1) % STAGES), count=1)
                total += done * scale[:, None]
                part, scale = ahead, ahead_scale
            done = warpgroup_mma_wait(0, deps=(part,))
            mbarrier.arrive(empty.index((step + UNROLL - 1) % STAGES), count=1)
            total += done * scale[:, None]
            step += UNROLL
        _store(out, total, first, tile_n * BN, m, N, OUT)


@gluon.jit
def _store(out, total, row, col, m, N: gl.constexpr, LAYOUT: gl.constexpr):
    value = gl.convert_layout(total.to(out.dtype.element_ty), LAYOUT)
    rows = row + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    cols = col + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    offsets = rows.to(gl.int64)[:, None] * N + cols[None, :]
    gl.store(out + offsets, value, mask=(rows < m)[:, None] & (cols < N)[None, :])


@gluon.jit
def _gemm(a_desc, a_scale, b_desc, b_scale, m, tiles, out, N: gl.constexpr, K: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
          GROUP: gl.constexpr):  # fmt: skip
    KB: gl.constexpr = (K + 127) // 128  # the copy engine fills a last block up with zeros
    a_tile = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, 64, 128], a_desc.layout)
    b_tile = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BN, 128], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize([
        (_multiply, (a_tile, b_tile, full, empty, a_scale, b_scale, out, m, tiles, N, KB, BN, STAGES, GROUP, 0)),
        (_multiply, (a_tile, b_tile, full, empty, a_scale, b_scale, out, m, tiles, N, KB, BN, STAGES, GROUP, 1)),
        (_load, (a_desc, b_desc, a_tile, b_tile, full, empty, m, tiles, N, KB, BN, STAGES, GROUP)),
    ], [4, 1], [232, 24])  # fmt: skip


def fp8_gemm_large(a: jax.Array, a_scale: jax.Array, b: jax.Array, b_scale: jax.Array, out_dtype=jnp.bfloat16, config: dict | None = None):
    """As kernels.fp8_gemm.fp8_gemm, for b (N, K) and M of any size; config replaces the choice of BN, STAGES and GROUP."""
    (m, k), n = a.shape, b.shape[0]
    config = config or choose(m, n, k)
    count = triton.cdiv(m, BM) * triton.cdiv(n, config["BN"])
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return launch.call(
        _gemm,
        jt.TensorDescriptor.from_array(a, [64, 128], layout=layout),
        a_scale,
        jt.TensorDescriptor.from_array(b, [config["BN"], 128], layout=layout),
        b_scale,
        m,
        count,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(min(SMS, count),),
        num_warps=4,
        N=n,
        K=k,
        **config,
    )


def choose(m: int, n: int, k: int) -> dict:
    """Tile width BN, slots of the ring (STAGES) and rows of tiles that walk together (GROUP): measured, or else likely."""
    found = tiles.lookup("fp8_gemm", m, n, k, default={})
    return {name: found[name] for name in tiles.FIELDS["fp8_gemm"]["large"]} if found.get("kernel") == "large" else likely(m, n, k)


def likely(m: int, n: int, k: int) -> dict:
    """The choice for a shape that was not measured: narrow tiles where wide ones would leave SMs idle."""
    del k

    def waves(width: int) -> int:
        return triton.cdiv(triton.cdiv(m, BM) * triton.cdiv(n, width), SMS)

    return {"BN": 128, "STAGES": 6, "GROUP": 8} if waves(128) * 2 <= waves(64) * 1.3 else {"BN": 64, "STAGES": 8, "GROUP": 8}
