"""`dsv3-benchmark model`: sweeps batch and context over one engine, prints a table and writes JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from importlib import metadata

import jax

from dsv3_jax import cli
from dsv3_jax.benchmark import measure, profile
from dsv3_jax.benchmark.random_weights import random_engine, truncated
from dsv3_jax.checkpoint import store
from dsv3_jax.config import ModelConfig
from dsv3_jax.generation.chunks import bucket
from dsv3_jax.generation.engine import Engine
from dsv3_jax.generation.steps import DECODED, SMALLEST_CACHE

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "jax-triton", "triton", "dsv3-jax")
PROFILED = 16  # decode steps in a trace

# Heading, key of a row, format: the table on the screen; the JSON has every key.
COLUMNS = (
    ("batch", "batch", "d"), ("context", "context", "d"), ("prefill tok/s", "prefill_tok_s", ",.0f"), ("TFLOP/s", "prefill_tflops", ".1f"),
    ("TTFT ms", "time_to_first_token_ms", ".1f"), ("ms/step", "decode_ms_per_step", ".3f"), ("decode tok/s", "decode_tok_s", ",.1f"),
    ("GB/s", "bandwidth_gbps", ",.0f"), ("of copy", "bandwidth_share", ".0%"), ("experts", "experts_hit", ".1f"),
    ("if even", "experts_expected", ".1f"), ("params GB", "params_gb", ".2f"), ("cache GB", "cache_gb", ".2f"),
    ("peak GB", "peak_gb", ".2f"), ("compile s", "compile_cold_s", ".1f"), ("cached s", "compile_cached_s", ".1f"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run, as the flags of scripts/benchmark.py say it; `batch` and `context` are lists of integers such as '1,32'."""

    ckpt_path: str | None = None
    random_weights: bool = False
    config: str | None = None
    num_hidden_layers: int | None = None
    batch: str = "1,32"
    context: str = "1024"
    steps: int = 64
    mesh: str = "data=1,model=1"
    expert_axes: str = "model"
    dtype: str = "bfloat16"
    attn_impl: str = "absorb"
    gemm_impl: str | None = None
    implementation: str | None = None
    seed: int = 0
    compile_times: bool = True
    json: str | None = None
    profile: str | None = None


