"""Several processes that share one GPU: each compiles for itself, and a lock lets one at a time measure.

Outside the lock a process launches each kernel once, which has the driver compile it; medians bear that.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection
from typing import Any

# Yields a row for each item of a unit, from the item `skip` on; a row whose "fatal" is true says that the process is of no more use.
Work = Callable[[Any, int, contextlib.AbstractContextManager], Iterator[dict]]
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the card's memory is shared
    # XLA would time its own GEMMs, which only check results here, while another process measures.
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
}
MOST_DEATHS = 20
PATIENCE_S = 90  # with one item, after which its process is taken for dead


def default_processes() -> int:
    return max(1, min(8, (os.cpu_count() or 1) // 2))


def run(work: Work, units: Iterable[Any], processes: int, deadline: float | None = None) -> Iterator[tuple[Any, dict]]:
    """Give units to processes one by one; yields (unit, row) as rows come. 0 processes: here, without any other.

    deadline: a time.monotonic() after which nothing more is waited for. A unit whose process died goes on behind the item that
    killed it, for which a row {"error": ...} is made.
    """
    if not processes:
        yield from _here(work, units, deadline)
        return
    waiting, workers = deque((unit, 0) for unit in units), []
    died = 0  # processes, one after the other, without a result in between
    with tempfile.NamedTemporaryFile(prefix="dsv3_gpu_") as file:
        try:
            while waiting or any(w.unit is not None for w in workers):
                if deadline is not None and time.monotonic() > deadline:
                    return
                workers += [_Worker(work, file.name) for _ in range(min(processes - len(workers), len(waiting)))]
                for worker in workers:
                    if worker.unit is None and waiting:
                        worker.give(*waiting.popleft())
                connection.wait([w.pipe for w in workers if w.unit is not None], timeout=1)
                for worker in list(workers):
                    unit = worker.unit
                    rows, alive = worker.rows()
                    yield from ((unit, row) for row in rows)
                    died = 0 if any("error" not in row for row in rows) else died + (not alive)
                    if died > MOST_DEATHS:
                        raise RuntimeError(f"{died} processes died, one after the other: {rows[-1]['error'] if rows else 'without work'}")
                    if not alive:
                        workers.remove(worker)
                        worker.kill()
                        for other in workers:
                            other.since = time.monotonic()  # it may have waited for the one that hung
                        if worker.unit is not None:
                            waiting.appendleft((unit, worker.done))
        finally:
            for worker in workers:
                worker.kill()


def _here(work: Work, units: Iterable[Any], deadline: float | None) -> Iterator[tuple[Any, dict]]:
    for unit in units:
        for row in work(unit, 0, contextlib.nullcontext()):
            yield unit, row
            if deadline is not None and time.monotonic() > deadline:
                return


class _Worker:
    """A process with at most one unit; `done` counts the rows that it has made of it, those of earlier processes included."""

    def __init__(self, work: Work, lock: str):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.unit, self.done, self.since = None, 0, time.monotonic()
        with _environment():
            self._process = context.Process(target=_serve, args=(work, theirs, lock), daemon=True)
            self._process.start()
        theirs.close()

    def give(self, unit, skip: int) -> None:
        self.unit, self.done, self.since = unit, skip, time.monotonic()
        with contextlib.suppress(OSError):  # a process that has died is seen when its rows are read
            self.pipe.send((unit, skip))

    def rows(self) -> tuple[list[dict], bool]:
        """The rows that have come, and whether the process can go on; one that cannot leaves a row for the item that it was at."""
        rows = []
        try:
            while self.pipe.poll():
                row = self.pipe.recv()
                if row is None:
                    self.unit = None
                    continue
                self.done, self.since = self.done + 1, time.monotonic()
                rows.append(row)
                if row.get("fatal"):
                    return rows, False
        except (EOFError, OSError):
            return self._give_up(rows, "the process died")
        if self.unit is not None and time.monotonic() - self.since > PATIENCE_S:
            return self._give_up(rows, f"no result in {PATIENCE_S} s")
        return rows, True

    def _give_up(self, rows: list[dict], why: str) -> tuple[list[dict], bool]:
        if self.unit is not None:
            self.done += 1
            rows.append({"error": why})
        return rows, False

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _serve(work: Work, pipe, lock: str) -> None:
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            unit, skip = pipe.recv()
            for row in work(unit, skip, FileLock(lock)):
                pipe.send(row)
            pipe.send(None)


class FileLock(contextlib.AbstractContextManager):
    """A lock between processes, which a process that dies gives back."""

    def __init__(self, path: str):
        self._file = open(path, "a")  # noqa: SIM115

    def __enter__(self):
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *exception):
        fcntl.flock(self._file, fcntl.LOCK_UN)


@contextlib.contextmanager
def _environment():
    """What a process must find when it starts; the user's own XLA_FLAGS come last and win."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    for name, value in ENVIRONMENT.items():
        os.environ[name] = " ".join(filter(None, [value, before[name] or ""])) if name == "XLA_FLAGS" else before[name] or value
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def attempt(measured: Callable[[], dict]) -> dict:
    """What `measured` returns, or {"error": ..., "fatal": whether the GPU may be of no more use to this process}."""
    import jax

    try:
        return measured()
    except Exception as e:
        text = " ".join(str(e).split())
        return {"error": f"{type(e).__name__}: {text[:300]}", "fatal": isinstance(e, jax.errors.JaxRuntimeError)}


def need_gpu(what: str) -> None:
    """Raise ValueError where there is no GPU for `what`; takes none of its memory, which the processes will need."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if jax.default_backend() != "gpu":
        raise ValueError(f"{what} needs a GPU, and none is here; see the README for `make cuda`")


def progress(began: float, text: str) -> None:
    """A line on standard error with the seconds since `began`, a time.monotonic()."""
    print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)
