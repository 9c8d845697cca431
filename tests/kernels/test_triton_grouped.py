"""The Triton grouped GEMM without a GPU: every tile size compiles for Hopper, and the portable kernel runs in Triton's interpreter."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.export import DisabledSafetyCheck

from dsv3_jax.kernels import dispatch
from dsv3_jax.kernels.grouped_gemm import grouped_gemm
from tests import tolerances
from tests.kernels.interpreter import Tensor

FP8, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


def kernel():
    pytest.importorskip("triton", reason="needs triton")
    pytest.importorskip("jax_triton", reason="needs jax-triton, which needs jax-cuda13-plugin even to compile", exc_type=ImportError)
    from dsv3_jax.kernels.triton_impl import grouped_gemm as module

    return module


def exported(kind: str, rows: int, *, capability: int = 90, groups: int = 4, n: int = 256, k: int = 512, out=jnp.bfloat16, more: int = 1):
    """Compile for a GPU that is not here; returns the module's text, which holds the kernel."""
    m, s = rows * groups, jax.ShapeDtypeStruct
    x = s((m, k), FP8 if kind == "fp8" else BF16)
    w = s((groups, 2, n, k), BF16 if kind == "bf16" else FP8)
    x_scale = s((m, k // 128), np.float32) if kind == "fp8" else None
    w_scale = None if kind == "bf16" else s((groups, 2, n // 128, k // 128), np.float32)

    others = tuple(s((more, *a.shape[1:]), a.dtype) for a in (w, w_scale) if a is not None and more)

    def f(x, w, sizes, x_scale, w_scale, others):
        return kernel().grouped_gemm(x, w, sizes, x_scale, w_scale, out, more=others, zero_rest=True)

    with dispatch.compile_only(capability):
        checks = [DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
        sizes = s((groups + more,), np.int32)
        done = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=checks)(x, w, sizes, x_scale, w_scale, others)
    assert done.out_avals[0].shape == (m, 2 * n) and done.out_avals[0].dtype == out
    return done.mlir_module()


@pytest.mark.parametrize("kind", ["fp8", "bf16", "w8"])
def test_every_tile_compiles_for_hopper(kind, monkeypatch):
    configure = kernel().configure
    from dsv3_jax.kernels.triton_impl import launch

    shared, launched = [], launch._Library.TritonKernel

    def record(self, name, num_warps, num_ctas, shared_bytes, *rest):
        shared.append(shared_bytes)
        return launched(self, name, num_warps, num_ctas, shared_bytes, *rest)

    monkeypatch.setattr(launch._Library, "TritonKernel", record)
    tiles = {}
    for rows in (1, 2, 3, 16, 24, 32, 48, 64, 100, 160, 256, 1024, 2048):
        tiles.setdefault(tuple(configure(kind, rows).items()), rows)
    assert len(tiles) > 2
    for rows in tiles.values():
        assert "triton_kernel_call_ffi" in exported(kind, rows)
    assert "triton_kernel_call_ffi" in exported(kind, 64, out=jnp.float32)
    assert "triton_kernel_call_ffi" in exported(kind, 2048, out=jnp.float32, more=0)
    assert len(shared) == len(tiles) + 2 and max(shared) <= 227 * 1024


@pytest.mark.parametrize("kind", ["fp8", "bf16", "w8"])
def test_the_portable_kernel_compiles_for_ada(kind):
    kernel()
    assert "triton_kernel_call_ffi" in exported(kind, 64, capability=89)


def interpreted(kind: str) -> None:
    """Runs in a process of its own, with TRITON_INTERPRET=1; compares the portable kernel with the XLA reference."""
    from dsv3_jax.kernels.triton_impl import grouped_gemm as module

    rng = np.random.default_rng(7)
    sizes, m, n, k = np.array([3, 0, 17, 1, 0], np.int32), 30, 128, 256
    plain = np.float16  # the interpreter multiplies the bits of bf16 numbers as integers
    x = rng.normal(size=(m, k)).astype(FP8 if kind == "fp8" else plain)
    w = rng.normal(size=(5, 2, n, k)).astype(plain if kind == "bf16" else FP8)
    x_scale = np.exp(rng.normal(size=(m, k // 128))).astype(np.float32) if kind == "fp8" else None
    w_scale = None if kind == "bf16" else np.exp(rng.normal(size=(5, 2, 1, k // 128))).astype(np.float32)
    want = jax.jit(functools.partial(grouped_gemm, implementation="xla"))(x, w, sizes, x_scale=x_scale, w_scale=w_scale)
    w, more = w[:2], w[2:]  # the groups in two arrays give the same
    w_scale, more_scale = (None, None) if w_scale is None else (w_scale[:2], w_scale[2:])
    x[sizes.sum() :] = np.nan
    out = np.full((m, 2 * n), np.nan, np.float32)
    scales = [sizes if a is None else a for a in (x_scale, w_scale, more_scale)]
    args = [Tensor(a) for a in (x, w, sizes, *scales[:2], more, scales[2])]
    bm, bn = 16, 64
    grid = ((m // bm + 6) * (2 * n // bn),)
    module._grouped[grid](
        *args, m, Tensor(out), FIRST=2, G=5, GP=8, PN=2 * n, K=k, BM=bm, BN=bn, BK=64 if kind == "bf16" else 128, SCALED=kind != "bf16",
        DEQUANT=kind == "w8", ZERO=True,
    )  # fmt: skip
    assert (out[sizes.sum() :] == 0).all()
    assert tolerances.difference(out, want) < (1e-6 if kind == "w8" else 1e-9)  # the reference rounds dequantised weights


def in_the_interpreter(call: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    code = f"from tests.kernels import test_triton_grouped as t; t.{call}"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("kind", ["fp8", "bf16", "w8"])
def test_the_portable_kernel_in_the_interpreter(kind):
    kernel()
    in_the_interpreter(f"interpreted({kind!r})")


def test_sorting_pairs_by_expert():
    from dsv3_jax.kernels.moe_sort import sort_by_expert

    rng = np.random.default_rng(5)
    ids = np.stack([rng.permutation(16)[:4] for _ in range(9)]).astype(np.int32)
    valid = rng.random(9) < 0.7
    order, inverse, sizes = sort_by_expert(ids, valid, 4, 8, implementation="xla")
    expert = [e - 4 if v and 4 <= e < 12 else 8 for row, v in zip(ids, valid, strict=True) for e in row]
    want = sorted(range(36), key=lambda i: (expert[i], i))
    assert np.asarray(order).tolist() == want
    assert np.asarray(order)[np.asarray(inverse)].tolist() == list(range(36))
    assert np.asarray(sizes).tolist() == [expert.count(e) for e in range(8)]


def interpreted_sort(pairs: int) -> None:
    """Runs in a process of its own, with TRITON_INTERPRET=1; compares the kernel with the XLA reference."""
    from dsv3_jax.kernels.moe_sort import sort_by_expert
    from dsv3_jax.kernels.triton_impl import moe_sort as module

    rng, here, first = np.random.default_rng(pairs), 6, np.array([3], np.int32)
    ids = np.stack([rng.permutation(12)[:4] for _ in range(pairs // 4)]).astype(np.int32)
    valid = (rng.random(pairs // 4) < 0.8).astype(np.int32)
    out = [np.full(n, -7, np.int32) for n in (pairs, pairs, here)]
    module._sort[(-(-pairs // 16) + 1,)](
        Tensor(ids), Tensor(valid), Tensor(first), *map(Tensor, out), N=pairs, K=4, HERE=here, OWN=16, OTHERS=32
    )
    want = sort_by_expert(ids, valid != 0, 3, here, implementation="xla")
    for got, reference in zip(out, want, strict=True):
        assert (got == np.asarray(reference)).all()


@pytest.mark.parametrize("pairs", [4, 48, 100])
def test_sorting_in_the_interpreter(pairs):
    kernel()
    in_the_interpreter(f"interpreted_sort({pairs})")
