"""A folder in the making: beside its target, locked, resumable, and put in place by one rename."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dsv3_jax.checkpoint.source import MARKER

FORMAT = 1  # of the converted checkpoint; raise it when a reader must change


def write_json(path: str, value: dict) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    write_bytes(path, json.dumps(value, indent=1).encode() + b"\n")


def write_bytes(path: str, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    with open(path + ".partial", "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".partial", path)


def sync_folder(path: str) -> None:
    """Make the folder's entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """Hold a folder, made if need be and removed if left empty, against a second run of the same command (ValueError)."""
    descriptor = _lock(folder)
    try:
        yield
    finally:
        with suppress(OSError):  # it holds something, or was renamed
            if _is(folder, descriptor):
                os.rmdir(folder)
        os.close(descriptor)


def _lock(folder: str) -> int:
    while True:
        os.makedirs(folder, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(folder, descriptor):
                return descriptor
        except BlockingIOError as e:
            os.close(descriptor)
            raise ValueError(f"{folder}: another process is writing there; wait for it or end it") from e
        os.close(descriptor)  # what was locked has been renamed by the run that made it


def _is(folder: str, descriptor: int) -> bool:
    return os.path.exists(folder) and os.path.samestat(os.fstat(descriptor), os.stat(folder))


def start_or_resume(folder: str, record: dict, name: str = MARKER) -> tuple[dict, bool]:
    """Return the record of the run that began in `folder`, and whether there was one; else write `record`, as `name`.

    The keys 'source' (fingerprints by file) and 'flags' must be what they were: ValueError names what changed.
    """
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        left = sorted(set(os.listdir(folder)) - {name + ".partial"})
        if left:
            raise ValueError(f"{folder}: holds files that are not of an unfinished run ({left[0]}); remove it and start again")
        write_json(path, {"format": FORMAT, "complete": False, **record})
        return record, False
    with open(path, encoding="utf-8") as f:
        begun = json.load(f)
    remedy = f"remove {folder} to start over"
    if begun.get("format") != FORMAT:
        raise ValueError(f"{folder}: begun by another version of this program (format {begun.get('format')}, ours is {FORMAT}); {remedy}")
    for flag, value in record["flags"].items():
        if begun["flags"].get(flag) != value:
            raise ValueError(f"{folder}: begun with {flag}={begun['flags'].get(flag)}, now {flag}={value}; give the same flags or {remedy}")
    then, now = begun["source"], json.loads(json.dumps(record["source"]))
    changed = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    if changed:
        raise ValueError(f"{folder}: the source changed since this run began ({', '.join(changed[:4])}); {remedy}")
    return begun, True


def commit(folder: str, target: str, record: dict) -> None:
    """Mark the folder complete and rename it to `target`, which is absent or an empty folder."""
    write_json(os.path.join(folder, MARKER), {**record, "format": FORMAT, "complete": True})
    sync_folder(folder)
    os.rename(folder, target)
    sync_folder(os.path.dirname(target))
