"""What devices say to each other in a compiled step: two sums a layer, never a weight, in every way of spreading a model."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import pytest

from dsv3_jax import ModelConfig, Sampling
from dsv3_jax.benchmark.profile import part_of_scope
from dsv3_jax.benchmark.random_weights import random_engine
from dsv3_jax.generation.requests import Request
from tests.test_project import ROOT

TINY = ModelConfig.from_json(ROOT / "configs/tiny.json")  # one dense layer, two with experts
ROWS = 4
_COLLECTIVE = re.compile(r"= \(?(\w+)\[([\d,]*)\].*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def collectives(compiled: jax.stages.Compiled) -> list[tuple[str, str | None, str, list[int]]]:
    """(kind, part of the model, dtype and dims of the result) of each."""
    found = []
    for line in (compiled.as_text() or "").splitlines():
        if (match := _COLLECTIVE.search(line)) is not None:
            scope = re.search(r'op_name="([^"]*)"', line)
            dims = [int(n) for n in match[2].split(",") if n]
            found.append((match[3], part_of_scope(scope[1]) if scope else None, match[1], dims))
    return found


def steps(mesh: str, expert_axes: str) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """A decode and a prefill call, compiled."""
    e = random_engine(TINY, mesh, max_seq_len=128, max_batch_size=ROWS, expert_axes=expert_axes)
    requests = [Request([1, 2, 3] * 10, Sampling(), 8) for _ in range(ROWS)]
    prompts = [r.tokens for r in requests]
    with e._running():
        cache, rows = e._start(prompts, 64), e._rows(requests, [], ROWS)
        decode = e._decode.lower(e.params, cache, rows, mode="greedy").compile()
        chunk, arrays = next(e._chunks(prompts, 64, cache))
        logits = jnp.zeros((ROWS, TINY.vocab_size), jnp.float32, out_sharding=e.sharding.named("batch", "vocab"))
        return decode, e._prefill.lower(e.params, cache, *arrays, logits, context=chunk.context).compile()


# By part of the model. Logits of all rows are gathered to be sampled from (None: XLA names the instruction after nothing of ours).
SUMS = {("all-reduce", "attention_projections"): 3, ("all-reduce", "mlp"): 1, ("all-reduce", "experts"): 2}
LOOKUP = {("all-reduce", "embedding"): 1}
# Tokens, ids and weights go to the devices that have the experts; which tokens are real is said once.
EXCHANGE = {("all-gather", "experts"): 2 * 3 + 1, ("reduce-scatter", "experts"): 2}


@pytest.mark.parametrize(
    ("mesh", "expert_axes", "expected"),
    [("model=4", "model", SUMS | LOOKUP), ("data=2,model=2", "data,model", SUMS | LOOKUP | EXCHANGE)],
)
def test_two_sums_a_layer_and_no_weights(mesh, expert_axes, expected):
    decode, prefill = (collectives(compiled) for compiled in steps(mesh, expert_axes))
    for name, found in (("decode", decode), ("prefill", prefill)):
        inside = [c for c in found if c[1] is not None]
        assert collections.Counter(c[:2] for c in inside) == expected, name
        assert all(dtype != "f8e4m3fn" or part == "experts" for _, part, dtype, _ in inside), name
    # What is left gathers logits and tokens, which have a row for each of the batch's and no other dim but the vocabulary.
    assert not [c for c in prefill if c[1] is None]
    left = [c for c in decode if c[1] is None]
    assert left and all(kind == "all-gather" and set(dims) <= {ROWS, ROWS // 2, TINY.vocab_size} for kind, _, _, dims in left), left
