"""Say how many GPUs a model needs: bytes of weights, cache and working memory per GPU, which meshes fit, how fast decoding can be.

    dsv3-plan --config=configs/deepseek_v3_671b.json
    dsv3-plan --config=configs/deepseek_v2_lite_16b.json --gpu=h100 --max_seq_len=32768 --max_batch_size=32
    dsv3-plan --config=configs/deepseek_v2_236b.json --gpu=a100:80:2.0 --mesh=data=2,model=8 --expert_axes=data,model

Arithmetic: no GPU is needed, none is touched. Without --mesh it takes the smallest that fits, of 1, 2, 4, 8 ... GPUs: model=N first,
then experts over data and model. Weights and cache are the engine's own to the byte (of a checkpoint in the released dtypes); working
memory is an upper estimate, of what stands in dsv3_jax/working_memory.py. GB are 10^9 bytes. JAX is taken to use 0.92 of a GPU's
memory: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.92, as it takes 0.75 unless told. Where the kernels, written for Hopper, do not run
(a GPU whose name begins otherwise than h100, h200, h800, h20 or gh200), attention keeps its scores in memory: much, for long prompts.

The decode time is a floor that no program can beat: what one GPU must read, weights (of experts those that even routing would hit) and
full caches, over the bandwidth of the data sheet. A copy on an H200 reaches 4.25 of its 4.8 TB/s, and GPUs have to talk to each other too.

Exit code 0 if the mesh, or some mesh, fits; 1 if none does; 2 for a wrong flag or file.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math

from absl import flags

from dsv3_jax import cli

_CONFIG = flags.DEFINE_string("config", None, "The model's config.json, such as configs/deepseek_v3_671b.json.", required=True)
_GPU = flags.DEFINE_string("gpu", "h200", "h100, h200 or b200, or any other as NAME:GB or NAME:GB:TBPS, such as a100:80:2.0.")
_GPUS = flags.DEFINE_integer("gpus", None, "How many there are; left out, 64 are searched through.", lower_bound=1)
_MESH = flags.DEFINE_string("mesh", None, "Work out this mesh, such as data=2,model=8, rather than the smallest that fits.")
_EXPERT_AXES = flags.DEFINE_string("expert_axes", None, "Mesh axes to spread experts over: model (with --mesh the default) or data,model.")
_MAX_SEQ_LEN = flags.DEFINE_integer("max_seq_len", None, "Tokens of prompt and answer together; left out, 4096 or what the model allows.")
_MAX_BATCH_SIZE = flags.DEFINE_integer("max_batch_size", 8, "Prompts that run together.", lower_bound=1)
_ATTN_IMPL = flags.DEFINE_enum("attn_impl", "absorb", ["absorb", "naive"], "Cache latents (absorb) or keys and values (naive).")
_GEMM_IMPL = flags.DEFINE_enum("gemm_impl", None, ["bf16", "fp8"], "Arithmetic of FP8 weights; left out, what the engine would choose.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Type of activations and of weights that are not FP8.")
_JSON = flags.DEFINE_string("json", None, "Write the figures to this file too, in bytes.")


def main(argv: list[str]) -> int:
    del argv
    from dsv3_jax import ModelConfig, plan, sharding

    logging.getLogger("dsv3_jax").setLevel(logging.WARNING)  # that XLA runs the ops is true of the tracing only
    gpu = plan.parse_gpu(_GPU.value)
    axes = None if _EXPERT_AXES.value is None else ",".join(sharding.parse_expert_axes(_EXPERT_AXES.value))
    limit = plan.MOST_GPUS if _GPUS.value is None else _GPUS.value
    if _MESH.value is not None:
        need = math.prod(sharding.parse_mesh(_MESH.value).values())
        if _GPUS.value is not None and need > limit:
            raise ValueError(f"mesh = {_MESH.value!r}: needs {need} GPUs, and --gpus is {limit}; use a smaller mesh or more GPUs")
    config = ModelConfig.from_json(cli.resolve(_CONFIG.value, "config"))
    options = {"dtype": _DTYPE.value, "attn_impl": _ATTN_IMPL.value, "gemm_impl": _GEMM_IMPL.value}
    job = plan.settle(config, gpu, _MAX_SEQ_LEN.value, _MAX_BATCH_SIZE.value, **options)
    asked = None if _MESH.value is None else plan.make(job, _MESH.value, axes or "model")
    tried = plan.search(job, limit, axes)
    smallest = tried[-1] if tried and tried[-1].fits else None
    chosen = asked or smallest
    for line in report(plan, job, [asked] if asked else tried, smallest, chosen, limit):
        print(line)
    if _JSON.value is not None:
        with open(cli.resolve(_JSON.value, "json"), "w", encoding="utf-8") as f:
            json.dump(figures(plan, job, asked, tried), f, indent=1)
            f.write("\n")
    return 0 if chosen and chosen.fits else 1


def report(plan, job, shown, smallest, chosen, limit) -> list[str]:
    """The lines to print."""
    c, o, gpu = job.config, job.options, job.gpu
    good, why = plan.sizes_of_model(c)
    one = plan.make(job, "model=1")
    weights = f"FP8 in blocks of {plan.sharding_lib.BLOCK}, gemm_impl {o.gemm_impl}" if c.quantization_config else o.dtype
    token = one.cache // (job.rows(1) * job.slots)
    kernels = "" if gpu.hopper else "; no kernels: scores in memory"
    lines = [
        f"model   {c.model_type}, {one.parameters / 1e9:,.1f} billion parameters, {weights}",
        f"gpu     {gpu.name}: {gpu.gb:g} GB, for JAX {gpu.usable / 1e9:.1f} (XLA_PYTHON_CLIENT_MEM_FRACTION={plan.USABLE:g}){kernels}",
        f"cache   {job.max_batch_size} rows of {job.max_seq_len} tokens, attn_impl {o.attn_impl}: {token:,} bytes a token",
        f"mesh    model can be {', '.join(map(str, good))}",
    ]
    lines += [f"        model={2 * good[-1]}: {fault.strip()}" for fault in why.splitlines()[1:2]]
    lines += ["", f"{'GB per GPU':<24}{'experts over':>14}{'weights':>10}{'cache':>9}{'working':>9}{'total':>9}  fits"]
    for p in shown:
        numbers = f"{p.weights / 1e9:>10,.1f}{p.cache / 1e9:>9,.1f}{p.working / 1e9:>9,.1f}{p.total / 1e9:>9,.1f}"
        lines.append(f"--mesh={p.mesh:<17}{p.expert_axes:>14}{numbers}  {'yes' if p.fits else 'no'}")
    lines.append("")
    if smallest is None:
        lines.append(f"No mesh of up to {limit} x {gpu.name} fits: lower --max_seq_len or --max_batch_size, or take more or larger GPUs.")
    else:
        lines.append(f"Smallest that fits: {smallest.devices} x {gpu.name} with {command(smallest)}")
    if chosen and gpu.tbps is None:
        lines.append(f"No decode times: give the bandwidth too, --gpu={gpu.name}:{gpu.gb:g}:TBPS.")
    elif chosen:
        lines.append(f"Decoding with {command(chosen)} takes at least, at {gpu.tbps:g} TB/s:")
        for row in floors(chosen):
            cache = f" + full caches {row['cache_bytes'] / 1e9:.2f} GB"
            speed = f"{row['seconds'] * 1e3:.2f} ms a token, {row['tokens_per_second']:,.0f} tokens/s"
            full = f"{row['seconds_full'] * 1e3:.2f} ms, {row['tokens_per_second_full']:,.0f} tokens/s"
            lines.append(f"  batch {row['batch']:<4} weights {row['weight_bytes'] / 1e9:6.2f} GB: {speed};{cache}: {full}")
    return lines


def floors(p) -> list[dict]:
    """The least time of a decode step of one row and of all, from weights alone and with full caches."""
    rows = []
    for batch in sorted({1, p.job.max_batch_size}):
        weights, cache = p.step_bytes(batch)
        row = {"batch": batch, "weight_bytes": round(weights), "cache_bytes": round(cache)}
        if p.job.gpu.tbps is not None:
            for key, read in (("", weights), ("_full", weights + cache)):
                seconds = read / (p.job.gpu.tbps * 1e12)
                row |= {f"seconds{key}": seconds, f"tokens_per_second{key}": batch / seconds}
        rows.append(row)
    return rows


def command(p) -> str:
    """The flags that choose a plan's mesh."""
    return f"--mesh={p.mesh}" + ("" if p.expert_axes == "model" else f" --expert_axes={p.expert_axes}")


def figures(plan, job, asked, tried) -> dict:
    """The report for --json."""

    def row(p) -> dict:
        keys = ("mesh", "expert_axes", "devices", "weights", "cache", "working", "total", "fits")
        return {key: getattr(p, key) for key in keys} | {"decode": floors(p)}

    return {
        "config": _CONFIG.value, "gpu": dataclasses.asdict(job.gpu), "usable_bytes": round(job.gpu.usable),
        "options": dataclasses.asdict(job.options), "max_seq_len": job.max_seq_len, "max_batch_size": job.max_batch_size,
        "sizes_of_model": plan.sizes_of_model(job.config)[0], "asked": asked and row(asked), "searched": [row(p) for p in tried],
    }  # fmt: skip


def run() -> None:
    cli.run(main)


if __name__ == "__main__":
    run()
