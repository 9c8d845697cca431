"""Which tokens end an answer: read from a checkpoint folder in this one place, without JAX and without loading a tokenizer."""

from __future__ import annotations

import json
import os

from dsv3_jax.config import ModelConfig

_REMEDY = "take the file from the release that the weights come from"


def stop_token_ids(ckpt_path: str | os.PathLike, config: ModelConfig) -> tuple[int, ...]:
    """Return the ids that end an answer, without repetition, in the order in which they are found.

    First those of generation_config.json, or config.eos_token_id where it names none; then the tokenizer's own eos_token, which a
    config in the reference's vocabulary does not know. Files that are missing name nothing. Raises ValueError, with the file, the
    value and the remedy, for a file that is damaged, an id that is no integer or outside vocab_size, and an unknown eos_token.
    """
    path = os.path.expanduser(os.fspath(ckpt_path))
    return tuple(dict.fromkeys((*declared_ids(path, config), *_tokenizers_id(path, config))))


def declared_ids(ckpt_path: str | os.PathLike, config: ModelConfig) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, or config.eos_token_id where it names none; raises as above."""
    file = os.path.join(os.fspath(ckpt_path), "generation_config.json")
    value = read_json(file).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if type(i) is not int:  # true is no id, and neither are 1.0 and "1"
            raise ValueError(f"{file}: eos_token_id = {value!r}: must be an integer or a list of integers; {_REMEDY}")
        _check_range(i, config, f"{file}: eos_token_id = {value!r}")
    return tuple(ids) or config.eos_token_id


def token_text(settings: dict, name: str, file: str) -> str | None:
    """Return the text of a special token in a parsed tokenizer_config.json: plain, or {"content": ...}; None where there is none."""
    token = settings.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise ValueError(f'{file}: {name} = {token!r}: must be a string or an object with a "content"; {_REMEDY}')
    return text


def read_json(file: str) -> dict:
    """Return the JSON object in a file, {} if there is no such file; ValueError, naming the file, for anything else in it."""
    if not os.path.exists(file):
        return {}
    try:
        with open(file, encoding="utf-8") as f:
            value = json.load(f)
    except UnicodeDecodeError as e:
        raise ValueError(f"{file}: not UTF-8 ({e}); fetch the file again") from e
    except json.JSONDecodeError as e:
        raise ValueError(f"{file}: not valid JSON ({e}); fetch the file again, it may be a Git-LFS pointer or cut short") from e
    if not isinstance(value, dict):
        raise ValueError(f"{file}: must hold a JSON object, holds {type(value).__name__}; {_REMEDY}")
    return value


def _tokenizers_id(path: str, config: ModelConfig) -> tuple[int, ...]:
    settings, file = os.path.join(path, "tokenizer_config.json"), os.path.join(path, "tokenizer.json")
    text = token_text(read_json(settings), "eos_token", settings)
    if text is None or not os.path.exists(file):
        return ()
    tokenizer = read_json(file)
    try:
        ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
        found = ids[text] if text in ids else tokenizer["model"]["vocab"].get(text)
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{file}: not a byte-level BPE tokenizer ({type(e).__name__}: {e}); {_REMEDY}") from e
    if found is None:
        raise ValueError(f"{settings}: eos_token = {text!r} is not in tokenizer.json; take both from one release")
    if type(found) is not int:
        raise ValueError(f"{file}: the id of {text!r} is {found!r}: must be an integer; {_REMEDY}")
    _check_range(found, config, f"{file}: the id of {text!r} is {found}")
    return (found,)


def _check_range(token: int, config: ModelConfig, what: str) -> None:
    if not 0 <= token < config.vocab_size:
        raise ValueError(f"{what}: must lie in the vocabulary (vocab_size {config.vocab_size}); {_REMEDY}")
