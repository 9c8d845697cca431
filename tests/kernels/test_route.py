"""route: the XLA reference against float64 NumPy, and what can be known of the GPU kernel without a GPU."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.kernels import dispatch
from dsv3_jax.kernels.route import route, tile_of
from tests.kernels import ptx


@dataclasses.dataclass(frozen=True)
class Router:
    """groups is 1 where they do not limit the choice."""

    experts: int
    k: int
    groups: int = 1
    live: int = 1
    scoring: str = "sigmoid"
    bias: bool = True
    normalise: bool = True
    factor: float = 2.5

    def route(self, logits, bias, **how):
        method = "noaux_tc" if self.bias else "greedy" if self.groups == 1 else "group_limited_greedy"
        kwargs = {"scoring_func": self.scoring, "topk_method": method, "norm_topk_prob": self.normalise, **how}
        common = {"num_experts_per_tok": self.k, "n_group": self.groups, "topk_group": self.live}
        return route(logits, bias, **common, routed_scaling_factor=self.factor, **kwargs)


SOFTMAX = {"scoring": "softmax", "bias": False, "normalise": False}
ROUTERS = {
    "v3": Router(256, 8, 8, 4),
    "v2": Router(160, 6, 8, 3, factor=16.0, **SOFTMAX),
    "v2lite": Router(64, 6, factor=1.0, **SOFTMAX),
    "kimi_k2": Router(384, 8, factor=2.827),
    "tiny": Router(8, 2, 4, 2),
    # What no published model has, and the kernel's tile must get right: odd counts, wide groups, one expert, all of the experts.
    "odd": Router(45, 3, 3, 2),
    "wide_groups": Router(120, 5, 2, 1),
    "all": Router(12, 6, 2, 1, **SOFTMAX | {"normalise": True}),
    "one": Router(7, 1, scoring="softmax"),
}


def inputs(router: Router, m: int, ties: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Logits and biases: with many exact ties of experts and groups, or with none.

    What is no tie is far from one in float32: logits lie on a coarse grid, which is off centre, as sigmoids of x and -x add up to 1
    whatever x is; for the same reason the members of a group share one of two biases where there are to be ties.
    """
    rng = np.random.default_rng(1000 * m + router.experts)
    logits = np.clip(np.round(rng.normal(0, 1.5, (m, router.experts)) * 32) / 32, -6, 6) + 0.0101
    bias = rng.normal(0, 0.1, router.experts)
    if ties:
        each = router.experts // router.groups if router.groups > 1 else 1
        bias = np.repeat(rng.choice([-0.1, 0.05], router.experts // each), each)
        logits[-1] = logits[-1, 0]
    return logits.astype(np.float32), bias.astype(np.float32) if router.bias else None


def route64(router: Router, logits: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """One expert after the other, by the definition, in float64."""
    all_ids, all_weights = [], []
    for x in logits.astype(np.float64):
        powers = np.exp(x - x.max())
        scores = powers / powers.sum() if router.scoring == "softmax" else 1 / (1 + np.exp(-x))
        choice = scores if bias is None else scores + bias
        members = np.split(np.arange(router.experts), router.groups)
        rank = [np.sort(choice[g])[-2:].sum() if router.bias else choice[g].max() for g in members]
        live = sorted(range(router.groups), key=lambda g: (-rank[g], g))[: router.live]
        candidates = np.concatenate([members[g] for g in live])
        ids = sorted(candidates, key=lambda e: (-choice[e], e))[: router.k]
        weights = scores[ids]
        all_ids.append(ids)
        all_weights.append(weights / (weights.sum() + 1e-20 if router.normalise else 1) * router.factor)
    return np.array(all_ids), np.array(all_weights)


def check(got, router: Router, logits, bias) -> None:
    """The same experts in the same order, weights to a few roundings of float32."""
    ids, weights = route64(router, logits, bias)
    np.testing.assert_array_equal(got[0], ids)
    np.testing.assert_allclose(got[1], weights, rtol=1e-6)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("m", [1, 5, 64])
@pytest.mark.parametrize("name", ROUTERS)
def test_reference(name, m, ties):
    router = ROUTERS[name]
    logits, bias = inputs(router, m, ties)
    got = jax.jit(lambda x, b: router.route(x, b))(logits, bias)
    assert [(a.shape, a.dtype) for a in got] == [((m, router.k), jnp.int32), ((m, router.k), jnp.float32)]
    check(got, router, logits, bias)


@pytest.mark.parametrize("name", ROUTERS)
def test_the_inputs_hold_ties(name):
    """Of chosen experts with others that come before or after: else the test above would not see in which order those come."""
    router = ROUTERS[name]
    logits, bias = inputs(router, 64, True)
    choice = (1 / (1 + np.exp(-logits.astype(np.float64)))) + (0 if bias is None else bias)
    tied = [sum(choice[i][e] == choice[i]) > 1 for i, row in enumerate(route64(router, logits, bias)[0]) for e in row]
    assert sum(tied) >= router.k


def test_tiles():
    assert [tile_of(r.experts, r.groups) for r in ROUTERS.values()][:5] == [(8, 32), (8, 32), (2, 32), (16, 32), (4, 32)]
    assert (tile_of(120, 2), tile_of(45, 3), tile_of(7, 1)) == ((2, 64), (4, 32), (1, 32))


def test_what_the_kernel_cannot_hold():
    router = Router(8192, 8, bias=False)
    x, why = jnp.zeros((2, 8192)), r"at most 4096 scores, not 8192 experts in tiles of 256 x 32; use 'xla'"
    with dispatch.compile_only(90), pytest.raises(ValueError, match=why):
        router.route(x, None, implementation="triton")
    assert router.route(x, None)[0].shape == (2, 8)


def test_interpreter_agrees_with_float64():
    """In a process of its own: TRITON_INTERPRET must be set before Triton is imported."""
    ptx.need_triton()
    script = pathlib.Path(__file__).with_name("interpret_route.py")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[2]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, cwd=script.parents[2], check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == " ".join(f"ok {name}" for name in ROUTERS).split()


@pytest.mark.parametrize("name", ROUTERS)
def test_compiles_for_hopper(name, monkeypatch):
    """One launch, in which a warp needs neither shared memory nor a barrier, and reduces in hardware."""
    ptx.need_triton()
    from jax_triton import triton_lib

    from dsv3_jax.kernels.triton_impl import route as kernel

    results, real = [], triton_lib.compile_ttir_to_ptx_inplace

    def keep(*args):
        results.append(real(*args))
        return results[-1]

    monkeypatch.setattr(triton_lib, "compile_ttir_to_ptx_inplace", keep)
    router = ROUTERS[name]
    factor = 1.0625  # no model's: a kernel that another test has compiled would not be compiled again

    def f(x, b=None):
        return kernel.route(x, b, router.k, router.groups, router.live, router.scoring, router.normalise, factor)

    shapes = [jax.ShapeDtypeStruct((8192, router.experts), jnp.float32), jax.ShapeDtypeStruct((router.experts,), jnp.float32)]
    out = ptx.export(f, *shapes[: 1 + router.bias])
    assert [(a.shape, a.dtype) for a in out] == [((8192, router.k), jnp.int32), ((8192, router.k), jnp.float32)]
    (compiled,) = results
    assert compiled.shared_mem_bytes == 0 and "bar.sync" not in compiled.binary and "redux.sync.max.s32" in compiled.binary
    assert compiled.binary.count("shfl.sync") <= 13, "only softmax's two reductions and the sum that normalises may take several steps"
