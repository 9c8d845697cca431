"""fp8_cast_bf16 against the arithmetic written out, and the public package as the reader of what it writes."""

import json
import os
from pathlib import Path

import hf_folder
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from dsv3_jax.checkpoint import cast as cast_module
from dsv3_jax.checkpoint import preflight
from dsv3_jax.checkpoint.cast import cast, dequantize

DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


def decode_e4m3(code: int) -> float:
    """The format by its definition: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7F is NaN, there is no infinity."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def to_bf16_bits(value: float) -> int:
    """Round a float64 to bf16, to the nearest and to even, by integer arithmetic on a float32 that holds it exactly."""
    bits = int(np.float32(value).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def test_every_code_by_definition():
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
    got = dequantize(codes, np.array([[0.75, 3.0]], np.float32))
    for code in range(256):
        want = decode_e4m3(code) * (0.75 if code < 128 else 3.0)
        if np.isnan(want):
            assert np.isnan(got[0, code])
        else:
            assert int(got[0, code].view(np.uint16)) == to_bf16_bits(want)


def test_vector_of_numerics():
    """A 576 x 256 weight of ones with scales (5, 2), row i = i + 1: row r -> 1 + r // 128, rows 512-575 -> 5."""
    codes = np.full((576, 256), np.float32(1).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    scales = np.repeat(np.arange(1, 6, dtype=np.float32)[:, None], 2, axis=1)
    got = dequantize(codes, scales)
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got.astype(np.float32), np.repeat((1 + np.arange(576) // 128)[:, None], 256, axis=1))
    assert (got[512:] == 5).all()


def naive(codes: bytes, scales: bytes, shape: list[int]) -> np.ndarray:
    """Element by element in float64, where code times scale is exact; then two roundings that cannot differ from one, or NaN."""
    values = np.array([decode_e4m3(c) for c in codes]).reshape(shape)
    grid = np.frombuffer(scales, np.float32).reshape(-(-shape[0] // 128), -(-shape[1] // 128))
    rows, columns = np.indices(shape)
    return (values * grid.astype(np.float64)[rows // 128, columns // 128]).astype(np.float32).astype(ml_dtypes.bfloat16)


def tensors_by_the_public_package(folder: Path) -> dict[str, np.ndarray]:
    result = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="np") as f:
            assert f.metadata() == {"format": "pt"}
            result |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    return result


def test_cast(v3_source, tmp_path):
    (line,) = cast(str(v3_source), str(tmp_path / "out"))
    source, got = hf_folder.read(v3_source), tensors_by_the_public_package(tmp_path / "out")
    fp8 = {n for n, t in source.items() if t[0] == "F8_E4M3"}
    assert line.startswith(f"cast {len(fp8)} FP8 tensors")
    assert got.keys() == {n for n in source if not n.endswith("_scale_inv")}
    for name, array in got.items():
        dtype, shape, data = source[name]
        assert list(array.shape) == shape
        if name in fp8:
            want = naive(data, source[name + "_scale_inv"][2], shape)
            assert array.dtype == ml_dtypes.bfloat16 and array.tobytes() == want.tobytes(), name
        else:
            assert array.tobytes() == data and array.dtype == {"BF16": ml_dtypes.bfloat16, "F32": np.float32}[dtype]
    index = json.loads((tmp_path / "out" / hf_folder.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in got.values())
    assert index["weight_map"].keys() == got.keys()
    where = {n: s.name for s in (tmp_path / "out").glob("*.safetensors") for n in hf_folder.read_shard(s)}
    assert index["weight_map"] == where
    config, before = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "out", v3_source))
    assert config == {k: v for k, v in before.items() if k != "quantization_config"}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= set(os.listdir(tmp_path / "out"))
    assert set(os.listdir(tmp_path)) == {"out"} and ".casting.json" not in os.listdir(tmp_path / "out")
    preflight.inspect(tmp_path / "out")  # and convert takes it


def test_small_pieces_change_nothing(v3_source, tmp_path, monkeypatch):
    cast(str(v3_source), str(tmp_path / "a"))
    monkeypatch.setattr(cast_module, "_PIECE", 1000)
    cast(str(v3_source), str(tmp_path / "b"))
    for shard in (tmp_path / "a").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "b" / shard.name).read_bytes()


def test_v32_and_unknown_tensors_are_carried_through(v3, tmp_path):
    """Also of a family that convert refuses, and of types that nothing here computes with."""
    added = {
        "model.layers.0.self_attn.indexer.wk.weight": ("F8_E4M3", [130, 200], bytes(range(250)) * 104),
        "model.layers.0.self_attn.indexer.wk.weight_scale_inv": ("F32", [2, 2], np.float32([0.5, 1, 2, 3]).tobytes()),
        "model.layers.0.self_attn.indexer.k_norm.bias": ("F32", [3], bytes(range(12))),
        "something.new": ("I64", [2], bytes(range(16))),
    }  # fmt: skip
    hf_folder.edit(v3, added)
    hf_folder.set_config(v3, model_type="deepseek_v32", index_topk=2048)
    (v3 / "modeling_deepseek.py").write_text("# for other software")
    cast(str(v3), str(tmp_path / "out"))
    got = hf_folder.read(tmp_path / "out")
    assert got["something.new"] == added["something.new"]
    assert got["model.layers.0.self_attn.indexer.k_norm.bias"] == added["model.layers.0.self_attn.indexer.k_norm.bias"]
    name = "model.layers.0.self_attn.indexer.wk.weight"
    assert got[name] == ("BF16", [130, 200], naive(added[name][2], added[name + "_scale_inv"][2], [130, 200]).tobytes())
    assert (tmp_path / "out" / "modeling_deepseek.py").exists()


def test_exponent_scales(v3, tmp_path):
    name = DOWN + "_scale_inv"
    raw = np.array([120, 127, 130, 1], np.uint8)[: np.prod(hf_folder.read(v3)[name][1])]
    hf_folder.edit(v3, {name: ("F8_E8M0", hf_folder.read(v3)[name][1], raw.tobytes())})
    cast(str(v3), str(tmp_path / "out"))
    _, shape, data = hf_folder.read(v3)[DOWN]
    scales = np.exp2(raw.astype(np.float64) - 127).astype(np.float32)
    assert hf_folder.read(tmp_path / "out")[DOWN][2] == naive(data, scales.tobytes(), shape).tobytes()


def refused(source: Path, *words: str) -> None:
    target = source.parent / "out"
    with pytest.raises(ValueError) as e:
        cast(str(source), str(target))
    for word in words:
        assert word in str(e.value)
    assert not target.exists() and not Path(f"{target}.casting").exists()


def test_faults_before_a_byte_is_written(v3, v2_source, v3_converted):
    other = "model.layers.0.self_attn.q_a_proj.weight"
    dtype, _, data = hf_folder.read(v3)[other + "_scale_inv"]
    hf_folder.edit(v3, {DOWN + "_scale_inv": None, other + "_scale_inv": (dtype, [2, 1], data)})
    refused(v3, "FP8 weights without their scales", DOWN, f"{other}_scale_inv is F32 [2, 1], expected F32 [1, 2]", "2 faults")
    hf_folder.edit(v3, {DOWN: None, other: None, other + "_scale_inv": None, DOWN + "_scale_inv": ("F32", [2, 2], bytes(16))})
    refused(v3, "scales without an FP8 weight", DOWN)
    sorted(v3.glob("*.safetensors"))[2].unlink()
    refused(v3, "shards that the index names and that are not there")
    refused(v2_source, "no tensor is FP8")
    refused(v3_converted, "made by convert.py")
    hf_folder.set_config(v3, quantization_config={"quant_method": "awq"})
    refused(v3, "'awq'")


def test_interrupted(v3_source, tmp_path, monkeypatch):
    """No half output looks complete, and the same command goes on."""
    cast(str(v3_source), str(tmp_path / "whole"))
    replace, count = os.replace, []

    def die(a, b):
        count.append(b)
        if str(b).endswith("00003-of-000004.safetensors"):
            raise KeyboardInterrupt
        replace(a, b)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cast_module.os, "replace", die)
        cast(str(v3_source), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert "config.json" not in os.listdir(tmp_path / "out.casting")
    first = next((tmp_path / "out.casting").glob("*00001*.safetensors"))
    written = first.stat().st_mtime_ns
    cast(str(v3_source), str(tmp_path / "out"))
    assert (tmp_path / "out" / first.name).stat().st_mtime_ns == written
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "whole"))
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_script_in_little_memory_without_jax_or_torch(tmp_path):
    """300 MB cast: the process stays under 250 MB, and neither jax nor torch is loaded."""
    config = hf_folder.V3 | {"hidden_size": 1024, "moe_intermediate_size": 1024, "n_routed_experts": 32, "num_hidden_layers": 3}
    size = hf_folder.make_large(tmp_path / "hf", config)
    assert size > 200e6
    flags = [f"--input_fp8_hf_path={tmp_path / 'hf'}", f"--output_bf16_hf_path={tmp_path / 'out'}"]
    status, peak, imported, said = hf_folder.run_measured("fp8_cast_bf16", *flags)
    assert status == 0, said
    assert not set(imported) & {"torch", "triton", "jax"}
    print(f"peak {peak / 1e6:.0f} MB for {size / 1e6:.0f} MB")
    assert peak < 250e6
