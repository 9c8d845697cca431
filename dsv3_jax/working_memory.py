"""How much memory the engine's calls need beside weights and cache: an upper estimate of activations, logits and scores.

One call: G rows of T new tokens, M = G T of them, attending to S slots. H heads of one device, D hidden_size, N qk_nope_head_dim,
P qk_rope_head_dim, V v_head_dim, R kv_lora_rank, F width of a feed-forward layer.
"""

from __future__ import annotations

import jax.numpy as jnp

from dsv3_jax.config import BLOCK, ModelConfig
from dsv3_jax.generation.chunks import SMALLEST_WIDTH, bucket, whole_bucket
from dsv3_jax.generation.engine import PREFILL_TOKENS
from dsv3_jax.kernels.mla_prefill import unsupported
from dsv3_jax.model.options import Options
from dsv3_jax.sharding import Sharding

FLOAT32 = 4
SCORES_KEPT = 4  # of the size of the scores: the products, masked, exponentials, weights
SAMPLED = 8  # float32 arrays (rows, vocab_size) that sampling with top_k or top_p makes: scaled, sorted, ranks, probabilities, noise ...


def working_bytes(config: ModelConfig, options: Options, hopper: bool, sharding: Sharding, rows: int, max_seq_len: int, slots: int) -> int:
    """Bytes on one device in the larger of two calls: the largest of a prefill, and a decode step of all rows.

    Layers follow each other and use the same memory again, so one layer counts: the residual stream, and the larger of attention
    and feed-forward. Of these every array counts as if all lived at once, though XLA frees most before the last is made, and fuses some
    away. Logits and what sampling makes of them come on top, for all rows on every device.

    hopper: whether the kernels run; without them attention keeps scores in memory, T times S float32 for each head, several times over,
    and XLA's GEMMs keep float32 sums and padded copies. rows: on one data row of the mesh, as many as run at once. slots: of each row's
    cache. What XLA's own compiler plans for float32 on a CPU lies below this by up to half (tests/test_plan.py).
    """
    data, model = (sharding.mesh.shape[axis] for axis in ("data", "model"))
    calls = [prefill_call(rows, max_seq_len, slots), (rows, 1, slots)]
    layer = max(_layer(config, options, hopper, sharding, *call) for call in calls)
    logits = 3 * rows * config.vocab_size // model + SAMPLED * rows * data * config.vocab_size
    return round(layer + FLOAT32 * logits)


def prefill_call(rows: int, max_seq_len: int, slots: int) -> tuple[int, int, int]:
    """G, T and S of the largest call with which generation.chunks reads prompts of max_seq_len - 1 tokens, for one data row of the mesh."""
    widest = whole_bucket(PREFILL_TOKENS, SMALLEST_WIDTH)
    width = min(bucket(max_seq_len - 1, SMALLEST_WIDTH), widest)
    return whole_bucket(min(widest // width, rows)), width, min(bucket(max_seq_len - 1, SMALLEST_WIDTH), slots)


def _layer(c: ModelConfig, o: Options, hopper: bool, sharding: Sharding, g: int, t: int, s: int) -> float:
    size = jnp.dtype(o.dtype).itemsize
    m, wide = g * t, c.hidden_size
    # Bytes of one element that a GEMM reads: quantised, its codes lie in memory beside what they were made from.
    quantised = size + 1 + FLOAT32 / BLOCK if o.gemm_impl == "fp8" else size
    model, kinds = sharding.size("ffn"), {c.is_moe_layer(i) for i in range(c.num_hidden_layers)}

    def mlp(width: float) -> float:
        sums = 0 if hopper or o.gemm_impl == "bf16" else 2 * FLOAT32 * 2 * width  # XLA's: the sum so far, and what is added to it
        return m * (2 * width * size + width * quantised + sums + wide * FLOAT32)

    parts = [_attention(c, o, hopper, c.num_attention_heads // sharding.size("heads"), g, t, s, size, quantised)]
    if False in kinds:
        parts.append(mlp(c.intermediate_size / model))
    if True in kinds:
        everyone = m * (sharding.size("batch") if "data" in sharding.expert_axes else 1)  # gathered where experts lie over data too
        shared = c.n_shared_experts  # counted twice where they have joined the others
        pairs = everyone * (c.num_experts_per_tok + (shared if sharding.size("experts") * model == 1 else 0))
        one = wide * quantised + 2 * c.moe_intermediate_size * size + c.moe_intermediate_size * quantised + wide * size
        one += wide * FLOAT32  # each pair's weighted output, before a token's are summed
        if not hopper:  # XLA pads the rows, and makes each result a second time without the rows of no expert
            one += wide * quantised + 2 * c.moe_intermediate_size * size + wide * size
        routing = m * c.n_routed_experts * FLOAT32 * 4  # logits, scores, biased, sorted
        parts.append(pairs * one + everyone * wide * (quantised + FLOAT32) + routing + mlp(c.moe_intermediate_size * shared / model))
    stream = m * wide * (size + quantised)  # the residual, and its norm
    return stream + max(parts)


def _attention(c: ModelConfig, o: Options, hopper: bool, heads: int, g: int, t: int, s: int, size: int, quantised: float) -> float:
    m, seen = g * t, g * s
    nope, rotary, value, rank = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank
    whole = c.q_lora_rank or 0  # q_a and its norm, which are not cut over heads
    total = m * (2 * (whole + rank + rotary) * quantised + 2 * heads * c.qk_head_dim * size + heads * value * quantised)
    total += m * c.hidden_size * 2 * size  # o_proj's share, and the sum over devices
    kernel = hopper and (t == 1 or unsupported(nope, rotary, value, o.dtype) is None)
    if o.attn_impl == "naive":
        total += (m * (nope + value) + seen * (nope + rotary + value)) * heads * size
        kernel = kernel and t > 1  # one token a row attends on XLA
        total += seen * heads * nope * size if kernel else 0
    else:
        total += seen * (rank + rotary) * size
        if kernel and t > 1:
            total += seen * heads * (nope + value) * size  # keys and values of all slots in use
        else:
            total += m * heads * (3 * rank + 2 * rotary) * size  # queries in the latent space, twice, and what they gather
    return total + (0 if kernel else SCORES_KEPT * m * s * heads * FLOAT32)
