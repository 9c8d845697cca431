"""The FP8 GEMM for few tokens, in Gluon: bound by reading the weights once, at the rate of the memory.

Weights are the left operand of wgmma, whose 64 rows they fill, and tokens the right, whose 8 to 128 columns fit their number. One
warp keeps a ring of shared memory full through the copy engine; GROUPS groups of warps take its blocks of K in turn. Where the tiles
are fewer than the multiprocessors, K is cut into SPLIT parts as well, whose float32 sums XLA adds in a fixed order, in a fusion that
may swallow what follows. Scales are multiplied once, before the loop, and wait in shared memory.
Tried and lost: loading the weights straight into the registers of mma.sync (1.2 to 1.4 times slower; e4m3 is unpacked to float16
there), and plain Triton with tl.dot, whose loads of the scales are not pipelined (1.4 to 1.5 times slower on the long sums).
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
# A kernel's text is Gluon, not Python: pyright cannot know its types.
from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import triton
from jax_triton import TensorDescriptor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from dsv3_jax.kernels import tiles
from dsv3_jax.kernels.triton_impl import launch

MOST_ROWS = 64


@gluon.jit
def _load(a_desc, b_desc, x_tile, y_tile, full, empty, first, low, steps, STAGES: gl.constexpr):
    """Keep the ring full: one warp, which only talks to the copy engine."""
    for i in range(steps):
        stage, phase = i % STAGES, (i // STAGES) & 1
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), (x_tile.shape[1] + y_tile.shape[1]) * 128)
        tma.async_load(b_desc, [first, (low + i) * 128], full.index(stage), x_tile.index(stage))
        tma.async_load(a_desc, [0, (low + i) * 128], full.index(stage), y_tile.index(stage))


@gluon.jit
def _sum(a_scale, b_scale, m, x_tile, y_tile, scales, full, empty, first, low, steps, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
         GROUPS: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """One group of warps: the sum over every GROUPS-th block of K, promoted to float32 after each."""
    BN: gl.constexpr = x_tile.shape[1]
    MP: gl.constexpr = y_tile.shape[1]
    CHUNK: gl.constexpr = scales.shape[1]
    CHUNKS: gl.constexpr = scales.shape[0] // GROUPS
    ROWS: gl.constexpr = CHUNKS * CHUNK
    WARPS: gl.constexpr = gl.num_warps()
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, MP, 32])
    READ: gl.constexpr = gl.BlockedLayout([4, 1], [4, 8], [1, WARPS], [0, 1])
    sk = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, READ))[:, None]
    sm = gl.arange(0, MP, layout=gl.SliceLayout(0, READ))[None, :]
    for c in gl.static_range(CHUNKS):
        block = low + (c * CHUNK + sk) * GROUPS + GROUP
        ys = gl.load(a_scale + sm * BLOCKS + block, mask=(sm < m) & (block < BLOCKS), other=0.0)
        xs = gl.load(b_scale + first // 128 * BLOCKS + block, mask=block < BLOCKS, other=0.0)
        scales.index(GROUP * CHUNKS + c).store(ys * xs)
    gl.barrier()
    by_step = scales.reinterpret(gl.float32, [ROWS * GROUPS, 1, MP], scales.layout)

    acc = gl.zeros((BN, MP), gl.float32, layout=ACC)
    zero = gl.zeros((BN, MP), gl.float32, layout=ACC)
    for i in range(GROUP, steps, GROUPS):
        stage = i % STAGES
        scale = by_step.index(GROUP * ROWS + i // GROUPS).load(ACC)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        part = warpgroup_mma(x_tile.index(stage), y_tile.index(stage).permute((1, 0)), zero, use_acc=False,
                             is_async=True)  # fmt: skip
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(stage), count=1)
        acc += part * scale
    return acc


@gluon.jit
def _help(a_scale, b_scale, m, x_tile, y_tile, scales, full, empty, done, sums, first, low, steps, BLOCKS: gl.constexpr,
          STAGES: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    acc = _sum(a_scale, b_scale, m, x_tile, y_tile, scales, full, empty, first, low, steps, BLOCKS, STAGES, GROUPS, GROUP)
    sums.index(GROUP - 1).store(acc)
    gl.barrier()
    mbarrier.arrive(done, count=1)


@gluon.jit
def _finish(a_scale, b_scale, m, out, x_tile, y_tile, scales, full, empty, done, sums, first, low, steps, N: gl.constexpr,
            K: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr):  # fmt: skip
    BN: gl.constexpr = x_tile.shape[1]
    MP: gl.constexpr = y_tile.shape[1]
    acc = _sum(a_scale, b_scale, m, x_tile, y_tile, scales, full, empty, first, low, steps, (K + 127) // 128, STAGES, GROUPS, 0)
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, gl.num_warps()], [0, 1])  # along the rows of the output in memory
    total = gl.convert_layout(acc, OUT)
    if GROUPS > 1:
        mbarrier.wait(done, 0)
        for g in gl.static_range(GROUPS - 1):
            total += sums.index(g).load(OUT)
    row = first + gl.arange(0, BN, layout=gl.SliceLayout(1, OUT))[:, None]
    col = gl.arange(0, MP, layout=gl.SliceLayout(0, OUT))[None, :]
    gl.store(out + col * N + row, total.to(out.dtype.element_ty), mask=(row < N) & (col < m))


@gluon.jit
def _streamed(a_desc, a_scale, b_desc, b_scale, m, out, N: gl.constexpr, K: gl.constexpr, BN: gl.constexpr, MP: gl.constexpr,
              SPLIT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, REGS: gl.constexpr):  # fmt: skip
    """A tile of BN weight rows by all tokens, over one part of K; weights are the left operand of wgmma, tokens the right."""
    BLOCKS: gl.constexpr = (K + 127) // 128
    STEPS: gl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    CHUNKS: gl.constexpr = ((STEPS + GROUPS - 1) // GROUPS + 15) // 16
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    first, part = gl.program_id(0) * BN, gl.program_id(1)
    low = part * STEPS
    steps = gl.minimum(low + STEPS, BLOCKS) - low
    x_tile = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BN, 128], b_desc.layout)
    y_tile = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, MP, 128], a_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [CHUNKS * GROUPS, 16, MP], FLAT)  # the first dim may be any number
    DOWN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0, 1])
    sums = gl.allocate_shared_memory(gl.float32, [max(1, GROUPS - 1), BN if GROUPS > 1 else 1, MP], DOWN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(done, count=max(1, GROUPS - 1))
    out += part.to(gl.int64) * m * N
    WARPS: gl.constexpr = gl.num_warps()
    if GROUPS == 1:
        gl.warp_specialize([
            (_finish, (a_scale, b_scale, m, out, x_tile, y_tile, scales, full, empty, done, sums, first, low, steps, N, K, STAGES, GROUPS)),
            (_load, (a_desc, b_desc, x_tile, y_tile, full, empty, first, low, steps, STAGES)),
        ], [1], [24])  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize([
            (_finish, (a_scale, b_scale, m, out, x_tile, y_tile, scales, full, empty, done, sums, first, low, steps, N, K, STAGES, GROUPS)),
            (_help, (a_scale, b_scale, m, x_tile, y_tile, scales, full, empty, done, sums, first, low, steps, BLOCKS, STAGES, GROUPS, 1)),
            (_load, (a_desc, b_desc, x_tile, y_tile, full, empty, first, low, steps, STAGES)),
        ], [WARPS, 1], [REGS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_finish, (a_scale, b_scale, m, out, x_tile, y_tile, scales, full, empty, done, sums, first, low, steps, N, K, STAGES, GROUPS)),
            (_help, (a_scale, b_scale, m, x_tile, y_tile, scales, full, empty, done, sums, first, low, steps, BLOCKS, STAGES, GROUPS, 1)),
            (_help, (a_scale, b_scale, m, x_tile, y_tile, scales, full, empty, done, sums, first, low, steps, BLOCKS, STAGES, GROUPS, 2)),
            (_help, (a_scale, b_scale, m, x_tile, y_tile, scales, full, empty, done, sums, first, low, steps, BLOCKS, STAGES, GROUPS, 3)),
            (_load, (a_desc, b_desc, x_tile, y_tile, full, empty, first, low, steps, STAGES)),
        ], [WARPS, WARPS, WARPS, 1], [REGS, REGS, REGS, 24])  # fmt: skip


def choose(m: int, n: int, k: int) -> dict[str, int]:
    """Tile height BN, parts of K (SPLIT), groups of warps per tile (GROUPS) and slots of the ring (STAGES): measured, or else likely."""
    found = tiles.lookup("fp8_gemm", m, n, k, default={})
    return {name: found[name] for name in tiles.FIELDS["fp8_gemm"]["decode"]} if found.get("kernel") == "decode" else likely(m, n, k)


def likely(m: int, n: int, k: int) -> dict[str, int]:
    """The choice for a shape that was not measured.

    All programs should be on the card at once, with some 64 kB on their way to each multiprocessor, and no sum so long that its
    chain of products, about 0.2 us each, outlasts the reading of the weights.
    """
    height, blocks = _height(m), -(-k // 128)
    columns = -(-n // 64)
    rows = 128 if height >= 64 and columns > 4 * 132 else 64  # the tokens are read once per tile: few tiles where both are many
    split = max(1, min(round(132 / columns), blocks // 7))
    steps = -(-blocks // split)
    split = -(-blocks // steps)  # every part has blocks
    together, stages = min(3, triton.cdiv(triton.cdiv(n, rows) * split, 132)) + 1, 0  # programs on one multiprocessor
    while together > 1 and stages < 3:
        together -= 1
        room = 220_000 // together - (-(-steps // 16) * 16 + 1) * height * 4
        stages = room // ((rows + height) * 128)
    return {"BN": rows, "SPLIT": split, "GROUPS": 1, "STAGES": max(2, min(steps, 8, stages))}


def _height(m: int) -> int:
    return max(8, triton.next_power_of_2(m))


def _registers(config: dict[str, int], height: int) -> dict[str, int]:
    """Registers a thread: of the groups that multiply, and of the kernel on average, whose loader warps need 24."""
    warps = config["BN"] // 16
    need = {8: 56, 16: 64, 32: 80, 64: 104, 128: 168}[height]
    multiplying = config["GROUPS"] * warps
    mean = (multiplying * need + 4 * 24) / (multiplying + 4)
    return {"num_warps": warps, "REGS": need - 8, "registers": max(64, int(mean) // 8 * 8 + 8)}


def registers(config: dict[str, int], height: int) -> int:
    """Registers of one program, of which a multiprocessor has 64 Ki."""
    of = _registers(config, height)
    return 32 * (config["GROUPS"] * of["num_warps"] + 4) * of["registers"]


def fp8_gemm_decode(a: jax.Array, a_scale: jax.Array, b: jax.Array, b_scale: jax.Array, out_dtype, config: dict | None = None) -> jax.Array:
    """As kernels.fp8_gemm.fp8_gemm, for b (N, K) and M up to 128; config replaces the choice of BN, SPLIT, GROUPS and STAGES."""
    (m, k), n = a.shape, b.shape[0]
    height = _height(m)
    chosen = choose(m, n, k) | (config or {})
    c: dict[str, Any] = _registers(chosen, height) | chosen
    if c["STAGES"] % c["GROUPS"]:  # a slot would change hands between groups, and one could take the other's turn for its own
        raise ValueError(f"config = {chosen}: STAGES must be a multiple of GROUPS")

    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    tokens = TensorDescriptor.from_array(a, [height, 128], layout=swizzled)
    weights = TensorDescriptor.from_array(b, [c["BN"], 128], layout=swizzled)
    split = c["SPLIT"]
    parts = launch.call(
        _streamed,
        tokens,
        a_scale,
        weights,
        b_scale,
        m,
        out_type=jax.ShapeDtypeStruct((split, m, n), jnp.float32 if split > 1 else out_dtype),
        grid=(triton.cdiv(n, c["BN"]), split),
        N=n,
        K=k,
        MP=height,
        **c,
    )
    return functools.reduce(jnp.add, [parts[i] for i in range(split)]).astype(out_dtype)
