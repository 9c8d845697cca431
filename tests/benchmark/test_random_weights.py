"""Random weights: the described tree, the promised spread, the same numbers on every mesh, and routing that does not collapse."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import ml_dtypes
import numpy as np
import pytest

from dsv3_jax import ModelConfig, sharding
from dsv3_jax.benchmark import random_weights
from dsv3_jax.checkpoint import load
from dsv3_jax.model.options import Options
from tests.test_project import ROOT

TINY = ModelConfig.from_json(ROOT / "configs/tiny.json")
PLAIN = dataclasses.replace(TINY, quantization_config=None)
# Enough experts to tell routing that is spread from routing that is not; 8 groups of 8, of which 4 are live, 6 experts a token.
MANY = dataclasses.replace(TINY, n_routed_experts=64, n_group=8, topk_group=4, num_experts_per_tok=6)


@functools.cache
def made(config: ModelConfig, mesh: str, expert_axes: str = "model"):
    """(what abstract_model describes, what random_params makes)."""
    on = sharding.make_sharding(mesh, expert_axes)
    _, abstract = load.abstract_model(config, Options(), on, 64)
    return abstract, random_weights.random_params(abstract, config, on, 64, seed=3)


def flat(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("expert_axes", ["model", "data,model"])
@pytest.mark.parametrize("config", [TINY, PLAIN], ids=["fp8", "bf16"])
def test_parameters_are_what_is_described_on_every_mesh(config, expert_axes):
    (abstract, params), (_, alone) = made(config, "data=2,model=4", expert_axes), made(config, "data=1,model=1")
    described, got, single = flat(abstract), flat(params), flat(alone)
    assert described.keys() == got.keys() == single.keys()
    for name, leaf in described.items():
        assert (got[name].shape, got[name].dtype) == (leaf.shape, leaf.dtype), name
        assert got[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name
        assert {s.data.shape for s in got[name].addressable_shards} == {leaf.sharding.shard_shape(leaf.shape)}, name
        np.testing.assert_array_equal(np.asarray(got[name]).view(np.uint8), np.asarray(single[name]).view(np.uint8), err_msg=name)


def test_no_two_tensors_and_no_two_experts_are_equal():
    weights = [np.asarray(w).view(np.uint8) for name, w in flat(made(TINY, "data=1,model=1")[1]).items() if name.endswith("['weight']")]
    parts = [p for w in weights if w.ndim >= 2 for p in (w if w.ndim >= 3 and len(w) == TINY.n_routed_experts else [w])]
    assert len({p.tobytes() for p in parts}) == len(parts) > 30


def test_spread():
    """The dequantised weight of every linear has a standard deviation of 1/sqrt(K) and a mean of zero; all codes are finite."""
    for config in (TINY, PLAIN):
        params = flat(made(config, "data=1,model=1")[1])
        codes = 0
        for name, leaf in params.items():
            if not name.endswith("['weight']") or "norm" in name:
                continue
            w = np.asarray(leaf).astype(np.float64)
            assert np.isfinite(w).all(), name
            if leaf.dtype == ml_dtypes.float8_e4m3fn:
                codes += 1
                scale = np.asarray(params[name.replace("['weight']", "['weight_scale_inv']")]).astype(np.float64)
                w *= scale.repeat(128, -2).repeat(128, -1)[..., : w.shape[-2], : w.shape[-1]]
            want = 1.0 if "embed_tokens" in name else 1 / math.sqrt(w.shape[-1])
            # A code's fourth moment is 11 times its squared second: the deviation of w.size of them errs by 1.6 / sqrt(w.size).
            assert w.std() == pytest.approx(want, rel=8 / math.sqrt(w.size)), name
            assert abs(w.mean()) < 5 * want / math.sqrt(w.size), name
        assert codes == (3 * 5 + 2 + 2 * 4 if config is TINY else 0)  # attention, dense layer, shared and routed experts


def test_norms_are_ones_and_the_bias_is_small():
    params = flat(made(TINY, "data=1,model=1")[1])
    norms = [np.asarray(a).astype(np.float32) for name, a in params.items() if "norm" in name]
    assert len(norms) == 3 * 4 + 1 and all((n == 1).all() for n in norms)
    biases = np.stack([np.asarray(a) for name, a in params.items() if "e_score_correction_bias" in name])
    assert 0 < np.abs(biases).max() < 0.05


def test_the_two_codes_that_are_not_numbers_become_zero():
    bits = np.arange(256, dtype=np.uint8)
    got = np.asarray(random_weights.finite_codes(bits)).astype(np.float64)
    want = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert np.isnan(want).sum() == 2
    np.testing.assert_array_equal(got, np.where(np.isnan(want), 0, want))
    assert random_weights.code_rms() == pytest.approx(np.sqrt((got**2).mean()))


@pytest.mark.parametrize(
    "config",
    [MANY, dataclasses.replace(MANY, scoring_func="softmax", topk_method="greedy", quantization_config=None)],
    ids=["v3", "v2lite"],
)
def test_routing_is_spread(config):
    """Every expert gets its share of 512 random tokens, and outputs are finite."""
    engine = random_weights.random_engine(config, max_seq_len=64, max_batch_size=16, num_hidden_layers=2)
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (16, 32)).tolist()
    assert all(np.isfinite(logits).all() and logits.std() > 0.5 for logits in engine.logits(prompts[:1]))
    ids = np.concatenate([ids for ids, _ in engine.routing(prompts)], axis=1)  # (1 layer, tokens, K)
    even, load_of = 512 * 6 / 64, np.bincount(ids.ravel(), minlength=64)
    assert len(load_of) == 64 and load_of.min() > even / 6 and load_of.max() < 3 * even, load_of


def test_layers_are_cut():
    assert random_weights.truncated(TINY, None) is TINY
    two = random_weights.truncated(TINY, 2)
    assert (two.num_hidden_layers, two.first_k_dense_replace) == (2, 1)
    three_dense = dataclasses.replace(TINY, first_k_dense_replace=3)
    assert random_weights.truncated(three_dense, 2).first_k_dense_replace == 2
    assert list(made(two, "data=1,model=1")[0]["layers"]) == ["0", "1"]
    with pytest.raises(ValueError, match="num_hidden_layers = 4: must be an integer from 1 to 3"):
        random_weights.truncated(TINY, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": "model=3"}, "does not divide this model; model can be 1, 2, 4"),
        ({"max_seq_len": 300}, "max_seq_len = 300: must be an integer from 2 to 256"),
        ({"dtype": "float16"}, "dtype = 'float16'"),
        ({"implementation": "triton"}, "implementation = 'triton'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_made(arguments, message, monkeypatch):
    monkeypatch.setattr(random_weights, "random_params", lambda *a: pytest.fail("made"))
    with pytest.raises(ValueError, match=message):
        random_weights.random_engine(TINY, **arguments)
