import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax_triton import TensorDescriptor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from dsv3_jax.kernels.triton_impl import gluon_pipeline, launch


@gluon.jit
def _fetch(left, right, a_scale, b_scale, n, k, rm, rk, sm, sw, m, I: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BN: gl.constexpr,
           WARPS: gl.constexpr):  # fmt: skip
    """Each warp's next block of weights and tokens, and their scales."""
    PAST: gl.constexpr = I * WARPS * 128
    WHOLE: gl.constexpr = PAST + WARPS * 128 <= K
    if WHOLE and N % BN == 0:
        x = gl.load(left + PAST, eviction_policy="evict_first")
    elif WHOLE:
        x = gl.load(left + PAST, mask=n + 0 * k < N, other=0.0, eviction_policy="evict_first")
    else:
        x = gl.load(left + PAST, mask=(n < N) & (k < K - PAST), other=0.0, eviction_policy="evict_first")
    if WHOLE:
        y = gl.load(right + PAST, mask=rm + 0 * rk < m, other=0.0)
        xs = gl.load(b_scale + I * WARPS)
        ys = gl.load(a_scale + I * WARPS, mask=sm + 0 * sw < m, other=0.0)
    else:
        left_over: gl.constexpr = (K + 127) // 128 - I * WARPS
        y = gl.load(right + PAST, mask=(rm < m) & (rk < K - PAST), other=0.0)
        xs = gl.load(b_scale + I * WARPS, mask=sw < left_over, other=0.0)
        ys = gl.load(a_scale + I * WARPS, mask=(sw < left_over) & (sm < m), other=0.0)
    return x, y, xs, ys


@gluon.jit
def _direct(a, a_scale, b, b_scale, m, out, N: gl.constexpr, K: gl.constexpr, BN: gl.constexpr, MP: gl.constexpr, AHEAD: gl.constexpr):
    """BN weight rows a program; its warps take the blocks of K in turn, and their sums are added at the end, in order."""
    WARPS: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = (K + 127) // 128
    STEPS: gl.constexpr = (BLOCKS + WARPS - 1) // WARPS
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, k_width=16)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, k_width=16)
    first = gl.program_id(0) * BN

    w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None, None]
    n = (first + gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(2, LEFT))))[None, :, None]
    k = w * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))[None, None, :]
    left = b + n.to(gl.int64) * K + k

    rw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))[:, None, None]
    rk = rw * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))[None, :, None]
    rm = gl.arange(0, MP, layout=gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))[None, None, :]
    right = a + rm * K + rk

    sw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, ACC)))[:, None, None]
    sm = gl.arange(0, MP, layout=gl.SliceLayout(0, gl.SliceLayout(1, ACC)))[None, None, :]
    a_scale += sm * BLOCKS + sw
    b_scale += first // 128 * BLOCKS + sw

    acc = gl.zeros((WARPS, BN, MP), gl.float32, layout=ACC)
    zero = gl.zeros((WARPS, BN, MP), gl.float32, layout=ACC)
    queue = ()
    for i in gl.static_range(AHEAD + STEPS):
        if i < STEPS:
            queue = queue + (_fetch(left, right, a_scale, b_scale, n, k, rm, rk, sm, sw, m, i, N, K, BN, WARPS),)
        if i >= AHEAD:
            x, y, xs, ys = queue[i - AHEAD]
            acc += mma_v2(x.to(gl.float16), y.to(gl.float16), zero) * ys * xs

    # The warps' sums meet in shared memory, and each thread adds those of one output in order.
    WIDE: gl.constexpr = min(BN, 32)
    SUM: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, WIDE, 32 // WIDE], [1, 1, WARPS], [1, 2, 0])
    total = gl.sum(gl.convert_layout(acc, SUM), axis=0)
    IN: gl.constexpr = gl.SliceLayout(0, SUM)
    row = first + gl.arange(0, BN, layout=gl.SliceLayout(1, IN))[:, None]
    col = gl.arange(0, MP, layout=gl.SliceLayout(0, IN))[None, :]
    gl.store(out + col * N + row, total.to(out.dtype.element_ty), mask=(row < N) & (col < m))


@triton.jit
def _tiled(a, a_scale, b, b_scale, m, out, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, MP: tl.constexpr, SPLIT: tl.constexpr):
    """A tile of BN weight rows by all tokens over one part of K; the weights are the left operand of wgmma, the tokens the right."""
    BLOCKS: tl.constexpr = (K + 127) // 128
    STEPS: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    first, part = tl.program_id(0) * BN, tl.program_id(1)
    row, col = first + tl.arange(0, BN), tl.arange(0, MP)
    low = part * STEPS
    high = tl.minimum(low + STEPS, BLOCKS)
    acc = tl.zeros((BN, MP), tl.float32)
    for k in range(low, high):
        ys = tl.load(a_scale + col * BLOCKS + k, mask=col < m, other=0.0)
        if BN > 128:
            xs = tl.load(b_scale + row // 128 * BLOCKS + k, mask=row < N, other=0.0)[:, None]
        else:
            xs = tl.load(b_scale + first // 128 * BLOCKS + k)
        x = b.load([first, k * 128])
        y = a.load([0, k * 128])
        acc += tl.dot(x, y.T) * (ys[None, :] * xs)
    place = out + part.to(tl.int64) * m * N + col[None, :] * N + row[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(row < N)[:, None] & (col < m)[None, :])


def direct(a, a_scale, b, b_scale, out_dtype, config):
    gluon_pipeline.install()
    (m, k), n = a.shape, b.shape[0]
    mp = max(8, triton.next_power_of_2(m))
    grid = (triton.cdiv(n, config["BN"]),)
    return launch.call(_direct, a, a_scale, b, b_scale, m, out_type=jax.ShapeDtypeStruct((m, n), out_dtype), grid=grid, N=n, K=k, MP=mp, **config)


def tiled(a, a_scale, b, b_scale, out_dtype, config):
    (m, k), n = a.shape, b.shape[0]
    mp = max(16, triton.next_power_of_2(m))
    split = config["SPLIT"]
    grid = (triton.cdiv(n, config["BN"]), split)
    kind = jax.ShapeDtypeStruct((split, m, n), jnp.float32 if split > 1 else out_dtype)
    left = TensorDescriptor.from_array(b, [config["BN"], 128])
    right = TensorDescriptor.from_array(a, [mp, 128])
    parts = launch.call(_tiled, right, a_scale, left, b_scale, m, out_type=kind, grid=grid, N=n, K=k, MP=mp, **config)
    return functools.reduce(jnp.add, [parts[i] for i in range(split)]).astype(out_dtype)
