"""Which implementation runs where: no GPU, one without FP8 tensor cores, and those that the kernels are for."""

from __future__ import annotations

import logging
import types

import jax.numpy as jnp
import pytest

from dsv3_jax import Engine
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.kernels import dispatch, norm, quantize
from dsv3_jax.kernels.fp8_gemm import fp8_gemm
from dsv3_jax.kernels.grouped_gemm import grouped_gemm
from dsv3_jax.kernels.moe_sort import sort_by_expert
from dsv3_jax.model.options import Options

OPS = sorted(dispatch.TRITON_OPS)
XLA, TRITON = dict.fromkeys(OPS, "xla"), dict.fromkeys(OPS, "triton")


@pytest.fixture
def device(monkeypatch):
    """device(capability): from now on dispatch sees one GPU of that compute capability, or none for None. All ops are preferred."""

    def forget():
        dispatch._capability_here.cache_clear()
        dispatch._say_once.cache_clear()

    def pretend(capability: str | None):
        gpu = types.SimpleNamespace(compute_capability=capability)
        backend = "cpu" if capability is None else "gpu"
        monkeypatch.setattr(dispatch, "jax", types.SimpleNamespace(default_backend=lambda: backend, local_devices=lambda: [gpu]))
        forget()

    yield pretend
    forget()


@pytest.mark.parametrize(
    ("capability", "best"),
    [(None, XLA), ("7.0", XLA), ("8.0", XLA), ("8.6", XLA), ("8.9", XLA), ("9.0", TRITON), ("10.0", XLA), ("12.0", XLA)],
)
def test_the_best_that_the_device_can_run(device, capability, best):
    device(capability)
    assert {op: dispatch.resolve(op, None) for op in OPS} == best
    assert {op: dispatch.resolve(op, "xla") for op in OPS} == XLA
    assert dispatch.compute_capability() == (None if capability is None else int(10 * float(capability)))


def test_an_op_that_is_not_preferred_runs_only_when_named(device, monkeypatch):
    device("9.0")
    monkeypatch.setattr(dispatch, "PREFERRED", frozenset({"fp8_gemm"}))
    assert [dispatch.resolve(op, None) for op in ("fp8_gemm", "act_quant", "attend")] == ["triton", "xla", "xla"]
    assert dispatch.resolve("act_quant", "triton") == "triton"


@pytest.mark.parametrize("op", OPS)
def test_a_named_kernel_says_what_it_needs_and_what_is_here(device, op):
    device("8.0")
    with pytest.raises(ValueError, match=rf"'triton': {op} needs .* compute capability 8\.9 or newer, and the GPU has 8\.0; use 'xla'"):
        dispatch.resolve(op, "triton")
    device(None)
    with pytest.raises(ValueError, match=rf"'triton': {op} needs .* 8\.9 or newer, and no GPU is here; use 'xla'"):
        dispatch.resolve(op, "triton")


@pytest.mark.parametrize("capability", ["8.9", "10.0"])
@pytest.mark.parametrize("op", OPS)
def test_a_kernel_for_hopper_runs_on_nothing_else(device, op, capability):
    device(capability)
    if op not in dispatch.HOPPER_OPS:
        assert dispatch.resolve(op, "triton") == "triton"
        return
    found = capability.replace(".", r"\.")
    with pytest.raises(ValueError, match=rf"'triton': {op} needs compute capability 9\.0 \(Hopper\), and the GPU has {found}; use 'xla'"):
        dispatch.resolve(op, "triton")


def test_names_that_do_not_exist(device):
    device("9.0")
    with pytest.raises(ValueError, match="implementation = 'cuda': must be None, 'xla' or 'triton'"):
        dispatch.resolve("fp8_gemm", "cuda")
    with pytest.raises(ValueError, match="'triton': attend has no Triton kernel yet; use 'xla' or None"):
        dispatch.resolve("attend", "triton")


