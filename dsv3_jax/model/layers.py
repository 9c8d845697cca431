"""The small parts: parameters that know their sharding, RMSNorm, Linear (plain or FP8), Embedding and LMHead.

B batch, T tokens, D hidden_size, V vocab_size, N out, K in, P projections side by side.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3_jax.config import BLOCK, ModelConfig
from dsv3_jax.kernels import fp8_gemm, quantize
from dsv3_jax.model.options import Options
from dsv3_jax.sharding import Sharding

FP8 = quantize.FP8


def param(sharding: Sharding, shape: tuple[int, ...], dtype, axes: tuple[str | None, ...]) -> nnx.Param:
    """A parameter laid out over the mesh by its logical axes.

    The layout is said twice, to the array and to the Param: with only one of them every device would load the whole tensor.
    """
    spec = sharding.spec(*axes)
    return nnx.Param(jnp.zeros(shape, dtype, out_sharding=sharding.named(*axes)), out_sharding=spec)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last dim, in float32, rounded once to the input's dtype."""

    def __init__(self, features: int, eps: float, options: Options, sharding: Sharding):
        self.weight = param(sharding, (features,), options.dtype, (None,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class Linear(nnx.Module):
    """y = x W^T, with W (N, K), or (P, N, K) for P projections side by side, cut over the mesh along N or along K.

    W is stored plain or, for the linears that FP8 releases quantise, as e4m3 codes with one float32 scale per 128x128 block.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        config: ModelConfig,
        options: Options,
        sharding: Sharding,
        *,
        in_reference: bool = False,
    ):
        self.quantized = config.quantization_config is not None
        self.weight = param(sharding, shape, FP8 if self.quantized else options.dtype, axes)
        if self.quantized:
            *lead, n, k = shape
            self.weight_scale_inv = param(sharding, (*lead, -(-n // BLOCK), -(-k // BLOCK)), jnp.float32, axes)
        self.axes, self.options, self.sharding = axes, options, sharding
        self.scale_fmt = options.scale_fmt(config, in_reference=in_reference)

    def arrays(self) -> tuple[jax.Array, ...]:
        """What a shard_map region needs of this weight: (weight,) or (codes, scales), each laid out by `self.spec`."""
        return (self.weight[...], self.weight_scale_inv[...]) if self.quantized else (self.weight[...],)

    @property
    def spec(self):
        return self.sharding.spec(*self.axes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (B, T, K) -> (B, T, N) or (B, T, P, N), of x's dtype."""
        x_spec = self.sharding.spec("batch", None, self.axes[-1])
        y_spec = self.sharding.spec("batch", None, *self.axes[:-1])
        if not self.quantized:
            return jnp.einsum("btk,...nk->bt...n", x, self.weight[...].astype(x.dtype), out_sharding=y_spec)

        def local(x, *weight):
            y = multiply(x.reshape(-1, x.shape[-1]), weight, self.options, self.scale_fmt, x.dtype)
            y = y.reshape(*x.shape[:2], *weight[0].shape[:-1])
            return jax.lax.psum(y, self.sharding.axes(self.axes[-1])) if self.axes[-1] else y

        return on_shards(self.sharding, local, (x_spec, self.spec, self.spec), y_spec)(x, *self.arrays())


def on_shards(sharding: Sharding, f, in_specs, out_specs):
    """Run f on each device's own shards: kernels are opaque to the partitioner and see local arrays only."""
    return jax.shard_map(f, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def multiply(x: jax.Array, weight: tuple[jax.Array, ...], options: Options, scale_fmt: str | None, out_dtype) -> jax.Array:
    """x (M, K) times one local weight, given as Linear.arrays(): (M, prod(...) * N) of out_dtype, accumulated in float32."""
    if len(weight) == 2 and options.gemm_impl == "fp8":
        codes, scale = quantize.act_quant(x, scale_fmt, implementation=options.implementation)
        return fp8_gemm.fp8_gemm(codes, scale, *weight, out_dtype, implementation=options.implementation)
    w = dequantised(weight, options)
    return jnp.einsum("mk,nk->mn", x, w.reshape(-1, w.shape[-1]), preferred_element_type=out_dtype)


def dequantised(weight: tuple[jax.Array, ...], options: Options) -> jax.Array:
    """The plain weight, of options.dtype."""
    if len(weight) == 2:
        return quantize.weight_dequant(*weight, options.dtype, implementation=options.implementation)
    return weight[0].astype(options.dtype)


def swiglu(gate_up: jax.Array, axis: int) -> jax.Array:
    """silu(gate) * up, in float32, rounded once; gate and up lie at 0 and 1 of `axis`."""
    gate, up = (jax.lax.index_in_dim(gate_up, i, axis, keepdims=False).astype(jnp.float32) for i in (0, 1))
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


class MLP(nnx.Module):
    """The dense feed-forward layer, and the shared experts: down(silu(gate(x)) * up(x)), the width cut over the mesh."""

    def __init__(self, width: int, config: ModelConfig, options: Options, sharding: Sharding):
        d, common = config.hidden_size, (config, options, sharding)
        self.gate_up_proj = Linear((2, width, d), (None, "ffn", None), *common)
        self.down_proj = Linear((d, width), (None, "ffn"), *common)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(swiglu(self.gate_up_proj(x), axis=2))


class Embedding(nnx.Module):
    """Rows of the embedding table, which is cut over the vocabulary."""

    def __init__(self, config: ModelConfig, options: Options, sharding: Sharding):
        self.weight = param(sharding, (config.vocab_size, config.hidden_size), options.dtype, ("vocab", None))
        self.dtype, self.sharding = options.dtype, sharding

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens (B, T) -> (B, T, D)."""
        rows = self.weight[...].at[tokens].get(out_sharding=self.sharding.spec("batch", None, None))
        return rows.astype(self.dtype)


class LMHead(nnx.Module):
    """Logits in float32: in bf16 about one row in twenty ties at the top of a vocabulary of 129,280."""

    def __init__(self, config: ModelConfig, options: Options, sharding: Sharding):
        self.weight = param(sharding, (config.vocab_size, config.hidden_size), options.dtype, ("vocab", None))
        self.sharding = sharding

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (B, T, D) -> (B, T, V) float32."""
        out = self.sharding.spec("batch", None, "vocab")
        return jnp.einsum("btd,vd->btv", x, self.weight[...].astype(x.dtype), preferred_element_type=jnp.float32, out_sharding=out)
