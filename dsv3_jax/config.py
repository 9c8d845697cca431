"""The hyper-parameters of one model, under the names that Hugging Face's config.json gives them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping

FAMILIES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_HUGE = 2**31  # sizes and token ids are int32 on a device
BLOCK = 128  # rows and columns that share one FP8 scale


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN as published (arXiv:2309.00071, appendix A): how RoPE is stretched past its original length."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """Block-wise FP8: e4m3 codes, one scale per weight_block_size block; scale_fmt 'ue8m0' means powers of two."""

    weight_block_size: tuple[int, int] = (BLOCK, BLOCK)
    scale_fmt: str | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One model of the DeepSeek-V2/V3 family; every field is a config.json key of the same name.

    Raises ValueError, naming the field, the value and the constraint, when the fields contradict each other.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    rms_norm_eps: float
    norm_topk_prob: bool
    routed_scaling_factor: float
    scoring_func: str
    topk_method: str
    first_k_dense_replace: int
    max_position_embeddings: int
    q_lora_rank: int | None = None
    n_group: int = 1
    topk_group: int = 1
    moe_layer_freq: int = 1
    num_nextn_predict_layers: int = 0
    rope_scaling: RopeScaling | None = None
    quantization_config: QuantizationConfig | None = None
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, source: str | os.PathLike | Mapping) -> ModelConfig:
        """Read a Hugging Face config.json or the reference demo's own JSON: a path, or an already parsed mapping.

        Raises ValueError for a file that is no JSON object, a family that is not supported, and unknown, missing,
        mistyped or contradictory keys; the message names the file, the key and the remedy.
        """
        from dsv3_jax import config_json

        if isinstance(source, Mapping):
            raw, where = dict(source), "config"
        else:
            where = os.path.expanduser(os.fspath(source))
            try:
                with open(where, encoding="utf-8") as f:
                    raw = json.load(f)
            except ValueError as e:  # also bytes that are no UTF-8, and integers of thousands of digits
                raise ValueError(f"{where}: not valid JSON ({e}); fetch the file again") from e
        try:
            return cls(**config_json.fields_of(raw))
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from e

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: the part without position and the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def has_correction_bias(self) -> bool:
        """Whether the router adds e_score_correction_bias when it chooses experts."""
        return self.topk_method == "noaux_tc"

    @property
    def mtp_layers(self) -> range:
        """Layer ids of the multi-token-prediction modules, which follow the main layers."""
        return range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` routes to experts; MTP modules always do."""
        if layer >= self.num_hidden_layers:
            return True
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def __post_init__(self):
        self._check_sizes()
        self._check_routing()

    def _check_sizes(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None or not str(field.type).startswith("int"):
                continue
            _require(value < _HUGE, field.name, value, f"must be below {_HUGE:,}: no model of this family comes near")
            if field.type == "int" and field.name not in ("first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts"):
                _require(value > 0, field.name, value, "must be positive")
        for name in ("first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        _require(self.model_type in FAMILIES, "model_type", self.model_type, f"must be one of {', '.join(FAMILIES)}")
        _require(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", self.qk_rope_head_dim, "must be even: RoPE rotates pairs")
        _require(self.q_lora_rank is None or self.q_lora_rank > 0, "q_lora_rank", self.q_lora_rank, "must be positive or null")
        _require(self.rms_norm_eps > 0, "rms_norm_eps", self.rms_norm_eps, "must be positive")
        _require(self.rope_theta > 1, "rope_theta", self.rope_theta, "must be above 1")
        _require(self.first_k_dense_replace <= self.num_hidden_layers, "first_k_dense_replace", self.first_k_dense_replace,
                 f"must not exceed num_hidden_layers ({self.num_hidden_layers})")
        bos = () if self.bos_token_id is None else (self.bos_token_id,)
        for name, ids in (("bos_token_id", bos), ("eos_token_id", self.eos_token_id)):
            for i in ids:
                _require(0 <= i < self.vocab_size, name, i, f"must lie in the vocabulary (vocab_size {self.vocab_size})")
        if (q := self.quantization_config) is not None:
            _require(q.weight_block_size == (BLOCK, BLOCK), "quantization_config.weight_block_size", list(q.weight_block_size),
                     f"must be [{BLOCK}, {BLOCK}], the only block size this family is published with")
            _require(q.scale_fmt in (None, "ue8m0"), "quantization_config.scale_fmt", q.scale_fmt, "must be absent or 'ue8m0'")
        if (r := self.rope_scaling) is not None:
            _check_yarn(r)

    def _check_routing(self):
        _require(self.scoring_func in ("softmax", "sigmoid"), "scoring_func", self.scoring_func, "must be 'softmax' or 'sigmoid'")
        methods = ("greedy", "group_limited_greedy", "noaux_tc")
        _require(self.topk_method in methods, "topk_method", self.topk_method, f"must be one of {', '.join(methods)}")
        experts, groups = self.n_routed_experts, self.n_group
        _require(experts % groups == 0, "n_group", groups, f"must divide n_routed_experts ({experts})")
        _require(self.routed_scaling_factor > 0, "routed_scaling_factor", self.routed_scaling_factor, "must be positive")
        _require(self.topk_group <= groups, "topk_group", self.topk_group, f"must not exceed n_group ({groups})")
        live = experts if self.topk_method == "greedy" else experts // groups * self.topk_group
        _require(self.num_experts_per_tok <= live, "num_experts_per_tok", self.num_experts_per_tok,
                 f"must not exceed the {live} experts that topk_group {self.topk_group} of n_group {groups} leaves")
        if self.has_correction_bias and groups > 1:
            _require(experts // groups >= 2, "n_group", groups, "must leave at least two a group: noaux_tc adds up each group's best two")


def _check_yarn(r: RopeScaling) -> None:
    length, name = r.original_max_position_embeddings, "rope_scaling.original_max_position_embeddings"
    _require(isinstance(length, int), name, length, "must be an integer, as it is a number of positions")
    _require(0 < length < _HUGE, name, length, f"must be positive and below {_HUGE:,}")
    _require(r.factor >= 1, "rope_scaling.factor", r.factor, "must be at least 1")
    _require(r.beta_slow > 0, "rope_scaling.beta_slow", r.beta_slow, "must be positive: YaRN takes its logarithm")
    _require(r.beta_fast > 0, "rope_scaling.beta_fast", r.beta_fast, "must be positive: YaRN takes its logarithm")
    _require(r.beta_fast >= r.beta_slow, "rope_scaling.beta_fast", r.beta_fast, f"must not be below beta_slow ({r.beta_slow})")
    _require(r.mscale >= 0, "rope_scaling.mscale", r.mscale, "must not be negative")
    _require(r.mscale_all_dim >= 0, "rope_scaling.mscale_all_dim", r.mscale_all_dim, "must not be negative")


def _require(ok: bool, field: str, value: object, constraint: str) -> None:
    if not ok:
        raise ValueError(f"{field} = {shown(value)}: {constraint}")


def shown(value: object) -> str:
    """Return how a message shows a value: repr, cut short in the middle; integers of thousands of digits have no repr."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else f"an integer of {value.bit_length()} bits"
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"
