"""RoPE and YaRN against published values and a float64 formula written out here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dsv3_jax.config import ModelConfig
from dsv3_jax.model import rope


def preset(name: str) -> ModelConfig:
    return ModelConfig.from_json(f"configs/{name}.json")


def test_adjacent_pairs_are_rotated():
    angles = np.array([0.3, 1.1], np.float32).reshape(1, 1, 2)
    got = rope.apply_rope(np.array([1, 2, 3, 4], np.float32).reshape(1, 1, 4), np.cos(angles), np.sin(angles))
    np.testing.assert_allclose(np.asarray(got).ravel(), [0.364296, 2.206193, -2.204041, 4.488007], atol=1e-6)


def test_heads_share_the_angle_of_their_position():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 5, 8)).astype(np.float32)
    angles = rng.normal(size=(2, 3, 4)).astype(np.float32)
    got = np.asarray(rope.apply_rope(x, np.cos(angles), np.sin(angles)))
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles.astype(np.float64))[:, :, None]
    np.testing.assert_allclose(got[..., 0::2], turned.real, atol=1e-6)
    np.testing.assert_allclose(got[..., 1::2], turned.imag, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "scale"), [("deepseek_v3_671b", 0.13523378), ("deepseek_v3.1_671b", 0.13523378), ("deepseek_v2_lite_16b", 0.11472139)]
)
def test_softmax_scale(name, scale):
    assert math.isclose(rope.softmax_scale(preset(name)), scale, rel_tol=1e-7)


def test_softmax_scale_without_yarn():
    plain = ModelConfig(**{**preset("deepseek_v3_671b").__dict__, "rope_scaling": None})
    assert math.isclose(rope.softmax_scale(plain), 0.07216878, rel_tol=1e-7)


def test_frequencies_of_deepseek_v3():
    """Pairs 0 to 10 turn as published without YaRN, 23 and up forty times slower, those between are blended."""
    config = preset("deepseek_v3_671b")
    plain = 10000.0 ** (-np.arange(32) / 32)
    ratio = rope.inverse_frequencies(config) / plain
    np.testing.assert_allclose(ratio[:11], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[[11, 16]], [0.925, 0.55], rtol=1e-5)
    np.testing.assert_allclose(ratio[23:], 0.025, rtol=1e-6)


@pytest.mark.parametrize("position", [0, 1, 4095, 4096, 5000, 100_000, 163_839])
def test_angles_far_out(position):
    """Positions in the thousands and past original_max_position_embeddings, where a mistaken mscale or table shows."""
    config = preset("deepseek_v3_671b")
    cos, sin = rope.tables(config, position + 1)
    angles = (np.float32(position) * rope.inverse_frequencies(config)).astype(np.float64)
    np.testing.assert_allclose(cos[position], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin[position], np.sin(angles), atol=1e-6)


def test_mscale_and_mscale_all_dim_are_different_things():
    """Published models set both alike; apart, cos and sin carry their ratio and the scores the square of the second."""
    config = preset("deepseek_v3_671b")
    both = config.__dict__ | {"rope_scaling": type(config.rope_scaling)(40, 4096, 32, 1, mscale=1.0, mscale_all_dim=0.5)}
    apart = ModelConfig(**both)
    m = lambda s: 0.1 * s * math.log(40) + 1  # noqa: E731
    cos, _ = rope.tables(apart, 1)
    np.testing.assert_allclose(cos[0], m(1.0) / m(0.5), rtol=1e-6)
    assert math.isclose(rope.softmax_scale(apart), 192**-0.5 * m(0.5) ** 2, rel_tol=1e-12)
