"""From logits to a token: greedy, temperature, top-k and top-p, row by row.

B rows, V vocab_size.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one prompt's tokens are chosen.

    temperature: 0 is greedy, and so is anything below 1e-5. top_k: keep the k likeliest tokens, 0 keeps all. top_p: then keep the
    fewest tokens whose probability reaches p, 1 keeps all. seed: randomness is fixed by the seed and the token's position alone, so
    that what runs beside a prompt does not change its answer. (In bf16 a batch of another size may round otherwise, which can decide
    between two tokens that are all but equally good.) Raises ValueError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 965

    def __post_init__(self):
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise ValueError(f"{name} = {value!r}: must be a finite number")
        if self.temperature < 0:
            raise ValueError(f"temperature = {self.temperature!r}: must be 0 (greedy) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p!r}: must lie in (0, 1]; 1 is off")
        for name, high in (("top_k", 2**31 - 1), ("seed", 2**32 - 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) <= high:
                raise ValueError(f"{name} = {value!r}: must be an integer from 0 to {high}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < 1e-5


def mode(rows: Sequence[Sampling]) -> str:
    """The cheapest of 'greedy', 'random' and 'filtered' that serves all rows; each compiles once."""
    if all(r.greedy for r in rows):
        return "greedy"
    return "random" if all(r.greedy or (r.top_k == 0 and r.top_p == 1) for r in rows) else "filtered"


def stack(rows: Sequence[Sampling]) -> dict[str, np.ndarray]:
    """The rows' settings as arrays (B,), for `sample`."""
    return {
        "temperature": np.array([0 if r.greedy else r.temperature for r in rows], np.float32),
        "top_k": np.array([r.top_k for r in rows], np.int32),
        "top_p": np.array([r.top_p for r in rows], np.float32),
        "seed": np.array([r.seed for r in rows], np.uint32),
    }


def sample(logits: jax.Array, settings: dict[str, jax.Array], positions: jax.Array, mode: str) -> jax.Array:
    """Choose the next token of each row: logits (B, V) float32, positions (B,) int32 of the token to come -> (B,) int32.

    Randomness is the Gumbel-max trick: argmax of logits / T + G with G fixed by the row's seed and position alone.
    """
    best = jnp.argmax(logits, axis=-1)
    if mode == "greedy":
        return best.astype(jnp.int32)
    temperature = settings["temperature"][:, None]
    scaled = logits / jnp.where(temperature > 0, temperature, 1)
    if mode == "filtered":
        scaled = keep_likeliest(scaled, settings["top_k"], settings["top_p"])

    def noise(seed, position):
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), logits.shape[-1:], jnp.float32)

    drawn = jnp.argmax(scaled + jax.vmap(noise)(settings["seed"], positions), axis=-1)
    return jnp.where(settings["temperature"] > 0, drawn, best).astype(jnp.int32)


def keep_likeliest(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Set all but each row's top_k likeliest, then all but its top_p nucleus, to -inf; the likeliest token always stays.

    logits (B, V) float32 already divided by the temperature, top_k (B,) int32 with 0 for all, top_p (B,) float32.
    """
    vocab = logits.shape[-1]
    order = jnp.argsort(-logits, axis=-1)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    within_k = jnp.arange(vocab) < jnp.where(top_k > 0, top_k, vocab)[:, None]
    probs = jax.nn.softmax(jnp.where(within_k, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # probability of all likelier tokens
    keep = within_k & ((before < top_p[:, None]) | (top_p[:, None] >= 1))
    keep = keep.at[:, 0].set(True)
    rank = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(keep, rank, axis=-1), logits, -jnp.inf)
