"""Compiles kernels for a Hopper GPU that need not be here; skips where Triton or JAX's CUDA plugin is not installed."""

from __future__ import annotations

import importlib.util

import jax
import pytest
from jax.export import DisabledSafetyCheck

from dsv3_jax.kernels import dispatch


def need_triton() -> None:
    remedy = "pip install -e '.[cuda]'"
    for module in ("triton", "jax_cuda13_plugin", "jax_triton"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: {remedy}")


def export(f, *shapes: jax.ShapeDtypeStruct) -> tuple:
    """Lower f to PTX for compute capability 9.0, which compiles every kernel in it; returns the shapes and dtypes of its outputs."""
    need_triton()
    checks = [DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
    with dispatch.compile_only(90):
        exported = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=checks)(*shapes)
    assert "triton_kernel_call" in exported.mlir_module()
    return exported.out_avals
