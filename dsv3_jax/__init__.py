"""Inference for the DeepSeek-V2/V3 family in JAX and Flax NNX."""

from typing import TYPE_CHECKING

from dsv3_jax.config import ModelConfig

if TYPE_CHECKING:
    from dsv3_jax.generation.engine import Completion, Engine
    from dsv3_jax.generation.sampling import Sampling

__all__ = ["Completion", "Engine", "ModelConfig", "Sampling"]

_LAZY = {"Completion": "engine", "Engine": "engine", "Sampling": "sampling"}


def __getattr__(name: str):
    """Import the engine, and with it JAX, on first use: reading a config or a file needs neither."""
    if name not in _LAZY:
        raise AttributeError(f"module 'dsv3_jax' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"dsv3_jax.generation.{_LAZY[name]}"), name)
