"""The tuned tables: which entry a shape finds, what a table may hold, and that every entry compiles for Hopper and fits on the card."""

from __future__ import annotations

import json
import types

import jax
import jax.numpy as jnp
import pytest

from dsv3_jax.kernels import dispatch, tiles
from tests.kernels import ptx

S = jax.ShapeDtypeStruct
SHARED_MEMORY = 227 * 1024  # bytes a program may have on Hopper
DECODE = {"kernel": "decode", "BN": 64, "SPLIT": 2, "GROUPS": 1, "STAGES": 4}
LARGE = {"kernel": "large", "BN": 64, "STAGES": 8, "GROUP": 16}
GROUPED = {"BM": 16, "BN": 128, "STAGES": 11, "SWAP": True, "CONSUMERS": 2, "PARTS": 1, "COALESCE": False}
TABLE = {
    "fp8_gemm": {"8,256,512": DECODE, "64,256,512": LARGE, "4096,256,512": LARGE | {"BN": 128, "STAGES": 6}},
    "grouped_gemm.fp8": {"1,256,512": GROUPED, "4,256,512": GROUPED | {"STAGES": 5}},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of tables in place of the project's own; TABLE is the H200's."""
    monkeypatch.setattr(tiles, "FOLDER", tmp_path)
    tiles.read.cache_clear()
    tiles.write(tmp_path / "nvidia_h200.json", TABLE)
    yield tmp_path
    tiles.read.cache_clear()


@pytest.mark.parametrize(
    ("op", "m", "bucket"),
    [("fp8_gemm", m, bucket) for m, bucket in ((1, 8), (8, 8), (9, 16), (64, 64), (65, 128), (4096, 4096), (70_000, 4096))]
    + [("grouped_gemm", m, bucket) for m, bucket in ((1, 1), (3, 4), (5000, 4096))],
)
def test_rows_fall_into_buckets(op, m, bucket):
    assert tiles.bucket(op, m) == bucket


def test_lookup(folder):
    default = {"kernel": "large", "BN": 1}
    with dispatch.compile_only(90):
        assert [tiles.lookup("fp8_gemm", m, 256, 512, default=default) for m in (1, 8)] == [DECODE, DECODE]
        assert tiles.lookup("fp8_gemm", 33, 256, 512, default=default) == LARGE
        assert tiles.lookup("fp8_gemm", 9999, 256, 512, default=default)["BN"] == 128
        assert tiles.lookup("grouped_gemm", 3, 256, 512, "fp8", default={})["STAGES"] == 5
        for m, n, k in ((9, 256, 512), (8, 512, 256), (8, 256, 1024)):  # unlisted
            assert tiles.lookup("fp8_gemm", m, n, k, default=default) == default
        assert tiles.lookup("grouped_gemm", 3, 256, 512, "bf16", default=default) == default, "another kind's table"
        tiles.lookup("fp8_gemm", 8, 256, 512, default={})["BN"] = 7
        assert tiles.lookup("fp8_gemm", 8, 256, 512, default={}) == DECODE, "an entry is the caller's own copy"


def test_the_table_is_that_of_the_device(folder, monkeypatch):
    assert tiles.lookup("fp8_gemm", 8, 256, 512, default={}) == {}, "without a GPU nothing was measured"
    with dispatch.compile_only(89):
        assert tiles.lookup("fp8_gemm", 8, 256, 512, default={}) == {}
    gpu = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(tiles, "jax", types.SimpleNamespace(default_backend=lambda: "gpu", local_devices=lambda: [gpu]))
    assert (tiles.device_name(), tiles.lookup("fp8_gemm", 8, 256, 512, default={})) == ("nvidia_h100_80gb_hbm3", {})
    tiles.write(folder / "nvidia_h100_80gb_hbm3.json", {"fp8_gemm": {"8,256,512": LARGE}})
    tiles.read.cache_clear()
    assert tiles.lookup("fp8_gemm", 8, 256, 512, default={}) == LARGE
    gpu.device_kind = "NVIDIA H200"
    assert tiles.lookup("fp8_gemm", 8, 256, 512, default={}) == DECODE


def test_the_kernels_follow_the_table(folder):
    ptx.need_triton()
    from dsv3_jax.kernels import fp8_gemm
    from dsv3_jax.kernels.triton_impl import fp8_gemm_decode, fp8_gemm_large, grouped_gemm

    with dispatch.compile_only(90):
        assert fp8_gemm.choose(5, 256, 512) == DECODE
        assert fp8_gemm.choose(64, 256, 512) == LARGE, "the table names another kernel than the rule of thumb"
        assert fp8_gemm.choose(16, 256, 512) == {"kernel": "decode"} | fp8_gemm_decode.likely(16, 256, 512)
        assert fp8_gemm.choose(65, 256, 512) == {"kernel": "large"} | fp8_gemm_large.likely(65, 256, 512)
        assert fp8_gemm_decode.choose(64, 256, 512) == fp8_gemm_decode.likely(64, 256, 512), "an entry of the other kernel"
        assert grouped_gemm.choose("fp8", 1, 256, 512) == GROUPED
        assert grouped_gemm.choose("fp8", 2, 256, 512) == grouped_gemm.configure("fp8", 2)


def test_what_is_written_is_read(folder):
    text = (folder / "nvidia_h200.json").read_text()
    assert tiles.read(folder / "nvidia_h200.json") == TABLE == json.loads(text)
    assert sum(line.startswith("  ") for line in text.splitlines()) == 5, "one entry a line"
    assert not list(folder.glob("*.new"))


def _without(entry: dict, name: str) -> dict:
    return {k: v for k, v in entry.items() if k != name}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{", "is not JSON"),
        ([], "must hold an object whose keys are ops, not list"),
        ({"fp8_gemm": []}, "fp8_gemm: must be an object of entries, not list"),
        ({"attend": {"8,256,512": DECODE}}, "attend: 8,256,512: attend is no op with a table"),
        ({"fp8_gemm": {"8,256": DECODE}}, "fp8_gemm: 8,256: the key must be 'M,N,K'"),
        ({"fp8_gemm": {"8,-256,512": DECODE}}, "fp8_gemm: 8,-256,512: the key must be 'M,N,K'"),
        ({"fp8_gemm": {"9,256,512": DECODE}}, "fp8_gemm: 9,256,512: M must be a power of two from 8 to 4096"),
        ({"fp8_gemm": {"8192,256,512": LARGE}}, "M must be a power of two from 8 to 4096"),
        ({"fp8_gemm": {"8,256,512": 3}}, "must be an object, not int"),
        ({"fp8_gemm": {"8,256,512": _without(DECODE, "kernel")}}, "kernel or kind None must be one of decode, large"),
        ({"fp8_gemm": {"8,256,512": DECODE | {"kernel": ["decode"]}}}, "must be one of decode, large"),
        ({"fp8_gemm": {"8,256,512": _without(DECODE, "SPLIT")}}, r"must hold BN \(int\), SPLIT \(int\)"),
        ({"fp8_gemm": {"8,256,512": DECODE | {"GROUP": 8}}}, r"must hold BN \(int\), SPLIT \(int\)"),
        ({"fp8_gemm": {"8,256,512": DECODE | {"SPLIT": 2.0}}}, r"must hold BN \(int\), SPLIT \(int\)"),
        ({"fp8_gemm": {"8,256,512": DECODE | {"SPLIT": 0}}}, "every number must be positive"),
        ({"fp8_gemm": {"256,256,512": DECODE}}, "256,256,512: the decode kernel takes 128 rows at most"),
        ({"grouped_gemm": {"8,256,512": GROUPED}}, "kernel or kind None must be one of bf16, fp8, w8"),
        ({"grouped_gemm.fp4": {"8,256,512": GROUPED}}, "kernel or kind 'fp4' must be one of bf16, fp8, w8"),
        ({"grouped_gemm.fp8": {"8,256,512": GROUPED | {"SWAP": 1}}}, r"SWAP \(bool\)"),
    ],
)
def test_a_malformed_table_is_refused(folder, table, message):
    path = folder / "nvidia_h200.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    tiles.read.cache_clear()
    with dispatch.compile_only(90), pytest.raises(ValueError, match=message) as error:
        tiles.lookup("fp8_gemm", 8, 256, 512, default={})
    assert str(error.value).startswith(f"{path}: ")


def entries() -> list[tuple[str, str, dict]]:
    """(file, op, kind, height, N, K, entry): of the entries that compile to the same tiles, the one with the largest K."""
    found: dict[tuple, tuple] = {}
    for path in sorted(tiles.FOLDER.glob("*.json")):
        for table, by_shape in tiles.read(path).items():
            for key, entry in by_shape.items():
                m, n, k = map(int, key.split(","))
                height = m if entry.get("kernel") == "decode" else 0
                same = (table, height, *sorted(entry.items()))
                if same not in found or k > found[same][2]:
                    found[same] = (table, m, k, n, entry)
    return list(found.values())


def test_there_is_a_table_for_the_card_that_was_measured():
    assert tiles.read(tiles.FOLDER / f"{tiles.HOPPER}.json")["fp8_gemm"]


@pytest.mark.parametrize(("table", "m", "k", "n", "entry"), entries(), ids=lambda x: x if isinstance(x, str | int) else "")
def test_every_entry_compiles_and_fits_on_the_card(table, m, k, n, entry, monkeypatch):
    ptx.need_triton()
    from dsv3_jax.kernels import fp8_gemm, grouped_gemm, quantize
    from dsv3_jax.kernels.triton_impl import launch

    shared, launched = [], launch._Library.TritonKernel

    def record(self, name, num_warps, num_ctas, shared_bytes, *rest):
        shared.append(shared_bytes)
        return launched(self, name, num_warps, num_ctas, shared_bytes, *rest)

    monkeypatch.setattr(launch._Library, "TritonKernel", record)
    rows, columns = -(-n // 128), -(-k // 128)
    if table == "fp8_gemm":
        operands = S((m, k), quantize.FP8), S((m, columns), jnp.float32), S((n, k), quantize.FP8), S((rows, columns), jnp.float32)
        (out,) = ptx.export(lambda *a: fp8_gemm.on_triton(*a, jnp.bfloat16, entry), *operands)
        assert out.shape == (m, n)
    else:
        kind, groups = table.partition(".")[2], 4
        x = S((groups * m, k), quantize.FP8 if kind == "fp8" else jnp.bfloat16)
        w = S((groups, 1, n, k), jnp.bfloat16 if kind == "bf16" else quantize.FP8)
        scales = [S((groups * m, columns), jnp.float32)] if kind == "fp8" else []
        scales += [S((groups, 1, rows, columns), jnp.float32)] if kind != "bf16" else []
        names = {"fp8": ("x_scale", "w_scale"), "w8": ("w_scale",), "bf16": ()}[kind]

        def call(x, w, sizes, *scales):
            how = dict(zip(names, scales, strict=True)) | {"config": entry, "implementation": "triton", "out_dtype": jnp.bfloat16}
            return grouped_gemm.grouped_gemm(x, w, sizes, **how)

        (out,) = ptx.export(call, x, w, S((groups,), jnp.int32), *scales)
        assert out.shape == (groups * m, n)
    assert shared and max(shared) <= SHARED_MEMORY
