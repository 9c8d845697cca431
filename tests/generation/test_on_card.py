"""A whole engine with real widths on a Hopper GPU: its kernels against XLA, and what it promises; with DSV3_TEST_PLATFORM=cuda alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax import ModelConfig, Sampling
from dsv3_jax.benchmark.random_weights import random_engine
from dsv3_jax.generation.engine import Engine
from dsv3_jax.model.options import Options
from tests import tolerances
from tests.test_project import ROOT

LITE, V3 = "deepseek_v2_lite_16b", "deepseek_v3_671b"
# The first dense layers of DeepSeek-V3 and one with experts; two of these of DeepSeek-V2-Lite.
LAYERS = {LITE: 3, V3: 4}


@functools.cache
def engine(name: str, gemm_impl: str | None = None) -> Engine:
    engine.cache_clear()  # one at a time: memory
    config = ModelConfig.from_json(ROOT / f"configs/{name}.json")
    return random_engine(config, num_hidden_layers=LAYERS[name], gemm_impl=gemm_impl, max_seq_len=4096, max_batch_size=8)


@pytest.mark.parametrize("tokens", [1, 256])
@pytest.mark.parametrize(("name", "gemm_impl"), [(LITE, "bf16"), (V3, "bf16"), (V3, "fp8")])
def test_each_layer_against_xla(name, gemm_impl, tokens):
    """Every layer is given what XLA's layer before returned, so that what rounds apart in one does not add up."""
    e = engine(name, gemm_impl)
    o = e.options
    others = Options(o.dtype, o.attn_impl, o.gemm_impl, implementation="xla")
    shape = (2, tokens)
    new = jax.device_put(np.array([tokens, max(1, tokens - 3)], np.int32), e.sharding.named("batch"))
    ids = np.random.default_rng(0).integers(0, e.config.vocab_size, shape).astype(np.int32)

    def layers(options):
        """A function of (layer, x, what is added to it, cache) -> (x, what the layer adds, its experts), compiled once a kind of layer."""

        @functools.partial(jax.jit, static_argnums=0)
        def run(i, params, x, update, cache):
            model = nnx.merge(e.graph, params)
            for block in model.layers:
                for module in (block.input_layernorm, block.post_attention_layernorm, block.self_attn, block.mlp):
                    _give(module, options)
            steps = jnp.arange(tokens)
            positions = cache.lengths[:, None] + steps
            valid = steps < new[:, None]
            slots = jnp.where(valid, positions, jnp.iinfo(jnp.int32).max)
            cos, sin = model.rope(positions)
            x, h, _, routing = model.layers[i](x, update, cos, sin, positions, slots, valid, cache.layers[i], None, None)
            return x, h, routing

        return run

    ours, theirs = layers(o), layers(others)
    with e._running():
        cache = e._start([[1] * tokens] * 2, tokens + 1)
        x = jax.jit(lambda p: nnx.merge(e.graph, p).embed_tokens(jax.device_put(ids, e.sharding.named("batch", None))))(e.params)
        update, real = None, np.arange(tokens) < np.asarray(new)[:, None]
        for i in range(e.config.num_hidden_layers):
            got, want = ours(i, e.params, x, update, cache), theirs(i, e.params, x, update, cache)
            mine, exact = (np.asarray(r[0].astype(jnp.float32) + r[1].astype(jnp.float32))[real] for r in (got, want))
            same = np.ones(len(exact), bool)
            if got[2] is not None:  # a token that lies between two experts may go to either
                same = (np.sort(np.asarray(got[2][0])[real]) == np.sort(np.asarray(want[2][0])[real])).all(-1)
                assert same.mean() >= tolerances.ROUTED_ALIKE
            added = np.asarray(want[1].astype(jnp.float32))[real][same]
            rms = np.sqrt(np.mean((mine - exact)[same] ** 2)) / np.sqrt(np.mean(added**2))
            print(f"{name} {gemm_impl} layer {i}, {tokens} tokens: rms {rms:.4f} of what it adds; {1 - same.mean():.4f} routed apart")
            assert rms < tolerances.LAYER_RMS[gemm_impl]
            x, update = want[0], want[1]


def _give(module, options) -> None:
    """Have a module and its parts compute by other options."""
    for _, part in nnx.iter_graph(module):
        if hasattr(part, "options"):
            part.options = options


@pytest.mark.parametrize("name", [LITE, V3])
def test_greedy_answers_repeat_whoever_else_is_there(name):
    """Bit for bit: the same answer twice, and beside others of the same lengths."""
    e, rng = engine(name), np.random.default_rng(1)
    mine, others = (rng.integers(0, e.config.vocab_size, shape).tolist() for shape in ((300,), (2, 3, 300)))
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=3)):
        crowds = (others[0], others[0], others[1])
        once, again, beside = ([c.tokens for c in e.generate([mine, *crowd], sampling, 48, stop_token_ids=())] for crowd in crowds)
        assert once == again and once[0] == beside[0]
        assert once[1:] != beside[1:]


def test_two_thousand_steps_take_no_more_memory():
    e = engine(LITE)
    device = e.sharding.mesh.devices.flat[0]
    prompts = np.random.default_rng(2).integers(0, e.config.vocab_size, (4, 100)).tolist()
    in_use, peaks = [], []

    def watch(i, token):
        if i == 0:
            in_use.append(device.memory_stats()["bytes_in_use"])
            peaks.append(device.memory_stats()["peak_bytes_in_use"])

    done = e.generate(prompts, Sampling(temperature=1.0), 2000, stop_token_ids=(), on_token=watch)
    assert [len(c.tokens) for c in done] == [2000] * 4 and len(in_use) == 2000
    settled = in_use[100:]
    print(f"bytes in use after 100 and 2,000 steps: {settled[0]:,}, {settled[-1]:,}; peak {peaks[100]:,}, {peaks[-1]:,}")
    assert max(settled) - min(settled) < 2**20 and peaks[-1] == peaks[100]


def test_fifty_lengths_compile_no_more_than_the_buckets():
    e = engine(LITE)
    lengths = np.unique(np.geomspace(1, 2000, 60).astype(int))[-50:]
    programs = lambda: [f._cache_size() for f in (e._prefill, e._decode)]  # noqa: E731  # pyright: ignore[reportAttributeAccessIssue]
    before = programs()
    for n in lengths:
        e.generate([[9] * int(n)], max_new_tokens=5, stop_token_ids=())
    prefills, decodes = (now - then for now, then in zip(programs(), before, strict=True))
    print(f"{len(lengths)} lengths: {prefills} programs for prompts, {decodes} for steps")
    assert len(lengths) == 50 and prefills <= 12 and decodes <= 6  # prompts of 16 to 2,048 tokens in caches of 128 to 4,096
