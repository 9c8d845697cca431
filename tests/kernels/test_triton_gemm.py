"""The FP8 GEMM for few tokens without a GPU: it compiles for Hopper at the shapes of V3 and of its shards, and fits on the card."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from dsv3_jax.kernels import quantize
from tests.kernels import ptx

S = jax.ShapeDtypeStruct
SHAPES = [(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048), (36864, 7168), (576, 7168)]
SHARED_MEMORY = 227 * 1024  # bytes a program may have on Hopper
REGISTERS = 64 * 1024  # on a multiprocessor


def operands(m, n, k, lead=()):
    scale = S((*lead, -(-n // 128), -(-k // 128)), jnp.float32)
    return S((m, k), quantize.FP8), S((m, -(-k // 128)), jnp.float32), S((*lead, n, k), quantize.FP8), scale


@pytest.mark.parametrize(
    ("m", "n", "k", "lead"), [(1, 2112, 7168, ()), (8, 7168, 2048, ()), (64, 4096, 7168, ()), (5, 144, 1040, (2,)), (16, 256, 128, (2,))]
)
def test_decode_compiles(m, n, k, lead):
    from dsv3_jax.kernels.fp8_gemm import fp8_gemm

    for dtype in (jnp.bfloat16, jnp.float32):
        (out,) = ptx.export(lambda *a, dtype=dtype: fp8_gemm(*a, dtype, implementation="triton"), *operands(m, n, k, lead))
        assert (out.shape, out.dtype) == ((m, n * (lead[0] if lead else 1)), dtype)


@pytest.mark.parametrize(
    ("m", "n", "k", "lead"),
    [(512, 2112, 7168, ()), (4096, 7168, 2048, ()), (65, 576, 1040, ()), (200, 144, 256, (2,)), (300, 256, 128, (2,))],
)
def test_large_compiles(m, n, k, lead):
    from dsv3_jax.kernels.fp8_gemm import fp8_gemm

    for dtype in (jnp.bfloat16, jnp.float32):
        (out,) = ptx.export(lambda *a, dtype=dtype: fp8_gemm(*a, dtype, implementation="triton"), *operands(m, n, k, lead))
        assert (out.shape, out.dtype) == ((m, n * (lead[0] if lead else 1)), dtype)


def test_every_choice_fits_on_the_card():
    """V3's shapes and every cut of them along N or K that tensor parallelism makes: shared memory, registers, and no lost block."""
    ptx.need_triton()
    import triton

    from dsv3_jax.kernels.triton_impl import fp8_gemm_decode as decode

    shapes = {(n // tp, k) for n, k in SHAPES for tp in (1, 2, 4, 8, 16)} | {(n, k // tp) for n, k in SHAPES for tp in (1, 2, 4, 8, 16)}
    for n, k in sorted(shapes):
        for m in (1, 2, 8, 9, 16, 31, 33, 64, 128):
            c, height = decode.choose(m, n, k), decode._height(m)
            r, steps = decode._registers(c, height), triton.cdiv(triton.cdiv(k, 128), c["SPLIT"])
            table = triton.cdiv(triton.cdiv(steps, c["GROUPS"]), 16) * 16 * c["GROUPS"] * height * 4
            sums = (c["GROUPS"] - 1) * c["BN"] * height * 4
            # The ring, the table of scales, the groups' sums; the output passes through the same memory at most once more.
            used = c["STAGES"] * (c["BN"] + height) * 128 + table + sums + 1024
            assert used <= SHARED_MEMORY, (m, n, k, c, used)
            threads = 32 * (c["GROUPS"] * r["num_warps"] + 4)
            assert threads <= 1024 and threads * r["registers"] <= REGISTERS, (m, n, k, c, r)
            assert c["SPLIT"] * steps * 128 >= k and c["GROUPS"] in (1, 2, 4) and c["BN"] in (64, 128)


def test_rows_that_the_copy_engine_cannot_read():
    """A named implementation runs or raises; without a name XLA takes such a weight."""
    from dsv3_jax.kernels.fp8_gemm import fp8_gemm

    with pytest.raises(ValueError, match="multiple of 16, and it is 200"):
        ptx.export(lambda *a: fp8_gemm(*a, implementation="triton"), *operands(4, 128, 200))
