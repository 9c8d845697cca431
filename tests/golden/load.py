"""The golden answers: small checkpoints that are remade here bit for bit, and what transformers' own classes answer for them.

    path = load.checkpoint("v3", tmp_path)   # remade without torch, its sha256 checked; returns the Hugging Face folder
    want = load.answers("v3")                # dict of numpy arrays
    load.info("v3")                          # how it was made: config, seed, dtype, margins, versions

Families (load.FAMILIES; made by make_golden.py):
  float32 weights  v2lite v2 v25 v3 r1 kimi_k2 moonlight, v2lite_long v2_long v3_long kimi_k2_long v3_mscale
  FP8 weights      v3_fp8 v3_fp8_long kimi_k2_fp8 v31_ue8m0, and tiny (configs/tiny.json)
  *_dec            bf16 or FP8 weights with routing that rounding cannot flip: for comparisons in low precision
  *_long, v3_mscale and tiny also have a sequence of 200 tokens, past YaRN's original length

Keys of answers(); all logits are float32, computed in float32 from the stored weights (FP8 dequantised):
  seqI.input_ids (B, T)          seqI.positions (P,): the positions whose logits and router weights are kept, the last one included
  seqI.logits (B, P, V)          seqI.router.LAYER.indices (B, T, K) ascending; .weights (B, P, K) aligned, scaling factor included
  greedyI.prompt (T,)            greedyI.tokens (24,): greedy continuation, EOS ignored
  mtp.seqI.positions (P,)        mtp.seqI.logits_post, .logits_pre (B, P, V): row i -> token i + 2, main state after | before the final norm
  mtp.seqI.router.indices (B, T - 1, K)
  FP8: seqI.logits_actq_absorb, .logits_actq_naive (B, P, V), I >= 2: activations quantised too (kv_b_proj only in naive)
  v3_fp8 and v31_ue8m0: lin.NAME.x (M, K), .codes (M, K) uint8, .scale (M, K/128), .y (M, N) of every kind of quantised linear
units(): act.x (8, 256), weight.x (144, 128) and for each of f32 | ue8m0: act.codes_f32, act.scale_f32, weight.codes_f32, weight.scale_f32.
chats(): family -> list of {"messages", "text", "ids"}: chat prompts rendered with jinja2 and tokenized with tokenizers alone.
"""

from __future__ import annotations

import hashlib
import json
import os

import numpy as np

from dsv3_jax.checkpoint import tiny

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
with open(os.path.join(DATA, "families.json"), encoding="utf-8") as f:
    _INFO: dict[str, dict] = json.load(f)
FAMILIES = tuple(_INFO)
FP8 = tuple(name for name, entry in _INFO.items() if "quantization_config" in entry["config"])
DECISIVE = tuple(name for name, entry in _INFO.items() if entry["decisive"])


def info(family: str) -> dict:
    """How the family's checkpoint was made: config, seed, decisive, dtype, bias_mean, sha256, margins, versions."""
    return _INFO[family]


def answers(family: str) -> dict[str, np.ndarray]:
    """The right answers for checkpoint(family); the keys are listed at the top of this file."""
    with np.load(os.path.join(DATA, f"{family}.npz")) as data:
        return {k: data[k].astype(np.int32) if k.endswith((".indices", ".input_ids", ".positions")) else data[k] for k in data.files}


def units() -> dict[str, np.ndarray]:
    """Edge cases of the activation and weight quantisers, bit for bit."""
    with np.load(os.path.join(DATA, "fp8_units.npz")) as data:
        return dict(data)


def chats() -> dict[str, list[dict]]:
    """Chat prompts of one family per kind of tokenizer."""
    with open(os.path.join(DATA, "chats.json"), encoding="utf-8") as f:
        return json.load(f)


def checkpoint(family: str, folder: str | os.PathLike) -> str:
    """Make the family's checkpoint in `folder`/`family` (once) and return that path; asserts that it is the one that was answered."""
    entry, path = _INFO[family], os.path.join(folder, family)
    if not os.path.exists(path):
        make(path, entry)
        assert digest(path) == entry["sha256"], f"{family}: the remade checkpoint differs from the one that the answers belong to"
    return path


def make(path: str, entry: dict) -> None:
    """Write the checkpoint that an entry of families.json describes."""
    options = {key: entry[key] for key in ("decisive", "dtype", "bias_mean")}
    tiny.make(path, entry["config"], entry["seed"], **options)


def digest(path: str) -> str:
    """sha256 over name, dtype, shape and bytes of every tensor in a folder's safetensors files, in the order of names."""
    found = {}
    for file in sorted(name for name in os.listdir(path) if name.endswith(".safetensors")):
        with open(os.path.join(path, file), "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
            start = f.tell()
            for name, entry in header.items():
                if name != "__metadata__":
                    f.seek(start + entry["data_offsets"][0])
                    data = f.read(entry["data_offsets"][1] - entry["data_offsets"][0])
                    found[name] = f"{name} {entry['dtype']} {entry['shape']} ".encode() + hashlib.sha256(data).digest()
    return hashlib.sha256(b"".join(found[name] for name in sorted(found))).hexdigest()
