"""Times one kernel as a model runs it: within one compiled loop, on weights that are not in the cache, each result checked first.

An iteration of the loop calls the op once for every pair of a weight and a small operand. The small operands (scales of the
activations, queries, group sizes) change places after each iteration, so that no call is the same as another or as in the iteration
before, which XLA would compute once; the results replace those of the iteration before. Several processes, each with cases of its
own, may share a GPU: they compile side by side and take turns at measuring (`pool`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

OVERFLOW = 240e6  # bytes that an iteration touches at least: four times the L2 cache of an H200
ITERATION_US = 700  # an iteration costs about 20 us of its own, which should be less than 3 % of it
RUN_US = 25e3  # that the iterations of a run should take together
MOST_CALLS, MOST_SMALLS = 128, 8  # in an iteration
MOST_OUTPUT = 2e9  # bytes that the results of an iteration may take
HBM, FP8_RATE = 4e12, 1.2e15  # bytes and operations a second: guesses, from which the length of a run is chosen


@dataclasses.dataclass(frozen=True)
class Spec:
    """An operand: numbers are normally distributed, scales positive with a median of 1; a number as `fill` is every element."""

    shape: tuple[int, ...]
    dtype: Any
    fill: str | float = "numbers"

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


Operands = tuple[Spec, ...]


class Case(Protocol):
    """A kernel on operands of one size. `shared` is what all calls have in common; a case is hashable, whatever its tiles."""

    looped: bool  # False for an op that has no small operand: its calls then fill a program without a loop, which is run repeatedly

    @property
    def bytes(self) -> float: ...

    @property
    def flops(self) -> float: ...

    @property
    def bound(self) -> float: ...

    def specs(self) -> tuple[Operands, Operands, Operands]:
        """Shared operands, one small operand, one weight; each may have several arrays."""
        ...

    def call(self, shared, small, weight) -> Any: ...

    def error(self, shared, small, weight, out) -> jax.Array:
        """How far `out` is from the exact result, which may not be more than `bound`."""
        ...


@dataclasses.dataclass(frozen=True)
class Counts:
    """Weights and small operands in an iteration, iterations in a run."""

    weights: int
    smalls: int
    rounds: int

    @property
    def calls(self) -> int:
        return self.weights * self.smalls


def counts(case: Case, out_bytes: int, run_us: float) -> Counts:
    """Enough weights to overflow the cache, enough calls to make an iteration long, enough iterations for about run_us microseconds."""
    likely_us = 2 + max(case.bytes / HBM, case.flops / FP8_RATE) * 1e6
    most = max(2, min(MOST_CALLS, int(MOST_OUTPUT // max(out_bytes, 1))))
    touched = max(case.bytes, 1)
    wanted = math.ceil(ITERATION_US / likely_us)
    if not case.looped:
        calls = min(most, 64, max(2, math.ceil(OVERFLOW / touched), min(16, wanted)))
        return Counts(calls, 1, max(1, round(run_us / (calls * likely_us))))
    weights = min(most // 2, 64, max(2 if touched < 1e9 else 1, math.ceil(OVERFLOW / touched), math.ceil(wanted / MOST_SMALLS)))
    smalls = max(2, min(most // weights, MOST_SMALLS, math.ceil(wanted / weights)))
    rounds = round(run_us / (weights * smalls * likely_us))
    return Counts(weights, smalls, max(1, rounds // smalls) * smalls + 1)  # in the last one the small operands are in their places


def program(op: Callable, n: Counts, looped: bool):
    """jit of (shared, smalls, weights, old results) -> results, one for each small operand and weight in this order."""
    op = jax.jit(op)  # lowered once, not once a call

    def once(shared, smalls, weights):
        return [op(shared, small, weight) for small in smalls for weight in weights]

    def run(shared, smalls, weights, old):
        if not looped:
            return once(shared, smalls, weights)

        def iteration(_, carry):
            smalls, _ = carry
            return (*smalls[1:], smalls[0]), once(shared, smalls, weights)

        return jax.lax.fori_loop(0, n.rounds, iteration, (tuple(smalls), old))[1]

    return jax.jit(run, donate_argnums=3, keep_unused=True)


@functools.cache
def compiled(f: Callable, *structs):
    """f compiled for arguments of these shapes, without running anything."""
    return jax.jit(f).lower(*structs).compile()


@functools.cache
def maker(spec: Spec):
    """A compiled function of (seed, variant), two int32: operands of different variants differ, at the cost of one pass over memory."""

    def numbers(seed, variant):
        shape, dtype = spec.shape, jnp.dtype(spec.dtype)
        if not isinstance(spec.fill, str):
            return jnp.full(shape, spec.fill, dtype)
        if spec.fill == "scales":
            return jnp.exp(0.3 * jax.random.normal(jax.random.key(seed + variant), shape)).astype(dtype)
        normal = jax.random.normal(jax.random.key(seed), shape[-2:])
        # The lowest bits of the mantissa tell variants and leading indices apart; 240 is the largest e4m3 number that they leave finite.
        fp8 = dtype == jnp.float8_e4m3fn
        base = jnp.clip(normal * 64, -240, 240).astype(dtype) if fp8 else normal.astype(dtype)
        unsigned = jnp.dtype(f"uint{8 * dtype.itemsize}")
        lead = jnp.arange(math.prod(shape[:-2]), dtype=jnp.int32).reshape(*shape[:-2], 1, 1)
        change = ((lead + variant) * 37 & (7 if fp8 else 127)).astype(unsigned)
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(base, unsigned) ^ change, dtype)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    return compiled(numbers, number, number)


def make(specs: Operands, seed: int, variant: int) -> tuple[jax.Array, ...]:
    return tuple(maker(spec)(np.int32(seed + i), np.int32(variant)) for i, spec in enumerate(specs))


def difference(x: jax.Array, y: jax.Array) -> jax.Array:
    """1 - 2<x, y> / (<x, x> + <y, y>) in float32, DeepGEMM's measure: 0 for equal arrays, free of scale."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return 1 - 2 * (x * y).sum() / ((x * x).sum() + (y * y).sum())


