"""The timing of kernels, on the CPU: what a run consists of, what it runs on, and that wrong results are refused."""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.benchmark import timing
from dsv3_jax.benchmark.cases import Gemm

LOCK = contextlib.nullcontext()


@pytest.fixture
def short(monkeypatch):
    """Runs of few calls: a CPU computes here."""
    for name, value in {"OVERFLOW": 1, "ITERATION_US": 8, "MOST_CALLS": 4, "RUN_US": 1}.items():
        monkeypatch.setattr(timing, name, value)


def f64(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def loop_of(op, smalls: int, weights: int) -> tuple[str, str]:
    """The optimised program of a loop: all of it, and its body."""
    s = jax.ShapeDtypeStruct
    x, small, weight, out = s((64, 256), jnp.float32), s((64, 1), jnp.float32), s((128, 256), jnp.float32), s((64, 128), jnp.float32)
    run = timing.program(op, timing.Counts(weights, smalls, 5), True)
    text = run.lower(x, [small] * smalls, [weight] * weights, [out] * (smalls * weights)).compile().as_text() or ""
    body = re.search(r"body=(%[\w.\-]+)", text)
    assert body, "no loop"
    return text, text[text.index(f"\n{body[1]} (") : ].split("\n}", 1)[0]  # fmt: skip


def test_calls_are_neither_merged_nor_moved_out_of_the_loop():
    text, body = loop_of(lambda x, small, weight: (x * small) @ weight.T, 2, 3)
    dots = re.findall(r"dot\(.*", text)
    assert len(dots) == 6 and all("while/body" in dot for dot in dots)
    assert len(re.findall(r"= f32\[64,128\]\S* (fusion|dot|call|custom-call)\(", body)) == 6, "in the loop's body"
    assert "f32[64,128]{1,0} copy(" not in body, "a result is written where it stays"


def test_calls_that_are_alike_would_be_merged():
    """What the rotating operands are for: the test above can fail."""
    text, _ = loop_of(lambda x, small, weight: x @ weight.T, 2, 3)
    assert len(re.findall(r"dot\(", text)) == 3


def test_the_last_iteration_has_the_small_operands_in_their_places():
    n = timing.Counts(weights=2, smalls=3, rounds=7)
    smalls, weights = [jnp.float32(i) for i in range(3)], [jnp.float32(10 * (1 + i)) for i in range(2)]
    out = timing.program(lambda x, small, weight: x + small + weight, n, True)(
        jnp.float32(100), smalls, weights, [jnp.float32(i) for i in range(6)]
    )
    assert [float(x) for x in out] == [110, 120, 111, 121, 112, 122]


def test_operands_differ_and_are_finite():
    spec = timing.Spec((3, 4, 256), jnp.float8_e4m3fn)
    x, again, other, seed = (f64(timing.make((spec,), s, v)[0]) for s, v in ((1, 0), (1, 0), (1, 1), (2, 0)))
    assert np.isfinite(x).all() and np.isfinite(other).all() and np.abs(x).max() > 100
    assert (x == again).all() and (x != other).mean() > 0.9 and (x != seed).mean() > 0.9
    assert (x[0] != x[1]).mean() > 0.9 and (x[1] != x[2]).mean() > 0.9, "every expert has numbers of its own"
    scales = f64(timing.make((timing.Spec((7, 9), jnp.float32, "scales"),), 1, 0)[0])
    assert (scales > 0).all() and len(np.unique(scales)) > 60
    assert (np.asarray(timing.make((timing.Spec((5,), jnp.int32, 3),), 1, 0)[0]) == 3).all()


class Broken(Gemm):
    """A kernel whose result `broken` changes."""

    broken = staticmethod(lambda out: out)

    def call(self, shared, small, weight):
        return self.broken(super().call(shared, small, weight))


def test_wrong_results_are_refused(short, monkeypatch):
    def broken(change):
        monkeypatch.setattr(Broken, "broken", staticmethod(change))
        jax.clear_caches()
        return timing.measure(Broken(4, 128, 128), LOCK)

    assert 0 <= broken(lambda out: out)["diff"] <= 1e-3
    with pytest.raises(ArithmeticError, match="not every element of the result is written"):
        broken(lambda out: out.at[1, 5].set(jnp.nan))
    with pytest.raises(ArithmeticError, match=r"differs by 0\.\d+ from the exact result, more than 0\.001"):
        broken(lambda out: out.at[:, :64].set(0))
    calls = iter(range(10**6))

    def noise(out):
        count = jax.pure_callback(lambda: np.float32(next(calls)), jax.ShapeDtypeStruct((), jnp.float32))
        return (out.astype(jnp.float32) * (1 + count * 0.001)).astype(out.dtype)

    with pytest.raises(ArithmeticError, match="two runs on the same operands differ"):
        broken(noise)


def test_operands_are_kept_for_other_tiles_of_the_same_case(short):
    held: dict = {}
    timing.measure(Gemm(4, 128, 128), LOCK, held=held)
    kept = held["operands"]
    assert Gemm(4, 128, 128) == Gemm(4, 128, 128, config={"BN": 1}), "tiles are no part of what a case is"
    timing.measure(Gemm(4, 128, 128), LOCK, held=held)
    assert held["operands"] is kept
    timing.measure(Gemm(5, 128, 128), LOCK, held=held)
    assert held["operands"] is not kept
