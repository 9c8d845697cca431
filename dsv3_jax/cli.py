"""What every script shares: how main() is started, how users' mistakes are reported, how --help looks, how paths are read."""

from __future__ import annotations

import inspect
import logging as stdlib_logging
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable

from absl import app, flags, logging

_HELP = ("--help", "-help", "-h", "--helpshort", "-helpshort")


def run(main: Callable[[list[str]], int | None]) -> None:
    """Parse the absl flags, call main(argv) and exit with what it returns (None means 0), reporting users' mistakes in one line.

    ValueError and OSError (a file that is missing, not readable, a disk that is full) become `error: ...` on standard error and exit
    code 2, as does a flag that is unknown or holds a wrong value; --verbosity=1 adds the traceback. Ctrl-C exits with 130 and a closed
    pipe with 141, without a traceback. Any other exception is a fault of ours and keeps its traceback. `--help` shows the docstring
    and the flags of main's own module, whether it runs as a script or as a console command.
    """

    def guarded(argv: list[str]) -> int | None:
        try:
            if len(argv) > 1:
                raise ValueError(f"unexpected argument {argv[1]!r}: write --flag=value, and quote values that hold spaces; see --help")
            code = main(argv)
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # e.g. `| head`: the reader left, and nobody is there to read a message
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except (ValueError, OSError) as e:
            if logging.get_verbosity() >= logging.DEBUG:
                traceback.print_exc()
            return _fail(_one_line(e))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130

    def parse(argv: list[str]) -> list[str]:
        given = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
        if any(a in _HELP for a in given):
            print(usage(main))
            sys.exit(0)
        try:
            return flags.FLAGS(argv)
        except flags.Error as e:
            message = re.sub(r"^flag --(\w+)=None: Flag .* must have a value other than None\.$", r"--\1 is required", _one_line(e))
            sys.exit(_fail(f"{message.removesuffix('.')}; see --help"))

    for name in ("jax", "orbax"):  # which backends are not there, and the like: of interest when something is wrong
        stdlib_logging.getLogger(name).setLevel(stdlib_logging.WARNING)
    try:
        app.run(guarded, flags_parser=parse)
    except KeyboardInterrupt:  # outside main
        sys.exit(130)


def usage(main: Callable) -> str:
    """Return the text of --help: the docstring of main's module, then its flags in the order in which they are defined."""
    module = inspect.getmodule(main)
    name = sys.argv[0] if main.__module__ == "__main__" else main.__module__
    lines = [inspect.cleandoc((module and module.__doc__) or ""), "", "Flags:"]
    for flag in flags.FLAGS.flags_by_module_dict().get(name, []):
        text = re.sub(r"^<.*?>: |; repeat this option.*", "", " ".join((flag.help or "").split()))  # absl's own additions
        default = "" if flag.default in (None, "", []) or flag.boolean else f" (default {flag.default})"
        values = getattr(flag.parser, "enum_values", None)
        value = "" if flag.boolean else "=" + ("|".join(values) if values else flag.name.rsplit("_", 1)[-1].upper())
        lines.append(f"  --{flag.name}{value}")
        lines += textwrap.wrap(text + default, 108, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def resolve(path: str | os.PathLike | None, flag: str = "path") -> str:
    """Return `path` absolute, with `~` expanded; ValueError that names `flag` when it is empty."""
    text = "" if path is None else os.fspath(path)
    if not text.strip():
        raise ValueError(f"--{flag} is empty: give a path")
    return os.path.abspath(os.path.expanduser(text))


def note(text: str) -> None:
    """Print a line about the run (settings, warnings, figures) on standard error, in process 0 only."""
    import jax  # late: most checks need no JAX

    # Asking for the process index starts the devices, which one process alone need not do yet.
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)


def _fail(message: str) -> int:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    return 2


def _one_line(e: BaseException) -> str:
    if isinstance(e, OSError) and e.strerror:
        return f"{e.filename}: {e.strerror}" if e.filename is not None else e.strerror
    return str(e).strip() or type(e).__name__
