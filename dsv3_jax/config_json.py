"""From a JSON object to the fields of ModelConfig: Hugging Face's config.json, or the reference demo's own keys."""

from __future__ import annotations

import dataclasses

from dsv3_jax.config import FAMILIES, ModelConfig, QuantizationConfig, RopeScaling, shown

# Keys that say how a model is trained, saved or served by other software, and change nothing here.
_IGNORED = frozenset(
    """_attn_implementation _name_or_path architectures attention_dropout attn_implementation auto_map aux_loss_alpha
    chunk_size_feed_forward decoder_start_token_id dtype ep_size finetuning_task head_dim id2label initializer_range is_decoder
    is_encoder_decoder label2id license max_window_layers moe_router_bias_update_speed num_attention_layers output_attentions
    output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type qk_head_dim return_dict router_aux_loss_coef
    seq_aux sep_token_id tokenizer_class torch_dtype transformers_version unsloth_fixed use_cache
    use_return_dict""".split()
)
_FLOAT32_MAX = 3.4028234e38
# Keys with one supported value: anything else would change the arithmetic.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "rope_interleave": True, "mlp_bias": False}
# Values that a family's own code fixes, so that some of its files leave them out.
_FAMILY_DEFAULTS = {
    "deepseek_v2": {"scoring_func": "softmax"},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "kimi_k2": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
_ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM",
}  # fmt: skip
_NULLABLE = ("q_lora_rank", "bos_token_id", "eos_token_id", "rope_scaling", "quantization_config")
_REFERENCE_NAMES = {
    "vocab_size": "vocab_size", "dim": "hidden_size", "inter_dim": "intermediate_size", "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers", "n_dense_layers": "first_k_dense_replace", "n_heads": "num_attention_heads",
    "n_routed_experts": "n_routed_experts", "n_shared_experts": "n_shared_experts", "n_activated_experts": "num_experts_per_tok",
    "n_expert_groups": "n_group", "n_limited_groups": "topk_group", "score_func": "scoring_func", "route_scale": "routed_scaling_factor",
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim", "v_head_dim": "v_head_dim", "rope_theta": "rope_theta",
}  # fmt: skip
# What the reference's ModelArgs assumes for a key that its JSON leaves out.
_REFERENCE_DEFAULTS = {
    "vocab_size": 102400, "dim": 2048, "inter_dim": 10944, "moe_inter_dim": 1408, "n_layers": 27, "n_dense_layers": 1, "n_heads": 16,
    "n_routed_experts": 64, "n_shared_experts": 2, "n_activated_experts": 6, "n_expert_groups": 1, "n_limited_groups": 1,
    "score_func": "softmax", "route_scale": 1.0, "q_lora_rank": 0, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "rope_theta": 10000.0, "original_seq_len": 4096, "rope_factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "dtype": "bf16", "scale_fmt": None, "max_batch_size": 8, "max_seq_len": 16384,
}  # fmt: skip


def fields_of(raw: object) -> dict:
    """Return ModelConfig's keyword arguments from a parsed JSON object; ValueError names the key that does not fit."""
    if not isinstance(raw, dict):
        raise ValueError(f"must hold a JSON object, holds {type(raw).__name__}")
    fields = _from_reference(raw) if "dim" in raw and "hidden_size" not in raw else _from_hugging_face(raw)
    _check_types(fields)
    return fields


def _from_hugging_face(raw: dict) -> dict:
    family = _family(raw)
    raw = {**_FAMILY_DEFAULTS[family], **raw, "model_type": family}
    if "rope_parameters" in raw:  # transformers 5 writes rope_theta and rope_scaling in one object
        raw = _unfold_rope_parameters(raw)
    for key, only in _FIXED.items():
        if raw.get(key, only) != only:
            raise ValueError(f"{key} = {raw[key]!r}: only {only!r} is supported")
    heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        raise ValueError(f"num_key_value_heads = {kv_heads!r}: must equal num_attention_heads ({heads}); MLA has no grouped heads")
    _check_head_dims(raw)
    known = {f.name: f for f in dataclasses.fields(ModelConfig)}
    unknown = sorted(set(raw) - set(known) - _IGNORED - set(_FIXED) - {"num_key_value_heads"})
    if unknown:
        v32 = any(k.startswith("index_") for k in unknown)
        hint = "; index_* keys belong to DeepSeek-V3.2, whose sparse attention is not supported" if v32 else ""
        raise ValueError(f"unknown keys: {', '.join(unknown)}{hint}; remove them only if they do not change the arithmetic")
    fields = {k: v for k, v in raw.items() if k in known}
    if "n_shared_experts" in fields and fields["n_shared_experts"] is None:
        fields["n_shared_experts"] = 0
    required = [n for n, f in known.items() if f.default is dataclasses.MISSING]
    missing = sorted(n for n in required if fields.get(n) is None)
    if family == "deepseek_v3" and "q_lora_rank" not in fields:
        missing.append("q_lora_rank")
    if fields.get("topk_method") not in (None, "greedy"):  # no default: 1 group would silently route differently
        missing += [name for name in ("n_group", "topk_group") if name not in fields]
    if missing:
        raise ValueError(f"missing keys: {', '.join(sorted(missing))}; take config.json from the model's own release")
    eos = fields.get("eos_token_id")
    fields["eos_token_id"] = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    for name in ("n_group", "topk_group", "moe_layer_freq", "num_nextn_predict_layers"):
        if fields.get(name, 0) is None:
            del fields[name]
    fields["rope_scaling"] = _rope_scaling(fields.get("rope_scaling"))
    fields["quantization_config"] = _quantization(fields.get("quantization_config"))
    return fields


