"""The key-value cache: passed into the forward pass, returned from it, and donated so that it is written in place.

B rows, G of them in one call, S slots per row, H heads, R kv_lora_rank.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv3_jax.config import ModelConfig
from dsv3_jax.model.options import Options
from dsv3_jax.sharding import Sharding

LayerCache = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """What attention remembers.

    layers: one entry per layer: absorb, (latent,) with latent (B, S, 1, R + qk_rope_head_dim), the normalised latent followed by the
    rotated shared key; naive, (keys, values) with (B, S, H, qk_head_dim) and (B, S, H, v_head_dim). lengths (B,) int32: slots in use.
    """

    layers: tuple[LayerCache, ...]
    lengths: jax.Array


def layer_shapes(config: ModelConfig, options: Options, batch: int, slots: int) -> list[tuple[int, ...]]:
    """Shapes of one layer's cache arrays."""
    if options.attn_impl == "absorb":
        return [(batch, slots, 1, config.kv_lora_rank + config.qk_rope_head_dim)]
    heads = (batch, slots, config.num_attention_heads)
    return [(*heads, config.qk_head_dim), (*heads, config.v_head_dim)]


def layer_axes(options: Options) -> tuple[str | None, ...]:
    """Logical axes of one layer's cache arrays: the latent is shared by all heads, keys and values are cut by head."""
    return ("batch", None, None if options.attn_impl == "absorb" else "heads", None)


def init_cache(config: ModelConfig, options: Options, sharding: Sharding, batch: int, slots: int) -> KVCache:
    """An empty cache for `batch` rows of `slots` tokens, zeroed and laid out over the mesh."""
    layout = sharding.named(*layer_axes(options))
    shapes = layer_shapes(config, options, batch, slots)
    layer = lambda: tuple(jnp.zeros(s, options.dtype, out_sharding=layout) for s in shapes)  # noqa: E731
    lengths = jnp.zeros((batch,), jnp.int32, out_sharding=sharding.named("batch"))
    return KVCache(tuple(layer() for _ in range(config.num_hidden_layers)), lengths)


def write(slots: jax.Array, new: jax.Array, positions: jax.Array, rows: jax.Array | None = None) -> jax.Array:
    """Put new (G, T, ...) into `rows` (G,) of slots (B, S, ...), None for all, at positions (G, T); S or more is dropped, not clamped."""
    rows = jnp.arange(slots.shape[0]) if rows is None else rows
    return slots.at[rows[:, None], positions].set(new.astype(slots.dtype), mode="drop")


def take_rows(a: jax.Array, rows: jax.Array | None) -> jax.Array:
    """Rows (G,) of a (B, ...), each counted from the first on its own device, where G and B lie over the mesh alike; None for all."""
    return a if rows is None else _by_device(lambda a, rows: a[rows], a, rows)


def put_rows(a: jax.Array, rows: jax.Array | None, new: jax.Array) -> jax.Array:
    """a (B, ...) with new (G, ...) in place of `rows`, as take_rows counts them; a row must not be named twice."""
    return new if rows is None else _by_device(lambda a, rows, new: a.at[rows].set(new), a, rows, new)


def _by_device(f, a: jax.Array, *arguments: jax.Array) -> jax.Array:
    specs = tuple(jax.typeof(x).sharding.spec for x in (a, *arguments))
    return jax.shard_map(f, in_specs=specs, out_specs=specs[0])(a, *arguments)
