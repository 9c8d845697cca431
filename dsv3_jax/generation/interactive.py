"""A conversation at the terminal: prompts read from standard input, answers printed as they are made."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dsv3_jax.generation.chat import Prompt
from dsv3_jax.generation.text_stream import Clock, Figures, TextStream, for_screen

PROMPT = ">>> "
COMMANDS = """\
/clear  forgets the conversation
/exit   leaves, as does the end of input (Ctrl-D) and Ctrl-C twice at the prompt; Ctrl-C during an answer stops the answer
/help   shows this
A command stands alone on its line. One word of / and letters is taken for a command; "/usr/bin" or "/tmp is full" is sent."""


def interactive(
    engine: Any,
    encode: Callable[[Sequence[dict[str, str]]], Prompt],
    new_stream: Callable[[], TextStream],
    sampling: Callable[[int], Any],
    figures: Figures,
    *,
    multi_turn: bool = True,
    after: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Answer line after line until /exit or end of file; /clear forgets the conversation; KeyboardInterrupt for Ctrl-C twice at the prompt.

    Ctrl-C during an answer stops the answer, and what was said stays in the conversation. A conversation that has grown too long, or
    that the template refuses, is reported in one line and loses only its last message. `encode` makes the prompt of a conversation,
    `sampling(n)` the Sampling of the n-th answer; without multi_turn each line stands alone. after() is called after every answer.
    `options` go to Engine.generate.
    """
    messages: list[dict[str, str]] = []
    answers = 0
    while (text := _read()) is not None:
        command = _command(text)
        if command == "/exit":
            return
        if command == "/clear":
            messages.clear()
            _remark("(the conversation is cleared)")
        elif command:
            _remark(COMMANDS if command == "/help" else command)
        if command or not text.strip():
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
        after()
        if answer or whole:
            messages.append({"role": "assistant", "content": answer})
        else:
            messages.pop()  # stopped before the first word: as if it had not been asked


def _read() -> str | None:
    """Return the next line, or None at the end of input; Ctrl-C once gives a new prompt and a hint, twice KeyboardInterrupt."""
    for last in (False, True):
        try:
            text = input(PROMPT)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print(flush=True)
            if last:
                raise
            _remark("(Ctrl-C again, or /exit, leaves)")
        else:
            if not sys.stdin.isatty():
                print(for_screen(text), flush=True)  # where nobody types, the question would be missing
            return text
    return None


def _command(text: str) -> str:
    """Return the command that a line is, '' for one that is meant for the model, and what to say about one that is wrong."""
    word, *rest = text.split(maxsplit=1) or [""]
    known = word in ("/clear", "/exit", "/help")
    if known and rest:
        return f"({word} stands alone on its line: nothing was done or sent; /help lists the commands)"
    if not known and word[:1] == "/" and word[1:].isalpha() and not rest:
        return f"(no command {word}: nothing was sent; /help lists the commands)"
    return word if known else ""


def _prepare(engine: Any, encode: Callable[[Sequence[dict[str, str]]], Prompt], messages: list[dict[str, str]]) -> Prompt | None:
    """Return the prompt of the conversation, or None after saying why it cannot be run and what to do."""
    try:
        prompt = encode(messages)
        if (size := len(prompt.tokens)) >= engine.max_seq_len:
            alone = len(encode(messages[-1:]).tokens)  # /clear is no help if the last message is too long by itself
            too_long = alone >= engine.max_seq_len
            what = f"this message has {alone}" if too_long else f"this conversation has grown to {size}"
            remedy = "shorten it" if too_long else "/clear starts a new one"
            limit = f"--max_seq_len is {engine.max_seq_len}"
            _remark(f"{what} tokens, and {limit}: {remedy}, or start again with a larger --max_seq_len")
            return None
        engine.check_prompt(prompt.tokens)
    except ValueError as e:
        _remark(f"error: {e}")
        return None
    return prompt


def _answer(engine: Any, prompt: Prompt, stream: TextStream, sampling: Any, figures: Figures, options: dict) -> tuple[str, bool]:
    """Print an answer as it is made; return its text, and whether it came to its end (False after Ctrl-C)."""
    clock, completion = Clock(), None

    def on_token(i: int, token: int) -> bool:
        clock.tick(i)
        print(for_screen(stream.push(token)), end="", flush=True)
        return stream.stopped

    print(for_screen(prompt.opening), end="", flush=True)
    with contextlib.suppress(KeyboardInterrupt), says_stopping():
        [completion] = engine.generate([prompt.tokens], sampling, on_token=on_token, **options)
    print(for_screen(stream.close()), flush=True)
    figures.add(clock)
    if completion is None:
        _remark("(stopped)")
    elif completion.finish_reason == "length" and not stream.stopped:
        full = completion.prompt_tokens + len(completion.tokens) >= engine.max_seq_len
        limit = "the conversation has reached --max_seq_len: /clear starts a new one" if full else "a larger --max_new_tokens allows more"
        _remark(f"(cut after {clock.tokens} token{'' if clock.tokens == 1 else 's'}; {limit})")
    return prompt.opening + stream.text if stream.text else "", completion is not None


@contextlib.contextmanager
def says_stopping(patience: float = 0.3) -> Iterator[None]:
    """Within it, a Ctrl-C that has not ended the block after `patience` seconds is answered with `(stopping...)`.

    Python runs signal handlers, and so raises KeyboardInterrupt, only when the call that runs returns, and compiling may take a minute.
    The signal's number is written to a pipe at once, though, and a thread can read it. To be used in the main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    over = threading.Event()

    def watch() -> None:
        said = False
        while number := os.read(reader, 1):
            if number[0] == signal.SIGINT and not said and not over.wait(patience):
                said = True
                _remark("(stopping...)")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)


def _remark(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
