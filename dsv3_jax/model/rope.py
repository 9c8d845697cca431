"""Rotary position embedding with YaRN (arXiv:2309.00071): tables made on the host in float32, applied to adjacent pairs."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from dsv3_jax.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each rotated pair, (qk_rope_head_dim / 2,) float32.

    YaRN keeps the fast pairs, divides the slow ones by `factor` and blends linearly between the pairs that turn beta_fast and
    beta_slow times within the original length.
    """
    dim, theta = config.qk_rope_head_dim, config.rope_theta
    plain = (1.0 / (np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)))).astype(np.float32)
    r = config.rope_scaling
    if r is None:
        return plain

    def pair_that_turns(times: float) -> float:
        return dim * math.log(r.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(r.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(r.beta_slow)), dim - 1)
    ramp = (np.arange(dim // 2, dtype=np.float32) - low) / np.float32(high - low if high > low else 0.001)
    slow = np.clip(ramp, 0, 1).astype(np.float32)
    return (plain / np.float32(r.factor) * slow + plain * (1 - slow)).astype(np.float32)


def _mscale(r: RopeScaling, m: float) -> float:
    return 0.1 * m * math.log(r.factor) + 1.0 if r.factor > 1 else 1.0


def softmax_scale(config: ModelConfig) -> float:
    """What attention scores are multiplied by: qk_head_dim^-0.5 and, under YaRN, m(mscale_all_dim)^2."""
    scale = config.qk_head_dim**-0.5
    r = config.rope_scaling
    return scale if r is None else scale * _mscale(r, r.mscale_all_dim) ** 2


def tables(config: ModelConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of positions 0 to length - 1, each (length, qk_rope_head_dim / 2) float32.

    Under YaRN both carry the factor m(mscale) / m(mscale_all_dim), which is 1 in all published models.
    """
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse_frequencies(config)
    r = config.rope_scaling
    amplitude = np.float32(1.0 if r is None else _mscale(r, r.mscale) / _mscale(r, r.mscale_all_dim))
    return (np.cos(angles) * amplitude).astype(np.float32), (np.sin(angles) * amplitude).astype(np.float32)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate adjacent pairs (2j, 2j+1) of the last dim by angle j, in float32.

    x (B, T, ..., R); cos and sin (B, T, R/2). Returns x's shape and dtype.
    """
    dims = (*x.shape[:2], *(1,) * (x.ndim - 3), x.shape[-1] // 2)
    cos, sin = cos.reshape(dims), sin.reshape(dims)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape).astype(x.dtype)