def main(settings: Settings, command: str = "") -> int:
    """Measure every batch at every context. Raises ValueError for settings that do not fit, before devices are touched."""
    s = dataclasses.replace(settings, steps=-(-settings.steps // DECODED) * DECODED)
    batches, contexts = cli.numbers("batch", s.batch), cli.numbers("context", s.context)
    config = read_config(s)
    longest = max(contexts) + s.steps + measure.WARM_UP
    if longest > config.max_position_embeddings:
        need = f"{max(contexts)} + {s.steps} steps + {measure.WARM_UP} to warm up = {longest} tokens"
        raise ValueError(f"--context: {need}, and the model has max_position_embeddings {config.max_position_embeddings}; ask for less")
    out = writable(s.json)
    folder = None if s.profile is None else cli.resolve(s.profile, "profile")
    if folder is not None:
        os.makedirs(folder, exist_ok=True)

    # The engine's caches are powers of two unless max_seq_len is less; the benchmark's are what the engine would take.
    slots = min(config.max_position_embeddings, bucket(longest, SMALLEST_CACHE))
    log = cli.LogNotes()
    common = {
        "mesh": s.mesh, "dtype": s.dtype, "attn_impl": s.attn_impl, "gemm_impl": s.gemm_impl, "max_seq_len": slots,
        "max_batch_size": max(batches), "expert_axes": s.expert_axes, "implementation": s.implementation,
    }  # fmt: skip
    if s.random_weights:
        engine = random_engine(config, num_hidden_layers=s.num_hidden_layers, seed=s.seed, **common)
    else:
        engine = Engine.from_checkpoint(cli.resolve(s.ckpt_path, "ckpt_path"), config=s.config, **common)
    report = describe(engine, s, command)
    own = [d for d in engine.sharding.mesh.devices.flat if d.process_index == jax.process_index()]
    size = measure.COPIED if own[0].platform == "gpu" else measure.COPIED // 100
    report["copy_gbps"] = measure.copy_rate(own, size) / 1e9
    say(f"{report['device']}: {report['devices']} device(s), copies at {report['copy_gbps']:,.0f} GB/s; {shape(engine)}")
    say("".join(f"{heading:>{width(heading)}}" for heading, _, _ in COLUMNS))
    tables = []
    for context in contexts:
        for batch in batches:
            row, table = measure_row(engine, batch, context, s, report["copy_gbps"], folder)
            report["rows"].append(row)
            say(line(row))
            tables += [table] if table else []
            write(report, out)  # after each row: what a time limit cuts off is only what had not been measured yet
    for table in tables:
        say("\n" + table)
    log.say()
    return 0


def measure_row(engine: Engine, batch: int, context: int, s: Settings, copy_gbps: float, folder: str | None) -> tuple[dict, str]:
    """One row of the report, and the profile's tables if `folder` is given."""
    # Processes share no empty cache.
    compiling = s.compile_times and jax.process_count() == 1
    run, table = measure.Run(engine, batch, context, s.steps, s.seed), ""
    row: dict = {"batch": batch, "context": context}
    with engine._running(), measure.own_compilation_cache() if compiling else contextlib.nullcontext():
        cold, cached = run.compile_times() if compiling else (None, None)
        figures, at = run.measure()
        read = measure.step_bytes(run, at.cache, figures["experts_hit"])
        rate = read / figures["decode_ms_per_step"] / 1e6
        stats = engine.sharding.mesh.local_devices[0].memory_stats() or {}
        row |= figures | {
            "step_bytes": read,
            "bandwidth_gbps": rate,
            "bandwidth_share": rate / copy_gbps,
            "params_gb": sum(measure.bytes_here(a) for _, a in measure.leaves(engine.params)) / 1e9,
            "cache_gb": sum(measure.bytes_here(a) for layer in at.cache.layers for a in layer) / 1e9,
            "peak_gb": stats["peak_bytes_in_use"] / 1e9 if "peak_bytes_in_use" in stats else None,  # since the process started
            "compile_cold_s": cold,
            "compile_cached_s": cached,
        }
        if folder is not None:
            row["profile"], table = profile_row(run, at, os.path.join(folder, f"batch{batch}_context{context}"), figures)
    return row, table


def profile_row(run: measure.Run, at: measure.Started, folder: str, figures: dict) -> tuple[dict, str]:
    """Trace PROFILED decode steps; their time by part and by kernel, for the report and as text."""
    e, cache, rows, steps = run.engine, at.cache, at.rows, min(PROFILED, run.steps)
    program = e._decode.lower(e.params, cache, rows, mode=run.mode).compile()

    def decode(n: int):
        nonlocal cache, rows
        for _ in range(n // DECODED):
            cache, rows, _ = program(e.params, cache, rows)
        return rows

    lengths = measure.lengths_of(cache)
    jax.block_until_ready(decode(measure.WARM_UP))  # CUDA graphs are made in the first calls
    cache = run.rewind(cache, lengths)
    events = profile.record(folder, lambda: decode(steps))
    kernels = profile.by_kernel(events, steps)
    namer = profile.Namer(profile.parts_of_hlo(program.as_text() or ""))
    parts = profile.by_part(events, namer, steps, figures["decode_ms_per_step"] * 1e3)
    title = f"batch {run.batch}, context {run.context}: {figures['decode_ms_per_step'] * 1e3:,.0f} us a step; trace in {folder}"
    return {"steps": steps, "parts": parts, "kernels": kernels}, f"{title}\n{profile.show(kernels, parts)}"


def read_config(s: Settings) -> ModelConfig:
    """The model's config, cut to num_hidden_layers; raises ValueError where the flags that choose a model contradict each other."""
    if s.random_weights == (s.ckpt_path is not None):
        raise ValueError("give exactly one of --ckpt_path and --random_weights")
    if s.random_weights:
        if s.config is None:
            raise ValueError("--random_weights needs --config: a config.json, such as configs/deepseek_v2_lite_16b.json")
        return truncated(ModelConfig.from_json(cli.resolve(s.config, "config")), s.num_hidden_layers)
    if s.num_hidden_layers is not None:
        raise ValueError("--num_hidden_layers goes with --random_weights: a checkpoint has the layers that it has")
    config = store.read_config(cli.resolve(s.ckpt_path, "ckpt_path"))
    return config if s.config is None else ModelConfig.from_json(cli.resolve(s.config, "config"))


def writable(path: str | None) -> str | None:
    """The absolute path of a file to write; OSError now rather than after minutes of work."""
    if path is None:
        return None
    with open(full := cli.resolve(path, "json"), "a", encoding="utf-8"):
        return full


def describe(engine: Engine, s: Settings, command: str) -> dict:
    """What the figures were measured on and with; rows are still to come."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    device, config = engine.sharding.mesh.devices.flat[0], engine.config
    chosen = dataclasses.asdict(s) | dataclasses.asdict(engine.options) | {"max_seq_len": engine.max_seq_len}
    layers = {"dense": 0, "moe": 0}
    for i in range(config.num_hidden_layers):
        layers["moe" if config.is_moe_layer(i) else "dense"] += 1
    return {
        "command": command, "device": device.device_kind, "platform": device.platform, "devices": engine.sharding.mesh.size,
        "versions": versions, "settings": chosen, "layers": layers, "rows": [],
    }  # fmt: skip


def shape(engine: Engine) -> str:
    o = engine.options
    kernels = o.implementation or "best"
    return f"{engine.config.num_hidden_layers} layers, {o.dtype}, attn {o.attn_impl}, gemm {o.gemm_impl}, kernels {kernels}"


def width(heading: str) -> int:
    return max(len(heading), 7) + 2


def line(row: dict) -> str:
    texts = ((h, "-" if row[key] is None else format(row[key], form)) for h, key, form in COLUMNS)
    return "".join(f"{text:>{width(h)}}" for h, text in texts)


def say(text: str) -> None:
    """Print on standard output, in process 0 only."""
    if jax.process_index() == 0:
        print(text, flush=True)


def write(report: dict, path: str | None) -> None:
    if path is not None and jax.process_index() == 0:
        with open(path, "w", encoding="utf-8") as f:
            json.dump(report, f, indent=1)
            f.write("\n")
