"""The compiled steps of the engine: append a chunk of prompt, append one token, choose the next.

B rows, G of them in one call, T tokens per row, V vocab_size, L MoE layers, K num_experts_per_tok.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3_jax.generation import sampling
from dsv3_jax.model.cache import put_rows, take_rows

SMALLEST_CACHE = 128  # slots per row
DECODED = 4  # tokens per row in a decode call: preparing a call costs the host what the GPU needs for one or two of a small model's steps
BROKEN = -1  # in place of a token: the row's logits are not finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What decides about a batch's rows, whole on every device.

    token (B,) int32: the last one chosen. active (B,) bool: still to be continued. left (B,) int32: tokens that the row may still get.
    settings: sampling.stack. stops (N,) int32: the ids that end a row.
    """

    token: jax.Array
    active: jax.Array
    left: jax.Array
    settings: dict[str, jax.Array]
    stops: jax.Array


def prefill(graph, params, cache, rows, tokens, new, logits, *, context=None):
    """Append new[g] of tokens (G, T) to `rows` (G,); where there are any, the row's logits, of (B, V), become those after the last.

    rows and context: as for Transformer.
    """
    model = nnx.merge(graph, params)
    hidden, cache, _ = model(tokens, new, cache, context, rows)
    last = jax.vmap(lambda h, i: jax.lax.dynamic_slice_in_dim(h, i, 1))(hidden, jnp.maximum(new - 1, 0))  # (G, 1, D)
    latest = jnp.where((new > 0)[:, None], model.lm_head(last)[:, 0], take_rows(logits, rows))
    return cache, put_rows(logits, rows, latest)


def every_token(graph, params, cache, rows, tokens, new, *, context=None):
    """Append a chunk to `rows` and return, on every device, logits (G, T, V) and the routing, topk_ids and topk_weights (L, G, T, K)."""
    model = nnx.merge(graph, params)
    hidden, cache, routings = model(tokens, new, cache, context, rows)
    empty = jnp.zeros((0, *tokens.shape, 0))
    ids, weights = (jnp.stack(r) for r in zip(*routings, strict=True)) if routings else (empty.astype(jnp.int32), empty)
    return cache, *(jax.sharding.reshard(a, jax.P()) for a in (model.lm_head(hidden), ids, weights))


def decode(graph, params, cache, rows, *, mode):
    """DECODED times over, append each active row's token and choose its next; rows that have ended cost no expert and no cache slot.

    Returns the cache, the rows and the tokens chosen (DECODED, B).
    """
    model = nnx.merge(graph, params)
    by_row = model.lm_head.sharding.spec("batch")

    def step(state, _):
        cache, rows = state
        token, new = (jax.sharding.reshard(a, by_row) for a in (rows.token, rows.active.astype(jnp.int32)))
        hidden, cache, _ = model(token[:, None], new, cache)
        rows = choose(model.lm_head(hidden)[:, 0], cache.lengths, rows, mode=mode)
        return (cache, rows), rows.token

    (cache, rows), tokens = jax.lax.scan(step, (cache, rows), None, length=DECODED)
    return cache, rows, tokens


@jax.named_scope("sampling")
def choose(logits, lengths, rows, *, mode):
    """Choose each row's next token from logits (B, V): every device from whole rows, so that every process reads the same tokens."""
    logits, lengths = jax.sharding.reshard(logits, jax.P()), jax.sharding.reshard(lengths, jax.P())
    token = sampling.sample(logits, rows.settings, lengths, mode)
    token = jnp.where(jnp.isfinite(logits.max(axis=-1)), token, BROKEN)
    left = rows.left - rows.active
    active = rows.active & (left > 0) & ~(token[:, None] == rows.stops).any(axis=-1)
    return dataclasses.replace(rows, token=token, active=active, left=left)


def end(rows, ended):
    """End the rows in `ended` (B,) bool, for a reason that only the host knows."""
    return dataclasses.replace(rows, active=rows.active & ~ended)
