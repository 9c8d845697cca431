"""Multi-head latent attention: projections, then naive (keys and values per head) or absorb (attention in the latent space).

B batch, T tokens, S cache slots, H heads, R kv_lora_rank, N qk_nope_head_dim, P qk_rope_head_dim, V v_head_dim.
Source: DeepSeek-V2 report, section 2.1.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3_jax.config import BLOCK, ModelConfig
from dsv3_jax.kernels import dispatch, mla_prefill
from dsv3_jax.kernels.attention import attend
from dsv3_jax.kernels.mla_decode import mla_decode
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
        """Replace kv_b_proj by its two halves per head, dequantised once: w_uk (H, R, N) and w_uv (H, V, R), as decoding sums them."""
        c, halves = self.config, self.sharding.spec("heads", None, None)

        def split(*kv_b):
            w = dequantised(kv_b, self.options).reshape(-1, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
            return w[:, : c.qk_nope_head_dim].swapaxes(1, 2), w[:, c.qk_nope_head_dim :]

        kv_b = self.kv_b_proj.arrays()
        w_uk, w_uv = jax.jit(on_shards(self.sharding, split, (self.kv_b_proj.spec,) * len(kv_b), (halves, halves)))(*kv_b)
        del self.kv_b_proj
        self.w_uk, self.w_uv = nnx.Param(w_uk, out_sharding=halves), nnx.Param(w_uv, out_sharding=halves)

    def join(self) -> None:
        """Put q_a_proj, or q_proj, and kv_a_proj_with_mqa, which read the same rows, side by side as qkv_a_proj: one product, not two.

        They stay apart where q_proj is cut over the mesh, which kv_a is not, and where a block of scales would reach over both.
        """
        name = "q_proj" if self.config.q_lora_rank is None else "q_a_proj"
        q, joined = getattr(self, name), self.kv_a_proj_with_mqa
        cut = name == "q_proj" and self.sharding.size("heads") > 1
        if cut or q.scale_fmt != joined.scale_fmt or (q.quantized and q.weight.shape[0] % BLOCK):
            return
        delattr(self, name)
        del self.kv_a_proj_with_mqa
        for part in ("weight", "weight_scale_inv")[: len(q.arrays())]:
            both = jnp.concatenate([jax.sharding.reshard(getattr(linear, part)[...], joined.spec) for linear in (q, joined)])
            setattr(joined, part, nnx.Param(both, out_sharding=joined.spec))
        self.qkv_a_proj = joined

    @jax.named_scope("attention_projections")
    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        positions: jax.Array,
        slots: jax.Array,
        cache: LayerCache,
        context: int | None = None,
        rows: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """x (B, T, D); cos, sin (B, T, P/2); positions (B, T) to attend up to; slots (B, T) to write to. Returns y (B, T, D), the cache.

        context: no row uses more slots than this once x is written, so that the others are not read; None for all. rows (B,) int32: the
        rows of the cache, on each device counted from its first; None for all.
        """
        c, sh = self.config, self.sharding
        q, latent = self._projections(x)  # (B, T, H*(N+P)), (B, T, R+P)
        c_kv, k_pe = self.kv_a_layernorm(latent[..., : c.kv_lora_rank]), latent[..., c.kv_lora_rank :]

        by_head, by_row = sh.spec("batch", None, "heads"), sh.spec("batch", None, None)
        tokens = (q, c_kv, k_pe, cos, sin, positions, slots, rows)
        token_specs = (by_head, by_row, by_row, by_row, by_row, sh.spec("batch", None), sh.spec("batch", None), sh.spec("batch"))
        if self.options.attn_impl == "absorb":
            core, extra, extra_spec = self._absorb, (self.w_uk[...], self.w_uv[...]), sh.spec("heads", None, None)
        else:
            core, extra, extra_spec = self._naive, (self.kv_b_proj(c_kv),), by_head
        cache_spec = (sh.spec(*layer_axes(self.options)),) * len(cache)
        core = functools.partial(core, context=context)
        region = on_shards(sh, core, (*token_specs, (extra_spec,) * len(extra), cache_spec), (by_head, cache_spec))
        o, cache = region(*tokens, extra, cache)
        return self.o_proj(o), cache

    def _projections(self, x):
        low_rank = self.config.q_lora_rank is not None
        if hasattr(self, "qkv_a_proj"):
            both = self.qkv_a_proj(x)
            q, latent = jnp.split(both, [both.shape[-1] - self.config.kv_lora_rank - self.config.qk_rope_head_dim], axis=-1)
        else:
            q, latent = (self.q_a_proj if low_rank else self.q_proj)(x), self.kv_a_proj_with_mqa(x)
        if low_rank:
            return self.q_b_proj(self.q_a_layernorm(q)), latent
        return jax.sharding.reshard(q, self.sharding.spec("batch", None, "heads")), latent

    @jax.named_scope("attention")
    def _absorb(self, q, c_kv, k_pe, cos, sin, positions, slots, rows, w_u, cache, *, context):
        """Attention on local heads with the latent in the cache; w_u holds w_uk (H, R, N) and w_uv (H, V, R).

        One token a row attends in the latent space, as multi-query attention. For many, keys and values per head take 3.4 times fewer
        operations, if a kernel keeps the scores out of memory; without one the latent space needs less of it.
        """
        c, (w_uk, w_uv), (latent,) = self.config, w_u, cache
        q_nope, q_pe = self._split_heads(q, cos, sin)
        entry = jnp.concatenate([c_kv, rope.apply_rope(k_pe, cos, sin)], axis=-1)
        latent = write(latent, entry[:, :, None], slots, rows)  # (all rows, S, 1, R+P)
        seen = _seen(latent, rows, context)
        if q.shape[1] > 1 and self._prefill_has_kernel():
            c_kv, k_pe = seen[:, :, 0, : c.kv_lora_rank], seen[:, :, 0, c.kv_lora_rank :]
            k_nope, v = jnp.einsum("bsr,hrn->bshn", c_kv, w_uk), jnp.einsum("bsr,hvr->bshv", c_kv, w_uv)
            o = self._prefill(q_nope, q_pe, k_nope, k_pe, v, positions, slots)
            return o.reshape(*o.shape[:2], -1), (latent,)
        with jax.named_scope("attention_projections"):
            # Head-major, as a batched product leaves it; XLA would compute it within the concatenation, several times slower.
            q_latent = jax.lax.optimization_barrier(jnp.einsum("bthn,hrn->hbtr", q_nope, w_uk))
        q = jnp.concatenate([q_latent.transpose(1, 2, 0, 3), q_pe], axis=-1)
        if q.shape[1] == 1:
            arguments = (q[:, 0], seen[:, :, 0], positions[:, 0] + 1, self.softmax_scale, c.kv_lora_rank)
            o = mla_decode(*arguments, implementation=self.options.implementation)[:, None]
        else:
            o = self._attend(q, seen, seen[..., : c.kv_lora_rank], positions)
        with jax.named_scope("attention_projections"):
            o = jnp.einsum("bthr,hvr->bthv", o, w_uv)
        return o.reshape(*o.shape[:2], -1), (latent,)

    @jax.named_scope("attention")
    def _naive(self, q, c_kv, k_pe, cos, sin, positions, slots, rows, kv, cache, *, context):
        """Attention on local heads with a key and a value per head in the cache, expanded from the latent by kv_b_proj."""
        c, (kv,), (keys, values) = self.config, kv, cache
        q_nope, q_pe = self._split_heads(q, cos, sin)
        kv = kv.reshape(*kv.shape[:2], -1, c.qk_nope_head_dim + c.v_head_dim)
        k_nope, v = kv[..., : c.qk_nope_head_dim], kv[..., c.qk_nope_head_dim :]
        k_pe = jnp.broadcast_to(rope.apply_rope(k_pe, cos, sin)[:, :, None], (*k_nope.shape[:3], c.qk_rope_head_dim))
        keys = write(keys, jnp.concatenate([k_nope, k_pe], axis=-1), slots, rows)  # (all rows, S, H, N+P)
        values = write(values, v, slots, rows)
        k, v = _seen(keys, rows, context), _seen(values, rows, context)
        if q.shape[1] > 1 and self._prefill_has_kernel():
            k_nope, k_pe = k[..., : c.qk_nope_head_dim], k[:, :, 0, c.qk_nope_head_dim :]
            o = self._prefill(q_nope, q_pe, k_nope, k_pe, v, positions, slots)
        else:
            o = self._attend(jnp.concatenate([q_nope, q_pe], axis=-1), k, v, positions)
        return o.reshape(*o.shape[:2], -1), (keys, values)

    def _split_heads(self, q, cos, sin):
        q = q.reshape(*q.shape[:2], -1, self.config.qk_head_dim)  # (B, T, H, N+P)
        return q[..., : self.config.qk_nope_head_dim], rope.apply_rope(q[..., self.config.qk_nope_head_dim :], cos, sin)

    def _attend(self, q, k, v, positions):
        return attend(q, k, v, positions, self.softmax_scale, implementation=self.options.implementation)

    def _prefill(self, q_nope, q_pe, k_nope, k_pe, v, positions, slots):
        """Attention of many tokens on the kernel; a token that is written nowhere is padding."""
        new = jnp.sum(slots < jnp.iinfo(jnp.int32).max, axis=1, dtype=jnp.int32)
        q = jnp.concatenate([q_nope, q_pe], axis=-1)
        arguments = (q, k_nope, k_pe, v, positions[:, 0], new, self.softmax_scale)
        return mla_prefill.mla_prefill(*arguments, implementation=self.options.implementation)

    def _prefill_has_kernel(self) -> bool:
        """Whether many tokens attend on a kernel here; where one is named, it runs or raises."""
        c, o = self.config, self.options
        if o.implementation == "triton" or dispatch.resolve("mla_prefill", o.implementation) == "xla":
            return o.implementation == "triton"
        return mla_prefill.unsupported(c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, o.dtype) is None


def _seen(slots: jax.Array, rows: jax.Array | None, context: int | None) -> jax.Array:
    """What these rows attend to: their first `context` slots."""
    return slots[:, :context] if rows is None else slots[:, :context][rows]
