"""The whole way: a Hugging Face folder is converted, and scripts/generate.py says what transformers' own classes say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from tests.golden import load

ROOT = Path(__file__).parents[2]
# One mesh and one shape for all runs, so that they share what is compiled.
FLAGS = ("--temperature=0", "--dtype=float32", "--max_new_tokens=24", "--max_seq_len=64", "--mesh=data=2,model=2", "--max_batch_size=2")


def script(name: str, *args: str, stdin: str = "") -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *args], input=stdin, capture_output=True, text=True, env=env, timeout=300
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("end_to_end")
    hf, path = load.checkpoint("v3", folder), str(folder / "converted")
    result = script("convert", f"--hf_ckpt_path={hf}", f"--save_path={path}")
    assert result.returncode == 0, result.stderr
    return hf, path


@pytest.fixture(scope="module")
def expected(folders):
    """Chat prompt -> the text of its 24 greedy tokens, up to the end-of-sequence token."""
    tokenizer, answers = tokenizers.Tokenizer.from_file(f"{folders[0]}/tokenizer.json"), load.answers("v3")
    texts = {}
    for chat in load.chats()["v3"]:
        [i] = [i for i in range(9) if f"greedy{i}.prompt" in answers and answers[f"greedy{i}.prompt"].tolist() == chat["ids"]]
        tokens = answers[f"greedy{i}.tokens"].tolist()
        tokens = tokens[: tokens.index(1)] if 1 in tokens else tokens
        if len(chat["messages"]) == 1:
            texts[chat["messages"][0]["content"]] = tokenizer.decode(tokens, skip_special_tokens=True)
    assert texts
    return texts


def test_greedy_answers_of_a_file(folders, expected, tmp_path):
    questions = [*expected, "Another question, of another length", *expected]
    (tmp_path / "prompts.txt").write_text("\n".join(questions), "utf-8")
    result = script(
        "generate", f"--ckpt_path={folders[1]}", f"--input_file={tmp_path}/prompts.txt", f"--output_file={tmp_path}/out.jsonl", *FLAGS
    )
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert [r["prompt"] for r in rows] == questions
    for row in rows:
        if row["prompt"] in expected:
            assert row["completion"] == expected[row["prompt"]]
    assert result.stdout.startswith(f"Prompt: {questions[0]}\nCompletion: {expected[questions[0]]}\n")


def test_greedy_answer_in_a_conversation(folders, expected):
    question, answer = next(iter(expected.items()))
    result = script("generate", f"--ckpt_path={folders[1]}", "--interactive", *FLAGS, stdin=f"{question}\n/clear\n{question}\n/exit\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f">>> {question}\n{answer}\n>>> /clear\n>>> {question}\n{answer}\n>>> /exit\n"
    [kernels] = [line for line in result.stderr.splitlines() if line.startswith("kernels: ")]
    assert {"attend", "grouped_gemm"} <= set(kernels.removeprefix("kernels: ").removesuffix(" on xla").split(", "))


def test_a_hugging_face_folder_is_refused(folders):
    result = script("generate", f"--ckpt_path={folders[0]}", "--interactive")
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "a Hugging Face folder" in result.stderr
