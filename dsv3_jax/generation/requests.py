"""What a caller hands to the engine, checked before anything runs: prompts, settings and limits."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence

from dsv3_jax.generation.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt ready to run: its token ids, how to choose the answer's, and how many there may be."""

    tokens: list[int]
    sampling: Sampling
    limit: int


def whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return value as an int within [low, high]; raises ValueError, naming it, for anything else (True and 2.0 included)."""
    bounds = f"must be an integer of at least {low}" if high is None else f"must be an integer from {low} to {high}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < low or (high is not None and number > high):
        raise ValueError(f"{name} = {value!r}: {bounds}")
    return number


def check_prompt(tokens: Sequence[int], vocab_size: int, most: int, name: str = "prompt") -> list[int]:
    """Return the prompt's token ids as ints; raises ValueError for one that is empty, longer than `most`, or holds anything else."""
    if isinstance(tokens, (str, bytes)) or not hasattr(tokens, "__len__"):
        raise ValueError(f"{name} = {tokens!r:.60}: must be a list of token ids; a text has to be tokenized first")
    if not len(tokens):
        raise ValueError(f"{name}: holds no tokens")
    if len(tokens) > most:
        raise ValueError(f"{name}: {len(tokens)} tokens, and at most {most} fit; raise max_seq_len or shorten the prompt")
    return [whole(f"{name}[{i}]", t, 0, vocab_size - 1) for i, t in enumerate(tokens)]


def check_stops(ids: Sequence[int]) -> list[int]:
    """Return the ids that end an answer as ints; raises ValueError for anything but a list of them."""
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise ValueError(f"stop_token_ids = {ids!r}: must be a list of token ids; () for none, None for the checkpoint's")
    return [whole("stop_token_ids", t, 0) for t in ids]


def as_list(prompts: object) -> list:
    """The prompts as a list of lists; a single prompt in their place is a mistake that is easily made."""
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts = {prompts!r:.60}: must be a list of prompts, each a list of token ids")
    prompts = list(prompts)  # type: ignore[call-overload]
    if prompts and not hasattr(prompts[0], "__len__"):
        raise ValueError(f"prompts = {prompts!r:.60}: must be a list of prompts, each a list of token ids; for one prompt write [[...]]")
    return prompts


def make_requests(
    prompts: object, sampling: Sampling | Sequence[Sampling], max_new_tokens: int, vocab_size: int, max_seq_len: int
) -> list[Request]:
    """Check everything about a call of `Engine.generate`, so that a mistake in the last prompt is found before the first one runs."""
    prompts = as_list(prompts)
    checked = [check_prompt(p, vocab_size, max_seq_len - 1, f"prompt {i}") for i, p in enumerate(prompts)]
    most = whole("max_new_tokens", max_new_tokens, 1)
    rows = [sampling] * len(checked) if isinstance(sampling, Sampling) else sampling
    if not isinstance(rows, Sequence) or len(rows) != len(checked) or not all(isinstance(r, Sampling) for r in rows):
        raise ValueError(f"sampling = {sampling!r:.60}: must be one Sampling, or a list with one for each of the {len(checked)} prompts")
    return [Request(p, r, min(most, max_seq_len - len(p))) for p, r in zip(checked, rows, strict=True)]
