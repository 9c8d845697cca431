"""The profile's tables against sums by hand, HLO names to parts, and a real trace of named scopes on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from dsv3_jax.benchmark import profile
from dsv3_jax.benchmark.profile import Event

# Two steps of 10 us. Kernel b overlaps a in the second step for 1 us.
EVENTS = [
    Event("a", 0, 2000, "a"), Event("b", 2000, 1000, "b"), Event("nvjet", 4000, 3000, "custom-call.1"),
    Event("a", 10000, 3000, "a"), Event("b", 12000, 2000, "b"), Event("nvjet", 15000, 3000, "custom-call.1"), Event("strange", 19000, 500),
]  # fmt: skip
HLO = """HloModule jit_decode, is_scheduled=true

%fused_computation.2 (param_0.1: bf16[8]) -> bf16[8] {
  %param_0.1 = bf16[8]{0} parameter(0)
  %multiply.1 = bf16[8]{0} multiply(%param_0.1, %param_0.1), metadata={op_name="jit(decode)/norms/mul" stack_frame_id=2}
  %add.1 = bf16[8]{0} add(%multiply.1, %param_0.1), metadata={op_name="jit(decode)/norms/add"}
  ROOT %add.2 = bf16[8]{0} add(%add.1, %param_0.1), metadata={op_name="jit(decode)/attention/add"}
}

%gemm_fusion (param_0.2: bf16[8,8]) -> bf16[8,8] {
  %param_0.2 = bf16[8,8]{1,0} parameter(0)
  %dot.1 = bf16[8,8]{1,0} dot(%param_0.2, %param_0.2), lhs_contracting_dims={1}, metadata={op_name="jit(decode)/head/dot_general"}
  ROOT %exp.1 = bf16[8,8]{1,0} exponential(%dot.1), metadata={op_name="jit(decode)/sampling/exp"}
}

ENTRY %main.7 (p.0: bf16[8], /*index=1*/p.1: bf16[8]) -> bf16[8] {
  %p.0 = bf16[8]{0} parameter(0)
  %loop_fusion.3 = bf16[8]{0} fusion(%p.0), kind=kLoop, calls=%fused_computation.2
  %gemm_fusion_dot.5 = bf16[8,8]{1,0} fusion(%p.2), kind=kCustom, calls=%gemm_fusion, metadata={op_name="jit(decode)/sampling/exp"}
  %custom-call.1 = bf16[8]{0} custom-call(%loop_fusion.3), metadata={op_name="jit(decode)/mlp/attention/shard_map/pjit" stack_frame_id=3}
  %copy.1 = bf16[8]{0} copy(%custom-call.1), metadata={op_name="jit(decode)/attentions/copy"}
  ROOT %add.9 = bf16[8]{0} add(%custom-call.1, %p.0), metadata={op_name="jit(decode)/experts/add"}
}
"""


def test_kernels_are_summed():
    rows = profile.by_kernel(EVENTS, 2)
    assert [r["kernel"] for r in rows] == ["nvjet", "a", "b", "strange"]
    assert [r["us_per_step"] for r in rows] == [3.0, 2.5, 1.5, 0.25]
    assert [r["per_step"] for r in rows] == [1, 1, 1, 0.5]
    assert rows[0]["share"] == pytest.approx(6000 / 14500) and sum(r["share"] for r in rows) == pytest.approx(1)


def test_parts_are_summed_and_gaps_are_what_is_left():
    parts = {"a": "norms", "b": "norms", "custom-call.1": "experts"}
    rows = profile.by_part(EVENTS, profile.Namer(parts), 2, step_us=10.0)
    assert [(r["part"], r["kernels_per_step"], r["us_per_step"]) for r in rows] == [
        ("norms", 2, 4.0), ("experts", 1, 3.0), ("other", 0.5, 0.25), ("gaps", 0, 3.25),  # busy: 6 us, then 7.5 us
    ]  # fmt: skip
    assert [r["share"] for r in rows] == pytest.approx([0.4, 0.3, 0.025, 0.325])


def test_busy_time_counts_what_overlaps_once():
    assert profile.busy_ns(EVENTS) == 6000 + 4000 + 3000 + 500
    assert profile.busy_ns([Event("outer", 0, 100), Event("inner", 10, 20), Event("tail", 90, 20)]) == 110
    assert profile.busy_ns([]) == 0


def test_parts_come_from_the_innermost_scope_and_from_inside_fusions():
    parts = profile.parts_of_hlo(HLO)
    assert parts["custom-call.1"] == "attention" and parts["add.9"] == "experts" and "copy.1" not in parts and "p.0" not in parts
    assert parts["loop_fusion.3"] == "norms"  # no metadata of its own: two of three inside
    assert parts["gemm_fusion_dot.5"] == "head"  # where the product is, not where its last operation is


def test_events_find_their_part():
    namer = profile.Namer(profile.parts_of_hlo(HLO))
    cases = {
        Event("loop_fusion_3", 0, 1): "norms",  # a kernel is named after its fusion
        Event("nvjet_tst_64x8", 0, 1, "custom-call.1"): "attention",
        Event("nvjet_tst_64x8", 0, 1): "other",
        Event("nvjet_tst_64x8", 0, 1, "command_buffer.2"): "other",
        Event("_grouped", 0, 1, "command_buffer.2"): "experts",
        Event("_add_rms_norm", 0, 1, "command_buffer.2"): "norms",
        Event("_decode", 0, 1): "attention",
        Event("_route", 0, 1): "router",
    }
    for event, part in cases.items():
        assert namer(event) == part, event


def _plane(name, **lines):
    def event(name, start, duration, **stats):
        return SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=stats.items())

    content = [SimpleNamespace(name=line.replace("_", " "), events=[event(*e[:3], **e[3]) for e in es]) for line, es in lines.items()]
    return SimpleNamespace(name=name, lines=content)


def test_only_the_first_gpus_streams_count():
    kernel = ("k", 5, 7, {"hlo_op": "fusion.1", "hlo_module": "jit_decode"})
    planes = [
        _plane("/host:CPU", python=[("k", 0, 1, {"hlo_op": "x"})]),
        _plane("/device:GPU:1", Stream_13=[kernel, kernel]),
        _plane("/device:GPU:0", XLA_Ops=[("fusion.1", 5, 7, {})], Stream_13=[kernel], Stream_14=[("MemcpyD2H", 1, 2, {})]),
    ]
    assert profile.device_events(SimpleNamespace(planes=planes)) == [Event("MemcpyD2H", 1, 2), Event("k", 5, 7, "fusion.1")]


def test_a_real_trace(tmp_path):
    """On the CPU: two scopes of products, the second of them eight times the work, called three times."""

    @jax.jit
    def step(x, y):
        with jax.named_scope("attention"):
            x = x @ x
        with jax.named_scope("experts"):
            return jnp.tanh(x).sum() + (y @ y).sum()

    x, y = jnp.ones((256, 256)), jnp.ones((1024, 1024))
    program = step.lower(x, y).compile()
    program(x, y).block_until_ready()
    events = profile.record(str(tmp_path), lambda: [program(x, y) for _ in range(3)])
    rows = {r["part"]: r for r in profile.by_part(events, profile.Namer(profile.parts_of_hlo(program.as_text())), 3, 1e6)}
    assert rows["experts"]["us_per_step"] > rows["attention"]["us_per_step"] > 0
    assert rows["experts"]["us_per_step"] > 0.8 * sum(r["us_per_step"] for p, r in rows.items() if p != "gaps" and p != "attention")
    text = profile.show(profile.by_kernel(events, 3), list(rows.values()), most=1)
    assert "experts" in text and " more " in text
