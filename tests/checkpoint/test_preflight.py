"""Every fault that people's folders have, with the words that must be said; nothing may be written before they are."""

import json
import os
import shutil
import types

import hf_folder
import numpy as np
import pytest

from dsv3_jax.checkpoint import convert as convert_module
from dsv3_jax.checkpoint import preflight, source, store
from dsv3_jax.checkpoint.convert import convert

DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"
Q_A = "model.layers.0.self_attn.q_a_proj.weight"


def refused(folder, *words, save=None, **options) -> str:
    """Convert, which must be refused with all these words and leave nothing behind; returns the message."""
    save = save or folder.parent / "out"
    before = sorted(os.listdir(save.parent)) if save.parent.is_dir() else None
    with pytest.raises(ValueError) as e:
        convert(str(folder), str(save), **options)
    for word in words:
        assert word in str(e.value)
    assert before is None or sorted(os.listdir(save.parent)) == before
    return str(e.value)


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def test_all_broken_files_are_listed_at_once(v3):
    first, second, third, _ = shards(v3)
    size = second.stat().st_size
    first.unlink()
    os.truncate(second, size - 100)
    third.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    said = f"{second.name}: truncated: {size - 100:,} bytes, its header describes {size:,}"
    message = refused(v3, first.name, said, f"{third.name}: a Git-LFS pointer")
    assert "tensors that are missing" not in message  # they follow from the shards


def test_index_and_headers_disagree(v3):
    index = json.loads((v3 / hf_folder.INDEX).read_text())
    moved, here = index["weight_map"], shards(v3)
    wrong = next(s.name for s in here if s.name != moved[Q_A])
    right, moved[Q_A] = moved[Q_A], wrong
    unnamed = "model.norm.weight"
    del moved[unnamed]
    (v3 / hf_folder.INDEX).write_text(json.dumps(index))
    refused(v3, f"{Q_A} not in {wrong}, it is in {right}", f"tensors that the index does not name:\n    {unnamed}")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": "../x.safetensors"}}', "version https://git-lfs"])
def test_broken_index(v3, text):
    (v3 / hf_folder.INDEX).write_text(text)
    refused(v3, hf_folder.INDEX, "not a safetensors index")


def test_missing_unknown_and_misshapen_tensors_at_once(v3):
    dtype, shape, data = hf_folder.read(v3)[Q_A]
    turned = {Q_A: (dtype, shape[::-1], data)}
    hf_folder.edit(v3, {DOWN: None, DOWN + "_scale_inv": None, "model.layers.0.surprise": ("BF16", [2], bytes(4)), **turned})
    words = "model.layers.0.surprise BF16 [2], 4 bytes", f"{Q_A} is [256, 128], expected [128, 256]", "3 faults"
    refused(v3, "tensors that are missing", DOWN, *words)


def test_many_faults_of_a_kind_are_counted(v3):
    names = [n for n in hf_folder.read(v3) if "experts" in n and "shared" not in n and n.startswith("model.layers.1.")]
    hf_folder.edit(v3, {n: None for n in names})
    refused(v3, "tensors that are missing (24)", "... and 16 more")


def test_inv_freq_buffers_are_ignored(v2):
    hf_folder.edit(v2, {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [8], bytes(32))})
    preflight.inspect(v2)


def test_scale_may_be_in_any_shard(v3):
    where = json.loads((v3 / hf_folder.INDEX).read_text())["weight_map"]
    assert any(where[n] != where[n + "_scale_inv"] for n in where if n + "_scale_inv" in where)
    preflight.inspect(v3)


def test_fp8_weight_without_its_scale(v3):
    hf_folder.edit(v3, {DOWN + "_scale_inv": None})
    refused(v3, "FP8 weights without their scales", DOWN, "has no weight_scale_inv")


def test_scale_without_its_weight(v3):
    hf_folder.edit(v3, {DOWN: None})
    refused(v3, "tensors that are missing", DOWN)
    name = "model.layers.0.input_layernorm.weight_scale_inv"
    hf_folder.edit(v3, {DOWN: None, name: ("F32", [1], bytes(4))})
    refused(v3, "scales without an FP8 weight", f"{name} (its weight is BF16)")


def cast_to_bf16(folder):
    tensors = hf_folder.read(folder)
    fp8 = [n for n, t in tensors.items() if t[0] == "F8_E4M3"]
    hf_folder.edit(folder, {n: ("BF16", tensors[n][1], bytes(2 * len(tensors[n][2]))) for n in fp8} | {n + "_scale_inv": None for n in fp8})


def test_config_says_fp8_and_weights_are_bf16(v3):
    cast_to_bf16(v3)
    refused(v3, "quantization_config", f"{Q_A} is BF16", "remove quantization_config from config.json")
    hf_folder.set_config(v3, remove=("quantization_config",))
    preflight.inspect(v3)


