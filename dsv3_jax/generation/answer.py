"""One prompt's answer on the host, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from dsv3_jax.generation.requests import Request
from dsv3_jax.generation.steps import BROKEN

OnToken = Callable[[int, int], bool | None]


@dataclasses.dataclass
class Answer:
    """One prompt's answer as it grows on the host."""

    request: Request
    stops: set[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    reason: str = ""

    def add(self, token: int, index: int, on_token: OnToken | None) -> bool:
        """Take the next token, unless the answer has ended; True if it ended here for a reason that the device does not know."""
        if self.reason:
            return False
        if token == BROKEN:
            raise RuntimeError(f"prompt {index}: the model's logits are not finite; run verify.py on the checkpoint")
        if token in self.stops:
            self.reason = "stop"
            return False
        self.tokens.append(token)
        asked = on_token is not None and bool(on_token(index, token))
        self.reason = "stop" if asked else "length" if len(self.tokens) == self.request.limit else ""
        return asked
