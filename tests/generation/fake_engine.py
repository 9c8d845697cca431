"""Run scripts/generate.py with an engine that speaks a given text, in a process of its own.

`python fake_engine.py --ckpt_path=... ` runs it once; `run()` forks a server that has imported the slow libraries already. The engine
follows dsv3_jax.Engine's interface, says $FAKE_REPLY (one token every $FAKE_DELAY seconds, then its end-of-sequence id) and notes
every call in the file $FAKE_LOG. It takes prompts whose text holds "BOOM" badly: it raises, as a fault would. It chooses kernels as the
model does, one op as it is made and one more when it first answers. $FAKE_COMPILES: so many million rounds in C that no signal ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import jax  # noqa: F401  (with the two below: imported once, before the forks)
import tokenizers
import transformers  # noqa: F401

from dsv3_jax import cli
from dsv3_jax.config import ModelConfig
from dsv3_jax.generation.stops import stop_token_ids
from dsv3_jax.kernels import dispatch

GOLDEN = Path(__file__).parent / "golden_chat"
BOS, USER, ASSISTANT, EOS = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
V3 = f"--ckpt_path={GOLDEN / 'v3'}"


def folders(parent: Path) -> Iterator[Path]:
    """New folders in `parent`, one for each run."""
    for i in itertools.count():
        (folder := parent / f"run{i}").mkdir()
        yield folder


@dataclasses.dataclass
class Completion:
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    time_to_first_token: float


class Engine:
    max_seq_len: int
    max_batch_size: int
    config: ModelConfig
    options: types.SimpleNamespace
    tokenizer: tokenizers.Tokenizer
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_checkpoint(cls, path, **settings):
        self = cls()
        self.__dict__.update(settings)
        self.config = ModelConfig.from_json(settings["config"] or f"{path}/config.json")
        self.max_seq_len = self.max_seq_len or min(4096, self.config.max_position_embeddings)
        self.options = types.SimpleNamespace(gemm_impl=settings["gemm_impl"] or "bf16")
        self.eos_token_ids = stop_token_ids(path, self.config)
        self.tokenizer = tokenizers.Tokenizer.from_file(f"{path}/tokenizer.json")
        _log(made=settings, path=path)
        if self.config.hidden_size % 128 and settings["mesh"] == "data=1,model=128":
            raise ValueError("mesh = 'data=1,model=128': does not divide hidden_size")
        dispatch.choose("attend", settings["implementation"])
        return self

    def check_prompt(self, tokens):
        if len(tokens) >= self.max_seq_len:
            most = self.max_seq_len - 1
            raise ValueError(f"prompt: {len(tokens)} tokens, and at most {most} fit; raise max_seq_len or shorten the prompt")

    def generate(self, prompts, sampling, max_new_tokens=200, *, stop_token_ids=None, on_token=lambda i, token: None):
        stop_token_ids = self.eos_token_ids if stop_token_ids is None else stop_token_ids
        for op in ("attend", "grouped_gemm", "moe_sort"):
            dispatch.choose(op, "xla")
        texts = [self.tokenizer.decode(p, skip_special_tokens=False) for p in prompts]
        rows = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        _log(prompts=texts, seeds=[s.seed for s in rows], stop=stop_token_ids, sampling=[rows[0].temperature, rows[0].top_k, rows[0].top_p])
        if any("BOOM" in t for t in texts):
            raise ValueError("the machine is on fire")
        if rounds := int(float(os.environ.get("FAKE_COMPILES", 0)) * 1e6):
            hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
        script = [*self.tokenizer.encode(os.environ["FAKE_REPLY"], add_special_tokens=False).ids, min(stop_token_ids)]
        limits = [min(max_new_tokens, self.max_seq_len - len(p)) for p in prompts]
        tokens, reasons = [[] for _ in prompts], {}
        for token in script:
            for i in range(len(prompts)):
                if i in reasons:
                    continue
                if token in stop_token_ids:
                    reasons[i] = "stop"
                    continue
                time.sleep(float(os.environ.get("FAKE_DELAY", 0)))
                tokens[i].append(token)
                if on_token(i, token):
                    reasons[i] = "stop"
                elif len(tokens[i]) == limits[i]:
                    reasons[i] = "length"
        return [Completion(t, reasons[i], len(prompts[i]), 0.25) for i, t in enumerate(tokens)]


def _log(**entry) -> None:
    with open(os.environ["FAKE_LOG"], "a", encoding="utf-8") as f:
        f.write(json.dumps(entry, default=str) + "\n")


def main() -> None:
    fake = types.ModuleType("dsv3_jax.generation.engine")
    fake.Engine = Engine  # pyright: ignore[reportAttributeAccessIssue]
    store = types.ModuleType("dsv3_jax.checkpoint.store")
    store.read_config = lambda path: ModelConfig.from_json(os.path.join(path, "config.json"))  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules |= {fake.__name__: fake, store.__name__: store}
    from dsv3_jax.scripts import generate

    cli.run(generate.main)


def _child(folder: str, args: list[str], env: dict[str, str]) -> None:
    os.environ.update(env)
    for fd, (name, flags) in enumerate((("in", os.O_RDONLY), ("out", os.O_WRONLY | os.O_CREAT), ("err", os.O_WRONLY | os.O_CREAT))):
        os.dup2(os.open(f"{folder}/{name}", flags, 0o600), fd)
    sys.stdin, sys.argv = open(0, encoding="utf-8"), ["generate", *args]  # noqa: SIM115
    main()


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str
    log: list[dict]  # what the engine was asked: the first entry is how it was made

    @property
    def calls(self) -> list[dict]:
        return self.log[1:]


_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["fake_engine"])


def run(folder: Path, *args: str, stdin: bytes = b"", reply: str = "Hello.", during=None, **env: str) -> Result:
    """Run the script with files in an empty `folder`; during(process, folder), if given, is called while it runs."""
    (folder / "in").write_bytes(stdin)
    # Python 3.12's fork server does not hand our sys.path on to what it imports first.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    env |= {"FAKE_LOG": f"{folder}/log", "FAKE_REPLY": reply}
    process = _CONTEXT.Process(target=_child, args=(str(folder), list(args), env))
    process.start()
    if during:
        during(process, folder)
    process.join(30)
    assert process.exitcode is not None
    log = (folder / "log").read_text("utf-8") if (folder / "log").exists() else ""
    out, err = ((folder / name).read_text("utf-8") for name in ("out", "err"))
    return Result(process.exitcode, out, err, [json.loads(line) for line in log.splitlines()])


if __name__ == "__main__":
    main()