def test_one_weight_is_bf16_among_fp8(v3):
    """By type and not by element size: one byte an element is not FP8."""
    shape, data = hf_folder.read(v3)[DOWN][1:]
    hf_folder.edit(v3, {DOWN: ("BF16", shape, data * 2)})
    refused(v3, f"{DOWN} is BF16, expected F8_E4M3")
    hf_folder.edit(v3, {DOWN: ("I8", shape, data)})
    refused(v3, f"{DOWN} is I8, expected F8_E4M3")
    hf_folder.edit(v3, {DOWN: ("F8_E5M2", shape, data)})
    refused(v3, f"{DOWN} is F8_E5M2, expected F8_E4M3")


def test_quantization_config_was_deleted(v3):
    """The tensors are trusted: FP8 with scales is block-scaled, and the saved config says so."""
    hf_folder.set_config(v3, remove=("quantization_config",))
    found = preflight.inspect(v3)
    assert found.config.quantization_config is not None
    assert any("no quantization_config" in n and "FP8" in n for n in found.notes)
    convert(str(v3), str(v3.parent / "out"))
    assert json.loads((v3.parent / "out" / "config.json").read_text())["quantization_config"] == hf_folder.FP8
    hf_folder.edit(v3, {DOWN + "_scale_inv": None})
    refused(v3, "FP8 weights without their scales", DOWN, save=v3.parent / "out2")


@pytest.mark.parametrize(
    ("method", "suffix", "dtype", "named"),
    [
        ("awq", "qweight", "I32", "AWQ"), ("gptq", "g_idx", "I32", "GPTQ"),
        ("compressed-tensors", "weight_packed", "I32", "compressed-tensors"),
        ("int8", "weight_scale", "F32", "compressed-tensors or ModelOpt"), (None, "qzeros", "I32", "AWQ or GPTQ"),
        ("bitsandbytes", "weight.absmax", "F32", "bitsandbytes"),
    ],
)  # fmt: skip
def test_foreign_quantisation(v2, method, suffix, dtype, named):
    name = f"model.layers.0.mlp.up_proj.{suffix}"
    hf_folder.edit(v2, {name: (dtype, [4], bytes(16)), "model.layers.0.mlp.up_proj.weight": None})
    if method:
        hf_folder.set_config(v2, quantization_config={"quant_method": method, "bits": 4})
    words = [f"tensor {name} belongs to", named, "fetch the original release"] + ([repr(method)] if method else [])
    assert "tensors that are missing" not in refused(v2, *words)


def test_v32_indexer(v3):
    name = "model.layers.0.self_attn.indexer.wk.weight"
    hf_folder.edit(v3, {name: ("BF16", [2, 2], bytes(8))})
    refused(v3, "DeepSeek-V3.2's sparse-attention indexer", "not supported", name)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [("qwen2", "R1-Distill"), ("llama", "R1-Distill"), ("deepseek_v32", "indexer"), ("deepseek_vl_v2", "vision-language")],
)
def test_other_families_before_any_weight_is_opened(v2, model_type, words):
    hf_folder.set_config(v2, model_type=model_type)
    for shard in shards(v2):
        shard.write_bytes(b"never opened")
    refused(v2, f"model_type = {model_type!r}", "supported are deepseek_v2, deepseek_v3, kimi_k2", words)


def test_correction_bias_that_the_config_denies(v3):
    hf_folder.set_config(v3, topk_method="group_limited_greedy")
    refused(v3, "router biases, but topk_method is 'group_limited_greedy'", "e_score_correction_bias")


def test_mtp_layers_by_index(v3):
    """Layer num_hidden_layers and up is MTP, whatever its number."""
    hf_folder.set_config(v3, num_nextn_predict_layers=0)
    refused(v3, "tensors of layer 2, but config.json has num_hidden_layers 2 and num_nextn_predict_layers 0", "--skip_mtp")
    kept = preflight.inspect(v3, skip_mtp=True)
    size = sum(len(t[2]) for n, t in hf_folder.read(v3).items() if n.startswith("model.layers.2."))
    assert any(f"{size:,} bytes" in n and "layers 2 and up" in n for n in kept.notes)


def test_mtp_dropped_upstream(v3):
    hf_folder.edit(v3, {n: None for n in hf_folder.read(v3) if n.startswith("model.layers.2.")})
    found = preflight.inspect(v3)
    assert found.mtp == "none" and len([n for n in found.notes if n.startswith("warning: ") and "num_nextn_predict_layers 1" in n]) == 1
    convert(str(v3), str(v3.parent / "out"))
    assert store.read_config(v3.parent / "out").num_nextn_predict_layers == 0


def test_mtp_partly_there(v3):
    hf_folder.edit(v3, {"model.layers.2.eh_proj.weight": None})
    refused(v3, "model.layers.2.eh_proj.weight (MTP; --skip_mtp converts without it)")
    preflight.inspect(v3, skip_mtp=True)


def test_single_file_without_an_index(v2):
    hf_folder.write_shard(v2 / "model.safetensors", hf_folder.read(v2))
    for path in [v2 / hf_folder.INDEX, *v2.glob("model-*.safetensors")]:
        path.unlink()
    assert len(preflight.inspect(v2).folder.shards) == 1


