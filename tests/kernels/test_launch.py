"""Compiled kernels outlive their process, and nothing else is taken for them."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from dsv3_jax.benchmark.measure import forget_programs
from dsv3_jax.kernels import grouped_gemm, moe_sort
from tests.kernels import ptx


def sort():
    shapes = (jax.ShapeDtypeStruct((4, 2), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.bool_))
    return lambda ids, valid: moe_sort.sort_by_expert(ids, valid, 0, 8), shapes


def grouped(rows: int = 8):
    """In Gluon, with tensor descriptors among what a launch needs."""
    shapes = ((rows, 256), jnp.bfloat16), ((4, 1, 128, 256), jnp.bfloat16), ((4,), jnp.int32)
    return lambda *a: grouped_gemm.grouped_gemm(*a), tuple(jax.ShapeDtypeStruct(*s) for s in shapes)


def export(kernel) -> None:
    f, shapes = kernel()
    ptx.export(f, *shapes)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """What the compiler returned for each kernel that it compiled, in order; kernels are kept in a folder of the test's own."""
    ptx.need_triton()
    from jax_triton import triton_lib

    from dsv3_jax.kernels.triton_impl import launch

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.delenv("TRITON_ALWAYS_COMPILE", raising=False)
    launch._mend_jax_triton()
    results, compile_it = [], triton_lib.compile_ttir_to_ptx_inplace
    monkeypatch.setattr(triton_lib, "compile_ttir_to_ptx_inplace", lambda *a: results.append(compile_it(*a)) or results[-1])
    forget_programs()
    yield results
    forget_programs()


@pytest.mark.parametrize("kernel", [sort, grouped])
def test_a_kernel_is_compiled_once_for_all_processes(compiled, monkeypatch, kernel):
    from jax_triton import triton_lib

    launched, make = [], triton_lib.triton_kernel_call_lib.TritonKernel
    monkeypatch.setattr(triton_lib.triton_kernel_call_lib, "TritonKernel", lambda *a: launched.append(a) or make(*a), raising=False)
    export(kernel)
    assert len(compiled) == 1
    forget_programs()  # as a new process starts
    export(kernel)
    assert len(compiled) == 1 and len(launched) == 2 and launched[0] == launched[1]
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    forget_programs()
    export(kernel)
    assert len(compiled) == 2


def test_another_shape_is_another_kernel(compiled):
    for count, rows in enumerate((8, 4096), start=1):
        export(lambda rows=rows: grouped(rows))
        assert len(compiled) == count


def test_a_folder_that_cannot_be_made_costs_only_the_next_start(compiled, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", os.path.join(tmp_path, "file", "kept"))
    export(sort)
    assert len(compiled) == 1 and "are not kept for the next start" in caplog.text


def test_the_users_folder_is_used(tmp_path):
    """jax-triton takes TRITON_CACHE_DIR out of the environment when it is imported."""
    ptx.need_triton()
    code = "import dsv3_jax.kernels.triton_impl.launch as launch; print(launch.knobs.cache.dir)"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path)
