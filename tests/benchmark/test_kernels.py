"""The benchmark of kernels on the CPU: what is timed, that wrong results are refused, what rows hold, how others' figures are joined."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.benchmark import cases, kernels, quant_cases, timing
from dsv3_jax.benchmark.cases import Gemm, Grouped, Mla
from dsv3_jax.benchmark.quant_cases import Copy, Quant

TINY = [
    Gemm(3, 256, 272),  # K is no multiple of 128
    Gemm(300, 144, 128),  # more rows than are checked, N is no multiple of 128
    Grouped(4, 3, 256, 128, 2),
    Grouped(3, 2, 128, 64, 2, fp8=False),
    Mla(3, 130, 2),
    Quant("act_quant", 5, 256),
    Quant("rms_norm_quant", 5, 256),
    Quant("swiglu_quant", 5, 256),
    Quant("weight_dequant", 144, 128),
    Copy(4096),
]


@pytest.fixture
def short(monkeypatch):
    """Runs of few calls: a CPU computes here."""
    for name, value in {"OVERFLOW": 1, "ITERATION_US": 8, "MOST_CALLS": 4, "RUN_US": 1}.items():
        monkeypatch.setattr(timing, name, value)


def all_cases():
    return [case for what in kernels.WHAT.split(",") for unit in kernels.default(what) for case in unit]


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_every_case_overflows_the_cache_and_fits_on_the_card(case):
    operands = [sum(np.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in specs) for specs in case.specs()]
    out = jax.eval_shape(case.call, *(tuple(s.struct for s in specs) for specs in case.specs()))
    out_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(out))
    n = timing.counts(case, out_bytes, timing.RUN_US)
    assert n.weights * max(case.bytes, operands[2]) >= timing.OVERFLOW
    assert 2 <= n.calls <= timing.MOST_CALLS and (n.rounds % n.smalls == 1 or n.smalls == 1 or not case.looped)
    assert operands[0] + n.smalls * operands[1] + n.weights * operands[2] + 2 * n.calls * out_bytes < 20e9
    if case.looped:
        assert n.smalls >= 2, "nothing would change from one iteration to the next"
        likely_us = 2 + max(case.bytes / timing.HBM, case.flops / timing.FP8_RATE) * 1e6
        full = n.calls > timing.MOST_CALLS / 2 or n.calls * out_bytes > timing.MOST_OUTPUT / 2
        assert n.calls * likely_us > 0.9 * timing.ITERATION_US or full


def test_the_default_cases_are_those_of_the_other_libraries():
    found = [case for case in all_cases() if case.op in ("fp8_gemm", "grouped_fp8_gemm", "mla_decode")]
    assert len(found) == 7 * 6 + 7 * 2 + 7 and len({(c.op, *c.sizes().values()) for c in found}) == len(found)
    assert {c.op for c in all_cases()} - {c.op for c in found} == {
        "grouped_bf16_gemm", "act_quant", "rms_norm_quant", "swiglu_quant", "weight_dequant", "copy",
    }  # fmt: skip


def operands_of(case):
    return [timing.make(specs, 10 * i, 1) for i, specs in enumerate(case.specs())]


def f64(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def repeated(scale, shape) -> np.ndarray:
    """Block scales in NumPy, one for each element."""
    scale = np.repeat(f64(scale), 128, axis=-1)[..., : shape[-1]]
    return scale if scale.shape == tuple(shape) else np.repeat(scale, 128, axis=-2)[..., : shape[-2], :]


def exact(case) -> np.ndarray:
    """The result in float64, from the operands alone."""
    shared, small, weight = operands_of(case)
    if isinstance(case, Gemm):
        a, b = f64(shared[0]) * repeated(small[0], shared[0].shape), f64(weight[0]) * repeated(weight[1], weight[0].shape)
        return a @ b.T
    if isinstance(case, Grouped):
        x, w = f64(shared[0]), f64(weight[0])
        if case.fp8:
            x, w = x * repeated(shared[1], x.shape), w * repeated(weight[1], w.shape)
        w = w.reshape(case.experts, case.n, case.k)
        return np.concatenate([x[g * case.rows : (g + 1) * case.rows] @ w[g].T for g in range(case.experts)])
    assert isinstance(case, Mla)
    q, latent = f64(small[0]), f64(weight[0])
    scores = np.einsum("bhc,bsc->bhs", q, latent) * 192**-0.5
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhs,bsc->bhc", p / p.sum(-1, keepdims=True), latent[..., :512])


@pytest.mark.parametrize("case", TINY[:5], ids=str)
def test_errors_are_measured_against_the_exact_product(case):
    """The benchmark's own idea of the right result, the op's result, and float64 agree; a wrong element in a hundred is seen."""
    want = exact(case)
    as_float32 = jnp.asarray(want, jnp.float32)
    assert abs(float(case.error(*operands_of(case), as_float32))) < 1e-6
    got = f64(case.call(*operands_of(case)))
    assert 1 - 2 * (got * want).sum() / (got * got + want * want).sum() < case.bound
    wrong = as_float32.at[(-1,) * (want.ndim - 1)].multiply(-1)  # the last row, or head
    assert float(case.error(*operands_of(case), wrong)) > case.bound


@pytest.mark.parametrize("case", TINY[5:], ids=str)
def test_errors_of_what_is_copied_or_quantised(case):
    out = case.call(*operands_of(case))
    assert float(case.error(*operands_of(case), out)) == 0
    flat, tree = jax.tree.flatten(out)
    flat[0] = flat[0].at[-1].set(0)
    assert float(case.error(*operands_of(case), jax.tree.unflatten(tree, flat))) > case.bound


def test_rows(short, tmp_path, capsys):
    path = tmp_path / "ours.jsonl"
    assert kernels.main(units=[[case] for case in TINY], processes=0, json=str(path), command="dsv3-benchmark kernels", seed=3) == 0
    first, *rows = map(json.loads, path.read_text().splitlines())
    assert first == {"op": "about", "impl": "ours", "command": "dsv3-benchmark kernels", "seed": 3}
    for case, row in zip(TINY, rows, strict=True):
        assert row["op"] == case.op and row["impl"] == "ours" and {k: row[k] for k in case.sizes()} == case.sizes()
        assert row["us"] > 0 and 0 <= row["diff"] <= case.bound and row["config"] == {} and row["implementation"] == "xla"
        assert row["gbps"] == pytest.approx(case.bytes / row["us"] / 1e3, rel=1e-6, abs=1e-8)
        assert row["tflops"] == pytest.approx(case.flops / row["us"] / 1e6, rel=1e-6, abs=1e-8)
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == len(TINY) and "fp8_gemm m=3 n=256 k=272" in shown.out
    assert f"{len(TINY)} of {len(TINY)}" in shown.err


def test_bytes_and_operations():
    """By hand, as the other libraries' rows count them."""
    assert (Gemm(8, 256, 128).bytes, Gemm(8, 256, 128).flops) == (8 * 128 + 256 * 128 + 2 * 8 * 256, 2 * 8 * 256 * 128)
    assert (Grouped(4, 3, 256, 128).bytes, Grouped(4, 3, 256, 128, fp8=False).bytes) == (4 * 256 * 128, 2 * 4 * 256 * 128)
    assert (Mla(2, 64, 16).bytes, Mla(2, 64, 16).flops) == (2 * 64 * 1152, 2 * 2 * 64 * 16 * 1088)
    assert Quant("act_quant", 10, 256).bytes == 10 * 256 * 3 + 10 * 2 * 4
    assert Quant("swiglu_quant", 10, 256).bytes == 10 * 256 * 5 + 10 * 2 * 4
    assert Quant("weight_dequant", 256, 384).bytes == 256 * 384 * 3 + 6 * 4
    assert Copy().bytes == 2**32 and quant_cases.COPIED == 2**31


