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
from typing import Any

from absl import app, flags, logging

from dsv3_jax import cluster, distributed

_HELP = ("--help", "-help", "-h", "--helpshort", "-helpshort")


def run(main: Callable[[list[str]], int | None]) -> None:
    """Parse the absl flags, call main(argv) and exit with what it returns (None means 0), reporting users' mistakes in one line.

    ValueError and OSError (a file that is missing, not readable, a disk that is full) become `error: ...` on standard error and exit
    code 2, as does a flag that is unknown or holds a wrong value; --verbosity=1 adds the traceback. Ctrl-C exits with 130 and a closed
    pipe with 141, without a traceback. Any other exception is a fault of ours and keeps its traceback. `--help` shows the docstring
    and the flags of main's own module, whether it runs as a script or as a console command. Of several processes all end together.
    """

    def guarded(argv: list[str]) -> int | None:
        code, word, fault = 1, "", None
        try:
            code, word = attempt(argv)
            return code
        except BrokenPipeError:
            code = 141
            raise
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 1
            raise
        except BaseException as e:
            fault = e
            raise
        finally:
            distributed.leave(code or 0, word, fault)

    def attempt(argv: list[str]) -> tuple[int | None, str]:
        try:
            if len(argv) > 1:
                raise ValueError(f"unexpected argument {argv[1]!r}: write --flag=value, and quote values that hold spaces; see --help")
            code = main(argv)
            sys.stdout.flush()
            return code, ""
        except BrokenPipeError:
            raise  # dealt with below, as for --help
        except (ValueError, OSError) as e:
            if logging.get_verbosity() >= logging.DEBUG:
                traceback.print_exc()
            return _fail(text := distributed.one_line(e)), text
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130, "interrupted"

    def parse(argv: list[str]) -> list[str]:
        given = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
        if any(a in _HELP for a in given):
            print(usage(main), flush=True)
            sys.exit(0)
        try:
            return flags.FLAGS(argv)
        except flags.Error as e:
            sys.exit(_fail(f"{_flag_errors(distributed.one_line(e))}; see --help"))

    for name in ("jax", "orbax"):  # which backends are not there, and the like: of interest when something is wrong
        stdlib_logging.getLogger(name).setLevel(stdlib_logging.WARNING)
    try:
        app.run(guarded, flags_parser=parse)
    except BrokenPipeError:  # e.g. `| head`: the reader left, and nobody is there to read a message
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
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
    stem = os.path.splitext(os.path.basename(inspect.getfile(main)))[0]
    lines += ["", f"dsv3-{stem.replace('_', '-')} lies in .venv/bin after `make setup`; python scripts/{stem}.py is the same."]
    return "\n".join(lines)


def process_flags(module: str) -> Callable[[], None]:
    """Define the flags about several processes for the script `module` (its __name__); returns what finds the others, for main to call."""
    of: dict[str, Any] = {"module_name": sys.argv[0] if module == "__main__" else module}  # where --help shows a script its own
    address = flags.DEFINE_string(
        "coordinator_address", None, "HOST:PORT of process 0, for runs of several processes; the next port is used too. Left out: what "
        "SLURM, mpirun or torchrun say, if one of them runs this.", **of,
    )  # fmt: skip
    count = flags.DEFINE_integer("num_processes", None, "How many processes take part; 1 ignores SLURM and the like.", lower_bound=1, **of)
    number = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0. Process 0 reads and prints.", lower_bound=0, **of)
    ids = flags.DEFINE_string("local_device_ids", None, "GPUs of this host that this process takes, such as 0,1; left out, all.", **of)
    timeout = flags.DEFINE_float("init_timeout_s", distributed.INIT_TIMEOUT_S, "Seconds to wait for the others.", lower_bound=1, **of)

    def join() -> None:
        found = cluster.from_flags(os.environ, address.value, count.value, number.value, ids.value)
        distributed.join(found, timeout.value)

    return join


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
    if not distributed.process() and (not jax.distributed.is_initialized() or jax.process_index() == 0):
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)


class LogNotes(stdlib_logging.Handler):
    """Shows, through `note`, what the package logs: warnings at once, and what ran in one line each time that `say` is called.

    The kernels log a line an op, at the moment in which it is first compiled: in the midst of an answer, most of them.
    """

    def __init__(self, logger: str = "dsv3_jax"):
        super().__init__(stdlib_logging.INFO)
        self._kernels: dict[str, list[str]] = {}  # implementation -> ops
        self._others: list[str] = []
        log = stdlib_logging.getLogger(logger)
        log.addHandler(self)
        log.setLevel(stdlib_logging.INFO)
        log.propagate = False  # absl's handler would show warnings a second time, and in every process

    def emit(self, record: stdlib_logging.LogRecord) -> None:
        message = record.getMessage()
        op, is_kernel, implementation = message.partition(" runs on ")
        if record.levelno >= stdlib_logging.WARNING:
            note(f"{record.levelname.lower()}: {message}")
        elif is_kernel:
            self._kernels.setdefault(implementation, []).append(op)
        else:
            self._others.append(message)

    def say(self) -> None:
        """Print what has come since the last call, if anything: `kernels: attend, grouped_gemm on xla`."""
        kernels = "; ".join(f"{', '.join(ops)} on {implementation}" for implementation, ops in self._kernels.items())
        for line in ([f"kernels: {kernels}"] if kernels else []) + self._others:
            note(line)
        self._kernels.clear()
        self._others.clear()


def _flag_errors(text: str) -> str:
    """absl's lines about wrong flags as one, and the flags that are missing in one clause."""
    missing, others = [], []
    for line in text.splitlines():
        found = re.fullmatch(r"flag (--\w+)=None: Flag .* must have a value other than None\.", line)
        missing.append(found[1]) if found else others.append(line.removesuffix("."))
    if missing:
        named = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        others.append(f"{named} {'is' if len(missing) == 1 else 'are'} required")
    return "; ".join(others)


def _fail(message: str) -> int:
    sys.stdout.flush()
    print(f"{distributed.prefix()}error: {message}", file=sys.stderr)
    return 2


def numbers(flag: str, text: str) -> list[int]:
    """Read '1,32'; raises ValueError for anything but positive integers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(p.isascii() and p.isdigit() and 0 < int(p) < 2**31 for p in parts):
        raise ValueError(f"--{flag}={text}: must be positive integers, such as 1,32")
    return [int(p) for p in parts]
