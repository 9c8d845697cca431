"""A damaged checkpoint: what is missing or changed is named in one error, before anything is loaded where a size shows it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsv3_jax.checkpoint import store
from dsv3_jax.checkpoint.verify import verify

ROOT = Path(__file__).parents[2]
NAME = "layers.1.mlp.experts.down_proj.weight"


@pytest.fixture
def damaged(v3_converted, tmp_path) -> Path:
    """A copy, to be damaged."""
    return shutil.copytree(v3_converted, tmp_path / "out")


def files(folder: Path, name: str = NAME) -> list[Path]:
    return sorted(p for p in (folder / "params" / "state" / name / "c").rglob("*") if p.is_file())


def load(folder: Path, *names: str) -> dict:
    whole = NamedSharding(jax.make_mesh((1,), ("model",), devices=jax.devices()[:1]), P())
    there = store.stored(folder)
    asked = {n: jax.ShapeDtypeStruct(there[n].shape, there[n].dtype, sharding=whole) for n in names or there}
    return store.load_params(folder, store._nest(asked))


def refused(folder: Path, *words: str, names: tuple[str, ...] = ()) -> str:
    with pytest.raises(ValueError) as e:
        load(folder, *names)
    for word in words:
        assert word in str(e.value)
    chained = None if e.value.__suppress_context__ else e.value.__context__
    assert e.value.__cause__ is None and isinstance(chained, (KeyError, type(None)))  # what Orbax raises would fill screens
    return str(e.value)


def test_missing_and_truncated_files_are_named_before_anything_is_loaded(damaged, monkeypatch):
    def never(*_):
        raise AssertionError("loaded")

    monkeypatch.setattr(store.ocp, "load", never)  # which would be "cannot be read", not "damaged"
    cut, gone = files(damaged)[0], files(damaged, "norm.weight")[0]
    size = cut.stat().st_size
    os.truncate(cut, size - 1)
    gone.unlink()
    message = refused(damaged, "damaged, 2 files", "convert the checkpoint again", "verify.py")
    for line in (f"{cut.relative_to(damaged)}: {size - 1:,} bytes, should be {size:,}", f"{gone.relative_to(damaged)}: missing"):
        assert line in message.splitlines()[1] + message.splitlines()[2]
    monkeypatch.undo()
    assert list(load(damaged, "lm_head.weight")) == ["lm_head"]  # what is not asked for may be damaged


def test_many_damaged_files_are_counted(damaged):
    every = [n for n in store.stored(damaged) if n.startswith("layers.0.")]
    for name in every:
        for file in files(damaged, name):
            os.truncate(file, 0)
    message = refused(damaged, f"damaged, {len(every)} files", f"... and {len(every) - 10} more")
    assert len(every) > 10 and len(message.splitlines()) == 12


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        (f"params/state/{NAME}/zarr.json", None, f"{NAME}/zarr.json: missing"),
        (f"params/state/{NAME}/zarr.json", "{", f"{NAME}/zarr.json: not as convert.py writes it"),
        ("params/state/_METADATA", None, "cannot be read"),
        ("params/state/_METADATA", "{", "its metadata is damaged"),
        ("params/_CHECKPOINT_METADATA", None, "_CHECKPOINT_METADATA"),
    ],
)
def test_damaged_descriptions(damaged, file, text, words):
    (damaged / file).unlink() if text is None else (damaged / file).write_text(text)
    try:
        raise KeyError("an error that the caller is handling is none of Orbax's")
    except KeyError:
        message = refused(damaged, words, "convert the checkpoint again")
    assert "KeyError" not in message


@pytest.mark.parametrize("name", [NAME, "norm.weight", "layers.0.self_attn.o_proj.weight_scale_inv"])
def test_one_flipped_bit_is_refused_on_load_and_by_verify(damaged, v3_source, name):
    """Anywhere in the file: codes, scales, plain floats and the index each stand under a checksum."""
    file = files(damaged, name)[0]
    good = file.read_bytes()
    for at in (0, len(good) // 2, len(good) - 7):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        refused(damaged, str(file), "Digest mismatch", "convert the checkpoint again", names=(name,))
    with pytest.raises(ValueError, match=rf"{name}.*cannot be read; convert again .*Digest mismatch"):
        verify(str(v3_source), str(damaged))
    file.write_bytes(good)
    load(damaged, name)


def test_a_failed_load_prints_nothing_else(damaged):
    """Orbax's abandoned reads would each print a traceback, about 2,000 lines for this small checkpoint."""
    for name in store.stored(damaged):
        file = files(damaged, name)[0]
        data = file.read_bytes()
        file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    code = """
import sys, jax
from jax.sharding import SingleDeviceSharding
from dsv3_jax.checkpoint import store
whole = SingleDeviceSharding(jax.devices()[0])
asked = {n: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=whole) for n, s in store.stored(sys.argv[1]).items()}
try:
    store.load_params(sys.argv[1], store._nest(asked))
except ValueError as e:
    print(e)
"""
    command = [sys.executable, "-c", code, str(damaged)]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert run.returncode == 0 and len(run.stdout.splitlines()) == 1 and "Digest mismatch" in run.stdout, run.stdout
    assert run.stderr == ""
