"""The converted checkpoint: reading its config, describing its arrays, loading them onto a mesh."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from absl import logging
from orbax.checkpoint import v1 as ocp

from dsv3_jax.checkpoint.layout import NUMPY, Layout
from dsv3_jax.checkpoint.names import SCALE
from dsv3_jax.checkpoint.source import INDEX, MARKER, read_json, resolve
from dsv3_jax.checkpoint.workfolder import FORMAT
from dsv3_jax.config import ModelConfig

ITEM = "state"  # the folder in which Orbax v1 keeps the arrays of ocp.save
_PLAIN = ("bfloat16", "float16", "float32")


def read_config(ckpt_path: str | os.PathLike) -> ModelConfig:
    """Return the config of a converted checkpoint.

    Raises ValueError that says what the folder is and which command to run, when it is not a finished converted checkpoint.
    """
    path = resolve(ckpt_path)
    if not os.path.isdir(path):
        if os.path.isdir(path + ".converting"):
            raise ValueError(f"{path}: the conversion was not finished; run the same convert.py command again to go on")
        found = "is a file, not a folder" if os.path.exists(path) else "does not exist"
        raise ValueError(f"{path}: {found}; give the folder that convert.py made")
    marker = os.path.join(path, MARKER)
    if not os.path.exists(marker):
        if os.path.exists(os.path.join(path, INDEX)) or any(n.endswith(".safetensors") for n in os.listdir(path)):
            command = f"convert.py --hf_ckpt_path={path} --save_path=DIR"
            raise ValueError(f"{path}: a Hugging Face folder, not a converted checkpoint; run `{command}`, then give DIR")
        raise ValueError(f"{path}: not a checkpoint that convert.py made ({MARKER} is missing); give the folder that was its --save_path")
    record = read_json(marker)
    if record.get("format") != FORMAT:
        raise ValueError(f"{marker}: format = {record.get('format')!r}: this version reads format {FORMAT}; convert the checkpoint again")
    if not record.get("complete"):
        raise ValueError(f"{path}: the conversion was not finished; run the same convert.py command again to go on")
    return ModelConfig.from_json(os.path.join(path, "config.json"))


def stored(ckpt_path: str | os.PathLike) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of every stored array by its path, joined by '.', loading none of them."""
    path = resolve(ckpt_path)
    read_config(path)
    return _described(os.path.join(path, "params"))


def load_params(ckpt_path: str | os.PathLike, abstract: dict) -> dict:
    """Load the arrays that `abstract` names, each device its own share, as a nested dict of jax.Array.

    `abstract` is a nested dict of jax.ShapeDtypeStruct with a sharding; arrays that it leaves out stay on disk. Plain
    floats come in the dtype that is stored. Raises one ValueError that lists every path, shape or FP8 dtype that differs.
    """
    path = resolve(ckpt_path)
    there, wanted = stored(path), _flatten(abstract)
    faults = []
    for name, want in wanted.items():
        have = there.get(name)
        if have is None:
            faults.append(f"{name} is not in the checkpoint")
        elif have.shape != want.shape:
            faults.append(f"{name} is {have.shape} in the checkpoint, expected {want.shape}")
        elif have.dtype != want.dtype and (name.endswith(SCALE) or not {str(have.dtype), str(want.dtype)} <= set(_PLAIN)):
            faults.append(f"{name} is {have.dtype} in the checkpoint, expected {want.dtype}")
    if faults:
        more = f"\n  ... and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise ValueError(f"{path}: {len(faults)} arrays do not fit the model:\n  " + "\n  ".join(faults[:20]) + more)
    # Orbax casts to the dtype that it is asked for without a word, so it is asked for the stored one.
    asked = {name: jax.ShapeDtypeStruct(want.shape, there[name].dtype, sharding=want.sharding) for name, want in wanted.items()}
    with _quiet(), _context(asked):
        return ocp.load(os.path.join(path, "params"), _nest(asked))


def write_metadata(params: str, layouts: dict[str, Layout], scratch: str) -> None:
    """Write what Orbax needs to read arrays that lie in `params` already, and check through Orbax that it reads them so.

    Orbax saves a skeleton of one-element arrays; its metadata does not depend on the shapes.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    skeleton = {path: np.zeros((1,) * len(a.shape), NUMPY[a.dtype]) for path, a in layouts.items()}
    made = os.path.join(scratch, "skeleton")
    with _quiet(), _context({}):
        ocp.save(made, _nest(skeleton))
    for folder in (ITEM, ""):
        for name in os.listdir(os.path.join(made, folder)):
            path = os.path.join(folder, name)
            if os.path.isfile(os.path.join(made, path)):
                os.replace(os.path.join(made, path), os.path.join(params, path))
    assert set(os.listdir(os.path.join(params, ITEM))) >= set(os.listdir(os.path.join(made, ITEM))), "Orbax lays arrays out otherwise"
    shutil.rmtree(scratch)
    wrong = {p: s for p, s in _described(params).items() if (s.shape, str(s.dtype)) != (layouts[p].shape, layouts[p].dtype)}
    assert not wrong, wrong


def _described(params: str) -> dict[str, jax.ShapeDtypeStruct]:
    with _quiet(), _context({}):
        tree = ocp.metadata(params).metadata
    if not isinstance(tree, dict):  # Orbax describes nothing when one array's folder is gone
        raise ValueError(f"{params}: damaged, some of its arrays are missing; convert the checkpoint again")
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in _flatten(tree).items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back Orbax's log, some forty lines a call, and a warning that its arrays are not where OCDBT would have them."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _context(asked: dict[str, jax.ShapeDtypeStruct]) -> ocp.Context:
    context = ocp.Context()
    context.array.saving.use_ocdbt = False
    context.array.saving.use_zarr3 = True
    context.array.saving.use_compression = False
    context.array.saving.enable_write_sharding_file = False
    context.array.saving.array_metadata_store = None
    if asked:
        context.pytree.loading.partial_load = True  # the MTP module may stay on disk
        # Orbax raises when a device's share, rounded up to whole chunks, exceeds the limit; twice the largest share is safe.
        shares = (s.sharding.shard_shape(s.shape) if s.sharding is not None else s.shape for s in asked.values())
        largest = max(math.prod(share) * s.dtype.itemsize for share, s in zip(shares, asked.values(), strict=True))
        context.memory.read_concurrent_bytes = max(2 * largest, 4 * 2**30)
    return context


def _flatten(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _nest(flat: dict) -> dict:
    tree: dict = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree
