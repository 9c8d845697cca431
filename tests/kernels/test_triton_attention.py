"""mla_decode and mla_prefill: the XLA references against float64 NumPy, and what can be known of the GPU kernels without a GPU."""

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

from dsv3_jax.kernels import dispatch
from dsv3_jax.kernels.mla_decode import mla_decode
from dsv3_jax.kernels.mla_prefill import mla_prefill
from tests import tolerances

BF16 = ml_dtypes.bfloat16
SHARED_BYTES = 232448  # the most shared memory that one block may have on sm_90
SAFETY = jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")


def attend64(q, k, v, scale):
    """q (H, C), k (S, H, C), v (S, H, W), all of them seen, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    s = np.einsum("hc,shc->hs", q, k) * scale
    w = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("hs,shw->hw", w / w.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(("heads", "latent", "rope"), [(16, 512, 64), (3, 24, 8)])
def test_decode_reference(heads, latent, rope):
    rng = np.random.default_rng(heads)
    lengths = np.array([1, 7, 20], np.int32)
    q = rng.normal(size=(3, heads, latent + rope)).astype(np.float32)
    cache = rng.normal(size=(3, 20, latent + rope)).astype(np.float32)
    for b, n in enumerate(lengths):
        cache[b, n:] = np.nan
    got = jax.jit(mla_decode, static_argnums=(3, 4))(q, cache, lengths, 0.1, latent)
    for b, n in enumerate(lengths):
        keys = np.repeat(cache[b, :n, None], heads, 1)
        want = attend64(q[b], keys, keys[..., :latent], 0.1)
        assert tolerances.difference(got[b], want) < 1e-10


@pytest.mark.parametrize(("start", "new"), [([0, 3], [5, 2]), ([6, 0], [1, 0]), ([2, 4], [4, 5])])
def test_prefill_reference(start, new):
    rng = np.random.default_rng(sum(start))
    q, k, v = rng.normal(size=(2, 5, 4, 24)), rng.normal(size=(2, 9, 4, 16)), rng.normal(size=(2, 9, 4, 12))
    k_pe = rng.normal(size=(2, 9, 8))
    for b in (0, 1):
        for x in (k, v, k_pe):
            x[b, start[b] + new[b] :] = np.nan
        q[b, new[b] :] = np.nan
    arrays = [x.astype(np.float32) for x in (q, k, k_pe, v)] + [np.array(x, np.int32) for x in (start, new)]
    got = np.asarray(jax.jit(mla_prefill, static_argnums=6)(*arrays, 0.2))
    keys = np.concatenate([k, np.repeat(k_pe[:, :, None], 4, 2)], -1)
    for b in (0, 1):
        assert (got[b, new[b] :] == 0).all()
        for t in range(new[b]):
            n = start[b] + t + 1
            assert tolerances.difference(got[b, t], attend64(q[b, t], keys[b, :n], v[b, :n], 0.2)) < 1e-10


def test_naming_triton_where_it_cannot_run_says_why():
    q, cache, n = jnp.zeros((1, 4, 40)), jnp.zeros((1, 8, 40)), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match=r"mla_decode needs a GPU .* and no GPU is here"):
        mla_decode(q, cache, n, 1.0, 32, implementation="triton")
    with dispatch.compile_only(90), pytest.raises(ValueError, match="512 latent"):
        mla_decode(q, cache, n, 1.0, 32, implementation="triton")
    k = jnp.zeros((1, 8, 4, 128))
    with dispatch.compile_only(90), pytest.raises(ValueError, match="bfloat16"):
        mla_prefill(jnp.zeros((1, 4, 4, 192)), k, jnp.zeros((1, 8, 64)), k, n, n, 1.0, implementation="triton")


@pytest.fixture
def triton_lib():
    pytest.importorskip("triton", reason="Triton is not installed")
    return pytest.importorskip("jax_triton.triton_lib", reason="jax-triton or JAX's CUDA plugin is not installed", exc_type=Exception)


@pytest.fixture
def compiled(triton_lib, monkeypatch):
    """Compile a function for sm_90 and return what became of its kernels, by name."""
    results, real = {}, triton_lib.compile_ttir_to_ptx_inplace

    def keep(*args):
        result = real(*args)
        results[result.name] = result
        return result

    monkeypatch.setattr(triton_lib, "compile_ttir_to_ptx_inplace", keep)

    def compile_for_hopper(f, *shapes):
        with dispatch.compile_only(90):
            jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=[SAFETY])(*shapes)
        return results

    return compile_for_hopper


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


@pytest.mark.parametrize(("batch", "slots", "heads"), [(1, 4096, 128), (6, 512, 16)])
def test_decode_compiles_for_hopper(compiled, batch, slots, heads):
    from dsv3_jax.kernels.triton_impl import mla_decode as kernel

    lengths = shape(batch, dtype=jnp.int32)
    results = compiled(lambda q, k, n: kernel.mla_decode(q, k, n, 0.1), shape(batch, heads, 576), shape(batch, slots, 576), lengths)
    decode = results["_decode"]
    assert decode.shared_mem_bytes <= SHARED_BYTES and ".reqntid 384" in decode.binary
    # Three waits a group: for its scores and for each block's product. More would mean that products no longer overlap (launch.py).
    assert decode.binary.count("wgmma.wait_group") == 6
    assert {"_plan", "_combine"} <= set(results)


def test_prefill_compiles_for_hopper(compiled):
    from dsv3_jax.kernels.triton_impl import mla_prefill as kernel

    k, n = shape(2, 640, 16, 128), shape(2, dtype=jnp.int32)
    results = compiled(lambda *a: kernel.mla_prefill(*a, 0.1), shape(2, 256, 16, 192), k, shape(2, 640, 64), k, n, n)
    prefill = results["_prefill"]
    assert prefill.shared_mem_bytes <= SHARED_BYTES and ".reqntid 384" in prefill.binary
    assert prefill.binary.count("wgmma.wait_group.sync.aligned 1") == 2, "scores no longer overlap with the product before"


def test_plan_and_combination_in_the_interpreter(triton_lib):
    script = pathlib.Path(__file__).with_name("interpret_attention.py")
    env = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert done.stdout.endswith("all checked\n"), done.stderr[-2000:]
