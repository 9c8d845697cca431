"""Tokenizer, chat templates and the checks at start, against answers made without this project (golden_chat/README.md)."""

from __future__ import annotations

import base64
import dataclasses
import json
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import tokenizers
import transformers
from transformers.convert_slow_tokenizer import TikTokenConverter

from dsv3_jax.config import ModelConfig
from dsv3_jax.generation.chat import THINK_TAGS, ChatTokenizer, sizes_match
from dsv3_jax.generation.text_stream import byte_alphabet

GOLDEN = Path(__file__).parent / "golden_chat"
FAMILIES = ("v3", "v2lite", "kimi_k2")
BOS, USER, ASSISTANT, EOS = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
# DeepSeek-V3.1's switch and R1's opening, cut down to what decides the first token of the answer.
V31 = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}"
    "{{ '<｜Assistant｜></think>' + m.content.split('</think>', 1)[-1] + eos_token }}{% endif %}{% endfor %}"
    "{{ '<｜Assistant｜>' }}{% if thinking %}{{ '<think>' }}{% else %}{{ '</think>' }}{% endif %}"
)
R1 = "{{ bos_token }}{% for m in messages %}{{ '<｜User｜>' + m.content }}{% endfor %}{{ '<｜Assistant｜><think>\\n' }}"
HELLO = [{"role": "user", "content": "Hello  there"}]


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.from_json(folder / "config.json")


def load(folder: Path) -> ChatTokenizer:
    return ChatTokenizer(folder, config_of(folder))


@pytest.fixture
def folder(tmp_path):
    """A copy of V3's files to spoil."""
    return shutil.copytree(GOLDEN / "v3", tmp_path / "v3")


def edit(file: Path, **changes) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(file.read_text("utf-8")) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}), "utf-8")


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_become_the_golden_ids(family):
    chat = load(GOLDEN / family)
    for golden in json.loads((GOLDEN / family / "chat.json").read_text("utf-8")):
        prompt = chat.chat(golden["messages"])
        assert prompt.tokens == golden["ids"]
        assert all(type(t) is int for t in prompt.tokens)
        assert prompt.opening == ""


def test_ids_are_a_list_whatever_transformers_makes_of_tokenize(monkeypatch):
    """transformers#41626: apply_chat_template(tokenize=True) gave a list of ids up to version 4 and gives a mapping since 5."""
    own, calls = transformers.PreTrainedTokenizerFast.apply_chat_template, []

    def spy(self, *args, **kwargs):
        calls.append(kwargs)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "apply_chat_template", spy)
    chat = load(GOLDEN / "v3")
    [golden, *_] = json.loads((GOLDEN / "v3" / "chat.json").read_text("utf-8"))
    tokens = chat.chat(golden["messages"]).tokens
    assert type(tokens) is list and all(type(t) is int for t in tokens) and tokens == golden["ids"]
    assert calls and all(c["tokenize"] is False for c in calls)
    assert isinstance(own(chat._renderer, golden["messages"], tokenize=True), Mapping)  # what the code would have to unpack


@pytest.mark.parametrize("given", [{"input_ids": [0, 309, 57], "attention_mask": [1, 1, 1]}, [0, 309, 57]])
def test_anything_but_text_from_a_template_is_never_taken_for_text(monkeypatch, given):
    chat = load(GOLDEN / "v3")
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "apply_chat_template", lambda self, *args, **kwargs: given)
    with pytest.raises(TypeError, match=rf"gave a {type(given).__name__} where a str is documented"):
        chat.chat(HELLO)


@pytest.mark.parametrize("in_template", [True, False])
@pytest.mark.parametrize("in_post_processor", [True, False])
@pytest.mark.parametrize("add_bos_token", [True, False, None])
def test_exactly_one_bos_whoever_adds_it(folder, in_template, in_post_processor, add_bos_token):
    template = V31 if in_template else V31.replace("{{ bos_token }}", "")
    edit(folder / "tokenizer_config.json", chat_template=template, add_bos_token=add_bos_token)
    if not in_post_processor:
        edit(folder / "tokenizer.json", post_processor=None)
    chat = load(folder)
    wanted = in_template or in_post_processor or add_bos_token is not False  # LlamaTokenizerFast adds it unless told otherwise
    assert chat.chat(HELLO).tokens.count(0) == wanted
    assert chat.raw("Hello").tokens.count(0) == wanted
    assert chat.raw(f"{BOS}{BOS}Hello").tokens.count(0) == 1
    assert chat.raw("Hello").tokens[wanted:] == chat.raw(f"{BOS}Hello").tokens[1:]


def test_kimi_has_no_bos_as_published():
    assert 314 not in load(GOLDEN / "kimi_k2").raw("Hello").tokens


