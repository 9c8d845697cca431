"""A Hugging Face folder as it lies on disk: what kind of folder it is, its index, its shards and the files beside them."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import os

from dsv3_jax.checkpoint.safetensors_reader import Tensor, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MARKER = "dsv3_jax.json"  # only a converted checkpoint has this file
# Everything that a tokenizer or a chat may need. Python files are left behind: nothing here runs code from a checkpoint.
_SIDE_FILES = (
    "config.json", "generation_config.json", "*token*", "chat_template*", "vocab.*", "vocab", "merges.txt",
    "special_tokens_map.json", "*.model", "*.tiktoken", "LICENSE*",
)  # fmt: skip
_NOT_SIDE_FILES = ("*.py", "*.safetensors", "*.index.json", "*.bin", "*.md")


class Faults:
    """Everything that is wrong with a folder, gathered so that the user hears of all of it at once."""

    SHOWN = 8

    def __init__(self):
        self._groups: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, headline: str, item: str = "") -> None:
        """Add one fault; those with the same headline are listed under it, the first eight by name."""
        self._groups.setdefault(headline, []).append(item)

    def raise_if_any(self, where: str) -> None:
        """Raise one ValueError that lists every fault."""
        if not self._groups:
            return
        lines = []
        for headline, items in self._groups.items():
            items = [i for i in items if i]
            lines.append(f"* {headline}" + (f" ({len(items)}):" if len(items) > 1 else ":" if items else ""))
            lines += [f"    {i}" for i in items[: self.SHOWN]]
            if len(items) > self.SHOWN:
                lines.append(f"    ... and {len(items) - self.SHOWN} more")
        count = sum(len(i) for i in self._groups.values())
        raise ValueError(f"{where}: nothing was written; {count} {'fault' if count == 1 else 'faults'}:\n" + "\n".join(lines))


@dataclasses.dataclass
class Folder:
    """The shards of one folder: tensors by name, and which of the index's tensors lie in shards that could not be read."""

    path: str
    shards: list[str]
    tensors: dict[str, Tensor]
    lost: set[str]


