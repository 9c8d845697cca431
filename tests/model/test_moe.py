"""The router's decisions on vectors worked out by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.config import ModelConfig
from dsv3_jax.model.moe import route

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
