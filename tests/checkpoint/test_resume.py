"""A kill at any moment loses nothing, a half-made checkpoint never looks complete, and memory keeps to its budget."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hf_folder
import pytest

from dsv3_jax.checkpoint import convert as convert_module
from dsv3_jax.checkpoint import store, workfolder
from dsv3_jax.checkpoint.convert import convert

ROOT = Path(__file__).parents[2]
LARGE = hf_folder.V3 | {
    "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 768, "n_routed_experts": 32, "vocab_size": 8000,
    "q_lora_rank": 512, "kv_lora_rank": 256, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 5,
}  # fmt: skip


def start(*flags: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "scripts" / "convert.py"), *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def blocks(folder: Path) -> dict[str, int]:
    """The blocks that are there, with their times; those still under their lock name do not count."""
    files = [p for p in folder.rglob("*") if "/c/" in str(p) and p.name.isdecimal() and p.is_file()]
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in files}


def contents(folder: Path) -> dict[str, bytes]:
    """A hash of every file but those that hold the time of the run."""
    skip = ("dsv3_jax.json", "_CHECKPOINT_METADATA", "commit_success.txt")
    files = [p for p in folder.rglob("*") if p.is_file() and p.name not in skip]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).digest() for p in files}


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "hf"
    hf_folder.make_large(folder, LARGE | {"num_hidden_layers": 4})
    return folder


def test_peak_memory_and_kill_9_at_several_moments(large, tmp_path):
    """Several times the budget: killed three times, finished, equal to what one run makes; each run in budget."""
    size = sum(p.stat().st_size for p in large.iterdir())
    assert size > 5 * 70e6
    flags = [f"--hf_ckpt_path={large}", "--max_host_memory_gb=0.07"]
    status, peak, _, said = hf_folder.run_measured("convert", *flags, f"--save_path={tmp_path / 'whole'}")
    assert status == 0, said
    print(f"peak {peak / 1e6:.0f} MB for {size / 1e6:.0f} MB")
    assert peak < 70e6 + 300e6
    expected, work = blocks(tmp_path / "whole"), tmp_path / "out.converting"
    for moment in (0.02, 0.4, 0.9):
        before = blocks(work)
        process = start(*flags, f"--save_path={tmp_path / 'out'}")
        deadline = time.monotonic() + 60
        while len(blocks(work)) < max(moment * len(expected), len(before) + 1):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.03)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "out").exists()
        with pytest.raises(ValueError, match="not finished; run the same"):
            store.read_config(tmp_path / "out")
        after = blocks(work)
        assert {n: after[n] for n in before} == before  # what was written is not written again
    process = start(*flags, f"--save_path={tmp_path / 'out'}")
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "continuing in" in said
    assert not work.exists()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("place", ["write_metadata", "write_bytes", "commit", "sync_folder"])
def test_interrupted_at_the_end(v3_source, v3_converted, tmp_path, monkeypatch, place):
    """Each step after the last block, cut off before or in the middle."""

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if place == "sync_folder":  # just before the rename, the folder already marked complete
            patch.setattr(workfolder, place, die)
        elif place == "write_metadata":
            patch.setattr(store, "_described", die)
        else:
            patch.setattr(convert_module, place, die)
        with pytest.raises(KeyboardInterrupt):
            convert(str(v3_source), str(tmp_path / "out"))
    with pytest.raises(ValueError, match="not finished"):
        store.read_config(tmp_path / "out")
    convert(str(v3_source), str(tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(v3_converted)
    assert os.listdir(tmp_path) == ["out"]


def unfinished(source: Path, save: Path, monkeypatch) -> None:
    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(convert_module, "commit", die)
        convert(str(source), str(save))


def test_source_changed_between_runs(v3, monkeypatch):
    save = v3.parent / "out"
    unfinished(v3, save, monkeypatch)
    shard = sorted(v3.glob("*.safetensors"))[1]
    os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 10**9))
    with pytest.raises(ValueError, match=f"the source changed since this run began .*{shard.name}.*remove {save}.converting"):
        convert(str(v3), str(save))


def test_flags_changed_between_runs(v3, monkeypatch):
    save = v3.parent / "out"
    unfinished(v3, save, monkeypatch)
    with pytest.raises(ValueError, match="begun with skip_mtp=False, now skip_mtp=True"):
        convert(str(v3), str(save), skip_mtp=True)
    convert(str(v3), str(save), max_host_memory_gb=0.2)  # the budget may change: the blocks stay as they were begun


def test_a_block_of_the_wrong_size_is_written_again(v3, v3_converted, monkeypatch):
    save = v3.parent / "out"
    unfinished(v3, save, monkeypatch)
    block = next(p for p in Path(f"{save}.converting").rglob("*") if p.is_file() and "/c/" in str(p) and p.stat().st_size > 1000)
    os.truncate(block, 500)
    convert(str(v3), str(save))
    assert contents(save) == contents(v3_converted)


def test_a_second_run_at_the_same_time_is_refused(v3_source, tmp_path):
    with workfolder.locked(str(tmp_path / "out.converting")), pytest.raises(ValueError, match="another process is writing there"):
        convert(str(v3_source), str(tmp_path / "out"))


def test_target_that_appears_after_the_checks(v3_source, tmp_path, monkeypatch):
    """A second run that starts while the first one commits: refused at once, not after writing everything."""
    real = workfolder.locked

    def first_run_finishes(folder):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").touch()
        return real(folder)

    def never(*_):
        raise AssertionError("wrote blocks")

    monkeypatch.setattr(convert_module, "locked", first_run_finishes)
    monkeypatch.setattr(convert_module, "_write_blocks", never)
    with pytest.raises(ValueError, match="exists already"):
        convert(str(v3_source), str(tmp_path / "out"))
    assert os.listdir(tmp_path) == ["out"]


def test_folder_that_is_renamed_while_it_is_locked(tmp_path, monkeypatch):
    """The lock of a folder that the first run has put in place by now must not count as the working folder's."""
    real, work = workfolder.fcntl.flock, tmp_path / "out.converting"

    def renamed_before(descriptor, operation):
        if not (tmp_path / "out").exists():
            os.rename(work, tmp_path / "out")
        real(descriptor, operation)

    monkeypatch.setattr(workfolder.fcntl, "flock", renamed_before)
    with workfolder.locked(str(work)):
        assert sorted(os.listdir(tmp_path)) == ["out", "out.converting"]
        with pytest.raises(ValueError, match="another process is writing there"), workfolder.locked(str(work)):
            pass
    assert os.listdir(tmp_path) == ["out"]


