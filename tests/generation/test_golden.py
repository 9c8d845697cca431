"""The engine against transformers' own classes and a float64 implementation, family by family (tests/golden/make_golden.py)."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from dsv3_jax import Engine
from tests import tolerances
from tests.golden import load

PLAIN = [f for f in load.FAMILIES if f not in load.FP8 and f not in load.DECISIVE]
QUANTIZED = [f for f in load.FP8 if f not in load.DECISIVE]
# One of each structure; the others differ in numbers alone. ALL_FAMILIES=1 takes them all (it adds some minutes).
SHAPES = PLAIN if os.environ.get("ALL_FAMILIES") else ["v2lite", "v2", "v3", "kimi_k2", "moonlight"]
MESHES = [
    ("data=2,model=4", "model"),
    ("data=4,model=2", "model"),
    ("data=2,model=4", "data,model"),
]


def sequences(want: dict) -> list[tuple[str, int, list[int]]]:
    """(key prefix, row, token ids) of every golden sequence."""
    prefixes = itertools.takewhile(lambda p: p + "input_ids" in want, (f"seq{i}." for i in itertools.count()))
    return [(p, row, ids.tolist()) for p in prefixes for row, ids in enumerate(want[p + "input_ids"])]


def check_logits(engine: Engine, want: dict, tolerance: tolerances.Tolerance, key: str = "logits") -> None:
    """Hold the logits of all sequences that have an answer under `key`, run as one ragged batch, to a tolerance."""
    rows = [row for row in sequences(want) if row[0] + key in want]
    logits = engine.logits([ids for *_, ids in rows])
    got = [each[want[prefix + "positions"]] for (prefix, *_), each in zip(rows, logits, strict=True)]
    tolerance.check(np.concatenate(got), np.concatenate([want[prefix + key][row] for prefix, row, _ in rows]), key)


def check_everything(engine: Engine, family: str) -> None:
    """Logits, the experts of every token in every layer, and 24 greedy tokens of every prompt."""
    want = load.answers(family)
    check_logits(engine, want, tolerances.FLOAT32)

    moe_layers = [i for i in range(engine.config.num_hidden_layers) if engine.config.is_moe_layer(i)]
    rows = sequences(want)
    for (prefix, row, _), (ids, weights) in zip(rows, engine.routing([ids for *_, ids in rows]), strict=True):
        for n, layer in enumerate(moe_layers):
            order, key = np.argsort(ids[n], axis=-1), f"{prefix}router.{layer}."
            np.testing.assert_array_equal(np.take_along_axis(ids[n], order, -1), want[key + "indices"][row])
            got = np.take_along_axis(weights[n], order, -1)[want[prefix + "positions"]]
            tolerances.ROUTER_WEIGHTS.check(got, want[key + "weights"][row], key)

    keys = itertools.takewhile(want.__contains__, (f"greedy{i}.prompt" for i in itertools.count()))
    done = engine.generate([want[k].tolist() for k in keys], max_new_tokens=24, stop_token_ids=())
    assert len(done) >= 2
    for i, completion in enumerate(done):
        assert completion.tokens == want[f"greedy{i}.tokens"].tolist(), f"prompt {i}"


@pytest.mark.parametrize("attn_impl", ["absorb", "naive"])
@pytest.mark.parametrize("family", PLAIN + QUANTIZED)
def test_one_device_in_float32(engine, family, attn_impl):
    check_everything(engine(family, attn_impl=attn_impl), family)


@pytest.mark.parametrize(("mesh", "expert_axes"), MESHES)
@pytest.mark.parametrize("family", SHAPES)
def test_eight_devices_in_float32(engine, family, mesh, expert_axes):
    check_everything(engine(family, mesh=mesh, expert_axes=expert_axes), family)


@pytest.mark.parametrize("family", ["v2lite", "v3"])  # without and with a low-rank query
def test_eight_devices_with_heads_in_the_cache(engine, family):
    check_everything(engine(family, mesh="data=2,model=4", attn_impl="naive"), family)


@pytest.mark.parametrize("mesh", ["model=2", "model=4", "data=2,model=4"])
def test_fp8_whose_blocks_divide_runs_on_any_mesh(engine, mesh):
    check_everything(engine("tiny", mesh=mesh), "tiny")


def test_ragged_fp8_blocks_run_on_data_alone(engine, converted):
    check_everything(engine("v3_fp8", mesh="data=8"), "v3_fp8")
    with pytest.raises(ValueError, match=r"model can be 1:(.|\n)*self_attn.q_b_proj.weight rows: 192 = 1.5 blocks of 128"):
        Engine.from_checkpoint(converted("v3_fp8"), mesh="model=2", max_seq_len=256)


@pytest.mark.parametrize("attn_impl", ["absorb", "naive"])
@pytest.mark.parametrize("family", load.DECISIVE)
def test_bfloat16(engine, family, attn_impl):
    """Routing is decisive in these families, so that rounding moves logits and never an expert."""
    check_logits(engine(family, dtype="bfloat16", attn_impl=attn_impl), load.answers(family), tolerances.BF16_DECISIVE)


@pytest.mark.parametrize("attn_impl", ["absorb", "naive"])
@pytest.mark.parametrize("family", [f for f in load.DECISIVE if f in load.FP8])
def test_fp8_gemm(engine, family, attn_impl):
    """With activations quantised too; an activation on the border between two codes may fall either way, so the bound is wide."""
    fp8 = engine(family, gemm_impl="fp8", attn_impl=attn_impl)
    check_logits(fp8, load.answers(family), tolerances.FP8_ACTIVATIONS_DECISIVE, f"logits_actq_{attn_impl}")


@pytest.mark.parametrize("mesh", ["model=2", "model=4"])
def test_fp8_gemm_is_the_same_on_a_mesh(engine, mesh):
    rows = [ids for *_, ids in sequences(load.answers("tiny_dec"))]
    one, many = engine("tiny_dec", gemm_impl="fp8"), engine("tiny_dec", gemm_impl="fp8", mesh=mesh)
    got, want = np.concatenate(many.logits(rows)), np.concatenate(one.logits(rows))
    tolerances.FP8_ACTIVATIONS_SELF.check(got, want)
