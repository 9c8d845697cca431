"""A few threads that take jobs from one iterator: file reads, numpy and tensorstore all leave the interpreter's lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait


def each[Job](jobs: Iterator[Job], do: Callable[[Job], None], workers: int) -> None:
    """Call `do` for every job, `workers` at a time; the first error, or Ctrl-C, ends all after their current job and is raised."""
    take, stop = threading.Lock(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with take:
                job = next(jobs, None)
            if job is None:
                return
            do(job)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work) for _ in range(workers)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
        for future in futures:
            future.result()
