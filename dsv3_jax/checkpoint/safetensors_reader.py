"""Reads safetensors files by byte ranges into buffers of ours, and refuses files that are not whole.

The public package hands neither F8_E4M3 nor F8_E8M0 to numpy, and mapping files into memory inflates resident memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ml_dtypes
import numpy as np

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype(np.uint8),
}
# Types that no tensor of this family has; their sizes serve to check a header before their names are refused.
_OTHER_SIZES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "BOOL": 1, "F8_E5M2": 1}
_SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | _OTHER_SIZES
_LFS = b"version https://git-lfs.github.com/spec/"
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """Where one tensor lies: nbytes bytes from `start`, counted from the beginning of the file `path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    start: int
    nbytes: int


def read_header(path: str) -> dict[str, Tensor]:
    """Return the tensors of one safetensors file by name, after checking the header against the file's size.

    Raises ValueError, naming the file and its size, for a Git-LFS pointer, a truncated or over-long file and a broken header.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as f:
        start = f.read(max(8, len(_LFS)))
        if start.startswith(_LFS):
            raise ValueError(f"{path}: a Git-LFS pointer of {size} bytes, not the file itself; run `git lfs pull` in that folder")
        if size < 8:
            raise ValueError(f"{path}: truncated: {size:,} bytes, less than a safetensors header; fetch the file again")
        length = int.from_bytes(start[:8], "little")
        if length > _MAX_HEADER:
            raise ValueError(f"{path}: not a safetensors file (a header of {length:,} bytes in {size:,}); fetch the file again")
        if 8 + length > size:
            raise ValueError(f"{path}: truncated: {size:,} bytes, its header alone has {8 + length:,}; fetch the file again")
        f.seek(8)
        text = f.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            begin, end = map(int, entry["data_offsets"])
            shape = tuple(map(int, entry["shape"]))
            tensors[name] = Tensor(name, str(entry["dtype"]), shape, path, 8 + length + begin, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{path}: broken safetensors header ({type(e).__name__}: {e}); fetch the file again") from e
    position = 8 + length
    for t in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        expected = math.prod(t.shape) * _SIZES[t.dtype] if t.dtype in _SIZES else t.nbytes
        if t.nbytes != expected or t.start != position:
            fault = f"the bytes of {t.name} do not match its shape or its place"
            raise ValueError(f"{path}: broken safetensors header ({fault}); fetch the file again")
        position += t.nbytes
    if position != size:
        kind = "truncated" if position > size else "longer than its header says"
        raise ValueError(f"{path}: {kind}: {size:,} bytes, its header describes {position:,}; fetch the file again")
    return tensors


class Files:
    """Open files kept for many reads from several threads: os.preadv moves no shared position."""

    def __init__(self):
        self._descriptors: dict[str, int] = {}

    def read(self, tensor: Tensor, out: np.ndarray, offset: int = 0) -> None:
        """Fill `out`, a contiguous array, with the tensor's bytes from `offset` on.

        Raises OSError, naming the file, when it has fewer bytes than its header said.
        """
        view = memoryview(out.view(np.uint8).reshape(-1))
        assert offset + len(view) <= tensor.nbytes, (tensor, offset, len(view))
        descriptor = self._descriptors.get(tensor.path)
        if descriptor is None:
            # Two threads may both open a file once; setdefault keeps one and the other is closed.
            opened = os.open(tensor.path, os.O_RDONLY)
            descriptor = self._descriptors.setdefault(tensor.path, opened)
            if descriptor != opened:
                os.close(opened)
        position = tensor.start + offset
        while len(view):
            n = os.preadv(descriptor, [view], position)
            if n == 0:
                raise OSError(f"{tensor.path}: ended while {tensor.name} was read; the file changed during the run")
            view, position = view[n:], position + n

    def close(self) -> None:
        """Close every file."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


@contextmanager
def open_files() -> Iterator[Files]:
    """Give a Files that is closed at the end of the block."""
    files = Files()
    try:
        yield files
    finally:
        files.close()


def scales_to_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 scales from what a file stores: F32, BF16 or F16 widened, F8_E8M0 and U8 bytes as 2^(byte - 127).

    The byte 255 is E8M0's NaN and 0 is 2^-127, a subnormal float32; ldexp makes both exactly.
    """
    if dtype not in ("F8_E8M0", "U8"):
        return raw.astype(np.float32)
    exponent = raw.view(np.uint8)
    scales = np.ldexp(np.float32(1), np.minimum(exponent, 254).astype(np.int32) - 127)
    scales[exponent == 255] = np.nan
    return scales
