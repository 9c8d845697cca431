"""ModelConfig: the published values, the reference's own vocabulary, and what users are told about files that do not fit."""

from __future__ import annotations

import copy
import json
import pathlib

import pytest

from dsv3_jax import ModelConfig
from dsv3_jax.config import QuantizationConfig, RopeScaling

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
YARN = RopeScaling(40, 4096, 32, 1, 1.0, 1.0)
YARN_V2 = RopeScaling(40, 4096, 32, 1, 0.707, 0.707)
# Published values: model cards, reports (arXiv:2405.04434, arXiv:2412.19437) and the config.json of each release.
MLA = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_head_dim": 192, "rope_theta": 10000,
    "rms_norm_eps": 1e-6, "moe_layer_freq": 1, "max_position_embeddings": 163840,
}  # fmt: skip
V2 = {
    **MLA, "model_type": "deepseek_v2", "vocab_size": 102400, "scoring_func": "softmax", "norm_topk_prob": False, "rope_scaling": YARN_V2,
    "num_nextn_predict_layers": 0, "quantization_config": None, "has_correction_bias": False, "first_k_dense_replace": 1,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "bos_token_id": 100000, "eos_token_id": (100001,),
}  # fmt: skip
V3 = {
    **MLA, "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size":
    2048, "num_hidden_layers": 61, "first_k_dense_replace": 3, "num_attention_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "q_lora_rank": 1536, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "num_nextn_predict_layers": 1, "has_correction_bias": True, "rope_scaling": YARN,
    "bos_token_id": 0, "eos_token_id": (1,), "mtp_layers": range(61, 62),
}  # fmt: skip
PUBLISHED = {
    "deepseek_v2_lite_16b": {
        **V2, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "n_group": 1,
        "num_attention_heads": 16, "n_routed_experts": 64, "topk_group": 1, "q_lora_rank": None, "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    "deepseek_v2_236b": {
        **V2, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 60, "n_group": 8,
        "num_attention_heads": 128, "n_routed_experts": 160, "topk_group": 3, "q_lora_rank": 1536, "routed_scaling_factor": 16.0,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3_671b": {**V3, "quantization_config": QuantizationConfig((128, 128), None)},
    "deepseek_v3.1_671b": {**V3, "quantization_config": QuantizationConfig((128, 128), "ue8m0")},
}  # fmt: skip
# inference/configs/*.json of deepseek-ai/DeepSeek-V3, in its own names.
REFERENCE_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
REFERENCE_671B = {
    **REFERENCE_MLA, "vocab_size": 129280, "dim": 7168, "inter_dim": 18432, "moe_inter_dim": 2048, "n_layers": 61, "n_dense_layers": 3,
    "n_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "n_activated_experts": 8, "n_expert_groups": 8, "n_limited_groups": 4,
    "route_scale": 2.5, "score_func": "sigmoid", "q_lora_rank": 1536, "dtype": "fp8",
}  # fmt: skip
REFERENCE = {
    "deepseek_v2_lite_16b": {
        **REFERENCE_MLA, "vocab_size": 102400, "dim": 2048, "inter_dim": 10944, "moe_inter_dim": 1408, "n_layers": 27, "n_dense_layers": 1,
        "n_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2, "n_activated_experts": 6, "route_scale": 1.0, "q_lora_rank": 0,
        "mscale": 0.707,
    },
    "deepseek_v2_236b": {
        **REFERENCE_MLA, "vocab_size": 102400, "dim": 5120, "inter_dim": 12288, "moe_inter_dim": 1536, "n_layers": 60, "n_dense_layers": 1,
        "n_heads": 128, "n_routed_experts": 160, "n_shared_experts": 2, "n_activated_experts": 6, "n_expert_groups": 8,
        "n_limited_groups": 3, "route_scale": 16.0, "q_lora_rank": 1536,
    },
    "deepseek_v3_671b": REFERENCE_671B,
    "deepseek_v3.1_671b": {**REFERENCE_671B, "scale_fmt": "ue8m0"},
}  # fmt: skip


def raw(name: str = "deepseek_v3_671b", drop: tuple[str, ...] = (), **changes) -> dict:
    content = json.loads((CONFIGS / f"{name}.json").read_text())
    return {k: v for k, v in {**content, **changes}.items() if k not in drop}


def yarn(**changes) -> dict:
    return raw(rope_scaling={**raw()["rope_scaling"], **changes})


def refuse(content, *words: str) -> None:
    with pytest.raises(ValueError) as e:
        ModelConfig.from_json(content)
    for word in words:
        assert word in str(e.value), f"{word!r} is not in: {e.value}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_hold_the_published_values(name):
    config = ModelConfig.from_json(CONFIGS / f"{name}.json")
    assert {k: getattr(config, k) for k in PUBLISHED[name]} == PUBLISHED[name]


def test_every_preset_is_checked():
    assert {p.stem for p in CONFIGS.glob("*.json")} == {*PUBLISHED, "tiny"}


def test_tiny_divides_over_four_devices_in_whole_blocks():
    c = ModelConfig.from_json(str(CONFIGS / "tiny.json"))
    assert c.quantization_config and c.num_nextn_predict_layers == 1 and c.vocab_size % 4 == 0 and c.n_routed_experts % 4 == 0
    per_head = (c.qk_head_dim, c.qk_nope_head_dim + c.v_head_dim, c.v_head_dim)
    cut = [c.num_attention_heads * w for w in per_head] + [c.intermediate_size, c.moe_intermediate_size * c.n_shared_experts]
    assert all(n % (4 * 128) == 0 for n in cut), cut


@pytest.mark.parametrize("name", REFERENCE)
def test_the_references_own_json_means_the_same_model(name):
    ours, theirs = ModelConfig.from_json(raw(name)), ModelConfig.from_json(REFERENCE[name])
    # What that JSON has no words for; its 236B preset leaves mscale at 1, where the release has 0.707.
    differ = {"bos_token_id", "eos_token_id", "num_nextn_predict_layers"} | ({"rope_scaling"} if name == "deepseek_v2_236b" else set())
    assert {f for f in ours.__dataclass_fields__ if getattr(ours, f) != getattr(theirs, f)} == differ - (
        {"num_nextn_predict_layers"} if "v2" in name else set()
    )
    assert theirs.rope_scaling == (YARN_V2 if name == "deepseek_v2_lite_16b" else YARN)


def test_the_references_defaults_and_engine_limits_are_accepted():
    config = ModelConfig.from_json({"dim": 2048, "max_batch_size": 8, "max_seq_len": 16384})
    assert (config.num_hidden_layers, config.n_routed_experts, config.topk_method) == (27, 64, "greedy")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_head": 128}, ("unknown keys: n_head", "n_heads")),
        ({"dtype": "int8"}, ("dtype = 'int8'", "'bf16' or 'fp8'")),
        ({"rope_factor": "40"}, ("rope_factor = '40'", "number")),
        ({"mscale": True}, ("mscale = True", "number")),
        ({"n_layers": 61.0}, ("num_hidden_layers = 61.0", "integer")),
        ({"scale_fmt": "e8m0"}, ("scale_fmt", "'ue8m0'")),
        ({"score_func": "tanh"}, ("scoring_func = 'tanh'",)),
        ({"dtype": "bf16", "scale_fmt": "ue8m0"}, ("scale_fmt = 'ue8m0' contradicts dtype = 'bf16'", "remove it")),
        ({"dtype": "bf16", "scale_fmt": "e8m0"}, ("scale_fmt = 'e8m0'", "'ue8m0'")),
        ({"original_seq_len": 4096.0}, ("original_seq_len = 4096.0", "integer")),
        ({"original_seq_len": 10**400}, ("original_seq_len = an integer of 1329 bits",)),
        ({"original_seq_len": 10**30, "rope_factor": 1e38}, ("max_position_embeddings", "below")),
        ({"beta_slow": 0}, ("rope_scaling.beta_slow = 0", "positive")),
    ],
)
def test_faults_in_the_references_json_are_named(change, words):
    refuse({**REFERENCE_671B, **change}, *words)