def test_a_failure_is_a_row_and_the_others_go_on(short, tmp_path, capsys):
    path = tmp_path / "ours.jsonl"
    units = [[Gemm(3, 128, 128, implementation="triton"), Gemm(3, 128, 128)]]
    assert kernels.main(units=units, processes=0, json=str(path)) == 1
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert "no GPU is here" in rows[0]["error"] and rows[0]["m"] == 3 and "us" in rows[1]
    assert "FAILED" in capsys.readouterr().out


def test_an_item_whose_process_died_has_its_sizes(monkeypatch, tmp_path):
    def died(work, units, processes, deadline):
        for unit in units:
            yield unit, {"op": "fp8_gemm", "us": 1.0, "gbps": 1.0, "tflops": 1.0, "config": {}, "implementation": "xla"}
            yield unit, {"error": "the process died"}

    monkeypatch.setattr(kernels.pool, "run", died)
    path = tmp_path / "ours.jsonl"
    assert kernels.main(units=[[Gemm(1, 128, 128), Gemm(2, 256, 128)]], json=str(path)) == 1
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[1] == {"op": "fp8_gemm", "impl": "ours", "m": 2, "n": 256, "k": 128, "error": "the process died"}


def test_a_deadline_keeps_what_was_measured(short, tmp_path, capsys):
    path = tmp_path / "ours.jsonl"
    assert kernels.main(units=[[Gemm(3, 128, 128)] * 3], processes=0, json=str(path), deadline_s=1e-3) == 0
    assert len(path.read_text().splitlines()) == 1 and "2 cases were not measured" in capsys.readouterr().err


