"""From a Hugging Face folder to an Orbax checkpoint: block by block, within a memory budget, resumable, bytes preserved."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import tensorstore as ts
from tqdm import tqdm

from dsv3_jax.checkpoint import layout, preflight, store
from dsv3_jax.checkpoint.layout import NUMPY, Layout
from dsv3_jax.checkpoint.parallel import each
from dsv3_jax.checkpoint.safetensors_reader import open_files
from dsv3_jax.checkpoint.source import MARKER, fingerprint, human, resolve, side_files
from dsv3_jax.checkpoint.workfolder import commit, locked, start_or_resume, write_bytes

SUFFIX = ".converting"
_COPIES = 4  # measured: writing a block takes 2.3 to 4 times its bytes, the buffer that it is read into included
_LARGEST_BLOCK = 128 * 2**20
_WORKERS = 8
_MIN_BUDGET_GB, _MAX_BUDGET_GB = 0.05, 1_000_000
Job = tuple[str, Layout, ts.TensorStore, tuple[int, ...]]  # path of the array, its layout, its store, one of its blocks


def convert(
    hf_ckpt_path: str, save_path: str, max_host_memory_gb: float = 4.0, skip_mtp: bool = False, say: Callable[[str], None] = print
) -> None:
    """Convert a Hugging Face checkpoint into an Orbax checkpoint that any mesh can load, as design/CHECKPOINTS.md lays it out.

    Works in `save_path`.converting, which a run with the same arguments continues after any interruption. Memory beyond what
    the idle process has stays below max_host_memory_gb (GB of 10^9 bytes). Raises ValueError before a byte is written.
    """
    if not _MIN_BUDGET_GB <= max_host_memory_gb <= _MAX_BUDGET_GB:  # NaN is not
        raise ValueError(f"max_host_memory_gb = {max_host_memory_gb}: must lie between {_MIN_BUDGET_GB} and {_MAX_BUDGET_GB:,}")
    hf_ckpt_path, save_path = resolve(hf_ckpt_path), resolve(save_path)
    budget, work = int(max_host_memory_gb * 1e9), save_path + SUFFIX
    source = preflight.inspect(hf_ckpt_path, skip_mtp)
    preflight.check_target(hf_ckpt_path, save_path, 0)
    done_before = _bytes_in(work)
    preflight.check_target(hf_ckpt_path, save_path, int(source.nbytes * 1.01) - done_before)
    for note in source.notes:
        say(note)
    with locked(work):
        preflight.check_target(hf_ckpt_path, save_path, 0)  # again: another run may have finished since
        record = {"source": fingerprint(source.folder), "flags": {"skip_mtp": skip_mtp}, "block_bytes": min(budget // 16, _LARGEST_BLOCK)}
        if not os.path.exists(os.path.join(work, MARKER)):
            _plan(source, record["block_bytes"], budget)  # may refuse the budget, so before the record is written
        record, resumed = start_or_resume(work, record)
        layouts, workers = _plan(source, record["block_bytes"], budget)  # an earlier run's blocks stay as they were begun
        largest = max(a.block_bytes for a in layouts.values())
        say(f"memory budget {human(budget)}: {workers} workers, blocks of at most {human(largest)}")
        if resumed:
            say(f"continuing in {work}, {human(done_before)} already written")
        arrays = os.path.join(work, "params", store.ITEM)
        os.makedirs(arrays, exist_ok=True)
        _write_blocks(source, layouts, arrays, workers)
        store.write_metadata(os.path.join(work, "params"), layouts, os.path.join(work, "scratch"))
        for name in side_files(hf_ckpt_path):
            if name != "config.json":
                with open(os.path.join(hf_ckpt_path, name), "rb") as f:
                    write_bytes(os.path.join(work, name), f.read())
        write_bytes(os.path.join(work, "config.json"), source.config_text)
        commit(work, save_path, {**record, "mtp": source.mtp})
    say(f"saved {len(layouts)} arrays, {human(source.nbytes)}, in {save_path}")


def _plan(source: preflight.Source, block_bytes: int, budget: int) -> tuple[dict[str, Layout], int]:
    """Lay every array out and say how many workers the budget allows; ValueError when it allows none."""
    layouts = {path: layout.plan(t, source.dtype(t), block_bytes) for path, t in source.targets.items()}
    path, array = max(layouts.items(), key=lambda item: item[1].block_bytes)
    workers = min(budget // (_COPIES * array.block_bytes), _WORKERS, os.cpu_count() or 1)
    if workers < 1:
        needed = _COPIES * array.block_bytes / 1e9
        raise ValueError(f"max_host_memory_gb = {budget / 1e9:g}: {path} needs {needed:.2f}; raise the budget")
    return layouts, workers


def _write_blocks(source: preflight.Source, layouts: dict[str, Layout], folder: str, workers: int) -> None:
    """Write every block that is not there yet, array by array, `workers` at a time."""
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    largest = max(a.block_bytes for a in layouts.values())
    own = threading.local()  # each thread reads every block into one buffer: fresh ones would fragment the heap

    def jobs() -> Iterator[Job]:
        for path, array in layouts.items():
            blocks = [b for b in array.blocks() if not _is_there(folder, path, array, b)]
            bar.initial += sum(array.region_bytes(b) for b in array.blocks()) - sum(array.region_bytes(b) for b in blocks)
            bar.n = max(bar.n, bar.initial)
            opened = array.open(os.path.join(folder, path), context)
            yield from ((path, array, opened, b) for b in blocks)

    def write(job: Job) -> None:
        path, array, opened, block = job
        if not hasattr(own, "buffer"):
            own.buffer = np.empty(largest, np.uint8)
        region, size = array.region(block), array.region_bytes(block)
        out = own.buffer[:size].view(NUMPY[array.dtype]).reshape([r.stop - r.start for r in region])
        layout.fill(out, region, source.targets[path], source.folder.tensors, files)
        opened[region].write(out).result()
        bar.update(size)

    total = sum(array.region_bytes(b) for array in layouts.values() for b in array.blocks())
    with open_files() as files, tqdm(total=total, unit="B", unit_scale=True, desc="convert", mininterval=0.5) as bar:
        each(jobs(), write, workers)
    unwritten = [p for p, a in layouts.items() for b in a.blocks() if not _is_there(folder, p, a, b)]
    assert not unwritten, unwritten[:3]


def _is_there(folder: str, path: str, array: Layout, block: tuple[int, ...]) -> bool:
    """Whether a block was written: tensorstore writes under a lock name and renames, so a file is whole or absent."""
    try:
        return os.path.getsize(os.path.join(folder, path, array.file(block))) == array.file_bytes(block)
    except FileNotFoundError:
        return False


def _bytes_in(folder: str) -> int:
    return sum(os.path.getsize(os.path.join(at, f)) for at, _, names in os.walk(folder) for f in names)
