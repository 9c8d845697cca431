"""scripts/generate.py at a terminal of its own: streaming, Ctrl-C at every place; the engine is a fake that says a given text."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import fake_engine

GOLDEN = Path(__file__).parent / "golden_chat"
BOS, USER, ASSISTANT, EOS = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
V3 = f"--ckpt_path={GOLDEN / 'v3'}"


def test_at_a_terminal(tmp_path):
    """Text appears as it is made; Ctrl-C stops the answer and not the program; Ctrl-C twice at the prompt leaves with exit code 0."""
    fake = {"FAKE_LOG": f"{tmp_path}/log", "FAKE_REPLY": "Hello there. " * 40, "FAKE_DELAY": "0.05"}
    env = {**os.environ, **fake, "PYTHONPATH": ".", "TERM": "dumb"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, fake_engine.__file__, V3, "--interactive"], stdin=theirs, stdout=theirs, stderr=theirs, env=env,
        cwd=Path(__file__).parents[2], preexec_fn=_own_terminal,
    )  # fmt: skip
    os.close(theirs)
    screen = b""

    def expect(text: str, seconds: float = 20) -> bool:
        nonlocal screen
        until = time.monotonic() + seconds
        while text.encode() not in screen:
            if time.monotonic() > until or process.poll() is not None:
                return False
            if select.select([ours], [], [], 0.1)[0]:
                screen += os.read(ours, 4096)
        screen = screen.partition(text.encode())[2]
        return True

    def ctrl_c(shows: str) -> bool:
        time.sleep(0.3)
        os.write(ours, b"\x03")
        if expect(shows, 3):
            return True
        os.write(ours, b"\x03")  # CPython may miss a signal between readline's prompt and its wait for a key
        return expect(shows)

    try:
        assert expect(">>> ")
        os.write(ours, b"Hi\n")
        assert expect("Hello there. Hello"), screen
        assert ctrl_c("(stopped)") and expect(">>> "), screen
        assert ctrl_c("(Ctrl-C again, or /exit, leaves)") and expect(">>> "), screen
        os.write(ours, b"More\n")
        assert expect("Hello there."), screen
        assert ctrl_c("(stopped)") and expect(">>> "), screen
        assert ctrl_c(">>> ") and ctrl_c("tokens: "), screen
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    calls = [json.loads(line) for line in (tmp_path / "log").read_text("utf-8").splitlines()][1:]
    second = calls[1]["prompts"][0]  # what was said before Ctrl-C is part of the conversation
    assert second.startswith(f"{BOS}{USER}Hi{ASSISTANT}Hello there. Hello") and second.endswith(f"{EOS}{USER}More{ASSISTANT}")
    assert second.count("Hello there") < 40


def _own_terminal() -> None:
    """In the child: a session of its own whose terminal is standard input, so that Ctrl-C reaches it."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
