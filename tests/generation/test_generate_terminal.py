"""What scripts/generate.py tells its user: at a terminal, after Ctrl-C, by commands, settings and kernels; the engine is a fake."""

from __future__ import annotations

import json
import logging
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_engine
import pytest
from absl import flags
from fake_engine import ASSISTANT, BOS, EOS, USER, V3

from dsv3_jax import cli


@pytest.fixture
def run(tmp_path):
    """run(*args): the script on the prompts one, two and three, or what args name; a folder of its own for each call."""
    folders = fake_engine.folders(tmp_path)

    def run(*args, **options):
        folder = next(folders)
        if "--interactive" not in args:
            (folder / "prompts.txt").write_text(options.pop("prompts", "one\ntwo\nthree\n"))
            args += (f"--input_file={folder}/prompts.txt",)
        return fake_engine.run(folder, V3, *args, **options)

    return run


def test_at_a_terminal(tmp_path):
    """Text appears as it is made and steers no terminal; Ctrl-C stops the answer, not the program; at the prompt, twice, it leaves."""
    fake = {"FAKE_LOG": f"{tmp_path}/log", "FAKE_REPLY": "\x1b[2J" + "Hello there. " * 40, "FAKE_DELAY": "0.05"}
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
        assert expect("\\x1b[2JHello there. Hello"), screen
        assert ctrl_c("(stopped)") and expect(">>> "), screen
        assert ctrl_c("(Ctrl-C again, or /exit, leaves)") and expect(">>> "), screen
        os.write(ours, b"More\n")
        assert expect("Hello there."), screen
        assert ctrl_c("(stopped)") and expect(">>> "), screen
        assert ctrl_c(">>> ") and ctrl_c("tokens: "), screen
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    calls = [json.loads(line) for line in (tmp_path / "log").read_text("utf-8").splitlines()][1:]
    second = calls[1]["prompts"][0]  # what was said before Ctrl-C is part of the conversation
    assert second.startswith(f"{BOS}{USER}Hi{ASSISTANT}\x1b[2JHello there. Hello") and second.endswith(f"{EOS}{USER}More{ASSISTANT}")
    assert second.count("Hello there") < 40


def _own_terminal() -> None:
    """In the child: a session of its own whose terminal is standard input, so that Ctrl-C reaches it."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize("interactive", [True, False])
def test_ctrl_c_while_something_compiles_is_answered_at_once(run, interactive):
    def during(process, folder):
        until = time.monotonic() + 20
        while time.monotonic() < until and not ((folder / "log").exists() and "prompts" in (folder / "log").read_text("utf-8")):
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)

    args, stdin = (("--interactive",), b"one\n") if interactive else ((), b"")
    result = run(*args, stdin=stdin, FAKE_COMPILES="2", during=during)
    said = [line for line in result.err.splitlines() if "stop" in line or "interrupt" in line][1:]  # the first are the settings
    assert said == ["(stopping...)", "(stopped)" if interactive else "interrupted after 0 of 3 prompts"]
    assert result.code == (0 if interactive else 130)


def test_commands(run):
    lines = ["/help", "/clear now", "/tmp", "/quit", "/usr/bin", "/tmp is full", "/", "/exit"]
    result = run("--interactive", stdin="\n".join(lines).encode())
    sent = [c["prompts"][0].rpartition(USER)[2].removesuffix(ASSISTANT) for c in result.calls]
    assert sent == ["/usr/bin", "/tmp is full", "/"] and result.code == 0
    for text in ("/clear  forgets", "(/clear stands alone", "(no command /tmp: nothing was sent", "(no command /quit: "):
        assert result.err.count(text) == 1
    assert result.out.endswith(">>> /exit\n")


@pytest.mark.parametrize("args", ["--help", V3 + " --input_file=prompts.txt"])
def test_a_reader_that_leaves(tmp_path, args):
    (tmp_path / "prompts.txt").write_text("one\n")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "FAKE_LOG": "log", "FAKE_REPLY": "Hello.", "PYTHONUNBUFFERED": "1"}
    command = f"{sys.executable} {fake_engine.__file__} {args} | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 141 and "Traceback" not in result.stderr and "BrokenPipe" not in result.stderr


def test_flags_that_are_missing_are_named_in_one_line():
    def errors(*required: str) -> str:
        values = flags.FlagValues()
        for name in required:
            flags.DEFINE_string(name, None, "", flag_values=values, required=True)
        with pytest.raises(flags.Error) as caught:
            values(["program"])
        return cli._flag_errors(str(caught.value))

    assert errors("hf_ckpt_path") == "--hf_ckpt_path is required"
    assert errors("hf_ckpt_path", "save_path") == "--hf_ckpt_path and --save_path are required"
    assert errors("a", "b", "c") == "--a, --b and --c are required"


def test_choices_reach_the_engine(run):
    keys = ("gate_dtype", "reference_scale_fmt", "implementation")
    result = run()
    assert [result.log[0]["made"][k] for k in keys] == ["float32", False, None]
    assert "gate_dtype=float32 reference_scale_fmt=False implementation=auto" in result.err
    result = run("--gate_dtype=bfloat16", "--reference_scale_fmt", "--implementation=xla")
    assert [result.log[0]["made"][k] for k in keys] == ["bfloat16", True, "xla"]
    assert "gate_dtype=bfloat16 reference_scale_fmt=True implementation=xla" in result.err


def test_the_kernels_that_run_are_named_once(run):
    wanted = "kernels: attend, grouped_gemm, moe_sort on xla"
    result = run("--max_batch_size=1")
    assert [line for line in result.err.splitlines() if "kernels" in line or " runs on " in line] == [wanted]
    result = run("--interactive", stdin=b"one\ntwo\n")
    assert [line for line in result.err.splitlines() if "kernels" in line or " runs on " in line] == [wanted]
    assert result.out == ">>> one\nHello.\n>>> two\nHello.\n>>> \n"
    result = run(prompts="BOOM")  # of use when something goes wrong as well
    assert wanted in result.err.splitlines()


def test_log_notes(capsys, caplog, monkeypatch):
    notes, log = cli.LogNotes("dsv3_jax_test"), logging.getLogger("dsv3_jax_test")
    log.warning("this GPU has %s", "no FP8")
    assert capsys.readouterr().err == "warning: this GPU has no FP8\n"
    assert not caplog.records  # absl's handler sits where caplog's does, and would say it again
    for op, where in (("attend", "xla"), ("fp8_gemm", "triton"), ("moe_sort", "xla")):
        log.info("%s runs on %s", op, where)
    log.info("something else")
    log.debug("a detail")
    assert capsys.readouterr().err == ""
    notes.say()
    notes.say()
    assert capsys.readouterr() == ("", "kernels: attend, moe_sort on xla; fp8_gemm on triton\nsomething else\n")
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("jax.process_index", lambda: 1)
    log.warning("process 0 has said this")
    log.info("attend runs on xla")
    notes.say()
    assert capsys.readouterr() == ("", "")


def test_seeds_wrap_around(run):
    result = run("--seed=4294967295", "--interactive", stdin=b"Hi\nAgain\n")
    assert result.code == 0 and [c["seeds"] for c in result.calls] == [[4294967295], [0]]
    result = run("--seed=4294967294")
    assert result.code == 0 and result.calls[0]["seeds"] == [4294967294, 4294967295, 0]
