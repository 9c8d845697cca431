"""`dsv3-benchmark model`: what it runs is what the engine runs, what it counts is what a count by hand gives, and it writes all of it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from dsv3_jax import ModelConfig, Sampling
from dsv3_jax.benchmark import measure, model
from dsv3_jax.benchmark.random_weights import random_engine
from tests.test_project import ROOT

TINY_JSON = str(ROOT / "configs/tiny.json")
TINY = ModelConfig.from_json(TINY_JSON)
STEPS, CONTEXT = 8, 20


@pytest.fixture(scope="module")
def engine():
    return random_engine(TINY, dtype="float32", max_seq_len=64, max_batch_size=4)


def test_it_decodes_what_generate_decodes_and_every_repetition_alike(engine):
    run = measure.Run(engine, 3, CONTEXT, STEPS, seed=5)
    with engine._running():
        started = run.start()
        cache, rows, first = run.decode(started.cache, started.rows, 4)
        lengths = np.asarray(cache.lengths)
        cache, _, once = run.decode(cache, rows, STEPS)
        again = run.decode(run.rewind(cache, lengths), rows, STEPS)[2]
    assert lengths.tolist() == [CONTEXT + 4] * 3 + [0]
    np.testing.assert_array_equal(once, again)
    prompts, sampling = [r.tokens for r in run.requests], [Sampling(temperature=1.0, seed=5 + i) for i in range(3)]
    answers = engine.generate(prompts, sampling, 4 + STEPS, stop_token_ids=())
    assert np.concatenate([first, once])[:, :3].T.tolist() == [a.tokens for a in answers]
    assert len({tuple(a.tokens) for a in answers}) == 3


def test_experts_hit_are_those_of_the_engines_routing(engine):
    run = measure.Run(engine, 3, CONTEXT, STEPS, seed=5)
    with engine._running():
        started = run.start()
        lengths = np.asarray(started.cache.lengths)
        cache, _, tokens = run.decode(started.cache, started.rows, STEPS)
        _, hit = run._experts_hit(run.rewind(cache, lengths), tokens)
    routed = engine.routing([r.tokens + tokens[:, i].tolist() for i, r in enumerate(run.requests)])
    ids = np.stack([ids[:, CONTEXT:] for ids, _ in routed])  # (B, L, steps, K)
    want = np.mean([len(set(ids[:, layer, step].ravel())) for layer in range(2) for step in range(STEPS)])
    assert hit == pytest.approx(want) and 2 < want < 6


def test_experts_are_counted_by_layer_and_group_of_rows():
    ids = np.array([[[0, 1], [1, 2], [3, 4], [9, 9]], [[0, 1], [0, 1], [0, 1], [9, 9]]])  # two layers, three real rows
    real = np.array([True, True, True, False])
    assert measure.hits_of(ids, real, 1) == (5 + 2) / 2
    assert measure.hits_of(ids, real, 2) == (3 + 2 + 2 + 2) / 4


def test_even_routing_is_what_random_subsets_give(engine):
    rng, run = np.random.default_rng(0), measure.Run(engine, 4, 1, 4, 0)
    draws = [len(set(np.concatenate([rng.permutation(8)[:2] for _ in range(4)]))) for _ in range(4000)]
    assert run._experts_expected() == pytest.approx(np.mean(draws), abs=5 * np.std(draws) / 4000**0.5)


def _bytes_by_hand(experts: float, slots: float) -> float:
    """Of configs/tiny.json in FP8: codes and a float32 scale a 128x128 block, the rest bf16."""

    def fp8(n, k):
        return n * k + 4 * -(-n // 128) * -(-k // 128)

    attention = fp8(128, 256) + fp8(8 * 128, 128) + fp8(128 + 64, 256) + fp8(256, 8 * 64) + 2 * 2 * 8 * 64 * 128
    norms = 2 * (256 + 256 + 128 + 128)
    dense = 3 * fp8(512, 256)
    expert = 3 * fp8(256, 256)
    moe = 2 * 8 * 256 + 4 * 8 + 3 * fp8(512, 256) + experts * expert
    head = 2 * 256 + 2 * 512 * 256
    return 3 * (attention + norms) + dense + 2 * moe + head + 3 * slots * 2 * (128 + 64)


def test_bytes_and_operations_of_a_step_by_hand():
    engine = random_engine(TINY, max_seq_len=128, max_batch_size=4)
    run = measure.Run(engine, 3, CONTEXT, STEPS, seed=0)
    with engine._running():
        cache = engine._start([r.tokens for r in run.requests], 40)
    slots = 3 * (CONTEXT + measure.WARM_UP + np.mean(np.arange(STEPS) + 1))
    assert measure.step_bytes(run, cache, 3.5) == round(_bytes_by_hand(3.5, slots))
    attention = 256 * 128 + 128 * 8 * 128 + 256 * 192 + 8 * 64 * 256 + 2 * 8 * 64 * 128
    moe = 8 * 256 + 3 * 512 * 256 + 2 * 3 * 256 * 256  # router, shared experts, two experts
    assert measure.prefill_flops(engine, 10) == 2 * 10 * (3 * attention + 3 * 512 * 256 + 2 * moe)


def test_bytes_are_those_of_one_device():
    whole, cut = (random_engine(TINY, mesh, max_seq_len=128, max_batch_size=4) for mesh in ("data=1,model=1", "data=2,model=2"))
    read = []
    for engine in (whole, cut):
        run = measure.Run(engine, 4, CONTEXT, STEPS, seed=0)
        with engine._running():
            read.append(measure.step_bytes(run, engine._start([[1]] * 4, 40), 4.0))
        assert run.groups == engine.sharding.size("batch")
    assert 0.4 * read[0] < read[1] < 0.7 * read[0]  # norms, gates and kv_a are whole on every device


def test_a_run_writes_every_field(tmp_path, capsys):
    out, before = tmp_path / "out.json", jax.config.jax_compilation_cache_dir
    settings = model.Settings(
        random_weights=True, config=TINY_JSON, num_hidden_layers=2, batch="1,3", context="20", steps=4, json=str(out),
        profile=str(tmp_path / "trace"),
    )  # fmt: skip
    assert model.main(settings, "dsv3-benchmark model ...") == 0
    report, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert report["command"] == "dsv3-benchmark model ..." and report["versions"]["jax"] == jax.__version__
    assert report["device"] == "cpu" and report["devices"] == 1 and report["layers"] == {"dense": 1, "moe": 1}
    assert report["settings"]["gemm_impl"] == "bf16" and report["settings"]["num_hidden_layers"] == 2 and report["copy_gbps"] > 0
    assert [(r["batch"], r["context"]) for r in report["rows"]] == [(1, 20), (3, 20)]
    keys = {key for _, key, _ in model.COLUMNS} | {"prefill_ms", "step_bytes", "profile"}
    for row in report["rows"]:
        assert set(row) == keys
        assert row["peak_gb"] is None  # a CPU does not say
        assert all(row[k] > 0 for k in keys - {"peak_gb", "profile"})
        assert row["compile_cached_s"] < row["compile_cold_s"]
        assert row["decode_tok_s"] == pytest.approx(1e3 * row["batch"] / row["decode_ms_per_step"])
        assert row["bandwidth_share"] == pytest.approx(row["step_bytes"] / row["decode_ms_per_step"] / 1e6 / report["copy_gbps"])
        assert row["time_to_first_token_ms"] >= row["prefill_ms"] > 0
        assert row["profile"]["steps"] == 4 and row["profile"]["kernels"] and row["profile"]["parts"][-1]["part"] == "gaps"
    assert report["rows"][0]["experts_hit"] == 2 and 2 <= report["rows"][1]["experts_hit"] <= 6
    lines = printed.splitlines()
    assert "copies at" in lines[0] and "decode tok/s" in lines[1] and len(lines[1]) == len(lines[2])
    assert any(line.startswith("gaps") for line in lines)
    assert jax.config.jax_compilation_cache_dir == before


RANDOM = {"random_weights": True, "config": TINY_JSON}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of --ckpt_path and --random_weights"),
        ({**RANDOM, "ckpt_path": "x"}, "exactly one of --ckpt_path and --random_weights"),
        ({"random_weights": True}, "--random_weights needs --config"),
        ({"ckpt_path": "x", "num_hidden_layers": 2}, "--num_hidden_layers goes with --random_weights"),
        ({**RANDOM, "num_hidden_layers": 9}, "num_hidden_layers = 9: must be an integer from 1 to 3"),
        ({**RANDOM, "batch": "1,two"}, "--batch=1,two: must be positive integers, such as 1,32"),
        ({**RANDOM, "context": "0"}, "--context=0: must be positive integers"),
        ({**RANDOM, "context": "100,200"}, r"200 \+ 64 steps \+ 4 to warm up = 268 tokens, and the model has max_position_embeddings 256"),
        ({**RANDOM, "context": "9", "mesh": "model=3"}, "does not divide this model"),
    ],
)
def test_mistakes_are_found_before_devices_are_touched(settings, message, monkeypatch):
    monkeypatch.setattr(measure, "Run", lambda *a: pytest.fail("ran"))
    with pytest.raises(ValueError, match=message):
        model.main(model.Settings(**settings))


def test_a_file_that_cannot_be_written_is_found_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "random_engine", lambda *a, **k: pytest.fail("built"))
    with pytest.raises(OSError, match="missing"):
        model.main(model.Settings(**RANDOM, context="9", json=str(tmp_path / "missing" / "out.json")))


def _script(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, ROOT / "scripts/benchmark.py", *arguments], env=environment, capture_output=True, text=True)


def test_the_script_teaches_and_refuses():
    done = _script("--help")
    assert done.returncode == 0 and done.stdout.startswith("Measure how fast this machine runs a model")
    for field in dataclasses.fields(model.Settings):
        assert f"  --{field.name}" in done.stdout
    for arguments, message in (
        ((), "the first argument must be one of model, kernels; see --help"),
        (("modle",), "the first argument must be one of model, kernels, not modle"),
        (("model", "--what=mla"), "--what: not for model"),
        (("kernels", "--batch=3"), "--batch: not for kernels"),
        (("model", "3"), "unexpected argument '3'"),
        (("model",), "exactly one of --ckpt_path and --random_weights"),
    ):
        done = _script(*arguments)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr, done.stderr
