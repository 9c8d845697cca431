"""A whole step lowered for a Hopper GPU that need not be here: which kernels are in it, and how often."""

from __future__ import annotations

import collections
import dataclasses
import re
import zlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.export import DisabledSafetyCheck

from dsv3_jax.checkpoint import load
from dsv3_jax.config import ModelConfig
from dsv3_jax.kernels import dispatch
from dsv3_jax.model.cache import init_cache
from dsv3_jax.model.options import Options
from dsv3_jax.model.transformer import Transformer
from dsv3_jax.sharding import make_sharding
from tests.kernels import ptx

# DeepSeek-V3's widths per head, few of everything else; one dense layer and one with experts.
FEW = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_hidden_layers": 2}
SMALL = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512, "num_attention_heads": 4, "q_lora_rank": 256}
CONFIG = dataclasses.replace(ModelConfig.from_json("configs/deepseek_v3_671b.json"), vocab_size=512, **FEW, **SMALL)
ROWS, SLOTS = 4, 256


def kernels_of(f, *arguments) -> collections.Counter[str]:
    """The Triton kernels, by name, in f lowered for compute capability 9.0."""
    checks = [DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
    with dispatch.compile_only(90):
        text = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=checks)(*arguments).mlir_module()
    calls = re.findall(r'@triton_kernel_call_ffi\(.*?opaque = "([^"]*)"', text)
    assert len(calls) == text.count("@triton_kernel_call_ffi")
    found = collections.Counter()
    for call in calls:  # each is a compressed message that holds the kernel's PTX
        unescaped = re.sub(rb"\\([0-9A-F]{2}|\\)", lambda m: b"\\" if m[1] == b"\\" else bytes.fromhex(m[1].decode()), call.encode())
        found.update(name.decode() for name in re.findall(rb"\.entry (\w+)", zlib.decompress(unescaped)))
    return found


def step(options: Options, tokens: int, context: int | None) -> collections.Counter[str]:
    ptx.need_triton()
    sharding = make_sharding("model=1")
    config = CONFIG if options.gemm_impl == "fp8" else dataclasses.replace(CONFIG, quantization_config=None)
    with jax.set_mesh(sharding.mesh):
        graph, state = nnx.split(Transformer(config, options, sharding, SLOTS))
        cache = init_cache(config, options, sharding, ROWS, SLOTS)
    graph, params = load.prepare(graph, load.plain(state), options, sharding)

    def run(params, cache, tokens, new):
        model = nnx.merge(graph, params)
        hidden, cache, _ = model(tokens, new, cache, context)
        return model.lm_head(hidden), cache

    with jax.set_mesh(sharding.mesh):
        shape = jax.ShapeDtypeStruct((ROWS, tokens), jnp.int32, sharding=sharding.named("batch", None))
        new = jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=sharding.named("batch"))
        return kernels_of(run, params, cache, shape, new)


# Each layer: qkv_a, q_b and o; the dense MLP: gate_up and down. The shared expert is one of the grouped ones.
FP8_GEMMS = 2 * 3 + 2
# Quantised for qkv_a, q_b, o and the MLP, once for all experts, and after each SwiGLU.
QUANTISERS = {"_act_quant": 2 * (3 + 1), "_swiglu_quant": 2}
NORMS = {"_add_rms_norm": 2 * 2 + 1}
EXPERTS = {"_route": 1, "_sort": 1, "_grouped": 2}


def test_decode_in_fp8():
    attention = {"_plan": 2, "_decode": 2, "_combine": 2}
    assert step(Options(gemm_impl="fp8"), 1, None) == {"_streamed": FP8_GEMMS, **attention, **QUANTISERS, **EXPERTS, **NORMS}


def test_prefill_in_fp8():
    assert step(Options(gemm_impl="fp8"), 128, 128) == {"_gemm": FP8_GEMMS, "_prefill": 2, **QUANTISERS, **EXPERTS, **NORMS}


@pytest.mark.parametrize(("tokens", "attention"), [(1, {"_plan": 2, "_decode": 2, "_combine": 2}), (32, {"_prefill": 2})])
def test_steps_in_bf16(tokens, attention):
    assert step(Options(), tokens, None) == {**attention, **EXPERTS, **NORMS}


def test_prefill_with_heads_in_the_cache():
    assert step(Options(attn_impl="naive"), 32, 128) == {"_prefill": 2, **EXPERTS, **NORMS}


def test_float32_runs_on_xla():
    """Products take bf16 and FP8; norms, routing, float32 in any model, and the sorting of integers are the same for all."""
    wanted = {"_route": 1, "_sort": 1, **NORMS}
    assert step(Options(dtype="float32"), 1, None) == step(Options(dtype="float32"), 32, None) == wanted
