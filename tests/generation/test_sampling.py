"""Sampling against probabilities worked out in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.generation.sampling import Sampling, keep_likeliest, mode, sample, stack


def kept(logits, top_k: int, top_p: float) -> set[int]:
    got = keep_likeliest(jnp.asarray([logits], jnp.float32), jnp.asarray([top_k]), jnp.asarray([top_p], jnp.float32))
    return set(np.flatnonzero(np.isfinite(np.asarray(got)[0])).tolist())


@pytest.mark.parametrize(
    ("top_k", "top_p", "want"),
    [
        (0, 1.0, {0, 1, 2, 3}),
        (1, 1.0, {2}),
        (3, 1.0, {0, 2, 3}),
        (9, 1.0, {0, 1, 2, 3}),
        (0, 0.45, {2}),
        (0, 0.55, {0, 2}),  # 0.5 falls short of 0.55, so the next one is taken too
        (0, 0.85, {0, 2, 3}),
        (0, 1e-6, {2}),  # the likeliest always stays
        (2, 0.6, {2}),  # of the two that top_k leaves, renormalised, the first holds 0.625
        (2, 0.7, {0, 2}),
    ],
)
def test_what_top_k_and_top_p_keep(top_k, top_p, want):
    assert kept(np.log([0.3, 0.05, 0.5, 0.15]), top_k, top_p) == want


def draw(row: Sampling, logits, times: int, how: str) -> np.ndarray:
    """Frequencies of tokens over `times` positions of one row."""
    n = len(logits)
    settings = {k: jnp.asarray(v) for k, v in stack([row] * times).items()}
    tokens = jax.jit(sample, static_argnums=3)(jnp.tile(jnp.asarray(logits, jnp.float32), (times, 1)), settings, jnp.arange(times), how)
    return np.bincount(np.asarray(tokens), minlength=n) / times


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_temperature(temperature):
    logits, times = np.array([1.0, 0.0, -0.5, 2.0]), 20_000
    p = np.exp(logits / temperature)
    p /= p.sum()
    for how in ("random", "filtered"):
        got = draw(Sampling(temperature=temperature, seed=5), logits, times, how)
        assert (np.abs(got - p) < 5 * np.sqrt(p * (1 - p) / times)).all(), (got, p)  # five standard deviations


def test_frequencies_follow_top_p():
    p, times = np.array([0.3, 0.05, 0.5, 0.15]), 20_000
    got = draw(Sampling(temperature=1.0, top_p=0.7, seed=1), np.log(p), times, "filtered")
    assert got[1] == got[3] == 0
    assert abs(got[2] - 0.5 / 0.8) < 5 * np.sqrt(0.25 / times)


def test_rows_of_a_batch_follow_their_own_settings():
    rows = [Sampling(), Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, top_k=1), Sampling(temperature=1.0, seed=2)]
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 50)), jnp.float32)
    assert mode(rows) == "filtered"
    together = np.asarray(sample(logits, stack(rows), jnp.full(4, 9), "filtered"))
    assert together[0] == logits[0].argmax() and together[2] == logits[2].argmax()
    for i in (1, 3):
        alone = sample(logits[i : i + 1], stack(rows[i : i + 1]), jnp.full(1, 9), "random")
        assert together[i] == alone[0]


def test_the_cheapest_mode_is_chosen():
    assert mode([Sampling(), Sampling(top_k=5)]) == "greedy"  # top_k has no say at temperature 0
    assert mode([Sampling(temperature=1e-38)]) == "greedy"  # dividing by it would overflow
    assert mode([Sampling(), Sampling(temperature=1.0)]) == "random"
    assert mode([Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9)]) == "filtered"


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("temperature", None), ("top_k", -1), ("top_k", "5"), ("top_k", 2**40),
     ("top_p", 0.0), ("top_p", 1.1), ("seed", -1), ("seed", 2**32), ("seed", float("inf"))],
)
def test_values_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field} = "):
        Sampling(**{field: value})