def _family(raw: dict) -> str:
    found = raw.get("model_type")
    listed = raw.get("architectures")
    arch = listed[0] if isinstance(listed, list) and listed else None
    if found is None and arch in _ARCHITECTURES.values():
        return "deepseek_v2" if arch == _ARCHITECTURES["deepseek_v2"] else "deepseek_v3"
    if found in FAMILIES:
        named = listed if isinstance(listed, list) else [] if listed is None else [listed]
        if any(name != _ARCHITECTURES[found] for name in named):
            raise ValueError(f"architectures = {listed!r} contradicts model_type = {found!r}, which goes with {_ARCHITECTURES[found]}; "
                             "take config.json from the model's own release")  # fmt: skip
        return found
    hint = ""
    if found in ("llama", "qwen2"):
        hint = "; the R1-Distill models are Llama and Qwen models: run them with software for those families"
    elif found == "deepseek_v32":
        hint = "; DeepSeek-V3.2 adds a sparse-attention indexer, which is not supported"
    elif str(found).startswith(("deepseek_vl", "kimi_vl", "kimi_k25")):
        hint = "; vision-language models are not supported"
    raise ValueError(f"model_type = {found!r} (architecture {arch}): supported are {', '.join(FAMILIES)}{hint}")


def _check_head_dims(raw: dict) -> None:
    """Hold the two widths that follow from others to what they follow from; head_dim means either of two, as software differs."""
    nope, rope = raw.get("qk_nope_head_dim"), raw.get("qk_rope_head_dim")
    if not isinstance(nope, int) or not isinstance(rope, int):
        return  # said elsewhere
    for key, allowed in (("qk_head_dim", (nope + rope,)), ("head_dim", (rope, nope + rope, raw.get("v_head_dim")))):
        if raw.get(key) is not None and raw[key] not in allowed:
            raise ValueError(f"{key} = {shown(raw[key])}: contradicts qk_nope_head_dim {nope} and qk_rope_head_dim {rope}; "
                             "take config.json from the model's own release")  # fmt: skip


def _unfold_rope_parameters(raw: dict) -> dict:
    rope = raw["rope_parameters"]
    rest = {k: v for k, v in raw.items() if k != "rope_parameters"}
    if rope is None:
        return rest
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters = {rope!r}: must be an object")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    plain = _rope_type(scaling, "rope_parameters") in (None, "default")
    unfolded = {"rope_theta": theta, "rope_scaling": None if plain else scaling}
    if raw.get("rope_theta", theta) != theta:
        raise ValueError(f"rope_theta = {raw['rope_theta']!r} contradicts rope_parameters.rope_theta = {theta!r}; keep one")
    if raw.get("rope_scaling") and _rope_scaling(raw["rope_scaling"]) != _rope_scaling(unfolded["rope_scaling"]):
        raise ValueError("rope_scaling contradicts rope_parameters; keep one")
    return {**rest, **unfolded}


def _rope_type(raw: dict, where: str) -> object:
    kind = raw.get("rope_type", raw.get("type"))
    if raw.get("type", kind) != kind:
        raise ValueError(f"{where}.type = {raw['type']!r} contradicts {where}.rope_type = {kind!r}; keep one")
    return kind


