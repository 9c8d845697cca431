"""The router's decisions on vectors worked out by hand, and whole layers on meshes against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.kernels import quantize
from dsv3_jax.model import moe
from dsv3_jax.model.attention import MLA
from dsv3_jax.model.moe import MoE, route
from dsv3_jax.model.options import Options
from dsv3_jax.sharding import make_sharding
from tests import tolerances

V3 = ModelConfig.from_json("configs/deepseek_v3_671b.json")
V2_LITE = ModelConfig.from_json("configs/deepseek_v2_lite_16b.json")


def variant(config: ModelConfig, **changes) -> ModelConfig:
    return ModelConfig(**{**config.__dict__, **changes})


def chosen(logits, bias, config) -> dict[int, float]:
    ids, weights = route(jnp.asarray([logits], jnp.float32), None if bias is None else jnp.asarray(bias, jnp.float32), config)
    return dict(zip(np.asarray(ids)[0].tolist(), np.asarray(weights)[0].tolist(), strict=True))


def test_dropped_groups_lose_to_negative_live_scores():
    """A mask of 0.0 instead of -inf would give experts {4, 5, 6, 7} here."""
    config = variant(V3, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=4, routed_scaling_factor=2.5)
    got = chosen([2, 1, 0, 0, 0.5, -1, -2, -2], [-1.2] * 8, config)
    assert got.keys() == {0, 1, 2, 3}
    np.testing.assert_allclose([got[i] for i in range(4)], [0.843076, 0.699750, 0.478587, 0.478587], atol=1e-6)


def test_softmax_without_normalisation_is_scaled():
    config = variant(V2_LITE, n_routed_experts=4, num_experts_per_tok=2, routed_scaling_factor=16.0)
    got = chosen(np.log([0.4, 0.3, 0.2, 0.1]), None, config)
    assert got.keys() == {0, 1}
    np.testing.assert_allclose([got[0], got[1]], [6.4, 4.8], rtol=1e-6)


def test_the_bias_chooses_and_does_not_weigh():
    config = variant(V3, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, routed_scaling_factor=1.0)
    got = chosen([3, 2, 1, 0], [0, 0, 0, 5], config)
    sigmoid = 1 / (1 + np.exp(-np.array([3.0, 0.0])))
    assert got.keys() == {0, 3}
    np.testing.assert_allclose([got[0], got[3]], sigmoid / sigmoid.sum(), rtol=1e-6)


def test_sigmoids_that_all_underflow_give_finite_weights():
    config = variant(V3, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2)
    assert all(np.isfinite(w) for w in chosen([-200, -200, -200, -200], [0] * 4, config).values())


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("factor", [1.0, 16.0])
def test_normalising_and_scaling_are_independent(norm, factor):
    config = variant(V2_LITE, n_routed_experts=4, num_experts_per_tok=2, norm_topk_prob=norm, routed_scaling_factor=factor)
    got = chosen(np.log([0.4, 0.3, 0.2, 0.1]), None, config)
    total = 0.7 if norm else 1.0
    np.testing.assert_allclose([got[0], got[1]], [0.4 * factor / total, 0.3 * factor / total], rtol=1e-6)


def test_groups_without_a_bias_rank_by_their_best_expert():
    """Group {0, 1} has the larger sum of two, group {2, 3} the larger maximum."""
    config = variant(V2_LITE, topk_method="group_limited_greedy", n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=1)
    assert chosen([1.0, 0.9, 1.5, -3.0], None, config).keys() == {2}
    with_bias = variant(V3, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=1)
    assert chosen([1.0, 0.9, 1.5, -3.0], [0.0] * 4, with_bias).keys() == {0}


def moe_layer(config: ModelConfig, options: Options, mesh: str, seed: int, expert_axes: str = "model"):
    """A MoE layer with random weights on a mesh, and the same weights as float64 arrays by path."""
    sharding = make_sharding(mesh, expert_axes)
    graph, abstract = nnx.get_abstract_model(lambda: MoE(config, options, sharding), sharding.mesh)
    rng = np.random.default_rng(seed)

    def draw(leaf):
        values = rng.normal(size=leaf.shape) / np.sqrt(leaf.shape[-1])
        return jax.device_put(jnp.asarray(values, leaf.dtype), leaf.sharding)

    state = jax.tree.map(draw, abstract)
    flat = {".".join(key.key for key in path[:-1]): np.asarray(v, np.float64) for path, v in jax.tree_util.tree_leaves_with_path(state)}
    with jax.set_mesh(sharding.mesh):
        return sharding, nnx.merge(graph, state), flat


def run(sharding, layer, *arrays):
    """The layer's output and routing, for arrays whose first dim is the batch."""
    with jax.set_mesh(sharding.mesh):
        put = [jax.device_put(a, sharding.named("batch", *(None,) * (a.ndim - 1))) for a in arrays]
        y, (ids, weights) = jax.jit(lambda m, *a: m(*a))(layer, *put)
    return np.asarray(y), np.asarray(ids), np.asarray(weights)


