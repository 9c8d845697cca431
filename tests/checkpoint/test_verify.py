"""verify finds what was changed, and where, and names values that are no numbers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hf_folder
import numpy as np
import pytest

from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.checkpoint.verify import summary, verify

ROOT = Path(__file__).parents[2]
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


def change(folder: Path, name: str, at: int, value, dtype) -> None:
    kind, shape, data = hf_folder.read(folder)[name]
    values = np.frombuffer(data, dtype).copy()
    values[at] = value
    hf_folder.edit(folder, {name: (kind, shape, values.tobytes())})


def test_equal(v3_source, v3_converted, v2_source, v2_converted):
    for source, converted in ((v3_source, v3_converted), (v2_source, v2_converted)):
        report = verify(str(source), str(converted))
        assert (report.different, report.not_finite) == ([], [])
        assert report.tensors == len(hf_folder.read(source))
        assert summary(report).startswith(f"equal bit for bit: {report.tensors} source tensors")


def test_every_tensor_is_compared(v3, v3_converted):
    """One bit changed in each tensor of the source: each is named with its place."""
    changed = {}
    for i, (name, (dtype, shape, data)) in enumerate(hf_folder.read(v3).items()):
        raw = bytearray(data)
        raw[(7919 * i) % len(raw)] ^= 1
        changed[name] = (dtype, shape, bytes(raw))
    hf_folder.edit(v3, changed)
    found = verify(str(v3), str(v3_converted)).different
    assert sorted(line.split(":")[0] for line in found) == sorted(changed)
    assert all(": 1 values differ, first at [" in line for line in found)


def test_place_and_values(v2, v2_converted):
    change(v2, "model.norm.weight", 17, 0x4049, np.uint16)
    change(v2, "model.norm.weight", 200, 0x4049, np.uint16)
    (line,) = verify(str(v2), str(v2_converted)).different
    assert line.startswith("model.norm.weight: 2 values differ, first at [17]: 3.140625 in the source, ")


def test_negative_zero_differs_from_zero(v3, tmp_path):
    change(v3, DOWN, 5, 0x00, np.uint8)
    convert(str(v3), str(tmp_path / "out"))
    change(v3, DOWN, 5, 0x80, np.uint8)
    (line,) = verify(str(v3), str(tmp_path / "out")).different
    assert line.startswith(f"{DOWN}: 1 values differ, first at [0, 5]: -0.0 in the source, 0.0 in the checkpoint")


def test_values_that_are_not_finite(v3):
    change(v3, DOWN, 300, 0x7F, np.uint8)
    change(v3, DOWN, 400, 0xFF, np.uint8)
    change(v3, DOWN + "_scale_inv", 0, np.inf, np.float32)
    change(v3, "model.layers.0.self_attn.q_a_proj.weight_scale_inv", 1, 0.0, np.float32)
    change(v3, "model.layers.0.self_attn.o_proj.weight_scale_inv", 1, -1.0, np.float32)
    change(v3, "model.layers.1.mlp.gate.e_score_correction_bias", 4, np.nan, np.float32)
    change(v3, "model.norm.weight", 9, 0x7F80, np.uint16)
    convert(str(v3), str(v3.parent / "out"))
    report = verify(str(v3), str(v3.parent / "out"))
    assert report.different == []
    what = "values not finite or, for scales, not positive"
    assert report.not_finite == [
        "model.layers.0.self_attn.o_proj.weight_scale_inv: 1 " + what + ", first at [1, 0]: -1.0",
        "model.layers.0.self_attn.q_a_proj.weight_scale_inv: 1 " + what + ", first at [0, 1]: 0.0",
        f"{DOWN}: 2 {what}, first at [1, 108]: nan",
        f"{DOWN}_scale_inv: 1 {what}, first at [0, 0]: inf",
        f"model.layers.1.mlp.gate.e_score_correction_bias: 1 {what}, first at [4]: nan",
        f"model.norm.weight: 1 {what}, first at [9]: inf",
    ]
    assert summary(report).splitlines()[-1].endswith("but 6 tensors hold values that are not finite")


def test_e8m0_scales_are_equal_as_float32(v3):
    name = DOWN + "_scale_inv"
    shape = hf_folder.read(v3)[name][1]
    hf_folder.edit(v3, {name: ("F8_E8M0", shape, bytes([120, 130, 127, 1][: shape[0] * shape[1]]))})
    convert(str(v3), str(v3.parent / "out"))
    assert verify(str(v3), str(v3.parent / "out")).different == []
    change(v3, name, 1, 131, np.uint8)
    (line,) = verify(str(v3), str(v3.parent / "out")).different
    assert "16.0 in the source, 8.0 in the checkpoint" in line


def test_damaged_checkpoint(v3_source, v3_converted, tmp_path):
    copy = shutil.copytree(v3_converted, tmp_path / "out")
    block = next(p for p in (copy / "params" / "state" / "lm_head.weight").rglob("*") if p.is_file() and "/c/" in str(p))
    data = bytearray(block.read_bytes())
    data[100] ^= 4
    block.write_bytes(data)
    (copy / "tokenizer.json").write_text("{}")
    (copy / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=r"lm_head.weight.*cannot be read; convert again .*Digest mismatch"):
        verify(str(v3_source), str(copy))
    data[100] ^= 4
    block.write_bytes(data)
    found = verify(str(v3_source), str(copy)).different
    assert [line.split(":")[0] for line in found] == ["generation_config.json", "tokenizer.json"]
    os.truncate(block, 400)
    with pytest.raises(ValueError, match=r"lm_head.weight.*cannot be read; convert again"):
        verify(str(v3_source), str(copy))
    shutil.rmtree(block.parents[2])
    with pytest.raises(ValueError, match=r"damaged, 1 files .*convert the checkpoint again(.|\n)*lm_head.weight/zarr.json: missing"):
        verify(str(v3_source), str(copy))


@pytest.mark.parametrize("flags", [None, [], {}, {"skip_mtp": "no"}])
def test_marker_without_flags(v3_source, v3_converted, tmp_path, flags):
    marker = shutil.copytree(v3_converted, tmp_path / "out") / "dsv3_jax.json"
    record = json.loads(marker.read_text())
    marker.write_text(json.dumps({k: v for k, v in record.items() if k != "flags"} | ({} if flags is None else {"flags": flags})))
    with pytest.raises(ValueError, match=r"dsv3_jax.json: flags = .*skip_mtp.*convert again"):
        verify(str(v3_source), str(tmp_path / "out"))


def test_skipped_mtp_is_not_a_difference(v3_source, tmp_path):
    convert(str(v3_source), str(tmp_path / "out"), skip_mtp=True)
    assert verify(str(v3_source), str(tmp_path / "out")).different == []


def test_exit_codes(v2, v2_converted):
    def code(source):
        flags = [f"--hf_ckpt_path={source}", f"--ckpt_path={v2_converted}"]
        command = [sys.executable, str(ROOT / "scripts" / "verify.py"), *flags]
        run = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        return run.returncode, run.stdout + run.stderr

    change(v2, "model.norm.weight", 17, 0x4049, np.uint16)
    status, said = code(v2)
    assert status == 1 and "NOT EQUAL: 1 differences" in said and "model.norm.weight" in said
    status, said = code(v2 / "nothing")
    assert status == 2 and "does not exist" in said and "Traceback" not in said
    assert json.loads((v2_converted / "dsv3_jax.json").read_text())["complete"]