@pytest.mark.parametrize(("template", "thinking", "end", "opening"), [
    (V31, False, f"{ASSISTANT}</think>", ""),
    (V31, True, f"{ASSISTANT}<think>", "<think>"),
    (R1, False, f"{ASSISTANT}<think>\n", "<think>\n"),
])  # fmt: skip
def test_an_opened_think_block_is_part_of_the_answer(folder, template, thinking, end, opening):
    (folder / "chat_template.jinja").write_text(template, "utf-8")  # wins over the one in tokenizer_config.json
    chat = load(folder)
    prompt = chat.chat(HELLO, thinking)
    text = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).decode(prompt.tokens, skip_special_tokens=False)
    assert text == f"{BOS}{USER}Hello  there{end}"
    assert prompt.opening == opening
    assert chat.has_thinking == (template == V31)


def test_thinking_is_dropped_from_history_by_the_template(folder):
    (folder / "chat_template.jinja").write_text(V31, "utf-8")
    history = [*HELLO, {"role": "assistant", "content": "<think>hm</think>Hi."}, {"role": "user", "content": "More"}]
    tokens = load(folder).chat(history).tokens
    text = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens, skip_special_tokens=False)
    assert text == f"{BOS}{USER}Hello  there{ASSISTANT}</think>Hi.{EOS}{USER}More{ASSISTANT}</think>"


def test_template_in_a_list_of_named_ones(folder):
    template = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))["chat_template"]
    expected = load(folder).chat(HELLO)
    edit(folder / "tokenizer_config.json", chat_template=[{"name": "tools", "template": "x"}, {"name": "default", "template": template}])
    assert load(folder).chat(HELLO) == expected


def test_special_tokens_may_be_plain_strings(folder):
    expected = load(folder).chat(HELLO)
    edit(folder / "tokenizer_config.json", bos_token=BOS, eos_token=EOS)
    assert load(folder).chat(HELLO) == expected


def test_no_template(folder):
    edit(folder / "tokenizer_config.json", chat_template=None)
    chat = load(folder)
    assert not chat.has_template and not chat.has_thinking
    assert chat.raw("Hi").tokens[0] == 0
    with pytest.raises(ValueError, match="no chat template"):
        chat.chat(HELLO)


def test_a_template_that_refuses_says_why(folder):
    refuse = "{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}{{ bos_token }}x"
    edit(folder / "tokenizer_config.json", chat_template=refuse)
    with pytest.raises(ValueError, match=r"chat template fails.*roles must alternate"):
        load(folder).chat(HELLO * 2)
    edit(folder / "tokenizer_config.json", chat_template="{% if %}")
    with pytest.raises(ValueError, match="chat template fails"):
        load(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_text_is_what_the_tokenizers_own_decoder_gives(family):
    """Random ids: invalid UTF-8, special tokens, think tags and ids of the padded vocabulary included."""
    chat, config = load(GOLDEN / family), config_of(GOLDEN / family)
    own = tokenizers.Tokenizer.from_file(str(GOLDEN / family / "tokenizer.json"))
    hidden = {i for i, t in own.get_added_tokens_decoder().items() if t.content not in THINK_TAGS}
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(config.vocab_size) for _ in range(40)]
        stream = chat.stream()
        text = "".join(stream.push(i) for i in ids) + stream.close()
        assert text == own.decode([i for i in ids if i not in hidden], skip_special_tokens=False)


def test_think_tags_are_shown_and_other_special_tokens_are_not():
    stream = load(GOLDEN / "v3").stream()
    own = tokenizers.Tokenizer.from_file(str(GOLDEN / "v3" / "tokenizer.json"))
    ids = own.encode(f"{USER}<think>a  b</think>c{EOS}", add_special_tokens=False).ids
    assert "".join(stream.push(i) for i in [*ids, 319]) + stream.close() == "<think>a  b</think>c"


@pytest.mark.parametrize(("tokens", "vocab_size", "match"), [
    (100002, 102400, True), (100015, 102400, True),  # V2-Lite, V2
    (128815, 129280, True),  # V3, R1, V3.1
    (163840, 163840, True), (163600, 163840, True),  # Kimi K2 with and without its reserved tokens
    (314, 320, True), (285, 288, True),
    (100015, 129280, False), (128815, 102400, False), (128815, 163840, False), (163840, 129280, False), (321, 320, False), (0, 320, False),
])  # fmt: skip
def test_which_sizes_belong_together(tokens, vocab_size, match):
    assert sizes_match(tokens, vocab_size) == match


