"""Runs the Triton kernel of add_rms_norm in the interpreter, for test_triton_norm.py."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from dsv3_jax.kernels.triton_impl import norm
from tests.kernels.interpret_quantize import run
from tests.kernels.test_triton_norm import close, exact


def main():
    rng = np.random.default_rng(0)
    for rows, k, dtype in [(3, 256, np.float32), (5, 200, np.float32), (1, 7168, np.float32), (3, 1536, ml_dtypes.bfloat16)]:
        x, update = (rng.normal(size=(rows, k)).astype(dtype) for _ in range(2))
        for weight_dtype, add in [(np.float32, True), (dtype, False)]:
            weight = rng.normal(size=k).astype(weight_dtype)
            outputs = [((rows, k) if add else (1,), dtype), ((rows, k), dtype)]
            width = 1 << (k - 1).bit_length()
            total, out = run(norm._add_rms_norm, (rows,), x, update, weight, 1e-6, outputs=outputs, K=k, WIDTH=width, ADD=add)
            assert add or np.isnan(total.astype(np.float32)).all(), "without an update only the norm is written"
            close((total if add else x, out), exact(x, update if add else None, weight, 1e-6))
            print("ok", rows, k, add)


if __name__ == "__main__":
    main()
