"""What becomes of tokens as they arrive: text that is printed once and never taken back, and the figures of a run."""

from __future__ import annotations

import codecs
import collections
import dataclasses
import re
import sys
import time
from collections.abc import Callable, Sequence


def byte_alphabet() -> dict[str, int]:
    """Return which byte each character of a byte-level BPE token stands for (GPT-2's alphabet, 256 entries).

    Printable bytes of Latin-1 stand for themselves; the others, in order, are the characters from U+0100 up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


class TextStream:
    """The text of one answer as its tokens arrive.

    push() returns the text that has become certain: bytes of an unfinished UTF-8 character wait, as does text that may turn out
    to be the start of a stop string. Text from a stop string on is never given out, and `stopped` is then True; which stop string
    ends the text, and where, does not depend on how the text is cut into tokens. `text` is everything given out so far. Bytes that
    are no UTF-8 become U+FFFD, as in the tokenizer's own decoder.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()):
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = check_stop(stop)
        self._held = ""
        self._given: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        return "".join(self._given)

    def push(self, token: int) -> str:
        """Take the next token; return the text, perhaps empty, that can be printed now."""
        return self._take(self._decoder.decode(self._token_bytes(token)))

    def close(self) -> str:
        """Return what was held back, now that no token follows."""
        rest = self._take(self._decoder.decode(b"", final=True))
        return rest if self.stopped else rest + self._give(len(self._held))

    def _take(self, piece: str) -> str:
        if self.stopped:
            return ""
        self._held += piece
        # The stop string that is complete first, and of those the longest: the same however the text arrives.
        found = [(start + len(s), start) for s in self._stop if (start := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            return self._give(min(found)[1])
        pending = max((_overlap(self._held, s) for s in self._stop), default=0)
        return self._give(len(self._held) - pending)

    def _give(self, length: int) -> str:
        piece, self._held = self._held[:length], self._held[length:]
        self._given.append(piece)
        return piece


def check_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings as a tuple; ValueError for an empty one, which would stop every answer before it begins."""
    if isinstance(stop, str) or any(not s for s in stop):
        raise ValueError(f"--stop = {stop!r}: must be a list of strings that are not empty")
    return tuple(stop)


def for_screen(text: str) -> str:
    """Return `text` as standard output is to show it: a terminal gets \\x1b in place of a control character that it would obey."""
    if not sys.stdout.isatty():
        return text
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda c: f"\\x{ord(c.group()):02x}", text)  # all but \t and \n


class Clock:
    """Times one batch, an Engine.generate call: made as it begins, tick(i) for every token of prompt i.

    `tokens` counts them. `steady` counts those from each prompt's third on, which took `steady_seconds`: the first token waits for the
    prompt, and the first two for what has to be compiled.
    """

    def __init__(self):
        self.tokens = self.steady = 0
        self._since, self._counts = time.perf_counter(), collections.Counter[int]()
        self._first = self._second = self._last = 0.0

    def tick(self, prompt: int) -> None:
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._counts[prompt] += 1
        self.tokens += 1
        self.steady += self._counts[prompt] > 2
        if self._counts[prompt] == 2:
            self._second = self._second or self._last

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._since

    @property
    def steady_seconds(self) -> float:
        return self._last - self._second if self.steady else 0.0

    @property
    def first(self) -> float:
        """Seconds to the first token; 0 if there was none."""
        return self._first - self._since if self._first else 0.0


@dataclasses.dataclass
class Figures:
    """What a run has done so far: generated tokens, seconds spent generating, and seconds to each prompt's first token."""

    tokens: int = 0
    seconds: float = 0.0
    steady: int = 0
    steady_seconds: float = 0.0
    first: list[float] = dataclasses.field(default_factory=list)

    def add(self, clock: Clock, first: Sequence[float] | None = None) -> None:
        """Count a batch that ends now; `first` is each prompt's time to first token, if they are known apart."""
        self.seconds += clock.seconds
        self.tokens += clock.tokens
        self.steady += clock.steady
        self.steady_seconds += clock.steady_seconds
        self.first += [seconds for seconds in ([clock.first] if first is None else first) if seconds]

    def __str__(self) -> str:
        rate = f"{self.tokens / self.seconds if self.seconds else 0.0:.2f}"
        if self.steady_seconds:
            rate += f" in all, {self.steady / self.steady_seconds:.2f} after the second token"
        first = f"{sum(self.first) / len(self.first):.3f} s{' (mean)' if len(self.first) > 1 else ''}" if self.first else "none"
        return f"tokens: {self.tokens}  seconds: {self.seconds:.2f}  tokens per second: {rate}  time to first token: {first}"


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, without being all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
