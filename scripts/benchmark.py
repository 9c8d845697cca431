"""Measure how fast this machine runs a model, or its kernels one by one.

    dsv3-benchmark model --random_weights --config=configs/deepseek_v2_lite_16b.json --batch=1,32 --context=1024
    dsv3-benchmark model --random_weights --config=configs/deepseek_v3_671b.json --num_hidden_layers=9 --json=v3.json --profile=trace
    dsv3-benchmark model --ckpt_path=DIR --mesh=data=1,model=8 --batch=64 --context=4096
    dsv3-benchmark kernels --what=gemm,mla --json=ours.jsonl --peers=peers.jsonl

model: for each batch and context, prefill tokens/s, time to first token, decode steps as the engine runs them (each the median of
three), memory of one GPU, and the bytes that a step must read (weights, of experts only those hit, and the cache in use) over its time,
as a share of what a copy on the same GPU reaches. Random weights need no checkpoint; --num_hidden_layers keeps a model's first layers,
so that a part of DeepSeek-V3 fits one GPU. Rows sample at temperature 1, so that tokens and experts differ; "experts" is how many
of a layer's experts a step reads, beside what even routing would give. "compile s" is the time to the first token and decode step
with nothing compiled, "cached s" the same from the compilation cache; leave both out with --nocompile_times.

On several hosts start the same command on each, as scripts/launch_*.sh do; process 0 prints and writes (docs/MULTI_HOST.md).

kernels: the times of single kernels on DeepSeek-V3's shapes, each result checked first; --peers joins the figures of other libraries.

Exit code 0 when all is well, 1 if a kernel failed its check, 2 for a wrong flag or file.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys

from absl import flags

from dsv3_jax import cli, distributed

COMMANDS = ("model", "kernels")
KERNELS_ONLY = ("what", "peers", "tokens", "deadline_s", "processes")
BOTH = ("json", "seed")

_JSON = flags.DEFINE_string("json", None, "Write the figures to this file too, with the device, versions and the command.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of random weights, prompts and sampling.", lower_bound=0, upper_bound=2**31 - 1)
_CKPT_PATH = flags.DEFINE_string("ckpt_path", None, "model: folder of a converted checkpoint. Either this or --random_weights.")
_RANDOM_WEIGHTS = flags.DEFINE_bool("random_weights", False, "model: make random weights on the devices, of the sizes in --config.")
_CONFIG = flags.DEFINE_string("config", None, "model: JSON with the model's sizes; with --ckpt_path, instead of DIR/config.json.")
_LAYERS = flags.DEFINE_integer("num_hidden_layers", None, "model: with --random_weights, keep the first so many.", lower_bound=1)
_BATCH = flags.DEFINE_string("batch", "1,32", "model: prompts that run together; a list is measured one by one.")
_CONTEXT = flags.DEFINE_string("context", "1024", "model: tokens of each prompt, and so the context of decoding; a list likewise.")
_STEPS = flags.DEFINE_integer("steps", 64, "model: decode steps to time, rounded up to a multiple of 4.", lower_bound=1)
_MESH = flags.DEFINE_string("mesh", "data=1,model=1", "model: devices: batches over data; heads, FFN, vocabulary, experts over model.")
_EXPERT_AXES = flags.DEFINE_string("expert_axes", "model", "model: mesh axes to spread experts over: model, or data,model.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "model: type of activations and of weights that are not FP8.")
_ATTN_IMPL = flags.DEFINE_enum("attn_impl", "absorb", ["absorb", "naive"], "model: cache latents (absorb) or keys and values (naive).")
_GEMM_IMPL = flags.DEFINE_enum("gemm_impl", None, ["bf16", "fp8"], "model: arithmetic of FP8 weights; left out, the engine chooses.")
_IMPLEMENTATION = flags.DEFINE_enum(
    "implementation", None, ["xla", "triton"], "model: kernels to use, or an error; left out, the best that run here."
)
_COMPILE_TIMES = flags.DEFINE_bool("compile_times", True, "model: time compiling, from nothing and from the cache.")
_PROFILE = flags.DEFINE_string("profile", None, "model: write traces of some decode steps here and print their time by part and by kernel.")
_WHAT = flags.DEFINE_string("what", "gemm,grouped,mla,quant", "kernels: which of them to measure.")
_TOKENS = flags.DEFINE_string("tokens", None, "kernels: the tokens of gemm, such as 1,64; left out, 1,8,64,128,512,4096.")
_DEADLINE_S = flags.DEFINE_float("deadline_s", None, "kernels: stop after so many seconds, with what has been measured.")
_PROCESSES = flags.DEFINE_integer("processes", None, "kernels: processes that compile side by side and take turns on the GPU.")
_PEERS = flags.DEFINE_string("peers", None, "kernels: file with other libraries' figures, to print ratios and their geometric mean.")

_join = cli.process_flags(__name__)

_command: list[str] = []  # the words of the command line, before run() takes the command out


def main(argv: list[str]) -> int:
    del argv
    command = _command[1] if len(_command) > 1 else ""
    if command not in COMMANDS:
        raise ValueError(f"the first argument must be one of {', '.join(COMMANDS)}{f', not {command}' if command else ''}; see --help")
    from dsv3_jax.benchmark import model

    names = [field.name for field in dataclasses.fields(model.Settings)]
    others = KERNELS_ONLY if command == "model" else [name for name in names if name not in BOTH]
    if wrong := [f"--{name}" for name in others if flags.FLAGS[name].present]:
        raise ValueError(f"{', '.join(wrong)}: not for {command}; see --help")
    words = shlex.join(_command)
    if command == "kernels":
        from dsv3_jax.benchmark import kernels, pool

        if (_SEED.value or 0) > 1_000_000:
            raise ValueError(f"--seed={_SEED.value}: must be at most 1000000 for kernels")
        pool.need_gpu("dsv3-benchmark kernels")
        return kernels.main(
            what=_WHAT.value, tokens=_TOKENS.value, json=_JSON.value, peers=_PEERS.value, deadline_s=_DEADLINE_S.value,
            processes=_PROCESSES.value, seed=_SEED.value, command=words,
        )  # fmt: skip
    values: dict = {name: flags.FLAGS[name].value for name in names}
    settings = model.Settings(**values)
    _join()
    with distributed.agreed() as same:
        same |= {name: str(getattr(settings, name)) for name in names if name not in ("json", "profile")}
        model.read_config(settings)
    distributed.connect()
    return model.main(settings, words)


def run() -> None:
    _command[:] = sys.argv
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        del sys.argv[1]
    cli.run(main)


if __name__ == "__main__":
    run()
