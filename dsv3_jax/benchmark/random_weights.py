"""An engine with random weights, made on the devices: for benchmarks, where no checkpoint has to be at hand.

Weights have the spread that keeps activations and router scores as wide as a trained model's, so that tokens differ, and with them
the experts that they are routed to. E experts, N rows out, K columns in.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsv3_jax.checkpoint import load
from dsv3_jax.config import ModelConfig
from dsv3_jax.generation import requests
from dsv3_jax.generation.engine import Engine
from dsv3_jax.generation.settings import settle
from dsv3_jax.model import rope
from dsv3_jax.model.layers import FP8
from dsv3_jax.sharding import Sharding

BIAS = 0.01  # spread of the router's correction bias, next to scores that spread by 0.2


def random_engine(
    config: ModelConfig,
    mesh: str = "data=1,model=1",
    dtype: str = "bfloat16",
    attn_impl: str = "absorb",
    gemm_impl: str | None = None,
    max_seq_len: int | None = None,
    max_batch_size: int = 8,
    *,
    num_hidden_layers: int | None = None,
    seed: int = 0,
    expert_axes: str = "model",
    implementation: str | None = None,
) -> Engine:
    """Build an engine whose weights are random: the same for a seed on every mesh.

    num_hidden_layers: keep only the first so many layers. The rest is as in Engine.from_checkpoint, ValueErrors included.
    """
    config = truncated(config, num_hidden_layers)
    chosen = {"dtype": dtype, "attn_impl": attn_impl, "gemm_impl": gemm_impl, "implementation": implementation}
    s = settle(config, mesh, expert_axes, max_seq_len, max_batch_size, **chosen)
    graph, abstract = load.abstract_model(config, s.options, s.sharding, s.max_seq_len)
    params = random_params(abstract, config, s.sharding, s.max_seq_len, seed)
    graph, params = load.prepare(graph, params, s.options, s.sharding)
    return Engine(config, s, graph, params)


def truncated(config: ModelConfig, num_hidden_layers: int | None) -> ModelConfig:
    """The model's first layers only; raises ValueError for more than it has."""
    if num_hidden_layers is None:
        return config
    n = requests.whole("num_hidden_layers", num_hidden_layers, 1, config.num_hidden_layers)
    return dataclasses.replace(config, num_hidden_layers=n, first_k_dense_replace=min(config.first_k_dense_replace, n))


def random_params(abstract: load.Params, config: ModelConfig, sharding: Sharding, max_seq_len: int, seed: int) -> load.Params:
    """Parameters as `abstract` describes them, one at a time, so that no more memory is used than they take, and one expert's."""
    cos, sin = rope.tables(config, max_seq_len)
    whole = sharding.named(None, None)

    def fill(tree: load.Params, path: tuple[str, ...]) -> load.Params:
        made = {}
        for name, leaf in tree.items():
            if isinstance(leaf, dict):
                made[name] = fill(leaf, (*path, name))
            else:
                columns = tree["weight"].shape[-1] if "weight" in tree else 1
                made[name] = _random(leaf, (*path, name), columns, sharding, seed)
        return made

    with jax.set_mesh(sharding.mesh):
        params = fill({name: tree for name, tree in abstract.items() if name != "rope"}, ())
        return {**params, "rope": {"cos": jax.device_put(cos, whole), "sin": jax.device_put(sin, whole)}}


def _random(leaf, path: tuple[str, ...], columns: int, sharding: Sharding, seed: int) -> jax.Array:
    """One parameter of the shape, dtype and sharding of `leaf`; `columns` is K of the weight that it is or belongs to."""
    owner, name = path[-2:]
    per_expert = sharding.expert_axes if "experts" in path else ()
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32("/".join(path).encode()))
    kind, spread = "normal", 1 / math.sqrt(columns)
    if name == "weight_scale_inv":
        kind, spread = "constant", spread / code_rms()
    elif name == "e_score_correction_bias":
        spread = BIAS
    elif "norm" in path[-2]:
        kind, spread = "constant", 1.0
    elif owner == "embed_tokens":
        spread = 1.0
    elif leaf.dtype == FP8:
        kind = "codes"
    return _maker(kind, leaf.shape, np.dtype(leaf.dtype), leaf.sharding, per_expert)(key, spread)


@functools.lru_cache(maxsize=128)
def _maker(kind: str, shape: tuple[int, ...], dtype, layout, per_expert: tuple[str, ...]):
    """A compiled (key, spread) -> array laid out by `layout`; one serves all layers.

    Experts are made one after the other, each from its own key: all at once, the random bits alone could take four times their memory.
    """

    def one(key, spread, shape, layout=None):
        if kind == "constant":
            return jnp.full(shape, spread, dtype, out_sharding=layout)
        if kind == "codes":
            return finite_codes(jax.random.bits(key, shape, jnp.uint8, out_sharding=layout))
        return (jax.random.normal(key, shape, jnp.float32, out_sharding=layout) * spread).astype(dtype)

    if not per_expert or kind == "constant":
        return jax.jit(functools.partial(one, shape=shape, layout=layout))
    local = layout.shard_shape(shape)[0]

    def experts_here(key, spread):
        first = jax.lax.axis_index(per_expert) * local
        return jax.lax.map(lambda i: one(jax.random.fold_in(key, first + i), spread, shape[1:]), jnp.arange(local))

    spec = jax.sharding.PartitionSpec
    return jax.jit(jax.shard_map(experts_here, mesh=layout.mesh, in_specs=(spec(), spec()), out_specs=layout.spec, check_vma=False))


def finite_codes(bits: jax.Array) -> jax.Array:
    """Random bytes as e4m3 codes, the two that are NaN (0x7f and 0xff) as zeros."""
    nan = (bits & 0x7F) == 0x7F
    return jax.lax.bitcast_convert_type(jnp.where(nan, jnp.uint8(0), bits), FP8)


def code_rms() -> float:
    """Root mean square of `finite_codes` of all bytes."""
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return math.sqrt(np.nan_to_num(values**2, nan=0.0).mean())