THEIRS = [
    {"op": "fp8_gemm", "impl": "deepgemm", "m": 8, "n": 256, "k": 128, "us": 8.0},
    {"op": "fp8_gemm", "impl": "other", "m": 8, "n": 256, "k": 128, "us": 6.0},
    {"op": "fp8_gemm", "impl": "deepgemm", "m": 8, "n": 512, "k": 128, "us": 4.0},
    {"op": "fp8_gemm", "impl": "deepgemm", "m": 64, "n": 256, "k": 128, "us": 5.0},
    {"op": "bf16_gemm", "impl": "cublas", "m": 8, "n": 256, "k": 128, "us": 1.0},
    {"op": "mla_decode", "impl": "flashmla", "batch": 1, "context": 64, "heads": 16, "us": 9.0, "graph": True},
]
OURS = [
    {"op": "fp8_gemm", "impl": "ours", "m": 8, "n": 256, "k": 128, "us": 3.0},  # 2.0 of the faster of two
    {"op": "fp8_gemm", "impl": "ours", "m": 8, "n": 512, "k": 128, "us": 8.0},  # 0.5
    {"op": "fp8_gemm", "impl": "ours", "m": 64, "n": 256, "k": 128, "us": 4.0},  # 1.25
    {"op": "fp8_gemm", "impl": "ours", "m": 64, "n": 512, "k": 128, "us": 4.0},  # nobody else's
    {"op": "fp8_gemm", "impl": "ours", "m": 64, "n": 256, "k": 256, "error": "wrong"},
    {"op": "mla_decode", "impl": "ours", "batch": 1, "context": 64, "heads": 16, "us": 6.0},  # 1.5
]


def test_ratios():
    lines = kernels.compare(OURS, THEIRS)
    assert [line.split(": ", 1)[1] for line in lines[:4]] == [f"{r} times its speed" for r in ("2.00", "0.50", "1.25", "1.50")]
    assert "fp8_gemm m=8 n=256 k=128" in lines[0] and "other      6.00 us" in lines[0] and "flashmla" in lines[3]
    assert lines[4:] == [
        "geometric mean, fp8_gemm m=8: 1.000 of 2",
        "geometric mean, fp8_gemm m=64: 1.250 of 1",
        "geometric mean, mla_decode: 1.500 of 1",
        "worst, fp8_gemm: 0.500 (fp8_gemm m=8 n=512 k=128)",
        "worst, mla_decode: 1.500 (mla_decode batch=1 context=64 heads=16)",
    ]
    assert kernels.compare(OURS[3:4], THEIRS) == ["no row of the other libraries is about the same work"]


def test_peers_are_joined(short, tmp_path, capsys):
    path = tmp_path / "peers.jsonl"
    row = {"op": "fp8_gemm", "impl": "deepgemm", "m": 3, "n": 128, "k": 128, "us": 1e9}
    path.write_text("\n".join(["", json.dumps(row), json.dumps({"op": "mla", "error": "x"}), json.dumps(OURS[0])]) + "\n")
    assert kernels.read_rows(str(path)) == [row]
    assert kernels.main(units=[[Gemm(3, 128, 128)]], processes=0, peers=str(path)) == 0
    out = capsys.readouterr().out
    assert "deepgemm 1000000000.00 us" in out and "geometric mean, fp8_gemm m=3:" in out


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"what": "gemm,attn"}, "--what=gemm,attn: attn must be among gemm,grouped,mla,quant"),
        ({"tokens": "8,x"}, "--tokens=8,x: must be positive integers"),
        ({"deadline_s": 0.0}, r"--deadline_s=0\.0: must be a positive number"),
        ({"processes": -1}, "--processes=-1: must not be negative"),
        ({"peers": " "}, "--peers is empty"),
    ],
)
def test_wrong_arguments(how, message):
    with pytest.raises(ValueError, match=message):
        kernels.main(**how)


def test_wrong_peers(tmp_path):
    (path := tmp_path / "peers.jsonl").write_text('{"us": 1}\nx\n')
    with pytest.raises(ValueError, match=r"peers\.jsonl:2: is not a JSON line"):
        kernels.main(peers=str(path))
    path.write_text(json.dumps(OURS[0]))
    with pytest.raises(ValueError, match="holds no measured row of another library"):
        kernels.main(peers=str(path))


def test_tokens_choose_the_rows_of_gemm():
    units = kernels._units("gemm", "2,16")
    assert len(units) == 7 and all([case.m for case in unit if isinstance(case, cases.Gemm)] == [2, 16] for unit in units)
