"""Compiles Gluon kernels as Gluon: jax-triton 0.4 sends them through plain Triton's passes, which lay their tensors out anew."""

from __future__ import annotations

import functools

from jax_triton import triton_lib


class _GluonBackend:
    """A CUDA backend whose middle end is Gluon's own: it keeps the layouts that the kernel names."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def make_ttir(self, module, metadata, options, capability):
        return module

    def make_ttgir(self, module, metadata, options, capability):
        return self._backend.gluon_to_ttgir(module, metadata, options, capability)


@functools.cache
def install() -> None:
    """Make jax-triton compile every Gluon kernel of this process so; a Gluon module names its number of warps from the start."""
    compile_plain = triton_lib.compile_ttir_to_ptx_inplace

    def compile_either(module, backend, options, capability):
        gluon = module.get_int_attr("ttg.num-warps") is not None
        return compile_plain(module, _GluonBackend(backend) if gluon else backend, options, capability)

    triton_lib.compile_ttir_to_ptx_inplace = compile_either
