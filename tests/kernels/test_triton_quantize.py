"""The Triton quantisation kernels without a GPU: they compile for Hopper, and Triton's interpreter computes what XLA computes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from dsv3_jax.kernels import quantize
from tests.kernels import ptx

S = jax.ShapeDtypeStruct
BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize(("m", "k", "dtype"), [(1, 7168, BF16), (4096, 7168, BF16), (64, 1536, F32), (3, 200, BF16)])
def test_activations_compile(m, k, dtype, scale_fmt):
    x = S((m, k), dtype)
    codes, scale = ptx.export(lambda x: quantize.act_quant(x, scale_fmt, implementation="triton"), x)
    assert (codes.shape, codes.dtype, scale.shape) == ((m, k), quantize.FP8, (m, -(-k // 128)))
    weight = S((k,), dtype)
    ptx.export(lambda x, w: quantize.rms_norm_quant(x, w, 1e-6, scale_fmt, implementation="triton"), x, weight)
    codes, _ = ptx.export(lambda x: quantize.swiglu_quant(x, scale_fmt, implementation="triton"), S((m, 2, k), dtype))
    assert codes.shape == (m, k)


@pytest.mark.parametrize("shape", [(7168, 18432), (576, 7168), (3, 300, 200)])
def test_weights_compile(shape):
    codes, scale = S(shape, quantize.FP8), S((*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)), F32)
    (out,) = ptx.export(lambda c, s: quantize.weight_dequant(c, s, BF16, implementation="triton"), codes, scale)
    assert (out.shape, out.dtype) == (shape, BF16)


def test_interpreter_agrees_with_xla():
    """In a process of its own: TRITON_INTERPRET must be set before Triton is imported."""
    ptx.need_triton()
    script = pathlib.Path(__file__).parent / "interpret_quantize.py"
    root = script.parents[2]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, cwd=root, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 13


def test_fused_forms_equal_the_unfused_ones():
    """The XLA references of the fused ops, against the parts that the model would call."""
    from dsv3_jax.model.layers import swiglu

    x = jax.random.normal(jax.random.key(0), (6, 2, 256)).astype(BF16)
    got, want = quantize.swiglu_quant(x), quantize.act_quant(swiglu(x, axis=1))
    assert all(bool((g == w).all()) for g, w in zip(got, want, strict=True))
    weight = jax.random.normal(jax.random.key(1), (256,)).astype(BF16)
    y = x.astype(F32)
    y = (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6) * weight.astype(F32)).astype(BF16)
    got, want = quantize.rms_norm_quant(x, weight, 1e-6, "ue8m0"), quantize.act_quant(y, "ue8m0")
    assert all(bool((g == w).all()) for g, w in zip(got, want, strict=True))
