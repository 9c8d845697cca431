"""Text in: a checkpoint's tokenizer and chat template, checked against the model before any device is touched."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from dsv3_jax.config import ModelConfig
from dsv3_jax.generation.stops import declared_ids, read_json, token_text
from dsv3_jax.generation.text_stream import TextStream, byte_alphabet

THINK_TAGS = ("<think>", "</think>")  # shown to the reader even where a tokenizer calls them special
# What tokenizers have broken before: runs of spaces, line ends, tabs, scripts without spaces, characters of four bytes.
ROUND_TRIP = "  two  spaces,\n\n\tdef f(x):\n        return x[1:10]  # 你好，世界 ¿Qué? 😊👩‍🚀 "


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What the model is given (token ids), and the text with which the template has already opened the answer ('<think>' or '')."""

    tokens: list[int]
    opening: str = ""


class ChatTokenizer:
    """The tokenizer of a checkpoint folder: conversations and raw text to token ids, and token ids back to text.

    Reads tokenizer.json, tokenizer_config.json, chat_template.jinja (or the template in tokenizer_config.json) and
    generation_config.json from folder `path`. Raises ValueError, naming the file and the remedy, when they are missing, damaged,
    belong to another model than `config`, or do not give a text back as it was.

    Every prompt begins with exactly one BOS token, whether the template, the post-processor or add_bos_token asks for it, or with
    none where all three leave it out, as Kimi K2 does on purpose.
    """

    def __init__(self, path: str | os.PathLike, config: ModelConfig):
        self.path = os.fspath(path)
        self._tokenizer = _load(self.path)
        self._settings = read_json(os.path.join(self.path, "tokenizer_config.json"))
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._alphabet = byte_alphabet()
        self.bos_token_id = self._special("bos_token")
        self.eos_token_id = self._special("eos_token")
        self._check_vocabulary(config)
        self._check_special_ids(config)
        if self.bos_token_id is None:
            self.bos_token_id = config.bos_token_id
        self._check_round_trip()
        self._template = self._find_template()
        self._wants_bos = self._find_bos()
        self._template_has_thinking = bool(self._template) and self._render(_PROBE, True) != self._render(_PROBE, False)

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template; a base model has none."""
        return self._template is not None

    @property
    def has_thinking(self) -> bool:
        """Whether the chat template has a `thinking` switch, as DeepSeek-V3.1's does."""
        return self._template_has_thinking

    def chat(self, messages: Sequence[Mapping[str, str]], thinking: bool = False) -> Prompt:
        """Return the prompt for a conversation of {"role", "content"} messages; ValueError if the template refuses it."""
        text = self._render(messages, thinking)
        opened = re.search(r"<think>\s*$", text)
        return Prompt(self._encode(text), opened.group() if opened else "")

    def raw(self, text: str) -> Prompt:
        """Return the prompt for a text that the model is to continue as it stands, without a chat template."""
        return Prompt(self._encode(text))

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """Return a new TextStream for one answer: special tokens left out except <think> and </think>, ended by any stop string."""
        return TextStream(self.token_bytes, stop)

    @functools.cache  # noqa: B019 (one tokenizer lives as long as the program)
    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for: none for special tokens (except think tags) and ids of the padded vocabulary."""
        added = self._added.get(token)
        if added is not None:
            return b"" if added.special and added.content not in THINK_TAGS else added.content.encode()
        text = self._tokenizer.id_to_token(token) or ""
        if all(c in self._alphabet for c in text):
            return bytes(self._alphabet[c] for c in text)
        return text.encode()  # as the ByteLevel decoder does with a token that is not written in its alphabet

    def _encode(self, text: str) -> list[int]:
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self.bos_token_id is None:
            return tokens
        start = 0
        while start < len(tokens) and tokens[start] == self.bos_token_id:
            start += 1
        return [self.bos_token_id] * (start > 0 or self._wants_bos) + tokens[start:]

    def _render(self, messages: Sequence[Mapping[str, str]], thinking: bool) -> str:
        if self._template is None:
            raise ValueError(f"{self.path}: has no chat template; use raw prompts (--raw)")
        switches: dict[str, Any] = {"thinking": True} if thinking else {}
        try:
            # Text, not ids: what tokenize=True returns has changed between versions of transformers (ids, then a mapping).
            text = self._renderer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True, **switches)
        except Exception as e:  # a template is a program from elsewhere: whatever it raises is about the template or the messages
            raise ValueError(f"{self.path}: the chat template fails on this conversation: {e}") from e
        if not isinstance(text, str):
            raise TypeError(f"apply_chat_template(tokenize=False) of transformers gave a {type(text).__name__} where a str is documented")
        return text

    @functools.cached_property
    def _renderer(self):
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # or it says that PyTorch is missing
        from transformers import PreTrainedTokenizerFast  # seconds to import, needed for chat only

        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: self._content(name) for name in names}
        present = {name: text for name, text in special.items() if text is not None and self._tokenizer.token_to_id(text) is not None}
        return PreTrainedTokenizerFast(tokenizer_object=self._tokenizer, chat_template=self._template, **present)

    def _content(self, name: str) -> str | None:
        return token_text(self._settings, name, os.path.join(self.path, "tokenizer_config.json"))

    def _special(self, name: str) -> int | None:
        text = self._content(name)
        if text is None:
            return None
        token = self._tokenizer.token_to_id(text)
        if token is None:
            raise ValueError(f"{self.path}/tokenizer_config.json: {name} = {text!r} is not in tokenizer.json; take both from one release")
        return token

    def _find_template(self) -> str | None:
        path = os.path.join(self.path, "chat_template.jinja")
        if os.path.exists(path):
            return _read_text(path)
        template = self._settings.get("chat_template")
        if isinstance(template, list):  # several by name
            template = next((t.get("template") for t in template if t.get("name") == "default"), None)
        return template or None

    def _find_bos(self) -> bool:
        """Whether a prompt begins with BOS: stated, or what the class, the post-processor or the template implies."""
        if self.bos_token_id is None:
            return False
        stated = self._settings.get("add_bos_token")
        if stated is None:
            stated = str(self._settings.get("tokenizer_class")).startswith("Llama")  # these add it unless told otherwise
        processed = self._tokenizer.encode("", add_special_tokens=True).ids[:1] == [self.bos_token_id]
        bos = self._tokenizer.id_to_token(self.bos_token_id) or ""
        return bool(stated or processed or (self._template and bos and self._render(_PROBE, False).startswith(bos)))

    def _check_vocabulary(self, config: ModelConfig) -> None:
        size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if not sizes_match(size, config.vocab_size):
            raise ValueError(
                f"{self.path}/tokenizer.json: has {size} tokens, the model's vocab_size is {config.vocab_size}: they belong to different "
                "models; take the tokenizer files from the release that the weights come from"
            )

    def _check_special_ids(self, config: ModelConfig) -> None:
        remedy = "take the tokenizer files from the release that the weights come from"
        bos, eos = config.bos_token_id, (*config.eos_token_id, *declared_ids(self.path, config))
        for name, tokens in (("bos_token_id", () if bos is None else (bos,)), ("eos_token_id", eos)):
            for token in tokens:
                if token not in self._added:
                    found = f"{name} {token} is {self._tokenizer.id_to_token(token)!r} here"
                    raise ValueError(f"{self.path}/tokenizer.json: the model's {found}, no special token; {remedy}")
        if bos is not None and self.bos_token_id not in (None, bos):
            # eos_token may differ: chat releases name [EOS] in one file and the end of a turn in another.
            raise ValueError(f"{self.path}: bos_token is {self.bos_token_id} in the tokenizer and {bos} in the config; {remedy}")

    def _check_round_trip(self) -> None:
        stream = self.stream()
        tokens = self._tokenizer.encode(ROUND_TRIP, add_special_tokens=False).ids
        back = "".join(stream.push(t) for t in tokens) + stream.close()
        if back != ROUND_TRIP:
            at = next((i for i, (a, b) in enumerate(zip(ROUND_TRIP, back, strict=False)) if a != b), min(len(back), len(ROUND_TRIP)))
            raise ValueError(
                f"{self.path}/tokenizer.json: does not give a text back: {ROUND_TRIP[at : at + 12]!r} became {back[at : at + 12]!r}; "
                "some tools rewrite this file when they save it: take the one of the original release"
            )


_PROBE = ({"role": "user", "content": "x"},)


def sizes_match(tokens: int, vocab_size: int) -> bool:
    """Whether a tokenizer of so many tokens can belong to a model with vocab_size rows, some of them padding.

    Published pairs: V2 100,002 to 100,015 tokens for 102,400 rows, V3 128,815 for 129,280, Kimi K2 163,840 or a few less for 163,840.
    Past 5 % of padding (or 256 rows, for tiny models) the tokenizer is another model's.
    """
    return 0 <= vocab_size - tokens <= max(vocab_size // 20, 256)


# Kimi-K2 and Moonlight publish their tokenizer in this form only. The pattern has to be named: the converter's default splits
# otherwise (Chinese, upper case), which gives other ids and no error, and so does AutoTokenizer, which uses that default.
_TIKTOKEN = (
    ". tiktoken.model is not enough, not even with --raw: it lacks the special tokens and the rule by which text is split. Take "
    "tokenizer.json from a repository of the same model that has one, or make it once, in this folder, after pip install tiktoken: "
    "TikTokenConverter('tiktoken.model', pattern=P, extra_special_tokens=S).converted().save('tokenizer.json'), with TikTokenConverter "
    "from transformers.convert_slow_tokenizer, P the pat_str in the release's tokenization_*.py (not the default pattern), and S the "
    "list of its special tokens by id, from the first id after those in tiktoken.model: added_tokens_decoder of tokenizer_config.json, "
    "any id that it skips filled with '<|reserved_token_ID|>'"
)


def _load(path: str) -> tokenizers.Tokenizer:
    file = os.path.join(path, "tokenizer.json")
    if not os.path.exists(file):
        hint = _TIKTOKEN if os.path.exists(os.path.join(path, "tiktoken.model")) else ""
        raise ValueError(f"{path}: has no tokenizer.json; put the model's tokenizer.json and tokenizer_config.json there{hint}")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(file)
    except Exception as e:  # the library raises plain Exception
        raise ValueError(f"{file}: not a tokenizer ({e}); fetch the file again, it may be a Git-LFS pointer or cut short") from e
    if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel):
        raise ValueError(f"{file}: its decoder is {type(tokenizer.decoder).__name__}; this family has byte-level BPE (ByteLevel)")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not UTF-8 ({e}); fetch the file again") from e
