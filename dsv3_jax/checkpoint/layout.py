"""How an array lies on disk: zarr3 blocks (one file each) cut into chunks, and the bytes that fill a block.

A reader never reads part of a chunk, so chunks are cut where meshes cut: by expert, and in 8 or 16 parts along rows and
columns. One device's share of an array then costs 1.0 times its bytes on any mesh of 1, 2, 4, 8 devices. Every chunk
carries a checksum: a bit that flips on disk or on the way is an error when it is read, never a wrong weight.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import tensorstore as ts

from dsv3_jax.checkpoint.names import Target
from dsv3_jax.checkpoint.safetensors_reader import DTYPES, Files, Tensor, scales_to_float32
from dsv3_jax.config import BLOCK

NUMPY = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
_CHECKSUM = 4  # bytes of a crc32c, behind each chunk and behind the index
Region = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """One array on disk: its blocks are files, each a grid of chunks followed by an index."""

    shape: tuple[int, ...]
    dtype: str
    block: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one whole block in memory."""
        return math.prod(self.block) * NUMPY[self.dtype].itemsize

    def blocks(self) -> Iterator[tuple[int, ...]]:
        """Yield the grid position of every block."""
        return itertools.product(*(range(-(-n // b)) for n, b in zip(self.shape, self.block, strict=True)))

    def region(self, block: tuple[int, ...]) -> Region:
        """Return the part of the array that a block holds."""
        return tuple(slice(i * b, min((i + 1) * b, n)) for i, b, n in zip(block, self.block, self.shape, strict=True))

    def region_bytes(self, block: tuple[int, ...]) -> int:
        """Return the bytes of the array that a block holds: less than block_bytes at an edge."""
        return math.prod(r.stop - r.start for r in self.region(block)) * NUMPY[self.dtype].itemsize

    def file(self, block: tuple[int, ...]) -> str:
        """Return the block's file, relative to the array's folder."""
        return os.path.join("c", *map(str, block))

    def file_bytes(self, block: tuple[int, ...]) -> int:
        """Return the size of the block's file: every chunk that meets the array, whole and with a checksum, then their index."""
        inside = math.prod(-(-(r.stop - r.start) // c) for r, c in zip(self.region(block), self.chunk, strict=True))
        cells = math.prod(b // c for b, c in zip(self.block, self.chunk, strict=True))
        return inside * (math.prod(self.chunk) * NUMPY[self.dtype].itemsize + _CHECKSUM) + 16 * cells + _CHECKSUM

    @classmethod
    def read(cls, folder: str) -> Layout:
        """Return the layout of the array that lies in `folder`; ValueError when its zarr.json is missing or not as `open` writes it."""
        file = os.path.join(folder, "zarr.json")
        try:
            with open(file, encoding="utf-8") as f:
                found = json.load(f)
            (sharding,) = found["codecs"]
            inner, block = sharding["configuration"], found["chunk_grid"]["configuration"]["chunk_shape"]
            codecs = [sharding["name"]] + [c["name"] for part in ("codecs", "index_codecs") for c in inner[part]]
            if codecs != ["sharding_indexed", "bytes", "crc32c", "bytes", "crc32c"] or found["data_type"] not in NUMPY:
                raise ValueError(f"its codecs are {', '.join(codecs)}")
            return cls(tuple(found["shape"]), found["data_type"], tuple(block), tuple(inner["chunk_shape"]))
        except FileNotFoundError as e:
            raise ValueError(f"{file}: missing") from e
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{file}: not as convert.py writes it ({type(e).__name__}: {e})") from e

    def damaged_blocks(self, folder: str) -> Iterator[str]:
        """Yield a line for each block file in `folder` that is missing or has the wrong size."""
        for block in self.blocks():
            file, size = os.path.join(folder, self.file(block)), self.file_bytes(block)
            try:
                found = os.stat(file).st_size
            except OSError as e:
                yield f"{file}: {'missing' if isinstance(e, FileNotFoundError) else e.strerror}"
                continue
            if found != size:
                yield f"{file}: {found:,} bytes, should be {size:,}"

    def open(self, folder: str, context: ts.Context) -> ts.TensorStore:
        """Open the array for writing, making it when it is not there; an array with another layout is an error."""
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        inner = {"chunk_shape": self.chunk, "codecs": codecs, "index_codecs": codecs, "index_location": "end"}
        metadata = {
            "shape": self.shape,
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.block}},
            "codecs": [{"name": "sharding_indexed", "configuration": inner}],
        }
        # Orbax refuses to read a chunk that is not there, so chunks of zeros are stored too.
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": folder + "/"}, "metadata": metadata}
        return ts.open({**spec, "store_data_equal_to_fill_value": True}, create=True, open=True, context=context).result()


def plan(target: Target, dtype: str, limit: int) -> Layout:
    """Choose the blocks, of at most about `limit` bytes, and the chunks of one array."""
    shape, size = target.shape, NUMPY[dtype].itemsize
    stacked = len(target.pieces[0].index)
    if len(shape) - stacked < 2 or target.kind == "scale":
        chunk = [1] * stacked + list(shape[stacked:])
    else:
        rows = _part(shape[-2], 8 if stacked else 16)
        most = max(limit // (shape[-1] * size), 1)  # a block spans all columns, so that a source is read in one piece
        while rows > most and rows % 2 == 0:
            rows //= 2
        chunk = [1] * stacked + [min(rows, most), _part(shape[-1], 8 if stacked else 16)]
    block = list(chunk)
    for axis in reversed(range(len(shape))):  # the last axes first: a block is contiguous in its source
        parts = -(-shape[axis] // chunk[axis])
        most = parts if axis == len(shape) - 1 else limit // (math.prod(block) * size)
        block[axis] *= max(n for n in range(1, parts + 1) if parts % n == 0 and n <= max(most, 1))
        if block[axis] < shape[axis]:
            break
    return Layout(shape, dtype, tuple(block), tuple(chunk))


def _part(size: int, ways: int) -> int:
    """Return the length of a chunk along one dim: whole FP8 blocks in `ways` parts, else 8 or fewer parts that divide it."""
    for parts in (ways, 8):
        if size % (parts * BLOCK) == 0:
            return size // parts
    return next(size // parts for parts in (ways, 8, 4, 2, 1) if size % parts == 0)


def fill(out: np.ndarray, region: Region, target: Target, tensors: dict[str, Tensor], files: Files) -> None:
    """Read from the source files what belongs into `region` of the target; `out` has the region's shape, contiguous."""
    for piece, place, first in pieces_in(region, target):
        read_rows(out[place], tensors[piece], first, files)


def pieces_in(region: Region, target: Target) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield the source tensors that meet a region: name, index into the region's leading dims, first row taken."""
    stacked = len(target.pieces[0].index)
    lead = target.shape[:stacked]
    first = region[stacked].start
    assert all((r.start, r.stop) == (0, n) for r, n in zip(region[stacked + 1 :], target.shape[stacked + 1 :], strict=True)), region
    for index in itertools.product(*(range(r.start, r.stop) for r in region[:stacked])):
        piece = target.pieces[int(np.ravel_multi_index(index, lead)) if stacked else 0]
        assert piece.index == index, (piece, index)
        yield piece.source, tuple(i - r.start for i, r in zip(index, region, strict=False)), first


def read_rows(out: np.ndarray, tensor: Tensor, first: int, files: Files) -> None:
    """Fill `out` (rows, ...) with the tensor's rows from `first` on: the same bytes, or float32 where ours is float32."""
    stored = DTYPES[tensor.dtype]
    offset = first * math.prod(tensor.shape[1:]) * stored.itemsize
    if stored == out.dtype:
        files.read(tensor, out, offset)
        return
    assert out.dtype == np.float32, (tensor, out.dtype)  # small: scales, and the router's bias
    raw = np.empty(out.shape, stored)
    files.read(tensor, raw, offset)
    out[...] = scales_to_float32(raw, tensor.dtype)
