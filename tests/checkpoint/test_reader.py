"""The safetensors reader against the public package, and what it says of files that are not whole."""

import hf_folder
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dsv3_jax.checkpoint.safetensors_reader import open_files, read_header, scales_to_float32


def read_all(path):
    header, result = read_header(str(path)), {}
    with open_files() as files:
        for name, tensor in header.items():
            result[name] = np.empty(tensor.nbytes, np.uint8)
            files.read(tensor, result[name])
    return header, result


def test_reads_what_the_public_package_writes(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal((7,)).astype(np.float16),
        "c": rng.standard_normal((2, 3, 4)).astype(ml_dtypes.bfloat16),
        "d": rng.integers(0, 255, (6, 6)).astype(np.uint8),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header, data = read_all(tmp_path / "x.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in header.items()} == {
        "a": ("F32", (3, 5)), "b": ("F16", (7,)), "c": ("BF16", (2, 3, 4)), "d": ("U8", (6, 6)), "empty": ("F32", (0, 4)),
    }  # fmt: skip
    for name, array in tensors.items():
        assert data[name].tobytes() == array.tobytes()


def test_part_of_a_tensor(v3_source):
    shard = next(iter(sorted(v3_source.glob("*.safetensors"))))
    name, (_, _, data) = next((n, e) for n, e in hf_folder.read_shard(shard).items() if len(e[2]) > 5000)
    out = np.empty(1000, np.uint8)
    with open_files() as files:
        files.read(read_header(str(shard))[name], out, 2345)
    assert out.tobytes() == data[2345:3345]


def test_files_that_are_not_whole(tmp_path):
    hf_folder.write_shard(whole := tmp_path / "whole.safetensors", {"a": ("F32", [4, 4], bytes(64)), "b": ("F8_E4M3", [3], b"abc")})
    data = whole.read_bytes()
    length = int.from_bytes(data[:8], "little")
    broken = b'{"a":{"dtype":"F32","shape":[4,4],"data_offsets":[0,60]}}'
    cases = {
        data[:-10]: f"truncated: {len(data) - 10:,} bytes, its header describes {len(data):,}",
        data[:30]: f"truncated: 30 bytes, its header alone has {8 + length:,}",
        data[:5]: "truncated: 5 bytes, less than a safetensors header",
        b"": "truncated: 0 bytes",
        data + b"x": "longer than its header says",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n": "a Git-LFS pointer of 63 bytes",
        b"\x80\x02}q\x00(X\x01" + bytes(90): "not a safetensors file",
        (20).to_bytes(8, "little") + b"{" * 20 + bytes(50): "broken safetensors header",
        len(broken).to_bytes(8, "little") + broken + bytes(60): "the bytes of a do not match its shape",
    }
    for content, message in cases.items():
        (path := tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(ValueError) as e:
            read_header(str(path))
        assert str(e.value).startswith(str(path)) and message in str(e.value)


def test_scales_from_exponent_bytes():
    """2^(byte - 127), exact for all 255 bytes, as ml_dtypes' own E8M0 has it."""
    raw = np.arange(256, dtype=np.uint8)
    expected = raw.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    for dtype, stored in (("U8", raw), ("F8_E8M0", raw.view(ml_dtypes.float8_e8m0fnu))):
        scales = scales_to_float32(stored, dtype)
        assert scales.dtype == np.float32
        np.testing.assert_array_equal(scales, expected)
    assert scales_to_float32(raw, "U8")[[0, 126, 127, 130]].tolist() == [2.0**-127, 0.5, 1.0, 8.0]
