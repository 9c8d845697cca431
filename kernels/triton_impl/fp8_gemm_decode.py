import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from dsv3_jax.kernels.triton_impl import launch


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
            inside = (n < N) & (k < K - i * WARPS * 128)
            x = gl.load(left + i * WARPS * 128, mask=inside, other=0.0)
            y = gl.load(right + i * WARPS * 128, mask=(rm < m) & (rk < K - i * WARPS * 128), other=0.0)
            live = sw < BLOCKS - i * WARPS
            xs = gl.load(b_scale + i * WARPS, mask=live, other=0.0)
            ys = gl.load(a_scale + i * WARPS, mask=live & (sm < m), other=0.0)
            queue = queue + ((x, y, xs, ys),)
        if i >= AHEAD:
            x, y, xs, ys = queue[i - AHEAD]
            acc += mma_v2(x, y, zero) * ys * xs

    total = gl.sum(acc, axis=0)
    IN: gl.constexpr = gl.SliceLayout(0, ACC)
    row = first + gl.arange(0, BN, layout=gl.SliceLayout(1, IN))[:, None]
    col = gl.arange(0, MP, layout=gl.SliceLayout(0, IN))[None, :]
    gl.store(out + col * N + row, total.to(out.dtype.element_ty), mask=(row < N) & (col < m))


def direct(a, a_scale, b, b_scale, out_dtype, config):
    (m, k), n = a.shape, b.shape[0]
    mp = max(8, triton.next_power_of_2(m))
    grid = (triton.cdiv(n, config["BN"]),)
    return launch.call(_direct, a, a_scale, b, b_scale, m, out_type=jax.ShapeDtypeStruct((m, n), out_dtype), grid=grid, N=n, K=k, MP=mp, **config)
