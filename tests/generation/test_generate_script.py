"""scripts/generate.py from the outside: flags, files, conversations, Ctrl-C, exit codes; the engine is a fake that says a given text."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_engine
import pytest
from fake_engine import ASSISTANT, BOS, EOS, GOLDEN, USER, V3


@pytest.fixture
def run(tmp_path):
    folders = fake_engine.folders(tmp_path)

    def run(*args, **options):
        return fake_engine.run(next(folders), *args, **options)

    return run


@pytest.fixture
def prompts(tmp_path):
    count = iter(range(100))

    def write(content: str | bytes) -> str:
        path = tmp_path / f"prompts{next(count)}.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return f"--input_file={path}"

    return write


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_help_teaches(run):
    result = run("--help")
    assert result.code == 0 and result.err == ""
    assert result.out.startswith("Generate text from a converted checkpoint")
    for flag in ("--ckpt_path=PATH", "--input_file=FILE", "--attn_impl=absorb|naive", "--top_p=P", "--stop=STOP"):
        assert f"  {flag}\n" in result.out
    for flag in ("--gate_dtype=float32|bfloat16", "--reference_scale_fmt", "--implementation=xla|triton"):
        assert f"  {flag}\n" in result.out
    assert re.search(r"--seed=SEED\n\s+Seed of .*\(default 965\)", result.out, re.S)
    assert "logtostderr" not in result.out


@pytest.mark.parametrize(("args", "message"), [
    ((V3,), "exactly one of --interactive and --input_file"),
    ((V3, "--interactive", "--input_file=x"), "exactly one of --interactive and --input_file"),
    (("--interactive",), "error: --ckpt_path is required; see --help\n"),
    ((V3, "--interactive", "--output_file=x"), "--output_file goes with --input_file"),
    ((V3, "--interactive", "--temprature=1"), "Unknown command line flag 'temprature'. Did you mean: temperature ?"),
    ((V3, "--interactive", "--attn_impl=best"), "attn_impl=best"),
    ((V3, "--interactive", "--max_new_tokens=0"), "max_new_tokens=0"),
    ((V3, "--interactive", "--temperature=-1"), "temperature = -1.0"),
    ((V3, "--interactive", "--top_p=0"), "top_p = 0"),
    ((V3, "--interactive", "--top_k=-1"), "top_k = -1"),
    ((V3, "--interactive", "--seed=-1"), "seed = -1"),
    ((V3, "--interactive", "--seed=4294967296"), "seed = 4294967296"),
    ((V3, "--interactive", "--gate_dtype=float16"), "gate_dtype=float16"),
    ((V3, "--interactive", "--implementation=cuda"), "implementation=cuda"),
    ((V3, "--interactive", "--mesh=modle=2"), "mesh = 'modle=2'"),
    ((V3, "--interactive", "--expert_axes=model,data"), "expert_axes = 'model,data'"),
    ((V3, "--interactive", "--stop="), "--stop"),
    ((V3, "--interactive", "--thinking", "--raw"), "--thinking"),
    ((V3, "--interactive", "hello"), "unexpected argument 'hello'"),
    (("--ckpt_path=", "--interactive"), "--ckpt_path is empty"),
    ((V3, "--input_file=/does/not/exist"), "/does/not/exist: No such file or directory"),
    ((V3, f"--input_file={GOLDEN}"), "Is a directory"),
    ((V3, "--interactive", "--config=/does/not/exist.json"), "/does/not/exist.json: No such file"),
])  # fmt: skip
def test_usage_errors_before_the_engine(run, args, message):
    result = run(*args)
    assert result.code == 2 and result.out == "" and result.log == []
    assert result.err.count("\n") == 1 and result.err.startswith("error: ") and message in result.err


def test_wrong_files_before_the_engine(run, prompts, tmp_path):
    full = tmp_path / "full.jsonl"
    full.write_text("{}\n")
    broken = shutil.copytree(GOLDEN / "v3", tmp_path / "no_tokenizer")
    (broken / "tokenizer.json").unlink()
    tiktoken = shutil.copytree(broken, tmp_path / "tiktoken")
    (tiktoken / "tiktoken.model").write_text("")
    endless = shutil.copytree(GOLDEN / "v3", tmp_path / "endless")
    (endless / "generation_config.json").write_text('{"eos_token_id": [1, 320]}')
    for args, message in (
        ((V3, prompts(b"fine\nna\xefve\n")), "line 2 is not UTF-8"),
        ((V3, prompts("\n \n\t\n")), "holds no prompt (3 blank lines)"),
        ((V3, prompts("x"), f"--output_file={full}"), "exists and holds results"),
        ((V3, prompts("x"), f"--output_file={tmp_path}"), "is a folder"),
        ((V3, prompts("x"), f"--output_file={tmp_path}/nowhere/x.jsonl"), "does not exist"),
        ((f"--ckpt_path={broken}", prompts("x")), "has no tokenizer.json"),
        ((f"--ckpt_path={tiktoken}", prompts("x"), "--raw"), "tiktoken.model is not enough"),
        ((f"--ckpt_path={endless}", prompts("x")), "generation_config.json: eos_token_id = [1, 320]: must lie in the vocabulary"),
        ((V3, f"--config={GOLDEN / 'v2lite' / 'config.json'}", prompts("x")), "take the tokenizer files from the release"),
    ):
        result = run(*args)
        assert (result.code, result.out, result.log) == (2, "", []), message
        assert result.err.count("\n") == 1 and message in result.err
    assert full.read_text() == "{}\n"


def test_what_the_engine_refuses_is_a_usage_error_too(run, prompts):
    result = run(V3, prompts("x"), "--mesh=data=1,model=128")
    assert result.code == 2 and "error: mesh = 'data=1,model=128'" in result.err and "Traceback" not in result.err


def test_faults_keep_their_traceback(run, prompts):
    result = run(V3, prompts("BOOM"))
    assert result.code == 1 and "Traceback" in result.err and "the machine is on fire" in result.err


def test_a_terminal_that_lacks_characters(prompts, tmp_path):
    env = {**os.environ, "PYTHONPATH": ".", "FAKE_LOG": f"{tmp_path}/log", "FAKE_REPLY": "né 😊", "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, fake_engine.__file__, V3, prompts("one")]
    result = subprocess.run(command, env=env, cwd=Path(__file__).parents[2], capture_output=True, timeout=60)
    assert result.returncode == 0 and result.stdout == b"Prompt: one\nCompletion: n\xe9 ?\n\n"


def test_a_file_of_prompts(run, prompts, tmp_path):
    """Any number of prompts, in batches; blank lines, CRLF, a line separator inside a prompt, no line feed at the end."""
    output = tmp_path / "answers.jsonl"
    given = prompts("\ufeffone\r\n\n  two  \nthr\u2028ee\n \nfour\nfive")
    result = run(V3, given, f"--output_file={output}", "--max_batch_size=2", "--top_k=7", "--top_p=0.5", reply="你好 😊")
    texts = ["one", "  two  ", "thr\u2028ee", "four", "five"]
    assert result.code == 0
    assert result.out == "".join(f"Prompt: {t}\nCompletion: 你好 😊\n\n" for t in texts)
    asked = [f"{BOS}{USER}{t}{ASSISTANT}" for t in texts]
    assert [c["prompts"] for c in result.calls] == [asked[:2], asked[2:4], asked[4:]]
    assert [c["seeds"] for c in result.calls] == [[965, 966], [967, 968], [969]]
    assert {json.dumps(c["sampling"]) for c in result.calls} == {"[0.2, 7, 0.5]"}
    assert {json.dumps(c["stop"]) for c in result.calls} == {"[1]"}
    rows = records(output)
    assert [(r["index"], r["line"], r["prompt"]) for r in rows] == list(zip(range(5), (1, 3, 4, 6, 7), texts, strict=True))
    assert all(r["completion"] == "你好 😊" and r["finish_reason"] == "stop" for r in rows)
    assert set(rows[0]) == {"index", "line", "prompt", "completion", "finish_reason", "prompt_tokens", "completion_tokens"}
    assert rows[0]["prompt_tokens"] == 6 and "你好" in output.read_text("utf-8")  # BOS, User, o-n-e, Assistant
    first, *_, last = result.err.splitlines()
    assert first.startswith("settings: mesh=data=1,model=1 ")
    for setting in ("temperature=0.2", "top_k=7", "top_p=0.5", "seed=965", "dtype=bfloat16", "attn_impl=absorb", "gemm_impl=auto"):
        assert setting in first.split()
    assert "5 prompts, 2 blank lines skipped" in result.err and "\nchosen: gemm_impl=bf16 max_seq_len=4096\n" in result.err
    tokens, rate = sum(r["completion_tokens"] for r in rows), r"\d+\.\d\d in all, \d+\.\d\d after the second token"
    assert re.fullmatch(rf"tokens: {tokens}  seconds: \d+\.\d\d  tokens per second: {rate}  time to first token: 0.250 s \(mean\)", last)
    made = result.log[0]["made"]
    assert (made["max_batch_size"], made["dtype"], made["config"]) == (2, "bfloat16", None)


def test_every_source_of_an_end_counts(run, prompts, tmp_path):
    """Ids of generation_config.json, and the tokenizer's own where the config's vocabulary has no word for it."""
    ckpt = shutil.copytree(GOLDEN / "v3", tmp_path / "ends")
    (ckpt / "generation_config.json").write_text('{"eos_token_id": [311]}')
    result = run(f"--ckpt_path={ckpt}", prompts("x"))
    assert result.calls[0]["stop"] == [311, 1]


def test_a_prompt_that_is_too_long_fails_alone(run, prompts, tmp_path):
    output = tmp_path / "answers.jsonl"
    result = run(V3, prompts(f"one\n{'long ' * 40}\nthree\n"), f"--output_file={output}", "--max_seq_len=30")
    assert result.code == 0
    rows = records(output)
    assert [("error" in r, r.get("completion")) for r in rows] == [(False, "Hello."), (True, None), (False, "Hello.")]
    assert set(rows[1]) == {"index", "line", "prompt", "error"}
    assert re.fullmatch(r"\d+ tokens, and at most 29 fit; raise max_seq_len or shorten the prompt", rows[1]["error"])
    assert result.calls[0]["seeds"] == [965, 967]
    assert f"Prompt: {'long ' * 16}... (200 characters)\nError: {rows[1]['error']}\n\n" in result.out and rows[1]["prompt"] == "long " * 40
    assert "1 of 3 prompts could not be run (line 2)" in result.err
    result = run(V3, prompts("long " * 40), "--max_seq_len=30")
    assert result.code == 1 and len(result.calls) == 0


def test_a_crash_loses_nothing_finished(run, prompts, tmp_path):
    output = tmp_path / "answers.jsonl"
    result = run(V3, prompts("one\ntwo\nthree\nBOOM\n"), f"--output_file={output}", "--max_batch_size=2")
    assert result.code == 1 and "the machine is on fire" in result.err
    assert [r["prompt"] for r in records(output)] == ["one", "two"]


def test_ctrl_c_in_a_file_keeps_what_is_finished(run, prompts, tmp_path):
    output = tmp_path / "answers.jsonl"
    given = prompts("one\ntwo\nthree\n")
    during = when_there(output, '"index": 0', signal.SIGINT)
    result = run(V3, given, f"--output_file={output}", "--max_batch_size=1", FAKE_DELAY="0.1", during=during)
    assert result.code == 130 and "Traceback" not in result.err
    done = records(output)
    assert 1 <= len(done) < 3 and f"interrupted after {len(done)} of 3 prompts" in result.err and result.err.count("interrupted") == 1


def when_there(file: Path, text: str, number: int):
    """Something to do while the script runs: send a signal as soon as `file` holds `text`."""

    def wait_and_send(process, _):
        until = time.monotonic() + 20
        while time.monotonic() < until and not (file.exists() and text in file.read_text("utf-8")):
            time.sleep(0.01)
        os.kill(process.pid, number)

    return wait_and_send


def test_stop_strings_end_the_answer_and_are_cut(run, prompts, tmp_path):
    output = tmp_path / "answers.jsonl"
    result = run(V3, prompts("x"), f"--output_file={output}", "--stop=STOP", "--stop=\n\n", reply="Once upon\n\na time STOP")
    [row] = records(output)
    assert (row["completion"], row["finish_reason"]) == ("Once upon", "stop")
    assert result.out == "Prompt: x\nCompletion: Once upon\n\n"


def test_length_limit(run, prompts, tmp_path):
    output = tmp_path / "answers.jsonl"
    result = run(V3, prompts("x"), f"--output_file={output}", "--max_new_tokens=3", reply="a b c d e f g")
    [row] = records(output)
    assert (row["finish_reason"], row["completion_tokens"]) == ("length", 3)
    assert result.out == f"Prompt: x\nCompletion: {row['completion']}\n(cut at max_new_tokens)\n\n" and "warning" not in result.err
    result = run(V3, prompts("x"), "--max_seq_len=8", "--max_new_tokens=8", reply="a b c d e f g")
    assert result.out.endswith("\n(cut at max_seq_len)\n\n") and "\n1 prompt\nchosen: gemm_impl=bf16\nwarning: max_new_" in result.err


def test_raw_prompts_and_base_models(run, prompts, tmp_path):
    result = run(V3, prompts("one"), "--raw")
    assert result.calls[0]["prompts"] == [f"{BOS}one"] and "warning" not in result.err
    base = shutil.copytree(GOLDEN / "v3", tmp_path / "base")
    settings = json.loads((base / "tokenizer_config.json").read_text("utf-8"))
    del settings["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    result = run(f"--ckpt_path={base}", prompts("one\ntwo"))
    assert result.calls[0]["prompts"] == [f"{BOS}one", f"{BOS}two"]
    assert result.err.count("warning: the checkpoint has no chat template") == 1
    result = run(f"--ckpt_path={base}", "--interactive", stdin=b"one\ntwo\n")
    assert [c["prompts"] for c in result.calls] == [[f"{BOS}one"], [f"{BOS}two"]]


def test_thinking(run, prompts, tmp_path):
    ckpt = shutil.copytree(GOLDEN / "v3", tmp_path / "v31")
    (ckpt / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if thinking else '</think>' }}", "utf-8"
    )
    result = run(f"--ckpt_path={ckpt}", prompts("one"), "--thinking", reply="hm</think>Yes.")
    assert result.calls[0]["prompts"] == [f"{BOS}one<think>"]
    assert result.out == "Prompt: one\nCompletion: <think>hm</think>Yes.\n\n" and "warning" not in result.err
    result = run(f"--ckpt_path={ckpt}", "--interactive", "--thinking", stdin=b"one", reply="hm</think>Yes.")
    assert result.out == ">>> one\n<think>hm</think>Yes.\n>>> \n"
    result = run(V3, prompts("one"), "--thinking")
    assert result.code == 0 and "warning: --thinking changes nothing" in result.err


def test_a_conversation(run):
    lines = "Hi\n\n   \nAnd you?\n /clear \nAgain\n/exit\nnever read\n"
    result = run(V3, "--interactive", stdin=lines.encode(), reply="Fine 😊")
    assert result.code == 0
    lines = lines.replace("\n", "\nFine 😊\n", 1).replace("you?", "you?\nFine 😊").replace("Again", "Again\nFine 😊")
    assert result.out == "".join(f"{'' if line.startswith('Fine') else '>>> '}{line}\n" for line in lines.splitlines()[:-1])
    assert "\n(the conversation is cleared)\n" in result.err
    assert [c["prompts"][0] for c in result.calls] == [
        f"{BOS}{USER}Hi{ASSISTANT}",
        f"{BOS}{USER}Hi{ASSISTANT}Fine 😊{EOS}{USER}And you?{ASSISTANT}",
        f"{BOS}{USER}Again{ASSISTANT}",
    ]
    assert [c["seeds"] for c in result.calls] == [[965], [966], [967]]
    assert result.err.splitlines()[-1].startswith("tokens: ")


def test_end_of_input_and_bytes_that_are_no_text(run):
    result = run(V3, "--interactive", stdin=b"caf\xe9")
    assert result.code == 0 and result.out == ">>> caf\ufffd\nHello.\n>>> \n"
    assert result.calls[0]["prompts"] == [f"{BOS}{USER}caf\ufffd{ASSISTANT}"]
    result = run(V3, "--interactive")
    assert (result.code, result.out, result.calls) == (0, ">>> \n", [])


def test_a_conversation_that_outgrows_the_limit(run):
    long = "long " * 12
    result = run(V3, "--interactive", "--max_seq_len=60", stdin=f"Hi\n{long}\nBye\n{long * 3}\n/clear\n{long * 3}\nHi\n".encode())
    assert result.code == 0 and result.out.count("Hello.\n") == 3
    assert len(re.findall(r"this conversation has grown to \d+ tokens, and --max_seq_len is 60: /clear starts a new one", result.err)) == 1
    assert len(re.findall(r"this message has \d+ tokens, and --max_seq_len is 60: shorten it", result.err)) == 2
    assert result.calls[1]["prompts"] == [f"{BOS}{USER}Hi{ASSISTANT}Hello.{EOS}{USER}Bye{ASSISTANT}"]  # only the long message is gone
    result = run(V3, "--interactive", "--max_new_tokens=2", stdin=b"Hi\n")
    assert "(cut after 2 tokens; a larger --max_new_tokens allows more)" in result.err