def set_gate(sharding, layer, weight=None, bias=None):
    with jax.set_mesh(sharding.mesh):
        if weight is not None:
            layer.gate.weight[...] = jax.device_put(jnp.asarray(weight, layer.gate.weight.dtype), sharding.named(None, None))
        layer.gate.e_score_correction_bias[...] = jax.device_put(jnp.asarray(bias, jnp.float32), sharding.named(None))


def silu(x):
    return x / (1 + np.exp(-x))


def moe64(x, w, ids, weights):
    """Every token through its experts one by one, and through the shared experts, in float64."""

    def mlp(x, gate_up, down):
        return (silu(x @ gate_up[0].T) * (x @ gate_up[1].T)) @ down.T

    y = mlp(x, w["shared_experts.gate_up_proj.weight"], w["shared_experts.down_proj.weight"])
    for t, (experts, shares) in enumerate(zip(ids, weights, strict=True)):
        for e, share in zip(experts, shares, strict=True):
            y[t] += share * mlp(x[t : t + 1], w["experts.gate_up_proj.weight"][e], w["experts.down_proj.weight"][e])[0]
    return y


FEW = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
SMALL = variant(V3, hidden_size=32, moe_intermediate_size=16, quantization_config=None, **FEW)


@pytest.mark.parametrize(
    ("mesh", "expert_axes"), [("model=1", "model"), ("data=2,model=4", "model"), ("data=2,model=4", "data,model"), ("data=8", "data,model")]
)
@pytest.mark.parametrize("crowded", [False, True])
def test_experts_on_a_mesh_against_float64(mesh, expert_axes, crowded):
    """Crowded: all tokens want the same four experts, far beyond an even share, and none is dropped."""
    sharding, layer, w = moe_layer(SMALL, Options(dtype="float32"), mesh, 0, expert_axes)
    bias = np.zeros(16, np.float32)
    if crowded:
        bias[[4, 5, 6, 7]] = 10
    x = np.random.default_rng(1).normal(size=(8, 9, 32)).astype(np.float32)
    valid = np.arange(9) < np.array([9, 1, 5, 9, 0, 3, 9, 9])[:, None]
    set_gate(sharding, layer, bias=bias)
    y, ids, weights = run(sharding, layer, x, valid)
    if crowded:
        assert (np.sort(ids, axis=-1) == [4, 5, 6, 7]).all()
    want = moe64(x[valid].astype(np.float64), w, ids[valid], weights[valid])
    np.testing.assert_allclose(y[valid], want, atol=2e-5)


