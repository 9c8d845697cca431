"""Runs the route kernel in Triton's interpreter, for test_route.py."""

from __future__ import annotations

import numpy as np

from dsv3_jax.kernels.triton_impl import route as kernels
from tests.kernels import test_route as cases
from tests.kernels.interpreter import Tensor

SPARE = 64  # numbers behind each output that nothing may touch


def run(router: cases.Router, logits: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's outputs, poisoned before it runs; asserts that nothing is written behind them."""
    m, k = len(logits), router.k
    ids, weights = np.full(m * k + SPARE, -7, np.int32), np.full(m * k + SPARE, -7, np.float32)
    arrays = (logits, logits if bias is None else bias)
    constants = kernels.constants(
        router.experts, k, router.groups, router.live, router.scoring, bias is not None, router.normalise, router.factor
    )
    kernels._route[(m,)](*map(Tensor, arrays), k, Tensor(ids), Tensor(weights), **constants)
    assert (ids[m * k :] == -7).all() and (weights[m * k :] == -7).all(), "written out of range"
    return ids[: m * k].reshape(m, k), weights[: m * k].reshape(m, k)


def check_nan(name: str) -> None:
    """Whatever a row holds, its experts are K different ones that exist; its neighbours do not notice."""
    router = cases.ROUTERS[name]
    logits, bias = cases.inputs(router, 8, False)
    want, _ = run(router, logits, bias)
    logits[1], logits[2, 3], logits[3], logits[4, ::2], logits[5] = np.nan, np.nan, -np.inf, np.inf, -np.nan
    logits[6] = np.linspace(-300, -89, router.experts)
    ids, weights = run(router, logits, bias)
    assert (ids >= 0).all() and (ids < router.experts).all() and all(len(set(row)) == router.k for row in ids.tolist())
    np.testing.assert_array_equal(ids[[0, 7]], want[[0, 7]])
    assert np.isnan(weights[1]).all() and np.isfinite(weights[[0, 6, 7]]).all()
    if router.scoring == "sigmoid":
        assert (weights[[3, 6]] < 1e-15).all(), "sigmoids that all underflow"


def check_infinite_biases(name: str) -> None:
    """Where too few experts are left, the others come in the order of their indices, dropped groups' too, as in the reference."""
    router = cases.ROUTERS[name]
    logits, bias = cases.inputs(router, 3, False)
    width, expert = router.experts // router.groups, np.arange(router.experts)
    finite = (expert // width >= router.groups - router.live) & (expert % width >= width - 2)  # so the last groups are the live ones
    bias = np.where(finite, bias, -np.inf).astype(np.float32)
    ids, _ = run(router, logits, bias)
    np.testing.assert_array_equal(ids, router.route(logits, bias)[0])


if __name__ == "__main__":
    np.seterr(all="ignore")
    for name, router in cases.ROUTERS.items():
        for m, ties in [(1, False), (5, True)]:
            logits, bias = cases.inputs(router, m, ties)
            cases.check(run(router, logits, bias), router, logits, bias)
        check_nan(name)
        if router.bias:
            check_infinite_biases(name)
        print("ok", name)