def test_several_shards_without_an_index(v2):
    (v2 / hf_folder.INDEX).unlink()
    refused(v2, "several shards and no model.safetensors.index.json", "fetch it")


def test_tokenizer_that_is_an_lfs_pointer(v2):
    (v2 / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(v2, "Git-LFS pointers", "tokenizer.json")


def test_files_beside_the_weights_that_are_broken(v2):
    """One fault each, together with those of the weights; config.json has its own."""
    (v2 / "generation_config.json").write_text("{")
    (v2 / "tokenizer.json").write_text((v2 / "tokenizer.json").read_text()[:-10])
    (v2 / "tokenizer_config.json").write_text("[]")
    (v2 / "special_tokens_map.json").write_bytes(b"\xff\xfe")
    (v2 / "chat_template.jinja").write_text("{% not JSON, and need not be %}")
    hf_folder.edit(v2, {DOWN: None})
    message = refused(v2, "broken (4)", "generation_config.json: not valid JSON", "tokenizer.json: not valid JSON", DOWN,
                      "tokenizer_config.json: must hold a JSON object, holds list", "special_tokens_map.json: not valid JSON")  # fmt: skip
    assert "5 faults" in message and "chat_template" not in message


def test_other_folders(tmp_path, v2, v2_converted):
    refused(v2_converted, "made by convert.py, not a Hugging Face folder", f"generate.py --ckpt_path={v2_converted}", save=tmp_path / "out")
    refused(v2_converted / "params", "an Orbax checkpoint", save=tmp_path / "out")
    refused(tmp_path / "nowhere", "does not exist")
    (folder := tmp_path / "odd").mkdir()
    refused(folder, "holds no *.safetensors")
    (folder / "model.gguf").touch()
    refused(folder, "GGUF")
    shutil.copy(next(iter(shards(v2))), folder / "model0-mp8.safetensors")
    refused(folder, "split for the reference demo")
    os.rename(folder / "model0-mp8.safetensors", folder / "model.safetensors")
    refused(folder, "holds no config.json")


def test_a_hugging_face_folder_given_as_a_checkpoint(v2, v2_converted, tmp_path):
    with pytest.raises(ValueError, match=f"a Hugging Face folder.*convert.py --hf_ckpt_path={v2}"):
        store.read_config(v2)
    with pytest.raises(ValueError, match="does not exist"):
        store.read_config(tmp_path / "nowhere")
    shutil.copytree(v2_converted, copy := tmp_path / "copy")
    marker = json.loads((copy / "dsv3_jax.json").read_text())
    (copy / "dsv3_jax.json").write_text(json.dumps(marker | {"complete": False}))
    with pytest.raises(ValueError, match="not finished; run the same"):
        store.read_config(copy)
    (copy / "dsv3_jax.json").write_text(json.dumps(marker | {"format": 99}))
    with pytest.raises(ValueError, match="format = 99"):
        store.read_config(copy)
    os.rename(copy, tmp_path / "new.converting")
    with pytest.raises(ValueError, match="not finished; run the same"):
        store.read_config(tmp_path / "new")


def test_target(v2, monkeypatch):
    (taken := v2.parent / "taken").mkdir()
    (taken / "file").touch()
    refused(v2, "exists already", save=taken)
    refused(v2, "lies inside the source", save=v2 / "out")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1_000_000))
    refused(v2, "1.0 MB free on that disk", save=v2.parent / "a" / "b")


def test_budget_too_small(v2):
    refused(v2, "max_host_memory_gb = 0.001", max_host_memory_gb=0.001)
    for value in (float("nan"), float("inf"), -float("inf"), 1e300):
        refused(v2, f"max_host_memory_gb = {value}: must lie between 0.05 and", max_host_memory_gb=value)


def test_budget_that_allows_no_worker_is_refused_before_anything_is_written(v2, monkeypatch):
    monkeypatch.setattr(convert_module, "_COPIES", 10**6)
    refused(v2, "max_host_memory_gb = 4: ", "raise the budget")


def test_sizes_in_words():
    assert [source.human(n) for n in (999, 1500, 688_574_839_360, 2e12)] == ["999 bytes", "1.5 kB", "688.6 GB", "2.00 TB"]


def test_bias_in_bf16_is_widened(v3, tmp_path):
    """Some casts of a release store the router's bias in bf16: it is float32 from the file on."""
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    values = np.frombuffer(hf_folder.read(v3)[name][2], np.float32)
    hf_folder.edit(v3, {name: ("BF16", [8], (values.view(np.uint32) >> 16).astype(np.uint16).tobytes())})
    found = preflight.inspect(v3)
    assert found.dtype(found.targets["layers.1.mlp.gate.e_score_correction_bias"]) == "float32"


@pytest.mark.parametrize("value", ["fp8", [], {"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": [64, 64]}])
def test_quantization_config_that_is_none(v3, value):
    hf_folder.set_config(v3, quantization_config=value)
    refused(v3, "config.json", "quantization_config")
