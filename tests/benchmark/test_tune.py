"""Tuning without a GPU: what is tried, what wins, and what the table then says; times are invented."""

from __future__ import annotations

import json
import math

import jax
import pytest
from jax.export import DisabledSafetyCheck

from dsv3_jax.benchmark import candidates, cases, kernels, timing, tune
from dsv3_jax.kernels import dispatch, tiles
from tests.kernels import ptx


@pytest.fixture
def hopper():
    ptx.need_triton()
    tiles.read.cache_clear()
    with dispatch.compile_only(90):
        yield
    tiles.read.cache_clear()


SHAPES = sorted({(n // cut, k) for n, k in kernels.GEMM for cut in (1, 16)} | {(n, k // 16) for n, k in kernels.GEMM if k >= 2048})


@pytest.mark.parametrize("m", [8, 16, 64, 128, 4096])
def test_candidates_of_the_gemm_are_entries_that_fit(hopper, m):
    from dsv3_jax.kernels import fp8_gemm
    from dsv3_jax.kernels.triton_impl import fp8_gemm_decode as decode

    for n, k in SHAPES:
        found = candidates.fp8_gemm(m, n, k)
        assert found[0] == fp8_gemm.choose(m, n, k) and len(found) <= candidates.MOST_GEMM
        assert len({json.dumps(c) for c in found}) == len(found) > 1
        assert {c["kernel"] for c in found} == {kernel for kernel, fits in (("decode", m <= 128), ("large", m >= 64)) if fits}
        for c in found:
            assert tiles._problem("fp8_gemm", tiles.key("fp8_gemm", m, n, k), c) is None
            if c["kernel"] == "large":
                continue
            steps, height = math.ceil(math.ceil(k / 128) / c["SPLIT"]), decode._height(m)
            table = math.ceil(steps / c["GROUPS"] / 16) * 16 * c["GROUPS"] * height * 4
            sums = (c["GROUPS"] - 1) * c["BN"] * height * 4
            assert c["STAGES"] * (c["BN"] + height) * 128 + table + sums + 1024 <= 227 * 1024
            of = decode._registers(c, height)
            threads = 32 * (c["GROUPS"] * of["num_warps"] + 4)
            assert threads <= 1024 and threads * of["registers"] <= 64 * 1024, c
            assert (c["SPLIT"] - 1) * steps < -(-k // 128), "a part without a block"


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256, 2048])
def test_candidates_of_the_grouped_gemm_are_entries_that_fit(hopper, kind, rows):
    from dsv3_jax.kernels.triton_impl import grouped_gemm

    found = candidates.grouped(kind, rows, 4096, 7168)
    assert found[0] == grouped_gemm.choose(kind, rows, 4096, 7168) and 1 < len(found) <= candidates.MOST_GROUPED
    for c in found:
        assert tiles._problem(f"grouped_gemm.{kind}", tiles.key("grouped_gemm", rows, 4096, 7168), c) is None
        assert c["STAGES"] * (c["BM"] + c["BN"]) * 128 + 2048 <= 227 * 1024


@pytest.mark.parametrize(("kind", "rows"), [("fp8", 64), ("bf16", 256)])
def test_candidates_of_the_grouped_gemm_compile(hopper, kind, rows):
    for config in candidates.grouped(kind, rows, 512, 512):
        case = cases.Grouped(4, rows, 512, 512, fp8=kind == "fp8", implementation="triton", config=config)
        specs = [tuple(s.struct for s in specs) for specs in case.specs()]
        (out,) = ptx.export(lambda *a, case=case: case.call(*a), *specs)
        assert out.shape == (4 * rows, 512)


def test_tiles_reach_the_kernel(hopper):
    """Cases that differ in their tiles alone are equal, but their programs are not."""
    texts = set()
    for config in [c for c in candidates.fp8_gemm(64, 256, 512) if c["kernel"] == "large"][:3]:
        case = cases.Gemm(64, 256, 512, implementation="triton", config=config)
        shared, small, weight = (tuple(s.struct for s in specs) for specs in case.specs())
        out = jax.eval_shape(case.call, shared, small, weight)
        checks = [DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
        program = timing.program(case.call, timing.Counts(1, 2, 3), True)
        exported = jax.export.export(program, platforms=["cuda"], disabled_checks=checks)
        texts.add(exported(shared, [small] * 2, [weight], [out] * 2).mlir_module())
    assert len(texts) == 3


def test_shapes():
    gemm, experts = tune._shapes("v3", [1, 16])
    assert set(kernels.GEMM) <= set(gemm)
    assert {(2304, 7168), (7168, 1024), (7168, 128), (256, 7168)} <= set(gemm) and (132, 7168) not in gemm
    assert experts == [("fp8", 32, 4096, 7168, 2), ("fp8", 32, 256, 7168, 2), ("fp8", 32, 7168, 2048, 1), ("fp8", 32, 7168, 128, 1)]
    assert tune._shapes("64x128,v2_lite", [1])[0][0] == (64, 128)
    assert tune._shapes("v2_lite", [2])[1] == [("bf16", 64, 1408, 2048, 2)], "1408 columns are 11 blocks: they do not halve"


def rows_of(*us: float) -> list[dict]:
    return [{"us": t, "config": i} for i, t in enumerate(us)]


@pytest.mark.parametrize(("us", "best"), [((10, 9, 8), 2), ((10, 9.95, 11), 0), ((10, 9.8), 1), ((10,), 0)])
def test_the_choice_in_use_stays_unless_another_is_clearly_faster(us, best):
    assert tune.fastest(rows_of(*us))["config"] == best


def test_the_table_gets_the_fastest(hopper, tmp_path, monkeypatch, capsys):
    """The third candidate of the decode kernel is made the fastest, the second fails its check, and another entry is there before."""
    out = tmp_path / "nvidia_test.json"
    other = {"kernel": "large", "BN": 64, "STAGES": 8, "GROUP": 8}
    tiles.write(out, {"fp8_gemm": {"512,4096,7168": other, "8,4096,7168": other}})
    tried = []

    def measure(case, lock, seed, **how):
        assert (case.m, case.n, case.k, case.implementation) == (8, 4096, 7168, "triton")
        tried.append(case.config)
        if len(tried) == 2:
            raise ArithmeticError("differs by 1 from the exact result")
        return {"us": 5.0 if len(tried) == 3 else 9.0, "device": "NVIDIA Test"}

    monkeypatch.setattr(kernels, "measure", measure)
    assert tune.main(what="gemm", tokens="5", shapes="4096x7168", out=str(out), processes=0) == 0
    with dispatch.compile_only(90):
        assert tried == candidates.fp8_gemm(8, 4096, 7168), "an entry is measured with as many rows as it stands for"
    tiles.read.cache_clear()
    assert tiles.read(out) == {"fp8_gemm": {"512,4096,7168": other, "8,4096,7168": tried[2]}}
    shown = capsys.readouterr()
    rows = [json.loads(line) for line in shown.out.splitlines()]
    assert len(rows) == len(tried) and "differs by 1" in rows[1]["error"] and rows[2]["us"] == 5
    assert "1 of 1 shapes have an entry" in shown.err


def test_grouped_entries_and_the_default_table(hopper, tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "FOLDER", tmp_path)
    monkeypatch.setattr(kernels, "measure", lambda case, lock, seed, **how: {"us": 1.0 + case.rows, "device": "NVIDIA Test"})
    assert tune.main(what="grouped", rows="3", shapes="v3,v2_lite", processes=0) == 0
    found = tiles.read(tmp_path / "nvidia_test.json")
    assert {table: sorted(entries) for table, entries in found.items()} == {
        "grouped_gemm.bf16": ["4,2048,1408", "4,2816,2048"], "grouped_gemm.fp8": ["4,4096,7168", "4,7168,2048"],
    }  # fmt: skip


def test_nothing_measured(hopper, tmp_path, monkeypatch):
    def measure(*_, **__):
        raise RuntimeError("no GPU")

    monkeypatch.setattr(kernels, "measure", measure)
    assert tune.main(what="gemm", tokens="8", shapes="256x128", out=str(tmp_path / "x.json"), processes=0) == 1
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"what": "mla"}, "--what=mla: mla must be among gemm, grouped"),
        ({"tokens": "0"}, "--tokens=0: must be positive integers"),
        ({"shapes": "v4"}, "--shapes=v4: 'v4' must be v3, v2_lite or a weight such as 4096x7168"),
        ({"shapes": "128x100"}, "K a multiple of 16"),
        ({"shapes": "128x128", "what": "grouped"}, "--shapes=128x128: names no shape for --what=grouped"),
        ({"shards": "1;2"}, "--shards=1;2: must be positive integers"),
        ({"deadline_s": -1.0}, r"--deadline_s=-1\.0: must be a positive number"),
        ({"out": "no/such/folder/x.json"}, "--out=no/such/folder/x.json: there is no folder"),
    ],
)
def test_wrong_arguments(how, message):
    with pytest.raises(ValueError, match=message):
        tune.main(**how)
