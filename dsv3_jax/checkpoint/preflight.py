"""Checks a Hugging Face folder whole, before a byte is written: its files, its config, and the one against the other."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil

from dsv3_jax.checkpoint import names
from dsv3_jax.checkpoint.source import Faults, Folder, check_is_hugging_face, check_side_files, human, read_folder, read_json, resolve
from dsv3_jax.config import ModelConfig

_FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_PLAIN = ("BF16", "F16", "F32")
_ALLOWED = {"float": _PLAIN, "float32": _PLAIN, "fp8": ("F8_E4M3",), "scale": ("F32", "F8_E8M0", "U8")}
# Endings of tensor names that only other quantisation methods write.
_FOREIGN = {
    "g_idx": "GPTQ", "qweight": "AWQ or GPTQ", "qzeros": "AWQ or GPTQ", "scales": "AWQ or GPTQ", "weight_packed": "compressed-tensors",
    "weight_shape": "compressed-tensors", "weight_zero_point": "compressed-tensors", "weight_scale": "compressed-tensors or ModelOpt",
    "input_scale": "ModelOpt or per-tensor FP8", "weight_scale_2": "ModelOpt NVFP4", "absmax": "bitsandbytes", "quant_map": "bitsandbytes",
    "SCB": "bitsandbytes", "weight_format": "bitsandbytes",
}  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclasses.dataclass
class Source:
    """A folder that passed every check: the config as the files justify it, the name table and what to tell the user."""

    folder: Folder
    config: ModelConfig
    config_text: bytes
    targets: dict[str, names.Target]
    notes: list[str]
    mtp: str  # kept, skipped or none

    @property
    def nbytes(self) -> int:
        """Bytes of the source tensors that the checkpoint takes."""
        return sum(self.folder.tensors[p.source].nbytes for t in self.targets.values() for p in t.pieces)

    def dtype(self, target: names.Target) -> str:
        """Return the array's dtype by name: a plain array has that of its source."""
        if target.kind == "fp8":
            return "float8_e4m3fn"
        if target.kind != "float":
            return "float32"
        return {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[self.folder.tensors[target.pieces[0].source].dtype]


def inspect(hf_ckpt_path: str | os.PathLike, skip_mtp: bool = False) -> Source:
    """Check a Hugging Face folder and return what convert and verify need to know about it.

    The family is checked before any weight file is opened. Raises ValueError that lists every fault, with names and sizes.
    """
    path = resolve(hf_ckpt_path)
    check_is_hugging_face(path)
    faults = Faults()
    raw = read_json(os.path.join(path, "config.json"))
    with open(os.path.join(path, "config.json"), "rb") as f:
        text = f.read()
    method = quant_method(raw)
    try:  # the family first; a foreign method is named below, with a tensor that shows it
        config = ModelConfig.from_json({k: v for k, v in raw.items() if k != "quantization_config" or method == "fp8"})
    except ValueError as e:
        raise ValueError(f"{os.path.join(path, 'config.json')}: {str(e).removeprefix('config: ')}") from e
    folder = read_folder(path, faults)
    check_side_files(path, faults)
    if check_foreign(folder, method, faults):
        faults.raise_if_any(path)  # what else is wrong follows from it
    config, changes, notes, mtp = _settle(config, raw, folder, skip_mtp, faults)
    table = names.targets(config)
    _check_tensors(table, config, folder, skip_mtp, faults)
    faults.raise_if_any(path)
    if changes:
        text = json.dumps({**raw, **changes}, indent=2).encode() + b"\n"
    return Source(folder, config, text, table, notes, mtp)


def quant_method(raw: dict) -> str:
    """Return the method that a config.json names, 'fp8' where it names none."""
    quantization = raw.get("quantization_config")
    return str(quantization.get("quant_method", "fp8")) if isinstance(quantization, dict) else "fp8"


def check_foreign(folder: Folder, method: str, faults: Faults) -> bool:
    """Refuse files that another method quantised, naming it and a tensor that shows it."""
    shown = next((n for n in sorted(folder.tensors) if n.rpartition(".")[2] in _FOREIGN), None)
    if method == "fp8" and shown is None:
        return False
    found = [f"config.json says quant_method {method!r}"] if method != "fp8" else []
    found += [f"tensor {shown} belongs to {_FOREIGN[shown.rpartition('.')[2]]}"] if shown else []
    remedy = "Supported are bf16 and FP8 with 128x128 block scales: fetch the original release"
    faults.add(f"quantised by a method that is not supported: {'; '.join(found)}. {remedy}")
    return True


def _settle(config: ModelConfig, raw: dict, folder: Folder, skip_mtp: bool, faults: Faults) -> tuple[ModelConfig, dict, list[str], str]:
    """Bring the config in line with the tensors where the tensors decide: FP8, and MTP layers that are not there."""
    notes, changes = [], {}
    first, count = config.num_hidden_layers, config.num_nextn_predict_layers
    there = folder.tensors.keys() | folder.lost
    beyond = [n for n in there if (m := _LAYER.match(n)) and int(m[1]) >= first]
    mtp = "kept" if count else "none"
    if skip_mtp:
        size = sum(folder.tensors[n].nbytes for n in beyond if n in folder.tensors)
        notes.append(f"MTP skipped: layers {first} and up, {len(beyond)} tensors, {human(size)} ({size:,} bytes)")
        mtp = "skipped"
    elif count and not beyond:
        notes.append(f"warning: config.json has num_nextn_predict_layers {count}, but the files hold no layer {first} (dropped upstream): "
                     "converting without MTP, and saying num_nextn_predict_layers 0 in the saved config.json")  # fmt: skip
        mtp = "none"
    if mtp != "kept" and count:
        config = dataclasses.replace(config, num_nextn_predict_layers=0)
        changes["num_nextn_predict_layers"] = 0
    fp8 = [n for n, t in folder.tensors.items() if t.dtype == "F8_E4M3"]
    if fp8 and config.quantization_config is None:
        changes |= {"quantization_config": _FP8_CONFIG} if "hidden_size" in raw else {"dtype": "fp8"}
        config = ModelConfig.from_json({**raw, **changes})
        notes.append(f"config.json has no quantization_config, but {len(fp8)} tensors are FP8 ({min(fp8)}): "
                     "taken as block-scaled FP8, and said so in the saved config.json")  # fmt: skip
    elif config.quantization_config and not fp8 and not folder.lost:
        weights = (p.source for t in names.targets(config).values() if t.kind == "fp8" for p in t.pieces)
        shown = next((name for name in weights if name in folder.tensors), None)
        if shown is not None:
            faults.add(f"config.json has a quantization_config (FP8), but {shown} is {folder.tensors[shown].dtype} and no tensor is FP8; "
                       "if the weights were cast, remove quantization_config from config.json, else fetch the FP8 release")  # fmt: skip
            config = dataclasses.replace(config, quantization_config=None)
    return config, changes, notes, mtp


def _check_tensors(table: dict[str, names.Target], config: ModelConfig, folder: Folder, skip_mtp: bool, faults: Faults) -> None:
    tensors, left = folder.tensors, set(folder.tensors)
    for path, target in table.items():
        dtypes = {}
        for piece in target.pieces:
            tensor = tensors.get(piece.source)
            if tensor is None:
                _missing(piece.source, target, folder, faults)
                continue
            left.discard(piece.source)
            if tensor.shape != target.piece_shape:
                shown = f"{piece.source} is {list(tensor.shape)}, expected {list(target.piece_shape)}"
                faults.add("shapes that are not what config.json says", shown)
            if tensor.dtype not in _ALLOWED[target.kind]:
                allowed = " or ".join(_ALLOWED[target.kind])
                faults.add("types that do not fit", f"{piece.source} is {tensor.dtype}, expected {allowed}")
            dtypes.setdefault(tensor.dtype, piece.source)
        if target.kind == "float" and len(dtypes) > 1:
            shown = " and ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
            faults.add(f"types that differ within {path}", shown)
    for name in sorted(left):
        _leftover(name, config, folder, skip_mtp, faults)


def _missing(name: str, target: names.Target, folder: Folder, faults: Faults) -> None:
    weight = folder.tensors.get(name.removesuffix(names.SCALE))
    if name in folder.lost:
        return  # said already, with its shard
    if target.kind == "scale":
        if weight is not None and weight.dtype == "F8_E4M3":
            shard, scale = os.path.basename(weight.path), name.rpartition(".")[2]
            faults.add("FP8 weights without their scales", f"{weight.name} in {shard} has no {scale}")
        return  # a weight that is missing or has the wrong type is a fault of its own
    hint = " (MTP; --skip_mtp converts without it)" if ".shared_head." in name or ".eh_proj." in name or ".enorm." in name else ""
    faults.add("tensors that are missing", name + hint)


def _leftover(name: str, config: ModelConfig, folder: Folder, skip_mtp: bool, faults: Faults) -> None:
    tensor = folder.tensors[name]
    layer = int(m[1]) if (m := _LAYER.match(name)) else -1
    if name.endswith("rotary_emb.inv_freq") or (skip_mtp and layer >= config.num_hidden_layers):
        return
    if ".indexer." in name:
        faults.add("DeepSeek-V3.2's sparse-attention indexer, without which its attention is wrong, is not supported", name)
    elif name.endswith("e_score_correction_bias"):
        faults.add(f"router biases, but topk_method is {config.topk_method!r}; set it to 'noaux_tc' in config.json", name)
    elif name.endswith(names.SCALE):
        weight = folder.tensors.get(name.removesuffix(names.SCALE))
        faults.add("scales without an FP8 weight", f"{name} (its weight is {weight.dtype if weight else 'missing'})")
    elif layer >= config.num_hidden_layers + config.num_nextn_predict_layers:
        counts = f"num_hidden_layers {config.num_hidden_layers} and num_nextn_predict_layers {config.num_nextn_predict_layers}"
        faults.add(f"tensors of layer {layer}, but config.json has {counts}; correct it, or leave MTP out with --skip_mtp", name)
    else:
        faults.add("tensors that this family does not have", f"{name} {tensor.dtype} {list(tensor.shape)}, {human(tensor.nbytes)}")


def check_target(hf_ckpt_path: str, save_path: str, needed: int) -> None:
    """Check that a folder can be made at save_path: absent or empty, outside the source, `needed` bytes free (ValueError)."""
    if os.path.lexists(save_path) and not (os.path.isdir(save_path) and not os.listdir(save_path)):
        raise ValueError(f"{save_path}: exists already; remove it or choose another folder")
    source, target = os.path.realpath(hf_ckpt_path), os.path.realpath(save_path)
    if os.path.commonpath([source, target]) == source:
        raise ValueError(f"{save_path}: lies inside the source {hf_ckpt_path}; choose a folder beside it")
    parent = os.path.dirname(save_path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ValueError(f"{save_path}: {human(needed)} to write, {human(free)} free on that disk; make room or choose another disk")