@functools.cache
def _checker(case: Case, shared, small, weight, out):
    return compiled(case.error, shared, small, weight, out)


@functools.cache
def _poisoner(out):
    """A compiled function that makes results to be overwritten: NaN, or the largest integer."""

    def poison(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(x.shape, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).max, x.dtype)

    return jax.jit(lambda: jax.tree.map(poison, out)).lower().compile()


def _finite(out) -> jax.Array:
    return jnp.stack([jnp.isfinite(x.astype(jnp.float32)).all() for x in jax.tree.leaves(out)]).all()


def _equal(x, y) -> jax.Array:
    """Bit for bit: NaN equals NaN, and 0 does not equal -0."""

    def bits(a):
        return jax.lax.bitcast_convert_type(a, jnp.dtype(f"uint{8 * a.dtype.itemsize}"))

    return jnp.stack([(bits(a) == bits(b)).all() for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)]).all()


def measure(case: Case, lock: contextlib.AbstractContextManager, seed: int = 0, run_us: float | None = None, repeats: int = 5,
            held: dict | None = None) -> dict:  # fmt: skip
    """Check a case and time it: {"us": of one call, "diff", "calls": in an iteration}.

    lock is held while the GPU works; held keeps operands for the next call with the same case, whose tiles may differ.
    Raises ArithmeticError for a result that is wrong, not wholly written, or not the same in a second run.
    """
    held = {} if held is None else held
    shared, small, weight = (tuple(s.struct for s in specs) for specs in case.specs())
    out = jax.eval_shape(case.call, shared, small, weight)
    n = counts(case, sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(out)), run_us or RUN_US)
    run = program(case.call, n, case.looped).lower(shared, [small] * n.smalls, [weight] * n.weights, [out] * n.calls).compile()
    checks = _checker(case, shared, small, weight, out), compiled(_finite, out), compiled(_equal, out, out)
    poison = _poisoner(out)
    # A kernel's PTX is compiled when it is first launched: one call now, while another process has the GPU, costs that one little.
    jax.block_until_ready(jax.jit(case.call)(*(make(specs, 0, 0) for specs in case.specs())))
    with lock:
        if held.get("case") != (case, n):
            held.clear()
            specs = case.specs()
            held["operands"] = (
                make(specs[0], 1000 * seed, 0),
                [make(specs[1], 1000 * seed + 100, i) for i in range(n.smalls)],
                [make(specs[2], 1000 * seed + 200, i) for i in range(n.weights)],
            )
            held["case"] = (case, n)
        operands = held["operands"]
        first = run(*operands, [poison() for _ in range(n.calls)])
        results = run(*operands, [poison() for _ in range(n.calls)])
        diff = _check(checks, operands, first, results, case.bound)
        del first
        times = []
        for _ in range(repeats):
            jax.block_until_ready(results)
            began = time.perf_counter()
            for _ in range(1 if case.looped else n.rounds):
                results = run(*operands, results)
            jax.block_until_ready(results)
            times.append((time.perf_counter() - began) / (n.rounds * n.calls))
        del results, operands
    return {"us": statistics.median(times) * 1e6, "diff": diff, "calls": n.calls}


def _check(checks, operands, first, second, bound: float) -> float:
    error, finite, equal = checks
    if not np.all(jax.device_get([finite(out) for out in first])):
        raise ArithmeticError("not every element of the result is written, or some are not finite")
    if not np.all(jax.device_get([equal(a, b) for a, b in zip(first, second, strict=True)])):
        raise ArithmeticError("two runs on the same operands differ")
    shared, smalls, weights = operands
    ends = ((smalls[0], weights[0], first[0]), (smalls[-1], weights[-1], first[-1]))
    worst = max(float(error(shared, small, weight, out)) for small, weight, out in ends)
    if not worst <= bound:
        raise ArithmeticError(f"differs by {worst:.3g} from the exact result, more than {bound:g}")
    return max(worst, 0.0)