def test_other_published_families():
    kimi = ModelConfig.from_json(raw(model_type="kimi_k2", n_routed_experts=384, n_group=1, topk_group=1, num_nextn_predict_layers=0,
                                     rope_theta=50000.0, bos_token_id=163584, eos_token_id=163585, vocab_size=163840))  # fmt: skip
    assert kimi.has_correction_bias and kimi.mtp_layers == range(61, 61) and kimi.n_group == 1
    moonlight = ModelConfig.from_json(
        raw(q_lora_rank=None, hidden_size=2048, n_group=1, topk_group=1, rms_norm_eps=1e-5, drop=("rope_scaling", "quantization_config"))
    )
    assert moonlight.q_lora_rank is None and moonlight.rope_scaling is None and moonlight.quantization_config is None
    assert moonlight.has_correction_bias, "the bias follows topk_method, never hidden_size"
    assert ModelConfig.from_json(raw(drop=("model_type",))).model_type == "deepseek_v3", "found by its architecture"
    assert ModelConfig.from_json(raw(eos_token_id=[1, 128799])).eos_token_id == (1, 128799)
    assert ModelConfig.from_json(raw(n_shared_experts=None)).n_shared_experts == 0
    assert ModelConfig.from_json(raw(num_key_value_heads=None)).num_attention_heads == 128


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_5_writes_the_same_config_in_other_words(name):
    transformers = pytest.importorskip("transformers")
    content = raw(name, drop=("auto_map", "model_type"))
    kind = transformers.DeepseekV2Config if "v2" in name else transformers.DeepseekV3Config
    written = json.loads(kind(**copy.deepcopy(content)).to_json_string(use_diff=False))
    assert "rope_parameters" in written and "dtype" in written and "rope_scaling" not in written
    assert ModelConfig.from_json(written) == ModelConfig.from_json(raw(name))


