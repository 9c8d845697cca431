"""Which implementation of an op runs: XLA everywhere, Triton where the op has a kernel and the card can run it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Iterator

import jax

# The ops that kernels/triton_impl holds.
TRITON_OPS = frozenset(
    """act_quant rms_norm rms_norm_quant swiglu_quant weight_dequant fp8_gemm grouped_gemm route sort_by_expert mla_decode
    mla_prefill""".split()
)
# Those of them that run without being named, on Hopper, where they were measured.
PREFERRED = TRITON_OPS
# Those of them that are written for one generation of tensor cores, Hopper's; the others run on newer GPUs too.
HOPPER_OPS = frozenset("fp8_gemm mla_decode mla_prefill".split())
OLDEST = 89  # Ada: the first compute capability with FP8 tensor cores
HOPPER = 90

_log = logging.getLogger("dsv3_jax")
_compile_only: contextvars.ContextVar[int | None] = contextvars.ContextVar("compile_only", default=None)


def choose(op: str, implementation: str | None) -> str:
    """As `resolve`, for the op that is about to run: says so once."""
    chosen = resolve(op, implementation)
    _say_once(op, chosen)
    return chosen


def resolve(op: str, implementation: str | None) -> str:
    """Return 'xla' or 'triton' for one op; None asks for the best that is proven here.

    Raises ValueError when the named implementation does not exist for this op or cannot run here: a named one runs or raises.
    """
    if implementation not in (None, "xla", "triton"):
        raise ValueError(f"implementation = {implementation!r}: must be None, 'xla' or 'triton'")
    capability = compute_capability()
    if implementation == "triton":
        if op not in TRITON_OPS:
            raise ValueError(f"implementation = 'triton': {op} has no Triton kernel yet; use 'xla' or None")
        if capability is None or capability < OLDEST:
            found = "no GPU is here" if capability is None else f"the GPU has {capability / 10}"
            raise ValueError(f"implementation = 'triton': {op} needs a GPU of compute capability 8.9 or newer, and {found}; use 'xla'")
        if op in HOPPER_OPS and capability != HOPPER:
            found = f"the GPU has {capability / 10}"
            raise ValueError(f"implementation = 'triton': {op} needs compute capability 9.0 (Hopper), and {found}; use 'xla' or None")
    return implementation or ("triton" if op in PREFERRED and capability == HOPPER else "xla")


def compute_capability() -> int | None:
    """Ten times the compute capability of the GPU that kernels are compiled for (90 for Hopper), None without one."""
    return _compile_only.get() or _capability_here()


@contextlib.contextmanager
def compile_only(capability: int) -> Iterator[None]:
    """Within it kernels are traced for a GPU that need not be here: for jax.export, which compiles them without running any."""
    token = _compile_only.set(capability)
    try:
        yield
    finally:
        _compile_only.reset(token)


@functools.cache
def _capability_here() -> int | None:
    if jax.default_backend() != "gpu":
        return None
    try:
        found = round(10 * float(jax.local_devices()[0].compute_capability))
    except ValueError:  # not NVIDIA's
        return None
    if found < OLDEST:
        missing = "has no FP8 tensor cores: XLA computes everything, and FP8 weights are dequantised"
        _log.warning("this GPU (compute capability %s) %s", found / 10, missing)
    return found


@functools.cache
def _say_once(op: str, chosen: str) -> None:
    _log.info("%s runs on %s", op, chosen)
