"""The one name table: which source tensors of a Hugging Face checkpoint fill which array of ours.

Dimensions: V vocab_size, D hidden_size, F width of a feed-forward layer, E n_routed_experts; (N, K) output and input features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from dsv3_jax.config import BLOCK, ModelConfig

Kind = Literal["float", "float32", "fp8", "scale"]
SCALE = "_scale_inv"  # what the name of an FP8 weight's scales adds to the weight's own name


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One source tensor and the place that it fills: target[index] = source, whole."""

    source: str
    index: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One array of the converted checkpoint.

    kind: 'float' keeps the floating type of its source, 'float32' is float32 whatever the source, 'fp8' is float8_e4m3fn,
    'scale' is the float32 scales of an FP8 array. The pieces fill the array exactly once.
    """

    shape: tuple[int, ...]
    kind: Kind
    pieces: tuple[Piece, ...]

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of each source tensor."""
        return self.shape[len(self.pieces[0].index) :]


def targets(config: ModelConfig, mtp: bool = True) -> dict[str, Target]:
    """Return every array of the converted checkpoint by its path, joined by '.', from the config alone.

    The MTP layers, num_hidden_layers and up, are left out when `mtp` is false.
    """
    c = config
    table = {
        "embed_tokens.weight": _plain("model.embed_tokens.weight", c.vocab_size, c.hidden_size),
        "norm.weight": _plain("model.norm.weight", c.hidden_size),
        "lm_head.weight": _plain("lm_head.weight", c.vocab_size, c.hidden_size),
    }
    for i in range(c.num_hidden_layers):
        table.update(_layer(c, i))
    for i in c.mtp_layers if mtp else ():
        table.update(_layer(c, i))
        for name in ("enorm", "hnorm", "shared_head.norm"):
            table[f"layers.{i}.{name}.weight"] = _plain(f"model.layers.{i}.{name}.weight", c.hidden_size)
        table[f"layers.{i}.eh_proj.weight"] = _plain(f"model.layers.{i}.eh_proj.weight", c.hidden_size, 2 * c.hidden_size)
        for name in ("embed_tokens", "shared_head.head"):
            table[f"layers.{i}.{name}.weight"] = _plain(f"model.layers.{i}.{name}.weight", c.vocab_size, c.hidden_size)
    return table


def _layer(c: ModelConfig, i: int) -> Iterator[tuple[str, Target]]:
    ours, theirs = f"layers.{i}", f"model.layers.{i}"
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{ours}.{name}.weight", _plain(f"{theirs}.{name}.weight", c.hidden_size)
    for name, rows, columns in _attention(c):
        yield from _linear(c, f"{ours}.self_attn.{name}", (rows, columns), [Piece(f"{theirs}.self_attn.{name}")])
    norms = [("kv_a_layernorm", c.kv_lora_rank)] + ([("q_a_layernorm", c.q_lora_rank)] if c.q_lora_rank else [])
    for name, size in norms:
        yield f"{ours}.self_attn.{name}.weight", _plain(f"{theirs}.self_attn.{name}.weight", size)
    if not c.is_moe_layer(i):
        yield from _mlp(c, f"{ours}.mlp", f"{theirs}.mlp", c.intermediate_size)
        return
    yield f"{ours}.mlp.gate.weight", _plain(f"{theirs}.mlp.gate.weight", c.n_routed_experts, c.hidden_size)
    if c.has_correction_bias:
        bias = "mlp.gate.e_score_correction_bias"
        yield f"{ours}.{bias}", Target((c.n_routed_experts,), "float32", (Piece(f"{theirs}.{bias}"),))
    experts, width = range(c.n_routed_experts), c.moe_intermediate_size
    gate_up = [Piece(f"{theirs}.mlp.experts.{e}.{name}", (e, j)) for e in experts for j, name in enumerate(("gate_proj", "up_proj"))]
    yield from _linear(c, f"{ours}.mlp.experts.gate_up_proj", (len(experts), 2, width, c.hidden_size), gate_up)
    down = [Piece(f"{theirs}.mlp.experts.{e}.down_proj", (e,)) for e in experts]
    yield from _linear(c, f"{ours}.mlp.experts.down_proj", (len(experts), c.hidden_size, width), down)
    if c.n_shared_experts:
        yield from _mlp(c, f"{ours}.mlp.shared_experts", f"{theirs}.mlp.shared_experts", width * c.n_shared_experts)


def _attention(c: ModelConfig) -> Iterator[tuple[str, int, int]]:
    heads, hidden = c.num_attention_heads, c.hidden_size
    if c.q_lora_rank:
        yield "q_a_proj", c.q_lora_rank, hidden
        yield "q_b_proj", heads * c.qk_head_dim, c.q_lora_rank
    else:
        yield "q_proj", heads * c.qk_head_dim, hidden
    yield "kv_a_proj_with_mqa", c.kv_lora_rank + c.qk_rope_head_dim, hidden
    yield "kv_b_proj", heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank
    yield "o_proj", hidden, heads * c.v_head_dim


def _mlp(c: ModelConfig, ours: str, theirs: str, width: int) -> Iterator[tuple[str, Target]]:
    gate_up = [Piece(f"{theirs}.{name}", (j,)) for j, name in enumerate(("gate_proj", "up_proj"))]
    yield from _linear(c, f"{ours}.gate_up_proj", (2, width, c.hidden_size), gate_up)
    yield from _linear(c, f"{ours}.down_proj", (c.hidden_size, width), [Piece(f"{theirs}.down_proj")])


def _linear(c: ModelConfig, path: str, shape: tuple[int, ...], modules: list[Piece]) -> Iterator[tuple[str, Target]]:
    """Yield the weight of one linear layer and, in an FP8 model, its scales: one per 128 x 128 block, the last ones partial."""
    weights = tuple(Piece(f"{p.source}.weight", p.index) for p in modules)
    yield f"{path}.weight", Target(shape, "fp8" if c.quantization_config else "float", weights)
    if c.quantization_config:
        blocks = (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
        scales = tuple(Piece(p.source + SCALE, p.index) for p in weights)
        yield f"{path}.weight{SCALE}", Target(blocks, "scale", scales)


def _plain(source: str, *shape: int) -> Target:
    return Target(shape, "float", (Piece(source),))
