"""Small checkpoints with random weights in the public file format, for the demo and for tests.

The weights are the same bits on every machine and with every numpy: each tensor has its own Philox stream (the key is a hash of
seed and name), normals are sums of integers, and everything after that is IEEE arithmetic without transcendental functions.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from dsv3_jax.checkpoint import tiny_tokenizer
from dsv3_jax.config import BLOCK, ModelConfig

_FLOATS = {"bfloat16": ("BF16", ml_dtypes.bfloat16), "float16": ("F16", np.float16), "float32": ("F32", np.float32)}
_E4M3_MAX = 448.0
# How much larger than 1 / sqrt(K) a linear's weights are.
_GAIN = {
    "lm_head": 2.0, "q_proj": 1.5, "q_b_proj": 1.5, "kv_a_proj_with_mqa": 1.2, "kv_b_proj": 1.3, "o_proj": 1.3,
    "gate": 1.5, "gate_proj": 1.6, "up_proj": 1.2, "down_proj": 1.2,
}  # fmt: skip
_GENERATION = {
    "deepseek_v2": {"_from_model_config": True, "do_sample": True, "temperature": 0.3, "top_p": 0.95},
    "deepseek_v3": {"_from_model_config": True, "do_sample": True, "temperature": 0.6, "top_p": 0.95},
    "kimi_k2": {"max_length": 131072},
}


def make(
    path: str | os.PathLike,
    config: Mapping,
    seed: int,
    *,
    decisive: bool = False,
    dtype: str = "bfloat16",
    n_shards: int = 4,
    bias_mean: float = 3.0,
    tokenizer: bool = True,
) -> int:
    """Write a Hugging Face checkpoint folder with random weights, one tensor in memory at a time; return the bytes of its tensors.

    `config` is the content of a config.json; linears are block-quantised to FP8 iff it has a quantization_config, other tensors
    are stored in `dtype`. Every seventh scale lies in another shard than its weight, as in the public releases.
    decisive=True spaces the experts' scores so widely that no rounding can change which experts are chosen.
    Raises ValueError for a config that ModelConfig refuses, an unknown dtype or a vocabulary too small for a tokenizer.
    """
    model = ModelConfig.from_json(config)
    if dtype not in _FLOATS:
        raise ValueError(f"dtype = {dtype!r}: must be one of {', '.join(_FLOATS)}")
    if n_shards < 1:
        raise ValueError(f"n_shards = {n_shards}: must be at least 1")
    os.makedirs(path, exist_ok=True)
    weights = _Weights(model, seed, decisive, bias_mean)
    layout = {}
    for name, shape in _shapes(model):
        fp8 = model.quantization_config is not None and is_fp8_linear(name)
        layout[name] = ("F8_E4M3" if fp8 else "F32" if name.endswith("e_score_correction_bias") else _FLOATS[dtype][0], shape)
        if fp8:
            layout[name + "_scale_inv"] = ("F32", (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)))
    shards = _Shards(os.fspath(path), layout, n_shards, wide_numbers=model.quantization_config is not None)
    for name, shape in _shapes(model):
        w = weights.make(name, shape)
        if name + "_scale_inv" in layout:
            assert model.quantization_config is not None
            codes, scale = quantize_blocks(w, model.quantization_config.scale_fmt)
            shards.write(name, codes)
            shards.write(name + "_scale_inv", scale)
        else:
            shards.write(name, w if layout[name][0] == "F32" else w.astype(_FLOATS[dtype][1]))
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    _dump(path, "model.safetensors.index.json", {"metadata": {"total_size": shards.total_size}, "weight_map": shards.weight_map})
    _dump(path, "config.json", {**config, "torch_dtype": dtype})
    _dump(path, "generation_config.json", {**_GENERATION[model.model_type], **ids, "transformers_version": "4.46.3"})
    if tokenizer:
        tiny_tokenizer.build(path, model)
    return shards.total_size


def is_fp8_linear(name: str) -> bool:
    """Whether the FP8 releases quantise this tensor: attention projections and every gate, up and down projection."""
    return name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight")) and not name.endswith("eh_proj.weight")


def quantize_blocks(w: np.ndarray, scale_fmt: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Quantise a float32 (N, K) weight to e4m3 codes (N, K) and float32 scales (ceil(N/128), ceil(K/128)); edge blocks may be partial."""
    n, k = w.shape
    blocks = np.pad(np.abs(w), ((0, -n % BLOCK), (0, -k % BLOCK))).reshape(-(-n // BLOCK), BLOCK, -(-k // BLOCK), BLOCK)
    scale = np.maximum(blocks.max((1, 3)), np.float32(1e-10)) / np.float32(_E4M3_MAX)
    if scale_fmt == "ue8m0":  # the next power of two, exact: frexp gives a mantissa in [0.5, 1)
        mantissa, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    q = np.clip(w / _spread(scale, w.shape), -_E4M3_MAX, _E4M3_MAX)
    return q.astype(ml_dtypes.float8_e4m3fn), scale.astype(np.float32)


def _spread(blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """One value per block -> one value per element, cut at the partial edge blocks."""
    return blocks.repeat(BLOCK, 0)[: shape[0]].repeat(BLOCK, 1)[:, : shape[1]]


def _shapes(c: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all weights under the public names, the MTP modules after the main layers."""
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
    for i in [*range(c.num_hidden_layers), *c.mtp_layers]:
        p, heads, d = f"model.layers.{i}.", c.num_attention_heads, c.hidden_size
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{p}{norm}.weight", (d,)
        a = p + "self_attn."
        if c.q_lora_rank is None:
            yield a + "q_proj.weight", (heads * c.qk_head_dim, d)
        else:
            yield a + "q_a_proj.weight", (c.q_lora_rank, d)
            yield a + "q_a_layernorm.weight", (c.q_lora_rank,)
            yield a + "q_b_proj.weight", (heads * c.qk_head_dim, c.q_lora_rank)
        yield a + "kv_a_proj_with_mqa.weight", (c.kv_lora_rank + c.qk_rope_head_dim, d)
        yield a + "kv_a_layernorm.weight", (c.kv_lora_rank,)
        yield a + "kv_b_proj.weight", (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        yield a + "o_proj.weight", (d, heads * c.v_head_dim)
        if not c.is_moe_layer(i):
            yield from _mlp(p + "mlp.", c.intermediate_size, d)
        else:
            yield p + "mlp.gate.weight", (c.n_routed_experts, d)
            if c.has_correction_bias:
                yield p + "mlp.gate.e_score_correction_bias", (c.n_routed_experts,)
            for e in range(c.n_routed_experts):
                yield from _mlp(f"{p}mlp.experts.{e}.", c.moe_intermediate_size, d)
            if c.n_shared_experts:
                yield from _mlp(p + "mlp.shared_experts.", c.moe_intermediate_size * c.n_shared_experts, d)
        if i in c.mtp_layers:
            yield p + "embed_tokens.weight", (c.vocab_size, d)
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                yield f"{p}{norm}.weight", (d,)
            yield p + "eh_proj.weight", (d, 2 * d)
            yield p + "shared_head.head.weight", (c.vocab_size, d)
    yield "model.norm.weight", (c.hidden_size,)
    yield "lm_head.weight", (c.vocab_size, c.hidden_size)


def _mlp(prefix: str, ffn: int, d: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (ffn, d)
    yield prefix + "up_proj.weight", (ffn, d)
    yield prefix + "down_proj.weight", (d, ffn)


class _Weights:
    """Random float32 tensors, scaled so that routing, attention and logits (standard deviation about 2) are far from trivial."""

    def __init__(self, config: ModelConfig, seed: int, decisive: bool, bias_mean: float):
        self.config, self.seed, self.decisive, self.bias_mean = config, seed, decisive, bias_mean
        u = self._normal("direction", (config.hidden_size,)).astype(np.float64)
        self.direction = (u / math.sqrt(math.fsum(u * u))).astype(np.float32)

    def make(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        # The MTP module's embedding and head are copies of the main model's, as in the releases.
        if name.endswith("embed_tokens.weight"):
            name = "model.embed_tokens.weight"
        elif name.endswith("shared_head.head.weight"):
            name = "lm_head.weight"
        w, kind = self._normal(name, shape), name.split(".")[-2]
        softmax_decisive = self.decisive and not self.config.has_correction_bias
        if name.endswith("e_score_correction_bias"):
            offset = np.float32(1.2) * self._permutation(name, shape[0]) if self.decisive else np.float32(0.4) * w
            return np.float32(self.bias_mean) + offset
        if kind == "embed_tokens":
            return w + np.float32(4 * math.sqrt(shape[1])) * self.direction if softmax_decisive else w
        if len(shape) == 1:
            return np.maximum(np.abs(1 + np.float32(0.3) * w), np.float32(0.15))
        w *= np.float32(_GAIN.get(kind, 1.0) / math.sqrt(shape[1]))
        if self.config.quantization_config is not None and is_fp8_linear(name):
            w *= self._block_magnitudes(name, shape)
        if kind == "gate" and softmax_decisive:
            w = np.float32(0.1) * w + np.float32(0.09) * self._permutation(name, shape[0])[:, None] * self.direction
        return w

    def _raw(self, name: str, n: int) -> np.ndarray:
        key = int.from_bytes(hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:16], "little")
        return np.random.Philox(key=key).random_raw(n)

    def _normal(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Nearly normal, variance 1: each value is a sum of eight 16-bit integers, added as lanes of two 64-bit words."""
        n, lanes = math.prod(shape), np.uint64(0x0000FFFF0000FFFF)
        raw = self._raw(name, 2 * n)
        raw = (raw & lanes) + ((raw >> np.uint64(16)) & lanes)
        raw = raw[:n] + raw[n:]
        total = (raw & np.uint64(0xFFFFFFFF)) + (raw >> np.uint64(32))
        centred = total.astype(np.int32) - 4 * 0xFFFF
        return (centred.astype(np.float32) * np.float32(1 / math.sqrt(8 * (2**32 - 1) / 12))).reshape(shape)

    def _permutation(self, name: str, n: int) -> np.ndarray:
        return np.argsort(np.argsort(self._raw(name + "/order", n), kind="stable"), kind="stable").astype(np.float32)

    def _block_magnitudes(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A magnitude of its own for every block, from 0.4 to 2 before their mean square is made 1."""
        n, k = (-(-s // BLOCK) for s in shape)
        u = self._raw(name + "/blocks", n * k) >> np.uint64(11)
        f = 0.4 + 1.6 * (u.astype(np.float64) * 2.0**-53)
        f /= math.sqrt(math.fsum(f * f) / f.size)
        return _spread(f.astype(np.float32).reshape(n, k), shape)


class _Shards:
    """Safetensors files whose headers are written first, so that tensors can be filled in in any order."""

    def __init__(self, path: str, layout: dict[str, tuple[str, tuple[int, ...]]], n_shards: int, wide_numbers: bool):
        sizes = {name: math.prod(shape) * _itemsize(kind) for name, (kind, shape) in layout.items()}
        self.total_size = sum(sizes.values())
        groups, filled = [[]], 0
        for name in sorted(layout):
            if filled + sizes[name] > self.total_size / n_shards and groups[-1] and len(groups) < n_shards:
                groups.append([])
                filled = 0
            groups[-1].append(name)
            filled += sizes[name]
        shard = {name: i for i, group in enumerate(groups) for name in group}
        for name in [n for n in sorted(layout) if n.endswith("_scale_inv")][::7]:
            shard[name] = (shard[name] + 1) % len(groups)
        digits = 6 if wide_numbers else 5  # the FP8 releases count "of-000163"
        files = [f"model-{i + 1:05d}-of-{len(groups):0{digits}d}.safetensors" for i in range(len(groups))]
        self.weight_map = {name: files[shard[name]] for name in sorted(layout)}
        self._place: dict[str, tuple[str, int, int]] = {}
        for i, file in enumerate(files):
            header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
            end = 0
            # Wider elements first keeps every tensor aligned, as the safetensors library writes them.
            for name in sorted((n for n in shard if shard[n] == i), key=lambda n: (-_itemsize(layout[n][0]), n)):
                header[name] = {"dtype": layout[name][0], "shape": layout[name][1], "data_offsets": [end, end + sizes[name]]}
                end += sizes[name]
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            with open(os.path.join(path, file), "wb") as f:
                f.write(len(text).to_bytes(8, "little") + text)
                f.truncate(8 + len(text) + end)
            for name, entry in header.items():
                if name != "__metadata__":
                    self._place[name] = (os.path.join(path, file), 8 + len(text) + entry["data_offsets"][0], sizes[name])

    def write(self, name: str, array: np.ndarray) -> None:
        file, offset, size = self._place[name]
        assert array.nbytes == size, (name, array.nbytes, size)
        with open(file, "r+b") as f:
            f.seek(offset)
            f.write(np.ascontiguousarray(array).view(np.uint8).data)


def _itemsize(kind: str) -> int:
    return {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}[kind]


def _dump(path: str | os.PathLike, file: str, content: dict) -> None:
    with open(os.path.join(path, file), "w", encoding="utf-8") as f:
        json.dump(content, f, indent=2, ensure_ascii=False)
