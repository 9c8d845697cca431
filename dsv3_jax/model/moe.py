"""Mixture of experts: the router, and the region in which each device runs its own experts on the tokens routed to them.

B batch, T tokens, M = tokens of one device or one data row, D hidden_size, E n_routed_experts, K num_experts_per_tok, F expert width.
Source: DeepSeek-V3 report, 2.1.2; DeepSeek-V2 report, 2.2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.kernels import quantize
from dsv3_jax.kernels.grouped_gemm import grouped_gemm
from dsv3_jax.kernels.moe_sort import sort_by_expert
from dsv3_jax.model.layers import MLP, Linear, multiply, on_shards, param, swiglu
from dsv3_jax.model.options import Options
from dsv3_jax.sharding import Sharding

Routing = tuple[jax.Array, jax.Array]  # topk_ids int32 and topk_weights float32, each (B, T, K)


def route(logits: jax.Array, bias: jax.Array | None, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Choose experts: logits (M, E) float32 and the correction bias (E,) or None -> topk_ids (M, K) int32, topk_weights (M, K) float32.

    The bias and the groups decide which experts are taken; the weights come from the scores without the bias.
    """
    c = config
    scores = jax.nn.softmax(logits, axis=-1) if c.scoring_func == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if c.topk_method != "greedy" and c.n_group > 1:
        groups = choice.reshape(-1, c.n_group, c.n_routed_experts // c.n_group)
        rank = groups.max(-1) if bias is None else jax.lax.top_k(groups, 2)[0].sum(-1)  # (M, n_group)
        live = jax.nn.one_hot(jax.lax.top_k(rank, c.topk_group)[1], c.n_group, dtype=jnp.bool_).any(1)
        choice = jnp.where(live[..., None], groups, -jnp.inf).reshape(choice.shape)
    topk_ids = jax.lax.top_k(choice, c.num_experts_per_tok)[1]
    weights = jnp.take_along_axis(scores, topk_ids, axis=-1)
    if c.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return topk_ids, weights * c.routed_scaling_factor


class Gate(nnx.Module):
    """The router's weight, and its correction bias, which stays float32 from file to use."""

    def __init__(self, config: ModelConfig, options: Options, sharding: Sharding):
        self.weight = param(sharding, (config.n_routed_experts, config.hidden_size), options.dtype, (None, None))
        if config.has_correction_bias:
            self.e_score_correction_bias = param(sharding, (config.n_routed_experts,), jnp.float32, (None,))

    def arrays(self) -> tuple[jax.Array, ...]:
        bias = getattr(self, "e_score_correction_bias", None)
        return (self.weight[...],) if bias is None else (self.weight[...], bias[...])


class Experts(nnx.Module):
    """The routed experts' weights, stacked; whole experts are spread over the mesh."""

    def __init__(self, config: ModelConfig, options: Options, sharding: Sharding):
        e, d, f, common = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size, (config, options, sharding)
        self.gate_up_proj = Linear((e, 2, f, d), ("experts", None, None, None), *common, in_reference=True)
        self.down_proj = Linear((e, d, f), ("experts", None, None), *common, in_reference=True)


class MoE(nnx.Module):
    """Router, routed experts and shared experts of one layer."""

    def __init__(self, config: ModelConfig, options: Options, sharding: Sharding):
        common = (config, options, sharding)
        self.gate, self.experts = Gate(*common), Experts(*common)
        self.shared_experts = MLP(config.moe_intermediate_size * config.n_shared_experts, *common) if config.n_shared_experts else None
        self.config, self.options, self.sharding = common

    def __call__(self, x: jax.Array, valid: jax.Array) -> tuple[jax.Array, Routing]:
        """x (B, T, D); valid (B, T) bool: padding is routed nowhere. Returns (B, T, D) of x's dtype, summed in float32, and the routing."""
        linears = [self.experts.gate_up_proj, self.experts.down_proj]
        if self.shared_experts is not None:
            linears += [self.shared_experts.gate_up_proj, self.shared_experts.down_proj]
        weights = tuple(linear.arrays() for linear in linears)
        specs = tuple((linear.spec,) * len(w) for linear, w in zip(linears, weights, strict=True))
        gate = self.gate.arrays()
        gate_specs = tuple(self.sharding.spec(*(None,) * g.ndim) for g in gate)
        by_row = self.sharding.spec("batch", None, None)
        in_specs = (by_row, self.sharding.spec("batch", None), gate_specs, specs)
        return on_shards(self.sharding, self._local, in_specs, (by_row, (by_row, by_row)))(x, valid, gate, weights)

    def _local(self, x, valid, gate, weights):
        """One device: route its tokens, run its experts and its part of the shared experts, sum over devices."""
        (b, t, d), axes = x.shape, self.sharding.expert_axes
        x, valid = x.reshape(-1, d), valid.reshape(-1)
        topk_ids, topk_weights = self._route(x, gate)
        y = jnp.zeros(x.shape, jnp.float32)
        if self.shared_experts is not None:
            y = self._shared(x, weights[2], weights[3], self.shared_experts.down_proj.scale_fmt)
        everyone = (x, valid, topk_ids, topk_weights)
        if "data" in axes:  # the experts of this device serve the tokens of every data row
            everyone = jax.lax.all_gather(everyone, "data", axis=0, tiled=True)
        routed = self._routed(*everyone, *weights[:2])
        if "data" in axes:
            routed = jax.lax.psum_scatter(routed, "data", scatter_dimension=0, tiled=True)
        y = jax.lax.psum(y + routed, "model").astype(x.dtype)
        return y.reshape(b, t, d), (topk_ids.reshape(b, t, -1), topk_weights.reshape(b, t, -1))

    def _route(self, x, gate):
        # Products of bf16 numbers are exact in float32; the precision keeps a GPU from computing float32 ones in TF32.
        logits = jnp.einsum("md,ed->me", x, gate[0], precision="highest", preferred_element_type=jnp.float32)
        logits = logits.astype(self.options.gate_dtype).astype(jnp.float32)
        return route(logits, gate[1] if len(gate) > 1 else None, self.config)

    def _shared(self, x, gate_up, down, fmt):
        h = multiply(x, gate_up, self.options, fmt, x.dtype).reshape(x.shape[0], 2, -1)
        return multiply(swiglu(h, axis=1), down, self.options, fmt, jnp.float32)

    def _routed(self, x, valid, topk_ids, topk_weights, gate_up, down):
        """The weighted sum of this device's experts: rows sorted by expert, two grouped GEMMs, rows put back. (M, D) float32."""
        m, k = topk_ids.shape
        here = gate_up[0].shape[0]
        first = jax.lax.axis_index(self.sharding.expert_axes) * here
        order, inverse, group_sizes = sort_by_expert(topk_ids, valid, first, here, implementation=self.options.implementation)
        h = self._grouped(x, gate_up, group_sizes, x.dtype, rows=order // k).reshape(m * k, 2, -1)
        y = self._grouped(swiglu(h, axis=1), down, group_sizes, jnp.float32)
        # Gathering each token's K rows, where a scatter-add would sum them in no fixed order.
        y = y[inverse].reshape(m, k, -1)
        return jnp.einsum("mk,mkd->md", topk_weights, y, precision="highest")  # no TF32, whatever the model's dtype

    def _grouped(self, x, weight, group_sizes, out_dtype, rows=None):
        w, scale = weight if len(weight) == 2 else (*weight, None)
        w, scale = (w[:, None] if w.ndim == 3 else w), (scale[:, None] if scale is not None and scale.ndim == 3 else scale)
        x_scale = None
        if scale is not None and self.options.gemm_impl == "fp8":
            x, x_scale = quantize.act_quant(x, self.experts.down_proj.scale_fmt, implementation=self.options.implementation)
        if rows is not None:
            x, x_scale = x[rows], None if x_scale is None else x_scale[rows]
        w = w if scale is not None else w.astype(self.options.dtype)
        return grouped_gemm(
            x, w, group_sizes, x_scale=x_scale, w_scale=scale, out_dtype=out_dtype, implementation=self.options.implementation
        )
