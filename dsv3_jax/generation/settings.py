"""What an engine is asked for, checked and completed before any weight is read: options, mesh and limits."""

from __future__ import annotations

import dataclasses
import os

import jax

from dsv3_jax import sharding as sharding_lib
from dsv3_jax.config import ModelConfig
from dsv3_jax.generation import requests
from dsv3_jax.kernels import dispatch
from dsv3_jax.model.options import Options
from dsv3_jax.sharding import Sharding

DEFAULT_SEQ_LEN = 4096


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model is to run: nothing is left to choose."""

    options: Options
    sharding: Sharding
    max_seq_len: int
    max_batch_size: int


def settle(
    config: ModelConfig,
    mesh: str,
    expert_axes: str,
    max_seq_len: int | None,
    max_batch_size: int,
    gemm_impl: str | None,
    **options,
) -> Settings:
    """Check what Engine.from_checkpoint was given and choose what it was not; `options` are those of Options.

    Raises ValueError for what does not fit the model, the rest or the devices, which are asked last. Keeps compiled programs from here on.
    """
    most = config.max_position_embeddings
    max_seq_len = requests.whole("max_seq_len", min(DEFAULT_SEQ_LEN, most) if max_seq_len is None else max_seq_len, 2, most)
    max_batch_size = requests.whole("max_batch_size", max_batch_size, 1)
    chosen = Options(gemm_impl=gemm_impl or "bf16", **options)
    sharding_lib.check(config, mesh, expert_axes)
    chosen.check(config)
    use_compilation_cache()
    sharding = sharding_lib.make_sharding(mesh, expert_axes)
    may_quantise = gemm_impl is None and config.quantization_config and chosen.dtype == "bfloat16"  # float32 wants no rounding
    if may_quantise and dispatch.resolve("fp8_gemm", chosen.implementation) == "triton":
        chosen = dataclasses.replace(chosen, gemm_impl="fp8")
        chosen.check(config)
    return Settings(chosen, sharding, max_seq_len, max_batch_size)


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, in JAX_COMPILATION_CACHE_DIR or the user's cache folder."""
    if jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(base, "dsv3_jax", "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
