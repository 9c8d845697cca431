"""From tokens, one at a time, to text that is printed once and never taken back."""

from __future__ import annotations

import codecs
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


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, without being all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