@pytest.mark.parametrize(("mesh", "expert_axes"), [("model=1", "model"), ("data=2,model=4", "data,model")])
def test_rows_of_no_expert_may_hold_anything(mesh, expert_axes, monkeypatch):
    """A grouped GEMM leaves the rows of padding and of other devices' experts as they are; NaN in them must reach nobody."""
    grouped_gemm, asked = moe.grouped_gemm, []

    def poisoned(x, w, group_sizes, **settings):
        asked.append((settings["zero_rest"], settings["mean_rows"]))
        y = grouped_gemm(x, w, group_sizes, **settings)
        return jnp.where(jnp.arange(len(y))[:, None] < group_sizes.sum(), y, jnp.nan)

    sharding, layer, w = moe_layer(SMALL, Options(dtype="float32"), mesh, 0, expert_axes)
    x = np.random.default_rng(1).normal(size=(8, 9, 32)).astype(np.float32)
    valid = np.arange(9) < np.array([9, 1, 5, 9, 0, 3, 9, 9])[:, None]
    set_gate(sharding, layer, bias=np.zeros(16))
    clean, *_ = run(sharding, layer, x, valid)
    monkeypatch.setattr(moe, "grouped_gemm", poisoned)
    y, ids, weights = run(sharding, layer, x, valid)
    assert np.isfinite(y).all() and (y == clean).all()
    np.testing.assert_allclose(y[valid], moe64(x[valid].astype(np.float64), w, ids[valid], weights[valid]), atol=2e-5)
    assert asked == [(False, 8 * 9 * 4 // 16)] * 2  # every token's four experts, spread over sixteen


def dequantised64(w, name):
    scale = w.get(f"{name}_scale_inv")
    return w[name] if scale is None else w[name] * scale.repeat(128, -2).repeat(128, -1)[..., : w[name].shape[-2], : w[name].shape[-1]]


@pytest.mark.parametrize(
    ("kind", "mesh", "joins"),
    [
        ("plain", "model=1", True),
        ("plain", "data=2,model=1", True),
        ("plain", "model=2", False),
        ("fp8", "model=1", True),
        ("fp8 with ragged blocks", "model=1", False),
    ],
)
def test_shared_experts_join_the_others(kind, mesh, joins):
    """Two of them; in FP8 each takes its blocks of scales along, unless a block belongs to both."""
    width = {"plain": 16, "fp8": 256, "fp8 with ragged blocks": 192}[kind]
    changes = {} if kind == "plain" else {"quantization_config": V3.quantization_config, "hidden_size": 256}
    config = variant(SMALL, n_shared_experts=2, moe_intermediate_size=width, **changes)
    sharding, layer, w = moe_layer(config, Options(dtype="float32"), mesh, 0)
    set_gate(sharding, layer, bias=np.zeros(16))
    x = np.random.default_rng(1).normal(size=(4, 5, config.hidden_size)).astype(np.float32)
    valid = np.arange(5) < np.array([5, 1, 0, 3])[:, None]
    with jax.set_mesh(sharding.mesh):
        layer.join()
    assert layer.joined == 2 * joins and layer.shared_experts.down_proj.weight.ndim == 2 + joins
    y, ids, weights = run(sharding, layer, x, valid)
    assert ids.shape == (4, 5, 4) and ids.max() < 16  # where tokens are routed, as before
    plain = {name: dequantised64(w, name) for name in w if name.endswith("weight")}
    want = moe64(x[valid].astype(np.float64), plain, ids[valid], weights[valid])
    np.testing.assert_allclose(y[valid], want, atol=2e-5 * max(1, np.abs(want).max()))


@pytest.mark.parametrize("parity", [False, True])
def test_activations_are_quantised_once_for_routed_and_shared_experts(parity, monkeypatch):
    """Except where the reference gives the two different scales."""
    config = variant(ModelConfig.from_json("configs/deepseek_v3.1_671b.json"), hidden_size=256, moe_intermediate_size=128, **FEW)
    sharding, layer, _ = moe_layer(config, Options(gemm_impl="fp8", reference_scale_fmt=parity), "model=1", 0)
    formats, act_quant = [], quantize.act_quant
    set_gate(sharding, layer, bias=np.zeros(16))
    monkeypatch.setattr(quantize, "swiglu_quant", lambda x, fmt, **_: act_quant(x[:, 0], fmt))
    monkeypatch.setattr(quantize, "act_quant", lambda x, fmt, **_: formats.append(fmt) or act_quant(x, fmt))
    run(sharding, layer, jnp.ones((1, 3, 256), jnp.bfloat16), np.ones((1, 3), bool))
    assert formats == (["ue8m0", None] if parity else ["ue8m0"])


def test_quantised_activations_reach_the_experts_of_other_data_rows():
    """Codes and scales are gathered instead of the activations: the same products on every mesh, summed in another order."""
    config = variant(ModelConfig.from_json("configs/deepseek_v3.1_671b.json"), hidden_size=256, moe_intermediate_size=256, **FEW)
    x, outputs = np.random.default_rng(3).normal(size=(4, 3, 256)).astype(np.float32), []
    for mesh in ("model=1", "data=4,model=2"):
        sharding, layer, _ = moe_layer(config, Options(dtype="float32", gemm_impl="fp8"), mesh, 0, "data,model")
        set_gate(sharding, layer, bias=np.zeros(16))
        outputs.append(run(sharding, layer, x, np.ones((4, 3), bool)))
    (one, ids, _), (many, other_ids, _) = outputs
    assert (ids == other_ids).all() and np.abs(one).max() > 0
    assert tolerances.difference(many, one) < 1e-9


def test_the_correction_bias_decides_in_float32():
    """Two experts whose biased scores differ by less than bf16 resolves, in a model that runs in bf16."""
    config = variant(SMALL, n_group=1, topk_group=1, num_experts_per_tok=1)
    sharding, layer, _ = moe_layer(config, Options(dtype="bfloat16"), "model=1", 0)
    bias = np.full(16, -5, np.float32)
    bias[3], bias[11] = 5.0, 5.001  # bf16 has 5.0 and 5.03125
    set_gate(sharding, layer, np.zeros((16, 32)), bias)
    _, ids, _ = run(sharding, layer, jnp.ones((1, 1, 32), jnp.bfloat16), np.ones((1, 1), bool))
    assert ids.ravel().tolist() == [11]


@pytest.mark.parametrize("gate_dtype", ["float32", "bfloat16"])
def test_gate_dtype(gate_dtype):
    """Logits 8.0 and 8.01 differ in float32 and tie in bf16, where the first expert wins."""
    config = variant(SMALL, n_group=1, topk_group=1, num_experts_per_tok=1)
    sharding, layer, _ = moe_layer(config, Options(dtype="float32", gate_dtype=gate_dtype), "model=1", 0)
    gate = np.zeros((16, 32), np.float32)
    gate[2, 0], gate[9, 0] = 8.0, 8.01
    set_gate(sharding, layer, gate, np.zeros(16))
    _, ids, _ = run(sharding, layer, np.ones((1, 1, 32), np.float32), np.ones((1, 1), bool))
    assert ids.ravel().tolist() == [9 if gate_dtype == "float32" else 2]


@pytest.mark.parametrize("parity", [False, True])
def test_which_linears_get_power_of_two_scales(parity):
    """ue8m0 reaches every quantised linear; for parity with the reference, q_a, kv_a and routed experts alone."""
    config = ModelConfig.from_json("configs/deepseek_v3.1_671b.json")
    options = Options(gemm_impl="fp8", reference_scale_fmt=parity)
    assert options.scale_fmt(config, in_reference=True) == "ue8m0"
    assert options.scale_fmt(config, in_reference=False) == (None if parity else "ue8m0")
    sharding = make_sharding("model=1")
    with jax.set_mesh(sharding.mesh):
        attn = nnx.eval_shape(lambda: MLA(config, options, sharding))
        moe = nnx.eval_shape(lambda: MoE(config, options, sharding))
    experts, shared = moe.experts, moe.shared_experts
    assert shared is not None
    always = [attn.q_a_proj, attn.kv_a_proj_with_mqa, experts.gate_up_proj, experts.down_proj]
    rest = [attn.q_b_proj, attn.kv_b_proj, attn.o_proj, shared.gate_up_proj, shared.down_proj]
    assert {linear.scale_fmt for linear in always} == {"ue8m0"}
    assert {linear.scale_fmt for linear in rest} == {None if parity else "ue8m0"}