def test_rope_parameters():
    yarn = {**raw()["rope_scaling"], "rope_type": "yarn", "rope_theta": 50000}
    new = ModelConfig.from_json(raw(rope_parameters=yarn, drop=("rope_scaling", "rope_theta")))
    assert (new.rope_theta, new.rope_scaling) == (50000, YARN)
    plain = ModelConfig.from_json(raw(rope_parameters={"rope_type": "default", "rope_theta": 7e4}, drop=("rope_scaling", "rope_theta")))
    assert (plain.rope_theta, plain.rope_scaling) == (7e4, None)
    assert ModelConfig.from_json(raw(rope_scaling={"rope_type": "default"})).rope_scaling is None
    refuse(raw(rope_parameters=yarn), "rope_theta = 10000 contradicts rope_parameters.rope_theta = 50000")
    refuse(raw(rope_parameters={**yarn, "factor": 4}, rope_theta=50000), "rope_scaling contradicts rope_parameters")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, ("'qwen2'", "Qwen2ForCausalLM", "deepseek_v3", "R1-Distill")),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, ("'llama'", "R1-Distill", "kimi_k2")),
        ({"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}, ("'deepseek_v32'", "indexer", "not supported")),
        ({"model_type": "deepseek_vl_v2", "architectures": ["DeepseekVLV2ForCausalLM"]}, ("'deepseek_vl_v2'", "vision")),
        ({"model_type": "kimi_k25", "text_config": {}}, ("'kimi_k25'", "vision")),
        ({"model_type": "kimi_vl"}, ("'kimi_vl'", "vision")),
        ({}, ("model_type = None", "supported are deepseek_v2, deepseek_v3, kimi_k2")),
        ({"architectures": "DeepseekV3ForCausalLM"}, ("model_type = None",)),
        ([], ("must hold a JSON object, holds list",)),
    ],
)
def test_other_families_are_named_with_what_is_supported(content, words, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    refuse(file, str(file), *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (raw(num_experts=8), ("unknown keys: num_experts",)),
        (raw(index_topk=2048, index_n_heads=64), ("unknown keys: index_n_heads, index_topk", "DeepSeek-V3.2")),
        (raw(drop=("hidden_size", "kv_lora_rank")), ("missing keys: hidden_size, kv_lora_rank",)),
        (raw(drop=("q_lora_rank",)), ("missing keys: q_lora_rank",)),
        (raw(drop=("n_group", "topk_group")), ("missing keys: n_group, topk_group",)),
        (raw(hidden_size="7168"), ("hidden_size = '7168'", "integer")),
        (raw(num_hidden_layers=True), ("num_hidden_layers = True", "integer")),
        (raw(rms_norm_eps="1e-6"), ("rms_norm_eps = '1e-6'", "number")),
        (raw(routed_scaling_factor=float("nan")), ("routed_scaling_factor = nan", "finite")),
        (raw(norm_topk_prob=1), ("norm_topk_prob = 1", "true or false")),
        (raw(eos_token_id=[1, "2"]), ("eos_token_id", "integer")),
        (raw(eos_token_id=129280), ("eos_token_id = 129280", "vocab_size 129280")),
        (raw(tie_word_embeddings=True), ("tie_word_embeddings = True", "only False")),
        (raw(attention_bias=True), ("attention_bias = True",)),
        (raw(hidden_act="gelu"), ("hidden_act = 'gelu'", "'silu'")),
        (raw(num_key_value_heads=8), ("num_key_value_heads = 8", "num_attention_heads (128)")),
        (raw(num_attention_heads=0, num_key_value_heads=0), ("num_attention_heads = 0", "positive")),
        (raw(n_group=7), ("n_group = 7", "n_routed_experts (256)")),
        (raw(topk_group=9), ("topk_group = 9", "n_group (8)")),
        (raw(num_experts_per_tok=200), ("num_experts_per_tok = 200", "128 experts")),
        (raw(n_group=256, topk_group=8), ("n_group = 256", "two")),
        (raw(scoring_func="relu"), ("scoring_func = 'relu'", "'softmax' or 'sigmoid'")),
        (raw(topk_method="gready"), ("topk_method = 'gready'", "greedy")),
        (raw(qk_rope_head_dim=63), ("qk_rope_head_dim = 63", "even")),
        (raw(q_lora_rank=0), ("q_lora_rank = 0", "null")),
        (raw(rope_scaling={"type": "linear", "factor": 4}), ("rope_scaling.type = 'linear'", "'yarn'")),
        (raw(rope_scaling={"type": "yarn"}), ("missing keys in rope_scaling: factor, original_max_position_embeddings",)),
        (raw(rope_scaling={**raw()["rope_scaling"], "attention_factor": 2}), ("unknown keys in rope_scaling: attention_factor",)),
        (raw(rope_scaling={**raw()["rope_scaling"], "factor": "40"}), ("rope_scaling.factor = '40'", "number")),
        (raw(rope_scaling="yarn"), ("rope_scaling = 'yarn'", "object")),
        (yarn(beta_slow=0), ("rope_scaling.beta_slow = 0", "positive")),
        (yarn(beta_fast=0), ("rope_scaling.beta_fast = 0", "positive")),
        (yarn(beta_fast=1, beta_slow=32), ("rope_scaling.beta_fast = 1:", "beta_slow (32)")),
        (yarn(mscale=-0.1), ("rope_scaling.mscale = -0.1", "negative")),
        (yarn(mscale_all_dim=-1), ("rope_scaling.mscale_all_dim = -1", "negative")),
        (yarn(factor=0.5), ("rope_scaling.factor = 0.5", "at least 1")),
        (yarn(original_max_position_embeddings=4096.0), ("original_max_position_embeddings = 4096.0", "integer")),
        (yarn(original_max_position_embeddings=10**12), ("original_max_position_embeddings = 1000000000000", "below 2,147,483,648")),
        (yarn(rope_type="linear"), ("rope_scaling.type = 'yarn' contradicts rope_scaling.rope_type = 'linear'",)),
        (yarn(rope_type="default"), ("rope_scaling.type = 'yarn' contradicts rope_scaling.rope_type = 'default'",)),
        (
            raw(rope_parameters={"type": "yarn", "rope_type": "default", "rope_theta": 1e4}, drop=("rope_scaling", "rope_theta")),
            ("rope_parameters.type = 'yarn' contradicts rope_parameters.rope_type = 'default'",),
        ),
        (raw(rope_theta=10**400), ("rope_theta = an integer of 1329 bits", "float32")),
        (raw(rope_theta=10**40), ("rope_theta", "float32")),
        (raw(hidden_size=10**400), ("hidden_size = an integer of 1329 bits", "below")),
        (raw(q_lora_rank=10**12), ("q_lora_rank = 1000000000000", "below")),
        (raw(qk_head_dim=128), ("qk_head_dim = 128", "qk_nope_head_dim 128 and qk_rope_head_dim 64")),
        (raw(head_dim=96), ("head_dim = 96", "qk_rope_head_dim 64")),
        (raw(architectures=["LlamaForCausalLM"]), ("['LlamaForCausalLM']", "model_type = 'deepseek_v3'", "DeepseekV3ForCausalLM")),
        (raw(architectures="LlamaForCausalLM"), ("'LlamaForCausalLM'", "model_type = 'deepseek_v3'")),
        (raw(architectures=["DeepseekV2ForCausalLM"]), ("['DeepseekV2ForCausalLM']", "model_type = 'deepseek_v3'")),
        (raw(model_type="deepseek_v2"), ("['DeepseekV3ForCausalLM']", "model_type = 'deepseek_v2'", "DeepseekV2ForCausalLM")),
        (raw(model_type="kimi_k2", architectures=["DeepseekV2ForCausalLM"]), ("model_type = 'kimi_k2'", "DeepseekV3ForCausalLM")),
        (raw(first_k_dense_replace=62), ("first_k_dense_replace = 62", "num_hidden_layers (61)")),
        (raw(routed_scaling_factor=0), ("routed_scaling_factor = 0", "positive")),
        (raw(rope_interleave=False), ("rope_interleave = False", "only True")),
        (raw(quantization_config={"quant_method": "awq", "bits": 4}), ("quant_method = 'awq'", "original release")),
        (raw(quantization_config={"quant_method": "compressed-tensors"}), ("'compressed-tensors'",)),
        (raw(quantization_config={"quant_method": "fp8"}), ("weight_block_size", "per-tensor")),
        (raw(quantization_config={**raw()["quantization_config"], "weight_block_size": [64, 128]}), ("[64, 128]", "[128, 128]")),
        (raw(quantization_config={**raw()["quantization_config"], "fmt": "e5m2"}), ("fmt = 'e5m2'",)),
        (raw(quantization_config={**raw()["quantization_config"], "scale_fmt": "fp32"}), ("scale_fmt = 'fp32'",)),
        (raw(quantization_config={**raw()["quantization_config"], "activation_scheme": "static"}), ("'static'",)),
    ],
)
def test_faults_are_named(content, words):
    refuse(content, *words)


