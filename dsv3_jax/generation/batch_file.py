"""Many prompts from a text file, their completions on the screen and, one JSON object a line, in a file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from dsv3_jax.generation.chat import Prompt
from dsv3_jax.generation.text_stream import Clock, Figures, TextStream, for_screen

# Characters that JSON leaves as they are and some readers (Python's splitlines) take for the end of a line.
_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}


@dataclasses.dataclass(frozen=True)
class Line:
    """One prompt of a prompt file: its index among the prompts (from 0), its line in the file (from 1) and its text."""

    index: int
    line: int
    text: str


def read_prompts(path: str) -> tuple[list[Line], int]:
    """Return the prompts of a UTF-8 text file, one a line, and how many blank lines were skipped.

    Only line feeds (and a carriage return before them) end a line; the text in between is kept as it is. Raises ValueError for a
    file that is not UTF-8 (naming the line) or holds no prompt, OSError if it cannot be read.
    """
    with open(path, "rb") as f:
        data = f.read().removeprefix(b"\xef\xbb\xbf")
    prompts, blank = [], 0
    ends_open = data.rpartition(b"\n")[2]  # what follows the last line feed is a line only if it is not empty
    lines = data.split(b"\n") if ends_open else data.split(b"\n")[:-1]
    for number, raw in enumerate(lines, start=1):
        try:
            text = raw.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as e:
            raise ValueError(f"{path}: line {number} is not UTF-8 (byte {e.start + 1} of the line); convert the file to UTF-8") from e
        if text.strip():
            prompts.append(Line(len(prompts), number, text))
        else:
            blank += 1
    if not prompts:
        raise ValueError(f"{path}: holds no prompt ({blank} blank lines); write one prompt a line")
    return prompts, blank


def check_output(path: str) -> None:
    """Raise ValueError if `path` cannot become a new results file: it holds something already, or its folder cannot be written."""
    if os.path.isdir(path):
        raise ValueError(f"--output_file={path}: is a folder; name a file")
    if os.path.exists(path) and os.path.getsize(path) > 0:
        raise ValueError(f"--output_file={path}: exists and holds results; name another file or remove it")
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise ValueError(f"--output_file={path}: the folder {folder} does not exist; make it first")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(f"--output_file={path}: cannot be written; name a file in a folder that you may write")


def run(
    lines: Sequence[Line],
    engine: Any,
    encode: Callable[[str], Prompt],
    new_stream: Callable[[], TextStream],
    sampling: Sequence[Any],
    figures: Figures,
    **options: Any,
) -> Iterator[dict]:
    """Generate for each line, max_batch_size at a time, and yield one record a line in the order of the file.

    A record is {"index", "line", "prompt", "completion", "finish_reason", "prompt_tokens", "completion_tokens"}, or, for a prompt that
    cannot be run (too long, refused by the template), {"index", "line", "prompt", "error"}; the others go on. sampling[i] belongs to
    lines[i]; `options` go to Engine.generate.
    """
    for start in range(0, len(lines), engine.max_batch_size):
        group = lines[start : start + engine.max_batch_size]
        records: list[dict] = [{"index": x.index, "line": x.line, "prompt": x.text} for x in group]
        ready: list[tuple[int, Prompt, TextStream]] = []
        for i, x in enumerate(group):
            try:
                prompt = encode(x.text)
                engine.check_prompt(prompt.tokens)
                ready.append((i, prompt, new_stream()))
            except ValueError as e:
                records[i]["error"] = str(e).removeprefix("prompt: ")
        if ready:
            clock = Clock()
            completions = _generate(engine, ready, [sampling[start + i] for i, _, _ in ready], clock, options)
            figures.add(clock, [c.time_to_first_token for c in completions])
            for (i, prompt, stream), completion in zip(ready, completions, strict=True):
                stream.close()
                records[i] |= {
                    "completion": prompt.opening + stream.text,
                    "finish_reason": "stop" if stream.stopped else completion.finish_reason,
                    "prompt_tokens": completion.prompt_tokens,
                    "completion_tokens": len(completion.tokens),
                }
        yield from records


def _generate(engine: Any, ready: Sequence[tuple[int, Prompt, TextStream]], sampling: list, clock: Clock, options: dict) -> list:
    def on_token(i: int, token: int) -> bool:
        clock.tick(i)
        stream = ready[i][2]
        stream.push(token)
        return stream.stopped

    return engine.generate([prompt.tokens for _, prompt, _ in ready], sampling, on_token=on_token, **options)


def show(record: dict, max_seq_len: int) -> None:
    """Print a record as the reference demo does: Prompt, Completion (or Error), an empty line; an answer that was cut says by what."""
    prompt = record["prompt"]
    if "error" in record:
        shown = prompt if len(prompt) <= 100 else f"{prompt[:80]}... ({len(prompt)} characters)"
        lines = [f"Prompt: {shown}", f"Error: {record['error']}"]
    else:
        lines = [f"Prompt: {prompt}", f"Completion: {record['completion']}"]
        if record["finish_reason"] == "length":
            full = record["prompt_tokens"] + record["completion_tokens"] >= max_seq_len
            lines.append(f"(cut at {'max_seq_len' if full else 'max_new_tokens'})")
    print(for_screen("\n".join(lines)), end="\n\n", flush=True)


def write(record: dict, file: TextIO) -> None:
    """Append a record to a JSON Lines file and hand it to the system at once, so that a crash loses nothing finished."""
    file.write(json.dumps(record, ensure_ascii=False).translate(_LINE_ENDS) + "\n")
    file.flush()
