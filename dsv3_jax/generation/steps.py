"""The compiled steps of the engine: append a chunk of prompt, append one token, choose the next.

B rows, T tokens per row, D hidden_size, V vocab_size, L MoE layers, K num_experts_per_tok.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3_jax.generation import sampling

SMALLEST_WIDTH = 16  # tokens per row in a prefill call
SMALLEST_CACHE = 128  # slots per row


def bucket(n: int, smallest: int = 1) -> int:
    """The smallest power of two that is at least n and `smallest`: few shapes, so that few programs are compiled."""
    return max(smallest, 1 << (n - 1).bit_length())


def prefill(graph, params, cache, tokens, new, logits):
    """Append new[b] of tokens (B, T) to each row; logits (B, V) become those after a row's last token where it has any in this chunk."""
    model = nnx.merge(graph, params)
    hidden, cache, _ = model(tokens, new, cache)
    last = jax.vmap(lambda h, i: jax.lax.dynamic_slice_in_dim(h, i, 1))(hidden, jnp.maximum(new - 1, 0))  # (B, 1, D)
    return cache, jnp.where((new > 0)[:, None], model.lm_head(last)[:, 0], logits)


def every_token(graph, params, cache, tokens, new):
    """Append a chunk and return, on every device, logits (B, T, V) and the routing, topk_ids and topk_weights (L, B, T, K)."""
    model = nnx.merge(graph, params)
    hidden, cache, routings = model(tokens, new, cache)
    empty = jnp.zeros((0, *tokens.shape, 0))
    ids, weights = (jnp.stack(r) for r in zip(*routings, strict=True)) if routings else (empty.astype(jnp.int32), empty)
    return cache, *(jax.sharding.reshard(a, jax.P()) for a in (model.lm_head(hidden), ids, weights))


def decode(graph, params, cache, tokens, settings, *, mode):
    """Append one token per row, tokens (B,), and choose the next: returns the cache and tokens (B,) on every device."""
    model = nnx.merge(graph, params)
    rows = jax.sharding.reshard(tokens, model.lm_head.sharding.spec("batch"))
    hidden, cache, _ = model(rows[:, None], jnp.ones_like(rows), cache)
    return cache, choose(model.lm_head(hidden)[:, 0], cache.lengths, settings, mode=mode)


def choose(logits, lengths, settings, *, mode):
    """The next token of each row: every device chooses from whole rows, so that every process reads the same tokens."""
    whole = jax.P()
    return sampling.sample(jax.sharding.reshard(logits, whole), settings, jax.sharding.reshard(lengths, whole), mode)
