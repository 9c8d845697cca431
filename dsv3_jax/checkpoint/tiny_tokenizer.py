"""A small byte-level BPE tokenizer with the special tokens and the chat template of a model's family."""

from __future__ import annotations

import json
import os

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from dsv3_jax.config import ModelConfig

_TEXT = """The harbour wakes before the town does, and the first boats leave while the lamps along the quay are still burning.
A river of experts: every token asks the router for a few of them, and the answers are added together again at the end.
What is the capital of France? Paris is the capital of France. What is the capital of Japan? Tokyo is the capital of Japan.
Write a short poem about the sea and the stars. Count from one to ten: 1 2 3 4 5 6 7 8 9 10. Numbers: 42, 1024, 3.14159, 2026.
def attention(query, latent_cache): return combine(weights(query, latent_cache), latent_cache)  # one head of many
for layer in layers: hidden = hidden + layer(normalize(hidden))  # the residual stream carries the sum of all layers
The cache keeps one short latent vector for each position, and keys and values are made from it when they are needed.
深度 学习 模型 会 思考 ， 专家 们 一起 回答 问题 。 你好 ， 世界 ！ ¿Qué hora es? Ça va très bien, merci. Grüße aus München. 😊
She said that the weather would change, that the wind would turn, and that nobody should take the small boat out alone.
Because the question was short, the answer was short as well; because the answer was right, nobody asked the question twice.
In the morning there was bread, there was butter, there was honey, and there were three kinds of cheese on the table.
"""
_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
# Special tokens before and after the text vocabulary.
_SPECIALS = {
    "v2": ([], [_BOS, _EOS]),
    "v3": ([_BOS, _EOS, "<｜▁pad▁｜>"], ["<｜User｜>", "<｜Assistant｜>", "<｜EOT｜>", "<think>", "</think>"]),
    "kimi": ([], ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"]),
}
_CHAT_V2 = """\
{{- bos_token -}}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{- 'User: ' ~ m.content ~ '\\n\\n' -}}
  {%- elif m.role == 'assistant' -%}{{- 'Assistant: ' ~ m.content ~ eos_token -}}
  {%- else -%}{{- m.content ~ '\\n\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"""
# OPEN is what follows <｜Assistant｜> before an answer: nothing for V3, the thinking switch for V3.1.
_CHAT_V3 = """\
{{- bos_token ~ (messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\\n\\n')) -}}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{- '<｜User｜>' ~ m.content -}}
  {%- elif m.role == 'assistant' -%}{{- '<｜Assistant｜>CLOSED' ~ m.content.split('</think>')[-1] ~ eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' -}}OPEN{%- endif -%}"""
_CHAT_KIMI = """\
{%- for m in messages -%}
  {{- ('<|im_user|>' if m.role == 'user' else '<|im_assistant|>') ~ m.role ~ '<|im_middle|>' ~ m.content ~ '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}"""


def build(path: str | os.PathLike, config: ModelConfig) -> None:
    """Write tokenizer.json and tokenizer_config.json for `config` into folder `path`.

    Models with ue8m0 scales get V3.1's template with its thinking switch, in a chat_template.jinja of its own as released;
    the other templates stand in tokenizer_config.json. Raises ValueError if the vocabulary cannot hold the 256 bytes and the
    special tokens, or if bos_token_id and eos_token_id do not stand where the family has them.
    """
    family = {"deepseek_v2": "v2", "kimi_k2": "kimi"}.get(config.model_type, "v3")
    head, tail = _SPECIALS[family]
    bos, eos = (head or tail)[:2]
    # V3 starts with its special tokens and pads the end; the others have text first and the special tokens at bos_token_id.
    text = config.vocab_size - 6 - len(tail) if family == "v3" else config.bos_token_id or 0
    if text < 256 + len(head) or text + len(tail) > config.vocab_size:
        raise ValueError(
            f"vocab_size = {config.vocab_size}, bos_token_id = {config.bos_token_id}: a {config.model_type} tokenizer needs room for "
            f"{len(head)} special tokens, 256 bytes and {len(tail)} special tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=text,
        special_tokens=[_special(s) for s in head],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    filler = [] if family == "v3" else [f"<｜place▁holder▁no▁{i}｜>" for i in range(text - tokenizer.get_vocab_size())]
    tokenizer.add_special_tokens([_special(s) for s in filler + tail])
    for key, token, want in (("bos_token_id", bos, config.bos_token_id), ("eos_token_id", eos, (config.eos_token_id or (None,))[0])):
        found = tokenizer.token_to_id(token)
        if found != want:
            raise ValueError(f"{key} = {want}: a {config.model_type} tokenizer of this size has {token} at {found}")
    if family != "kimi":
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.save(os.path.join(path, "tokenizer.json"))
    _write_config(path, config, family, bos, eos)


def _write_config(path: str | os.PathLike, config: ModelConfig, family: str, bos: str, eos: str) -> None:
    v31 = config.quantization_config is not None and config.quantization_config.scale_fmt == "ue8m0"
    template = {"v2": _CHAT_V2, "v3": _CHAT_V3, "kimi": _CHAT_KIMI}[family]
    thinking = "{%- if thinking is defined and thinking -%}{{- '<think>' -}}{%- else -%}{{- '</think>' -}}{%- endif -%}"
    template = template.replace("OPEN", thinking if v31 else "").replace("CLOSED", "</think>" if v31 else "")
    content = {
        "add_bos_token": family != "kimi", "add_eos_token": False, "bos_token": _as_json(bos), "eos_token": _as_json(eos),
        "clean_up_tokenization_spaces": False, "legacy": True, "model_max_length": 131072, "pad_token": _as_json(eos),
        "sp_model_kwargs": {}, "unk_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast" if family == "kimi" else "LlamaTokenizerFast",
    }  # fmt: skip
    if v31:
        with open(os.path.join(path, "chat_template.jinja"), "w", encoding="utf-8") as f:
            f.write(template)
    else:
        content["chat_template"] = template
    with open(os.path.join(path, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        json.dump(content, f, indent=2, ensure_ascii=False)


def _special(token: str) -> AddedToken:
    return AddedToken(token, special=True, normalized=False)


def _as_json(token: str) -> dict:
    return {"__type": "AddedToken", "content": token, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