def _rope_scaling(raw: object) -> RopeScaling | None:
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ValueError(f"rope_scaling = {raw!r}: must be an object or null")
    kind = _rope_type(raw, "rope_scaling")
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"rope_scaling.type = {kind!r}: only 'yarn' is supported")
    known = {f.name for f in dataclasses.fields(RopeScaling)}
    unknown = sorted(set(raw) - known - {"type", "rope_type"})
    if unknown:
        raise ValueError(f"unknown keys in rope_scaling: {', '.join(unknown)}")
    missing = sorted({"factor", "original_max_position_embeddings"} - set(raw))
    if missing:
        raise ValueError(f"missing keys in rope_scaling: {', '.join(missing)}")
    for key in known & set(raw):
        _check_number(f"rope_scaling.{key}", raw[key])
    _check_integer("rope_scaling.original_max_position_embeddings", raw["original_max_position_embeddings"])
    return RopeScaling(**{k: raw[k] for k in known & set(raw)})


def _quantization(raw: object) -> QuantizationConfig | None:
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ValueError(f"quantization_config = {raw!r}: must be an object or null")
    method = raw.get("quant_method")
    if method != "fp8":
        raise ValueError(f"quantization_config.quant_method = {method!r}: only 'fp8' (block scales) is supported; use the original release")
    for key, only in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if raw.get(key, only) != only:
            raise ValueError(f"quantization_config.{key} = {raw[key]!r}: only {only!r} is supported")
    block = raw.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2:
        raise ValueError(f"quantization_config.weight_block_size = {block!r}: must be [128, 128]; per-tensor FP8 is not supported")
    return QuantizationConfig(weight_block_size=(block[0], block[1]), scale_fmt=raw.get("scale_fmt"))


def _from_reference(raw: dict) -> dict:
    unknown = sorted(set(raw) - set(_REFERENCE_DEFAULTS))
    if unknown:
        raise ValueError(f"unknown keys: {', '.join(unknown)}; the reference's keys are {', '.join(sorted(_REFERENCE_DEFAULTS))}")
    args = {**_REFERENCE_DEFAULTS, **raw}
    if args["dtype"] not in ("bf16", "fp8"):
        raise ValueError(f"dtype = {args['dtype']!r}: must be 'bf16' or 'fp8'")
    if args["scale_fmt"] not in (None, "ue8m0"):
        raise ValueError(f"scale_fmt = {args['scale_fmt']!r}: must be absent or 'ue8m0'")
    if args["scale_fmt"] and args["dtype"] == "bf16":
        raise ValueError(f"scale_fmt = {args['scale_fmt']!r} contradicts dtype = 'bf16': set dtype to 'fp8', or remove it")
    fields = {ours: args[theirs] for theirs, ours in _REFERENCE_NAMES.items()}
    sigmoid = args["score_func"] == "sigmoid"
    method = "noaux_tc" if sigmoid else "greedy" if args["n_expert_groups"] == 1 else "group_limited_greedy"
    for key in ("original_seq_len", "rope_factor", "beta_fast", "beta_slow", "mscale"):
        _check_number(key, args[key])
    _check_integer("original_seq_len", args["original_seq_len"])
    scale = args["mscale"]
    return {
        **fields,
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "q_lora_rank": args["q_lora_rank"] or None,
        "topk_method": method,
        "norm_topk_prob": sigmoid,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": int(args["original_seq_len"] * args["rope_factor"]),
        "rope_scaling": RopeScaling(args["rope_factor"], args["original_seq_len"], args["beta_fast"], args["beta_slow"], scale, scale),
        "quantization_config": QuantizationConfig(scale_fmt=args["scale_fmt"]) if args["dtype"] == "fp8" else None,
    }


def _check_types(fields: dict) -> None:
    """Hold every field to the type that ModelConfig declares: JSON gives strings, floats and booleans as easily."""
    for f in dataclasses.fields(ModelConfig):
        value = fields.get(f.name)
        if f.name not in fields or (value is None and f.name in _NULLABLE):
            continue
        declared = str(f.type)
        if declared.startswith("int"):
            _check_integer(f.name, value)
        if declared == "float":
            _check_number(f.name, value)
        if declared == "bool" and not isinstance(value, bool):
            raise ValueError(f"{f.name} = {value!r}: must be true or false")
        if declared == "str" and not isinstance(value, str):
            raise ValueError(f"{f.name} = {value!r}: must be a string")
        if isinstance(value, tuple) and not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise ValueError(f"eos_token_id = {value!r}: must be an integer or a list of integers")


def _check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} = {value!r}: must be an integer")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _FLOAT32_MAX:
        raise ValueError(f"{name} = {shown(value)}: must be a finite number, in the range of float32")
