"""An engine that lies over several processes: process 0 is asked, the others do the same work at the same time.

Each call of `generate` is sent to the others as integers. What then happens in each process follows from these integers and from the
tokens, which every process reads; what only process 0 knows (a stop string was met, Ctrl-C) the engine asks of it between decode calls.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dsv3_jax import distributed
from dsv3_jax.generation import requests
from dsv3_jax.generation.sampling import Sampling

_ROW = 5  # integers of each prompt before the tokens of all: their number, and its Sampling


class Leading:
    """Process 0's engine: the same calls, which the other processes follow."""

    def __init__(self, engine: Any):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 (frozen)
        max_new_tokens: int = 200,
        *,
        stop_token_ids: Sequence[int] | None = None,
        on_token: Any = None,
    ) -> list:
        """As Engine.generate. What on_token raises, and Ctrl-C, end every row first, so that all processes leave their loops together."""
        engine = self._engine
        stops = list(engine.eos_token_ids) if stop_token_ids is None else requests.check_stops(stop_token_ids)
        todo = requests.make_requests(prompts, sampling, max_new_tokens, engine.config.vocab_size, engine.max_seq_len)
        raised: list[BaseException] = []

        def ask(i: int, token: int) -> bool:
            if not raised and on_token is not None:
                try:
                    return bool(on_token(i, token))
                except BaseException as e:
                    raised.append(e)
            return bool(raised)

        with _late_interrupt(raised):
            distributed.broadcast(encode([r.tokens for r in todo], [r.sampling for r in todo], max_new_tokens, stops))
            rows = [r.sampling for r in todo]
            done = engine.generate([r.tokens for r in todo], rows, max_new_tokens, stop_token_ids=stops, on_token=ask)
        if raised:
            raise raised[0]
        return done


def follow(engine: Any) -> int:
    """Do what process 0 does until it ends the run; returns its exit code."""
    while True:
        try:
            prompts, sampling, max_new_tokens, stops = decode(distributed.broadcast())
        except distributed.Ended as e:
            return int(e.code or 0)
        engine.generate(prompts, sampling, max_new_tokens, stop_token_ids=stops)


def encode(prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling], max_new_tokens: int, stops: Sequence[int]) -> np.ndarray:
    """A call of `generate` as int64: counts first, then each prompt's length and Sampling (floats as their bits), stops, all tokens."""
    head = [len(prompts), max_new_tokens, len(stops)]
    rows = [[len(p), _bits(s.temperature), s.top_k, _bits(s.top_p), s.seed] for p, s in zip(prompts, sampling, strict=True)]
    return np.array([*head, *(x for row in rows for x in row), *stops, *(t for p in prompts for t in p)], np.int64)


def decode(message: np.ndarray) -> tuple[list[list[int]], list[Sampling], int, list[int]]:
    """The arguments that `encode` was given."""
    (count, max_new_tokens, n_stops), rest = message[:3].tolist(), message[3:]
    rows, rest = rest[: count * _ROW].reshape(count, _ROW).tolist(), rest[count * _ROW :].tolist()
    stops, tokens = rest[:n_stops], iter(rest[n_stops:])
    prompts = [[next(tokens) for _ in range(row[0])] for row in rows]
    assert next(tokens, None) is None
    sampling = [Sampling(_float(temperature), top_k, _float(top_p), seed) for _, temperature, top_k, top_p, seed in rows]
    return prompts, sampling, max_new_tokens, stops


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def _float(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))


@contextlib.contextmanager
def _late_interrupt(raised: list[BaseException]) -> Iterator[None]:
    """Within it the first Ctrl-C is noted in `raised`, and a second one, where the devices do not answer, ends the run."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def note(number: int, frame: object) -> None:
        if raised:
            distributed.leave(130)
        raised.append(KeyboardInterrupt())

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
