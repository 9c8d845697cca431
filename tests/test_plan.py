"""What a plan says against what others published, and against what the engine and XLA do."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from dsv3_jax import plan
from dsv3_jax.benchmark import measure
from dsv3_jax.checkpoint import load, names
from dsv3_jax.config import ModelConfig
from dsv3_jax.generation.chunks import chunks
from dsv3_jax.generation.engine import PREFILL_TOKENS, Engine
from dsv3_jax.generation.settings import settle
from dsv3_jax.working_memory import prefill_call

H100, H200 = plan.GPUS["h100"], plan.GPUS["h200"]
PRESETS = {"lite": "deepseek_v2_lite_16b", "v2": "deepseek_v2_236b", "v3": "deepseek_v3_671b", "tiny": "tiny"}


def preset(name: str, **fields) -> ModelConfig:
    return dataclasses.replace(ModelConfig.from_json(f"configs/{PRESETS[name]}.json"), **fields)


# Totals and activated parameters, in billions: DeepSeek-V2 report (arXiv 2405.04434), abstract and B.1; V3's README, "Model Summary".
@pytest.mark.parametrize(("name", "total", "activated"), [("lite", 15.7, 2.4), ("v2", 235.7, 21), ("v3", 671.0, 37)])
def test_published_parameters(name, total, activated):
    found = plan.make(plan.settle(preset(name, quantization_config=None), H200), "model=1")
    assert found.parameters == pytest.approx(total * 1e9, rel=1e-3)
    assert found.step_bytes(1)[0] / 2 == pytest.approx(activated * 1e9, rel=0.025)  # bf16; of the embedding a row is read


def test_published_checkpoint_of_v3():
    """685B on Hugging Face, of which 14B are the MTP module (V3's README); its tensors take 688.6 GB."""
    config, sizes = preset("v3"), {"fp8": 1, "float": 2, "float32": 4, "scale": 4}
    table = names.targets(config).values()
    assert sum(math.prod(t.shape) for t in table) == pytest.approx(685e9, rel=1e-3)
    assert sum(math.prod(t.shape) * sizes[t.kind] for t in table) == pytest.approx(688.6e9, rel=1e-3)


def test_published_cache():
    """DeepSeek-V2 report, table 1: MLA caches 9/2 of a head's width a token and layer, MHA two for each head."""
    for name, layers, absorbed in (("v2", 60, 69_120), ("v3", 61, 70_272)):
        latent, naive = (plan.make(plan.settle(preset(name), H200, 128, 1, attn_impl=how), "model=1") for how in ("absorb", "naive"))
        assert latent.cache / 128 == absorbed == 4.5 * 128 * 2 * layers
        assert naive.cache / 128 == 128 * (192 + 128) * 2 * layers  # as MHA, and 64 more for the rotated part of each key


def test_which_gpus_deepseek_fits():
    v3, lite = preset("v3"), preset("lite")
    eight, sixteen = (plan.search(plan.settle(v3, gpu))[-1] for gpu in (H200, H100))
    assert (eight.mesh, sixteen.mesh) == ("model=8", "model=16") and eight.fits and sixteen.fits
    assert eight.weights == pytest.approx(671e9 / 8, rel=0.03)
    assert not plan.make(plan.settle(v3, H100), "model=8").fits
    assert plan.search(plan.settle(lite, H100))[-1].devices == 1
    assert not any(p.fits for p in plan.search(plan.settle(v3, H100), gpus=8))


def test_experts_over_both_axes_when_model_alone_does_not_fit():
    """32 caches of 64K tokens are 147 GB on every GPU, however many share the heads."""
    job = plan.settle(preset("v3"), H200, 65536, 32)
    found = plan.search(job)
    assert found[-1].fits and found[-1].expert_axes == "data,model" and "data=" in found[-1].mesh
    assert not any(p.fits for p in found[:-1])
    assert not any(p.fits for p in plan.search(job, expert_axes="model"))


def test_blocks_say_which_sizes_of_model():
    good, why = plan.sizes_of_model(preset("v3"))
    assert good == [1, 2, 4, 8, 16] and "18432 = 144 blocks of 128" in why
    assert plan.sizes_of_model(preset("v2"))[0][-1] == 32
    with pytest.raises(ValueError, match="mesh = 'model=32' does not divide this model; model can be 1, 2, 4, 8, 16"):
        plan.make(plan.settle(preset("v3"), H200), "model=32")


def zero_engine(config: ModelConfig, mesh: str, axes: str, max_seq_len: int, max_batch_size: int, **options) -> Engine:
    s = settle(config, mesh, axes, max_seq_len, max_batch_size, None, **options)
    graph, abstract = load.abstract_model(config, s.options, s.sharding, max_seq_len)
    zeros = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), abstract)
    return Engine(config, s, *load.prepare(graph, zeros, s.options, s.sharding))


