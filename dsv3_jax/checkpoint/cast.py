"""From an FP8 Hugging Face checkpoint to a bf16 one, shard by shard, on any CPU."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator

import ml_dtypes
import numpy as np
from tqdm import tqdm

from dsv3_jax.checkpoint.names import SCALE
from dsv3_jax.checkpoint.preflight import check_foreign, check_target, quant_method
from dsv3_jax.checkpoint.safetensors_reader import DTYPES, Files, Tensor, open_files, scales_to_float32
from dsv3_jax.checkpoint.source import (
    INDEX,
    Faults,
    Folder,
    check_is_hugging_face,
    check_side_files,
    fingerprint,
    human,
    read_folder,
    read_json,
    resolve,
    side_files,
)
from dsv3_jax.checkpoint.workfolder import locked, start_or_resume, sync_folder, write_bytes
from dsv3_jax.config import BLOCK

SUFFIX = ".casting"
_RECORD = ".casting.json"  # of the run; harmless if a kill right after the rename leaves it behind
_PIECE = 32 * 2**20  # bytes of float32 in work at once
_FLOAT_OF_CODE = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_SCALE_DTYPES = ("F32", "F8_E8M0", "U8")


def cast(input_fp8_hf_path: str, output_bf16_hf_path: str) -> list[str]:
    """Write the bf16 copy of an FP8 Hugging Face checkpoint; returns lines that tell the user what was done.

    FP8 weights become bf16(float32(code) * scale); every other tensor, known or not, is copied byte for byte. The shards
    keep their names; scales go; the index has a true total_size. Works in OUTPUT.casting, which the same command continues
    after an interruption. Raises ValueError that lists every fault before a byte is written.
    """
    source, target = resolve(input_fp8_hf_path), resolve(output_bf16_hf_path)
    check_is_hugging_face(source)
    raw = read_json(os.path.join(source, "config.json"))
    block = _block_size(raw, source)
    faults = Faults()
    folder = read_folder(source, faults)
    check_side_files(source, faults)
    if not check_foreign(folder, quant_method(raw), faults):
        _check_scales(folder, block, faults)
    faults.raise_if_any(source)
    headers = {shard: _header(folder, shard) for shard in folder.shards}
    sizes = {shard: len(text) + sum(_out_bytes(t) for t in tensors) for shard, (text, tensors) in headers.items()}
    work = target + SUFFIX
    there = sum(size for shard, size in sizes.items() if _size(os.path.join(work, shard)) == size)
    check_target(source, target, sum(sizes.values()) - there)
    with locked(work):
        check_target(source, target, 0)  # another run may have finished while this one waited to begin
        start_or_resume(work, {"source": fingerprint(folder), "flags": {}}, _RECORD)
        bar = tqdm(total=sum(sizes.values()), initial=there, unit="B", unit_scale=True, desc="cast", mininterval=0.5)
        with open_files() as files, bar:
            for shard, (text, tensors) in headers.items():
                path = os.path.join(work, shard)
                if _size(path) == sizes[shard]:
                    continue
                with open(path + ".partial", "wb") as f:
                    bar.update(f.write(text))
                    for tensor in tensors:
                        for data in _converted(tensor, folder, block, files):
                            bar.update(f.write(memoryview(data).cast("B")))
                    f.flush()
                    os.fsync(f.fileno())
                os.replace(path + ".partial", path)
        total = sum(_out_bytes(t) for _, tensors in headers.values() for t in tensors)
        weight_map = {t.name: shard for shard, (_, tensors) in headers.items() for t in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        if os.path.exists(os.path.join(source, INDEX)):
            write_bytes(os.path.join(work, INDEX), json.dumps(index, indent=2).encode() + b"\n")
        for name in side_files(source, code=True):
            with open(os.path.join(source, name), "rb") as f:
                write_bytes(os.path.join(work, name), f.read())
        kept = {k: v for k, v in raw.items() if k != "quantization_config"}
        write_bytes(os.path.join(work, "config.json"), json.dumps(kept, indent=2).encode() + b"\n")
        sync_folder(work)
        os.rename(work, target)
        os.unlink(os.path.join(target, _RECORD))
        sync_folder(os.path.dirname(target))
    fp8 = sum(t.dtype == "F8_E4M3" for t in folder.tensors.values())
    return [f"cast {fp8:,} FP8 tensors, copied {len(weight_map) - fp8:,}: {human(total)} in {target}"]


def dequantize(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int] = (BLOCK, BLOCK)) -> np.ndarray:
    """Return bf16 values of FP8 codes (N, K), as bytes, and float32 scales (ceil(N / rows), ceil(K / columns)).

    float32 code times scale, rounded once, to the nearest even; the last blocks may be partial.
    """
    rows, columns = codes.shape
    values = _FLOAT_OF_CODE[codes]
    for i, scale in enumerate(scales):
        values[i * block[0] : (i + 1) * block[0]] *= np.repeat(scale, block[1])[:columns]
    assert rows <= len(scales) * block[0], (codes.shape, scales.shape)
    return values.astype(ml_dtypes.bfloat16)


def _block_size(raw: dict, where: str) -> tuple[int, int]:
    quantization = raw.get("quantization_config")
    size = quantization.get("weight_block_size", [BLOCK, BLOCK]) if isinstance(quantization, dict) else [BLOCK, BLOCK]
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise ValueError(f"{where}/config.json: quantization_config.weight_block_size = {size!r}: must be like [128, 128]")
    return size[0], size[1]


def _check_scales(folder: Folder, block: tuple[int, int], faults: Faults) -> None:
    tensors = folder.tensors
    if not any(t.dtype == "F8_E4M3" for t in tensors.values()) and not folder.lost:
        faults.add("no tensor is FP8 (F8_E4M3); there is nothing to cast")
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype == "F8_E4M3":
            scale = tensors.get(name + SCALE)
            shape = tuple(-(-n // b) for n, b in zip(tensor.shape, block, strict=False))
            if len(tensor.shape) != 2:
                faults.add("FP8 tensors that are not matrices", f"{name} {list(tensor.shape)}")
            elif scale is None and name + SCALE not in folder.lost:
                faults.add("FP8 weights without their scales", f"{name} in {os.path.basename(tensor.path)} has no weight{SCALE}")
            elif scale is not None and (scale.shape != shape or scale.dtype not in _SCALE_DTYPES):
                found = f"{scale.name} is {scale.dtype} {list(scale.shape)}"
                faults.add("scales that do not fit their weights", f"{found}, expected F32 {list(shape)}")
        elif name.endswith(SCALE):
            weight = tensors.get(name.removesuffix(SCALE))
            if weight is None and name.removesuffix(SCALE) not in folder.lost:
                faults.add("scales without an FP8 weight", f"{name} (its weight is missing)")
            elif weight is not None and weight.dtype != "F8_E4M3":
                faults.add("scales without an FP8 weight", f"{name} ({weight.name} is {weight.dtype})")


def _header(folder: Folder, shard: str) -> tuple[bytes, list[Tensor]]:
    """Return the first bytes of the output shard and its tensors in the order in which they follow, widest type first."""
    path = os.path.join(folder.path, shard)
    scales = {name + SCALE for name, t in folder.tensors.items() if t.dtype == "F8_E4M3"}
    mine = [t for t in folder.tensors.values() if t.path == path and t.name not in scales]
    mine.sort(key=lambda t: (-(_out_bytes(t) // max(math.prod(t.shape), 1)), t.name))
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    position = 0
    for t in mine:
        end = position + _out_bytes(t)
        entries[t.name] = {"dtype": "BF16" if t.dtype == "F8_E4M3" else t.dtype, "shape": list(t.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, mine


def _out_bytes(tensor: Tensor) -> int:
    return tensor.nbytes * 2 if tensor.dtype == "F8_E4M3" else tensor.nbytes


def _converted(tensor: Tensor, folder: Folder, block: tuple[int, int], files: Files) -> Iterator[np.ndarray]:
    """Yield the tensor's output bytes, whole rows of blocks at a time, few megabytes each."""
    if tensor.dtype != "F8_E4M3":
        for start in range(0, tensor.nbytes, _PIECE):
            data = np.empty(min(_PIECE, tensor.nbytes - start), np.uint8)
            files.read(tensor, data, start)
            yield data
        return
    stored = folder.tensors[tensor.name + SCALE]
    raw = np.empty(stored.shape, DTYPES[stored.dtype])
    files.read(stored, raw)
    scales = scales_to_float32(raw, stored.dtype)
    rows, columns = tensor.shape
    step = max(_PIECE // (4 * columns * block[0]), 1)  # rows of blocks
    for i in range(0, len(scales), step):
        first = i * block[0]
        codes = np.empty((min(step * block[0], rows - first), columns), np.uint8)
        files.read(tensor, codes, first * columns)
        yield dequantize(codes, scales[i : i + step], block).view(np.uint8)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return -1

