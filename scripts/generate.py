"""Generate text from a converted checkpoint: talk to it, or complete every line of a file.

    dsv3-generate --ckpt_path=DIR --interactive
    dsv3-generate --ckpt_path=DIR --input_file=prompts.txt --output_file=answers.jsonl --mesh=data=1,model=8

Interactive: type after `>>> `; the answer appears as it is made, and the conversation is remembered. /clear forgets it, Ctrl-C stops
an answer, /exit or the end of input leaves, /help says this and more. A file holds one prompt a line; blank lines are skipped. Each
prompt goes through the checkpoint's chat template; --raw, or a checkpoint without a template, continues the text as it stands, and then
every line stands alone.

DIR is what dsv3-convert wrote. Answers go to standard output, settings, warnings and figures to standard error. The first two tokens of
an answer wait for the prompt and for what has to be compiled, so tokens per second are also given after the second. Exit code 0 when all is
well or only some prompts of a file could not be run (too long, say; they carry an "error"), 1 when none could, 2 for a wrong flag or
file, 130 after Ctrl-C (in a conversation: twice at the prompt), 3 if other processes of the run did not come or were lost.

On several hosts start the same command on each, with --coordinator_address, --num_processes and --process_id, or through SLURM, mpirun,
torchrun's variables or scripts/launch_*.sh; process 0 reads and prints. docs/MULTI_HOST.md says more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
import zlib
from collections.abc import Callable

from absl import flags

from dsv3_jax import cli, distributed

_CKPT_PATH = flags.DEFINE_string("ckpt_path", None, "Folder of the converted checkpoint (dsv3-convert --save_path).", required=True)
_CONFIG = flags.DEFINE_string("config", None, "Read the model's sizes from this JSON instead of DIR/config.json.")
_INTERACTIVE = flags.DEFINE_bool("interactive", False, "Answer what is typed. Either this or --input_file.")
_INPUT_FILE = flags.DEFINE_string("input_file", None, "UTF-8 text file with one prompt a line. Either this or --interactive.")
_OUTPUT_FILE = flags.DEFINE_string(
    "output_file", None, "With --input_file: also write one JSON object a line here, as batches finish. Nothing is overwritten."
)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 200, "Most tokens to generate for one prompt.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.2, "Sampling temperature; 0 always takes the most likely token.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from the k most likely tokens only; 0 is off.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the most likely tokens that together have this probability; 1 is off.")
_SEED = flags.DEFINE_integer(
    "seed", 965, "Seed of the sampling. Prompt i of a file, and answer i of a conversation, counted from 0, use seed + i modulo 2^32."
)
_MESH = flags.DEFINE_string("mesh", "data=1,model=1", "Devices: batches over data; heads, FFN, vocabulary and experts over model.")
_EXPERT_AXES = flags.DEFINE_string("expert_axes", "model", "Mesh axes to spread experts over: model, or data,model.")
_MAX_SEQ_LEN = flags.DEFINE_integer(
    "max_seq_len", None, "Most tokens of prompt and answer together; left out, 4096 or what the model allows, if less.", lower_bound=2
)
_MAX_BATCH_SIZE = flags.DEFINE_integer("max_batch_size", 8, "Prompts that run together.", lower_bound=1)
_ATTN_IMPL = flags.DEFINE_enum("attn_impl", "absorb", ["absorb", "naive"], "Cache latents (absorb) or keys and values (naive).")
_GEMM_IMPL = flags.DEFINE_enum("gemm_impl", None, ["bf16", "fp8"], "Arithmetic of FP8 weights; left out, the engine chooses.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Type of activations and of weights that are not FP8.")
_GATE_DTYPE = flags.DEFINE_enum(
    "gate_dtype", "float32", ["float32", "bfloat16"], "Type of the router's logits; bfloat16 is for parity with the reference."
)
_REFERENCE_SCALE_FMT = flags.DEFINE_bool(
    "reference_scale_fmt", False, "Round activation scales to powers of two only where the reference does, for parity with it."
)
_IMPLEMENTATION = flags.DEFINE_enum(
    "implementation", None, ["xla", "triton"], "Kernels to use, or an error where they cannot run; left out, the best that run here."
)
_THINKING = flags.DEFINE_bool("thinking", False, "Have the model think first, if its chat template has that switch (DeepSeek-V3.1).")
_STOP = flags.DEFINE_multi_string("stop", [], "Text that ends an answer and is cut from it; may be repeated.")
_RAW = flags.DEFINE_bool("raw", False, "Continue prompts as they stand, without the chat template.")
_join = cli.process_flags(__name__)

# The flags that make the engine, which every process must have alike.
_ENGINE = ("mesh", "expert_axes", "dtype", "attn_impl", "gemm_impl", "gate_dtype", "reference_scale_fmt", "implementation")
_ENGINE += ("max_seq_len", "max_batch_size")


def main(argv: list[str]) -> int:
    del argv
    _join()
    # Everything that can be checked without a device comes first: loading a large model takes minutes.
    with distributed.agreed() as same:
        _check_flags()
        from dsv3_jax import Engine, ModelConfig, Sampling, sharding
        from dsv3_jax.checkpoint import store
        from dsv3_jax.generation import batch_file, together
        from dsv3_jax.generation.chat import ChatTokenizer
        from dsv3_jax.generation.interactive import interactive, says_stopping
        from dsv3_jax.generation.stops import stop_token_ids
        from dsv3_jax.generation.text_stream import Figures

        same |= {f"--{name}": str(flags.FLAGS[name].value) for name in _ENGINE}
        sharding.parse_mesh(_MESH.value)
        sharding.parse_expert_axes(_EXPERT_AXES.value)
        ckpt_path = cli.resolve(_CKPT_PATH.value, "ckpt_path")
        config_path = cli.resolve(_CONFIG.value, "config") if _CONFIG.value is not None else None
        config = store.read_config(ckpt_path)  # refuses any other folder, even where --config replaces what it read
        if config_path is not None:
            config = ModelConfig.from_json(config_path)
        same["the model's config"] = f"{zlib.crc32(repr(config).encode()):08x}"
        chat, lines, output = None, [], None
        if not distributed.process():
            lines, blank = batch_file.read_prompts(cli.resolve(_INPUT_FILE.value, "input_file")) if not _INTERACTIVE.value else ([], 0)
            output = cli.resolve(_OUTPUT_FILE.value, "output_file") if _OUTPUT_FILE.value is not None else None
            if output is not None:
                batch_file.check_output(output)
            first = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value, _SEED.value)
            chat = ChatTokenizer(ckpt_path, config)
            options = {"max_new_tokens": _MAX_NEW_TOKENS.value, "stop_token_ids": stop_token_ids(ckpt_path, config)}
            use_template = chat.has_template and not _RAW.value
            for line in _remarks(chat, len(lines), blank):
                cli.note(line)
    distributed.connect()
    log = cli.LogNotes()
    with distributed.agreed():
        engine = Engine.from_checkpoint(
            ckpt_path, mesh=_MESH.value, expert_axes=_EXPERT_AXES.value, dtype=_DTYPE.value, attn_impl=_ATTN_IMPL.value,
            gemm_impl=_GEMM_IMPL.value, max_seq_len=_MAX_SEQ_LEN.value, max_batch_size=_MAX_BATCH_SIZE.value, config=config_path,
            gate_dtype=_GATE_DTYPE.value, reference_scale_fmt=_REFERENCE_SCALE_FMT.value, implementation=_IMPLEMENTATION.value,
        )  # fmt: skip
    if chat is None:
        return together.follow(engine)
    if distributed.count() > 1:
        engine = together.Leading(engine)
    for line in _after_loading(engine):
        cli.note(line)
    figures = Figures()

    def sampling(i: int) -> Sampling:
        return dataclasses.replace(first, seed=(first.seed + i) % 2**32)

    def encode(messages):
        return chat.chat(messages, _THINKING.value) if use_template else chat.raw(messages[-1]["content"])

    def new_stream():
        return chat.stream(_STOP.value)

    _prepare_terminal()
    try:
        if _INTERACTIVE.value:
            interactive(engine, encode, new_stream, sampling, figures, multi_turn=use_template, after=log.say, **options)
            return 0
        records = batch_file.run(
            lines, engine, lambda text: encode([{"role": "user", "content": text}]), new_stream,
            [sampling(i) for i in range(len(lines))], figures, **options,
        )
        with says_stopping():
            return _write(records, output, len(lines), engine.max_seq_len, log.say)
    except ValueError as e:  # set-up is over and prompts are checked one by one: this is no mistake of the user's
        raise RuntimeError(f"fault while generating: {e}") from e
    finally:
        log.say()
        cli.note(str(figures))


def _check_flags() -> None:
    from dsv3_jax.generation.text_stream import check_stop

    if _INTERACTIVE.value == (_INPUT_FILE.value is not None):
        raise ValueError("give exactly one of --interactive and --input_file")
    if _OUTPUT_FILE.value is not None and _INTERACTIVE.value:
        raise ValueError("--output_file goes with --input_file, not with --interactive")
    if _THINKING.value and _RAW.value:
        raise ValueError("--thinking is a switch of the chat template, which --raw leaves out: give one of them")
    check_stop(_STOP.value)


def _remarks(chat, prompts: int, blank: int) -> list[str]:
    """The lines that say, at the start, how this run is set up."""
    names = (*_ENGINE, "max_new_tokens", "temperature", "top_k", "top_p", "seed", "thinking", "raw", "stop")
    values = {name: flags.FLAGS[name].value for name in names}
    remarks = ["settings: " + " ".join(f"{k}={'auto' if v is None else v}" for k, v in values.items())]
    if prompts:
        remarks.append(_count(prompts, "prompt") + (f", {_count(blank, 'blank line')} skipped" if blank else ""))
    if not chat.has_template and not _RAW.value:
        remarks.append("warning: the checkpoint has no chat template (a base model?): prompts are continued as they stand")
    if _THINKING.value and not chat.has_thinking:
        remarks.append("warning: --thinking changes nothing: the checkpoint's chat template has no such switch")
    return remarks


def _after_loading(engine) -> list[str]:
    """What the settings that were left out have become, and a warning if they cannot all be used."""
    chosen = {"gemm_impl": (_GEMM_IMPL.value, engine.options.gemm_impl), "max_seq_len": (_MAX_SEQ_LEN.value, engine.max_seq_len)}
    chosen = [f"{name}={value}" for name, (given, value) in chosen.items() if given is None]
    lines = [f"chosen: {' '.join(chosen)}"] if chosen else []
    if _MAX_NEW_TOKENS.value >= engine.max_seq_len:
        limit = f"max_seq_len={engine.max_seq_len}, which holds prompt and answer together"
        lines.append(f"warning: max_new_tokens={_MAX_NEW_TOKENS.value} is more than fits into {limit}: longer answers are cut there")
    return lines


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _write(records, output: str | None, total: int, max_seq_len: int, after: Callable[[], None]) -> int:
    """Print and write records as they come, each followed by after(); return the exit code, having said so if some prompts failed."""
    from tqdm import tqdm

    from dsv3_jax.generation import batch_file

    done, failed = 0, []
    hidden = sys.stdout.isatty() or not sys.stderr.isatty()  # completions on the screen are progress enough
    with open(output or os.devnull, "w", encoding="utf-8") as file, tqdm(total=total, unit="prompt", disable=hidden) as progress:
        try:
            for record in records:
                batch_file.write(record, file)
                batch_file.show(record, max_seq_len)
                after()
                done += 1
                progress.update()
                if "error" in record:
                    failed.append(record["line"])
        except KeyboardInterrupt:
            cli.note(f"interrupted after {done} of {_count(total, 'prompt')}")
            return 130
    if failed:
        shown = ", ".join(map(str, failed[:10])) + (", ..." if len(failed) > 10 else "")
        lines = "line" if len(failed) == 1 else "lines"
        cli.note(f"{len(failed)} of {_count(total, 'prompt')} could not be run ({lines} {shown}): see the errors above")
    return 1 if len(failed) == total else 0


def _prepare_terminal() -> None:
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a byte that is no text, or a character that the terminal lacks, ends nothing
    if _INTERACTIVE.value and sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history for input()


def run() -> None:
    cli.run(main)


if __name__ == "__main__":
    run()
