"""Prompts through the engine: in chunks, against no more of the cache than is filled, and the way that the prefill kernel takes."""

from __future__ import annotations

import pytest

from dsv3_jax import Engine
from dsv3_jax.generation import engine as engine_module
from dsv3_jax.model import attention
from tests import tolerances

LONG = [list(range(3, 50)), [5, 9, 13], list(range(3, 36))]


@pytest.fixture(scope="module")
def v3(engine) -> Engine:
    return engine("v3")


def test_prefill_in_chunks_equals_one_shot(v3, monkeypatch):
    whole, tokens = v3.logits(LONG), v3.generate(LONG, max_new_tokens=8, stop_token_ids=())
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 16)
    monkeypatch.setattr(engine_module, "LOGIT_TOKENS", 16)
    for chunked, once in zip(v3.logits(LONG), whole, strict=True):
        tolerances.FLOAT32_SELF.check(chunked, once)
    again = v3.generate(LONG, max_new_tokens=8, stop_token_ids=())
    assert [c.tokens for c in again] == [c.tokens for c in tokens]


@pytest.mark.parametrize("attn_impl", ["absorb", "naive"])
def test_the_way_of_the_prefill_kernel(engine, v3, monkeypatch, attn_impl):
    """Keys and values per head, for rows that begin and end anywhere: as on a GPU, with XLA in the kernel's place."""
    want = v3.logits(LONG)
    calls, mla_prefill = [], attention.mla_prefill.mla_prefill
    monkeypatch.setattr(attention.MLA, "_prefill_has_kernel", lambda self: True)
    monkeypatch.setattr(attention.mla_prefill, "mla_prefill", lambda *a, **k: calls.append(a[0].shape) or mla_prefill(*a, **k))
    other = engine("v3", attn_impl=attn_impl, max_batch_size=6)  # of its own: nothing of it is compiled yet
    monkeypatch.setattr(engine_module, "LOGIT_TOKENS", 16)
    for got, whole in zip(other.logits(LONG), want, strict=True):
        tolerances.FLOAT32_SELF.check(got, whole)
    assert len(calls) == 3 * other.config.num_hidden_layers


def test_prefill_reads_no_more_of_the_cache_than_is_filled(v3, monkeypatch):
    """One row's chunks of 16 tokens end at slots 16, 32 and 47; what is compiled for is the next power of two, the cache at most."""
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 16)
    contexts, prefill, unbounded = [], v3._prefill, [False]

    def spy(*arguments, context):
        contexts.append(context)
        return prefill(*arguments, context=None if unbounded[0] else context)

    monkeypatch.setattr(v3, "_prefill", spy)
    prompts = [*LONG, [40]]
    bounded = v3.generate(prompts, max_new_tokens=8, stop_token_ids=())
    assert contexts == [16, 32, 64] * 2 + [16] * 2
    unbounded[0] = True
    assert [c.tokens for c in v3.generate(prompts, max_new_tokens=8, stop_token_ids=())] == [c.tokens for c in bounded]
    contexts.clear()
    v3.generate([[7] * 200, [8], [9], [10]], max_new_tokens=56, stop_token_ids=())
    assert contexts == [16, 32, *[64] * 2, *[128] * 4, *[256] * 5] + [16] * 3
