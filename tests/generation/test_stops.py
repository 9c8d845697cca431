"""Which tokens end an answer, against the ids that a checkpoint's files name in plain sight."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from dsv3_jax.config import ModelConfig
from dsv3_jax.generation.stops import stop_token_ids

GOLDEN = Path(__file__).parent / "golden_chat"
EOS = "<｜end▁of▁sentence｜>"  # id 1 of this tokenizer, id 311 is <｜EOT｜>


@pytest.fixture
def folder(tmp_path):
    """A copy of V3's files to spoil."""
    return shutil.copytree(GOLDEN / "v3", tmp_path / "v3")


@pytest.fixture
def config(folder):
    return ModelConfig.from_json(folder / "config.json")


def generation(folder: Path, value: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))


@pytest.mark.parametrize(("family", "text"), [("v3", EOS), ("v2lite", EOS), ("kimi_k2", "[EOS]")])
def test_the_golden_files(family, text):
    tokenizer = tokenizers.Tokenizer.from_file(str(GOLDEN / family / "tokenizer.json"))
    wanted = (tokenizer.token_to_id(text),)
    assert stop_token_ids(GOLDEN / family, ModelConfig.from_json(GOLDEN / family / "config.json")) == wanted


def test_kimi_k2_as_published(tmp_path):
    """It ends a turn with <|im_end|>, which generation_config.json names, and a document with [EOS], the tokenizer's eos_token."""
    folder = shutil.copytree(GOLDEN / "kimi_k2", tmp_path / "kimi")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    turn, document = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("[EOS]")
    generation(folder, turn)
    assert stop_token_ids(folder, ModelConfig.from_json(folder / "config.json")) == (turn, document)


@pytest.mark.parametrize(("value", "ids"), [
    (311, (311, 1)), ([311], (311, 1)), ([311, 1], (311, 1)), ([1, 311, 1], (1, 311)), ([], (5, 1)), (None, (5, 1)), (319, (319, 1)),
])  # fmt: skip
def test_generation_config_comes_first_and_config_json_where_it_names_none(folder, config, value, ids):
    generation(folder, value)
    assert stop_token_ids(folder, dataclasses.replace(config, eos_token_id=(5,))) == ids
    assert stop_token_ids(str(folder), dataclasses.replace(config, eos_token_id=(5,))) == ids


def test_missing_files_name_nothing(folder, config):
    silent = dataclasses.replace(config, eos_token_id=())  # a config in the reference's vocabulary
    (folder / "generation_config.json").unlink()
    assert stop_token_ids(folder, silent) == (1,)
    (folder / "tokenizer.json").unlink()
    assert stop_token_ids(folder, silent) == ()
    (folder / "tokenizer_config.json").unlink()
    assert stop_token_ids(folder, silent) == () and stop_token_ids(folder, config) == (1,)


@pytest.mark.parametrize("eos_token", [EOS, {"content": EOS, "__type": "AddedToken"}, "P", None])
def test_the_tokenizers_own_end(folder, config, eos_token):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    generation(folder, 311)
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    name = eos_token["content"] if isinstance(eos_token, dict) else eos_token
    assert stop_token_ids(folder, config) == ((311,) if name is None else (311, own.token_to_id(name)))


@pytest.mark.parametrize("value", ["12", 1.0, True, [1, "2"], [[1]], {"id": 1}, [None], -1, 320, [1, 320]])
def test_ids_that_are_none(folder, config, value):
    generation(folder, value)
    with pytest.raises(ValueError) as caught:
        stop_token_ids(folder, config)
    message = str(caught.value)
    assert message.startswith(f"{folder}/generation_config.json: eos_token_id = {value!r}: must ") and "; take the file from" in message


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize(("content", "fault"), [
    (b"{", "not valid JSON"), (b"version https://git-lfs.github.com/spec/v1", "Git-LFS"), (b"[1]", "holds list"),
    (b'{"a": "\xff"}', "not UTF-8"),
])  # fmt: skip
def test_damaged_files_are_named(folder, config, name, content, fault):
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=fault) as caught:
        stop_token_ids(folder, config)
    assert str(caught.value).startswith(f"{folder}/{name}: ")


@pytest.mark.parametrize(("settings", "tokenizer", "fault"), [
    ({"eos_token": "<end>"}, {}, r"tokenizer_config.json: eos_token = '<end>' is not in tokenizer.json; take both from one release"),
    ({"eos_token": 1}, {}, r"tokenizer_config.json: eos_token = 1: must be a string or an object"),
    ({"eos_token": {"content": 1}}, {}, r"tokenizer_config.json: eos_token = .* must be a string or an object"),
    ({}, {"added_tokens": [{"id": 1}]}, r"tokenizer.json: not a byte-level BPE tokenizer"),
    ({}, {"added_tokens": None, "model": None}, r"tokenizer.json: not a byte-level BPE tokenizer"),
    ({}, {"added_tokens": [{"id": "1", "content": EOS}]}, r"tokenizer.json: the id of .* is '1': must be an integer"),
    ({}, {"added_tokens": [{"id": 320, "content": EOS}]}, r"tokenizer.json: the id of .* is 320: must lie in .* \(vocab_size 320\)"),
])  # fmt: skip
def test_a_tokenizer_that_does_not_fit(folder, config, settings, tokenizer, fault):
    for name, changes in (("tokenizer_config.json", settings), ("tokenizer.json", tokenizer)):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text("utf-8")) | changes))
    with pytest.raises(ValueError, match=fault):
        stop_token_ids(folder, config)


def test_needs_no_jax():
    code = "import sys, dsv3_jax.generation.stops; print(sorted({'jax', 'tokenizers', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