def test_tokenizer_of_another_model(folder):
    config = config_of(folder)
    with pytest.raises(ValueError, match=r"has 314 tokens, the model's vocab_size is 1280"):
        ChatTokenizer(folder, dataclasses.replace(config, vocab_size=1280))
    with pytest.raises(ValueError, match=r"has 314 tokens, the model's vocab_size is 300"):
        ChatTokenizer(folder, dataclasses.replace(config, vocab_size=300))
    with pytest.raises(ValueError, match=r"bos_token_id 0 is '!' here, no special token"):  # V2's tokenizer, V3's config, equal sizes
        ChatTokenizer(GOLDEN / "v2lite", config)
    with pytest.raises(ValueError, match=r"bos_token is 0 in the tokenizer and 2 in the config"):
        ChatTokenizer(folder, dataclasses.replace(config, bos_token_id=2))
    edit(folder / "generation_config.json", eos_token_id=[1, 50])
    with pytest.raises(ValueError, match=r"eos_token_id 50 is 'P' here"):
        load(folder)
    edit(folder / "generation_config.json", eos_token_id="1")
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id = '1': must be"):
        load(folder)


def test_several_ends_need_not_agree(folder):
    edit(folder / "generation_config.json", eos_token_id=[1, 311])  # 311 is <｜EOT｜>
    assert ChatTokenizer(folder, dataclasses.replace(config_of(folder), eos_token_id=(311,))).eos_token_id == 1


@pytest.mark.parametrize("spoiled", [
    {"pre_tokenizer": {"type": "WhitespaceSplit"}},  # swallows spaces, as transformers 5 did to this family
    {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
    {"normalizer": {"type": "NFKC"}},  # '，' becomes ','
])  # fmt: skip
def test_a_tokenizer_that_changes_text_is_refused(folder, spoiled):
    edit(folder / "tokenizer.json", **spoiled)
    with pytest.raises(ValueError, match="does not give a text back"):
        load(folder)


def test_truncation_left_in_the_file_is_ignored(folder):
    expected = load(folder).raw("Hello " * 50)
    edit(folder / "tokenizer.json", truncation={"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0})
    assert load(folder).raw("Hello " * 50) == expected and len(expected.tokens) > 50


def test_missing_and_damaged_files(folder):
    (folder / "tokenizer_config.json").write_text("{", "utf-8")
    with pytest.raises(ValueError, match=r"tokenizer_config.json: not valid JSON"):
        load(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    with pytest.raises(ValueError, match=r"bos_token = '<s>' is not in tokenizer.json"):
        load(folder)
    (folder / "tokenizer_config.json").unlink()
    assert load(folder).raw("Hi").tokens[0] == 0  # BOS from the config and the post-processor
    edit(folder / "tokenizer.json", decoder={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True})
    with pytest.raises(ValueError, match="decoder is Metaspace"):
        load(folder)
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n")
    with pytest.raises(ValueError, match=r"tokenizer.json: not a tokenizer .*Git-LFS"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.json; put [^.]*.json and [^.]*.json there$"):
        load(folder)


def test_a_folder_with_tiktoken_only_says_what_works(tmp_path, monkeypatch):
    """Kimi-K2 and Moonlight are published like this. The call that the message names is made, and its result gives the golden ids."""
    folder = shutil.copytree(GOLDEN / "kimi_k2", tmp_path / "kimi")
    own = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    alphabet, special = byte_alphabet(), {t["id"]: t["content"] for t in own["added_tokens"]}
    ranks = {bytes(alphabet[c] for c in t): i for t, i in own["model"]["vocab"].items() if i not in special}
    assert sorted(ranks.values()) == list(range(len(ranks)))
    (folder / "tiktoken.model").write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), i) for t, i in ranks.items()))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json") as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message and "--raw" in message and "pip install tiktoken" in message and "pat_str" in message
    [call] = re.findall(r"TikTokenConverter\('.*\.save\('tokenizer.json'\)", message)
    assert "pattern=P, extra_special_tokens=S" in call  # the default pattern gives other ids, and no error

    def read(file):  # as tiktoken.load.load_tiktoken_bpe, which would be one more package for one test
        return {base64.b64decode(t): int(i) for t, i in map(bytes.split, Path(file).read_bytes().splitlines())}

    monkeypatch.setattr(TikTokenConverter, "load_tiktoken_bpe", staticmethod(read))
    monkeypatch.chdir(folder)
    pattern = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # this tokenizer's: digits alone, then GPT-2's
    names = [special.get(i, f"<|reserved_token_{i}|>") for i in range(len(ranks), max(special) + 1)]
    eval(call, {"TikTokenConverter": TikTokenConverter, "P": pattern, "S": names})
    for golden in json.loads((GOLDEN / "kimi_k2" / "chat.json").read_text("utf-8")):
        assert load(folder).chat(golden["messages"]).tokens == golden["ids"]
