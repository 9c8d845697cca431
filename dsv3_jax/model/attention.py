"""Multi-head latent attention: projections, then naive (keys and values per head) or absorb (attention in the latent space).

B batch, T tokens, S cache slots, H heads, R kv_lora_rank, N qk_nope_head_dim, P qk_rope_head_dim, V v_head_dim.
Source: DeepSeek-V2 report, section 2.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.kernels import attention as kernel
from dsv3_jax.model import rope
from dsv3_jax.model.cache import LayerCache, layer_axes, write
from dsv3_jax.model.layers import Linear, RMSNorm, dequantised, on_shards
from dsv3_jax.model.options import Options
from dsv3_jax.sharding import Sharding

LATENT_EPS = 1e-6  # of the q_a and kv_a norms, whatever rms_norm_eps says


class MLA(nnx.Module):
    """Attention of one layer; heads are cut over the mesh, the latent is not."""

    def __init__(self, config: ModelConfig, options: Options, sharding: Sharding):
        c, common = config, (config, options, sharding)
        heads, width = c.num_attention_heads, c.hidden_size
        if c.q_lora_rank is None:
            self.q_proj = Linear((heads * c.qk_head_dim, width), ("heads", None), *common)
        else:
            self.q_a_proj = Linear((c.q_lora_rank, width), (None, None), *common, in_reference=True)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, LATENT_EPS, options, sharding)
            self.q_b_proj = Linear((heads * c.qk_head_dim, c.q_lora_rank), ("heads", None), *common)
        self.kv_a_proj_with_mqa = Linear((c.kv_lora_rank + c.qk_rope_head_dim, width), (None, None), *common, in_reference=True)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, LATENT_EPS, options, sharding)
        self.kv_b_proj = Linear((heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank), ("heads", None), *common)
        self.o_proj = Linear((width, heads * c.v_head_dim), (None, "heads"), *common)
        self.config, self.options, self.sharding = config, options, sharding
        self.softmax_scale = rope.softmax_scale(config)

    def absorb(self) -> None:
        """Replace kv_b_proj by its two halves per head, dequantised once: w_uk (H, N, R) and w_uv (H, V, R)."""
        c, halves = self.config, self.sharding.spec("heads", None, None)

        def split(*kv_b):
            w = dequantised(kv_b, self.options).reshape(-1, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
            return w[:, : c.qk_nope_head_dim], w[:, c.qk_nope_head_dim :]

        kv_b = self.kv_b_proj.arrays()
        w_uk, w_uv = jax.jit(on_shards(self.sharding, split, (self.kv_b_proj.spec,) * len(kv_b), (halves, halves)))(*kv_b)
        del self.kv_b_proj
        self.w_uk, self.w_uv = nnx.Param(w_uk, out_sharding=halves), nnx.Param(w_uv, out_sharding=halves)

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, positions: jax.Array, slots: jax.Array, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        """x (B, T, D); cos, sin (B, T, P/2); positions (B, T) to attend up to; slots (B, T) to write to. Returns y (B, T, D), the cache."""
        c, sh = self.config, self.sharding
        q = self.q_proj(x) if c.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))  # (B, T, H*(N+P))
        latent = self.kv_a_proj_with_mqa(x)  # (B, T, R+P)
        c_kv, k_pe = self.kv_a_layernorm(latent[..., : c.kv_lora_rank]), latent[..., c.kv_lora_rank :]

        by_head, by_row = sh.spec("batch", None, "heads"), sh.spec("batch", None, None)
        rows = (q, c_kv, k_pe, cos, sin, positions, slots)
        row_specs = (by_head, by_row, by_row, by_row, by_row, sh.spec("batch", None), sh.spec("batch", None))
        if self.options.attn_impl == "absorb":
            core, extra, extra_spec = self._absorb, (self.w_uk[...], self.w_uv[...]), sh.spec("heads", None, None)
        else:
            core, extra, extra_spec = self._naive, (self.kv_b_proj(c_kv),), by_head
        cache_spec = (sh.spec(*layer_axes(self.options)),) * len(cache)
        region = on_shards(sh, core, (*row_specs, (extra_spec,) * len(extra), cache_spec), (by_head, cache_spec))
        o, cache = region(*rows, extra, cache)
        return self.o_proj(o), cache

    def _absorb(self, q, c_kv, k_pe, cos, sin, positions, slots, w_u, cache):
        """Attention on local heads as multi-query attention over the latent; w_u holds w_uk (H, N, R) and w_uv (H, V, R)."""
        c, (w_uk, w_uv), (latent,) = self.config, w_u, cache
        q_nope, q_pe = self._split_heads(q, cos, sin)
        q_latent = jnp.einsum("bthn,hnr->bthr", q_nope, w_uk)
        entry = jnp.concatenate([c_kv, rope.apply_rope(k_pe, cos, sin)], axis=-1)
        latent = write(latent, entry[:, :, None], slots)  # (B, S, 1, R+P)
        o = self._attend(jnp.concatenate([q_latent, q_pe], axis=-1), latent, latent[..., : c.kv_lora_rank], positions)
        o = jnp.einsum("bthr,hvr->bthv", o, w_uv)
        return o.reshape(*o.shape[:2], -1), (latent,)

    def _naive(self, q, c_kv, k_pe, cos, sin, positions, slots, kv, cache):
        """Attention on local heads with a key and a value per head, expanded from the latent by kv_b_proj."""
        c, (kv,), (keys, values) = self.config, kv, cache
        q_nope, q_pe = self._split_heads(q, cos, sin)
        kv = kv.reshape(*kv.shape[:2], -1, c.qk_nope_head_dim + c.v_head_dim)
        k_nope, v = kv[..., : c.qk_nope_head_dim], kv[..., c.qk_nope_head_dim :]
        k_pe = jnp.broadcast_to(rope.apply_rope(k_pe, cos, sin)[:, :, None], (*k_nope.shape[:3], c.qk_rope_head_dim))
        keys = write(keys, jnp.concatenate([k_nope, k_pe], axis=-1), slots)  # (B, S, H, N+P)
        values = write(values, v, slots)
        o = self._attend(jnp.concatenate([q_nope, q_pe], axis=-1), keys, values, positions)
        return o.reshape(*o.shape[:2], -1), (keys, values)

    def _split_heads(self, q, cos, sin):
        q = q.reshape(*q.shape[:2], -1, self.config.qk_head_dim)  # (B, T, H, N+P)
        return q[..., : self.config.qk_nope_head_dim], rope.apply_rope(q[..., self.config.qk_nope_head_dim :], cos, sin)

    def _attend(self, q, k, v, positions):
        return kernel.attend(q, k, v, positions, self.softmax_scale, implementation=self.options.implementation)