def human(n: float) -> str:
    """Say a number of bytes in the largest decimal unit that keeps it above one: 1.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:,.0f} {unit}" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} TB"


def resolve(path: str | os.PathLike) -> str:
    """Return the absolute path, `~` included."""
    return os.path.abspath(os.path.expanduser(os.fspath(path)))


def check_is_hugging_face(path: str) -> None:
    """Raise ValueError, saying what the folder is and what to do, unless it looks like a Hugging Face checkpoint."""
    if not os.path.isdir(path):
        found = "is a file, not a folder" if os.path.exists(path) else "does not exist"
        raise ValueError(f"{path}: {found}; give the folder that holds config.json")
    names = sorted(os.listdir(path))
    if MARKER in names:
        raise ValueError(f"{path}: made by convert.py, not a Hugging Face folder; use it directly: generate.py --ckpt_path={path}")
    if "_CHECKPOINT_METADATA" in names or "manifest.ocdbt" in names:
        raise ValueError(f"{path}: an Orbax checkpoint, not a Hugging Face folder; give the folder with config.json and *.safetensors")
    shards = [n for n in names if n.endswith(".safetensors")]
    if any(fnmatch.fnmatch(n, "model*-mp*.safetensors") for n in shards):
        raise ValueError(f"{path}: split for the reference demo ({shards[0]}); give the original Hugging Face folder that it was made from")
    if not shards and INDEX not in names:
        for pattern, what in (("*.gguf", "GGUF"), ("*.bin", "PyTorch .bin"), ("*.pt*", "PyTorch")):
            if found := fnmatch.filter(names, pattern):
                raise ValueError(f"{path}: holds {what} files ({found[0]}); only safetensors are read: fetch the original release")
        raise ValueError(f"{path}: holds no *.safetensors file; give the folder of a Hugging Face checkpoint")
    if "config.json" not in names:
        raise ValueError(f"{path}: holds no config.json; fetch it from the model's release")


def read_folder(path: str, faults: Faults) -> Folder:
    """Read the index and every shard's header, adding a fault for whatever is missing, broken or contradictory.

    A folder without an index is read when it holds a single model.safetensors.
    """
    weight_map = _weight_map(path)
    shards = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]
    headers: dict[str, dict[str, Tensor]] = {}
    for shard in shards:
        file = os.path.join(path, shard)
        if not os.path.isfile(file):  # also a link to nowhere, which an interrupted download leaves
            count = sum(s == shard for s in (weight_map or {}).values())
            faults.add("shards that the index names and that are not there", f"{shard} ({count} tensors)")
            continue
        try:
            headers[shard] = read_header(file)
        except ValueError as e:
            faults.add("shards that are not whole", str(e).removeprefix(path + os.sep))
    tensors: dict[str, Tensor] = {}
    for shard, header in headers.items():
        for name, tensor in header.items():
            if name in tensors:
                faults.add("tensors that two shards hold", f"{name} in {os.path.basename(tensors[name].path)} and {shard}")
            tensors[name] = tensor
    lost = set()
    if weight_map is not None:
        for name, shard in weight_map.items():
            if shard not in headers:
                lost.add(name)
            elif name not in headers[shard]:
                elsewhere = f", it is in {os.path.basename(tensors[name].path)}" if name in tensors else ""
                faults.add("tensors that are not in the shard that the index names", f"{name} not in {shard}{elsewhere}")
                lost.add(name)
        for name in tensors.keys() - weight_map.keys():
            faults.add("tensors that the index does not name", f"{name} in {os.path.basename(tensors[name].path)}")
    return Folder(path, shards, tensors, lost)


def _weight_map(path: str) -> dict[str, str] | None:
    index = os.path.join(path, INDEX)
    if not os.path.exists(index):
        if os.path.exists(os.path.join(path, SINGLE)):
            return None
        raise ValueError(f"{path}: has several shards and no {INDEX}; fetch it from the model's release")
    try:
        with open(index, encoding="utf-8") as f:
            weight_map = json.load(f)["weight_map"]
        if not all(isinstance(s, str) and os.path.basename(s) == s for s in weight_map.values()):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{index}: not a safetensors index (a weight_map of tensor names to file names); fetch the file again") from e
    return weight_map


def read_json(path: str) -> dict:
    """Read a JSON object; ValueError names the file when it is none."""
    try:
        with open(path, encoding="utf-8") as f:
            raw = json.load(f)
    except ValueError as e:  # also bytes that are no UTF-8, and integers of thousands of digits
        raise ValueError(f"{path}: not valid JSON ({e}); fetch the file again") from e
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must hold a JSON object, holds {type(raw).__name__}")
    return raw


def side_files(path: str, code: bool = False) -> list[str]:
    """Return the names of the files to keep beside the weights: config, generation config, tokenizer and chat template.

    With `code` also the Python files, which other software may run.
    """
    names = [n for n in sorted(os.listdir(path)) if os.path.isfile(os.path.join(path, n))]
    wanted = {n for pattern in _SIDE_FILES for n in fnmatch.filter(names, pattern)}
    wanted -= {n for pattern in _NOT_SIDE_FILES for n in fnmatch.filter(names, pattern)}
    return sorted(wanted | set(fnmatch.filter(names, "*.py") if code else ()))


def check_side_files(path: str, faults: Faults) -> None:
    """Add a fault for each side file that is a Git-LFS pointer, as tokenizer.json is in many releases, or JSON that is none."""
    for name in side_files(path):
        file = os.path.join(path, name)
        with open(file, "rb") as f:
            if f.read(40).startswith(b"version https://git-lfs"):
                faults.add("files that are Git-LFS pointers; run `git lfs pull` in that folder", name)
                continue
        if name.endswith(".json"):
            try:
                read_json(file)
            except ValueError as e:
                faults.add("files beside the weights that are broken", str(e).removeprefix(path + os.sep))


def fingerprint(folder: Folder) -> dict[str, list]:
    """Return [size, modification time in ns, hash of the header] of each shard and the hash of config.json.

    Two runs of one conversion must see the same; hashing whole shards would read the checkpoint twice.
    """
    prints: dict[str, list] = {}
    for shard in folder.shards:
        file = os.path.join(folder.path, shard)
        with open(file, "rb") as f:
            header = f.read(8 + int.from_bytes(f.read(8), "little"))
        stat = os.stat(file)
        prints[shard] = [stat.st_size, stat.st_mtime_ns, hashlib.sha256(header).hexdigest()]
    with open(os.path.join(folder.path, "config.json"), "rb") as f:
        prints["config.json"] = [hashlib.sha256(f.read()).hexdigest()]
    return prints
