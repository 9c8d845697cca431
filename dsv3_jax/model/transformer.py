"""The whole forward pass on one page.

B batch, T tokens per row in this call (padded), D hidden_size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.model.attention import MLA
from dsv3_jax.model.cache import KVCache, LayerCache, put_rows, take_rows
from dsv3_jax.model.layers import MLP, Embedding, LMHead, RMSNorm, param
from dsv3_jax.model.moe import MoE, Routing
from dsv3_jax.model.options import Options
from dsv3_jax.sharding import Sharding


class Block(nnx.Module):
    """One decoder layer: attention, then a dense MLP or experts, each on the normalised residual stream."""

    def __init__(self, layer: int, config: ModelConfig, options: Options, sharding: Sharding):
        common = (config, options, sharding)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, options, sharding)
        self.self_attn = MLA(*common)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, options, sharding)
        self.mlp = MoE(*common) if config.is_moe_layer(layer) else MLP(config.intermediate_size, *common)

    def __call__(
        self, x, update, cos, sin, positions, slots, valid, cache: LayerCache, context: int | None, rows: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, LayerCache, Routing | None]:
        """x and what the layer before adds to it -> x, what this one adds, the layer's cache, and its routing if it has any."""
        x, h = self.input_layernorm.after(x, update)
        h, cache = self.self_attn(h, cos, sin, positions, slots, cache, context, rows)
        x, h = self.post_attention_layernorm.after(x, h)
        h, routing = self.mlp(h, valid) if isinstance(self.mlp, MoE) else (self.mlp(h), None)
        return x, h, cache, routing


class RopeTable(nnx.Module):
    """Cosines and sines by position; filled at load, not part of a checkpoint."""

    def __init__(self, config: ModelConfig, length: int, sharding: Sharding):
        shape = (length, config.qk_rope_head_dim // 2)
        self.cos = param(sharding, shape, jnp.float32, (None, None))
        self.sin = param(sharding, shape, jnp.float32, (None, None))
        self.length, self.sharding = length, sharding

    def __call__(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """positions (B, T) -> cos and sin, each (B, T, qk_rope_head_dim / 2)."""
        index = jnp.minimum(positions, self.length - 1)
        out = self.sharding.spec("batch", None, None)
        return tuple(t[...].at[index].get(out_sharding=out) for t in (self.cos, self.sin))


class Transformer(nnx.Module):
    """A model of the family, from token ids to the normalised last hidden state; `lm_head` makes logits of it."""

    def __init__(self, config: ModelConfig, options: Options, sharding: Sharding, max_seq_len: int):
        common = (config, options, sharding)
        self.rope = RopeTable(config, max_seq_len, sharding)
        self.embed_tokens = Embedding(*common)
        self.layers = nnx.List([Block(i, *common) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options, sharding)
        self.lm_head = LMHead(*common)
        self.config = config

    def __call__(
        self, tokens: jax.Array, new: jax.Array, cache: KVCache, context: int | None = None, rows: jax.Array | None = None
    ) -> tuple[jax.Array, KVCache, list[Routing]]:
        """Append the first new[b] of tokens[b] to each row b.

        tokens (B, T) int32, new (B,) int32; context: no row uses more slots than this afterwards, None for as many as there are, which
        bounds the work and changes no result; rows (B,) int32: which of the cache's rows these are, as take_rows counts them, None for
        all. Returns the hidden state after the last norm (B, T, D), the cache, and where each MoE layer routed the tokens; past new[b] a
        row's hidden state and routing mean nothing.
        """
        steps = jnp.arange(tokens.shape[1])
        lengths = take_rows(cache.lengths, rows)
        positions = lengths[:, None] + steps  # (B, T)
        valid = steps < new[:, None]
        slots = jnp.where(valid, positions, jnp.iinfo(jnp.int32).max)  # padding is written nowhere
        cos, sin = self.rope(positions)
        x, update = self.embed_tokens(tokens), None  # a sum is taken with the norm that follows it
        layers, routings = [], []
        for block, layer in zip(self.layers, cache.layers, strict=True):
            x, update, layer, routing = block(x, update, cos, sin, positions, slots, valid, layer, context, rows)
            layers.append(layer)
            routings += [] if routing is None else [routing]
        return self.norm.after(x, update)[1], KVCache(tuple(layers), put_rows(cache.lengths, rows, lengths + new)), routings
