"""How every Triton and Gluon kernel is called from JAX: one place for the target, the compiler's options and the launch."""

from __future__ import annotations

import functools
import re

import jax_triton
from jax_triton import triton_lib

from dsv3_jax.kernels import dispatch


def call(kernel, *args, out_type, grid, num_warps: int = 4, num_stages: int = 3, num_ctas: int = 1, **meta):
    """jax_triton.triton_call for the GPU at hand, or for the one that dispatch.compile_only names.

    out_type: a jax.ShapeDtypeStruct or a tuple of them. meta: the kernel's constexpr arguments.
    """
    _launch_all_warps()
    return jax_triton.triton_call(
        *args,
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        num_ctas=num_ctas,
        compute_capability=dispatch.compute_capability(),
        backend_options={"enable_fp_fusion": True},
        **meta,
    )


class _Library:
    """Stands for jaxlib's triton module and launches each kernel with the threads that its PTX asks for.

    Warp specialisation adds warps to num_warps, and jax-triton 0.4 launches num_warps alone, which CUDA refuses.
    """

    def __init__(self, library):
        self._library = library

    def __getattr__(self, name: str):
        return getattr(self._library, name)

    def TritonKernel(self, name, num_warps, num_ctas, shared_bytes, ptx, *rest):  # noqa: N802
        asked = re.search(r"\.reqntid (\d+)", ptx)
        return self._library.TritonKernel(name, int(asked[1]) // 32 if asked else num_warps, num_ctas, shared_bytes, ptx, *rest)


@functools.cache
def _launch_all_warps() -> None:
    triton_lib.triton_kernel_call_lib = _Library(triton_lib.triton_kernel_call_lib)
