"""add_rms_norm against float64: on XLA, and its Triton kernel in the interpreter; the kernel compiles for Hopper."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv3_jax.benchmark.measure import forget_programs
from dsv3_jax.kernels import dispatch
from dsv3_jax.kernels.norm import add_rms_norm
from tests import tolerances
from tests.kernels import ptx

BF16 = ml_dtypes.bfloat16


def exact(x, update, weight, eps):
    """In float64, but for the sum, which is rounded to x's dtype."""
    total = x if update is None else (x.astype(np.float64) + update.astype(np.float64)).astype(x.dtype)
    wide = total.astype(np.float64)
    return total, wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps) * weight.astype(np.float64)


def close(got, want) -> None:
    """The sum bit for bit; the norm within one rounding to its dtype."""
    total, y = (np.asarray(a) for a in got)
    np.testing.assert_array_equal(total.astype(np.float64), want[0].astype(np.float64))
    tolerances.within_one_rounding(y, want[1], 8 if y.dtype == BF16 else tolerances.NORM_FLOAT32_BITS)


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("weight_dtype", [BF16, np.float32])
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_on_xla(dtype, weight_dtype, add):
    rng = np.random.default_rng(0)
    x, update = (rng.normal(size=(2, 3, 200)).astype(dtype) for _ in range(2))
    weight = rng.normal(size=200).astype(weight_dtype)
    update = update if add else None
    got = jax.jit(lambda *a: add_rms_norm(*a, 1e-5, implementation="xla"))(x, update, weight)
    assert got[0].dtype == got[1].dtype == dtype
    close(got, exact(x, update, weight, 1e-5))


def test_in_the_interpreter():
    """In a process of its own: TRITON_INTERPRET must be set before Triton is imported."""
    ptx.need_triton()
    script = pathlib.Path(__file__).parent / "interpret_norm.py"
    root = script.parents[2]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, cwd=root, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 8


@pytest.mark.parametrize(("rows", "k", "dtype"), [(1, 7168, jnp.bfloat16), (64, 2048, jnp.bfloat16), (4096, 5120, jnp.float32)])
def test_it_compiles(rows, k, dtype):
    x, weight = jax.ShapeDtypeStruct((rows, 1, k), dtype), jax.ShapeDtypeStruct((k,), jnp.float32)
    added = ptx.export(lambda x, update, w: add_rms_norm(x, update, w, 1e-6, implementation="triton"), x, x, weight)
    alone = ptx.export(lambda x, w: add_rms_norm(x, None, w, 1e-6, implementation="triton"), x, weight)
    for total, y in (added, alone):
        assert total.shape == y.shape == x.shape and total.dtype == y.dtype == dtype


@pytest.mark.parametrize(("k", "barriers"), [(512, 0), (2048, 1), (7168, 1)])
def test_all_loads_go_out_at_once(k, barriers, monkeypatch):
    """16 bytes at a time, and before the only barrier: a decode step waits for memory once."""
    ptx.need_triton()
    from jax_triton import triton_lib

    compiled, real = [], triton_lib.compile_ttir_to_ptx_inplace
    monkeypatch.setattr(triton_lib, "compile_ttir_to_ptx_inplace", lambda *a: compiled.append(real(*a)) or compiled[-1])
    forget_programs()  # another test may have had the same kernel compiled
    x, eps = jax.ShapeDtypeStruct((8, k), jnp.bfloat16), 1e-6
    ptx.export(lambda x, update, w: add_rms_norm(x, update, w, eps, implementation="triton"), x, x, jax.ShapeDtypeStruct((k,), BF16))
    (code,) = (c.binary for c in compiled)
    before, *after = code.split("bar.sync")
    assert len(after) == barriers and not any("ld.global" in part for part in after)
    assert before.count("ld.global") == before.count("ld.global.v4.b32") == 6, "x, update and weight, twice 8 columns each"


def test_small_operands():
    """Nothing to add: x itself, not a copy. Nothing to norm: nothing is launched."""
    x = jnp.ones((2, 8))
    assert add_rms_norm(x, None, jnp.ones(8), 1e-6)[0] is x
    with dispatch.compile_only(90):
        for a in add_rms_norm(jnp.ones((0, 8)), jnp.ones((0, 8)), jnp.ones(8), 1e-6):
            assert a.shape == (0, 8) and a.dtype == jnp.float32


def test_operands_that_do_not_fit():
    x, w = jnp.ones((2, 8), BF16), jnp.ones(8)
    with pytest.raises(ValueError, match=r"update = float32\[2, 8\]: must be as x, bfloat16\[2, 8\]"):
        add_rms_norm(x, jnp.ones((2, 8)), w, 1e-6)
    with pytest.raises(ValueError, match=r"update = bfloat16\[8\]: must be as x"):
        add_rms_norm(x, x[0], w, 1e-6)
    with pytest.raises(ValueError, match=r"weight has shape \(4,\): must be \(8,\)"):
        add_rms_norm(x, x, w[:4], 1e-6)


def test_a_dtype_without_a_kernel():
    x = jnp.ones((2, 8), jnp.float16)
    assert add_rms_norm(x, None, jnp.ones(8), 1e-6)[1].dtype == jnp.float16
    with pytest.raises(ValueError, match=r"rms_norm needs a GPU"):
        add_rms_norm(x, None, jnp.ones(8), 1e-6, implementation="triton")
    with dispatch.compile_only(90), pytest.raises(ValueError, match=r"rms_norm needs bfloat16 or float32 and got float16"):
        add_rms_norm(x, None, jnp.ones(8), 1e-6, implementation="triton")
