"""Streaming text: unfinished characters and possible stop strings wait, and what is given out stays."""

from __future__ import annotations

import random
import sys

import pytest

from dsv3_jax.generation import batch_file, text_stream
from dsv3_jax.generation.text_stream import Clock, Figures, TextStream, byte_alphabet, for_screen


def one_byte(token: int) -> bytes:
    return bytes([token])


def test_the_alphabet_is_gpt2s():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert byte_alphabet() == {c: b for b, c in bytes_to_unicode().items()}


def test_one_byte_per_token():
    stream = TextStream(one_byte)
    pieces = [stream.push(b) for b in "你好😊".encode()]
    assert pieces == ["", "", "你", "", "", "好", "", "", "", "😊"]
    assert stream.close() == "" and stream.text == "你好😊"


@pytest.mark.parametrize("raw", [b"a\xffb", b"\xe4\xbd", b"\xf0\x9f\x98a", b"\xe4\xbdA\xc3", b"\xed\xa0\x80", "é".encode() + b"\x80"])
def test_bytes_that_are_no_utf8_become_marks_and_never_block(raw):
    stream = TextStream(one_byte)
    text = "".join(map(stream.push, raw)) + stream.close()
    assert text == raw.decode(errors="replace")


def first_stop(text: str, stops: list[str]) -> str | None:
    """The text before the stop string that is complete first, read off letter by letter; None if there is none."""
    for end in range(1, len(text) + 1):
        cuts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if cuts:
            return text[: min(cuts)]
    return None


def test_stop_strings_wherever_the_tokens_break():
    rng = random.Random(1)
    hits = 0
    for _ in range(3000):
        text = "".join(rng.choice("ab\n你") for _ in range(rng.randrange(12)))
        stops = ["".join(rng.choice("ab\n你") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        raw, tokens = text.encode(), []
        while raw:
            n = rng.randint(1, 5)
            tokens.append(raw[:n])
            raw = raw[n:]
        stream = TextStream(lambda i, tokens=tokens: tokens[i], stops)
        given = ""
        for i in range(len(tokens)):
            given += stream.push(i)
            before = first_stop(text, stops)
            assert (before if before is not None else text).startswith(given)  # nothing to take back, at any moment
            if stream.stopped:
                break
        given += stream.close()
        expected = first_stop(text, stops)
        hits += expected is not None
        assert stream.stopped == (expected is not None)
        assert given == stream.text == (text if expected is None else expected)
    assert 500 < hits < 2900


def test_what_cannot_be_a_stop_is_given_at_once():
    stream = TextStream(one_byte, ["END"])
    assert [stream.push(b) for b in b"xENE"] == ["x", "", "", "EN"]
    assert stream.close() == "E"


@pytest.mark.parametrize("stop", [[""], ["a", ""], "abc"])
def test_empty_stop_strings_are_refused(stop):
    with pytest.raises(ValueError, match="--stop"):
        TextStream(one_byte, stop)


def test_a_terminal_is_not_steered_and_files_keep_every_character(monkeypatch, capsys):
    steering = "a\x00\x07\r\x1b[2J\x7f\x9b1m\tb\nc é😊"
    shown = "a\\x00\\x07\\x0d\\x1b[2J\\x7f\\x9b1m\tb\nc é😊"
    record = {"prompt": steering, "completion": steering, "finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1}
    assert for_screen(steering) == steering
    batch_file.show(record, 8)
    assert capsys.readouterr().out == f"Prompt: {steering}\nCompletion: {steering}\n\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert for_screen(steering) == shown
    batch_file.show(record, 8)
    assert capsys.readouterr().out == f"Prompt: {shown}\nCompletion: {shown}\n\n"


def test_figures_tell_what_compiles_from_what_is_steady(monkeypatch):
    now = 0.0
    monkeypatch.setattr(text_stream.time, "perf_counter", lambda: now)
    figures, clock = Figures(), Clock()
    for seconds, prompts in ((9.0, [0, 1]), (19.0, [0, 1]), (19.5, [0, 1]), (20.0, [0])):  # a step each: these prompts get a token
        now = seconds
        for i in prompts:
            clock.tick(i)
    figures.add(clock)
    rate = "0.35 in all, 3.00 after the second token"
    assert str(figures) == f"tokens: 7  seconds: 20.00  tokens per second: {rate}  time to first token: 9.000 s"
    now = 30.0
    clock = Clock()
    figures.add(clock)  # stopped before the first token
    assert (figures.tokens, figures.first) == (7, [9.0])
    clock.tick(0)
    figures = Figures()
    now = 32.0
    figures.add(clock, [1.5])
    assert str(figures) == "tokens: 1  seconds: 2.00  tokens per second: 0.50  time to first token: 1.500 s"
