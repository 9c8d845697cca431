"""Mixture of experts: the router, and the region in which each device runs its own experts on the tokens routed to them.

B batch, T tokens, M = tokens of one device or one data row, D hidden_size, E n_routed_experts, K num_experts_per_tok, F expert width.
Source: DeepSeek-V3 report, 2.1.2; DeepSeek-V2 report, 2.2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3_jax.config import BLOCK, ModelConfig
from dsv3_jax.kernels import route as route_op
from dsv3_jax.kernels.grouped_gemm import grouped_gemm
from dsv3_jax.kernels.moe_sort import sort_by_expert
from dsv3_jax.model.layers import MLP, Arrays, Linear, on_shards, operand, param, swiglu_operand
from dsv3_jax.model.options import Options
from dsv3_jax.sharding import Sharding

Routing = tuple[jax.Array, jax.Array]  # topk_ids int32 and topk_weights float32, each (B, T, K)


def route(logits: jax.Array, bias: jax.Array | None, config: ModelConfig, implementation: str | None = None) -> Routing:
    """Choose experts as the config says: logits (M, E) float32, the correction bias (E,) or None -> topk_ids, topk_weights (M, K)."""
    keys = "num_experts_per_tok n_group topk_group scoring_func topk_method norm_topk_prob routed_scaling_factor".split()
    return route_op.route(logits, bias, **{key: getattr(config, key) for key in keys}, implementation=implementation)


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
        self.joined = 0  # shared experts among the others
        self.config, self.options, self.sharding = common

    def join(self) -> None:
        """Make each shared expert one more expert, which every token is sent to: two products with all of them, not four.

        They stay apart where experts are cut over the mesh, shared ones being cut by width, and where blocks of scales do not allow it.
        """
        shared, n = self.shared_experts, self.config.n_shared_experts
        if shared is None or self.sharding.size("experts") * self.sharding.size("ffn") > 1:
            return
        linears = shared.gate_up_proj, shared.down_proj  # (2, n F, D) and (D, n F)
        ragged = shared.gate_up_proj.quantized and n > 1 and self.config.moe_intermediate_size % BLOCK
        if ragged or shared.gate_up_proj.scale_fmt != self.experts.gate_up_proj.scale_fmt:
            return
        for linear in linears:
            for part in ("weight", "weight_scale_inv")[: len(linear.arrays())]:
                a = jax.sharding.reshard(getattr(linear, part)[...], self.sharding.spec(None))
                a = jnp.moveaxis(a.reshape(a.shape[0], n, -1, *a.shape[2:]), 1, 0)  # (n, 2, F, D) and (n, D, F)
                setattr(linear, part, nnx.Param(a, out_sharding=self.sharding.spec(*(None,) * a.ndim)))
            linear.axes = (None,) * linear.weight.ndim
        self.joined = n

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

    @jax.named_scope("experts")
    def _local(self, x, valid, gate, weights):
        """One device: route its tokens, run its experts and its part of the shared experts, sum over devices."""
        (b, t, d), axes = x.shape, self.sharding.expert_axes
        x, valid = x.reshape(-1, d), valid.reshape(-1)
        topk_ids, topk_weights = self._route(x, gate)
        fmt = self.experts.gate_up_proj.scale_fmt
        rows = operand(x, weights[0], self.options, fmt)
        y = jnp.zeros(x.shape, jnp.float32)
        if (shared := self.shared_experts) is not None and not self.joined:
            own_fmt = shared.gate_up_proj.scale_fmt
            own = rows if own_fmt == fmt else operand(x, weights[2], self.options, own_fmt)  # quantised once for both, where they agree
            with jax.named_scope("shared_experts"):
                y = shared.local(own, weights[2], weights[3], x.dtype, jnp.float32)
        everyone = (rows, valid, topk_ids, topk_weights)
        if "data" in axes:  # the experts of this device serve the tokens of every data row
            everyone = jax.lax.all_gather(everyone, "data", axis=0, tiled=True)
        routed = self._routed(everyone, *weights[:2], *(weights[2:] if self.joined else ((), ())))
        if "data" in axes:
            routed = jax.lax.psum_scatter(routed, "data", scatter_dimension=0, tiled=True)
        y = jax.lax.psum(y + routed, "model").astype(x.dtype)
        return y.reshape(b, t, d), (topk_ids.reshape(b, t, -1), topk_weights.reshape(b, t, -1))

    @jax.named_scope("router")
    def _route(self, x, gate):
        # Products of bf16 numbers are exact in float32; the precision keeps a GPU from computing float32 ones in TF32.
        logits = jnp.einsum("md,ed->me", x, gate[0], precision="highest", preferred_element_type=jnp.float32)
        logits = logits.astype(self.options.gate_dtype).astype(jnp.float32)
        return route(logits, gate[1] if len(gate) > 1 else None, self.config, self.options.implementation)

    def _routed(self, tokens, gate_up: Arrays, down: Arrays, more_gate_up: Arrays, more_down: Arrays) -> jax.Array:
        """The weighted sum of this device's experts: rows sorted by expert, two grouped GEMMs, rows put back. (M, D) float32.

        more_*: of the shared experts where they have joined the others, behind which they are counted.
        """
        rows, valid, topk_ids, topk_weights = tokens
        experts, dtype = self.config.n_routed_experts, self.options.dtype
        m, k = topk_ids.shape
        mean_rows = max(1, m * k // experts)
        here = gate_up[0].shape[0] + self.joined
        if n := self.joined:
            shared = jnp.broadcast_to(jnp.arange(experts, here, dtype=topk_ids.dtype), (m, n))
            topk_ids = jnp.concatenate([topk_ids, shared], axis=1)
            topk_weights = jnp.concatenate([topk_weights, jnp.ones((m, n), topk_weights.dtype)], axis=1)
            k += n
        first = jax.lax.axis_index(self.sharding.expert_axes) * here
        order, inverse, group_sizes = sort_by_expert(topk_ids, valid, first, here, implementation=self.options.implementation)
        h = self._grouped(tuple(a[order // k] for a in rows), gate_up, more_gate_up, group_sizes, mean_rows, dtype).reshape(m * k, 2, -1)
        h = swiglu_operand(h, down, self.options, self.experts.down_proj.scale_fmt)
        y = self._grouped(h, down, more_down, group_sizes, mean_rows, dtype)
        # Gathering each token's K rows, where a scatter-add would sum them in no fixed order. Rows of no expert here hold anything.
        mine = (topk_ids >= first) & (topk_ids < first + here) & valid[:, None]
        y = jnp.where(mine[..., None], y[inverse].reshape(m, k, -1), 0).astype(jnp.float32)
        return jnp.sum(topk_weights[..., None] * y, axis=1)

    def _grouped(self, x: Arrays, weight: Arrays, more: Arrays, group_sizes: jax.Array, mean_rows: int, out_dtype) -> jax.Array:
        (w, *w_scale), more = (tuple(a[:, None] if a.ndim == 3 else a for a in arrays) for arrays in (weight, more))  # (G, P, N, K)
        return grouped_gemm(
            x[0],
            w,
            group_sizes,
            x_scale=x[1] if len(x) == 2 else None,
            w_scale=w_scale[0] if w_scale else None,
            more=more,
            out_dtype=out_dtype,
            zero_rest=False,
            mean_rows=mean_rows,
            implementation=self.options.implementation,
        )