MESHES = [("model=1", "model"), ("model=2", "model"), ("data=2,model=4", "model"), ("data=2,model=4", "data,model")]


@pytest.mark.parametrize(
    ("mesh", "axes", "attn", "quantised"), [(*m, "absorb", True) for m in MESHES] + [("model=1", "model", "naive", False)]
)
def test_bytes_are_those_of_the_engine(mesh, axes, attn, quantised):
    """Array by array, after load.prepare; what a step reads is what the benchmark counts, and XLA needs no more than was estimated."""
    config = preset("tiny") if quantised else preset("tiny", quantization_config=None)
    options = {"max_seq_len": 200, "max_batch_size": 6, "dtype": "float32" if attn == "absorb" else "bfloat16", "attn_impl": attn}
    engine = zero_engine(config, mesh, axes, **options)
    found = plan.make(plan.settle(config, plan.parse_gpu("cpu:8"), **options), mesh, axes)
    held = [a for _, a in measure.leaves(engine.params)]
    on_first = {id(a): next(s.data.nbytes for s in a.addressable_shards if s.device == jax.devices()[0]) for a in held}
    assert found.weights == sum(on_first.values())
    assert found.devices == engine.sharding.mesh.size

    prompts = [[1] * 199] * 6
    with engine._running():
        cache = engine._start(prompts, 200)
    assert found.cache == sum(measure.bytes_here(a) for layer in cache.layers for a in layer)

    even = 8 * (1 - (1 - 2 / 8) ** (3 if (mesh, axes) == MESHES[2] else 6))
    hit = 8 if axes == "data,model" else even  # eight devices with an expert each: one that is hit reads it whole
    run = types.SimpleNamespace(engine=engine, batch=6, context=-measure.WARM_UP, steps=-1)  # no slot in use
    assert found.step_bytes(6)[0] == pytest.approx(measure.step_bytes(run, cache, hit))

    if (mesh, axes) in (MESHES[0], MESHES[3]) and attn == "absorb":  # in float32: XLA computes bfloat16 so on a CPU
        with engine._running():
            chunk, arrays = next(engine._chunks(prompts, PREFILL_TOKENS, cache))
            shape, layout = (len(cache.lengths), config.vocab_size), engine.sharding.named("batch", "vocab")
            logits = jax.ShapeDtypeStruct(shape, np.float32, sharding=layout)
            compiled = engine._prefill.lower(engine.params, cache, *arrays, logits, context=chunk.context).compile()
        assert (planned := compiled.memory_analysis()) is not None
        assert 1 < found.working / planned.temp_size_in_bytes < 2.5