CODES, SCALE = jnp.zeros((128, 128), quantize.FP8), jnp.ones((1, 1))
SIZES, IDS = jnp.array([2]), jnp.zeros((2, 1), jnp.int32)
CALLS = {
    "act_quant": lambda how: quantize.act_quant(jnp.ones((2, 128)), implementation=how),
    "rms_norm": lambda how: norm.add_rms_norm(jnp.ones((2, 128)), None, jnp.ones(128), 1e-6, implementation=how),
    "rms_norm_quant": lambda how: quantize.rms_norm_quant(jnp.ones((2, 128)), jnp.ones(128), 1e-6, implementation=how),
    "swiglu_quant": lambda how: quantize.swiglu_quant(jnp.ones((2, 2, 128)), implementation=how),
    "weight_dequant": lambda how: quantize.weight_dequant(CODES, SCALE, jnp.bfloat16, implementation=how),
    "fp8_gemm": lambda how: fp8_gemm(CODES, jnp.ones((128, 1)), CODES, SCALE, implementation=how),
    "grouped_gemm": lambda how: grouped_gemm(jnp.ones((2, 128)), jnp.ones((1, 1, 128, 128)), SIZES, implementation=how),
    "sort_by_expert": lambda how: sort_by_expert(IDS, jnp.ones(2, bool), 0, 1, implementation=how),
}


@pytest.mark.parametrize("op", CALLS)
def test_ops_on_an_older_gpu(device, op):
    """XLA computes them, named or not; the kernel is refused before anything of it is compiled or launched."""
    device("8.0")
    assert CALLS[op](None) is not None
    with pytest.raises(ValueError, match=rf"{op} needs .* 8\.9 or newer, and the GPU has 8\.0"):
        CALLS[op]("triton")


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_an_older_gpu_is_warned_of_once(device, caplog):
    caplog.set_level(logging.INFO, "dsv3_jax")
    device("8.0")
    for op in OPS * 2:
        dispatch.choose(op, None)
    (said,) = warnings(caplog)
    assert said == "this GPU (compute capability 8.0) has no FP8 tensor cores: XLA computes everything, and FP8 weights are dequantised"
    infos = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert sorted(infos) == [f"{op} runs on xla" for op in OPS], "each op says once what it runs on"


@pytest.mark.parametrize("capability", [None, "8.9", "9.0"])
def test_others_are_not_warned_of(device, caplog, capability):
    device(capability)
    for op in OPS:
        dispatch.choose(op, None)
    assert not warnings(caplog)


def test_compile_only_stands_for_a_device(device):
    device("8.0")
    with dispatch.compile_only(90):
        assert (dispatch.compute_capability(), dispatch.resolve("fp8_gemm", "triton")) == (90, "triton")
    assert dispatch.compute_capability() == 80


class _Loading(Exception):
    """Carries the options with which an engine starts to load its weights."""


@pytest.fixture(scope="module")
def fp8_checkpoint(golden_checkpoint, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("dispatch") / "v3_fp8")
    convert(golden_checkpoint("v3_fp8"), path)
    return path


@pytest.mark.parametrize(
    ("capability", "asked", "gemm_impl"),
    [
        (None, None, "bf16"),
        ("8.0", None, "bf16"),
        ("8.0", "fp8", "fp8"),
        ("8.9", None, "bf16"),
        ("9.0", None, "fp8"),
        ("9.0", "bf16", "bf16"),
    ],
)
def test_the_engine_computes_in_bf16_without_fp8_tensor_cores(device, fp8_checkpoint, monkeypatch, caplog, capability, asked, gemm_impl):
    from dsv3_jax.generation import engine

    def load_model(*arguments):
        raise _Loading(next(a for a in arguments if isinstance(a, Options)))

    monkeypatch.setattr(engine.load, "load_model", load_model)
    device(capability)
    with pytest.raises(_Loading) as caught:
        Engine.from_checkpoint(fp8_checkpoint, gemm_impl=asked, max_seq_len=64, max_batch_size=1)
    assert caught.value.args[0].gemm_impl == gemm_impl
    assert len(warnings(caplog)) == (capability == "8.0" and asked is None)  # nothing asks for kernels before they are to run
