"""A conversation at the terminal: prompts read from standard input, answers printed as they are made."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from dsv3_jax.generation.batch_file import Figures
from dsv3_jax.generation.chat import Prompt
from dsv3_jax.generation.text_stream import TextStream

PROMPT = ">>> "


def interactive(
    engine: Any,
    encode: Callable[[Sequence[dict[str, str]]], Prompt],
    new_stream: Callable[[], TextStream],
    sampling: Callable[[int], Any],
    figures: Figures,
    *,
    multi_turn: bool = True,
    **options: Any,
) -> None:
    """Answer line after line until /exit, end of file or Ctrl-C twice at the prompt; /clear forgets the conversation.

    Ctrl-C during an answer stops the answer, and what was said stays in the conversation. A conversation that has grown too long, or
    that the template refuses, is reported in one line and loses only its last message. `encode` makes the prompt of a conversation,
    `sampling(n)` the Sampling of the n-th answer; without multi_turn each line stands alone. `options` go to Engine.generate.
    """
    messages: list[dict[str, str]] = []
    answers = 0
    while (text := _read()) is not None:
        command = text.strip()
        if command == "/exit":
            return
        if command == "/clear":
            messages.clear()
            continue
        if not command:
            continue
        if not multi_turn:
            messages.clear()
        messages.append({"role": "user", "content": text})
        prompt = _prepare(engine, encode, messages)
        if prompt is None:
            messages.pop()
            continue
        answer, whole = _answer(engine, prompt, new_stream(), sampling(answers), figures, options)
        answers += 1
        if answer or whole:
            messages.append({"role": "assistant", "content": answer})
        else:
            messages.pop()  # stopped before the first word: as if it had not been asked


def _read() -> str | None:
    """Return the next line, or None when the user leaves; Ctrl-C once gives a new prompt and a hint."""
    for last in (False, True):
        try:
            return input(PROMPT)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print(flush=True)
            if not last:
                _remark("(Ctrl-C again, or /exit, leaves)")
    return None


def _prepare(engine: Any, encode: Callable[[Sequence[dict[str, str]]], Prompt], messages: list[dict[str, str]]) -> Prompt | None:
    """Return the prompt of the conversation, or None after saying why it cannot be run and what to do."""
    try:
        prompt = encode(messages)
        if (size := len(prompt.tokens)) >= engine.max_seq_len:
            what = "this conversation has grown to" if len(messages) > 1 else "this message has"
            remedy = "/clear starts a new one" if len(messages) > 1 else "shorten it"
            limit = f"--max_seq_len is {engine.max_seq_len}"
            _remark(f"{what} {size} tokens, and {limit}: {remedy}, or start again with a larger --max_seq_len")
            return None
        engine.check_prompt(prompt.tokens)
    except ValueError as e:
        _remark(f"error: {e}")
        return None
    return prompt


def _answer(engine: Any, prompt: Prompt, stream: TextStream, sampling: Any, figures: Figures, options: dict) -> tuple[str, bool]:
    """Print an answer as it is made; return its text, and whether it came to its end (False after Ctrl-C)."""
    since = time.perf_counter()
    count, first, completion = 0, 0.0, None

    def on_token(_: int, token: int) -> bool:
        nonlocal count, first
        count += 1
        first = first or time.perf_counter() - since  # counted here, for an answer that Ctrl-C stops has no Completion
        print(stream.push(token), end="", flush=True)
        return stream.stopped

    print(prompt.opening, end="", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        [completion] = engine.generate([prompt.tokens], sampling, on_token=on_token, **options)
    print(stream.close(), flush=True)
    figures.add(count, since, [first])
    if completion is None:
        _remark("(stopped)")
    elif completion.finish_reason == "length" and not stream.stopped:
        full = completion.prompt_tokens + len(completion.tokens) >= engine.max_seq_len
        limit = "the conversation has reached --max_seq_len: /clear starts a new one" if full else "--max_new_tokens allows more"
        _remark(f"(cut after {count} tokens; {limit})")
    return prompt.opening + stream.text if stream.text else "", completion is not None


def _remark(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