@pytest.mark.parametrize(("rows", "length"), [(1, 17), (8, 4096), (3, 5000), (6, 200), (2, 8192), (2, 20000), (300, 1024)])
def test_the_largest_prefill_call(rows, length):
    slots = -(-length // 128) * 128
    made = [(*c.tokens.shape, c.context) for c in chunks([[1] * (length - 1)] * rows, rows, 1, PREFILL_TOKENS, slots)]
    assert prefill_call(rows, length, slots) == tuple(max(column) for column in zip(*made, strict=True))


def test_a_step_waits_for_the_device_with_most_experts():
    """Eight experts over 32 devices: some device reads one, though the mean is a quarter; a full batch reads all."""
    job = plan.settle(preset("v3"), H200, max_batch_size=4096)
    found = plan.make(job, "data=4,model=8", "data,model")
    experts = sum(leaf.bytes for leaf in found.leaves if "experts" in leaf.path)
    others = sum(leaf.bytes for leaf in found.leaves if "experts" not in leaf.path and leaf.path[0] not in ("embed_tokens", "rope"))
    assert found.step_bytes(1)[0] == pytest.approx(others + experts / 8)
    assert found.step_bytes(4096)[0] == pytest.approx(others + experts)
    assert found.step_bytes(4096)[1] == found.cache


def test_what_the_gpu_decides():
    v3 = preset("v3")
    assert [plan.settle(v3, g).options.gemm_impl for g in (H200, plan.GPUS["b200"])] == ["fp8", "bf16"]
    assert plan.settle(v3, H200, dtype="float32").options.gemm_impl == "bf16"
    with_kernels, without = (plan.make(plan.settle(v3, g, 32768, 1), "model=8") for g in (H200, plan.GPUS["b200"]))
    scores = 16 * 8192 * 32768 * 4
    assert without.working > 2 * scores > with_kernels.working


def test_gpus_are_read():
    assert plan.parse_gpu("H200") == H200
    assert plan.parse_gpu("a100:80") == plan.GPU("a100", 80)
    assert plan.parse_gpu("H20-SXM:96:4.0") == plan.GPU("H20-SXM", 96, 4.0, hopper=True)
    assert plan.parse_gpu("MI 300x:192:5.3") == plan.GPU("MI 300x", 192, 5.3)


@pytest.mark.parametrize("text", ["", "a100", "a100:", "a100:0", "a100:-80", "a100:80:0", "a100:80:2:1", ":80", "a100:8e1", "a100:²"])
def test_other_gpus_are_refused(text):
    with pytest.raises(ValueError, match="must be h100, h200, b200, or NAME:GB"):
        plan.parse_gpu(text)


def test_limits_are_checked():
    with pytest.raises(ValueError, match="max_seq_len = 163841: must be an integer from 2 to 163840"):
        plan.settle(preset("v3"), H200, 163841)
    with pytest.raises(ValueError, match="max_batch_size = 0"):
        plan.settle(preset("v3"), H200, max_batch_size=0)
    with pytest.raises(ValueError, match="the checkpoint's weights are not FP8"):
        plan.settle(preset("v2"), H200, gemm_impl="fp8")


def script(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}  # whoever asks for a device gets an error
    return subprocess.run([sys.executable, "scripts/plan.py", *arguments], env=environment, capture_output=True, text=True)


def test_the_script_touches_no_device(tmp_path):
    done = script("--config=configs/deepseek_v3_671b.json", f"--json={tmp_path}/plan.json", "--mesh=model=4")
    assert (done.returncode, done.stderr) == (1, "")  # model=4 does not fit
    assert "Smallest that fits: 8 x h200 with --mesh=model=8\n" in done.stdout and "70,272 bytes a token" in done.stdout
    report = json.loads((tmp_path / "plan.json").read_text())
    assert report["asked"]["fits"] is False and report["searched"][-1]["mesh"] == "model=8"
    decode = report["searched"][-1]["decode"][0]
    assert decode["seconds"] == pytest.approx(decode["weight_bytes"] / 4.8e12)


def test_a_mesh_of_more_gpus_than_there_are():
    done = script("--config=configs/tiny.json", "--gpus=4", "--mesh=data=2,model=4")
    assert done.returncode == 2
    assert done.stderr == "error: mesh = 'data=2,model=4': needs 8 GPUs, and --gpus is 4; use a smaller mesh or more GPUs\n"
