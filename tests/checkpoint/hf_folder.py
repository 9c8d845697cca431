"""Small Hugging Face folders for the tests, and a second, plain reader and writer of safetensors that shares no code with the product."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from dsv3_jax.checkpoint import tiny

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# Ragged on purpose: 144 rows of kv_a, 192 of q_b, 320 of the dense layer, 192 of an expert are no multiple of 128.
V3 = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 320, "hidden_size": 256,
    "intermediate_size": 320, "moe_intermediate_size": 192, "num_hidden_layers": 2, "num_nextn_predict_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "first_k_dense_replace": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 1, "quantization_config": FP8,
}  # fmt: skip
# As V2-Lite: no q_lora, softmax router without a bias, no MTP.
V2 = {k: v for k, v in V3.items() if k not in ("quantization_config", "num_nextn_predict_layers")} | {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "scoring_func": "softmax",
    "topk_method": "greedy", "n_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "bos_token_id": 300, "eos_token_id": 301,
}  # fmt: skip
ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"
Entry = tuple[str, list[int], bytes]  # dtype as in the header, shape, bytes


def make(path: Path, config: dict, seed: int = 0, **options) -> Path:
    """Make a small checkpoint of several shards, with a tokenizer and a chat template."""
    tiny.make(path, config, seed, **options)
    return path


def read_shard(path: Path) -> dict[str, Entry]:
    data = path.read_bytes()
    length = int(np.frombuffer(data, "<u8", 1)[0])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {n: (e["dtype"], e["shape"], body[slice(*e["data_offsets"])]) for n, e in header.items()}


def read(folder: Path) -> dict[str, Entry]:
    """Return every tensor of a folder."""
    return {name: entry for shard in sorted(folder.glob("model*.safetensors")) for name, entry in read_shard(shard).items()}


def write_shard(path: Path, tensors: dict[str, Entry]) -> None:
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(t[2] for t in tensors.values()))


def write_index(folder: Path) -> None:
    """Write the index that fits the shards that are there."""
    weight_map = {name: shard.name for shard in sorted(folder.glob("model*.safetensors")) for name in read_shard(shard)}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


def edit(folder: Path, change: dict[str, Entry | None], index: bool = True) -> None:
    """Replace, add (to the first shard) or, with None, remove tensors; the index follows unless index is false."""
    shards = {path: read_shard(path) for path in sorted(folder.glob("model*.safetensors"))}
    for name, entry in change.items():
        tensors = next((t for t in shards.values() if name in t), next(iter(shards.values())))
        if entry is None:
            tensors.pop(name, None)
        else:
            tensors[name] = entry
    for path, tensors in shards.items():
        write_shard(path, tensors)
    if index:
        write_index(folder)


def set_config(folder: Path, remove: tuple[str, ...] = (), **changes) -> None:
    """Change keys of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in remove} | changes))


def make_large(path: Path, config: dict) -> int:
    """Make a large checkpoint quickly, its bytes random (FP8 NaN among them): return their number."""
    path.mkdir()
    sizes = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
    rng, total, pool = np.random.default_rng(0), 0, np.random.default_rng(1).bytes(1 << 22)
    layout = {}
    for name, shape in tiny._shapes(tiny.ModelConfig.from_json(config)):
        fp8 = "quantization_config" in config and tiny.is_fp8_linear(name)
        layout[name] = ("F8_E4M3" if fp8 else "F32" if name.endswith("bias") else "BF16", list(shape))
        if fp8:
            layout[name + "_scale_inv"] = ("F32", [-(-n // 128) for n in shape])
    names = sorted(layout)
    for i in range(4):
        header, mine = {}, names[i::4]
        position = 0
        for name in mine:
            dtype, shape = layout[name]
            end = position + math.prod(shape) * sizes[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
            position = end
        text = json.dumps(header).encode()
        with (path / f"model-{i + 1:05d}-of-00004.safetensors").open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            left = position
            while left:
                left -= f.write(rng.bytes(8) + pool[: left - 8] if left > 8 else pool[:left])
        total += position
    (path / "config.json").write_text(json.dumps(config))
    weight_map = {name: f"model-{i + 1:05d}-of-00004.safetensors" for i in range(4) for name in names[i::4]}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return total


_MEASURE = """
import atexit, json, runpy, sys
sys.argv = sys.argv[1:]
hwm = lambda: next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
atexit.register(lambda: print("MEASURED", json.dumps([hwm(), sorted(sys.modules)])))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_measured(script: str, *flags: str) -> tuple[int, int, list[str], str]:
    """Run a script of the project: exit code, peak resident bytes of its process, modules that it imported, what it said.

    The peak is read by the process itself: what wait4 reports for a child may be its parent's.
    """
    command = [sys.executable, "-c", _MEASURE, str(ROOT / "scripts" / f"{script}.py"), *flags]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak, modules = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("MEASURED ")).removeprefix("MEASURED "))
    return run.returncode, peak, modules, run.stdout[-3000:] if run.returncode else ""
