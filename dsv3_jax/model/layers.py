"""The small parts: parameters that know their sharding, RMSNorm, Linear (plain or FP8), Embedding and LMHead.

B batch, T tokens, D hidden_size, V vocab_size, N out, K in, P projections side by side.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3_jax.config import BLOCK, ModelConfig
from dsv3_jax.kernels import fp8_gemm, quantize
from dsv3_jax.kernels.norm import add_rms_norm
from dsv3_jax.model.options import Options
from dsv3_jax.sharding import Sharding

FP8 = quantize.FP8
Arrays = tuple[jax.Array, ...]  # of a weight or of activations: (plain,), or (codes, scales)


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
        self.eps, self.options, self.sharding = eps, options, sharding

    @jax.named_scope("norms")
    def after(self, x: jax.Array, update: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """x + update (B, T, D), rounded to x's dtype, and its norm; update None adds nothing."""

        def local(x, update, weight):
            return add_rms_norm(x, update, weight, self.eps, implementation=self.options.implementation)

        by_row = self.sharding.spec("batch", None, None)
        return on_shards(self.sharding, local, (by_row, by_row, self.sharding.spec(None)), (by_row, by_row))(x, update, self.weight[...])

    @jax.named_scope("norms")
    def __call__(self, x: jax.Array) -> jax.Array:
        """The norm alone, which XLA computes within what surrounds it."""
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

    def arrays(self) -> Arrays:
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
            rows = operand(x.reshape(-1, x.shape[-1]), weight, self.options, self.scale_fmt)
            y = multiply(rows, weight, self.options, x.dtype).reshape(*x.shape[:2], *weight[0].shape[:-1])
            return jax.lax.psum(y, self.sharding.axes(self.axes[-1])) if self.axes[-1] else y

        return on_shards(self.sharding, local, (x_spec, self.spec, self.spec), y_spec)(x, *self.arrays())


def on_shards(sharding: Sharding, f, in_specs, out_specs):
    """Run f on each device's own shards: kernels are opaque to the partitioner and see local arrays only."""
    return jax.shard_map(f, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def operand(x: jax.Array, weight: Arrays, options: Options, scale_fmt: str | None) -> Arrays:
    """x (M, K) as `multiply` takes it for this weight: (x,), or (codes, scales) for a product in FP8."""
    if in_fp8(weight, options):
        return quantize.act_quant(x, scale_fmt, implementation=options.implementation)
    return (x,)


def swiglu_operand(gate_up: jax.Array, weight: Arrays, options: Options, scale_fmt: str | None) -> Arrays:
    """silu(gate) * up of gate_up (M, 2, K) as `operand`."""
    if in_fp8(weight, options):
        return quantize.swiglu_quant(gate_up, scale_fmt, implementation=options.implementation)
    return (swiglu(gate_up, axis=1),)


def multiply(x: Arrays, weight: Arrays, options: Options, out_dtype) -> jax.Array:
    """x (M, K), made by `operand`, times one local weight: (M, prod(...) * N) of out_dtype, accumulated in float32."""
    if len(x) == 2:
        (codes, scale), (w, w_scale) = x, weight
        return fp8_gemm.fp8_gemm(codes, scale, w, w_scale, out_dtype, implementation=options.implementation)
    w = dequantised(weight, options)
    return jnp.einsum("mk,nk->mn", x[0], w.reshape(-1, w.shape[-1]), preferred_element_type=out_dtype)


def in_fp8(weight: Arrays, options: Options) -> bool:
    """Whether products with this weight are computed from FP8 codes of both sides."""
    return len(weight) == 2 and options.gemm_impl == "fp8"


def dequantised(weight: Arrays, options: Options) -> jax.Array:
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
        self.options, self.sharding = options, sharding

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array) -> jax.Array:
        """x (B, T, D) -> (B, T, D), of x's dtype."""

        def region(x, gate_up, down):
            rows = operand(x.reshape(-1, x.shape[-1]), gate_up, self.options, self.gate_up_proj.scale_fmt)
            y = self.local(rows, gate_up, down, x.dtype, x.dtype)
            return jax.lax.psum(y.reshape(x.shape), self.sharding.axes("ffn"))

        by_row, weights = self.sharding.spec("batch", None, None), (self.gate_up_proj.arrays(), self.down_proj.arrays())
        specs = tuple((w.spec,) * len(w.arrays()) for w in (self.gate_up_proj, self.down_proj))
        return on_shards(self.sharding, region, (by_row, *specs), by_row)(x, *weights)

    def local(self, x: Arrays, gate_up: Arrays, down: Arrays, dtype, out_dtype) -> jax.Array:
        """One device's share of the sum over the width: x by `operand` for gate_up, dtype between the two products. (M, D) of out_dtype."""
        h = multiply(x, gate_up, self.options, dtype).reshape(x[0].shape[0], 2, -1)
        return multiply(swiglu_operand(h, down, self.options, self.down_proj.scale_fmt), down, self.options, out_dtype)


class Embedding(nnx.Module):
    """Rows of the embedding table, which is cut over the vocabulary."""

    def __init__(self, config: ModelConfig, options: Options, sharding: Sharding):
        self.weight = param(sharding, (config.vocab_size, config.hidden_size), options.dtype, ("vocab", None))
        self.dtype, self.sharding = options.dtype, sharding

    @jax.named_scope("embedding")
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens (B, T) -> (B, T, D)."""
        rows = self.weight[...].at[tokens].get(out_sharding=self.sharding.spec("batch", None, None))
        return rows.astype(self.dtype)


class LMHead(nnx.Module):
    """Logits in float32: in bf16 about one row in twenty ties at the top of a vocabulary of 129,280."""

    def __init__(self, config: ModelConfig, options: Options, sharding: Sharding):
        self.weight = param(sharding, (config.vocab_size, config.hidden_size), options.dtype, ("vocab", None))
        self.sharding = sharding

    @jax.named_scope("head")
    def __call__(self, x: jax.Array) -> jax.Array:
        """x (B, T, D) -> (B, T, V) float32."""
        out = self.sharding.spec("batch", None, "vocab")
        return jnp.einsum("btd,vd->btv", x, self.weight[...].astype(x.dtype), preferred_element_type=jnp.float32, out_sharding=out)
