"""Runs the plain-Triton quantisation kernels in the interpreter, for test_triton_quantize.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from triton.runtime import interpreter

from dsv3_jax.kernels import quantize
from dsv3_jax.kernels.triton_impl import quantize as kernels
from tests.kernels.interpreter import Tensor

_convert = interpreter._convert_float


def _convert_float(values, from_dtype, to_dtype, mode):
    """The interpreter's conversion forgets to carry from the mantissa into the exponent, and to saturate as the GPU does."""
    if str(from_dtype) == "fp32" and str(to_dtype) in ("fp8e4nv", "bf16"):
        values = values.clip(-448, 448) if str(to_dtype) == "fp8e4nv" else values
        to = ml_dtypes.float8_e4m3fn if str(to_dtype) == "fp8e4nv" else ml_dtypes.bfloat16
        return values.astype(to).view(np.uint8 if str(to_dtype) == "fp8e4nv" else np.uint16)
    return _convert(values, from_dtype, to_dtype, mode)


interpreter._convert_float = _convert_float


def run(kernel, grid, *arrays, outputs, **constants):
    """The kernel's outputs, poisoned before it runs."""
    results = [np.full(shape, np.nan, np.float32).astype(dtype) for shape, dtype in outputs]
    arguments = [Tensor(np.asarray(a)) if np.ndim(a) else a for a in arrays] + [Tensor(r) for r in results]
    kernel[grid](*arguments, **constants)
    return [a.array for a in arguments[-len(results) :]]


def equal(got, want, what):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g).view(np.uint8), np.asarray(w).view(np.uint8), what)
    print("ok", what)


def main():
    rng = np.random.default_rng(0)
    for m, k, fmt in [(3, 256, None), (5, 200, None), (2, 384, "ue8m0")]:
        x = (rng.normal(size=(m, k)) * np.exp(3 * rng.normal(size=(m, 1)))).astype(np.float32)
        x[0], x[-1, :3] = 0, (1e4, -1e-7, 448)
        blocks = -(-k // 128)
        outputs = [((m, k), ml_dtypes.float8_e4m3fn), ((m, blocks), np.float32)]
        grid = (-(-m * blocks // 4),)
        got = run(kernels._act_quant, grid, x, m * blocks, outputs=outputs, K=k, UE8M0=fmt == "ue8m0", GROUPS=4)
        equal(got, quantize.act_quant(x, fmt, implementation="xla"), f"act_quant {m} {k} {fmt}")

        groups = 1 << (blocks - 1).bit_length()
        weight = rng.normal(size=k).astype(np.float32)
        got = run(kernels._rms_norm_quant, (m,), x, weight, 1e-6, outputs=outputs, K=k, UE8M0=fmt == "ue8m0", GROUPS=groups)
        want = quantize.rms_norm_quant(jnp.asarray(x), weight, 1e-6, fmt, implementation="xla")
        close(got, want, f"rms_norm_quant {m} {k} {fmt}")

        gate_up = rng.normal(size=(m, 2, k)).astype(np.float32)
        got = run(kernels._swiglu_quant, grid, gate_up, m * blocks, outputs=outputs, F=k, UE8M0=fmt == "ue8m0", GROUPS=4)
        close(got, quantize.swiglu_quant(jnp.asarray(gate_up), fmt, implementation="xla"), f"swiglu_quant {m} {k} {fmt}")
    for p, n, k in [(1, 128, 256), (2, 200, 144)]:
        codes = rng.normal(size=(p, n, k)).astype(ml_dtypes.float8_e4m3fn)
        scale = np.exp(rng.normal(size=(p, -(-n // 128), -(-k // 128)))).astype(np.float32)
        for dtype in (np.float32, ml_dtypes.bfloat16):
            grid = (-(-k // 128), -(-n // 32), p)
            got = run(kernels._weight_dequant, grid, codes, scale, n, outputs=[((p, n, k), dtype)], K=k, ROWS=32)
            equal(got, [quantize.weight_dequant(codes, scale, dtype, implementation="xla")], f"weight_dequant {p} {n} {k}")


def close(got, want, what):
    """Sums and exponentials may differ in their last bits, and so may the scales; hardly any code may move, and by one step only."""
    np.testing.assert_allclose(got[1], np.asarray(want[1]), rtol=1e-5, err_msg=what)
    apart = np.asarray(got[0]).view(np.int8).astype(int) - np.asarray(want[0]).view(np.int8).astype(int)
    assert np.abs(apart).max() <= 1 and (apart != 0).mean() < 0.01, what
    print("ok", what)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
