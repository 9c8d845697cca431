"""The maker of small checkpoints: what it writes is what other software reads, and the same bits everywhere."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import safetensors
import tokenizers
from transformers import PreTrainedTokenizerFast

from dsv3_jax.checkpoint import tiny
from tests.golden import load


@pytest.mark.parametrize("family", load.FAMILIES)
def test_golden_checkpoints_are_remade_bit_for_bit(family, tmp_path):
    load.checkpoint(family, tmp_path)


@pytest.mark.parametrize("family", ["v2lite", "v31_ue8m0", "kimi_k2_fp8"])
def test_the_safetensors_library_reads_it(family, golden_checkpoint):
    path = golden_checkpoint(family)
    index = json.loads(pathlib.Path(path, "model.safetensors.index.json").read_text())
    seen, size = {}, 0
    bytes_of = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
    for file in set(index["weight_map"].values()):
        with safetensors.safe_open(f"{path}/{file}", "numpy") as f:
            assert f.metadata() == {"format": "pt"}
            for name in f.keys():  # noqa: SIM118 (no mapping)
                part = f.get_slice(name)
                seen[name] = (file, part.get_dtype(), tuple(part.get_shape()))
                size += bytes_of[part.get_dtype()] * int(np.prod(part.get_shape()))
    assert {n: f for n, (f, _, _) in seen.items()} == index["weight_map"] and size == index["metadata"]["total_size"]
    assert len(set(index["weight_map"].values())) == 4
    config = load.info(family)["config"]
    if "quantization_config" in config:
        for name, (_, dtype, shape) in seen.items():
            if dtype == "F8_E4M3":
                scale = seen[name + "_scale_inv"]
                assert scale[1:] == ("F32", tuple(-(-n // 128) for n in shape)), name
        fp8 = [n for n in seen if n.endswith("_scale_inv")]
        assert any(seen[n][0] != seen[n.removesuffix("_scale_inv")][0] for n in fp8), "no scale lies in another shard than its weight"
        assert not [n for n in fp8 if "eh_proj" in n or "embed" in n or "head" in n or ".gate." in n or "norm" in n]
    mtp = f"model.layers.{config['num_hidden_layers']}."
    assert any(n.startswith(mtp) for n in seen) == bool(config.get("num_nextn_predict_layers"))


def test_a_checkpoint_depends_on_its_seed_alone(tmp_path):
    config = load.info("v3_fp8")["config"]
    for name, seed, shards in (("a", 1, 4), ("b", 1, 3), ("c", 2, 4), ("one", 1, 1)):
        tiny.make(tmp_path / name, config, seed, n_shards=shards)
    digests = {name: load.digest(str(tmp_path / name)) for name in ("a", "b", "c", "one")}
    assert digests["a"] == digests["b"] == digests["one"] != digests["c"]


def test_quantisation_of_weights_is_the_published_one():
    units = load.units()
    for name, fmt in (("f32", None), ("ue8m0", "ue8m0")):
        codes, scale = tiny.quantize_blocks(units["weight.x"], fmt)
        np.testing.assert_array_equal(codes.view(np.uint8), units[f"weight.codes_{name}"])
        np.testing.assert_array_equal(scale, units[f"weight.scale_{name}"])


def test_weights_are_normal(tmp_path):
    tiny.make(tmp_path / "m", load.info("v2lite")["config"], 0, dtype="float32", n_shards=1, tokenizer=False)
    with safetensors.safe_open(tmp_path / "m" / "model-00001-of-00001.safetensors", "numpy") as f:
        x = f.get_tensor("model.embed_tokens.weight").astype(np.float64).ravel()
        assert not np.array_equal(x, f.get_tensor("lm_head.weight").ravel())
    assert abs(x.mean()) < 0.03 and abs(x.std() - 1) < 0.02 and 2.6 < (x**4).mean() < 3.1


@pytest.mark.parametrize("family", load.chats())
def test_tokenizer_and_chat_template(family, golden_checkpoint):
    path = golden_checkpoint(family)
    raw = tokenizers.Tokenizer.from_file(f"{path}/tokenizer.json")
    config = load.info(family)["config"]
    assert raw.get_vocab_size() <= config["vocab_size"]
    for text in ("What is the capital of France?", "  two  spaces", "你好😊 größer\n\n42"):
        assert raw.decode(raw.encode(text, add_special_tokens=False).ids) == text
    fast = PreTrainedTokenizerFast.from_pretrained(path)
    assert (fast.bos_token_id, fast.eos_token_id) == (config["bos_token_id"], config["eos_token_id"])
    for chat in load.chats()[family]:
        assert fast.apply_chat_template(chat["messages"], add_generation_prompt=True, tokenize=False) == chat["text"]
        assert raw.encode(chat["text"], add_special_tokens=False).ids == chat["ids"]


def test_v31_has_a_thinking_switch(golden_checkpoint):
    fast = PreTrainedTokenizerFast.from_pretrained(golden_checkpoint("v31_ue8m0"))
    message = [{"role": "user", "content": "Hi"}]
    ends = [fast.apply_chat_template(message, add_generation_prompt=True, tokenize=False, thinking=t)[-18:] for t in (False, True)]
    assert ends[0].endswith("</think>") and ends[1].endswith("<think>")


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"vocab_size": 200}, {}, "vocab_size = 200"),
        ({"eos_token_id": 5}, {}, "eos_token_id = 5"),
        ({"n_group": 7}, {}, "n_group = 7"),
        ({}, {"dtype": "int8"}, "dtype = 'int8'"),
        ({}, {"n_shards": 0}, "n_shards = 0"),
    ],
)
def test_what_cannot_be_made_is_said(change, options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        tiny.make(tmp_path, {**load.info("v3")["config"], **change}, 0, **options)


def test_script(tmp_path):
    def run(*flags):
        return subprocess.run([sys.executable, "-m", "dsv3_jax.scripts.make_tiny_checkpoint", *flags], capture_output=True, text=True)

    done = run(f"--save_path={tmp_path / 'x'}", "--num_shards=2", "--seed=0")
    assert done.returncode == 0 and "knows nothing" in done.stdout, done.stderr
    assert load.digest(str(tmp_path / "x")) == load.info("tiny")["sha256"], "the demo's checkpoint is the one with golden answers"
    again = run(f"--save_path={tmp_path / 'x'}")
    assert again.returncode == 2 and "not empty" in again.stderr and "Traceback" not in again.stderr
    missing = run(f"--save_path={tmp_path / 'y'}", "--config=no/such.json")
    assert missing.returncode == 2 and "no/such.json" in missing.stderr and not (tmp_path / "y").exists()
