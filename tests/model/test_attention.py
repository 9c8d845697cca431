"""What attention may leave out: slots past the context, and a second product where one will do."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.config import ModelConfig, QuantizationConfig
from dsv3_jax.model.attention import MLA
from dsv3_jax.model.cache import init_cache, layer_axes
from dsv3_jax.model.options import Options
from dsv3_jax.sharding import Sharding, make_sharding
from tests import tolerances

V3 = ModelConfig.from_json("configs/deepseek_v3_671b.json")
SMALL = dataclasses.replace(
    V3, hidden_size=48, num_attention_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
    num_hidden_layers=1, first_k_dense_replace=1, quantization_config=None,
)  # fmt: skip


def attention(config: ModelConfig, options: Options, mesh: str = "model=1") -> tuple[Sharding, MLA]:
    """Attention of one layer with random weights, as a checkpoint holds it."""
    sharding, rng = make_sharding(mesh), np.random.default_rng(0)
    graph, abstract = nnx.get_abstract_model(lambda: MLA(config, options, sharding), sharding.mesh)

    def draw(leaf):
        values = rng.normal(size=leaf.shape) / np.sqrt(leaf.shape[-1])
        if leaf.dtype == np.float32 and config.quantization_config:  # scales
            values = np.exp(rng.normal(size=leaf.shape))
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    with jax.set_mesh(sharding.mesh):
        return sharding, nnx.merge(graph, jax.tree.map(draw, abstract))


@pytest.mark.parametrize("attn_impl", ["absorb", "naive"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_bounded_context_reads_no_more_and_changes_nothing(attn_impl, tokens):
    """Two rows with 7 and 3 slots in use, 16 at most afterwards, of 64; those past the bound are NaN, which would spread."""
    options = Options(dtype="float32", attn_impl=attn_impl)
    sharding, layer = attention(SMALL, options)
    rng, start = np.random.default_rng(1), np.array([7, 3])
    x = rng.normal(size=(2, tokens, 48)).astype(np.float32)
    cos, sin = (rng.normal(size=(2, tokens, 4)).astype(np.float32) for _ in "cs")
    positions = (start[:, None] + np.arange(tokens)).astype(np.int32)
    with jax.set_mesh(sharding.mesh):
        if attn_impl == "absorb":
            layer.absorb()
        shapes = [a.shape for a in init_cache(SMALL, options, sharding, 2, 64).layers[0]]
        filled = [rng.normal(size=s).astype(np.float32) for s in shapes]
        poisoned = [np.where(np.arange(64)[:, None, None] < 16, f, np.nan) for f in filled]

        def run(cache, context):
            rows = [jax.device_put(a, sharding.named("batch", *(None,) * (a.ndim - 1))) for a in (x, cos, sin, positions, positions)]
            cache = tuple(jax.device_put(a, sharding.named(*layer_axes(options))) for a in cache)
            y, cache = jax.jit(lambda layer, cache, *rows: layer(*rows, cache, context))(layer, cache, *rows)
            return np.asarray(y), [np.asarray(a) for a in cache]

        whole, kept = run(filled, None)
        bounded, kept_too = run(poisoned, 16)
        if not (attn_impl == "absorb" and tokens == 1):  # whose kernel skips what is past the row's own length by itself
            assert np.isnan(run(poisoned, None)[0]).all(), "the NaNs are where nothing looks: this test cannot fail"
    tolerances.FLOAT32_SELF.check(bounded, whole)
    for a, b in zip(kept, kept_too, strict=True):
        assert a.shape == b.shape and (a[:, :16] == b[:, :16]).all(), "the cache is written as before"


@pytest.mark.parametrize(
    ("kind", "mesh"), [("plain", "model=1"), ("plain", "data=2,model=4"), ("fp8", "model=1"), ("fp8 whose blocks do not align", "model=1")]
)
def test_q_a_and_kv_a_side_by_side(kind, mesh):
    """One product instead of two, against float64; they stay two where a block of scales would cover rows of both."""
    config = dataclasses.replace(SMALL, hidden_size=256, q_lora_rank=96 if "align" in kind else 128, kv_lora_rank=56)
    if kind != "plain":
        config = dataclasses.replace(config, quantization_config=QuantizationConfig())
    options = Options(dtype="float32")
    sharding, layer = attention(config, options, mesh)

    def weight64(linear) -> np.ndarray:
        w = np.asarray(linear.weight[...]).astype(np.float64)
        if kind == "plain":
            return w
        scale = np.asarray(linear.weight_scale_inv[...], np.float64)
        return w * scale.repeat(128, 0)[: len(w)].repeat(128, 1)[:, : w.shape[1]]

    q_a, kv_a = weight64(layer.q_a_proj), weight64(layer.kv_a_proj_with_mqa)
    norm, q_b = np.asarray(layer.q_a_layernorm.weight[...], np.float64), weight64(layer.q_b_proj)
    x = np.random.default_rng(2).normal(size=(2, 3, 256)).astype(np.float32)
    low = x @ q_a.T
    low = low / np.sqrt(np.mean(low**2, axis=-1, keepdims=True) + 1e-6) * norm
    with jax.set_mesh(sharding.mesh):
        layer.join()
        assert hasattr(layer, "qkv_a_proj") != ("align" in kind) and hasattr(layer, "q_a_proj") == ("align" in kind)
        if kind == "fp8":
            codes, scale = layer.qkv_a_proj.arrays()
            assert codes.dtype == ml_dtypes.float8_e4m3fn and scale.dtype == jnp.float32
        put = jax.device_put(x, sharding.named("batch", None, None))
        q, latent = jax.jit(lambda layer, x: layer._projections(x))(layer, put)
    tolerances.within_one_rounding(latent, x @ kv_a.T, 20)
    tolerances.within_one_rounding(q, low @ q_b.T, 18)


@pytest.mark.parametrize("mesh", ["model=1", "data=2,model=2"])
def test_a_query_without_low_rank_joins_where_one_device_has_all_heads(mesh):
    sharding, layer = attention(dataclasses.replace(SMALL, q_lora_rank=None), Options(dtype="float32"), mesh)
    q_proj, kv_a = (np.asarray(w.weight[...], np.float64) for w in (layer.q_proj, layer.kv_a_proj_with_mqa))
    x = np.random.default_rng(2).normal(size=(2, 3, q_proj.shape[1])).astype(np.float32)
    with jax.set_mesh(sharding.mesh):
        layer.join()
        assert hasattr(layer, "qkv_a_proj") == (mesh == "model=1") != hasattr(layer, "q_proj")
        put = jax.device_put(x, sharding.named("batch", None, None))
        q, latent = jax.jit(lambda layer, x: layer._projections(x))(layer, put)
    tolerances.within_one_rounding(latent, x @ kv_a.T, 20)
    tolerances.within_one_rounding(q, x @ q_proj.T, 20)