def test_strangers_in_the_working_folder(v3_source, tmp_path):
    (tmp_path / "out.converting").mkdir()
    (tmp_path / "out.converting" / "mine.txt").touch()
    with pytest.raises(ValueError, match=r"not of an unfinished run \(mine.txt\)"):
        convert(str(v3_source), str(tmp_path / "out"))
    (tmp_path / "out.converting" / "mine.txt").unlink()
    (tmp_path / "out.converting" / "dsv3_jax.json").write_text(json.dumps({"format": 0, "flags": {}, "source": {}}))
    with pytest.raises(ValueError, match="begun by another version"):
        convert(str(v3_source), str(tmp_path / "out"))


def test_each_device_reads_about_its_share(tmp_path):
    """What Orbax reads from disk for one of 8 devices, counted by tensorstore, for experts cut by expert, row and column."""
    config = LARGE | {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "moe_intermediate_size": 1024}
    hf_folder.make_large(tmp_path / "hf", config)
    convert(str(tmp_path / "hf"), str(tmp_path / "out"))
    code = """
import sys, jax, tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec as P
from dsv3_jax.checkpoint import store
metric = "/tensorstore/kvstore/file/bytes_read"
read = lambda: sum(v["value"] for m in ts.experimental_collect_matching_metrics(metric) for v in m["values"])
mesh = jax.make_mesh((8,), ("model",))
for name in ("layers.1.mlp.experts.gate_up_proj.weight", "layers.1.mlp.experts.down_proj.weight", "layers.0.self_attn.o_proj.weight"):
    leaf = store.stored(sys.argv[1])[name]
    for axis in range(len(leaf.shape)):
        if leaf.shape[axis] % 8: continue
        spec = [None] * len(leaf.shape); spec[axis] = "model"
        sharded = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P(*spec)))
        before = read()
        store.load_params(sys.argv[1], store._nest({name: sharded}))
        print(name, axis, (read() - before) / (leaf.size * leaf.dtype.itemsize))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    ratios = [float(line.split()[-1]) for line in run.stdout.splitlines()]
    assert len(ratios) == 8 and all(1.0 <= r < 1.01 for r in ratios[:6]) and max(ratios) < 1.1, run.stdout
