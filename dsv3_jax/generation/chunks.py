"""How the prompts of a batch are cut into the calls that read them.

R rows of the batch, G of them in one call, T tokens per row in one call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

SMALLEST_WIDTH = 16  # tokens per row in a call


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One call: whose tokens, which, and where they go.

    prompts (G,): the row of the batch that each is. rows (G,) int32: the same as rows of the cache, each counted from the first on its
    own device. tokens (G, T) int32, of which the first new[g] are real. context: no row uses more slots than this afterwards.
    """

    prompts: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    new: np.ndarray
    context: int


def chunks(prompts: Sequence[Sequence[int]], rows: int, data: int, budget: int, slots: int) -> Iterator[Chunk]:
    """Cut prompts, which are the first of R = `rows` rows, into calls of about `budget` tokens for each of the `data` parts of the batch.

    Whole prompts, of like lengths together, if they fit: what is read later would attend to what came before once more. Sizes are
    powers of two, so that few programs are compiled. slots: of each row in the cache, which is empty.
    """
    lengths = np.zeros(rows, np.int32)
    lengths[: len(prompts)] = [len(p) for p in prompts]
    by_part = lengths.reshape(data, -1)
    order = np.argsort(-by_part, axis=1, kind="stable").astype(np.int32)  # of each part the longest prompt first
    longest = np.take_along_axis(by_part, order, 1).max(0).tolist()
    widest, done = whole_bucket(budget, SMALLEST_WIDTH), 0
    while done < len(longest) and longest[done]:
        width = min(bucket(longest[done], SMALLEST_WIDTH), widest)
        size = whole_bucket(min(widest // width, len(longest) - done))
        group = order[:, done : done + size]
        which = (group + by_part.shape[1] * np.arange(data, dtype=np.int32)[:, None]).ravel()
        for start in range(0, longest[done], width):
            wide = min(bucket(longest[done] - start, SMALLEST_WIDTH), width)
            tokens, new = np.zeros((len(which), wide), np.int32), np.clip(lengths[which] - start, 0, wide)
            for g in np.flatnonzero(new):
                tokens[g, : new[g]] = prompts[which[g]][start : start + wide]
            yield Chunk(which, group.ravel(), tokens, new, min(bucket(start + wide), slots))
        done += size


def bucket(n: int, smallest: int = 1) -> int:
    """The smallest power of two that is at least n and `smallest`: few shapes, so that few programs are compiled."""
    return max(smallest, 1 << (n - 1).bit_length())


def whole_bucket(n: int, smallest: int = 1) -> int:
    """The largest power of two that is at most n, though not less than `smallest`."""
    return max(smallest, 1 << n.bit_length() >> 1)
