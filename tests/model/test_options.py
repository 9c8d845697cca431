"""Which choices are refused before any weight is read."""

from __future__ import annotations

import dataclasses

import pytest

from dsv3_jax.config import ModelConfig
from dsv3_jax.kernels import dispatch
from dsv3_jax.model.options import Options

V3 = ModelConfig.from_json("configs/deepseek_v3_671b.json")
PLAIN = dataclasses.replace(V3, quantization_config=None)


@pytest.mark.parametrize(
    ("options", "capability", "message"),
    [
        ({}, None, "mla_decode needs a GPU of compute capability 8.9 or newer, and no GPU is here"),
        ({}, 80, "mla_decode needs a GPU of compute capability 8.9 or newer, and the GPU has 8.0"),
        ({}, 89, r"mla_decode needs compute capability 9.0 \(Hopper\), and the GPU has 8.9; use 'xla' or None"),
        ({}, 100, r"mla_decode needs compute capability 9.0 \(Hopper\), and the GPU has 10.0"),
        ({"attn_impl": "naive"}, 90, "attend has no Triton kernel yet; use 'xla' or None"),
        ({"dtype": "float32"}, 90, "attention needs dtype 'bfloat16', not 'float32'; use 'xla' or None"),
        ({}, 90, None),
        ({"gemm_impl": "fp8"}, 90, None),
    ],
)
def test_naming_triton(options, capability, message):
    """Refused where one of the kernels that the model would run cannot."""
    options = Options(implementation="triton", **options)
    with dispatch.compile_only(capability):
        if message is None:
            return options.check(V3)
        with pytest.raises(ValueError, match=f"implementation = 'triton': {message}"):
            options.check(V3)


def test_every_kernel_of_the_options_is_asked_about(monkeypatch):
    asked = []
    monkeypatch.setattr(dispatch, "resolve", lambda op, implementation: asked.append(op))
    Options(implementation="triton", gemm_impl="fp8").check(V3)
    # absorb dequantises kv_b_proj when it is loaded
    fp8 = {
        "mla_decode",
        "mla_prefill",
        "rms_norm",
        "route",
        "grouped_gemm",
        "sort_by_expert",
        "act_quant",
        "swiglu_quant",
        "fp8_gemm",
        "weight_dequant",
    }
    assert set(asked) == fp8 <= dispatch.TRITON_OPS
    asked.clear()
    Options(implementation="triton").check(PLAIN)
    assert set(asked) == {"mla_decode", "mla_prefill", "rms_norm", "route", "grouped_gemm", "sort_by_expert"}


def test_nothing_is_asked_where_xla_may_run(monkeypatch):
    monkeypatch.setattr(dispatch, "resolve", lambda *a: pytest.fail("asked"))
    for implementation in (None, "xla"):
        Options(implementation=implementation).check(V3)
