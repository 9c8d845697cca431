"""Makes jax-triton compile Gluon kernels with Gluon's own stages.

jax-triton 0.4.1 sends them through the stages of plain Triton, which change what a Gluon kernel says: asynchronous products are waited
for at once, and stores go through scratch memory in other layouts.
"""

from __future__ import annotations

import functools

from jax_triton import triton_lib


class _Backend:
    """Stands for Triton's CUDA backend, for a module that has its layouts already."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def make_ttir(self, module, metadata, options, capability):
        return module

    def make_ttgir(self, module, metadata, options, capability):
        return self._backend.gluon_to_ttgir(module, metadata, options, capability)


@functools.cache
def use() -> None:
    """Compile every Gluon kernel with Gluon's stages from now on; others are compiled as before."""
    compile_to_ptx = triton_lib.compile_ttir_to_ptx_inplace

    def compile_either(module, backend, options, capability):
        is_gluon = '"ttg.num-warps"' in str(module)  # plain Triton's stages set it later
        return compile_to_ptx(module, _Backend(backend) if is_gluon else backend, options, capability)

    triton_lib.compile_ttir_to_ptx_inplace = compile_either
