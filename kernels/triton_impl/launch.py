"""How every Triton and Gluon kernel is called from JAX: one place for the target, the compiler's options and the launch."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re

import jax_triton
from jax_triton import triton_lib
from triton import knobs
from triton.backends.nvidia import compiler as cuda
from triton.runtime import cache

from dsv3_jax.kernels import dispatch

_log = logging.getLogger("dsv3_jax")


def call(kernel, *args, out_type, grid, num_warps: int = 4, num_stages: int = 3, num_ctas: int = 1, registers: int | None = None, **meta):
    """jax_triton.triton_call for the GPU at hand, or for the one that dispatch.compile_only names.

    out_type: a jax.ShapeDtypeStruct or a tuple of them. registers: most per thread, where several programs are to share an SM.
    meta: the kernel's constexpr arguments.
    """
    _mend_jax_triton()
    return jax_triton.triton_call(
        *args,
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        num_ctas=num_ctas,
        compute_capability=dispatch.compute_capability(),
        backend_options={"enable_fp_fusion": True} | ({"maxnreg": registers} if registers else {}),
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

    def TritonKernel(self, name, num_warps, num_ctas, shared_bytes, ptx, *rest):
        asked = re.search(r"\.reqntid (\d+)", ptx)
        return self._library.TritonKernel(name, int(asked[1]) // 32 if asked else num_warps, num_ctas, shared_bytes, ptx, *rest)


class _GluonBackend(cuda.CUDABackend):
    """Compiles Gluon as Triton itself does: a Gluon kernel says its own layouts, pipeline and waits.

    jax-triton 0.4 sends it through the passes for plain Triton, which add a wait after every asynchronous product.
    """

    def make_ttir(self, mod, *_):
        return mod

    def make_ttgir(self, mod, metadata, options, capability):
        return self.gluon_to_ttgir(mod, metadata, options, capability)


@functools.cache
def _mend_jax_triton() -> None:
    triton_lib.triton_kernel_call_lib = _Library(triton_lib.triton_kernel_call_lib)
    plain = triton_lib.compile_ttir_inplace

    def compile_inplace(module, backend, options, target):
        # Plain Triton has no layouts yet at this point, and its module no number of warps.
        gluon = any(line.startswith("module attributes") and "ttg.num-warps" in line for line in str(module).splitlines())
        return _kept(lambda: plain(module, _GluonBackend(target) if gluon else backend, options, target), module, options, target)

    triton_lib.compile_ttir_inplace = compile_inplace


def _kept(compile_it, module, options, target) -> triton_lib.CompilationResult:
    """compile_it(), or what it returned for the same kernel in an earlier process: a second or two for each, which jax-triton pays anew.

    In Triton's own cache folder (TRITON_CACHE_DIR, or ~/.triton/cache).
    """
    key = "\n".join((str(module), options.hash(), str(target), cache.triton_key(), jax_triton.__version__, _KEPT))
    try:
        folder = cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    except OSError as e:
        _log.warning("compiled kernels are not kept for the next start: %s; TRITON_CACHE_DIR names another folder", e)
        return compile_it()
    name = "jax_triton.json"
    if not knobs.compilation.always_compile and (found := folder.get_file(name)) is not None:
        with open(found, encoding="utf-8") as f:
            return triton_lib.CompilationResult(**json.load(f), ttgir="", llir="")
    result = compile_it()
    folder.put(json.dumps({field: getattr(result, field) for field in _KEPT.split()}), name, binary=False)
    return result


# Of a jax_triton.CompilationResult, what a launch needs; ttgir and llir are for its own dumps.
_KEPT = "binary name shared_mem_bytes global_scratch_size global_scratch_align tensordesc_meta"
