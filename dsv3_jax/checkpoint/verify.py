"""Compares a converted checkpoint with its source, bit for bit, and names every value that is not a number."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import tensorstore as ts
from tqdm import tqdm

from dsv3_jax.checkpoint import preflight, store
from dsv3_jax.checkpoint.layout import NUMPY, Layout, pieces_in
from dsv3_jax.checkpoint.names import Target
from dsv3_jax.checkpoint.parallel import each
from dsv3_jax.checkpoint.safetensors_reader import DTYPES, Tensor, open_files, scales_to_float32
from dsv3_jax.checkpoint.source import MARKER, human, read_json, resolve, side_files

_WORKERS = 4
# The bits that are all set in a value that is infinite or not a number (e4m3fn has no infinity, E8M0 neither).
_NOT_FINITE = {"F32": (np.uint32, 0x7F800000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00), "F8_E4M3": (np.uint8, 0x7F)}
Job = tuple[str, Target, Layout, ts.TensorStore, tuple[int, ...]]


@dataclasses.dataclass
class Report:
    """What verify found: differences and values that are not finite, one line each; both empty for a good checkpoint."""

    tensors: int
    nbytes: int
    different: list[str]
    not_finite: list[str]


class _Tally:
    """Counts findings by tensor, with the first place of each; threads may add at once."""

    def __init__(self):
        self._found: dict[str, tuple[int, tuple[int, ...], str]] = {}
        self._lock = threading.Lock()

    def add(self, tensor: Tensor, first_row: int, where: np.ndarray, show: Callable[[tuple[int, ...]], str]) -> None:
        """Record the places where the mask of rows from first_row on is true."""
        count = int(np.count_nonzero(where))
        if not count:
            return
        local = tuple(int(i) for i in np.unravel_index(int(np.argmax(where)), where.shape))
        place = (local[0] + first_row, *local[1:])
        with self._lock:
            n, earliest, shown = self._found.get(tensor.name, (0, place, show(local)))
            if place < earliest:
                earliest, shown = place, show(local)
            self._found[tensor.name] = (n + count, earliest, shown)

    def lines(self, what: str) -> list[str]:
        """Return one line a tensor: its name, how many values, the first place and what is there."""
        return [f"{name}: {n:,} {what}, first at {list(place)}: {shown}" for name, (n, place, shown) in sorted(self._found.items())]


def verify(hf_ckpt_path: str, ckpt_path: str) -> Report:
    """Compare every source tensor with the checkpoint, streaming, and the files beside the weights as well.

    Scales that are stored as E8M0 or U8 bytes are compared as the float32 that they stand for. MTP layers that were skipped
    when converting are skipped here. Raises ValueError when either folder is not what it should be.
    """
    hf_ckpt_path, ckpt_path = resolve(hf_ckpt_path), resolve(ckpt_path)
    there = store.stored(ckpt_path)
    source = preflight.inspect(hf_ckpt_path, skip_mtp=_skipped_mtp(os.path.join(ckpt_path, MARKER)))
    different = [f"{path}: in the checkpoint, but the source has nothing for it" for path in sorted(there.keys() - source.targets.keys())]
    comparable = {}
    for path, target in source.targets.items():
        have, dtype = there.get(path), source.dtype(target)
        if have is None:
            different.append(f"{path}: missing in the checkpoint")
        elif (have.shape, str(have.dtype)) != (target.shape, dtype):
            different.append(f"{path}: {have.dtype} {have.shape} in the checkpoint, {dtype} {target.shape} in the source")
        else:
            comparable[path] = target
    values, not_finite = _Tally(), _Tally()
    _compare(comparable, source, os.path.join(ckpt_path, "params", store.ITEM), values, not_finite)
    different += values.lines("values differ")
    for name in side_files(hf_ckpt_path):
        with open(os.path.join(hf_ckpt_path, name), "rb") as f:
            expected = source.config_text if name == "config.json" else f.read()
        kept = os.path.join(ckpt_path, name)
        if not os.path.exists(kept):
            different.append(f"{name}: missing beside the checkpoint")
        else:
            with open(kept, "rb") as f:
                if f.read() != expected:
                    different.append(f"{name}: not the source's")
    tensors = sum(len(t.pieces) for t in source.targets.values())
    return Report(tensors, source.nbytes, different, not_finite.lines("values not finite or, for scales, not positive"))


def _skipped_mtp(marker: str) -> bool:
    flags = read_json(marker).get("flags")
    skipped = flags.get("skip_mtp") if isinstance(flags, dict) else None
    if not isinstance(skipped, bool):
        raise ValueError(f"{marker}: flags = {flags!r}: must say whether skip_mtp was given; the file was changed: convert again")
    return skipped


def _compare(targets: dict[str, Target], source: preflight.Source, folder: str, different: _Tally, not_finite: _Tally) -> None:
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})

    def jobs() -> Iterator[Job]:
        for path, target in targets.items():
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": os.path.join(folder, path) + "/"}}
            opened = ts.open({**spec, "fill_missing_data_reads": False}, open=True, read=True, context=context).result()
            grids = opened.chunk_layout.write_chunk, opened.chunk_layout.read_chunk
            block, chunk = (tuple(int(n or 1) for n in grid.shape or ()) for grid in grids)
            array = Layout(target.shape, source.dtype(target), block, chunk)
            yield from ((path, target, array, opened, block) for block in array.blocks())

    def compare(job: Job) -> None:
        path, target, array, opened, block = job
        region = array.region(block)
        try:
            got = np.asarray(opened[region].read().result())
        except ValueError as e:  # tensorstore's word for a block that is missing, cut short or has a wrong checksum
            why = str(e).rpartition('": ')[2][:200]  # behind the file's name
            raise ValueError(f"{os.path.join(folder, path, array.file(block))}: cannot be read; convert again ({why})") from e
        for name, place, first in pieces_in(region, target):
            tensor, have = source.folder.tensors[name], got[place]
            raw = np.empty(have.shape, DTYPES[tensor.dtype])
            files.read(tensor, raw, first * int(np.prod(tensor.shape[1:])) * raw.dtype.itemsize)
            want = raw if raw.dtype == have.dtype else scales_to_float32(raw, tensor.dtype)
            bits = np.dtype(f"u{have.dtype.itemsize}")
            differs = want.view(bits) != np.ascontiguousarray(have).view(bits)
            different.add(tensor, first, differs, lambda i, w=want, h=have: f"{w[i]} in the source, {h[i]} in the checkpoint")
            not_finite.add(tensor, first, _suspect(raw, tensor.dtype, target.kind), lambda i, r=raw: str(r[i]))
        bar.update(array.region_bytes(block))

    total = sum(int(np.prod(t.shape)) * NUMPY[source.dtype(t)].itemsize for t in targets.values())
    with open_files() as files, tqdm(total=total, unit="B", unit_scale=True, desc="verify", mininterval=0.5) as bar:
        each(jobs(), compare, min(_WORKERS, os.cpu_count() or 1))


def _suspect(raw: np.ndarray, dtype: str, kind: str) -> np.ndarray:
    """Return a mask of the values that no good checkpoint has: NaN and infinity, and scales that are not positive."""
    if dtype in ("F8_E8M0", "U8"):
        return raw.view(np.uint8) == 255
    unsigned, exponent = _NOT_FINITE[dtype]
    bad = (raw.view(unsigned) & exponent) == exponent
    return bad | (raw <= 0) if kind == "scale" else bad


def summary(report: Report, shown: int = 20) -> str:
    """Say what verify found in a few lines, at most `shown` of each kind."""
    lines = []
    for title, found in (("different", report.different), ("not finite", report.not_finite)):
        lines += [f"{title}: {line}" for line in found[:shown]]
        if len(found) > shown:
            lines.append(f"... and {len(found) - shown} more {title}")
    size = f"{report.tensors:,} source tensors, {human(report.nbytes)}"
    if report.different:
        lines.append(f"NOT EQUAL: {len(report.different)} differences in {size}")
    else:
        but = f"; but {len(report.not_finite)} tensors hold values that are not finite" if report.not_finite else ""
        lines.append(f"equal bit for bit: {size}{but}")
    return "\n".join(lines)
