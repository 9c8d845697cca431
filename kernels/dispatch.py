"""Which implementation of an op runs: XLA everywhere, Triton where the op has a kernel and the card can run it."""

from __future__ import annotations

import functools
import logging

_TRITON_OPS: frozenset[str] = frozenset()  # the ops that kernels/triton_impl holds
_log = logging.getLogger("dsv3_jax")


def choose(op: str, implementation: str | None) -> str:
    """Return 'xla' or 'triton' for one op; None asks for the best that exists here.

    Raises ValueError when the named implementation does not exist for this op: a named one runs or raises.
    """
    if implementation not in (None, "xla", "triton"):
        raise ValueError(f"implementation = {implementation!r}: must be None, 'xla' or 'triton'")
    if implementation == "triton" and op not in _TRITON_OPS:
        raise ValueError(f"implementation = 'triton': {op} has no Triton kernel yet; use 'xla' or None")
    chosen = implementation or "xla"
    _say_once(op, chosen)
    return chosen


@functools.cache
def _say_once(op: str, chosen: str) -> None:
    _log.info("%s runs on %s", op, chosen)