def test_what_looks_like_a_contradiction_and_is_none():
    """Kimi has both betas at 1; transformers writes the rotated width as head_dim, other software the whole one."""
    assert ModelConfig.from_json(yarn(beta_fast=1.0, beta_slow=1.0)).rope_scaling == RopeScaling(40, 4096, 1.0, 1.0, 1.0, 1.0)
    for change in ({"head_dim": 64}, {"head_dim": 192}, {"qk_head_dim": 192}, {"head_dim": None}, {"architectures": []},
                   {"architectures": None}, {"first_k_dense_replace": 61}, {"rope_interleave": True}):  # fmt: skip
        assert ModelConfig.from_json(raw(**change)).num_hidden_layers == 61
    assert ModelConfig.from_json(yarn(rope_type="yarn")).rope_scaling == YARN


def test_files_that_hold_no_config(tmp_path):
    for name, text in (("cut.json", '{"model_type": '), ("lfs.json", "version https://git-lfs.github.com/spec/v1\n"), ("empty.json", ""),
                       ("digits.json", f'{{"rope_theta": {"1" * 5000}}}')):  # fmt: skip
        (tmp_path / name).write_text(text)
        refuse(tmp_path / name, name, "not valid JSON")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    refuse(tmp_path / "bytes.json", "bytes.json", "not valid JSON")
    with pytest.raises(FileNotFoundError):
        ModelConfig.from_json(tmp_path / "none.json")


def test_faults_of_a_file_name_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw(n_group=7)))
    refuse(tmp_path / "config.json", "config.json", "n_group = 7")


def test_layers():
    config = ModelConfig.from_json(raw(moe_layer_freq=2))
    assert [i for i in range(62) if config.is_moe_layer(i)] == [*range(4, 61, 2), 61]
