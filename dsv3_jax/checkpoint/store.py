"""The converted checkpoint: reading its config, describing its arrays, loading them onto a mesh."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import jax
import numpy as np
from absl import logging
from orbax.checkpoint import v1 as ocp

from dsv3_jax.checkpoint.layout import NUMPY, Layout
from dsv3_jax.checkpoint.names import SCALE, targets
from dsv3_jax.checkpoint.source import INDEX, MARKER, read_json, resolve
from dsv3_jax.checkpoint.workfolder import FORMAT
from dsv3_jax.config import ModelConfig

ITEM = "state"  # the folder in which Orbax v1 keeps the arrays of ocp.save
_REMEDY = "convert the checkpoint again, or let verify.py name every array that differs from its source"
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
    config, params = read_config(path), os.path.join(path, "params")
    try:
        with _one_error(params):
            return _described(params)
    except ValueError as e:
        fault = e
    _check_files(path, targets(config))  # Orbax does not say which array is damaged
    raise fault


def load_params(ckpt_path: str | os.PathLike, abstract: dict) -> dict:
    """Load the arrays that `abstract` names, each device its own share, as a nested dict of jax.Array.

    `abstract` is a nested dict of jax.ShapeDtypeStruct with a sharding; arrays that it leaves out stay on disk. Plain
    floats come in the dtype that is stored. Raises one ValueError that lists every path, shape or FP8 dtype that differs, or
    every file that is missing or cut short (before anything is loaded), or names what Orbax could not read.
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
    _check_files(path, wanted)
    # Orbax casts to the dtype that it is asked for without a word, so it is asked for the stored one.
    asked = {name: jax.ShapeDtypeStruct(want.shape, there[name].dtype, sharding=want.sharding) for name, want in wanted.items()}
    with _one_error(os.path.join(path, "params")), _quiet(), _context(asked):
        return ocp.load(os.path.join(path, "params"), _nest(asked))


def _check_files(path: str, names: Iterable[str]) -> None:
    """Check that every file of these arrays is there and has its size; ValueError lists those that are not."""
    faults: list[str] = []
    for name in names:
        folder = os.path.join(path, "params", ITEM, name)
        try:
            faults += Layout.read(folder).damaged_blocks(folder)
        except ValueError as e:
            faults.append(str(e))
    if faults:
        raise _damaged(path, faults)


def _damaged(path: str, faults: list[str]) -> ValueError:
    lines = [f.removeprefix(path + os.sep) for f in faults[:10]] + ([f"... and {len(faults) - 10} more"] if len(faults) > 10 else [])
    return ValueError(f"{path}: damaged, {len(faults)} files are missing or not whole; {_REMEDY}:\n  " + "\n  ".join(lines))


@contextmanager
def _one_error(params: str) -> Iterator[None]:
    """Turn whatever Orbax raises into one ValueError with the last line of its first cause, and let nothing else be printed.

    Reads that Orbax abandons after a failure each end in a traceback of their own, some of them later: hence the hook stays.
    """
    unraisable, before = sys.unraisablehook, sys.exception()

    def abandoned(value: object) -> bool:
        return str(value).startswith(("Event loop is closed", "Encountered error while reading array"))

    sys.unraisablehook = lambda args: None if abandoned(args.exc_value) else unraisable(args)
    try:
        yield
    except Exception as e:
        first: BaseException = e
        while True:
            cause = first.exceptions[0] if isinstance(first, BaseExceptionGroup) else first.__cause__ or first.__context__
            if cause is None or cause is before:
                break
            first = cause
        last = f"{type(first).__name__}: {(str(first).strip().splitlines() or [''])[-1][:400]}"
        if isinstance(first, MemoryError) or "RESOURCE_EXHAUSTED" in str(first):
            raise ValueError(f"{params}: does not fit into memory; use more devices ({last})") from None
        raise ValueError(f"{params}: cannot be read ({last}); if files are damaged, {_REMEDY}") from None
    sys.unraisablehook = unraisable


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
    if not isinstance(tree, dict):  # as when one array's folder is gone
        raise ValueError("Orbax describes no arrays, its metadata is damaged")
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
