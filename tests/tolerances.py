"""The one table of tolerances. Logits have a standard deviation of about 2."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Bounds on the largest and on the root mean square difference."""

    max: float
    rms: float

    def check(self, got, want, what: str = "") -> tuple[float, float]:
        """Assert that `got` is finite, has the shape of `want` and lies within the bounds; return (max, rms)."""
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
        assert np.isfinite(got).all(), f"{what}: not finite"
        diff = np.abs(got - want)
        largest, rms = float(diff.max(initial=0.0)), float(np.sqrt(np.mean(diff**2))) if diff.size else 0.0
        assert largest <= self.max and rms <= self.rms, f"{what}: max {largest:.2e} (<= {self.max:g}), rms {rms:.2e} (<= {self.rms:g})"
        return largest, rms


# Whole models in float32 against transformers: three times the worst pair among transformers, the published code and a float64
# implementation, which differ only in the order of sums (worst: max 1.5e-4, families with routed_scaling_factor 16).
FLOAT32 = Tolerance(5e-4, 3e-5)
# Two of our own float32 paths (absorb and naive, ragged and single, one device and many): sums in another order, no other rounding.
FLOAT32_SELF = Tolerance(5e-4, 3e-5)
# bf16 activations (8 bits of mantissa, some 30 roundings in a row) against float32, with routing that rounding cannot flip (*_dec).
# transformers' own bf16 is as far from float32. Without *_dec one flipped expert moves a row by more than any bound would allow.
BF16_DECISIVE = Tolerance(2.0, 0.15)
# FP8 activations: each 1x128 group keeps 4 bits of mantissa, and two right implementations may round a borderline value apart
# and then differ from there on. So codes, scales and single linears are compared closely, whole models only like this, on *_dec.
FP8_ACTIVATIONS_DECISIVE = Tolerance(6.0, 0.6)
# Two of our own paths with FP8 activations (one device and many): sums in another order move a few borderline codes.
FP8_ACTIVATIONS_SELF = Tolerance(0.5, 0.04)
# Router weights, scaling factor included (up to 16): softmax or sigmoid of float32 logits that differ in the order of sums.
ROUTER_WEIGHTS = Tolerance(3e-4, 3e-5)

# One layer on kernels against the same on XLA, rms of the difference over rms of what the layer adds: in bf16 some ten roundings to 8
# bits (2^-9 each) in another order. With FP8 activations those roundings move one code in twenty or so by a step of 2^-3 of its value,
# at five products in a row (qkv_a, q_b, o, gate_up, down): sqrt(5/20) 2^-3 = 0.06.
LAYER_RMS = {"bf16": 0.02, "fp8": 0.06}
# The share of tokens that both send to the same experts: near the eighth of 256 scores the next is 0.055 standard deviations away, and
# roundings move a score by about 0.005, so that up to one token in ten has a pair of experts that changes places.
ROUTED_ALIKE = 0.9
# RMSNorm in float32: a mean of squares, a root and two products, each an error of a few units of the last of 24 bits.
NORM_FLOAT32_BITS = 21


def within_one_rounding(got, want, mantissa_bits: int, what: str = "") -> None:
    """Assert that a linear's output equals the exact `want` up to one rounding to `mantissa_bits` and float32 summation.

    8 bits for bf16 output, 24 for float32. Sums of K products in float32 err by a few units of 2^-24 of the largest partial sum,
    for which the largest output of the row stands here.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    summation = 32 * 2.0**-24 * np.abs(want).max(-1, keepdims=True)
    excess = np.abs(got - want) - (2.0**-mantissa_bits * np.abs(want) * (1 + 2.0**-8) + summation)
    assert (excess <= 0).all(), f"{what}: off by {np.abs(got - want).max():.2e}, more than one rounding"


def difference(got, want) -> float:
    """1 - 2<x, y> / (<x, x> + <y, y>), DeepGEMM's measure: 0 for equal arrays, free of scale; at most 1e-3 for FP8 GEMMs."""
    x, y = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(1 - 2 * (x * y).sum() / max((x * x + y * y).sum(), 1e-300))
