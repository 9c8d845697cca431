"""Meshes: reading them, refusing those that do not divide, and describing the published models without allocating them."""

from __future__ import annotations

import math
import time

import jax
import pytest

from dsv3_jax.checkpoint import load
from dsv3_jax.config import ModelConfig
from dsv3_jax.model.options import Options
from dsv3_jax.sharding import check, make_sharding, parse_mesh


def preset(name: str) -> ModelConfig:
    return ModelConfig.from_json(f"configs/{name}.json")


def test_meshes_are_read():
    assert parse_mesh("data=2,model=4") == {"data": 2, "model": 4}
    assert parse_mesh("model=8") == {"data": 1, "model": 8}
    assert parse_mesh("") == {"data": 1, "model": 1}


@pytest.mark.parametrize("text", ["model", "model=0", "model=-2", "model=x", "model=2,model=2", "expert=2", "model=²"])
def test_malformed_meshes_are_refused(text):
    with pytest.raises(ValueError, match="must look like 'data=2,model=4'"):
        parse_mesh(text)


@pytest.mark.parametrize("model", [1, 2, 4, 8, 16])
def test_deepseek_v3_divides(model):
    check(preset("deepseek_v3_671b"), f"model={model}")


def test_a_split_block_is_named_with_the_sizes_that_work():
    with pytest.raises(ValueError) as e:
        check(preset("deepseek_v3_671b"), "model=32")
    assert "model can be 1, 2, 4, 8, 16:" in str(e.value)
    assert "(intermediate_size): 18432 = 144 blocks of 128 that share a scale, over 32 devices" in str(e.value)
    assert "layers.*.mlp.shared_experts" in str(e.value) and "o_proj" not in str(e.value)


def test_experts_must_divide_over_their_axes():
    check(preset("deepseek_v2_236b"), "data=4,model=8", "data,model")
    with pytest.raises(ValueError, match=r"mlp.experts: 160 experts over data x model = 64 devices"):
        check(preset("deepseek_v2_236b"), "data=8,model=8", "data,model")
    with pytest.raises(ValueError, match="no size of model works"):
        check(preset("deepseek_v2_236b"), "data=3,model=1", "data,model")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseek_v2_lite_16b", 15.7), ("deepseek_v2_236b", 235.7), ("deepseek_v3_671b", 671.0), ("deepseek_v3.1_671b", 671.0)],
)
def test_published_parameter_counts(name, billions):
    """Described in seconds, allocated never; FP8 scales and RoPE tables are no parameters."""
    began, config = time.perf_counter(), preset(name)
    check(config, "model=8")
    _, params = load.abstract_model(config, Options(), make_sharding("model=8"), max_seq_len=64)
    del params["rope"]
    count, per_device = 0, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert isinstance(leaf, jax.ShapeDtypeStruct)
        if path[-1].key != "weight_scale_inv":
            count += math.prod(leaf.shape)
            per_device += math.prod(leaf.sharding.shard_shape(leaf.shape))
    assert round(count / 1e9, 1) == billions
    assert per_device < count / 7  # of eight devices; only the small down-projections are whole everywhere
    assert time.perf_counter() - began < 60
